"""All that is compiled for one chunk on its unit, behind the calls that a stage makes.

Which buffers a call takes over
-------------------------------
``backward`` consumes its stash and its accumulators, ``input_gradient`` its stash and ``weight_gradient`` its
accumulators: the caller forgets what it passed and keeps what it got. ``forward`` and ``prepare`` consume nothing. What
is owed to a weight gradient holds some arrays of the stash, and the gradients that came and went, by reference: the
rest is freed when the caller drops the stash. For R and U see :mod:`rrfp_jax.programs.updates`.

What accumulates is taken over by the next call that does, and cannot be waited for then. So ``backward`` and
``weight_gradient`` return a *token* too, a scalar that is complete when they are and that nothing takes over.

Derived values
--------------
What costs work and depends on parameters alone, such as weights cast to bfloat16, is computed once per update by
``prepare`` and given to the programs that run a microbatch. Where ``derived`` is left out they call it themselves.

All calls return as soon as the work is enqueued. Arrays may be JAX arrays on the chunk's devices or NumPy arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk, Params, check_seed, counters, trained_specs
from rrfp_jax.programs.chunk_plan import ChunkPlan, naming
from rrfp_jax.programs.compiling import count_programs
from rrfp_jax.programs.gradients import GradientPrograms
from rrfp_jax.programs.handover import Owed, OwedBytes, Stash
from rrfp_jax.programs.shapes import ChunkShapes
from rrfp_jax.programs.shardings import shardings_of, spread, unit_shardings
from rrfp_jax.programs.specs import accumulator_spec, num_bytes, pick
from rrfp_jax.programs.state import full, zeros
from rrfp_jax.programs.store import ProgramStore
from rrfp_jax.programs.updates import StageUpdates, UnitUpdates
from rrfp_jax.tasks import PipelineGraph


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Bytes of what a chunk holds on its devices, for tables and memory forecasts.

    While a microbatch is between forward and backward it holds ``stash_bytes + kept_bytes``, between input gradient and
    weight gradient ``owed.total``. Kept arrays and gradients are held by reference: where somebody else holds them too
    (an inbox, a transport, another chunk of the stage) count them once.
    """

    params_bytes: int
    """Parameters, once."""
    accumulators_bytes: int
    """Accumulated gradients, once, of the layers that train."""
    optimizer_bytes: int
    """Optimizer state, once, of the layers that train."""
    derived_bytes: int
    """What ``prepare`` derives from the parameters, once."""
    inputs_bytes: int
    """What arrives for the forward of one microbatch from all predecessors."""
    outputs_bytes: int
    """The output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """What only the stash of one microbatch holds."""
    kept_bytes: int
    """Inputs, batch leaves and outputs of one microbatch that its stash keeps alive."""
    output_grads_bytes: int
    """What arrives for the backward of one microbatch from all successors; 0 for a chunk that computes a loss."""
    input_grads_bytes: int
    """The gradients of one microbatch, as sent to all predecessors."""
    owed: OwedBytes = field(default_factory=OwedBytes)
    """What one microbatch owes to its weight gradient; nothing where the backward is not split."""
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """What each program needs while it runs beside its arguments and results, by its name; 0 where the backend does not
    say."""


class CompiledChunk:
    """The compiled programs of chunk ``index`` on the devices of one unit.

    Those that run microbatches are shared by all chunks of its kind there, see :mod:`rrfp_jax.programs.gradients`.

    Args:
        shapes: of every chunk, see :func:`rrfp_jax.programs.shapes.derive_shapes`.
        plan: of the chunk, see :func:`rrfp_jax.programs.chunk_plan.plan_chunk`; serves for any number of units.
        optimizer: must treat every array by itself: see :func:`rrfp_jax.programs.optimizers.check_leafwise`, which
            needs the whole model.
        sharding: the unit's boundary (see :mod:`rrfp_jax.programs.shardings`): a ``SingleDeviceSharding``, or
            ``StageDevices.unit_sharding(replica)``.
        seed: of the run's random keys, 0 to 2**32 - 1.
        stage: what the replicas of the chunk's stage do together, if there are several: it takes the place of R and,
            with a sharded optimizer state, of U.
        store: what is compiled already for chunks of its kind; None: nothing.

    Raises ValueError, naming the chunk, where it cannot be compiled.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        shapes: Sequence[ChunkShapes],
        plan: ChunkPlan,
        *,
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        seed: int = 0,
        stage: StageUpdates | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        check_seed(seed)
        store = store or ProgramStore()
        self.index, self.chunk, self.shapes = index, chunks[index], shapes[index]
        self.sharding = sharding
        """Of activations, their gradients, batch leaves and scalars."""
        self.shardings = unit_shardings(chunks, index, sharding)
        """Of parameters too."""
        self._stage, self._seed, self._own = stage, seed, self.chunk.own
        self._params = spread(self.shapes.params, self.shardings.params)
        trained = trained_specs(self.chunk) if graph.trains(index) else ()
        self._sums = accumulator_spec(pick(self._params, trained))
        with naming(chunks, index):
            self._programs = self._gradients(plan, store)
            self.plan = self._programs.plan
            """As it was given, laid out for what the forward and the input gradient make where it lies."""
            self.updates = UnitUpdates(
                index, chunks, graph, optimizer=optimizer, sharding=sharding, stage=stage, store=store
            )
            """R and U."""
        of_stage = {} if stage is None else stage.compiled
        self.compiled = self._programs.compiled | self.updates.compiled | of_stage
        """The compiled programs by name, for their cost and memory analysis."""
        self._is_sink = not graph.successors(index)
        self._absent_inputs, self._absent_grads = self._zeros_for_absent(graph)
        self._loss_grads = full(self.plan.output_grads, sharding, 1) if self._is_sink else ()

    def _gradients(self, plan: ChunkPlan, store: ProgramStore) -> GradientPrograms:
        """The programs that run microbatches: compiled here, or for another chunk of the kind."""
        params = self._own.to_own(self._params)
        at_params = tuple(spec.sharding for spec in jax.tree.leaves(params))
        compiled_here: list[GradientPrograms] = []

        def compile_them() -> GradientPrograms:
            compiled_here.append(GradientPrograms(plan, params, self.sharding, self.shardings.chosen))
            return compiled_here[0]

        programs: GradientPrograms = store.get(("gradients", plan.kind, self.sharding, at_params), compile_them)
        if not compiled_here:
            count_programs(len(programs.compiled))
        return programs

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

    @cached_property
    def sizes(self) -> ChunkSizes:
        """Bytes of parameters, optimizer state, accumulators, of one microbatch's data and of running programs."""
        plan, stash, stage = self.plan, self.plan.stash.specs, self._stage
        return ChunkSizes(
            params_bytes=num_bytes(self._params),
            accumulators_bytes=num_bytes(self._sums),
            optimizer_bytes=num_bytes((self.updates.state_specs, () if stage is None else stage.state_specs)),
            derived_bytes=num_bytes(self._programs.derived),
            inputs_bytes=num_bytes(self.shapes.inputs),
            outputs_bytes=num_bytes(self.shapes.outputs),
            stash_bytes=num_bytes((stash.donated, stash.saved)),
            kept_bytes=num_bytes(stash.kept),
            output_grads_bytes=0 if self._is_sink else num_bytes(plan.output_grads),
            input_grads_bytes=num_bytes(plan.input_grads),
            owed=plan.owed.num_bytes,
            temporaries=temporaries(self.compiled),
        )

    # -- calls -------------------------------------------------------------------------------------------------------

    def zeros(self) -> Any:
        """Accumulators before the first backward: zeros like the parameters that train, float32."""
        return zeros(self._sums, shardings_of(self._sums))

    def prepare(self, params: Params) -> tuple[Any, ...]:
        """What is derived from these parameters and costs work: valid until they change, empty if there is nothing."""
        prepare = self._programs.prepare
        return () if prepare is None else prepare(self._own.to_own(params))

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
        counted = counters(self._seed, step, microbatch) if self.chunk.uses_key else ()
        operands, own = (inputs, leaves, (counted, self._own.numbers)), self._own.to_own(params)
        outputs, made = self._programs.forward(own, self.prepare(params) if derived is None else derived, operands)
        layout = self.plan.stash
        donated = tuple([made[place] for place in layout.donated])
        saved = tuple([made[place] for place in layout.saved])
        if not layout.kept:
            return outputs, Stash(donated, saved)
        at_hand = jax.tree.leaves((operands, outputs))
        return outputs, Stash(donated, saved, tuple([at_hand[place] for place in layout.kept]))

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
        derived = self.prepare(params) if derived is None else derived
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
        derived = self.prepare(params) if derived is None else derived
        output_grads, rest = self._complete(output_grads), (stash.saved, stash.kept)
        input_grads: tuple[Any, ...] = ()
        made: tuple[Any, ...] = ()
        if self._programs.input_gradient is not None:
            own = self._own.to_own(params)
            input_grads, made = self._programs.input_gradient(stash.donated, own, derived, rest, output_grads)
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
        derived = self.prepare(params) if derived is None else derived
        sums, token = weight_gradient(own(accumulators), own(params), derived, owed)
        return self._own.to_model(sums), token

    def shared_layers(self, accumulators: Any) -> dict[str, Any]:
        """The accumulators that the chunks which share parameters with this one need for R."""
        return pick(accumulators, sorted(self.chunk.tied))

    def _complete(self, output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._is_sink:
            return self._loss_grads
        return output_grads if self._absent_grads is None else _fill(output_grads, self._absent_grads)

    def _refusal(self) -> ValueError:
        if self.plan.split is None:
            return ValueError(f"no gradient reaches chunk {self.index}: it has no backward")
        split = "split: call input_gradient and weight_gradient"
        return ValueError(
            f"the backward of chunk {self.index} is {split if self.plan.is_split else 'in one piece: call backward'}"
        )


def temporaries(compiled: Mapping[str, Compiled]) -> dict[str, int]:
    """Temporary bytes of compiled programs by name, as the backend's memory analysis has them."""
    analyses = {name: program.memory_analysis() for name, program in compiled.items()}
    return {name: int(getattr(analysis, "temp_size_in_bytes", None) or 0) for name, analysis in analyses.items()}


def _fill(values: tuple[Any, ...], zeros: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([zero if value is None else value for value, zero in zip(values, zeros, strict=True)])
