"""Tells when two functions, or two traced programs, are the same, so that chunks of one kind share their programs.

The results of a function are decided by its code, the names that its code looks up, and the values that it closes over.
So two functions are the same if these are; so are two ``functools.partial`` or two frozen dataclasses of the same
parts, and two methods of the same object. Any other object is the same as itself alone. No ``__eq__`` of a user's class
is asked: a wrong one could only be noticed by wrong results.
"""

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.jaxprs import effectful, open_jaxpr

_PLAIN = (type(None), bool, int, str, bytes, complex, types.CodeType, range, np.dtype, jax.ShapeDtypeStruct)
_JAXPRS = tuple({jex.Jaxpr, getattr(jex, "ClosedJaxpr", jex.Jaxpr)})  # one class since JAX 0.12
_SMALL_BYTES = 4096


class Same:
    """A key for one object, which is equal only to that of the same object, and keeps it alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def identity(value: Any) -> Hashable:
    """Returns a key that is equal for values of which one can stand for the other in a program that is traced."""
    return _identity(value, ())


def _identity(value: Any, within: tuple[int, ...]) -> Hashable:
    # ``within`` are the objects that this one is part of, from outside to inside: it may contain itself
    if (plain := _plain(value)) is not None:
        return plain
    if id(value) in within:
        return "again", within.index(id(value))
    parts, within = _parts(value), (*within, id(value))
    if parts is None:
        return Same(value)
    if isinstance(value, frozenset):
        return frozenset, frozenset(_identity(part, within) for part in parts)
    return type(value), tuple([_identity(part, within) for part in parts])


def _plain(value: Any) -> Hashable | None:
    """Returns a key for a value without parts, None for any other."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject:
        return np.ndarray, value.dtype, value.shape, value.tobytes()
    if isinstance(value, np.generic) and not isinstance(value, np.object_):
        return type(value), value.tobytes()
    return value if isinstance(value, Same) else None


def _parts(value: Any) -> Sequence[Any] | None:
    """Returns the values that make up a container, a function or a frozen record; None where they are not known."""
    parts: Sequence[Any] | None = None
    match value:
        case tuple() | list() | frozenset():
            parts = tuple(value)
        case dict() | types.MappingProxyType():
            parts = tuple(value.items())
        case types.FunctionType():
            parts = _parts_of_function(value)
        case types.MethodType():
            parts = value.__func__, value.__self__
        case functools.partial():
            parts = value.func, value.args, value.keywords
        case _ if dataclasses.is_dataclass(type(value)) and type(value).__dataclass_params__.frozen:
            parts = (_state(value),)
    return parts


def _parts_of_function(function: types.FunctionType) -> Sequence[Any] | None:
    try:
        closed_over = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a cell that is not filled yet
        return None
    looked_up = Same(function.__globals__)
    return function.__code__, looked_up, function.__defaults__, function.__kwdefaults__, closed_over


def _state(value: Any) -> dict[str, Any]:
    """Returns all attributes, not only those that take part in ``==``."""
    slots = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return slots | getattr(value, "__dict__", {})


def program_identity(jaxpr: Any) -> Hashable:
    """Returns a key that is equal for traced programs that compute the same, whatever the names in their arguments."""
    parts = open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def defined(var: Any) -> Hashable:
        numbers[var] = len(numbers)
        return _aval(var.aval)

    def used(atom: Any) -> Hashable:
        if isinstance(atom, jex.Literal):
            return "literal", _aval(atom.aval), identity(np.asarray(atom.val))
        return numbers[atom]

    def equation(eqn: Any) -> Hashable:
        inputs = tuple([used(atom) for atom in eqn.invars])
        # an operation with an effect is the same as itself alone
        operation = Same(eqn if effectful(eqn) else eqn.primitive)
        return operation, inputs, parameter_identity(eqn.params), tuple([defined(var) for var in eqn.outvars])

    inputs = tuple([defined(var) for var in (*parts.constvars, *parts.invars)])
    equations = tuple([equation(eqn) for eqn in parts.equations])
    consts = tuple([identity(np.asarray(const) if _is_small(const) else const) for const in parts.consts])
    return inputs, consts, equations, tuple([used(atom) for atom in parts.outvars])


def _is_small(const: Any) -> bool:
    if not isinstance(const, jax.Array) or jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return False
    return const.is_fully_addressable and const.nbytes <= _SMALL_BYTES


def parameter_identity(value: Any) -> Hashable:
    """Returns the key of a parameter of an equation, which may hold traced programs."""
    if isinstance(value, _JAXPRS):
        return program_identity(value)
    if isinstance(value, Mapping):
        return tuple([(name, parameter_identity(each)) for name, each in value.items()])
    if isinstance(value, tuple | list):
        return type(value), tuple([parameter_identity(each) for each in value])
    if isinstance(value, jax.sharding.Sharding | jax.sharding.PartitionSpec):
        return value
    key = identity(value)
    return value if isinstance(key, Same) and _is_compared_by_jax(value) else key


def _is_compared_by_jax(value: Any) -> bool:
    """Whether this is of a class of JAX's own, such as how a scan's arguments are nested, that says what equals it."""
    classes = type(value).__mro__[:-1]
    if classes[0].__module__.partition(".")[0] != "jax" or not isinstance(value, Hashable):
        return False
    return all(any(name in vars(each) for each in classes) for name in ("__eq__", "__hash__"))


def _aval(aval: Any) -> Hashable:
    return str(aval), bool(getattr(aval, "weak_type", False)), getattr(aval, "sharding", None)


class ProgramStore:
    """Plans and compiled programs by the kind of chunk that they serve; shared by the threads that compile a model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns the result of the first ``make`` that was called for this key, or raises its error; and whether this
        caller was the first, who makes it while the others wait."""
        with self._lock:
            is_first = key not in self._made
            made = self._made.setdefault(key, Future())
        if is_first:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
        return made.result(), is_first
