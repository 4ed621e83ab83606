"""Sources of a configuration: presets, the code that a file names, and the paths in it.

The presets lie in a wheel as its files, in the checkout as ``tpu_gpu_configs/``.

A configuration, and the ``config.yaml`` of a run's folder, may come from somebody else. To read them as data does no
harm. Code that they name runs only if the command line names it too, or says that the file is trusted, so every
function that would load code for them asks first (:func:`refuse_code`).

In a path, ``~`` is the home of the user who starts the run, expanded when the configuration is read. A run saves whole
paths, so that it can be exported, sampled and evaluated from any folder.
"""

import difflib
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rrfp_jax.schedules.registry import is_in_file
from rrfp_jax.storage import located

_FOLDER = Path(str(files("rrfp_jax"))) / "presets"
_TRUST = "--trust"
_ENDS_OF_PATHS = ("_dir", "_directory", "_file", "_files", "_path", "_paths", "_to")
"""Endings of the names of XLA's flags whose values are files or folders, such as that of the compiler which XLA
calls."""
_WORDS = ("bytes", "train")
"""Words that may stand in place of a tokenizer's file."""
_SAVED_WHOLE = {"data": ("path", "image_folder", "tokenizer", "cache"), "run": ("init_from",)}
"""Fields, by section, that are saved as whole paths."""
_WITH_HOME = {**_SAVED_WHOLE, "run": ("init_from", "run_dir"), "pipeline": ("schedule", "hint")}
"""Fields, by section, in which ``~`` stands for somebody's home."""


# -- presets -----------------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Returns the names of all presets, as ``cpu/debug``."""
    return sorted(str(path.relative_to(_FOLDER).with_suffix("")) for path in _FOLDER.glob("[ctg]pu/*.yaml"))


def find_config(name: str) -> str:
    """Returns the path of a configuration: a file, or a preset by its name. Raises ValueError if there is neither."""
    if Path(name).exists() or Path(name).suffix in (".yaml", ".yml") or Path(name).is_absolute():
        return name
    return str(find_preset(name, f"configuration {name} is neither a file nor a preset"))


def find_preset(name: str, refusal: str | None = None) -> Path:
    """Returns the file of a preset by its name. Raises ValueError, which begins with ``refusal``, if there is none."""
    name = name.removesuffix(".yaml")
    if name in (known := preset_names()):
        return _FOLDER / f"{name}.yaml"
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}" if near else f"the presets are {', '.join(known)}"
    raise ValueError(f"{refusal or f'{name!r} is no preset'}: {advice}")


def summary_of(name: str) -> str:
    """Returns the summary of a preset: the first sentence of the comment that its file begins with."""
    lines = find_preset(name).read_text(encoding="utf-8").splitlines()
    head = "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return re.split(r"\. (?!\d)", " ".join(head.split("\n\n")[0].split()))[0].rstrip(".") + "."


# -- code --------------------------------------------------------------------------------------------------------------


def add_trust_argument(parser: ArgumentParser) -> None:
    """Add the option that lets a command run the code that its configuration names."""
    parser.add_argument(
        _TRUST,
        action="store_true",
        help="run the code that the configuration names: a data set, schedule or hint of one's own; "
        "without it only what options name is run",
    )


def refuse_code(path: str, sections: Mapping[str, Mapping[str, Any]], given: Container[str]) -> None:
    """Raise ValueError if the file ``path`` names code; ``given`` are the keys that options have given."""
    for key, value in _code_in(sections):
        if key not in given:
            # No option names the data set of an evaluation, so that can only be trusted with the whole file.
            of_set = key.startswith("evaluation.sets")
            named = "" if of_set else f"give --{key.replace('_', '-')} {value} to run that, or "
            raise ValueError(
                f"{path} names code to run, {key} {value}: {named}{'give ' if of_set else ''}{_TRUST} to run all that "
                "it names"
            )


def _code_in(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the keys of a configuration's plain data that name code, with their values."""
    if "object" in sections["data"]:
        yield "data.object", sections["data"]["object"]
    for name, differences in ((sections.get("evaluation") or {}).get("sets") or {}).items():
        if "object" in differences:
            yield f"evaluation.sets.{name}.object", differences["object"]
    for key in ("schedule", "hint"):
        value = sections["pipeline"][key]
        if value is not None and is_in_file(value):
            yield f"pipeline.{key}", value
    for flag in sections["run"]["xla_flags"]:
        name, _, value = flag.partition("=")
        if "/" in value or name.endswith(_ENDS_OF_PATHS):
            yield "run.xla_flags", flag


# -- paths -------------------------------------------------------------------------------------------------------------


def at_home(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a section with ``~`` expanded; raises ValueError if a ``~`` names nobody's folder."""

    def expanded(name: str, path: str) -> str:
        found = os.path.expanduser(path)
        if found.startswith("~"):
            raise ValueError(
                f"{section}.{name} is {path}: it begins with a ~ that names nobody's folder: write the path in full"
            )
        return found

    names = _WITH_HOME.get(section, ())
    return {key: _each_path(value, partial(expanded, key)) if key in names else value for key, value in values.items()}


def whole_paths(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a configuration, as plain data, with whole paths."""
    saved = {section: _whole(section, values) for section, values in config.items()}
    if sets := (saved.get("evaluation") or {}).get("sets"):
        whole = {name: _whole("data", differences) for name, differences in sets.items()}
        saved["evaluation"] = {**saved["evaluation"], "sets": whole}
    return saved


def _whole(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    # Not os.path.abspath, which would take ".." out: behind a link, ".." leads to another folder.
    names, absolute = _SAVED_WHOLE.get(section, ()), lambda path: str(located(os.path.expanduser(path)).absolute())
    whole = {name: _each_path(value, absolute) if name in names else value for name, value in values.items()}
    if section == "data" and isinstance(images := values.get("images"), Mapping):
        whole["images"] = _whole("data", images)
    return whole


def _each_path(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a path, or each of several paths, changed; anything else as it is."""
    if isinstance(value, str):
        return value if value in _WORDS else change(value)
    return type(value)(_each_path(each, change) for each in value) if isinstance(value, list | tuple) else value
