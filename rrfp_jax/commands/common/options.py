"""The options of the commands: a parser that answers in one line, and options made of a configuration's records.

A record's field becomes an option with the text that stands below the field as its docstring, and with its type, its
choices and its default. Nothing here imports JAX.
"""

import ast
import difflib
import inspect
import re
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLACES = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


class CommandParser(ArgumentParser):
    """The parser of a command; what it refuses, it refuses in one line, with exit code 2."""

    def __init__(self, name: str, description: str, **options: Any) -> None:
        in_checkout = Path(sys.argv[0]).parent.name == "experiments"
        super().__init__(
            prog=f"python -m experiments.{name}" if in_checkout else f"rrfp {name}",
            description=description,
            formatter_class=lambda prog: _Help(prog, max_help_position=34, width=120),
            allow_abbrev=False,  # an abbreviation would mean something else once another option is added
            **options,
        )
        self._negative_number_matcher = re.compile(r"-\.?\d")  # `-1,2,3` is a value too

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._not_known(unknown[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    def _not_known(self, word: str) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        advice = f"did you mean {near[0]}" if near else f"{self.prog} --help lists all options"
        return f"{word!r} is no option: {advice}"


class _Help(HelpFormatter):
    """Says of every option what it is without being given."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or re.search(r"\b(default|required|optional)\b", text):
            return text
        missing = "required" if action.required else "optional" if action.default is None else "default %(default)s"
        return f"{text} ({missing})"


def add_record_options(
    parser: ArgumentParser,
    sections: Mapping[str, type],
    choices: Mapping[str, Sequence[str]],
    qualified: Collection[str] = (),
) -> None:
    """Add an option for every field of every section, ``--field`` where its name is unique and ``--section.field``.

    ``choices`` names the values of some fields, by ``section.field``; ``qualified`` sections whose options always name
    them, so that they take no short name from others.
    """
    for section, record in sections.items():
        group = parser.add_argument_group(f"{section}: {field_texts(record)['']}")
        for field in fields(record):
            name = f"{section}.{field.name}"
            flag, whole = flag_of(sections, name, qualified), f"--{name.replace('_', '-')}"
            text = _help(field, field_texts(record)[field.name], choices.get(name, ())).replace("%", "%%")
            place = "NAME" if name in choices else "|".join(map(_place, _kinds(field.type)))
            group.add_argument(flag, dest=name, metavar=place, default=SUPPRESS, help=text)
            if flag != whole:
                group.add_argument(whole, dest=name, default=SUPPRESS, help=SUPPRESS)


def given_texts(arguments: Namespace) -> dict[str, str]:
    """The texts of the options that :func:`add_record_options` has added, by ``section.field``, where given."""
    return {name: text for name, text in vars(arguments).items() if "." in name}


def flag_of(sections: Mapping[str, type], name: str, qualified: Collection[str] = ()) -> str:
    """The shortest option of a field ``section.field``."""
    section, _, key = name.partition(".")
    others = (record for other, record in sections.items() if other not in qualified)
    is_unique = section not in qualified and sum(key == f.name for record in others for f in fields(record)) == 1
    return f"--{key if is_unique else name}".replace("_", "-")


def takes_list(kind: Any) -> bool:
    """Whether a field of this type may hold several values."""
    return any(get_origin(member) is tuple for member in _kinds(kind))


@cache
def field_texts(record: type) -> dict[str, str]:
    """The docstring below each field of a record, inherited ones too, as plain text; under the empty name that of the
    record, its head."""
    texts: dict[str, str] = {}
    for owner in reversed(record.__mro__):
        if is_dataclass(owner):
            texts |= _own_texts(owner)
    return texts


def _own_texts(record: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    texts = {"": _plain(inspect.getdoc(record) or "").split("\n\n")[0].rstrip(".")}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            texts[statement.target.id] = _plain(str(after.value.value)) if is_text else ""  # type: ignore[attr-defined]
    return texts


def _plain(text: str) -> str:
    """Without the marks of docstrings, and with the words of a configuration file."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", inspect.cleandoc(text).replace("``", ""))
    return re.sub(r"\bNone\b", "null", re.sub(r"(?<!\n)\n(?!\n)", " ", text))


def _kinds(kind: Any) -> tuple[Any, ...]:
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(member for member in members if member is not NoneType)


def _place(kind: Any) -> str:
    """What stands for a value of this type in a help text."""
    item = _PLACES.get(get_args(kind)[0] if get_origin(kind) is tuple else kind, "VALUE")
    return f"{item},{item},..." if get_origin(kind) is tuple else item


def _help(field: Field, text: str, choices: Sequence[str]) -> str:
    words = ["a mapping" if is_dataclass(kind) else _WORDS.get(kind, "a list") for kind in _kinds(field.type)]
    value = f"one of {', '.join(choices)}" if choices else " or ".join(words)
    if field.default is MISSING and field.default_factory is MISSING:
        return f"{text} ({value}; required in the file)"
    return f"{text} ({value}; default {as_text(field.default)})"


def as_text(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
