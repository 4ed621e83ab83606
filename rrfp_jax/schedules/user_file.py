"""Schedules in a user's own file: ``FILE.py:NAME`` stands wherever the name of a schedule does.

NAME is what the file registers with ``@schedule(NAME, ...)``, or a function of a stage that it defines.
"""

import difflib
import re
import sys
from dataclasses import replace
from functools import lru_cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType

from rrfp_jax.schedules.description import told
from rrfp_jax.schedules.entry import ScheduleEntry, registering

_IN_FILE = re.compile(r"(.+\.py)(?::(.*))?")


def is_in_file(name: str) -> bool:
    """Whether a name is of this form."""
    return _IN_FILE.fullmatch(name) is not None


def entry_in_file(name: str) -> ScheduleEntry:
    """The schedule of this name; raises ValueError where there is none, or where the file cannot be imported."""
    match = _IN_FILE.fullmatch(name)
    assert match is not None
    path, word = match.group(1), match.group(2) or ""
    try:
        entries = _entries_of(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read schedule {name}: {why}: give the path of a Python file") from error
    if word not in entries:
        near = difflib.get_close_matches(word, entries, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        there = f"it describes {', '.join(entries)}" if entries else "it has no function of a stage"
        raise ValueError(f"{path} has no schedule {word!r}: {meant}write {path}:NAME; {there}")
    return replace(entries[word], name=name)


@lru_cache(maxsize=64)
def _entries_of(path: str, _: int) -> dict[str, ScheduleEntry]:
    """What a file describes, by the names that it registers and those of its functions; again when it has changed."""
    text = Path(path).read_text(encoding="utf-8")
    module = ModuleType(f"rrfp_schedules_{Path(path).stem}")
    sys.modules[module.__name__] = module
    with registering() as found:
        try:
            exec(compile(text, path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot import {path}: {told(error)}") from error
    registered = {entry.describe: entry for entry in found.values()}
    for name, value in vars(module).items():
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            found.setdefault(name, registered.get(value) or ScheduleEntry(name=name, describe=value, any_graph=True))
    return found
