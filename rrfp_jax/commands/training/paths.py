"""Paths in a configuration: the fields that hold them, the meaning of ``~``, and the form in which they are saved.

``~`` is the home of the user who starts the run, expanded when the configuration is read. A run saves whole paths, so
that it can be exported, sampled and evaluated from any folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WORDS = ("bytes", "train")
"""Words that may stand in place of a tokenizer's file."""
_PATHS: dict[str, tuple[str, ...]] = {
    "data": ("path", "image_folder", "tokenizer", "cache"),
    "run": ("init_from",),
}
"""Fields, by section, that are saved as whole paths."""
_AT_HOME: dict[str, tuple[str, ...]] = {
    **_PATHS,
    "run": ("init_from", "run_dir"),
    "pipeline": ("schedule", "hint"),
}
"""Fields, by section, in which ``~`` stands for somebody's home."""


def at_home(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a section with ``~`` expanded; raises ValueError if a ``~`` names nobody's folder."""
    return {
        name: _each(value, lambda path, name=name: _expanded(f"{section}.{name}", path))
        if name in _AT_HOME.get(section, ())
        else value
        for name, value in values.items()
    }


def whole_paths(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a configuration, as plain data, with whole paths."""
    saved = {section: _whole(section, values) for section, values in config.items()}
    sets = (saved.get("evaluation") or {}).get("sets")
    if sets:
        whole = {name: _whole("data", differences) for name, differences in sets.items()}
        saved["evaluation"] = {**saved["evaluation"], "sets": whole}
    return saved


def _whole(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    names = _PATHS.get(section, ())
    whole = {name: _each(value, _absolute) if name in names else value for name, value in values.items()}
    if section == "data" and isinstance(images := values.get("images"), Mapping):
        whole["images"] = _whole("data", images)
    return whole


def _each(value: Any, change: Any) -> Any:
    """Returns a path, or each of several paths, changed; anything else as it is."""
    if isinstance(value, str):
        return value if value in _WORDS else change(value)
    return type(value)(_each(each, change) for each in value) if isinstance(value, list | tuple) else value


def _absolute(path: str) -> str:
    # Do not use os.path.abspath, which would take ".." out: behind a link, ".." leads to another folder.
    return str(Path(os.path.expanduser(path)).absolute())


def _expanded(name: str, path: str) -> str:
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"{name} is {path}: it begins with a ~ that names nobody's folder: write the path in full")
    return found
