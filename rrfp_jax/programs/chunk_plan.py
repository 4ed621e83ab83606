"""The plan of a chunk: its forward and backward as functions over flat operands, traced, cut and laid out.

Nothing here is compiled, and nothing depends on devices but the layout. So one plan serves all units of the chunk, and
all chunks of its kind.

All functions of a plan come from one trace of ``apply`` and its pullback (:mod:`rrfp_jax.programs.splitting`), whether
the backward stays in one piece or is split. A chunk that computes the loss gets its output gradient, ones, like any
other.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding, use_abstract_mesh

from rrfp_jax.programs.chunk import Chunk, counters, microbatch_key, trained_specs
from rrfp_jax.programs.jaxprs import partitioned_axes
from rrfp_jax.programs.remat import Remat, rematerialised
from rrfp_jax.programs.residuals import (
    ResidualLayout,
    WeightResidualLayout,
    lay_out_residuals,
    lay_out_weight_residuals,
    made_for_weights,
    summed_leaves,
)
from rrfp_jax.programs.sameness import ProgramStore, identity
from rrfp_jax.programs.shapes import ChunkShapes, arrange_inputs, describe_chunk
from rrfp_jax.programs.specs import Specs, gradient_spec, pick, spec_of
from rrfp_jax.programs.splitting import SplitBackward, split_backward
from rrfp_jax.programs.splitting.joined import widens
from rrfp_jax.schedules import PipelineGraph


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPlan:
    """The functions of one chunk and the shapes of their arguments and results; made by :func:`plan_chunk`."""

    is_split: bool
    """Whether the backward is cut into input gradient and weight gradient."""
    params: Specs
    """Parameters, by the names that the chunk's function knows."""
    trained: tuple[str, ...]
    """The parameters among them that get gradients, and accumulators."""
    operands: Specs
    """``(inputs, leaves, (counters, numbers))``; see :class:`rrfp_jax.programs.chunk.ForLayers` for the numbers."""
    outputs: Specs
    """The outputs of the forward."""
    output_grads: Specs
    """One entry per gradient that the backward gets, ascending."""
    input_grads: Specs
    """One entry per gradient that it returns, ascending."""
    has_backward: bool
    """False for a chunk that needs no gradient, or gets none."""
    has_lean_forward: bool = False
    """Whether there is a forward that makes no residuals, for microbatches whose residuals are made again."""
    split: SplitBackward
    """The traced and split function; without a backward one that differentiates nothing."""
    kind: Hashable = None
    """Equal for chunks whose plan is the same."""
    senders: tuple[int, ...]
    """Places, among the inputs, of those that get a gradient."""
    residuals: ResidualLayout = field(default_factory=ResidualLayout)
    weight_residuals: WeightResidualLayout = field(default_factory=WeightResidualLayout)

    def laid_out(
        self, boundary: Sharding | None = None, made_by_forward: Sequence[Sharding] | None = None
    ) -> "ChunkPlan":
        """Returns the plan with the residuals of a forward that makes arrays of these shardings.

        Without ``boundary`` all lies on one device.
        """
        results = jax.tree.leaves(self.input_grads)
        sources = self.split.weight_residual_sources if self.is_split else ()
        if self.is_split and not isinstance(boundary, NamedSharding):
            results += self.made  # on a mesh nobody knows yet how they will lie
        residuals = lay_out_residuals(
            self.split,
            self.operands,
            results=results,
            outliving={source.position for source in sources if source.origin == "residual"},
            boundary=boundary,
            made_shardings=made_by_forward,
        )
        return replace(self, residuals=residuals).with_weight_residuals(boundary)

    def with_weight_residuals(
        self, boundary: Sharding | None, made_by_input_gradient: Sequence[Sharding] | None = None
    ) -> "ChunkPlan":
        """Returns the plan with the weight-gradient residuals of an input gradient that makes arrays of these
        shardings."""
        if not self.is_split:
            return self
        layout = lay_out_weight_residuals(
            self.split,
            self.residuals,
            self.output_grads,
            self.input_grads,
            boundary=boundary,
            made_shardings=made_by_input_gradient,
        )
        return replace(self, weight_residuals=layout)

    @cached_property
    def aliased_inputs(self) -> tuple[bool, ...]:
        """For each aliased residual, whether a predecessor sent it."""
        num_inputs = len(jax.tree.leaves(self.operands[0]))
        return tuple(place < num_inputs for place in self.residuals.aliased)

    @cached_property
    def made(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that the program of the input gradient makes for the weight gradient."""
        return made_for_weights(self.split, self.output_grads) if self.is_split else ()

    @property
    def num_programs(self) -> int:
        """How many programs :class:`rrfp_jax.programs.microbatch_programs.KindPrograms` makes of it."""
        if not self.is_split:
            return 1 + self.has_lean_forward + self.has_backward
        has_weights = bool(jax.tree.leaves(pick(self.params, self.trained)))
        return 1 + self.has_lean_forward + bool(jax.tree.leaves((self.input_grads, self.made))) + has_weights

    def forward(self, params: Any, derived: Any, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns (outputs, made): the residuals that the forward makes."""
        return self.split.forward_made(params, operands, derived=derived)

    def lean_forward(self, params: Any, derived: Any, operands: Any) -> Any:
        """Returns the outputs alone."""
        return self.forward(params, derived, operands)[0]

    def backward(
        self, owned: Any, params: Any, derived: Any, rest: Any, output_grads: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns (accumulators, input_grads).

        ``owned`` is ``(accumulators, donated)``, ``rest`` is ``(saved, aliased)``.
        """
        accumulators, donated = owned
        residuals = self.residuals.arrays(donated, *rest)
        operand_grads, totals = self.split.full_backward(
            params, residuals, _ordered_sum(output_grads), derived=derived, sums=jax.tree.leaves(accumulators)
        )
        return pick(totals, accumulators), self._pick_inputs(operand_grads)

    def input_gradient(
        self, donated: Any, params: Any, derived: Any, rest: Any, output_grads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns (made, input_grads).

        The input gradients come last, as the first layer makes them last: results take over donated arrays in order.
        """
        residuals, total = self.residuals.arrays(donated, *rest), _ordered_sum(output_grads)
        operand_grads, made = self.split.backward_made(params, residuals, total, derived=derived)
        leaves = jax.tree.leaves(total)
        sums = summed_leaves(self.split, self.output_grads)
        return (*made, *(leaves[i] for i in sums)), self._pick_inputs(operand_grads)

    def weight_gradient(self, accumulators: Any, params: Any, derived: Any, weight_residuals: Any) -> Any:
        """Returns the accumulators with one more microbatch."""
        grads = pick(self.split.weight_gradient(params, weight_residuals, derived=derived), accumulators)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), accumulators, grads)

    def forward_and_backward(self, params: Any, operands: Any, output_grads: Any) -> tuple[Any, Any]:
        """Returns (outputs, gradients): all that the programs of a microbatch compute, for comparisons between
        processes before it is compiled."""
        outputs, residuals = self.split.forward(params, operands)
        if not self.has_backward:
            return outputs, ()
        return outputs, self.split.full_backward(params, residuals, _ordered_sum(output_grads))

    def _pick_inputs(self, operand_grads: Any) -> tuple[Any, ...]:
        return tuple(operand_grads[0][place] for place in self.senders)


def plan_chunk(
    index: int,
    chunks: Sequence[Chunk],
    graph: PipelineGraph,
    shapes: Sequence[ChunkShapes],
    *,
    remat: Remat = "none",
    lean_forward: bool = False,
    mesh: Mesh | None = None,
    store: ProgramStore | None = None,
) -> ChunkPlan:
    """Traces the forward of chunk ``index`` and, where a gradient reaches it, its backward; nothing is compiled.

    The plan is for one device until it is ``laid_out`` on others, and serves for any number of units, and for all
    chunks of a kind: ``store`` has those that are made already. It knows parameters by the names that the chunk's
    function knows. ``lean_forward`` asks for a forward without residuals too, if there are any to spare. ``mesh`` is
    that of the units that will run it, of which only axes and sizes matter (None: one device). Raises ValueError,
    naming the chunk, where it cannot be differentiated.
    """
    with naming_chunk(chunks, index):
        chunk, own = chunks[index], shapes[index]
        kind = (_kind(chunk, index, graph, own, remat), () if mesh is None else mesh.abstract_mesh)

        def make() -> ChunkPlan:
            with nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh):
                plan = replace(_plan(chunk, index, graph, own, remat), kind=kind)
            if mesh is not None and plan.has_backward:
                _refuse_convolutions(plan, mesh)
            return plan

        plan: ChunkPlan = (store or ProgramStore()).get(("plan", kind), make)
        makes_residuals = any(source.origin == "made" for source in plan.split.residual_sources)
        return replace(plan, kind=(kind, "lean"), has_lean_forward=True) if lean_forward and makes_residuals else plan


def _refuse_convolutions(plan: ChunkPlan, mesh: Mesh) -> None:
    """Raises ValueError for a convolution that XLA cuts over two axes: it multiplies the gradients (JAX 0.10, 0.11).

    Plain ``jax.jit`` shows the same. Only some kinds and axes are concerned; but nothing shows which, since the outputs
    are right.
    """
    axes = partitioned_axes(
        plan.split.traced_forward,
        "conv_general_dilated",
        frozenset(name for name, size in mesh.shape.items() if size > 1),
    )
    if len(axes) > 1:
        raise ValueError(
            f"it has a convolution on a mesh of {' x '.join(f'{name} {size}' for name, size in mesh.shape.items())}, "
            "where XLA computes wrong gradients of convolutions: give the stage one axis of more than one device, "
            "write the convolution as products, or call it within jax.shard_map over all axes but one"
        )


def check_reached(chunks: Sequence[Chunk], index: int, plans: Sequence[ChunkPlan]) -> None:
    """Raises ValueError for parameters of chunk ``index`` that train, but get a gradient in none of ``plans``.

    The optimizer would only let them decay. Shared layers are left out, since another holder may have their gradient.
    Nothing is refused if every plan lacks a leaf or an input, since the parameters may serve that one.
    """
    chunk = chunks[index]
    operands = [plan.operands for plan in plans]
    if not any(len(leaves) == len(chunk.leaves) and None not in inputs for inputs, leaves, _ in operands):
        return
    flags = [jax.tree.leaves_with_path(chunk.own.to_model(plan.split.is_reached)) for plan in plans]
    unreached = [
        jax.tree_util.keystr(of_leaf[0][0])
        for of_leaf in zip(*flags, strict=True)
        if of_leaf[0][0][0].key not in chunk.shared and not any(is_reached for _, is_reached in of_leaf)
    ]
    if unreached:
        more = f" and {len(unreached) - 3} more" if len(unreached) > 3 else ""
        raise ValueError(
            f"{describe_chunk(chunks, index)} has parameters that no gradient reaches, and the optimizer would only "
            f"let them decay: {', '.join(unreached[:3])}{more}; leave out of its params what the loss does not depend "
            "on and what apply computes anew (running statistics are not kept), and put what stays as it is into a "
            "layer of its own, named in frozen=..."
        )


@contextmanager
def naming_chunk(chunks: Sequence[Chunk], index: int) -> Iterator[None]:
    """Names the chunk in errors that are raised within the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{describe_chunk(chunks, index)} cannot be compiled: {error}") from error


def _kind(chunk: Chunk, index: int, graph: PipelineGraph, shapes: ChunkShapes, remat: Remat) -> Hashable:
    """Returns all that a plan depends on."""
    specs = (chunk.own.to_own(shapes.params), shapes.inputs, shapes.leaves, shapes.outputs, spec_of(chunk.own.numbers))
    neighbours = (graph.predecessors(index), graph.gradient_predecessors(index))
    return (
        chunk.own.kind,
        _trained(chunk, index, graph),
        chunk.uses_key,
        tuple(jax.tree.leaves(specs)),
        jax.tree.structure(specs),
        tuple(c in neighbours[1] for c in neighbours[0]),
        len(graph.successors(index)),
        len(graph.gradient_successors(index)),
        graph.has_backward(index) and (index in graph.split,),
        identity(remat),
    )


def _plan(chunk: Chunk, index: int, graph: PipelineGraph, shapes: ChunkShapes, remat: Remat) -> ChunkPlan:
    params = chunk.own.to_own(shapes.params)
    counted = counters(0, 0, 0)
    counters_spec = jax.ShapeDtypeStruct(counted.shape, counted.dtype) if chunk.uses_key else ()
    operands = (shapes.inputs, shapes.leaves, (counters_spec, spec_of(chunk.own.numbers)))
    senders = tuple(p for p, c in enumerate(graph.predecessors(index)) if c in graph.gradient_predecessors(index))
    input_grads = tuple(gradient_spec(shapes.inputs[place]) for place in senders)
    num_gradients = len(graph.gradient_successors(index)) if graph.successors(index) else 1
    output_grads = (gradient_spec(shapes.outputs),) * num_gradients
    apply, trained = _apply(chunk, is_sink=not graph.successors(index)), _trained(chunk, index, graph)
    has_backward = graph.has_backward(index)
    split = split_backward(
        rematerialised(apply, remat) if has_backward else apply,
        params,
        operands,
        param_gradients={name: name in trained for name in params},
        input_gradients=(tuple(place in senders for place in range(len(shapes.inputs))), False, False),
        widens=widens(),
    )
    plan = ChunkPlan(
        has_backward=has_backward,
        is_split=has_backward and index in graph.split,
        params=params,
        trained=trained,
        operands=operands,
        outputs=shapes.outputs,
        output_grads=output_grads,
        input_grads=input_grads,
        split=split,
        senders=senders,
    )
    return plan.laid_out()


def _trained(chunk: Chunk, index: int, graph: PipelineGraph) -> tuple[str, ...]:
    """Returns the layers that get gradients, by the names that the chunk's function knows."""
    return tuple(chunk.own.to_own(trained_specs(chunk))) if graph.trains(index) else ()


def _apply(chunk: Chunk, *, is_sink: bool) -> Callable[[Any, Any], Any]:
    def apply(params: Any, operands: Any) -> Any:
        inputs, leaves, (counted, numbers) = operands
        key = microbatch_key(counted[0], counted[1], counted[2]) if chunk.uses_key else None
        outputs = chunk.own(params, arrange_inputs(inputs), leaves, key=key, numbers=numbers)
        if not is_sink:
            return outputs
        # the weight and the named sums are constants of a step: only the loss has a gradient
        loss_sum, *rest = outputs
        return loss_sum, *jax.lax.stop_gradient(rest)

    return apply


def _ordered_sum(output_grads: Sequence[Any]) -> Any:
    """Returns the sum of the successors' gradients, added from the first to the last."""
    total = output_grads[0]
    for grads in output_grads[1:]:
        total = jax.tree.map(jnp.add, total, grads)
    return total
