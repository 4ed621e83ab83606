"""Schedules and hints in a user's own file: ``FILE.py:NAME`` stands wherever the name of one does.

NAME is what the file registers with ``@schedule(NAME, ...)``, a function of a stage that it defines, or a rule. While
it is imported, it finds the modules beside it.
"""

import difflib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType

from rrfp_jax.schedules.entry import ScheduleEntry, registering
from rrfp_jax.schedules.language.rule import Rule
from rrfp_jax.schedules.users_code import told

_IN_FILE = re.compile(r"(.+\.py)(?::(.*))?")


def is_in_file(name: str) -> bool:
    """Whether a name is of this form."""
    return _IN_FILE.fullmatch(name) is not None


def entry_in_file(name: str) -> ScheduleEntry:
    """The schedule of this name; raises ValueError where there is none, or where the file cannot be imported."""
    found = _named(name)
    if isinstance(found, Rule):
        raise ValueError(f"{name} is a rule: give it as a hint, or describe a table with its .frozen()")
    return replace(found, name=name)


def rule_in_file(name: str) -> Rule:
    """The rule of this name; raises ValueError as :func:`entry_in_file` does."""
    found = _named(name)
    if not isinstance(found, Rule):
        raise ValueError(f"{name} is a schedule, not a rule: give it as one")
    return found


def is_rule(name: str) -> bool:
    """Whether a name of this form is one of a rule."""
    return is_in_file(name) and isinstance(_named(name), Rule)


def _named(name: str) -> ScheduleEntry | Rule:
    match = _IN_FILE.fullmatch(name)
    assert match is not None
    path, word = match.group(1), match.group(2) or ""
    try:
        found = _contents(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read schedule {name}: {why}: give the path of a Python file") from error
    if word not in found:
        near = difflib.get_close_matches(word, found, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        there = f"it describes {', '.join(found)}" if found else "it has no function of a stage"
        raise ValueError(f"{path} has no schedule {word!r}: {meant}write {path}:NAME; {there}")
    return found[word]


@lru_cache(maxsize=64)
def _contents(path: str, _: int) -> dict[str, ScheduleEntry | Rule]:
    """What a file describes, by the names that it registers and its own; read again when it has changed."""
    text = Path(path).read_text(encoding="utf-8")
    module = ModuleType(f"rrfp_schedules_{Path(path).stem}")
    sys.modules[module.__name__] = module
    with registering() as registered, _beside(Path(path).resolve().parent):
        try:
            exec(compile(text, path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot import {path}: {told(error)}") from error
    of_function = {entry.describe: entry for entry in registered.values()}
    found: dict[str, ScheduleEntry | Rule] = {**registered}
    for name, value in vars(module).items():
        if isinstance(value, Rule):
            found.setdefault(name, value)
        elif isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            found.setdefault(name, of_function.get(value) or ScheduleEntry(name=name, describe=value, any_graph=True))
    return found


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """What lies in the folder can be imported meanwhile. Modules that do are forgotten then: those beside another file
    may be named alike."""
    known = set(sys.modules)
    sys.path.append(str(folder))  # last: a file named like a module, such as random.py, does not take its place
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == folder:
                del sys.modules[name]
