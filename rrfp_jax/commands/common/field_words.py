"""The fields of a configuration's records in words: text, type, default and choices, for help texts and explanations.

The text of a field is the docstring that stands below it. A clause ``None: ...`` in it names the effect of
leaving the field out where the default is None. Nothing here imports JAX.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}
_PLACES = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
_NARROW = 24
FOLDERS = r"(path|_dir|folder)$"
"""Pattern of the names of fields that hold a file or a folder."""


@dataclass(frozen=True, kw_only=True)
class FieldWords:
    """One field of a record."""

    text: str
    """Text of its docstring."""
    short: str
    """The first sentence of ``text``, without the clause about None."""
    kind: str
    """The type in words: ``a whole number or text``."""
    place: str
    """Placeholder of a value: ``N|TEXT``."""
    default: str | None
    """The default as a user writes it; None: the field must be given."""
    left_out: str
    """``default 4``, ``default: as many as num_heads``, ``optional``, or ``required in the file``."""
    choices: tuple[str, ...] = ()


def field_words(record: type, name: str, choices: Sequence[str] = ()) -> FieldWords:
    """Returns the words of a field of a record, which takes one of ``choices`` if there are any."""
    field = next(each for each in fields(record) if each.name == name)
    text = field_texts(record)[name]
    first, _, rest = re.sub(r"[.;] null: ", "\n", text).partition("\n")
    default, unset = _default(field), re.split(r"[.;](?: |$)", rest)[0] or None
    return FieldWords(
        text=text,
        short=re.split(r"\. (?=[A-Z])", first)[0].rstrip("."),
        kind=" or ".join(map(_kind, kinds_of(field.type))),
        place=_place(field, choices),
        default=default,
        left_out=_left_out(default, unset),
        choices=tuple(choices),
    )


def _default(field: Field) -> str | None:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return None if default is MISSING else f"{default:g}" if isinstance(default, float) else as_text(default)


def _left_out(default: str | None, unset: str | None) -> str:
    if default is None:
        return "required in the file"
    if default == "null":
        return "optional" if unset is None else f"default: {unset}"
    return f"default {default}" if default else "default: none"


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Returns the types that a field may hold, except None."""
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(member for member in members if member is not NoneType)


def takes_list(kind: Any) -> bool:
    """Returns whether a field of this type may hold several values."""
    return any(get_origin(member) is tuple for member in kinds_of(kind))


def _kind(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {_MANY.get(get_args(kind)[0], 'values')}"
    if is_dataclass(kind):
        return f"a mapping of {', '.join(field.name for field in fields(kind))}"
    return _WORDS.get(kind, "a value")


def _place(field: Field, choices: Sequence[str]) -> str:
    if choices:
        listed = "|".join(choices)
        return listed if len(listed) <= _NARROW else "NAME"
    place = "|".join(map(_place_of, kinds_of(field.type)))
    return "PATH" if place == "TEXT" and re.search(FOLDERS, field.name) else place


def _place_of(kind: Any) -> str:
    item = _PLACES.get(get_args(kind)[0] if get_origin(kind) is tuple else kind, "MAPPING")
    return f"{item},{item},..." if get_origin(kind) is tuple else item


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
    """Returns a docstring without its marks, in the words of a configuration file (``null`` for ``None``)."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", inspect.cleandoc(text).replace("``", ""))
    return re.sub(r"\bNone\b", "null", re.sub(r"(?<!\n)\n(?!\n)", " ", text))


def as_text(value: Any) -> str:
    """Returns a value as a user writes it on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
