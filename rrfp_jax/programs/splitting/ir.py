"""The small intermediate language in which a traced function is cut into programs.

A jaxpr is a list of equations, some of which hold jaxprs of their own. Here the same thing is a list of `Node`s over
`Value`s, with every call inlined, so that what remains nested is only what must be: loops and shard maps. Values are
compared by identity. Each of them knows two things that a jaxpr variable does not:

* `fixed`: it is derived from parameters and constants alone, hence the same for all microbatches of a step. Fixed
  values are never stored per microbatch; each program takes them from the live parameters.
* `varying`: inside a shard map, the mesh axes over which its shards may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Value:
    """One array of a program: what it looks like, not what it holds. Compared by identity."""

    __slots__ = ("dtype", "fixed", "shape", "varying")

    def __init__(self, shape: Sequence[int], dtype: Any, *, fixed: bool, varying: frozenset[str] = frozenset()) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.fixed = fixed
        self.varying = varying

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def stacked(self, length: int) -> Value:
        """The value that a loop of `length` passes makes of this value of its body."""
        return Value((length, *self.shape), self.dtype, fixed=self.fixed, varying=self.varying)

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Constant:
    """An array or scalar that the traced function closed over, or a literal of its jaxpr."""

    array: Any


Operand = Value | Constant


class Operation(Protocol):
    """What a node does."""

    @property
    def name(self) -> str: ...

    @property
    def effectful(self) -> bool:
        """Whether it must run even if nobody reads its outputs (prints, callbacks)."""
        ...

    def run(self, *arrays: Any) -> Sequence[Any]: ...


@dataclass(frozen=True, eq=False)
class Node:
    """One operation, the operands that it reads and the values that it makes."""

    operation: Operation
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A body: straight-line nodes between inputs and outputs."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]

    def run(self, *arrays: Any) -> list[Any]:
        environment = dict(zip(self.inputs, arrays, strict=True))
        return evaluate(self.nodes, environment, self.outputs)


def is_fixed(operand: Operand) -> bool:
    return isinstance(operand, Constant) or operand.fixed


def values(operands: Iterable[Operand]) -> list[Value]:
    """The operands that are not constants."""
    return [operand for operand in operands if isinstance(operand, Value)]


def read(environment: Mapping[Value, Any], operand: Operand) -> Any:
    return operand.array if isinstance(operand, Constant) else environment[operand]


def evaluate(
    nodes: Iterable[Node],
    environment: dict[Value, Any],
    outputs: Iterable[Operand],
    instead: Callable[[Node, dict[Value, Any], Sequence[Any]], Sequence[Any] | None] | None = None,
) -> list[Any]:
    """Runs the nodes in order, extending `environment`, and returns the arrays of `outputs`.

    What `instead` returns for a node, its environment and its operands, unless None, are the results of that node.
    """
    for node in nodes:
        operands = [read(environment, operand) for operand in node.inputs]
        results = None if instead is None else instead(node, environment, operands)
        arrays = node.operation.run(*operands) if results is None else results
        environment.update(zip(node.outputs, arrays, strict=True))
    return [read(environment, operand) for operand in outputs]
