"""Records as plain data and back, by their annotations: values that JSON can hold, and none that runs code.

A dataclass becomes an object with its fields; a named tuple a list that begins with its name, so that the members of a
union are told apart; a task its text form; an enumeration its value. Sets and tuples become lists, dicts lists of
pairs. A field marked :data:`rrfp_jax.schedules.UNRECORDED`, such as a function, is left out. On the way back every
value must be of the type that its field is annotated with, and every record's own checks apply. The functions for a
type are made once, so that records may travel in every step.
"""

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rrfp_jax.readable import shown
from rrfp_jax.schedules import UNRECORDED, Task, TaskKind


class MalformedRecord(ValueError):
    """Plain data that no record of the expected type becomes; the message says where."""


def to_plain(value: Any) -> Any:
    """Returns ``value`` as dicts, lists, strings, numbers, booleans and None; raises TypeError for another type."""
    kind: Any = type(value)
    return _writer(kind)(value)


@cache
def _writer(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one for each kind
    """Returns the function that makes values of exactly this type plain."""
    if kind in (Task, TaskKind):
        return str
    if hasattr(kind, "_fields"):
        return lambda value: [kind.__name__, *map(to_plain, value)]
    if issubclass(kind, dict):
        return lambda value: [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if issubclass(kind, frozenset):
        return lambda value: [to_plain(item) for item in sorted(value)]
    if issubclass(kind, tuple | list):
        return lambda value: [to_plain(item) for item in value]
    if is_dataclass(kind):
        names = _recorded(kind)
        return lambda value: {name: to_plain(getattr(value, name)) for name in names}
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, Real) and kind is not bool:  # NumPy's numbers too
        return _plain_integer if issubclass(kind, Integral) else float
    if kind in (NoneType, str, bool):
        return lambda value: value
    raise TypeError(f"{kind.__name__} is no record and no part of one")


def _plain_integer(value: Any) -> int | str:
    """Returns the number; beyond 64 bits, where not every reader of plain data follows, as hexadecimal text."""
    number = int(value)
    return number if -(1 << 63) <= number < 1 << 64 else hex(number)


def from_plain(kind: Any, data: Any) -> Any:
    """Returns the value, annotated with ``kind``, that :func:`to_plain` made into ``data``.

    Raises MalformedRecord, which says where ``data`` does not fit.
    """
    return _reader(kind)(data, "it")


_Reader = Callable[[Any, str], Any]
"""Takes plain data and the words for its place."""


@cache
def _reader(kind: Any) -> _Reader:  # noqa: PLR0911 - one for each kind
    """Returns the function that reads values of this annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin in (frozenset, list, dict) or (origin is tuple and arguments[1:] == (...,)):
        item = _reader(tuple.__class_getitem__(arguments) if origin is dict else arguments[0])
        return lambda data, where: origin(item(each, f"an item of {where}") for each in _items(data, None, where))
    if origin is tuple:
        readers = [_reader(argument) for argument in arguments]
        return lambda data, where: tuple(
            reader(item, f"an item of {where}")
            for reader, item in zip(readers, _items(data, len(readers), where), strict=True)
        )
    if kind is Task:
        return _text("a task", Task.parse)
    if kind is TaskKind:
        return _text("a kind of task", TaskKind)
    if hasattr(kind, "_fields") or is_dataclass(kind):
        return _record(kind)
    if issubclass(kind, Enum):
        values = [member.value for member in kind]
        return _text(f"one of {', '.join(map(str, values))}", kind, values)
    return _scalar(kind)


def _refuse(data: Any, expected: str, where: str) -> MalformedRecord:
    return MalformedRecord(f"{where} is {shown(data):.60} where {expected} is expected")


def _items(data: Any, number: int | None, where: str) -> list[Any]:
    if not isinstance(data, list) or number not in (None, len(data)):
        raise _refuse(data, "a list" if number is None else f"a list of {number}", where)
    return data


def _scalar(kind: type) -> _Reader:
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def read(data: Any, where: str) -> Any:
        if kind is int and isinstance(data, str) and data.startswith(("0x", "-0x")):
            return _checked(int, where, data, 16)
        if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
            raise _refuse(data, kind.__name__, where)
        return float(data) if isinstance(data, int) and kind is float else data

    return read


def _text(expected: str, make: Callable[[str], Any], known: Collection[str] | None = None) -> _Reader:
    """Returns the reader of values that ``make`` makes of a text, one of ``known`` if there are any."""

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, str) or (known is not None and data not in known):
            raise _refuse(data, expected, where)
        return _checked(make, where, data)

    return read


def _record(kind: Any) -> _Reader:
    """Returns the reader of a named tuple, whose list begins with its name, or of a dataclass."""
    hints = get_type_hints(kind)
    is_tuple = hasattr(kind, "_fields")
    readers = {name: _reader(hints[name]) for name in (kind._fields if is_tuple else _recorded(kind))}

    def read_tuple(data: Any, where: str) -> Any:
        name, *items = _items(data, len(readers) + 1, where)
        if name != kind.__name__:
            raise _refuse(data, kind.__name__, where)
        each = zip(readers.items(), items, strict=True)
        return kind(*(reader(item, f"{field} of {name}") for (field, reader), item in each))

    def read_fields(data: Any, where: str) -> Any:
        if not isinstance(data, dict) or data.keys() != readers.keys():
            raise _refuse(data, f"an object with {', '.join(readers)}", where)
        values = {name: reader(data[name], f"{name} of {kind.__name__}") for name, reader in readers.items()}
        return _checked(kind, where, **values)

    return read_tuple if is_tuple else read_fields


def _union(kinds: tuple[Any, ...]) -> _Reader:
    """None, one of several named tuples, or another type."""
    optional = NoneType in kinds
    named = {kind.__name__: _reader(kind) for kind in kinds if hasattr(kind, "_fields") and kind is not Task}
    others = [_reader(kind) for kind in kinds if kind is not NoneType and kind.__name__ not in named]
    assert len(others) <= 1, f"{kinds} cannot be told apart"

    def read(data: Any, where: str) -> Any:
        if data is None and optional:
            return None
        tag = data[0] if isinstance(data, list) and data else None
        if isinstance(tag, str) and tag in named:
            return named[tag](data, where)
        if not others:
            raise _refuse(data, " or ".join(named), where)
        return others[0](data, where)

    return read


def _recorded(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.metadata != UNRECORDED]


def _checked(make: Callable[..., Any], where: str, *arguments: Any, **values: Any) -> Any:
    try:
        return make(*arguments, **values)
    except ValueError as error:
        raise MalformedRecord(f"{where}: {error}") from error
