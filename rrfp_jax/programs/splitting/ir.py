"""The small intermediate language in which a traced function is cut into programs, and its dead code.

A jaxpr is a list of equations, some of which hold jaxprs of their own. Here the same program is a list of `Node`s over
`Var`s, with every call inlined, so that only loops and shard maps remain nested. They keep their bodies as `Block`s, so
that they can be restricted to some outputs and split in two. Variables are compared by identity. Each of them knows two
properties that a variable of a jaxpr does not:

* `fixed`: it is derived from parameters and constants alone, hence the same for all microbatches of a step. Fixed
  values are never stored per microbatch; each program takes them from the live parameters.
* `varying`: inside a shard map, the mesh axes over which its shards may differ.

A `Loop` node keeps its operands in three runs and its body's in three more. To drop, split or forward some of them one
wants each array's outer and inner side as a pair: `loop_parts` and `sharded_parts` take loops and shard maps apart by
role, and the records that they return put them together again.

`slice_nodes` walks backwards from the wanted values. A loop's carry is needed when its final value is, or when a needed
output of the body reads its value before the pass: a least fixed point, reached in at most one round per carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from rrfp_jax.programs import jaxprs


@dataclass(eq=False, slots=True)
class Var:
    """One array of a program by its shape and dtype, without its numbers. Compared by identity."""

    shape: tuple[int, ...]
    dtype: Any
    fixed: bool
    varying: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


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
        return evaluate(self.nodes, dict(zip(self.inputs, arrays, strict=True)), self.outputs)


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
    instead: Callable[[Node, Sequence[Any]], Sequence[Any] | None] | None = None,
) -> list[Any]:
    """Runs the nodes in order, extending `environment`, and returns the arrays of `outputs`.

    If `instead` returns arrays for a node and its operands, they are the results of that node.
    """
    for node in nodes:
        operands = [read(environment, operand) for operand in node.inputs]
        results = None if instead is None else instead(node, operands)
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


class Port(NamedTuple):
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
            results = zip(self.body.run(*pieces), self.ports_out, strict=True)
            return tuple(jax.numpy.expand_dims(y, 0) if port.stacked else y for y, port in results)

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


Operation = Apply | Barrier | ShardingConstraint | Loop | Sharded


# -- loops and shard maps by their parts -------------------------------------------------------------------------------


class Inlet(NamedTuple):
    """An array that goes into a body: a loop's constant or slice, or an argument of a shard map."""

    outer: Operand
    inner: Var
    port: Port = Port(None)


class Outlet(NamedTuple):
    """An array that a body makes: in each pass of a loop, whose stack is the outer side, or in a shard map."""

    inner: Operand
    outer: Var
    port: Port = Port(None)


class Carry(NamedTuple):
    """An array that a loop hands from pass to pass."""

    start: Operand
    before: Var
    after: Operand
    final: Var


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopParts:
    """All arrays that go into a loop and come out of it."""

    constants: Sequence[Inlet]
    carries: Sequence[Carry]
    slices: Sequence[Inlet]
    stacks: Sequence[Outlet]

    def node(self, template: Loop, nodes: Sequence[Node], *, batched: bool = False) -> Node:
        """Returns the loop with these parts around the body `nodes`, otherwise as `template`, without unread inputs."""
        carried = [carry.after for carry in self.carries]
        outputs = (*carried, *(stack.inner for stack in self.stacks))
        used = {operand for node in nodes for operand in node.inputs} | set(outputs)
        constants = [entry for entry in self.constants if entry.inner in used]
        slices = [entry for entry in self.slices if entry.inner in used]
        befores = [carry.before for carry in self.carries]
        inputs = (*(e.inner for e in constants), *befores, *(e.inner for e in slices))
        loop = replace(
            template,
            body=Block(inputs=inputs, nodes=tuple(nodes), outputs=outputs),
            num_constants=len(constants),
            num_carries=len(self.carries),
            batched=batched and bool(slices) and not self.carries,
            effectful=any(node.operation.effectful for node in nodes),
        )
        operands = (*(e.outer for e in constants), *(c.start for c in self.carries), *(e.outer for e in slices))
        return Node(loop, operands, (*(c.final for c in self.carries), *(s.outer for s in self.stacks)))


def loop_parts(node: Node, loop: Loop) -> LoopParts:
    """Takes a loop apart; `loop` is the node's operation."""
    body, first, last = loop.body, loop.num_constants, loop.num_constants + loop.num_carries
    pairs = [Inlet(outer, inner) for outer, inner in zip(node.inputs, body.inputs, strict=True)]
    results = [Outlet(inner, outer) for inner, outer in zip(body.outputs, node.outputs, strict=True)]
    carries = [
        Carry(entry.outer, entry.inner, result.inner, result.outer)
        for entry, result in zip(pairs[first:last], results[: loop.num_carries], strict=True)
    ]
    return LoopParts(constants=pairs[:first], carries=carries, slices=pairs[last:], stacks=results[loop.num_carries :])


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedParts:
    """All arrays that go into a shard map and come out of it."""

    inlets: Sequence[Inlet]
    outlets: Sequence[Outlet]

    def node(self, template: Sharded, nodes: Sequence[Node]) -> Node:
        """Returns the shard map with these parts around the body `nodes`, without unread inlets."""
        outputs = tuple(outlet.inner for outlet in self.outlets)
        used = {operand for node in nodes for operand in node.inputs} | set(outputs)
        inlets = [inlet for inlet in self.inlets if inlet.inner in used]
        sharded = replace(
            template,
            body=Block(inputs=tuple(i.inner for i in inlets), nodes=tuple(nodes), outputs=outputs),
            ports_in=tuple(inlet.port for inlet in inlets),
            ports_out=tuple(outlet.port for outlet in self.outlets),
            effectful=any(node.operation.effectful for node in nodes),
        )
        return Node(sharded, tuple(inlet.outer for inlet in inlets), tuple(outlet.outer for outlet in self.outlets))


def sharded_parts(node: Node, sharded: Sharded) -> ShardedParts:
    """Takes a shard map apart; `sharded` is the node's operation."""
    inlets = map(Inlet, node.inputs, sharded.body.inputs, sharded.ports_in)
    outlets = map(Outlet, sharded.body.outputs, node.outputs, sharded.ports_out)
    return ShardedParts(inlets=list(inlets), outlets=list(outlets))


# -- dead code ---------------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """The live nodes in order, and every variable that they or the outputs read."""

    nodes: list[Node]
    needed: set[Var]


def slice_nodes(
    nodes: Sequence[Node],
    wanted: Iterable[Operand],
    *,
    given: Collection[Var] = frozenset(),
    keep_effects: bool = True,
) -> Slice:
    """Returns the nodes that `wanted` needs when the values `given` are there already.

    Nodes with effects are kept too, whether or not somebody reads them, if `keep_effects`.
    """
    needed = set(variables(wanted)) - set(given)
    kept = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        if any(keep) or (keep_effects and node.operation.effectful):
            live = restrict(node, keep, keep_effects=keep_effects)
            needed.update(value for value in variables(live.inputs) if value not in given)
            kept.append(live)
    return Slice(kept[::-1], needed)


def restrict(node: Node, keep: Sequence[bool], *, keep_effects: bool = True) -> Node:
    """Returns the node without the outputs that nobody reads, where it can do without."""
    operation = node.operation
    if all(keep):
        return node
    if isinstance(operation, Barrier):
        pairs = [(i, o) for i, o, wanted in zip(node.inputs, node.outputs, keep, strict=True) if wanted]
        return replace(node, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))
    if isinstance(operation, Loop):
        parts = loop_parts(node, operation)
        closed, body = close_over_carries(parts, operation, keep, keep_effects=keep_effects)
        carries = [carry for carry, wanted in zip(parts.carries, closed, strict=False) if wanted]
        stacks = [stack for stack, wanted in zip(parts.stacks, keep[len(parts.carries) :], strict=True) if wanted]
        return replace(parts, carries=carries, stacks=stacks).node(operation, body.nodes, batched=operation.batched)
    if isinstance(operation, Sharded):
        shards = sharded_parts(node, operation)
        outlets = [outlet for outlet, wanted in zip(shards.outlets, keep, strict=True) if wanted]
        body = slice_nodes(operation.body.nodes, [outlet.inner for outlet in outlets], keep_effects=keep_effects)
        return replace(shards, outlets=outlets).node(operation, body.nodes)
    return node


def close_over_carries(
    parts: LoopParts, loop: Loop, keep: Sequence[bool], *, keep_effects: bool = True
) -> tuple[list[bool], Slice]:
    """Returns the kept outputs of a loop with the carries that they need, and the live part of the body."""
    closed = list(keep)
    while True:
        wanted = [operand for operand, kept in zip(loop.body.outputs, closed, strict=True) if kept]
        body = slice_nodes(loop.body.nodes, wanted, keep_effects=keep_effects)
        missing = [i for i, carry in enumerate(parts.carries) if carry.before in body.needed and not closed[i]]
        if not missing:
            return closed, body
        for index in missing:
            closed[index] = True
