"""All that is compiled for one chunk on its unit: the programs of each bucket, and what all buckets share.

Programs that run a microbatch depend on what the chunk reads of its bucket (:mod:`rrfp_jax.programs.buckets`); their
calls are in :mod:`rrfp_jax.programs.microbatch_programs`. What a chunk has once, whatever comes: parameters,
accumulators, R and U (:mod:`rrfp_jax.programs.updates`), and values derived from parameters.

Derived values
--------------
What costs work and depends on parameters alone, such as weights cast to bfloat16, is computed once per update by
``prepare`` and given to the programs that run a microbatch. Where ``derived`` is left out they call it themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.planning.layer_sizes import LEAVES_AHEAD
from rrfp_jax.programs.analysis import memory_of
from rrfp_jax.programs.chunk import Chunk, Params, as_evaluated, check_seed, trained_specs
from rrfp_jax.programs.chunk_plan import ChunkPlan, naming
from rrfp_jax.programs.compiling import count_programs
from rrfp_jax.programs.derived import DerivedValues
from rrfp_jax.programs.gradients import GradientPrograms
from rrfp_jax.programs.handover import OwedBytes
from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms
from rrfp_jax.programs.shapes import ChunkShapes
from rrfp_jax.programs.shardings import all_passing, shardings_of, spread, unit_shardings
from rrfp_jax.programs.specs import Specs, accumulator_spec, num_bytes, pick
from rrfp_jax.programs.state import zeros
from rrfp_jax.programs.store import ProgramStore
from rrfp_jax.programs.updates import StageUpdates, UnitUpdates
from rrfp_jax.schedules import PipelineGraph


class Variant(NamedTuple):
    """What a chunk needs for microbatches of which it reads the same shapes."""

    shapes: ChunkShapes
    plan: ChunkPlan
    """See :func:`rrfp_jax.programs.chunk_plan.plan_chunk`; serves for any number of units."""
    evaluates: bool = False
    """Whether these microbatches are run forward alone; they come after all others."""


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
    zeros_bytes: int
    """Zeros that stand for what microbatches of any bucket skip, once."""
    inputs_bytes: int
    """What arrives for the forward of one microbatch from all predecessors."""
    outputs_bytes: int
    """The output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """What only the stash of one microbatch holds."""
    kept_bytes: int
    """Inputs, batch leaves and outputs of one microbatch that its stash keeps alive."""
    kept_inputs_bytes: int
    """The inputs among these."""
    kept_others_bytes: int
    """The others among these."""
    output_grads_bytes: int
    """What arrives for the backward of one microbatch from all successors; 0 for a chunk that computes a loss."""
    input_grads_bytes: int
    """The gradients of one microbatch, as sent to all predecessors."""
    owed: OwedBytes = field(default_factory=OwedBytes)
    """What one microbatch owes to its weight gradient; nothing where the backward is not split."""
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """What each program needs while it runs beside its arguments and results, by its name; 0 where the backend does not
    say."""
    leaves_ahead_bytes: int = 0
    """Batch leaves of coming microbatches; 0 on CPU, where they stay where they are."""


def largest(sizes: Sequence[ChunkSizes]) -> ChunkSizes:
    """Of every part the most that any of these has."""
    temporaries = {name: max(each.temporaries.get(name, 0) for each in sizes) for s in sizes for name in s.temporaries}
    most = {
        part.name: max(getattr(each, part.name) for each in sizes) for part in fields(ChunkSizes) if part.type is int
    }
    return ChunkSizes(**most, owed=max((s.owed for s in sizes), key=lambda owed: owed.total), temporaries=temporaries)


class CompiledChunk:
    """The compiled programs of chunk ``index`` on the devices of one unit.

    Those that run microbatches are shared by all chunks of its kind there, see :mod:`rrfp_jax.programs.gradients`.

    Args:
        variants: what differs from bucket to bucket.
        variant_of: for each bucket its variant, None where its microbatches skip the chunk; None: one bucket for each.
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
        variants: Sequence[Variant],
        variant_of: Sequence[int | None] | None = None,
        *,
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        seed: int = 0,
        stage: StageUpdates | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        check_seed(seed)
        store = store or ProgramStore()
        self.index, self.chunk = index, chunks[index]
        self.variant_of = tuple(range(len(variants)) if variant_of is None else variant_of)
        self.sharding = sharding
        """The boundary."""
        self.shardings = unit_shardings(chunks, index, sharding)
        """Of parameters too."""
        self._stage, self._own = stage, self.chunk.own
        self._params = spread(variants[0].shapes.params, self.shardings.params)
        trained = trained_specs(self.chunk) if graph.trains(index) else ()
        self._sums = accumulator_spec(pick(self._params, trained))
        with naming(chunks, index):
            self._derived = self._derive(variants, store)
            gradients = [self._gradients(number, variant.plan, store) for number, variant in enumerate(variants)]
            self.updates = UnitUpdates(
                index, chunks, graph, optimizer=optimizer, sharding=sharding, stage=stage, store=store
            )
            """R and U."""
        forward_graph, quiet = graph.evaluating(), as_evaluated(self.chunk)
        self.variants = tuple(
            MicrobatchPrograms(
                index,
                quiet if variant.evaluates else self.chunk,
                forward_graph if variant.evaluates else graph,
                variant.shapes,
                programs,
                sharding=sharding,
                seed=seed,
                prepare=self.prepare,
                derived=places,
            )
            for variant, programs, places in zip(variants, gradients, self._derived.places, strict=True)
        )
        """By number."""
        self._evaluating = tuple(variant.evaluates for variant in variants)
        self._of = tuple(None if number is None else self.variants[number] for number in self.variant_of)
        self._temporaries = [temporaries(programs.compiled) for programs in gradients]
        self.compiled = self._by_name(gradients)
        """The compiled programs by name, for their cost and memory analysis."""

    def of(self, bucket: int = 0) -> MicrobatchPrograms:
        """The calls that run microbatches of a bucket, which must not skip the chunk."""
        programs = self._of[bucket]
        assert programs is not None
        return programs

    def _derive(self, variants: Sequence[Variant], store: ProgramStore) -> DerivedValues:
        """What all programs take: compiled here, or for another chunk of the kind."""
        params, plans = self._own.to_own(self._params), [variant.plan for variant in variants]
        kinds, is_new = tuple(plan.kind for plan in plans), False

        def compile_it() -> DerivedValues:
            nonlocal is_new
            is_new = True
            return DerivedValues(plans, params, self.shardings.chosen)

        values: DerivedValues = store.get(("derived", kinds, self.sharding, self._at_params), compile_it)
        if not is_new and values.program is not None:
            count_programs(1)
        return values

    def _gradients(self, number: int, plan: ChunkPlan, store: ProgramStore) -> GradientPrograms:
        """The programs that run microbatches: compiled here, or for another chunk of the kind."""
        params = self._own.to_own(self._params)
        derived = tuple(self._derived.specs[place] for place in self._derived.places[number])
        compiled_here: list[GradientPrograms] = []

        def compile_them() -> GradientPrograms:
            compiled_here.append(GradientPrograms(plan, params, derived, self.sharding, self.shardings.chosen))
            return compiled_here[0]

        at_derived = tuple(spec.sharding for spec in jax.tree.leaves(derived))
        key = ("gradients", plan.kind, self.sharding, self._at_params, at_derived)
        programs: GradientPrograms = store.get(key, compile_them)
        if not compiled_here:
            count_programs(len(programs.compiled))
        return programs

    @cached_property
    def _at_params(self) -> tuple[Sharding, ...]:
        return tuple(spec.sharding for spec in jax.tree.leaves(self._own.to_own(self._params)))

    def _by_name(self, gradients: Sequence[GradientPrograms]) -> dict[str, Compiled]:
        """Those of the first variant as they are called, of others with its number behind."""
        compiled = self._of_all_buckets()
        for number, programs in enumerate(gradients):
            compiled |= {f"{name} ({number})" if number else name: each for name, each in programs.compiled.items()}
        return compiled

    def _of_all_buckets(self) -> dict[str, Compiled]:
        """The programs that there are once."""
        prepare = {} if self._derived.program is None else {"prepare": self._derived.program}
        return prepare | self.updates.compiled | ({} if self._stage is None else self._stage.compiled)

    @cached_property
    def sizes(self) -> ChunkSizes:
        """Bytes of parameters, optimizer state, accumulators, of one microbatch's data and of running programs; of
        every part the most that a bucket needs."""
        return largest(self.sizes_of_variants)

    @cached_property
    def sizes_of_evaluation(self) -> ChunkSizes | None:
        """The same for microbatches that are run forward alone; None where there are none."""
        sizes = [s for s, number in zip(self.sizes_of_variants, self._evaluating, strict=True) if number]
        return largest(sizes) if sizes else None

    @cached_property
    def sizes_of_variants(self) -> tuple[ChunkSizes, ...]:
        """The same for microbatches of each variant."""
        common = temporaries(self._of_all_buckets())
        return tuple(
            self._sizes(each, common | own) for each, own in zip(self.variants, self._temporaries, strict=True)
        )

    def _sizes(self, variant: MicrobatchPrograms, of_programs: Mapping[str, int]) -> ChunkSizes:
        plan, stash, stage = variant.plan, variant.plan.stash.specs, self._stage
        kept_inputs = [spec for spec, is_input in zip(stash.kept, plan.kept_inputs, strict=True) if is_input]
        return ChunkSizes(
            params_bytes=num_bytes(self._params),
            accumulators_bytes=num_bytes(self._sums),
            optimizer_bytes=num_bytes((self.updates.state_specs, () if stage is None else stage.state_specs)),
            derived_bytes=num_bytes(self._derived.specs),
            zeros_bytes=sum(each.zeros_bytes for each in self.variants),
            inputs_bytes=self._passing_bytes(variant.shapes.inputs),
            outputs_bytes=self._passing_bytes(variant.shapes.outputs),
            stash_bytes=num_bytes((stash.donated, stash.saved)),
            kept_bytes=num_bytes(stash.kept),
            kept_inputs_bytes=num_bytes(kept_inputs),
            kept_others_bytes=num_bytes(stash.kept) - num_bytes(kept_inputs),
            output_grads_bytes=0 if variant.is_sink else self._passing_bytes(plan.output_grads),
            input_grads_bytes=self._passing_bytes(plan.input_grads),
            owed=plan.owed.num_bytes,
            temporaries=of_programs,
            leaves_ahead_bytes=self._ahead_bytes(variant.shapes.leaves),
        )

    def _ahead_bytes(self, leaves: Specs) -> int:
        devices: set[Any] = self.sharding.device_set
        on_host = all(device.platform == "cpu" for device in devices)
        return 0 if on_host else LEAVES_AHEAD * self._passing_bytes(leaves)

    def _passing_bytes(self, specs: Specs) -> int:
        """Of what passes between chunks, on one device."""
        return num_bytes(spread(specs, all_passing(self.sharding, specs)))

    # -- calls -------------------------------------------------------------------------------------------------------

    def zeros(self) -> Any:
        """Accumulators before the first backward: zeros like the parameters that train, float32."""
        return zeros(self._sums, shardings_of(self._sums))

    def prepare(self, params: Params) -> tuple[Any, ...]:
        """What is derived from these parameters and costs work: valid until they change, empty if there is nothing."""
        program = self._derived.program
        return () if program is None else program(self._own.to_own(params))

    def shared_layers(self, accumulators: Any) -> dict[str, Any]:
        """The accumulators that the chunks which share parameters with this one need for R."""
        return pick(accumulators, sorted(self.chunk.tied))


def temporaries(compiled: Mapping[str, Compiled]) -> dict[str, int]:
    """Temporary bytes of compiled programs by name, as the backend's memory analysis has them."""
    analyses = {name: memory_of(program) for name, program in compiled.items()}
    return {name: 0 if analysis is None else analysis.temporaries for name, analysis in analyses.items()}
