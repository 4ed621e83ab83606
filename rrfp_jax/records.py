"""Records as plain data and back, by their annotations: values that JSON can hold, and none that runs code.

A dataclass becomes an object with its fields; a named tuple a list that begins with its name, so that the members of a
union are told apart; a task its text form; an enumeration its value. Sets and tuples become lists, dicts lists of
pairs. A field marked :data:`rrfp_jax.schedules.UNRECORDED`, such as a function, is left out. On the way back every
value must be of the type that its field is annotated with, and every record's own checks apply. The functions for a
type are made once, so that records may travel in every step.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rrfp_jax.bounded_text import shown
from rrfp_jax.schedules import UNRECORDED, Task, TaskKind


class MalformedRecord(ValueError):
    """Plain data that no record of the expected type becomes; the message says where."""


def to_plain(value: Any) -> Any:
    """Returns ``value`` as dicts, lists, strings, numbers, booleans and None; raises TypeError for another type."""
    kind: Any = type(value)
    return _writer(kind)(value)


@cache
def _writer(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that makes values of exactly this type plain."""
    if kind is not Task and issubclass(kind, tuple | list | dict | frozenset):
        return _collection_writer(kind)
    if is_dataclass(kind):
        names = _recorded(kind)
        return lambda value: {name: to_plain(getattr(value, name)) for name in names}
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, Real) and kind is not bool:  # NumPy's numbers too
        return _plain_integer if issubclass(kind, Integral) else float
    if kind in (Task, TaskKind):
        return str
    if kind in (NoneType, str, bool):
        return lambda value: value
    raise TypeError(f"{kind.__name__} is no record and no part of one")


def _plain_integer(value: Any) -> int | str:
    """Returns the number; beyond 64 bits, where not every reader of plain data follows, as hexadecimal text."""
    number = int(value)
    return number if -(1 << 63) <= number < 1 << 64 else hex(number)


def _collection_writer(kind: Any) -> Callable[[Any], Any]:
    if hasattr(kind, "_fields"):
        return lambda value: [kind.__name__, *map(to_plain, value)]
    if issubclass(kind, dict):
        return lambda value: [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if issubclass(kind, frozenset):
        return lambda value: [to_plain(item) for item in sorted(value)]
    return lambda value: [to_plain(item) for item in value]


def from_plain(kind: Any, data: Any) -> Any:
    """Returns the value, annotated with ``kind``, that :func:`to_plain` made into ``data``.

    Raises MalformedRecord, which says where ``data`` does not fit.
    """
    return _reader(kind)(data, "it")


_Reader = Callable[[Any, str], Any]
"""Takes plain data and the words for its place."""


@cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin in (frozenset, list) or (origin is tuple and arguments[1:] == (...,)):
        return _sequence(origin, arguments[0])
    if origin is dict:
        return _sequence(dict, tuple.__class_getitem__(arguments))
    return _tuple(arguments) if origin is tuple else _reader_of_class(kind)


def _reader_of_class(kind: Any) -> _Reader:
    if kind is Task:
        return _task
    if kind is TaskKind:
        return _task_kind
    if hasattr(kind, "_fields"):
        return _named_tuple(kind)
    if is_dataclass(kind):
        return _dataclass(kind)
    return _enum(kind) if issubclass(kind, Enum) else _scalar(kind)


def _refuse(data: Any, expected: str, where: str) -> MalformedRecord:
    return MalformedRecord(f"{where} is {shown(data):.60} where {expected} is expected")


def _scalar(kind: type) -> _Reader:
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def read(data: Any, where: str) -> Any:
        if kind is int and isinstance(data, str) and data.startswith(("0x", "-0x")):
            return _checked(int, where, data, 16)
        if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
            raise _refuse(data, kind.__name__, where)
        return float(data) if isinstance(data, int) and kind is float else data

    return read


def _task(data: Any, where: str) -> Task:
    if not isinstance(data, str):
        raise _refuse(data, "a task", where)
    task: Task = _checked(Task.parse, where, data)
    return task


def _task_kind(data: Any, where: str) -> TaskKind:
    if not isinstance(data, str):
        raise _refuse(data, "a kind of task", where)
    kind: TaskKind = _checked(TaskKind, where, data)
    return kind


def _enum(kind: type[Enum]) -> _Reader:
    by_value = {member.value: member for member in kind}

    def read(data: Any, where: str) -> Enum:
        if not isinstance(data, str) or data not in by_value:
            raise _refuse(data, f"one of {', '.join(map(str, by_value))}", where)
        return by_value[data]

    return read


def _items(data: Any, number: int | None, where: str) -> list[Any]:
    if not isinstance(data, list) or number not in (None, len(data)):
        raise _refuse(data, "a list" if number is None else f"a list of {number}", where)
    return data


def _sequence(container: type, item: Any) -> _Reader:
    reader = _reader(item)
    return lambda data, where: container(reader(each, f"an item of {where}") for each in _items(data, None, where))


def _tuple(kinds: tuple[Any, ...]) -> _Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(data: Any, where: str) -> tuple[Any, ...]:
        items = _items(data, len(readers), where)
        return tuple(reader(item, f"an item of {where}") for reader, item in zip(readers, items, strict=True))

    return read


def _named_tuple(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = [(name, _reader(hints[name])) for name in kind._fields]

    def read(data: Any, where: str) -> Any:
        name, *items = _items(data, len(readers) + 1, where)
        if name != kind.__name__:
            raise _refuse(data, kind.__name__, where)
        return kind(*(reader(item, f"{field} of {name}") for (field, reader), item in zip(readers, items, strict=True)))

    return read


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


def _dataclass(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = {name: _reader(hints[name]) for name in _recorded(kind)}

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, dict) or data.keys() != readers.keys():
            raise _refuse(data, f"an object with {', '.join(readers)}", where)
        values = {name: reader(data[name], f"{name} of {kind.__name__}") for name, reader in readers.items()}
        return _checked(kind, where, **values)

    return read


def _recorded(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.metadata != UNRECORDED]


def _checked(make: Callable[..., Any], where: str, *arguments: Any, **values: Any) -> Any:
    try:
        return make(*arguments, **values)
    except ValueError as error:
        raise MalformedRecord(f"{where}: {error}") from error
