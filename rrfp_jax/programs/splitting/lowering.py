"""From a jaxpr to nodes: calls are inlined, loops and shard maps become blocks, what is fixed becomes known.

Inlining `jit`, `jax.checkpoint` and custom-derivative calls is safe here because derivatives have been taken already
and a boundary of a call means nothing to the compiler, with two exceptions that are kept as nodes of their own: the
shardings that a nested `jit` asks for, and the barrier with which a rematerialised backward waits for its cotangents.

An output of a loop or shard map that is fixed (a cast of stacked weights that the forward hands on as a residual, say)
is taken out into a loop of its own that reads fixed values alone. Carries are never counted as fixed; that costs at
most a stored copy of something that counts passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core

from rrfp_jax.programs.splitting import versions
from rrfp_jax.programs.splitting.ir import Block, Constant, Node, Operand, Value, is_fixed
from rrfp_jax.programs.splitting.liveness import LoopParts, ShardedParts, Stack, loop_parts, restrict, sharded_parts
from rrfp_jax.programs.splitting.operations import Apply, Barrier, Loop, Port, Reshard, Sharded
from rrfp_jax.programs.splitting.rules import can_batch


def lower(
    jaxpr: Any, operands: Sequence[Operand], nodes: list[Node], *, unchecked: frozenset[str] = frozenset()
) -> list[Operand]:
    """Appends to `nodes` what `jaxpr` does to `operands` and returns its outputs.

    `unchecked` are the mesh axes of enclosing shard maps without `check_vma`: there any value may vary over them.
    """
    source = versions.open_jaxpr(jaxpr)
    environment: dict[Any, Operand] = {}
    environment.update(zip(source.constvars, map(Constant, source.consts), strict=False))
    environment.update(zip(source.invars, operands, strict=True))

    def look_up(atom: Any) -> Operand:
        return Constant(atom.val) if isinstance(atom, jax.extend.core.Literal) else environment[atom]

    for equation in source.equations:
        inputs = [look_up(atom) for atom in equation.invars]
        outputs = _lower_equation(equation, inputs, nodes, unchecked)
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(atom) for atom in source.outvars]


def _lower_equation(
    equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]
) -> Sequence[Operand]:
    called, name = versions.called_jaxpr(equation), equation.primitive.name
    if called is not None:
        return _inline(equation, called, inputs, nodes, unchecked)
    if name == "name":
        return inputs
    if name == "optimization_barrier":
        return _barrier(inputs, nodes)
    if name == "scan" and not versions.holds_references(equation):
        return _lower_scan(equation, inputs, nodes, unchecked)
    if name == "shard_map" and not versions.holds_references(equation):
        return _lower_shard_map(equation, inputs, nodes, unchecked)
    effectful = versions.effectful(equation)
    fixed = all(map(is_fixed, inputs)) and not effectful
    operation = Apply(primitive=equation.primitive, params=equation.params, context=equation.ctx, effectful=effectful)
    outputs = [new_value(var.aval, fixed, unchecked) for var in equation.outvars]
    nodes.append(Node(operation, tuple(inputs), tuple(outputs)))
    return outputs


def new_value(aval: Any, fixed: bool, unchecked: frozenset[str] = frozenset()) -> Value:
    return Value(aval.shape, aval.dtype, fixed=fixed, varying=versions.varying_axes(aval) | unchecked)


def _inline(
    equation: Any, called: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]
) -> Sequence[Operand]:
    if versions.is_rematerialised(equation):
        inputs = _barrier(inputs, nodes)
    inputs = _reshard(equation.params.get("in_shardings", ()), inputs, nodes)
    outputs = lower(called, inputs, nodes, unchecked=unchecked)
    return _reshard(equation.params.get("out_shardings", ()), outputs, nodes)


def _reshard(shardings: Sequence[Any], operands: list[Operand], nodes: list[Node]) -> list[Operand]:
    results = list(operands)
    for index, sharding in enumerate(shardings):
        operand = operands[index]
        if isinstance(sharding, jax.sharding.Sharding) and isinstance(operand, Value):
            result = Value(operand.shape, operand.dtype, fixed=operand.fixed, varying=operand.varying)
            nodes.append(Node(Reshard(sharding), (operand,), (result,)))
            results[index] = result
    return results


def _barrier(operands: list[Operand], nodes: list[Node]) -> list[Operand]:
    """A barrier over all that is not fixed: a fixed value needs none to wait, since whatever reads it waits anyway."""
    held = [operand for operand in operands if isinstance(operand, Value) and not operand.fixed]
    released = {value: Value(value.shape, value.dtype, fixed=False, varying=value.varying) for value in held}
    if released:
        nodes.append(Node(Barrier(), tuple(released), tuple(released.values())))
    return [released.get(operand, operand) if isinstance(operand, Value) else operand for operand in operands]


def _lower_scan(equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]) -> list[Operand]:
    params, shape = equation.params, versions.scan_shape(equation)
    first, last = shape.num_constants, shape.num_constants + shape.num_carries
    entries = [
        new_value(var.aval, is_fixed(operand) and not first <= index < last, unchecked)
        for index, (var, operand) in enumerate(zip(versions.open_jaxpr(params["jaxpr"]).invars, inputs, strict=True))
    ]
    body: list[Node] = []
    results = lower(params["jaxpr"], entries, body, unchecked=unchecked)
    outputs = [
        new_value(var.aval, index >= shape.num_carries and is_fixed(result), unchecked)
        for index, (var, result) in enumerate(zip(equation.outvars, results, strict=True))
    ]
    loop = Loop(
        body=Block(inputs=tuple(entries), nodes=tuple(body), outputs=tuple(results)),
        num_constants=shape.num_constants, num_carries=shape.num_carries, length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"], effectful=any(n.operation.effectful for n in body),
    )  # fmt: skip
    whole = Node(loop, tuple(inputs), tuple(outputs))
    return _forward_stacks(loop_parts(whole, loop), loop, outputs, nodes)


def _forward_stacks(parts: LoopParts, loop: Loop, outputs: list[Value], nodes: list[Node]) -> list[Operand]:
    """Emits a loop without the stacks that are one of its inputs, or a stack twice, and with a loop for fixed ones."""
    known: dict[Operand, Operand] = {entry.inner: entry.outer for entry in parts.slices}
    forwarded: dict[Value, Operand] = {}
    varied: list[Stack] = []
    fixed: list[Stack] = []
    for stack in parts.stacks:
        if stack.inner in known:
            forwarded[stack.outer] = known[stack.inner]
            continue
        known[stack.inner] = stack.outer
        (fixed if stack.outer.fixed else varied).append(stack)
    keep = [output in {s.outer for s in varied} or output in {c.final for c in parts.carries} for output in outputs]
    whole = Node(loop, *_sides(parts))
    if any(keep) or loop.effectful:
        nodes.append(restrict(whole, keep))
    if fixed:
        lone = restrict(whole, [output in {s.outer for s in fixed} for output in outputs], keep_effects=False)
        assert isinstance(lone.operation, Loop)
        lone_parts = loop_parts(lone, lone.operation)
        nodes.append(lone_parts.node(lone.operation, lone.operation.body.nodes, batched=can_batch(lone.operation.body)))
    return [forwarded.get(output, output) for output in outputs]


def _sides(parts: LoopParts) -> tuple[tuple[Operand, ...], tuple[Value, ...]]:
    starts = [carry.start for carry in parts.carries]
    operands = (*(e.outer for e in parts.constants), *starts, *(e.outer for e in parts.slices))
    return operands, (*(c.final for c in parts.carries), *(s.outer for s in parts.stacks))


def _lower_shard_map(
    equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]
) -> list[Operand]:
    params, axes = equation.params, versions.manual_axes(equation)
    inner_unchecked = unchecked if params["check_vma"] else unchecked | axes
    entries = [
        new_value(var.aval, is_fixed(operand), inner_unchecked)
        for var, operand in zip(versions.open_jaxpr(params["jaxpr"]).invars, inputs, strict=True)
    ]
    body: list[Node] = []
    results = lower(params["jaxpr"], entries, body, unchecked=inner_unchecked)
    outputs = [
        new_value(var.aval, is_fixed(result), unchecked) for var, result in zip(equation.outvars, results, strict=True)
    ]
    sharded = Sharded(
        body=Block(inputs=tuple(entries), nodes=tuple(body), outputs=tuple(results)),
        mesh=params["mesh"], axes=axes, check_vma=params["check_vma"], context=equation.ctx,
        ports_in=tuple(map(Port, params["in_specs"])), ports_out=tuple(map(Port, params["out_specs"])),
        effectful=any(node.operation.effectful for node in body),
    )  # fmt: skip
    whole = Node(sharded, tuple(inputs), tuple(outputs))
    return _forward_shards(whole, sharded_parts(whole, sharded), nodes)


def _forward_shards(whole: Node, parts: ShardedParts, nodes: list[Node]) -> list[Operand]:
    known: dict[tuple[Operand, Any], Operand] = {(i.inner, i.port.spec): i.outer for i in parts.inlets}
    forwarded: dict[Value, Operand] = {}
    for outlet in parts.outlets:
        if (outlet.inner, outlet.port.spec) in known:
            forwarded[outlet.outer] = known[outlet.inner, outlet.port.spec]
        else:
            known[outlet.inner, outlet.port.spec] = outlet.outer
    for fixed in (False, True):
        keep = [output.fixed == fixed and output not in forwarded for output in whole.outputs]
        if any(keep) or (whole.operation.effectful and not fixed):
            nodes.append(restrict(whole, keep, keep_effects=not fixed))
    return [forwarded.get(output, output) for output in whole.outputs]
