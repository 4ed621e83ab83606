"""Forward and fused backward of one chunk, as compiled programs."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.linearize import Linearization, inexact_places, linearize
from rrfp_jax.programs.rng import counters, microbatch_key
from rrfp_jax.programs.shapes import ChunkShapes, arrange_inputs
from rrfp_jax.programs.specs import Specs, gradient_spec
from rrfp_jax.tasks import PipelineGraph


class Stash(NamedTuple):
    """What the backward of one microbatch needs. Handed to one backward, once: it takes over ``donated``."""

    donated: tuple[Any, ...] = ()
    """Values whose memory the input gradients take over."""
    saved: tuple[Any, ...] = ()
    """The other values that only this stash holds."""
    kept: tuple[Any, ...] = ()
    """Inputs, batch leaves and outputs that the backward reads again; others may hold them too."""


@dataclass(frozen=True, kw_only=True)
class GradientPrograms:
    """The compiled forward and backward of a chunk, over flat operands; ``backward`` is None where there is none."""

    forward: Compiled
    backward: Compiled | None
    kept: tuple[int, ...]
    """Leaves of ``((inputs, leaves, counters), outputs)`` that go into ``Stash.kept``."""
    stash: Stash
    """Shapes and dtypes of the stash."""


def accumulator_spec(params: Specs) -> Specs:
    """Gradients are summed in float32, or in float64 where the parameters are."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)


def compile_gradients(
    chunk: Chunk, index: int, graph: PipelineGraph, shapes: ChunkShapes, *, sharding: jax.sharding.Sharding
) -> GradientPrograms:
    """Trace and compile the forward of a chunk and, where a gradient reaches it, its backward.

    ``forward(params, (inputs, leaves, counters)) -> (outputs, donated, saved)`` and
    ``backward(accumulators, donated, params, (saved, kept), output_grads) -> (accumulators, input_grads)``, where the
    first two arguments are taken over.
    """
    operands = (shapes.inputs, shapes.leaves, counters_spec() if chunk.uses_key else ())
    if not graph.has_backward(index):
        forward = compile_program("forward", _without_stash(_apply(chunk)), shapes.params, operands, sharding=sharding)
        return GradientPrograms(forward=forward, backward=None, kept=(), stash=Stash())

    is_sink = not graph.successors(index)
    chosen = _chosen_inputs(index, graph, shapes)
    lin = linearize(
        _apply(chunk),
        shapes.params,
        operands,
        operand_leaves=list(itertools.chain(*chosen)),
        output_leaves=[0] if is_sink else inexact_places(shapes.outputs),
    )
    at_hand = jax.tree.leaves((operands, shapes.outputs))
    donated, saved = _donatable(lin.stash, [at_hand[place] for place in itertools.chain(*chosen)])
    stash = Stash(
        donated=tuple(lin.stash[place] for place in donated),
        saved=tuple(lin.stash[place] for place in saved),
        kept=tuple(at_hand[place] for place in lin.kept),
    )
    forward = compile_program("forward", _forward(lin, donated, saved), shapes.params, operands, sharding=sharding)
    backward = compile_program(
        "backward",
        _backward(lin, donated + saved, _gradient_trees(index, graph, shapes), is_sink=is_sink),
        accumulator_spec(shapes.params),
        stash.donated,
        shapes.params,
        (stash.saved, stash.kept),
        (gradient_spec(shapes.outputs),) * len(graph.gradient_successors(index)),
        sharding=sharding,
        donate=(0, 1),
    )
    return GradientPrograms(forward=forward, backward=backward, kept=lin.kept, stash=stash)


def counters_spec() -> jax.ShapeDtypeStruct:
    """The shape of what :func:`rrfp_jax.programs.rng.counters` returns."""
    value = counters(0, 0, 0)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _apply(chunk: Chunk) -> Callable[[Any, Any], Any]:
    def apply(params: Any, operands: Any) -> Any:
        inputs, leaves, numbers = operands
        key = microbatch_key(numbers[0], numbers[1], numbers[2]) if chunk.uses_key else None
        return chunk.apply(params, arrange_inputs(inputs), leaves, key=key)

    return apply


def _chosen_inputs(index: int, graph: PipelineGraph, shapes: ChunkShapes) -> list[list[int]]:
    """Per gradient predecessor: the places, among the flattened operands, of the floating leaves of its output."""
    chosen, offset = [], 0
    for predecessor, spec in zip(graph.predecessors(index), shapes.inputs, strict=True):
        if predecessor in graph.gradient_predecessors(index):
            chosen.append(inexact_places(spec, offset))
        offset += len(jax.tree.leaves(spec))
    return chosen


def _gradient_trees(index: int, graph: PipelineGraph, shapes: ChunkShapes) -> list[Any]:
    """Per gradient predecessor: the tree of the gradient that it gets."""
    by_predecessor = dict(zip(graph.predecessors(index), shapes.inputs, strict=True))
    return [jax.tree.structure(gradient_spec(by_predecessor[p])) for p in graph.gradient_predecessors(index)]


def _donatable(
    stash: Sequence[jax.ShapeDtypeStruct], grads: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[int], list[int]]:
    """Split the stash into values whose memory an input gradient of the same shape can take over, and the rest.

    Only results that match in shape and dtype can take a buffer over; donating more has no effect but a warning.
    """
    wanted = Counter((spec.shape, spec.dtype) for spec in grads)
    donated = []
    for place, spec in enumerate(stash):
        if wanted[spec.shape, spec.dtype] > 0:
            wanted[spec.shape, spec.dtype] -= 1
            donated.append(place)
    return donated, [place for place in range(len(stash)) if place not in donated]


def _without_stash(apply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def forward(params: Any, operands: Any) -> Any:
        return apply(params, operands), (), ()

    return forward


def _forward(lin: Linearization, donated: list[int], saved: list[int]) -> Callable[..., Any]:
    def forward(params: Any, operands: Any) -> Any:
        outputs, stash = lin.forward(params, operands)
        return outputs, tuple(stash[place] for place in donated), tuple(stash[place] for place in saved)

    return forward


def _backward(
    lin: Linearization, stash_order: list[int], input_trees: list[Any], *, is_sink: bool
) -> Callable[..., Any]:
    def backward(accumulators: Any, donated: Any, params: Any, rest: Any, output_grads: Any) -> Any:
        saved, kept = rest
        by_place = dict(zip(stash_order, (*donated, *saved), strict=True))
        stash = [by_place[place] for place in range(len(by_place))]
        cotangents = [jnp.ones((), jnp.float32)] if is_sink else _ordered_sum(output_grads)
        params_grads, operand_grads = lin.backward(params, kept, stash, cotangents)
        accumulators = jax.tree.map(lambda a, g: a + g.astype(a.dtype), accumulators, params_grads)
        input_grads = []
        for tree in input_trees:
            input_grads.append(jax.tree.unflatten(tree, operand_grads[: tree.num_leaves]))
            operand_grads = operand_grads[tree.num_leaves :]
        return accumulators, tuple(input_grads)

    return backward


def _ordered_sum(output_grads: Sequence[Any]) -> list[jax.Array]:
    """The sum of the successors' gradients, from the first to the last, as flat leaves."""
    total = jax.tree.leaves(output_grads[0])
    for grads in output_grads[1:]:
        total = [a + b for a, b in zip(total, jax.tree.leaves(grads), strict=True)]
    return total
