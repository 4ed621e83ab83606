"""All that is compiled for one chunk, behind the calls that a stage makes.

Which buffers a call takes over
-------------------------------
``backward`` consumes its stash and its accumulators, ``input_gradient`` its stash, ``weight_gradient`` its accumulators
and ``update`` its parameters, optimizer state and accumulators: the caller forgets what it passed and keeps what it
got. ``forward``, ``prepare`` and ``reduce`` consume nothing. What is owed to a weight gradient holds some arrays of the
stash, and the gradients that came and went, by reference: the rest is freed when the caller drops the stash.

Derived values
--------------
What costs work and depends on parameters alone, such as weights cast to bfloat16, is computed once per update by
``prepare`` and given to the programs that run a microbatch. Where ``derived`` is left out they call it themselves.

The optimizer state is a tuple, one entry per *part* of the chunk: its own layers, then each shared layer by itself. A
shared layer is initialised and updated by programs of its own, which are the same for every chunk that holds a copy:
inside a larger program XLA may round the same formula differently, and the copies would drift apart.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.gradient_programs import GradientPrograms
from rrfp_jax.programs.gradients import GradientPlan, plan_gradients
from rrfp_jax.programs.handover import Owed, Stash
from rrfp_jax.programs.initial import ChunkState, full, initial_state, parts_of, zeros
from rrfp_jax.programs.remat import Remat
from rrfp_jax.programs.replica_programs import ReplicaPrograms
from rrfp_jax.programs.rng import check_seed, counters
from rrfp_jax.programs.shapes import ChunkShapes, describe_chunk
from rrfp_jax.programs.shardings import spread, unit_shardings
from rrfp_jax.programs.sizes import ChunkSizes, temporaries
from rrfp_jax.programs.specs import accumulator_spec, num_bytes
from rrfp_jax.programs.split import SplitReport
from rrfp_jax.programs.unit_updates import UnitUpdates
from rrfp_jax.tasks import PipelineGraph


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
        sharding: Sharding,
        seed: int,
        remat: Remat,
        replicas: ReplicaPrograms | None,
        plan: GradientPlan | None,
    ) -> None:
        self.index = index
        self.chunk = chunks[index]
        self.shapes = shapes[index]
        self.sharding = sharding
        """Of activations, their gradients, batch leaves and scalars."""
        self.shardings = unit_shardings(chunks, index, sharding)
        """Of parameters too."""
        self._chunks, self._optimizer, self._seed = tuple(chunks), optimizer, seed
        self._replicas = replicas
        self._accumulators = spread(accumulator_spec(self.shapes.params), self.shardings.params)
        traced = plan or plan_gradients(self.chunk, index, graph, self.shapes, remat=remat)
        self._gradients = GradientPrograms(traced, self.shapes.params, self.shardings)
        self.plan: GradientPlan = self._gradients.plan
        self._uses_key, self._is_sink = self.chunk.uses_key, not graph.successors(index)
        self._absent_inputs, self._absent_grads = self._zeros_for_absent(graph)
        self._loss_grads = full(self.plan.output_grads, sharding, 1) if self._is_sink else ()
        self.trains = graph.has_backward(index) and bool(jax.tree.leaves(self.shapes.params))
        """Whether the chunk has parameters that change: if not, ``reduce`` and ``update`` hand back what they get."""
        self.parts = parts_of(self.chunk, self.shapes.params)
        """Layer names, grouped as the entries of the optimizer state are."""
        self._shards_optimizer = replicas is not None and replicas.shards_optimizer
        self._alone: UnitUpdates | None = None
        if self.trains:
            self._alone = UnitUpdates(
                index,
                chunks,
                graph.sharing(index),
                optimizer=optimizer,
                shardings=self.shardings,
                reduces=replicas is None,
                updates=not self._shards_optimizer,
            )

    @property
    def compiled(self) -> dict[str, Compiled]:
        """The compiled programs by name, for their cost and memory analysis."""
        alone = self._alone.compiled if self._alone is not None else {}
        return self._gradients.compiled | alone | (self._replicas.compiled if self._replicas is not None else {})

    @cached_property
    def sizes(self) -> ChunkSizes:
        """Bytes of parameters, optimizer state, accumulators, of one microbatch's data and of running programs."""
        plan, stash = self.plan, self.plan.stash.specs
        states = [each.state_specs for each in (self._alone, self._replicas) if each is not None]
        return ChunkSizes(
            params_bytes=num_bytes(spread(self.shapes.params, self.shardings.params)),
            accumulators_bytes=num_bytes(self._accumulators) if self.trains else 0,
            optimizer_bytes=num_bytes(states),
            derived_bytes=num_bytes(self._gradients.derived),
            inputs_bytes=num_bytes(self.shapes.inputs),
            outputs_bytes=num_bytes(self.shapes.outputs),
            stash_bytes=num_bytes((stash.donated, stash.saved)),
            kept_bytes=num_bytes(stash.kept),
            output_grads_bytes=0 if self._is_sink else num_bytes(plan.output_grads),
            input_grads_bytes=num_bytes(plan.input_grads),
            owed=plan.owed.num_bytes,
            temporaries=temporaries(self.compiled),
        )

    @property
    def report(self) -> SplitReport | None:
        """The arrays that pass from program to program, one by one; None for a chunk that no gradient reaches."""
        return self.plan.report

    def initial_state(self, key: jax.Array) -> ChunkState:
        """The state to start from, from a typed key, the same key for all chunks."""
        return initial_state(
            self._chunks,
            self.index,
            key,
            self._optimizer,
            self.sharding,
            trains=self.trains,
            shard_optimizer=self._shards_optimizer,
        )

    def zeros(self) -> Any:
        """Accumulators before the first backward: zeros like the parameters, float32."""
        return zeros(self._accumulators, self.shardings.params)

    def prepare(self, params: Params) -> tuple[Any, ...]:
        """What is derived from these parameters and costs work: valid until they change, empty if there is nothing."""
        return self._gradients.prepare(params)

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
        ``leaves`` exactly the chunk's batch leaves; ``microbatch`` counts over the whole step. Returns the output and
        what the backward needs.
        """
        if self._absent_inputs is not None:
            inputs = _fill(inputs, self._absent_inputs)
        operands = (inputs, leaves, counters(self._seed, step, microbatch) if self._uses_key else ())
        return self._gradients.forward(params, self.prepare(params) if derived is None else derived, operands)

    def backward(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        accumulators: Any,
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Any]:
        """Run one microbatch backward, with the parameters that its forward had.

        ``output_grads`` has one entry per gradient successor, ascending, None for one that the microbatch skips, and is
        empty for a chunk that computes a loss. Returns one gradient per gradient predecessor, ascending, with None in
        place of leaves that have no gradient, and the accumulators with this microbatch's gradient of the summed loss.
        Only for a chunk whose backward is not split.
        """
        self._check_backward(split=False)
        derived = self.prepare(params) if derived is None else derived
        return self._gradients.backward(params, derived, stash, self._complete(output_grads), accumulators)

    def input_gradient(
        self,
        params: Params,
        stash: Stash,
        output_grads: tuple[Any, ...],
        *,
        derived: tuple[Any, ...] | None = None,
    ) -> tuple[tuple[Any, ...], Owed]:
        """The first half of a split backward: as ``backward``, but returns what it owes instead of accumulating."""
        self._check_backward(split=True)
        derived = self.prepare(params) if derived is None else derived
        return self._gradients.input_gradient(params, derived, stash, self._complete(output_grads))

    def weight_gradient(
        self, params: Params, owed: Owed, accumulators: Any, *, derived: tuple[Any, ...] | None = None
    ) -> Any:
        """The second half of a split backward: the accumulators with this microbatch's gradient of the summed loss."""
        self._check_backward(split=True)
        derived = self.prepare(params) if derived is None else derived
        return self._gradients.weight_gradient(params, derived, owed, accumulators)

    def _complete(self, output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._is_sink:
            return self._loss_grads
        return output_grads if self._absent_grads is None else _fill(output_grads, self._absent_grads)

    def _check_backward(self, *, split: bool) -> None:
        if self.plan.split is None:
            raise ValueError(f"no gradient reaches chunk {self.index}: it has no backward")
        if self.plan.is_split != split:
            calls = "input_gradient and weight_gradient" if self.plan.is_split else "backward"
            state = "split" if self.plan.is_split else "in one piece"
            raise ValueError(f"the backward of chunk {self.index} is {state}: call {calls}")

    def shared_part(self, accumulators: Any) -> dict[str, Any]:
        """The accumulators that the chunks which share parameters with this one need for ``reduce``."""
        return {name: accumulators[name] for name in sorted(self.chunk.shared)}

    def reduce(self, accumulators: Any, shared: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """Sum shared gradients; return the accumulators and their squared norm (float32 scalar).

        ``shared`` has, for every chunk of ``graph.sharing(index)`` in ascending order, its ``shared_part``; the entry
        of this chunk itself is not looked at. Leave it out where nothing is shared. The norm counts a shared layer in
        its lowest holder only.
        """
        if self._alone is None:
            return accumulators, np.float32(0)
        return self._alone.reduce(accumulators, shared)

    def update(
        self, params: Params, optimizer_state: tuple[Any, ...], accumulators: Any, scale: float, apply: bool
    ) -> tuple[Params, tuple[Any, ...], Any]:
        """One optimizer step with the gradients ``accumulators * scale``, or none if ``apply`` is False.

        Returns parameters, optimizer state and zeroed accumulators.
        """
        if self._alone is None:
            return params, optimizer_state, accumulators
        return self._alone.update(params, optimizer_state, accumulators, scale, apply)

    def _zeros_for_absent(self, graph: PipelineGraph) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """Zeros for predecessors and gradient successors that a microbatch may skip; which do, can change every step.

        None where no microbatch can skip any: an only predecessor, or an only successor, runs whatever the chunk runs.
        """
        inputs = grads = None
        if len(self.shapes.inputs) > 1:
            inputs = tuple(zeros(spec, self.sharding) for spec in self.shapes.inputs)
        if len(graph.successors(self.index)) > 1 and self.plan.output_grads:
            grads = (zeros(self.plan.output_grads[0], self.sharding),) * len(self.plan.output_grads)
        return inputs, grads


def compile_chunk(
    index: int,
    chunks: Sequence[Chunk],
    graph: PipelineGraph,
    shapes: Sequence[ChunkShapes],
    *,
    optimizer: optax.GradientTransformation,
    sharding: Sharding,
    seed: int = 0,
    remat: Remat = "none",
    replicas: ReplicaPrograms | None = None,
    plan: GradientPlan | None = None,
) -> ChunkPrograms:
    """Compile all programs of chunk ``index`` for the devices of one unit.

    ``sharding`` is the unit's boundary (see :mod:`rrfp_jax.programs.shardings`): a ``SingleDeviceSharding``, or
    ``StageGrid.unit_sharding(replica)``. ``shapes`` comes from :func:`rrfp_jax.programs.shapes.derive_shapes`; ``seed``
    (0 to 2**32 - 1) is that of the run's random keys, ``remat`` says what the backward computes again. The chunks in
    ``graph.split`` get programs for input gradient and weight gradient instead of one for the whole backward. The
    optimizer must treat every array by itself: see :func:`rrfp_jax.programs.optimizers.check_leafwise`, which needs the
    whole model.

    ``replicas`` are the programs of the chunk's stage if there are several replicas: they take the place of ``reduce``
    and, with a sharded optimizer state, of ``update``. ``plan`` is what :func:`trace_chunk` has returned for the same
    chunk, graph, shapes and ``remat``; it serves for any number of units.
    """
    check_seed(seed)
    with _naming(chunks, index):
        return ChunkPrograms(
            index,
            chunks,
            graph,
            shapes,
            optimizer=optimizer,
            sharding=sharding,
            seed=seed,
            remat=remat,
            replicas=replicas,
            plan=plan,
        )


def trace_chunk(
    index: int, chunks: Sequence[Chunk], graph: PipelineGraph, shapes: Sequence[ChunkShapes], *, remat: Remat = "none"
) -> GradientPlan:
    """The forward and backward of chunk ``index``, traced for :func:`compile_chunk` to compile."""
    with _naming(chunks, index):
        return plan_gradients(chunks[index], index, graph, shapes[index], remat=remat)


@contextmanager
def _naming(chunks: Sequence[Chunk], index: int) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{describe_chunk(chunks, index)} cannot be compiled: {error}") from error


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
