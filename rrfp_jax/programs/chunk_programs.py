"""All that is compiled for one chunk, behind the calls that a stage makes.

Which buffers a call takes over
-------------------------------
``backward`` consumes its stash and its accumulators, ``update`` its parameters, optimizer state and accumulators: the
caller forgets what it passed and keeps what it got. ``forward`` and ``reduce`` consume nothing.

The optimizer state is a tuple, one entry per *part* of the chunk: its own layers, then each shared layer by itself. A
shared layer is initialised and updated by programs of its own, which are the same for every chunk that holds a copy:
inside a larger program XLA may round the same formula differently, and the copies would drift apart.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.stages import Compiled

from rrfp_jax.programs.backward import GradientPrograms, Stash, accumulator_spec, compile_gradients
from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.initial import ChunkState, initial_state, parts_of, pick, zeros
from rrfp_jax.programs.rng import counters
from rrfp_jax.programs.shapes import ChunkShapes, describe_chunk, holders
from rrfp_jax.programs.specs import Specs, gradient_spec, num_bytes, spec_of
from rrfp_jax.programs.update import reduce_function, update_function
from rrfp_jax.tasks import PipelineGraph


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Bytes of what a chunk holds: the first three once, the others per microbatch."""

    params_bytes: int
    accumulators_bytes: int
    optimizer_bytes: int
    outputs_bytes: int
    """The output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """What only the stash holds."""
    kept_bytes: int
    """Inputs, batch leaves and outputs that the stash keeps alive; others may hold the same buffers."""


class ChunkPrograms:
    """The compiled programs of one chunk on its devices; made by :func:`compile_chunk`."""

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        shapes: Sequence[ChunkShapes],
        *,
        optimizer: optax.GradientTransformation,
        sharding: jax.sharding.Sharding,
        seed: int,
    ) -> None:
        self.index = index
        self.chunk = chunks[index]
        self.shapes = shapes[index]
        self.sharding = sharding
        self._chunks, self._optimizer, self._seed = tuple(chunks), optimizer, seed
        self._accumulators = accumulator_spec(self.shapes.params)
        self._gradients: GradientPrograms = compile_gradients(self.chunk, index, graph, self.shapes, sharding=sharding)
        self._forward, self._backward = self._gradients.forward, self._gradients.backward
        self._kept = self._gradients.kept
        self._uses_key = self.chunk.uses_key
        self._absent_inputs, self._absent_grads = self._zeros_for_absent(graph)
        self.trains = self._backward is not None and bool(jax.tree.leaves(self.shapes.params))
        """Whether the chunk has parameters that change: if not, ``reduce`` and ``update`` hand back what they get."""
        self.parts = parts_of(self.chunk, self.shapes.params)
        """Layer names, grouped as the entries of the optimizer state are."""
        trained = self.parts if self.trains else ()
        self._states = tuple(jax.eval_shape(optimizer.init, pick(self.shapes.params, part)) for part in trained)
        self._sharing = tuple(graph.sharing(index))
        self._reduce = self._compile_reduce(shapes) if self.trains else None
        self._updates = tuple(self._compile_update(*each) for each in zip(trained, self._states, strict=True))

    @property
    def compiled(self) -> dict[str, Compiled]:
        """The compiled programs by name, for their cost and memory analysis."""
        programs = {
            "forward": self._forward,
            "backward": self._backward,
            "reduce": self._reduce,
            **{f"update {', '.join(part)}": update for part, update in zip(self.parts, self._updates, strict=False)},
        }
        return {name: program for name, program in programs.items() if program is not None}

    @property
    def sizes(self) -> ChunkSizes:
        """Bytes of parameters, optimizer state, accumulators and of one microbatch's data."""
        stash = self._gradients.stash
        return ChunkSizes(
            params_bytes=num_bytes(self.shapes.params),
            accumulators_bytes=num_bytes(self._accumulators) if self.trains else 0,
            optimizer_bytes=num_bytes(self._states),
            outputs_bytes=num_bytes(self.shapes.outputs),
            stash_bytes=num_bytes((stash.donated, stash.saved)),
            kept_bytes=num_bytes(stash.kept),
        )

    def initial_state(self, key: jax.Array) -> ChunkState:
        """The state to start from, from a typed key, the same key for all chunks."""
        return initial_state(self._chunks, self.index, key, self._optimizer, self.sharding, trains=self.trains)

    def zeros(self) -> Any:
        """Accumulators before the first backward: zeros like the parameters, float32."""
        return zeros(self._accumulators, self.sharding)

    def forward(
        self, params: Params, inputs: tuple[Any, ...], leaves: dict[str, Any], step: int = 0, microbatch: int = 0
    ) -> tuple[Any, Stash]:
        """Run one microbatch forward.

        ``inputs`` has the output of every predecessor, ascending, and None for one that the microbatch skips;
        ``leaves`` exactly the chunk's batch leaves; ``microbatch`` counts over the whole step. Returns the output and
        what the backward needs.
        """
        if self._absent_inputs is not None:
            inputs = _fill(inputs, self._absent_inputs)
        operands = (inputs, leaves, counters(self._seed, step, microbatch) if self._uses_key else ())
        outputs, donated, saved = self._forward(params, operands)
        if not self._kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in self._kept]))

    def backward(
        self, params: Params, stash: Stash, output_grads: tuple[Any, ...], accumulators: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Run one microbatch backward, with the parameters that its forward had.

        ``output_grads`` has one entry per gradient successor, ascending, None for one that the microbatch skips, and is
        empty for a chunk that computes a loss. Returns one gradient per gradient predecessor, ascending, with None in
        place of leaves that have no gradient, and the accumulators with this microbatch's gradient of the summed loss.
        """
        if self._backward is None:
            raise ValueError(f"no gradient reaches chunk {self.index}: it has no backward")
        if self._absent_grads is not None:
            output_grads = _fill(output_grads, self._absent_grads)
        donated, saved, kept = stash
        accumulators, input_grads = self._backward(accumulators, donated, params, (saved, kept), output_grads)
        return input_grads, accumulators

    def shared_part(self, accumulators: Any) -> dict[str, Any]:
        """The accumulators that the chunks which share parameters with this one need for ``reduce``."""
        return {name: accumulators[name] for name in sorted(self.chunk.shared)}

    def reduce(self, accumulators: Any, shared: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """Sum shared gradients; return the accumulators and their squared norm (float32 scalar).

        ``shared`` has, for every chunk of ``graph.sharing(index)`` in ascending order, its ``shared_part``; the entry
        of this chunk itself is not looked at. Leave it out where nothing is shared. The norm counts a shared layer in
        its lowest holder only.
        """
        if self._reduce is None:
            return accumulators, np.float32(0)
        if len(self._sharing) == 1:
            return accumulators, self._reduce(accumulators, ())[1]
        others = tuple([part for chunk, part in zip(self._sharing, shared, strict=True) if chunk != self.index])
        sums, squared_norm = self._reduce(accumulators, others)
        return {**accumulators, **sums}, squared_norm

    def update(
        self, params: Params, optimizer_state: tuple[Any, ...], accumulators: Any, scale: float, apply: bool
    ) -> tuple[Params, tuple[Any, ...], Any]:
        """One optimizer step with the gradients ``accumulators * scale``, or none if ``apply`` is False.

        Returns parameters, optimizer state and zeroed accumulators.
        """
        if not self._updates:
            return params, optimizer_state, accumulators
        factor, go = np.float32(scale), np.bool_(apply)
        new_params: Params = {}
        new_accumulators: Params = {}
        new_states = []
        for part, update, state in zip(self.parts, self._updates, optimizer_state, strict=True):
            some, new_state, cleared = update(pick(params, part), state, pick(accumulators, part), factor, go)
            new_params |= some
            new_accumulators |= cleared
            new_states.append(new_state)
        return new_params, tuple(new_states), new_accumulators

    def _compile_reduce(self, shapes: Sequence[ChunkShapes]) -> Compiled:
        others = tuple(
            {name: accumulator_spec(shapes[c].params[name]) for name in self._chunks[c].shared}
            for c in self._sharing
            if c != self.index
        )
        uncounted = frozenset(name for name in self.chunk.shared if holders(self._chunks, name)[0] != self.index)
        function = reduce_function(sorted(self.chunk.shared), self._sharing.index(self.index), uncounted)
        return compile_program("reduce", function, self._accumulators, others, sharding=self.sharding)

    def _compile_update(self, part: tuple[str, ...], state: Specs) -> Compiled:
        return compile_program(
            "update",
            update_function(self._optimizer),
            pick(self.shapes.params, part),
            spec_of(state),
            pick(self._accumulators, part),
            jax.ShapeDtypeStruct((), np.float32),
            jax.ShapeDtypeStruct((), np.bool_),
            sharding=self.sharding,
            donate=(0, 1, 2),
        )

    def _zeros_for_absent(self, graph: PipelineGraph) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """Zeros for predecessors and gradient successors that a microbatch may skip; which do, can change every step.

        None where no microbatch can skip any: an only predecessor, or an only successor, runs whatever the chunk runs.
        """
        inputs = grads = None
        if len(self.shapes.inputs) > 1:
            inputs = tuple(zeros(spec, self.sharding) for spec in self.shapes.inputs)
        if len(graph.successors(self.index)) > 1:
            grad = zeros(gradient_spec(self.shapes.outputs), self.sharding)
            grads = (grad,) * len(graph.gradient_successors(self.index))
        return inputs, grads


def compile_chunk(
    index: int,
    chunks: Sequence[Chunk],
    graph: PipelineGraph,
    shapes: Sequence[ChunkShapes],
    *,
    optimizer: optax.GradientTransformation,
    sharding: jax.sharding.Sharding,
    seed: int = 0,
) -> ChunkPrograms:
    """Compile all programs of chunk ``index`` for the devices of ``sharding``.

    ``shapes`` comes from :func:`rrfp_jax.programs.shapes.derive_shapes`; ``seed`` (0 to 2**32 - 1) is that of the run's
    random keys. The optimizer must treat every array by itself: see
    :func:`rrfp_jax.programs.optimizers.check_leafwise`, which needs the whole model.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} does not fit 32 bits: give a number from 0 to {2**32 - 1}")
    try:
        return ChunkPrograms(index, chunks, graph, shapes, optimizer=optimizer, sharding=sharding, seed=seed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{describe_chunk(chunks, index)} cannot be compiled: {error}") from error


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
