"""The small intermediate language in which a traced function is cut into programs.

A jaxpr is a list of equations, some of which hold jaxprs of their own. Here the same program is a list of `Node`s over
`Var`s, with every call inlined, so that only loops and shard maps remain nested. They keep their bodies as `Block`s, so
that they can be restricted to some outputs and split in two. Variables are compared by identity. Each of them knows two
properties that a variable of a jaxpr does not:

* `fixed`: it is derived from parameters and constants alone, hence the same for all microbatches of a step. Fixed
  values are never stored per microbatch; each program takes them from the live parameters.
* `varying`: inside a shard map, the mesh axes over which its shards may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.programs import jaxprs


class Var:
    """One array of a program by its shape and dtype, without its numbers. Compared by identity."""

    __slots__ = ("dtype", "fixed", "shape", "varying")

    def __init__(self, shape: Sequence[int], dtype: Any, *, fixed: bool, varying: frozenset[str] = frozenset()) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.fixed = fixed
        self.varying = varying

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def stacked(self, length: int) -> Var:
        """Returns the variable that a loop of `length` passes makes of this variable of its body."""
        return Var((length, *self.shape), self.dtype, fixed=self.fixed, varying=self.varying)

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Constant:
    """An array or scalar that the traced function closed over, or a literal of its jaxpr."""

    array: Any


Operand = Var | Constant


@dataclass(frozen=True, eq=False)
class Node:
    """One operation, the operands that it reads and the variables that it makes."""

    operation: Operation
    inputs: tuple[Operand, ...]
    outputs: tuple[Var, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """The body of a loop or shard map: nodes in order between inputs and outputs."""

    inputs: tuple[Var, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]

    def run(self, *arrays: Any) -> list[Any]:
        environment = dict(zip(self.inputs, arrays, strict=True))
        return evaluate(self.nodes, environment, self.outputs)


def is_fixed(operand: Operand) -> bool:
    """Whether an operand is a constant or derived from parameters and constants alone."""
    return isinstance(operand, Constant) or operand.fixed


def variables(operands: Iterable[Operand]) -> list[Var]:
    """Returns the operands that are not constants."""
    return [operand for operand in operands if isinstance(operand, Var)]


def read(environment: Mapping[Var, Any], operand: Operand) -> Any:
    """Returns the array of an operand."""
    return operand.array if isinstance(operand, Constant) else environment[operand]


def evaluate(
    nodes: Iterable[Node],
    environment: dict[Var, Any],
    outputs: Iterable[Operand],
    instead: Callable[[Node, dict[Var, Any], Sequence[Any]], Sequence[Any] | None] | None = None,
) -> list[Any]:
    """Runs the nodes in order, extending `environment`, and returns the arrays of `outputs`.

    If `instead` returns arrays for a node, its environment and its operands, they are the results of that node.
    """
    for node in nodes:
        operands = [read(environment, operand) for operand in node.inputs]
        results = None if instead is None else instead(node, environment, operands)
        arrays = node.operation.run(*operands) if results is None else results
        environment.update(zip(node.outputs, arrays, strict=True))
    return [read(environment, operand) for operand in outputs]


# -- operations: `effectful` ones run even if nobody reads their outputs (prints, callbacks) ---------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Apply:
    """One primitive of JAX, bound again in the context in which it was traced."""

    primitive: Any
    params: dict[str, Any]
    context: Any
    effectful: bool

    @property
    def name(self) -> str:
        return str(self.primitive.name)

    def run(self, *arrays: Any) -> Sequence[Any]:
        with jaxprs.replay(self.context):
            result = self.primitive.bind(*arrays, **self.primitive.get_bind_params(self.params))
        return result if self.primitive.multiple_results else [result]


@dataclass(frozen=True, eq=False)
class Barrier:
    """Output i is input i, but none may be used before all are there: rematerialisation waits for its cotangents."""

    name = "optimization_barrier"
    effectful = False

    def run(self, *arrays: Any) -> Sequence[Any]:
        return list(jax.lax.optimization_barrier(arrays))


@dataclass(frozen=True, eq=False)
class ShardingConstraint:
    """The sharding that a nested `jit` demands of one of its arguments or results."""

    sharding: jax.sharding.Sharding
    name = "sharding_constraint"
    effectful = False

    def run(self, *arrays: Any) -> Sequence[Any]:
        return [jax.lax.with_sharding_constraint(arrays[0], self.sharding)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loop:
    """A `lax.scan`. Body inputs: constants, carries, slices; body outputs: carries, slices to stack.

    A `batched` loop has no carries and runs all its passes at once, as a `vmap` over layers: faster, for more
    temporary memory.
    """

    body: Block
    num_constants: int
    num_carries: int
    length: int
    reverse: bool
    unroll: Any
    effectful: bool
    batched: bool = False
    name = "scan"

    def run(self, *arrays: Any) -> Sequence[Any]:
        constants = arrays[: self.num_constants]
        carries = list(arrays[self.num_constants : self.num_constants + self.num_carries])
        slices = list(arrays[self.num_constants + self.num_carries :])
        if self.batched:
            return jax.vmap(lambda *parts: self.body.run(*constants, *parts), axis_size=self.length)(*slices)

        def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.body.run(*constants, *carry, *parts)
            return results[: self.num_carries], results[self.num_carries :]

        final, stacks = jax.lax.scan(
            step, carries, slices, length=self.length, reverse=self.reverse, unroll=self.unroll
        )
        return [*final, *stacks]


@dataclass(frozen=True, eq=False)
class Port:
    """How one array passes the border of a shard map.

    A `stacked` port carries a value that had no global form: every shard's piece becomes one row of a global array.
    """

    spec: Any
    stacked: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Sharded:
    """A `jax.shard_map` over the axes `axes` of `mesh`."""

    body: Block
    mesh: Any
    axes: frozenset[str]
    check_vma: bool
    ports_in: tuple[Port, ...]
    ports_out: tuple[Port, ...]
    context: Any
    effectful: bool
    name = "shard_map"

    def run(self, *arrays: Any) -> Sequence[Any]:
        def local(*shards: Any) -> tuple[Any, ...]:
            pieces = [x[0] if port.stacked else x for x, port in zip(shards, self.ports_in, strict=True)]
            results = self.body.run(*pieces)
            return tuple(
                jax.numpy.expand_dims(y, 0) if port.stacked else y
                for y, port in zip(results, self.ports_out, strict=True)
            )

        with jaxprs.replay(self.context):
            mapped = jax.shard_map(
                local,
                mesh=self.mesh,
                axis_names=set(self.axes),
                check_vma=self.check_vma,
                in_specs=tuple(port.spec for port in self.ports_in),
                out_specs=tuple(port.spec for port in self.ports_out),
            )
            return list(mapped(*arrays))

    def crossing(self, value: Var) -> tuple[Var, Port]:
        """Returns the global variable that holds the pieces of an inner one, a row for each shard that may differ, and
        the port through which they pass."""
        axes = tuple(axis for axis in self.mesh.axis_names if axis in value.varying & self.axes)
        num_rows = math.prod(int(self.mesh.shape[axis]) for axis in axes)
        outer = Var((num_rows, *value.shape), value.dtype, fixed=False, varying=value.varying - self.axes)
        return outer, Port(PartitionSpec(axes) if axes else PartitionSpec(None), stacked=True)


Operation = Apply | Barrier | ShardingConstraint | Loop | Sharded
