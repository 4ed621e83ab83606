"""The plan of a chunk: its forward and backward as functions over flat operands, traced, cut and laid out.

Nothing here is compiled, and nothing depends on devices but the layout. So one plan serves all units of the chunk, and
all chunks of its kind. All functions of a plan come from one trace of ``apply`` and its pullback
(:mod:`rrfp_jax.programs.splitting`), whether the backward stays in one piece or is split. A chunk that computes the
loss gets its output gradient, ones, like any other.

The layout says which arrays of one microbatch pass from program to program, and who holds them. From forward to
backward go the :class:`Residuals`. Inputs, batch leaves and outputs among them are the caller's own arrays, by
reference (*aliased* residuals). So are, among the residuals of the weight gradient, arrays of the former and the
gradients that come and go. Programs return only arrays that they make, since they would copy any other. Layouts are
places in flat lists, fixed once the chunk has been traced.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding, use_abstract_mesh

from rrfp_jax.programs.chunk import Chunk, counters, microbatch_key, trained_specs
from rrfp_jax.programs.jaxprs import partitioned_axes
from rrfp_jax.programs.remat import Remat, rematerialised
from rrfp_jax.programs.sameness import ProgramStore, identity
from rrfp_jax.programs.shapes import (
    LOSS,
    ChunkShapes,
    Specs,
    arrange_inputs,
    describe_chunk,
    gradient_spec,
    loss_of,
    num_bytes,
    part_of,
    pick,
    spec_of,
)
from rrfp_jax.programs.shardings import passing
from rrfp_jax.programs.splitting import SplitBackward, split_backward
from rrfp_jax.programs.splitting.joined import widens
from rrfp_jax.schedules import PipelineGraph


class Residuals(NamedTuple):
    """The arrays that the backward of one microbatch needs, for one backward, which takes over ``donated``."""

    donated: tuple[Any, ...] = ()
    """Values of the forward whose memory the results of the backward take over."""
    saved: tuple[Any, ...] = ()
    """The other values of the forward, which nobody else holds."""
    aliased: tuple[Any, ...] = ()
    """Inputs, batch leaves and outputs that the backward reads again; others may hold them too."""


WeightResiduals = tuple[Any, ...]
"""The arrays that the weight gradient of one microbatch needs, after its input gradient."""


@dataclass(frozen=True, kw_only=True)
class WeightResidualBytes:
    """Bytes of the weight-gradient residuals, by their holder."""

    saved: int = 0
    """Bytes of saved residuals of the forward."""
    aliased: int = 0
    """Bytes of inputs, batch leaves and outputs that the residuals of the forward kept alive."""
    gradients: int = 0
    """Bytes of gradients as they came from a successor or go to a predecessor."""
    made: int = 0
    """Bytes that the input gradient's program makes for the weight gradient."""

    @property
    def total(self) -> int:
        """All bytes between input gradient and weight gradient."""
        return self.saved + self.aliased + self.gradients + self.made


@dataclass(frozen=True, kw_only=True)
class ResidualLayout:
    """How the residuals of a forward are put together and taken apart."""

    donated: tuple[int, ...] = ()
    """The arrays made by the forward that become ``Residuals.donated``."""
    saved: tuple[int, ...] = ()
    """The arrays made by the forward that become ``Residuals.saved``."""
    aliased: tuple[int, ...] = ()
    """The leaves of ``(operands, outputs)`` that become ``Residuals.aliased``."""
    order: tuple[int, ...] = ()
    """For each residual of the split its place in ``(*donated, *saved, *aliased)``."""
    specs: Residuals = field(default_factory=Residuals)
    """Shapes, dtypes and shardings."""

    def arrays(self, donated: Sequence[Any], saved: Sequence[Any], aliased: Sequence[Any]) -> list[Any]:
        """Returns the residuals in the order in which the split's functions take them."""
        parts = (*donated, *saved, *aliased)
        return [parts[place] for place in self.order]


@dataclass(frozen=True, kw_only=True)
class WeightResidualLayout:
    """How the residuals of a weight gradient are put together."""

    leaves: tuple[int, ...] = ()
    """The leaves of ``(saved, aliased, output_grads, input_grads, made)`` that the weight gradient gets."""
    specs: WeightResiduals = ()
    """Shapes, dtypes and shardings."""
    num_bytes: WeightResidualBytes = field(default_factory=WeightResidualBytes)


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
    """One entry per gradient that the backward gets, by ascending successor; that of a loss comes last."""
    parts: tuple[str | None, ...]
    """The part of the outputs that each of these is the gradient of; None: all outputs."""
    input_grads: Specs
    """One entry per gradient that it returns, ascending."""
    has_backward: bool
    """False for a chunk that needs no gradient, or gets none."""
    has_lean_forward: bool = False
    """Whether there is a forward that makes no residuals, for microbatches whose residuals are made again."""
    split: SplitBackward
    """The traced and split function; without a backward one that differentiates nothing."""
    kind: Hashable
    """Equal for chunks whose plan is the same."""
    senders: tuple[int, ...]
    """Places, among the inputs, of those that get a gradient."""
    residuals: ResidualLayout = field(default_factory=ResidualLayout)
    weight_residuals: WeightResidualLayout = field(default_factory=WeightResidualLayout)

    def laid_out(
        self, boundary: Sharding | None = None, made_by_forward: Sequence[Sharding] | None = None
    ) -> "ChunkPlan":
        """Returns the plan with the residuals of a forward that makes arrays of these shardings (None: at the
        boundary, as all else).

        Without ``boundary`` all lies on one device.
        """
        sources = self.split.residual_sources
        made = [p for p, source in enumerate(sources) if source.origin == "made"]
        aliased = [p for p, source in enumerate(sources) if source.origin != "made"]
        passed = [_at_boundary(boundary, spec) for spec in self.split.residual_specs]
        specs = [
            spec
            if made_by_forward is None or source.origin != "made"
            else jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=made_by_forward[source.position])
            for source, spec in zip(sources, passed, strict=True)
        ]
        results = jax.tree.leaves(self.input_grads)
        later = self.split.weight_residual_sources if self.is_split else ()
        outliving = {source.position for source in later if source.origin == "residual"}
        if self.is_split and not isinstance(boundary, NamedSharding):
            results += self.made  # on a mesh nobody knows yet how they will lie
        # JAX pairs donated arrays with results of their shape in order, and a backward begins with the last layer: a
        # result that takes over an array that the first layer still has to read costs a copy of it
        candidates = [p for p in reversed(made) if p not in outliving and _lie_alike(specs[p], passed[p])]
        # only a result of equal shape and dtype can take over a buffer; donating more has no effect but a warning
        wanted = Counter((spec.shape, spec.dtype) for spec in results)
        donated = []
        for place in candidates:
            kind = (specs[place].shape, specs[place].dtype)
            if wanted[kind] > 0:
                wanted[kind] -= 1
                donated.append(place)
        saved = [p for p in made if p not in donated]
        order = [*donated, *saved, *aliased]
        offsets = {"input": 0, "output": len(jax.tree.leaves(self.operands))}
        layout = ResidualLayout(
            donated=tuple(sources[p].position for p in donated),
            saved=tuple(sources[p].position for p in saved),
            aliased=tuple(offsets[sources[p].origin] + sources[p].position for p in aliased),
            order=tuple(order.index(position) for position in range(len(order))),
            specs=Residuals(*(tuple(specs[p] for p in part) for part in (donated, saved, aliased))),
        )
        return replace(self, residuals=layout).with_weight_residuals(boundary)

    def with_weight_residuals(
        self, boundary: Sharding | None, made_by_input_gradient: Sequence[Sharding] | None = None
    ) -> "ChunkPlan":
        """Returns the plan with the weight-gradient residuals of an input gradient that makes arrays of these
        shardings (None: at the boundary); gradients that come and go lie at the boundary."""
        if not self.is_split:
            return self
        held, at_grads = self.residuals.specs, jax.tree.leaves((self.output_grads, self.input_grads))
        at_hand = [*held.saved, *held.aliased, *(_at_boundary(boundary, spec) for spec in (*at_grads, *self.made))]
        num_saved, after_grads = len(held.saved), len(held.saved) + len(held.aliased)
        after_output_grads = after_grads + len(jax.tree.leaves(self.output_grads))
        after_all = after_grads + len(at_grads)
        if made_by_input_gradient is not None:
            pairs = zip(self.made, made_by_input_gradient, strict=True)
            at_hand[after_all:] = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at) for s, at in pairs]
        places, sizes = [], Counter[str]()
        for origin, index in self.split.weight_residual_sources:
            holder = "gradients"
            if origin == "residual":
                place = self.residuals.order[index] - len(held.donated)
                holder = "saved" if place < num_saved else "aliased"
            elif origin == "input gradient":
                place = after_output_grads + index
            elif origin == "made" or self._places_of_gradients[index] < 0:
                holder, num_made = "made", len(self.made) - len(self.summed)
                place = after_all + (index if origin == "made" else num_made + self.summed.index(index))
            else:
                place = after_grads + self._places_of_gradients[index]
            places.append(place)
            sizes[holder] += num_bytes(at_hand[place])
        specs = tuple([at_hand[place] for place in places])
        layout = WeightResidualLayout(leaves=tuple(places), specs=specs, num_bytes=WeightResidualBytes(**sizes))
        return replace(self, weight_residuals=layout)

    @cached_property
    def aliased_inputs(self) -> tuple[bool, ...]:
        """For each aliased residual, whether a predecessor sent it."""
        num_inputs = len(jax.tree.leaves(self.operands[0]))
        return tuple(place < num_inputs for place in self.residuals.aliased)

    @cached_property
    def _places_of_gradients(self) -> list[int]:
        """For every leaf of the outputs' gradient its place among the leaves of ``output_grads``; -1 for one that
        several of these make together, or none."""
        sizes = [len(jax.tree.leaves(grads)) for grads in self.output_grads]
        first, places = [0, *accumulate(sizes)], list[int]()
        for part in sorted(self.outputs) if any(self.parts) else [None]:
            size = len(jax.tree.leaves(gradient_spec(part_of(self.outputs, part))))
            making = [number for number, other in enumerate(self.parts) if other == part]
            places += range(first[making[0]], first[making[0]] + size) if len(making) == 1 else [-1] * size
        return places

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The indices of output-gradient leaves that the weight gradient needs and that exist only as sums of several
        successors' gradients, so that the input gradient's program has to return them."""
        sources = (each for each in self.split.weight_residual_sources if each.origin == "output gradient")
        return tuple(each.position for each in sources if self._places_of_gradients[each.position] < 0)

    @cached_property
    def made(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that the program of the input gradient makes for the weight gradient."""
        if not self.is_split:
            return ()
        pairs = zip(self.split.weight_residual_specs, self.split.weight_residual_sources, strict=True)
        own = [spec for spec, source in pairs if source.origin == "made"]
        return (*own, *(jax.tree.leaves(gradient_spec(self.outputs))[leaf] for leaf in self.summed))

    @property
    def num_programs(self) -> int:
        """How many programs :class:`rrfp_jax.programs.microbatch_programs.KindPrograms` makes of it."""
        return len(self.program_names) + self.has_lean_forward

    @property
    def program_names(self) -> tuple[str, ...]:
        """The names of these programs, without the lean forward."""
        if not self.is_split:
            return ("forward", "backward") if self.has_backward else ("forward",)
        gradients = {
            "input_gradient": jax.tree.leaves((self.input_grads, self.made)),
            "weight_gradient": jax.tree.leaves(pick(self.params, self.trained)),
        }
        return ("forward", *(name for name, computed in gradients.items() if computed))

    def forward(self, params: Any, derived: Any, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns (outputs, made): the residuals that the forward makes."""
        return self.split.forward_made(params, operands, derived=derived)

    def backward(
        self, owned: Any, params: Any, derived: Any, rest: Any, output_grads: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns (accumulators, input_grads).

        ``owned`` is ``(accumulators, donated)``, ``rest`` is ``(saved, aliased)``.
        """
        accumulators, donated = owned
        residuals = self.residuals.arrays(donated, *rest)
        operand_grads, totals = self.split.full_backward(
            params, residuals, self._total(output_grads), derived=derived, sums=jax.tree.leaves(accumulators)
        )
        return pick(totals, accumulators), tuple(operand_grads[0][place] for place in self.senders)

    def input_gradient(
        self, donated: Any, params: Any, derived: Any, rest: Any, output_grads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns (made, input_grads).

        The input gradients come last, as the first layer makes them last: results take over donated arrays in order.
        """
        residuals, total = self.residuals.arrays(donated, *rest), self._total(output_grads)
        operand_grads, made = self.split.backward_made(params, residuals, total, derived=derived)
        leaves = jax.tree.leaves(total)
        return (
            (*made, *(leaves[index] for index in self.summed)),
            tuple(operand_grads[0][place] for place in self.senders),
        )

    def weight_gradient(self, accumulators: Any, params: Any, derived: Any, weight_residuals: Any) -> Any:
        """Returns the accumulators with one more microbatch."""
        grads = pick(self.split.weight_gradient(params, weight_residuals, derived=derived), accumulators)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), accumulators, grads)

    def _total(self, output_grads: Sequence[Any]) -> Any:
        """Returns the gradient of the outputs: the sum of the successors' gradients, part by part."""
        if not any(self.parts):
            return _ordered_sum(output_grads)
        pairs = list(zip(self.parts, output_grads, strict=True))
        return {
            part: _ordered_sum(grads)
            if (grads := [each for other, each in pairs if other == part])
            else jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), gradient_spec(spec))
            for part, spec in self.outputs.items()
        }

    def forward_and_backward(self, params: Any, operands: Any, output_grads: Any) -> tuple[Any, Any]:
        """Returns (outputs, gradients): all that the programs of a microbatch compute, for comparisons between
        processes before it is compiled."""
        outputs, residuals = self.split.forward(params, operands)
        if not self.has_backward:
            return outputs, ()
        return outputs, self.split.full_backward(params, residuals, self._total(output_grads))


def _at_boundary(boundary: Sharding | None, spec: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array as it lies where it passes between chunks."""
    sharding = None if boundary is None else passing(boundary, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def _lie_alike(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> bool:
    if one.sharding is None or other.sharding is None:
        return one.sharding is other.sharding
    return bool(one.sharding.is_equivalent_to(other.sharding, len(one.shape)))


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
        trained = tuple(chunk.own.to_own(trained_specs(chunk))) if graph.trains(index) else ()
        specs = (chunk.own.to_own(own.params), own.inputs, own.leaves, own.outputs, spec_of(chunk.own.numbers))
        senders = graph.gradient_predecessors(index)
        # all that a plan depends on
        kind = (
            chunk.own.kind,
            trained,
            chunk.uses_key,
            tuple(jax.tree.leaves(specs)),
            jax.tree.structure(specs),
            tuple(c in senders for c in graph.predecessors(index)),
            len(graph.successors(index)),
            _parts(graph, index),
            graph.has_backward(index) and (index in graph.split,),
            identity(remat),
            () if mesh is None else mesh.abstract_mesh,
        )
        make = partial(_plan, chunk, index, graph, own, remat=remat, trained=trained, mesh=mesh, kind=kind)
        plan: ChunkPlan = (store or ProgramStore()).get(("plan", kind), make)[0]
        makes_residuals = any(source.origin == "made" for source in plan.split.residual_sources)
        return replace(plan, kind=(kind, "lean"), has_lean_forward=True) if lean_forward and makes_residuals else plan


def _plan(
    chunk: Chunk,
    index: int,
    graph: PipelineGraph,
    shapes: ChunkShapes,
    *,
    remat: Remat,
    trained: tuple[str, ...],
    mesh: Mesh | None,
    kind: Hashable,
) -> ChunkPlan:
    params = chunk.own.to_own(shapes.params)
    counted = counters(0, 0, 0)
    counters_spec = jax.ShapeDtypeStruct(counted.shape, counted.dtype) if chunk.uses_key else ()
    operands = (shapes.inputs, shapes.leaves, (counters_spec, spec_of(chunk.own.numbers)))
    senders = tuple(p for p, c in enumerate(graph.predecessors(index)) if c in graph.gradient_predecessors(index))
    parts = _parts(graph, index)
    has_backward = graph.has_backward(index)

    def apply(params: Any, operands: Any) -> Any:
        inputs, leaves, (counted, numbers) = operands
        key = microbatch_key(counted[0], counted[1], counted[2]) if chunk.uses_key else None
        outputs = chunk.own(params, arrange_inputs(inputs), leaves, key=key, numbers=numbers)
        if not graph.gives_loss(index):
            return outputs
        # the weight and the named sums are constants of a step: only the loss has a gradient
        loss_sum, *rest = loss_of(graph, index, outputs)
        loss = (loss_sum, *jax.lax.stop_gradient(rest))
        return outputs | {LOSS: loss} if index in graph.losses else loss

    with nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh):
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
            output_grads=tuple(gradient_spec(part_of(shapes.outputs, part)) for part in parts),
            parts=parts,
            input_grads=tuple(gradient_spec(shapes.inputs[place]) for place in senders),
            split=split,
            senders=senders,
            kind=kind,
        ).laid_out()
    if mesh is not None and has_backward:
        _refuse_convolutions(split, mesh)
    return plan


def _parts(graph: PipelineGraph, index: int) -> tuple[str | None, ...]:
    """Returns the parts of a chunk's outputs that get a gradient: one for each successor that returns one, and the
    loss."""
    parts = [graph.part(index, successor) for successor in graph.gradient_successors(index)]
    if graph.gives_loss(index):
        parts.append(LOSS if index in graph.losses else None)
    return tuple(parts)


def _refuse_convolutions(split: SplitBackward, mesh: Mesh) -> None:
    """Raises ValueError for a convolution that XLA cuts over two axes: it multiplies the gradients (JAX 0.10, 0.11).

    Plain ``jax.jit`` shows the same. Only some kinds and axes are concerned; but nothing shows which, since the outputs
    are right.
    """
    several = frozenset(name for name, size in mesh.shape.items() if size > 1)
    if len(partitioned_axes(split.traced_forward, "conv_general_dilated", several)) > 1:
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


def _ordered_sum(output_grads: Sequence[Any]) -> Any:
    """Returns the sum of the successors' gradients, added from the first to the last."""
    total = output_grads[0]
    for grads in output_grads[1:]:
        total = jax.tree.map(jnp.add, total, grads)
    return total
