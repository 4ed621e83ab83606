"""What the forward hands to the backward: the residuals, without what need not be handed on.

The forward and the backward are lowered into one list of nodes, the residuals being values of the former that the
latter reads. Then

* a residual that is fixed (a parameter, or made of parameters and constants) is not stored: the backward takes it from
  the live parameters;
* a residual that is another array reshaped, transposed, broadcast or widened is not stored: that array is, if it is not
  larger, and the backward redoes the free operation;
* what is left is stored once, however many residuals show it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rrfp_jax.programs.splitting.fixed import Twins, merge_fixed, renamed
from rrfp_jax.programs.splitting.ir import Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.liveness import slice_nodes
from rrfp_jax.programs.splitting.lowering import lower, new_value
from rrfp_jax.programs.splitting.operations import Apply
from rrfp_jax.programs.splitting.rules import is_free
from rrfp_jax.programs.splitting.tracing import Spec, Traced
from rrfp_jax.programs.splitting.widening import widen_products


@dataclass(frozen=True, eq=False, kw_only=True)
class Joined:
    """Forward and backward of one function over shared values."""

    params: list[Value]
    inputs: list[Value]
    outputs: list[Operand]
    residuals: list[Operand]
    """What `jax.vjp` would keep."""
    stash: list[Value]
    """What is kept: in part inputs as they are, in part values that the forward makes."""
    cotangents: list[Value]
    params_grad: list[Operand]
    inputs_grad: list[Operand]
    forward: list[Node]
    backward: list[Node]
    """All that leads from parameters, stash and cotangents to the gradients; shares its fixed nodes with `forward`."""

    @property
    def all_nodes(self) -> list[Node]:
        made = {output for node in self.forward for output in node.outputs}
        return [*self.forward, *(node for node in self.backward if not made.intersection(node.outputs))]

    @property
    def all_outputs(self) -> list[Operand]:
        return [*self.outputs, *self.stash, *self.params_grad, *self.inputs_grad]


def join(traced: Traced, *, widens: bool = False) -> Joined:
    params = [_value(spec, fixed=True) for spec in traced.params.specs]
    inputs = [_value(spec, fixed=False) for spec in traced.inputs.specs]
    forward: list[Node] = []
    results = lower(traced.forward, [*params, *inputs], forward)
    known: dict[Hashable, Node] = {}
    twins: Twins = {}
    forward = merge_fixed(forward, known, twins)
    results = renamed(results, twins)
    outputs, residuals = results[: len(traced.outputs.specs)], results[len(traced.outputs.specs) :]

    pairs = zip(traced.outputs.specs, traced.outputs.differentiable, strict=True)
    cotangents = [_value(spec, fixed=False) for spec, wanted in pairs if wanted]
    backward: list[Node] = []
    gradients = lower(traced.backward, [*residuals, *cotangents], backward)
    backward = merge_fixed(backward, known, twins)
    gradients = renamed(gradients, twins)
    num_params = sum(traced.params.differentiable)
    if widens:
        backward, of_params = widen_products(backward, gradients[:num_params])
        gradients = [*of_params, *gradients[num_params:]]

    whole = [*_repeatable(forward, residuals), *backward]
    live = slice_nodes(whole, gradients)
    return Joined(
        params=params, inputs=inputs, outputs=outputs, residuals=residuals, cotangents=cotangents,
        stash=_stored(live.needed, live.nodes, inputs, forward), forward=forward, backward=live.nodes,
        params_grad=gradients[:num_params], inputs_grad=gradients[num_params:],
    )  # fmt: skip


def _value(spec: Spec, *, fixed: bool) -> Value:
    return new_value(spec, fixed)


def _repeatable(forward: list[Node], residuals: list[Operand]) -> list[Node]:
    """The nodes of the forward that the backward does again: fixed ones, and free ones from a stored array."""
    makers = {output: node for node in forward for output in node.outputs}
    redone: set[Node] = set()
    for residual in values(residuals):
        shown = residual
        while (maker := makers.get(shown)) is not None and (source := _free_source(maker)) is not None:
            redone.add(maker)
            shown = source
    return [node for node in forward if node in redone or (node.outputs and all(map(is_fixed, node.outputs)))]


def _free_source(node: Node) -> Value | None:
    """The one array that a free node shows, if it is no larger than what the node makes of it."""
    sources = [operand for operand in values(node.inputs) if not operand.fixed]
    if len(sources) != 1 or not isinstance(node.operation, Apply) or not is_free(node):
        return None
    return sources[0] if sources[0].num_bytes <= node.outputs[0].num_bytes else None


def _stored(needed: set[Value], backward: list[Node], inputs: list[Value], forward: list[Node]) -> list[Value]:
    made = {output for node in backward for output in node.outputs}
    candidates = [*inputs, *(output for node in forward for output in node.outputs)]
    return [value for value in candidates if value in needed and value not in made and not value.fixed]
