"""All that is compiled for one chunk on its unit: the programs of each bucket, and those that all buckets share.

Programs that run a microbatch depend on the part of its bucket that the chunk reads (:mod:`rrfp_jax.programs.batches`);
see :mod:`rrfp_jax.programs.microbatch_programs`. A chunk has once, for all buckets: parameters, accumulators, R and U
(:mod:`rrfp_jax.programs.updates`), and values derived from parameters.

Derived values
--------------
Values that cost work and depend on parameters alone, such as weights cast to bfloat16, are computed once per update by
``prepare`` and given to the programs that run a microbatch. Where ``derived`` is left out they call it themselves. Each
bucket's programs take the values that they were traced with; a value that several of them need is the same if it is
computed in the same way, and is then derived once.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice, product
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.core.replicas import SparseAveraging
from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD
from rrfp_jax.programs.chunk import Chunk, Params, as_evaluated, check_seed, trained_specs
from rrfp_jax.programs.chunk_plan import ChunkPlan, WeightResidualBytes, naming_chunk
from rrfp_jax.programs.compiling import compile_program, count_programs
from rrfp_jax.programs.microbatch_programs import (
    WHOLE_BACKWARD,
    KindPrograms,
    MicrobatchPrograms,
    PairProgram,
    compile_for_kind,
    compile_pair,
    compile_whole_backward,
)
from rrfp_jax.programs.optimizers import DelayedState
from rrfp_jax.programs.program_text import memory_of
from rrfp_jax.programs.sameness import ProgramStore
from rrfp_jax.programs.shapes import ChunkShapes, Specs, accumulator_spec, num_bytes, part_of, pick
from rrfp_jax.programs.shardings import all_passing, shardings_of, spread, unit_shardings
from rrfp_jax.programs.state import Shares, zeros
from rrfp_jax.programs.update_functions import AveragedState, OptimizerOnHost
from rrfp_jax.programs.updates import PieceUpdates, SparseUpdates, StageUpdates, UnitUpdates
from rrfp_jax.schedules import PipelineGraph


class Variant(NamedTuple):
    """The shapes and the plan of a chunk for microbatches of which it reads the same shapes."""

    shapes: ChunkShapes
    plan: ChunkPlan
    """See :func:`rrfp_jax.programs.chunk_plan.plan_chunk`; serves for any number of units."""
    evaluates: bool = False
    """Whether these microbatches are run forward alone; they come after all others."""


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Bytes that a chunk holds on its devices, for tables and memory forecasts.

    While a microbatch is between forward and backward it holds ``stash_bytes + kept_bytes``, between input gradient and
    weight gradient ``owed.total``. Aliased residuals and gradients are held by reference: where somebody else holds
    them too (an inbox, a transport, another chunk of the stage) count them once.
    """

    params_bytes: int
    """Bytes of parameters, once."""
    accumulators_bytes: int
    """Bytes of accumulated gradients of the layers that train, once."""
    optimizer_bytes: int
    """Bytes of the optimizer state, once, but for that in host memory. Where replicas hold shares of it, a loss leaves
    some of them with a share more than is counted here."""
    optimizer_host_bytes: int
    """Bytes of the optimizer state that lies in host memory."""
    derived_bytes: int
    """Bytes of the values that ``prepare`` derives from the parameters, once."""
    zeros_bytes: int
    """Bytes of zeros that stand for skipped inputs and gradients, once for all buckets."""
    inputs_bytes: int
    """Bytes that arrive for the forward of one microbatch from all predecessors."""
    outputs_bytes: int
    """Bytes of the output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """Bytes of the residuals of one microbatch that the forward makes."""
    kept_bytes: int
    """Bytes of the aliased residuals of one microbatch: inputs, batch leaves and outputs."""
    kept_inputs_bytes: int
    """The part of ``kept_bytes`` that is inputs."""
    kept_others_bytes: int
    """The part of ``kept_bytes`` that is batch leaves and outputs."""
    output_grads_bytes: int
    """Bytes that arrive for the backward of one microbatch from all successors; 0 for a chunk that computes a loss."""
    input_grads_bytes: int
    """Bytes of the gradients of one microbatch, as sent to all predecessors."""
    owed: WeightResidualBytes = field(default_factory=WeightResidualBytes)
    """Bytes of the weight-gradient residuals of one microbatch; 0 where the backward is not split."""
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each program, by its name, needs while it runs beside its arguments and results; 0 where the backend
    does not say."""
    leaves_ahead_bytes: int = 0
    """Bytes of batch leaves of coming microbatches; 0 on CPU, where they stay where they are."""
    pieces_bytes: int = 0
    """Bytes that are kept free for pieces of gradients (:class:`rrfp_jax.programs.pieces.PieceBytes`)."""


def _largest(sizes: Sequence[ChunkSizes]) -> ChunkSizes:
    """Returns for every part the most that any of these has."""
    temporaries = {name: max(each.temporaries.get(name, 0) for each in sizes) for s in sizes for name in s.temporaries}
    most = {
        part.name: max(getattr(each, part.name) for each in sizes) for part in fields(ChunkSizes) if part.type is int
    }
    return ChunkSizes(**most, owed=max((s.owed for s in sizes), key=lambda owed: owed.total), temporaries=temporaries)


class _Derived(NamedTuple):
    """The values that are derived from parameters, for all variants of a chunk."""

    places: list[tuple[int, ...]]
    """For each plan the values that it takes, by their place among all."""
    specs: tuple[Specs, ...] = ()
    """The shapes of all values, with shardings."""
    program: Compiled | None = None
    """The program that derives them from the parameters; None where there are none."""


def _compile_derived(plans: Sequence[ChunkPlan], params: Specs, chosen: Sharding | None) -> _Derived:
    """Compiles the program ``prepare``; ``chosen`` is the sharding of its results, None for the compiler's choice."""
    places: list[tuple[int, ...]] = []
    sources: list[tuple[int, int]] = []  # for each value a plan that has it, and its place there
    known: dict[Hashable, int] = {}
    for number, plan in enumerate(plans):
        # derivations are traced anew, so they are asked for only where there is something to compare
        derivations = range(plan.split.num_derived) if len(plans) == 1 else plan.split.derivations
        for place, derivation in enumerate(derivations):
            if known.setdefault(derivation, len(sources)) == len(sources):
                sources.append((number, place))
        places.append(tuple(known[derivation] for derivation in derivations))
    if not sources:
        return _Derived(places)

    def prepare(params: Any) -> tuple[Any, ...]:
        values = [plan.split.prepare(params) for plan in plans]
        return tuple(values[plan][place] for plan, place in sources)

    program = compile_program("prepare", prepare, params, in_shardings=(shardings_of(params),), out_shardings=chosen)
    specs = jax.eval_shape(prepare, spread(params, None))
    return _Derived(places, spread(specs, program.output_shardings), program)


class CompiledChunk:
    """The compiled programs of chunk ``index`` on the devices of one unit.

    All chunks of its kind there share those that run microbatches: :mod:`rrfp_jax.programs.microbatch_programs`.

    Args:
        variants: shapes and plans, which differ from bucket to bucket.
        variant_of: for each bucket its variant, None where its microbatches skip the chunk; None: one bucket for each.
        holding: the chunks as they hold parameters (:func:`rrfp_jax.programs.model_graph.as_held`); None: as they are.
        passes: variants, and the variant of each bucket, of the other chunks that run with this one's parameters.
        optimizer: must treat every array by itself: see :func:`rrfp_jax.programs.optimizers.check_leafwise`, which
            needs the whole model.
        sharding: the unit's boundary (see :mod:`rrfp_jax.programs.shardings`): a ``SingleDeviceSharding``, or
            ``StageDevices.unit_sharding(replica)``.
        seed: of the run's random keys, 0 to 2**32 - 1.
        stage: the updates that the replicas of the chunk's stage make together, if there are several: they take the
            place of R and, with a sharded optimizer state, of U.
        copies: the replica of this unit, of how many, and whether each adds up in blocks, where they add up gradients
            by messages (:class:`.PieceUpdates`); None elsewhere.
        sparse: how these replicas average parameters; None: they add up gradients.
        shares: the shares of the optimizer state that this unit holds, where these replicas cut it; None elsewhere.
        store: the programs that are compiled already for chunks of its kind; None: none.

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
        holding: Sequence[Chunk] | None = None,
        passes: Mapping[int, tuple[Sequence[Variant], Sequence[int | None]]] = MappingProxyType({}),
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        seed: int = 0,
        stage: StageUpdates | None = None,
        copies: tuple[int, int, bool] | None = None,
        sparse: SparseAveraging | None = None,
        shares: Shares | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        check_seed(seed)
        store = store or ProgramStore()
        self.sharding = sharding
        """The boundary of the unit."""
        holding = chunks if holding is None else holding
        self.shardings = unit_shardings(holding, index, sharding)
        """The shardings of boundary and parameters."""
        self._stage, self._own, self._tied = stage, chunks[index].own, sorted(holding[index].tied)
        self._params = spread(variants[0].shapes.params, self.shardings.params)
        trained = trained_specs(chunks[index]) if graph.trains(index) else ()
        self._sums = accumulator_spec(pick(self._params, trained))
        self._is_on_host = isinstance(optimizer, OptimizerOnHost)
        of_passes = {index: (variants, range(len(variants)) if variant_of is None else variant_of), **passes}
        plans = [variant.plan for of_pass, _ in of_passes.values() for variant in of_pass]
        with naming_chunk(chunks, index):
            self._derived, of_kinds = self._compile_kinds(plans, store)
            options: dict[str, Any] = {"optimizer": optimizer, "sharding": sharding, "store": store}
            make: Callable[..., UnitUpdates] = partial(UnitUpdates, stage=stage)
            if copies is not None:
                options |= {"replica": copies[0], "num_replicas": copies[1], "in_blocks": copies[2], "shares": shares}
                make = PieceUpdates if sparse is None else partial(SparseUpdates, sparse=sparse)
            self.updates = make(index, holding, graph, **options)
            """R and U of the unit."""
        self.passes = dict[int, CompiledChunk]()
        """The programs of the other chunks that run with these parameters, by number."""
        programs = zip(of_kinds, self._derived.places, strict=True)
        for number, (of_pass, of_bucket) in of_passes.items():
            each = self if number == index else copy(self)
            own = list(islice(programs, len(of_pass)))
            each._take(number, chunks, graph, variants=of_pass, variant_of=of_bucket, programs=own, seed=seed)
            if number != index:
                self.passes[number] = each

    def _take(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        *,
        variants: Sequence[Variant],
        variant_of: Sequence[int | None],
        programs: Sequence[tuple[KindPrograms, tuple[int, ...]]],
        seed: int,
    ) -> None:
        """Makes this the programs of one pass: those of its kinds, with the places of the derived values that each
        takes."""
        self.index, self.chunk = index, chunks[index]
        self.variant_of = tuple(variant_of)
        holds = graph.holder(index) == index
        forward_graph, quiet = graph.evaluating(), as_evaluated(self.chunk)
        self.variants = tuple(
            MicrobatchPrograms(
                index,
                quiet if variant.evaluates else self.chunk,
                forward_graph if variant.evaluates else graph,
                variant.shapes,
                of_kind,
                sharding=self.sharding,
                seed=seed,
                prepare=self.prepare,
                derived=places,
            )
            for variant, (of_kind, places) in zip(variants, programs, strict=True)
        )
        """The programs of each variant, by number."""
        self._of = tuple(None if number is None else self.variants[number] for number in self.variant_of)
        self.compiled = dict[str, Compiled]()
        """The compiled programs by name, for their cost and memory analysis; the names of all variants but the first
        have the variant's number behind. Those that passes share are the holder's."""
        if holds:
            self.compiled |= {} if self._derived.program is None else {"prepare": self._derived.program}
            self.compiled |= self.updates.compiled | ({} if self._stage is None else self._stage.compiled)
        common = _temporaries(self.compiled)
        if holds and isinstance(self.updates, PieceUpdates):
            common |= {name: common[name] + made for name, made in self.updates.piece_bytes.made.items()}
        self.sizes_of_variants = tuple(
            self._sizes(variant, common | _temporaries(of_kind.compiled), graph)
            for variant, (of_kind, _) in zip(self.variants, programs, strict=True)
        )
        """The sizes for microbatches of each variant."""
        self.sizes = _largest(self.sizes_of_variants)
        """Bytes of parameters, optimizer state, accumulators, of one microbatch's data and of running programs: for
        every part the most that a bucket needs. A later pass has none of the bytes that all passes share."""
        of_evaluation = [s for s, each in zip(self.sizes_of_variants, variants, strict=True) if each.evaluates]
        self.sizes_of_evaluation = _largest(of_evaluation) if of_evaluation else None
        if self.sizes_of_evaluation is not None and holds:
            sizes = self.sizes_of_evaluation
            self.sizes_of_evaluation = replace(sizes, params_bytes=sizes.params_bytes + self._copied_by_averages())
        """The sizes for microbatches that are run forward alone; None where there are none."""
        for number, (of_kind, _) in enumerate(programs):
            suffix = f" ({number})" if number else ""
            self.compiled |= {name + suffix: each for name, each in of_kind.compiled.items()}

    def count_pair(self, name: str, pair: PairProgram, leaving_bytes: int) -> None:
        """Takes a program of two, one of which is this chunk's, among the programs of the chunk; the other one's
        results of ``leaving_bytes`` leave beside this one's."""
        self.compiled[name] = pair.compiled
        temporaries = {**self.sizes.temporaries, name: pair.temporaries + leaving_bytes}
        self.sizes = replace(self.sizes, temporaries=temporaries)

    def of(self, bucket: int = 0) -> MicrobatchPrograms:
        """Returns the calls that run microbatches of a bucket, which must not skip the chunk."""
        programs = self._of[bucket]
        assert programs is not None
        return programs

    def _compile_kinds(self, plans: Sequence[ChunkPlan], store: ProgramStore) -> tuple[_Derived, list[KindPrograms]]:
        """Returns the derived values of all plans, and the programs of each: compiled here, or for another chunk of
        the kind."""
        params, chosen, kinds = (
            self._own.to_own(self._params),
            self.shardings.chosen,
            tuple(plan.kind for plan in plans),
        )
        at_params = tuple(spec.sharding for spec in jax.tree.leaves(params))
        key: Hashable = ("derived", kinds, self.sharding, at_params)
        values, is_new = store.get(key, partial(_compile_derived, plans, params, chosen))
        if not is_new and values.program is not None:
            count_programs(1)
        found = []
        for plan, places in zip(plans, values.places, strict=True):
            derived = tuple(values.specs[place] for place in places)
            at_derived = tuple(spec.sharding for spec in jax.tree.leaves(derived))
            key = ("gradients", plan.kind, self.sharding, at_params, at_derived)
            make = partial(compile_for_kind, plan, params, derived, self.sharding, chosen)
            programs, is_new = store.get(key, make)
            if not is_new:
                count_programs(len(programs.compiled))
            found.append(programs)
        return values, found

    def _sizes(self, variant: MicrobatchPrograms, temporaries: Mapping[str, int], graph: PipelineGraph) -> ChunkSizes:
        plan, residuals, stage = variant.plan, variant.plan.residuals.specs, self._stage
        holds = graph.holder(self.index) == self.index
        # What passes of one chunk hand to each other lies with the pass that made it, whose backward comes last.
        taken, given = _between_passes(graph, self.index, plan)
        pairs = list(zip(plan.residuals.aliased, residuals.aliased, plan.aliased_inputs, strict=True))
        lent = [spec for place, spec in given.items() if place not in plan.residuals.aliased]
        kept = num_bytes(([spec for place, spec, _ in pairs if place not in taken], lent))
        inputs = [spec for place, spec, is_input in pairs if is_input and place not in taken]
        sources = zip(graph.predecessors(self.index), variant.shapes.inputs, strict=True)
        arriving = tuple(spec for source, spec in sources if not graph.are_passes(source, self.index))
        devices: set[Any] = self.sharding.device_set
        on_host = all(device.platform == "cpu" for device in devices)

        def passing_bytes(specs: Specs) -> int:
            """Returns the bytes, on one device, of arrays that pass between chunks."""
            return num_bytes(spread(specs, all_passing(self.sharding, specs)))

        state = (self.updates.state_specs, () if stage is None else stage.state_specs)
        # With a delay two steps are under way, each with its gradients and with values of its parameters.
        steps = 2 if any(isinstance(part, DelayedState) for part in self.updates.state_specs) else 1
        moved = [leaf for leaf in jax.tree.leaves(state) if leaf.shape] if self._is_on_host else []
        on_host_bytes = holds * num_bytes(moved)
        return ChunkSizes(
            params_bytes=holds * num_bytes(self._params),
            accumulators_bytes=holds * steps * num_bytes(self._sums),
            optimizer_bytes=holds * num_bytes(state) - on_host_bytes,
            optimizer_host_bytes=on_host_bytes,
            derived_bytes=holds * steps * num_bytes(self._derived.specs),
            zeros_bytes=sum(each.zeros_bytes for each in self.variants),
            inputs_bytes=passing_bytes(arriving),
            outputs_bytes=passing_bytes(variant.shapes.outputs),
            stash_bytes=num_bytes((residuals.donated, residuals.saved)),
            kept_bytes=kept,
            kept_inputs_bytes=num_bytes(inputs),
            kept_others_bytes=kept - num_bytes(inputs),
            output_grads_bytes=passing_bytes(variant.from_successors),
            input_grads_bytes=passing_bytes(plan.input_grads),
            owed=plan.weight_residuals.num_bytes,
            temporaries=temporaries,
            leaves_ahead_bytes=0 if on_host else LEAVES_AHEAD * passing_bytes(variant.shapes.leaves),
            pieces_bytes=self.updates.piece_bytes.lasting if holds and isinstance(self.updates, PieceUpdates) else 0,
        )

    def _copied_by_averages(self) -> int:
        """Returns the bytes of the parameters that evaluations make of their averages: nothing where there are none, or
        where these lie where the parameters do, in the same dtype."""
        shared = () if self._stage is None else self._stage.state_specs
        if not any(isinstance(state, AveragedState) for state in (*self.updates.state_specs, *shared)):
            return 0
        trained = pick(self._params, self._sums)
        pairs = zip(*map(jax.tree.leaves, (trained, self._sums)), strict=True)
        is_copied = shared or self._is_on_host or any(p.dtype != s.dtype for p, s in pairs)
        return num_bytes(trained) if is_copied else 0

    def zeros(self) -> Any:
        """Returns accumulators before the first backward: zeros like the parameters that train, float32."""
        return zeros(self._sums, shardings_of(self._sums))

    def prepare(self, params: Params) -> tuple[Any, ...]:
        """Returns the values derived from these parameters that cost work, maybe none: valid until they change."""
        program = self._derived.program
        return () if program is None else program(self._own.to_own(params))

    def shared_layers(self, accumulators: Any) -> dict[str, Any]:
        """Returns the accumulators that the chunks which share parameters with this one need for R."""
        return pick(accumulators, self._tied)


# -- pairs of programs -------------------------------------------------------------------------------------------------

PairPrograms = dict[tuple[Compiled, Compiled], PairProgram]
"""Programs that do the work of two, by these two, in the order of :data:`PAIRED_PROGRAMS`."""


class PairOfPrograms(NamedTuple):
    """Two programs of a unit that may run as one: for each its chunk, the number of its variant, and its name."""

    first: tuple[int, int, str]
    second: tuple[int, int, str]


def pairs_of(
    variants: Mapping[int, tuple[Sequence[Variant], Sequence[int | None]]], joined: Iterable[tuple[str, str]]
) -> list[PairOfPrograms]:
    """Returns the pairs of programs of one unit, for microbatches of one bucket.

    Args:
        variants: by chunk of the unit its variants, and for each bucket the number of the chunk's variant.
        joined: the names of programs that run in pairs, of :data:`PAIRED_PROGRAMS`.
    """
    found: dict[PairOfPrograms, None] = {}
    for (one, (of_one, numbers)), (other, (of_other, other_numbers)) in product(variants.items(), repeat=2):
        for number, other_number in zip(numbers, other_numbers, strict=True):
            if number is None or other_number is None:
                continue
            names, other_names = of_one[number].plan.program_names, of_other[other_number].plan.program_names
            for name, other_name in joined:
                if name not in names or other_name not in other_names:
                    continue
                pair = PairOfPrograms((one, number, name), (other, other_number, other_name))
                is_turned = name == other_name and pair[::-1] in found  # One program of two forwards serves both.
                is_of_one = pair.first[:2] == pair.second[:2] or (name, other_name) != WHOLE_BACKWARD
                if is_of_one and not is_turned:
                    found[pair] = None
    return list(found)


def compile_pairs(
    chunks: Mapping[int, CompiledChunk], pairs: Sequence[PairOfPrograms], store: ProgramStore
) -> PairPrograms:
    """Compiles pairs of programs of one unit, each once for all chunks of its kinds, and counts them there.

    Args:
        chunks: the compiled chunks of the unit, by the numbers that the pairs have.
    """
    made: PairPrograms = {}
    for (one, number, name), (other, other_number, other_name) in pairs:
        own, others = chunks[one].variants[number], chunks[other].variants[other_number]
        first, second = own.kind_programs, others.kind_programs
        both = first.compiled[name], second.compiled[other_name]
        is_whole = (name, other_name) == WHOLE_BACKWARD
        parts = (first,) if is_whole else (first, name, second, other_name)
        pair, is_new = store.get(("pair", *both), partial(compile_whole_backward if is_whole else compile_pair, *parts))
        if not is_new:
            count_programs(1)
        if is_whole:
            own.join_backward(pair)
        else:
            made[both] = pair
        sizes = chunks[other].sizes
        leaving = {"forward": sizes.outputs_bytes, "input_gradient": sizes.input_grads_bytes}
        titles = [each + (f" ({n})" if n else "") for each, n in ((name, number), (other_name, other_number))]
        chunks[one].count_pair(
            f"pair of {titles[0]} and {titles[1]} of chunk {other}", pair, leaving.get(other_name, 0)
        )
    return made


# -- sizes -------------------------------------------------------------------------------------------------------------


def _between_passes(graph: PipelineGraph, index: int, plan: ChunkPlan) -> tuple[set[int], dict[int, Specs]]:
    """Returns which leaves of ``(operands, outputs)`` come from passes of the same chunk, and which go to some."""
    taken, given, first = set[int](), dict[int, Specs](), 0
    if not graph.passes:
        return taken, given
    for source, spec in zip(graph.predecessors(index), plan.operands[0], strict=True):
        places = range(first, first := first + len(jax.tree.leaves(spec)))
        taken |= {*places} if graph.are_passes(source, index) else set()
    parts = {graph.part(index, c) for c in graph.successors(index) if graph.are_passes(index, c)}
    first = len(jax.tree.leaves(plan.operands))
    for part in sorted(plan.outputs) if isinstance(plan.outputs, dict) else [None]:
        leaves = jax.tree.leaves(part_of(plan.outputs, part))
        given |= dict(enumerate(leaves, first)) if part in parts else {}
        first += len(leaves)
    return taken, given


def _temporaries(compiled: Mapping[str, Compiled]) -> dict[str, int]:
    """Returns the temporary bytes of compiled programs by name, as the backend's memory analysis has them."""
    analyses = {name: memory_of(program) for name, program in compiled.items()}
    return {name: 0 if analysis is None else analysis.temporaries for name, analysis in analyses.items()}
