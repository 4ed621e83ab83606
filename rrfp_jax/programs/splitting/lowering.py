"""From a function to nodes: it is traced with its pullback, calls are inlined, loops and shard maps become blocks.

Inlining `jit`, `jax.checkpoint` and custom-derivative calls is safe here because derivatives have been taken already
and a boundary of a call means nothing to the compiler, with two exceptions that are kept as nodes of their own: the
shardings that a nested `jit` asks for, and the barrier with which a rematerialised backward waits for its cotangents.

An output of a loop or shard map that is fixed (a cast of stacked weights that the forward hands on as a residual, say)
is taken out into a loop of its own that reads fixed values alone. Carries are never counted as fixed; that costs at
most a stored copy of something that counts passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs import jaxprs
from rrfp_jax.programs.splitting.ir import (
    Apply,
    Barrier,
    Block,
    Constant,
    Loop,
    Node,
    Operand,
    Outlet,
    Port,
    Sharded,
    ShardingConstraint,
    Var,
    is_fixed,
    loop_parts,
    restrict,
    sharded_parts,
)
from rrfp_jax.programs.splitting.rules import can_batch

# -- tracing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Structure:
    """A pytree's structure and leaves: how to flatten a tree like it, and which of its leaves have a gradient."""

    name: str
    treedef: Any
    specs: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    differentiable: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, tree: Any, wanted: Any = True) -> Structure:
        """Returns the structure of `tree`.

        `wanted`, a boolean or a tree of them that is a prefix of `tree`, may deny inexact leaves their gradient.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        choice = jax.tree.leaves(jax.tree.broadcast(wanted, tree))
        specs = []
        for _, leaf in leaves:
            spec = leaf
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                aval, sharding = jax.typeof(leaf), getattr(leaf, "sharding", None)
                placed = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
                spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=placed)
            specs.append(spec)
        mask = [
            bool(chosen) and jnp.issubdtype(spec.dtype, jnp.inexact) for chosen, spec in zip(choice, specs, strict=True)
        ]
        paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        return cls(name, treedef, tuple(specs), paths, tuple(mask))

    def flatten(self, tree: Any) -> list[Any]:
        """Returns the leaves of `tree`; raises `ValueError` if it is not like the one that was traced."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"{self.name} have the structure {treedef}, but the function was split for {self.treedef}: "
                f"split it again for these {self.name}"
            )
        for leaf, spec, path in zip(leaves, self.specs, self.paths, strict=True):
            _check(f"{self.name}{path}", leaf, spec)
        return leaves

    def flatten_gradient(self, tree: Any) -> list[Any]:
        """Returns the leaves of a gradient for the differentiable leaves; the others may be None or anything."""
        leaves = self.treedef.flatten_up_to(tree)
        for leaf, spec, path in compress(zip(leaves, self.specs, self.paths, strict=True), self.differentiable):
            _check(f"gradient of {self.name}{path}", leaf, spec)
        return list(compress(leaves, self.differentiable))

    def unflatten(self, picked: Sequence[Any], others: Sequence[Any] | None = None) -> Any:
        """Returns a tree of this structure: its differentiable leaves are `picked`, the rest those of `others`, which
        has an entry for every leaf, or None."""
        rest, others = iter(picked), [None] * len(self.specs) if others is None else others
        pairs = zip(others, self.differentiable, strict=True)
        return self.treedef.unflatten([next(rest) if wanted else other for other, wanted in pairs])


def _check(name: str, leaf: Any, spec: jax.ShapeDtypeStruct) -> None:
    if jnp.shape(leaf) != spec.shape or jnp.result_type(leaf) != spec.dtype:
        raise ValueError(
            f"{name} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}, but the function was split for "
            f"{spec.dtype}{list(spec.shape)}: split it again for these shapes"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """Forward: [*params, *inputs] -> [*outputs, *residuals]. Backward: [*residuals, *cotangents] -> gradients of the
    differentiable leaves, [*params, *inputs]."""

    forward: Any
    backward: Any
    params: Structure
    inputs: Structure
    outputs: Structure


def trace(
    fn: Callable[[Any, Any], Any], params: Any, inputs: Any, param_gradients: Any = True, input_gradients: Any = True
) -> Traced:
    """Traces `fn(params, inputs)` once, together with its pullback."""
    at_params = Structure.of("params", params, param_gradients)
    at_inputs = Structure.of("inputs", inputs, input_gradients)

    def run(params_leaves: Sequence[Any], inputs_leaves: Sequence[Any]) -> tuple[Any, Any]:
        return jax.vjp(
            lambda params_picked, inputs_picked: fn(
                at_params.unflatten(params_picked, params_leaves), at_inputs.unflatten(inputs_picked, inputs_leaves)
            ),
            list(compress(params_leaves, at_params.differentiable)),
            list(compress(inputs_leaves, at_inputs.differentiable)),
        )

    forward, (outputs, pullback) = jax.make_jaxpr(run, return_shape=True)(list(at_params.specs), list(at_inputs.specs))
    at_outputs = Structure.of("outputs", outputs)
    # the pullback is a pytree of the residuals, so it can be flattened here and put together in a trace of its own
    residuals, treedef = jax.tree.flatten(pullback)

    def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        zeros = [np.zeros(spec.shape, jax.dtypes.float0) for spec in at_outputs.specs]
        return jax.tree.unflatten(treedef, residuals)(at_outputs.unflatten(cotangents, zeros))

    cotangents = list(compress(at_outputs.specs, at_outputs.differentiable))
    backward = jax.make_jaxpr(pull)(residuals, cotangents)
    return Traced(forward=forward, backward=backward, params=at_params, inputs=at_inputs, outputs=at_outputs)


# -- lowering ----------------------------------------------------------------------------------------------------------


def lower(
    jaxpr: Any, operands: Sequence[Operand], nodes: list[Node], *, unchecked: frozenset[str] = frozenset()
) -> list[Operand]:
    """Appends to `nodes` the operations of `jaxpr` on `operands` and returns its outputs.

    `unchecked` are the mesh axes of enclosing shard maps without `check_vma`: there any value may vary over them.
    """
    source = jaxprs.open_jaxpr(jaxpr)
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


def new_var(aval: Any, fixed: bool, unchecked: frozenset[str] = frozenset()) -> Var:
    """Returns a variable for an abstract value or spec."""
    return Var(tuple(aval.shape), aval.dtype, fixed, jaxprs.varying_axes(aval) | unchecked)


def _lower_equation(
    equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]
) -> Sequence[Operand]:
    called, name = jaxprs.called_jaxpr(equation), equation.primitive.name
    if called is not None:
        if jaxprs.is_rematerialised(equation):
            inputs = _barrier(inputs, nodes)
        inputs = _constrain(equation.params.get("in_shardings", ()), inputs, nodes)
        results = lower(called, inputs, nodes, unchecked=unchecked)
        return _constrain(equation.params.get("out_shardings", ()), results, nodes)
    if name == "name":
        return inputs
    if name == "optimization_barrier":
        return _barrier(inputs, nodes)
    if name in ("scan", "shard_map") and not jaxprs.holds_references(equation):
        return (_lower_scan if name == "scan" else _lower_shard_map)(equation, inputs, nodes, unchecked)
    effectful = jaxprs.effectful(equation)
    fixed = all(map(is_fixed, inputs)) and not effectful
    operation = Apply(primitive=equation.primitive, params=equation.params, context=equation.ctx, effectful=effectful)
    outputs = [new_var(var.aval, fixed, unchecked) for var in equation.outvars]
    nodes.append(Node(operation, tuple(inputs), tuple(outputs)))
    return outputs


def _constrain(shardings: Sequence[Any], operands: list[Operand], nodes: list[Node]) -> list[Operand]:
    results = list(operands)
    for index, sharding in enumerate(shardings):
        operand = operands[index]
        if isinstance(sharding, jax.sharding.Sharding) and isinstance(operand, Var):
            result = Var(operand.shape, operand.dtype, operand.fixed, operand.varying)
            nodes.append(Node(ShardingConstraint(sharding), (operand,), (result,)))
            results[index] = result
    return results


def _barrier(operands: list[Operand], nodes: list[Node]) -> list[Operand]:
    # a fixed value needs no barrier: whatever reads it reads another operand too, and waits for that one
    held = [operand for operand in operands if isinstance(operand, Var) and not operand.fixed]
    released = {value: Var(value.shape, value.dtype, False, value.varying) for value in held}
    if released:
        nodes.append(Node(Barrier(), tuple(released), tuple(released.values())))
    return [released.get(operand, operand) if isinstance(operand, Var) else operand for operand in operands]


def _lower_scan(equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]) -> list[Operand]:
    """Appends a loop without the stacks that repeat one of its inputs or another stack, and a loop for fixed ones."""
    params, (num_constants, num_carries) = equation.params, jaxprs.scan_shape(equation)
    carries = range(num_constants, num_constants + num_carries)
    entries = [
        new_var(var.aval, is_fixed(operand) and index not in carries, unchecked)
        for index, (var, operand) in enumerate(zip(jaxprs.open_jaxpr(params["jaxpr"]).invars, inputs, strict=True))
    ]
    body: list[Node] = []
    results = lower(params["jaxpr"], entries, body, unchecked=unchecked)
    outputs = [
        new_var(var.aval, index >= num_carries and is_fixed(result), unchecked)
        for index, (var, result) in enumerate(zip(equation.outvars, results, strict=True))
    ]
    loop = Loop(
        body=Block(inputs=tuple(entries), nodes=tuple(body), outputs=tuple(results)),
        num_constants=num_constants, num_carries=num_carries, length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"], effectful=any(n.operation.effectful for n in body),
    )  # fmt: skip
    whole = Node(loop, tuple(inputs), tuple(outputs))
    parts = loop_parts(whole, loop)
    known: dict[Operand, Operand] = {entry.inner: entry.outer for entry in parts.slices}
    forwarded: dict[Var, Operand] = {}
    varied: list[Outlet] = []
    fixed: list[Outlet] = []
    for stack in parts.stacks:
        if stack.inner in known:
            forwarded[stack.outer] = known[stack.inner]
            continue
        known[stack.inner] = stack.outer
        (fixed if stack.outer.fixed else varied).append(stack)
    kept = {s.outer for s in varied} | {c.final for c in parts.carries}
    keep = [output in kept for output in outputs]
    if any(keep) or loop.effectful:
        nodes.append(restrict(whole, keep))
    if fixed:
        lone = restrict(whole, [output in {s.outer for s in fixed} for output in outputs], keep_effects=False)
        assert isinstance(lone.operation, Loop)
        lone_parts = loop_parts(lone, lone.operation)
        nodes.append(lone_parts.node(lone.operation, lone.operation.body.nodes, batched=can_batch(lone.operation.body)))
    return [forwarded.get(output, output) for output in outputs]


def _lower_shard_map(
    equation: Any, inputs: list[Operand], nodes: list[Node], unchecked: frozenset[str]
) -> list[Operand]:
    params, axes = equation.params, jaxprs.manual_axes(equation)
    inner_unchecked = unchecked if params["check_vma"] else unchecked | axes
    entries = [
        new_var(var.aval, is_fixed(operand), inner_unchecked)
        for var, operand in zip(jaxprs.open_jaxpr(params["jaxpr"]).invars, inputs, strict=True)
    ]
    body: list[Node] = []
    results = lower(params["jaxpr"], entries, body, unchecked=inner_unchecked)
    outputs = [
        new_var(var.aval, is_fixed(result), unchecked) for var, result in zip(equation.outvars, results, strict=True)
    ]
    sharded = Sharded(
        body=Block(inputs=tuple(entries), nodes=tuple(body), outputs=tuple(results)),
        mesh=params["mesh"], axes=axes, check_vma=params["check_vma"], context=equation.ctx,
        ports_in=tuple(map(Port, params["in_specs"])), ports_out=tuple(map(Port, params["out_specs"])),
        effectful=any(node.operation.effectful for node in body),
    )  # fmt: skip
    whole = Node(sharded, tuple(inputs), tuple(outputs))
    parts = sharded_parts(whole, sharded)
    known: dict[tuple[Operand, Any], Operand] = {(i.inner, i.port.spec): i.outer for i in parts.inlets}
    forwarded: dict[Var, Operand] = {}
    for outlet in parts.outlets:
        if (outlet.inner, outlet.port.spec) in known:
            forwarded[outlet.outer] = known[outlet.inner, outlet.port.spec]
        else:
            known[outlet.inner, outlet.port.spec] = outlet.outer
    for fixed in (False, True):
        keep = [output.fixed == fixed and output not in forwarded for output in outputs]
        if any(keep) or (sharded.effectful and not fixed):
            nodes.append(restrict(whole, keep, keep_effects=not fixed))
    return [forwarded.get(output, output) for output in outputs]
