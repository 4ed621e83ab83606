"""The calls that run a microbatch of one bucket through a chunk on its unit.

Which buffers a call takes over
-------------------------------
``backward`` consumes its stash and its accumulators, ``input_gradient`` its stash and ``weight_gradient`` its
accumulators: the caller forgets what it passed and keeps what it got. ``forward`` consumes nothing. What is owed to a
weight gradient holds some arrays of the stash, and the gradients that came and went, by reference: the rest is freed
when the caller drops the stash.

What accumulates is taken over by the next call that does, and cannot be waited for then. So ``backward`` and
``weight_gradient`` return a *token* too, a scalar that is complete when they are and that nothing takes over.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
``place`` brings batch leaves to the devices ahead of the call that reads them.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from rrfp_jax.programs.chunk import Chunk, Params, counters
from rrfp_jax.programs.gradients import GradientPrograms
from rrfp_jax.programs.handover import Owed, Stash
from rrfp_jax.programs.shapes import ChunkShapes
from rrfp_jax.programs.shardings import all_passing, passing
from rrfp_jax.programs.specs import Specs, num_bytes
from rrfp_jax.programs.state import full, zeros
from rrfp_jax.schedules import PipelineGraph

Prepare = Callable[[Params], tuple[Any, ...]]
"""Derives from parameters what costs work; see :class:`rrfp_jax.programs.compiled.CompiledChunk`."""


class Constants(NamedTuple):
    """Arrays that all microbatches of a bucket share."""

    inputs: tuple[Any, ...] | None
    """Zeros in place of the outputs of predecessors that a microbatch skips; None where it can skip none."""
    grads: tuple[Any, ...] | None
    """Zeros in place of the gradients of successors that it skips, likewise."""
    loss_grads: Any
    """The gradient of the summed loss with respect to itself, for a chunk that computes the loss."""


class MicrobatchPrograms:
    """What runs microbatches of one bucket; made by :class:`rrfp_jax.programs.compiled.CompiledChunk`.

    Args:
        shapes: of the chunk in this bucket.
        programs: compiled for them, of all chunks of the kind.
        sharding: the unit's boundary.
        seed: of the run's random keys.
        prepare: what derives values from parameters, where a call is not given any.
        derived: which of these values the programs take, in order.
    """

    def __init__(
        self,
        index: int,
        chunk: Chunk,
        graph: PipelineGraph,
        shapes: ChunkShapes,
        programs: GradientPrograms,
        *,
        sharding: Sharding,
        seed: int,
        prepare: Prepare,
        derived: Sequence[int],
    ) -> None:
        self.shapes, self.plan = shapes, programs.plan
        self.leaves = tuple(shapes.leaves)
        """The batch leaves that such a microbatch has and the chunk reads."""
        self._index, self._chunk, self._own = index, chunk, chunk.own
        self._programs, self._seed = programs, seed
        self.prepare, self._derived_places = prepare, tuple(derived)
        self._is_in_order = self._derived_places == tuple(range(len(derived)))
        self._passing = {name: passing(sharding, spec) for name, spec in shapes.leaves.items()}
        cut = {name: at for name, at in self._passing.items() if at is not sharding}
        self._at_leaves = {name: at for name, at in cut.items() if not at.is_fully_addressable}
        """Where leaves are put, each process its parts, that are cut over several processes; programs place others."""
        self.is_sink = not graph.successors(index)
        """Whether the chunk computes the loss."""
        self._sharding = sharding
        self._of_absent = self._specs_of_absent(graph)
        """The specs of inputs and of gradients that zeros stand for."""

    def _specs_of_absent(self, graph: PipelineGraph) -> tuple[tuple[Specs, ...] | None, tuple[Specs, ...] | None]:
        """Specs for predecessors and gradient successors that a microbatch may skip; which do, can change every step.

        None where no microbatch can skip any: an only predecessor, or an only successor, runs whatever the chunk runs;
        and in place of an optional predecessor, of which the chunk expects nothing where it does not run.
        """
        inputs = grads = None
        required = graph.required_predecessors(self._index)
        if len(required) > 1:
            inputs = tuple(
                spec if p in required else None
                for p, spec in zip(graph.predecessors(self._index), self.shapes.inputs, strict=True)
            )
        if len(graph.successors(self._index)) > 1 and self.plan.output_grads:
            grads = (self.plan.output_grads[0],) * len(self.plan.output_grads)
        return inputs, grads

    @cached_property
    def constants(self) -> Constants:
        """The arrays that calls pass beside their arguments.

        They are made when they are first read, since a unit that is not here cannot hold arrays. Whoever runs the
        programs reads them before the first step, so that no step compiles what makes them.
        """
        inputs, grads = self._of_absent
        return Constants(
            inputs=None if inputs is None else tuple(None if s is None else self._zeros(s) for s in inputs),
            grads=None if grads is None else (self._zeros(grads[0]),) * len(grads),
            loss_grads=full(self.plan.output_grads, self._sharding, 1) if self.is_sink else (),
        )

    def _zeros(self, spec: Specs) -> Any:
        return zeros(spec, all_passing(self._sharding, spec))

    @property
    def zeros_bytes(self) -> int:
        """Bytes of the zeros that stand for what microbatches skip."""
        inputs, grads = self._of_absent
        return num_bytes((inputs, (grads or ())[:1]))

    def _derived(self, params: Params, derived: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """The derived values that these programs take."""
        values = self.prepare(params) if derived is None else derived
        if self._is_in_order and len(values) == len(self._derived_places):
            return values
        return tuple([values[place] for place in self._derived_places])

    def forward(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[Any, Stash]:
        """Run one microbatch forward.

        ``inputs`` has the output of every predecessor, ascending, and None for one that the microbatch skips;
        ``leaves`` exactly those of ``self.leaves``; ``microbatch`` counts over the whole step. Returns the output and
        what the backward needs.
        """
        operands, own = self._operands(inputs, leaves, step, microbatch), self._own.to_own(params)
        outputs, made = self._programs.forward(own, self._derived(params, derived), operands)
        layout = self.plan.stash
        donated = tuple([made[place] for place in layout.donated])
        saved = tuple([made[place] for place in layout.saved])
        if not layout.kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in layout.kept]))

    def outputs(
        self,
        params: Params,
        inputs: tuple[Any, ...],
        leaves: dict[str, Any],
        step: int = 0,
        microbatch: int = 0,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> Any:
        """Run one microbatch forward, as ``forward`` does, for the output alone; ``forward`` makes the stash later."""
        lean = self._programs.lean_forward
        if lean is None:
            return self.forward(params, inputs, leaves, step, microbatch, derived=derived)[0]
        operands, own = self._operands(inputs, leaves, step, microbatch), self._own.to_own(params)
        return lean(own, self._derived(params, derived), operands)

    def place(self, leaves: dict[str, Any]) -> dict[str, jax.Array]:
        """Begin to copy the leaves of a microbatch to the devices; returns them as ``forward`` takes them too."""
        return {
            name: jax.device_put(leaves[name], at) if at.is_fully_addressable else _spread(leaves[name], at)
            for name, at in self._passing.items()
        }

    def _operands(self, inputs: tuple[Any, ...], leaves: dict[str, Any], step: int, microbatch: int) -> Any:
        if (absent := self.constants.inputs) is not None:
            inputs = _fill(inputs, absent)
        if self._at_leaves:
            leaves = leaves | {
                name: _spread(leaves[name], at)
                for name, at in self._at_leaves.items()
                if not isinstance(leaves[name], jax.Array)
            }
        counted = counters(self._seed, step, microbatch) if self._chunk.uses_key else ()
        return inputs, leaves, (counted, self._own.numbers)

    def backward(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Run one microbatch backward, with the parameters that its forward had.

        ``output_grads`` has one entry per gradient successor, ascending, None for one that the microbatch skips, and is
        empty for a chunk that computes a loss. Returns one gradient per gradient predecessor, ascending, with None in
        place of leaves that have no gradient, the accumulators with this microbatch's gradient of the summed loss, and
        the token. Only for a chunk whose backward is not split.
        """
        backward, own = self._programs.backward, self._own.to_own
        if backward is None:
            raise self._refusal()
        derived = self._derived(params, derived)
        owned, rest = (own(accumulators), stash.donated), (stash.saved, stash.kept)
        (sums, input_grads), token = backward(owned, own(params), derived, rest, self._complete(output_grads))
        return input_grads, self._own.to_model(sums), token

    def input_gradient(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Owed]:
        """The first half of a split backward: as ``backward``, but returns what it owes instead of accumulating."""
        if not self.plan.is_split:
            raise self._refusal()
        derived = self._derived(params, derived)
        output_grads, rest = self._complete(output_grads), (stash.saved, stash.kept)
        input_grads: tuple[Any, ...] = (None,) * len(self.plan.input_grads)
        made: tuple[Any, ...] = ()
        if self._programs.input_gradient is not None:
            own = self._own.to_own(params)
            made, input_grads = self._programs.input_gradient(stash.donated, own, derived, rest, output_grads)
        at_hand = jax.tree.leaves((rest, output_grads, input_grads, made))
        return input_grads, tuple([at_hand[place] for place in self.plan.owed.leaves])

    def weight_gradient(
        self, params: Params, owed: Owed, accumulators: Any, *, derived: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        """The second half of a split backward: the accumulators with this microbatch's gradient of the summed loss, and
        the token, which is empty where there is no program."""
        if not self.plan.is_split:
            raise self._refusal()
        weight_gradient, own = self._programs.weight_gradient, self._own.to_own
        if weight_gradient is None:
            return accumulators, ()
        derived = self._derived(params, derived)
        sums, token = weight_gradient(own(accumulators), own(params), derived, owed)
        return self._own.to_model(sums), token

    def _complete(self, output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.is_sink:
            return self.constants.loss_grads
        return output_grads if (absent := self.constants.grads) is None else _fill(output_grads, absent)

    def _refusal(self) -> ValueError:
        if not self.plan.has_backward:
            return ValueError(f"no gradient reaches chunk {self._index}: it has no backward")
        split = "split: call input_gradient and weight_gradient"
        return ValueError(
            f"the backward of chunk {self._index} is {split if self.plan.is_split else 'in one piece: call backward'}"
        )


def _spread(leaf: Any, at: Sharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, at, leaf.__getitem__)


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
