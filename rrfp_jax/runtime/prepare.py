"""From a model and a batch's shapes to running stages: one sequence, in which each value is made of those before it.

1. the graph of one replica, with this batch's microbatches;
2. the state, refused if its copies differ;
3. the programs of the chunks that this process hosts, refused if processes that share them have traced others;
4. the sizes of all chunks, which the processes tell each other, and from them the windows;
5. the order of all replicas, and the memory that it needs, refused if that is too much;
6. the programs again, refused if the compiler gave processes that share them other collectives, and the connections
   behind collectives;
7. the stages, each with its arbiter, running.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from zlib import crc32

from rrfp_jax.core import STRICT, GroupProtocol, Order, Ordering, StepRules, dispatch_of
from rrfp_jax.core.dispatch import PAIRS
from rrfp_jax.core.rebalancing import OwnerPlanner, adopted_owners
from rrfp_jax.core.replicas import (
    Replication,
    StepOwners,
    block_owners,
    microbatches_per_replica,
    replication,
    with_owners,
)
from rrfp_jax.costs.forecast import (
    ChunkBytes,
    StageForecast,
    check_evaluation_fits,
    check_stages_fit,
    forecast_evaluation,
    forecast_memory,
    window_of_bytes,
    with_evaluation,
)
from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.compiled import ChunkSizes
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.microbatch_programs import PAIRED_PROGRAMS, WHOLE_BACKWARD
from rrfp_jax.programs.target import memory_bytes_of
from rrfp_jax.runtime.consistency import check_same_state, check_same_work, planned_work, shared_work
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.evaluation import EvaluationShapes, IdleEvaluations, PreparedEvaluation
from rrfp_jax.runtime.mailbox import SendArray
from rrfp_jax.runtime.model import HostedModel, HostedPrograms, HostedState
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.recovery import RecoveringRuntime
from rrfp_jax.runtime.stage import ProgramStage
from rrfp_jax.runtime.stage_memory import PROGRAM_OF_KIND, MemoryMeter, MicrobatchWeights, bytes_beside, chunk_bytes
from rrfp_jax.runtime.stage_reduction import StageReplicas
from rrfp_jax.runtime.stage_threads import StageExecutor
from rrfp_jax.schedules import PipelineGraph, TaskKind

_LOG = logging.getLogger(__name__)
_LEAVE_PAIRS_OUT = f"leave dispatch_ahead {PAIRS} out"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A pipeline that runs, for microbatches of some shapes."""

    buckets: Buckets
    skipped: tuple[frozenset[int], ...]
    """By bucket, the chunks of a replica that its microbatches skip."""
    num_microbatches: int
    """Number of microbatches of a step, over all replicas."""
    order: Order
    """The order of all replicas."""
    copies: Replication
    """Tells how the chunks and microbatches of ``order`` belong to replicas."""
    forecast: tuple[StageForecast, ...]
    """The predicted memory of every unit."""
    sizes: Mapping[int, ChunkSizes]
    """Sizes of the chunks that this process hosts, by number among all replicas."""
    runtime: PipelineRuntime | RecoveringRuntime
    weights: MicrobatchWeights
    """Weights of microbatches, where their bytes are bounded."""
    owners: StepOwners | None
    """The owners of microbatches where units are absent; None: the blocks of replicas."""
    evaluation: PreparedEvaluation | None
    """The steps that evaluate; None: there are none."""


def prepare_pipeline(
    model: HostedModel,
    graph: PipelineGraph,
    state: HostedState,
    buckets: Buckets,
    num_microbatches: int,
    *,
    step: int,
    ordering: Ordering,
    options: RuntimeOptions,
    progress: CompileProgress,
    evaluation: EvaluationShapes | None = None,
) -> Prepared:
    """Compiles and starts everything; the stages take ``state`` over.

    Args:
        graph: the graph of one replica; its number of microbatches counts only if it is a schedule's.
        buckets: the shapes that microbatches may have.
        num_microbatches: the number of microbatches of a step, over all replicas.
        step: the number of steps that the state has been trained.
        progress: called with the number of programs that are compiled, and of all.
        evaluation: the shapes of steps that evaluate; None: no step will.

    Raises ValueError if chunks, graph, batch and memory do not fit, before anything runs.
    """
    process, num_replicas = model.process, model.process.layout.data
    dispatch = dispatch_of(options.dispatch_ahead, on_host=process.own_device(process.units[0]).platform == "cpu")
    if dispatch.pairs:
        check_pairs(model, graph, ordering)
    graph = _for_batch(graph, num_microbatches, ordering, num_replicas)
    evaluated = None if evaluation is None else Buckets(model.chunks, evaluation.buckets)
    with process.losses_first():
        if not process.comes_back:  # Its state comes later, from a checkpoint.
            check_same_state(model, state, step)  # Before programs are compiled, which may take minutes.
        programs = model.compile(
            graph,
            buckets,
            progress,
            max_programs=options.max_programs,
            evaluation=evaluated,
            pairs=_joined(ordering) if dispatch.pairs else (),
            check_plans=lambda planned: check_same_work(process, planned_work(model, planned), "plans"),
        )
        if dispatch.pairs and (note := _note_on_pairs(model)) is not None:
            _LOG.warning("%s", note)
        sizes, of_evaluation, devices = _gather_sizes(model, programs, buckets, evaluated, _counted(evaluation))
        order, forecast = _forecast_order(model, graph, sizes, buckets, ordering)
        limit = options.memory_limit_bytes
        limits = [devices.get(unit) if limit is None else limit for unit in range(process.layout.num_units)]
        forecast, evaluating = _with_evaluation(order, forecast, of_evaluation, evaluation)
        check_stages_fit(forecast, limits, is_strict=ordering.consume == STRICT)
        check_evaluation_fits(evaluating, limits[: len(evaluating)])
        check_same_work(process, shared_work(model, programs), "programs")
        # The arrays that the programs take beside their arguments are made before the first step.
        for variant in (variant for chunk in programs.chunks.values() for variant in chunk.variants):
            _ = variant.constants
        if process.recovers:  # After a loss accumulators are made anew, which compiles for the first time.
            for chunk in programs.chunks.values():
                chunk.zeros()
        model.connect(programs)
    copies = replication(graph, num_replicas)
    rules = model.updates.step_rules(num_replicas)
    arbiters = order.arbiters(
        rules,
        certain_ahead=dispatch.certain,
        pairs=dispatch.pairs,
        members=process.members(),
        protocol=GroupProtocol(options.group_protocol),
        shortest_s=process.shortest_foreseen_s(),
        evaluation_batches=0 if evaluation is None else evaluation.batches,
    )
    edge = model.edges(programs, graph)
    owners, absent = _owners_of(model, graph.num_microbatches), process.layout.absent
    if owners is not None:
        arbiters[0].graph_of(evaluates=False, owners=owners)  # refuses what cannot have other owners

    def start(first_step: int | None = None) -> tuple[PipelineRuntime, list[ProgramStage]]:
        """Starts a runtime; after a loss its first step is given."""
        made: list[ProgramStage] = []
        make_stage = _stage_maker(
            model, order, state, programs, copies=copies, step_rules=rules, wrap=options.wrap_stage, made=made
        )
        started = process.start(
            arbiters if first_step is None else [arbiter.fresh(first_step - 1) for arbiter in arbiters],
            make_stage,
            replace(options, other_owners=True) if process.recovers or absent else options,
            edge=edge,
            num_buckets=len(programs.shapes),
            just_in_time=dispatch.just_in_time,
            others_live=first_step is None,
        )
        return started, made

    weights = MicrobatchWeights(order, programs.chunks, process.units)
    runtime: PipelineRuntime | RecoveringRuntime
    if process.recovers:
        if process.recovery is not None:
            raise ValueError(
                "this process has had a pipeline that goes on without lost ranks, and can have one: start the "
                "processes again for another"
            )
        runtime = process.recovery = RecoveringRuntime(
            process,
            block_owners(process.layout.num_stages, num_microbatches, num_replicas),
            start,
            step,
            weigh=lambda buckets, given: weights.of(buckets, with_owners(order.graph, order.placement, given)),
            # Other owners add up in another order.
            planner=None if model.updates.deterministic else partial(OwnerPlanner, model.placement.stage_of_chunk),
            in_blocks=model.updates.deterministic,
        )
    else:
        runtime, _ = start()
    skipped = [frozenset(c for c, each in enumerate(of) if not each.exists) for of in programs.shapes]
    prepared_evaluation = None
    if evaluation is not None and evaluated is not None:
        prepared_evaluation = PreparedEvaluation(
            buckets=evaluated,
            first_bucket=len(buckets),
            skipped=tuple(skipped[len(buckets) :]),
            beside=IdleEvaluations() if evaluation.in_idle_time else None,
            copies=replication(graph.evaluating(evaluation.batches), num_replicas),
        )
    return Prepared(
        buckets=buckets,
        skipped=tuple(skipped[: len(buckets)]),
        num_microbatches=num_microbatches,
        order=order,
        copies=copies,
        forecast=tuple(forecast),
        sizes={chunk: each.sizes for chunk, each in programs.chunks.items()},
        runtime=runtime,
        weights=weights,
        owners=owners,
        evaluation=prepared_evaluation,
    )


@dataclass(frozen=True, kw_only=True)
class CompiledOnly:
    """A pipeline whose programs are compiled for devices that are not here."""

    programs: HostedPrograms
    """The programs of the first replica of every stage; the others are alike."""
    order: Order
    """The order of all replicas."""
    forecast: tuple[StageForecast, ...]
    """The predicted memory of every unit."""
    evaluation: tuple[StageForecast, ...]
    """The same in steps that evaluate; empty where none does."""
    limit_bytes: int | None
    """The memory of every unit; None where it is unknown."""

    def check_fits(self, *, is_strict: bool) -> None:
        """Raises ValueError where a unit is predicted to need more than it has, with the remedies."""
        check_stages_fit(self.forecast, [self.limit_bytes] * len(self.forecast), is_strict=is_strict)
        check_evaluation_fits(self.evaluation, [self.limit_bytes] * len(self.evaluation))


def compile_only(
    model: HostedModel,
    graph: PipelineGraph,
    buckets: Buckets,
    num_microbatches: int,
    *,
    ordering: Ordering,
    options: RuntimeOptions,
    progress: CompileProgress,
    evaluation: EvaluationShapes | None = None,
) -> CompiledOnly:
    """Compiles everything as :func:`prepare_pipeline` does, and starts nothing; the arguments are the same.

    Raises ValueError if chunks, graph and batch do not fit.
    """
    process, num_replicas = model.process, model.process.layout.data
    pairs = options.dispatch_ahead == PAIRS
    if pairs:
        check_pairs(model, graph, ordering)
    graph = _for_batch(graph, num_microbatches, ordering, num_replicas)
    evaluated = None if evaluation is None else Buckets(model.chunks, evaluation.buckets)
    programs = model.compile(
        graph,
        buckets,
        progress,
        max_programs=options.max_programs,
        evaluation=evaluated,
        pairs=_joined(ordering) if pairs else (),
    )
    copies = replication(graph, num_replicas)

    def of_all_replicas(
        sizes: Mapping[int, ChunkSizes], count: Callable[[ChunkSizes], ChunkBytes] = chunk_bytes
    ) -> dict[int, ChunkBytes]:
        return {
            copies.chunk(copies.base(number), replica): count(each)
            for number, each in sizes.items()
            for replica in range(num_replicas)
        }

    sizes = of_all_replicas({number: each.sizes for number, each in programs.chunks.items()})
    order, forecast = _forecast_order(model, graph, sizes, buckets, ordering)
    evaluated_sizes = {} if evaluation is None else of_all_replicas(programs.sizes_of_evaluation, _counted(evaluation))
    forecast, of_evaluation = _with_evaluation(order, forecast, evaluated_sizes, evaluation)
    limit = options.memory_limit_bytes
    return CompiledOnly(
        programs=programs,
        order=order,
        forecast=tuple(forecast),
        evaluation=tuple(of_evaluation),
        limit_bytes=memory_bytes_of(process.own_device(process.units[0])) if limit is None else limit,
    )


def check_pairs(model: HostedModel, graph: PipelineGraph, ordering: Ordering) -> None:
    """Raises ValueError where tasks cannot run in pairs."""
    if ordering.delay:
        raise ValueError(f"steps that overlap (delay {ordering.delay}) run their tasks one by one: {_LEAVE_PAIRS_OUT}")
    if graph.ops:
        raise ValueError(f"operations have their own time between tasks: {_LEAVE_PAIRS_OUT}, or the operations")
    if model.updates.deterministic and ordering.consume != STRICT:
        raise ValueError(
            "which tasks run in pairs depends on what is ready, and a program of two may round otherwise than each "
            f"alone: in deterministic runs take a schedule with consume {STRICT}, or {_LEAVE_PAIRS_OUT}"
        )


def _joined(ordering: Ordering) -> list[tuple[str, str]]:
    """Returns the names of the programs that stages with this order may run in pairs."""
    if ordering.schedule is None or ordering.consume != STRICT:  # Only rows join two forwards, or a whole backward.
        return [names for names in PAIRED_PROGRAMS if len({*names}) > 1 and names != WHOLE_BACKWARD]
    pairs = ordering.schedule.pairs
    whole = {pair for pair in pairs if pair.first[1:] == pair.second[1:]}
    kinds = {frozenset(PROGRAM_OF_KIND[task.kind] for task in pair) for pair in pairs - whole}
    return [names for names in PAIRED_PROGRAMS if (whole if names == WHOLE_BACKWARD else frozenset(names) in kinds)]


def _note_on_pairs(model: HostedModel) -> str | None:
    """Returns a sentence about the hosted stages of one device, whose pairs run as two programs; None if there are
    none."""
    layout = model.process.layout
    stages = {layout.stage_of(unit) for unit in model.process.units}
    alone = sorted(stage for stage in stages if model.grids[stage].unit_size == 1)
    if not alone:
        return None
    listed = ", ".join(map(str, alone))
    return (
        f"{f'stage {alone[0]} has' if len(alone) == 1 else f'stages {listed} have'} one device each: pairs of tasks "
        "run one after the other there, since no collective is to be hidden"
    )


def _for_batch(graph: PipelineGraph, num_microbatches: int, ordering: Ordering, num_replicas: int) -> PipelineGraph:
    """Returns the graph with a replica's share of the microbatches."""
    share, table = microbatches_per_replica(num_microbatches, num_replicas), ordering.schedule
    if table is not None and table.graph.num_microbatches != share:
        raise ValueError(
            f"schedule {table.name!r} is for {table.graph.num_microbatches} microbatches, the batch has {share}"
            f"{' for each replica' if num_replicas > 1 else ''}: build the schedule for {share}"
        )
    return replace(graph, num_microbatches=share)


# -- the order and its memory ------------------------------------------------------------------------------------------


def _gather_sizes(
    model: HostedModel,
    programs: HostedPrograms,
    buckets: Buckets,
    evaluated: Buckets | None,
    count: Callable[[ChunkSizes], ChunkBytes],
) -> tuple[dict[int, ChunkBytes], dict[int, ChunkBytes], dict[int, int | None]]:
    """Returns the sizes of every chunk of all replicas, in training and in evaluations, and the memory of every unit.

    The processes tell each other, so that all of them come to the same windows, and all refuse a model that does not
    fit. Raises ValueError, in every process, where one was given other buckets, by whose numbers messages go.
    """
    process = model.process
    devices = [process.own_device(unit) for unit in process.units]
    # Where units share a device, each gets an equal part of its memory.
    limits = [limit and limit // devices.count(d) for d in devices for limit in [memory_bytes_of(d)]]
    trained = {chunk: each.sizes for chunk, each in programs.chunks.items()}
    of_chunks = [
        [[chunk, *astuple(counted(sizes))] for chunk, sizes in each.items()]
        for counted, each in (
            (chunk_bytes, trained),
            (count, {} if evaluated is None else programs.sizes_of_evaluation),
        )
    ]
    numbered = crc32(repr((buckets.key, evaluated and evaluated.key)).encode())
    gathered = process.gather("sizes", [numbered, *of_chunks, [*zip(process.units, limits, strict=True)]])
    other = next((rank for rank, (each, *_) in gathered.items() if each != gathered[0][0]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} was given other buckets than rank 0, or in another order: give all processes the same"
        )
    sizes, of_evaluation = (
        {chunk: ChunkBytes.from_tuple(row) for columns in gathered.values() for chunk, *row in columns[place]}
        for place in (1, 2)
    )
    # Nobody tells those of absent units, which count for nothing but have their places.
    copies, absent = model.copies, process.layout.absent
    for known in (sizes, of_evaluation):
        for unit in absent:
            for base in model.placement.chunks_of_stage[process.layout.stage_of(unit)]:
                if (first := known.get(copies.chunk(base, 0))) is not None:
                    known[copies.chunk(base, process.layout.replica_of(unit))] = first
    return sizes, of_evaluation, dict(unit for *_, units in gathered.values() for unit in units)


def _forecast_order(
    model: HostedModel,
    graph: PipelineGraph,
    sizes: Mapping[int, ChunkBytes],
    buckets: Buckets,
    ordering: Ordering,
) -> tuple[Order, list[StageForecast]]:
    """Returns the order of all replicas, and the predicted memory of every unit, from the sizes of all chunks.

    Raises ValueError where the order does not fit the model, or a window in bytes holds too few microbatches.
    """
    layout, num_bytes = model.process.layout, ordering.window_bytes
    # With a footprint or operations that move memory the window bounds activations, each of one chunk.
    bounds_activations = ordering.has_footprint or (bool(graph.ops) and graph.operations.moves_memory)
    in_microbatches = ordering
    if num_bytes is not None:
        windows = []
        for stage, chunks in enumerate(model.placement.chunks_of_stage):
            passed = {c: sizes[model.copies.chunk(c, 0)].per_microbatch for c in chunks}
            taken = sum(passed.values())
            if bounds_activations:
                most = max(Fraction(held, graph.kept_units(c)) for c, held in passed.items())
                taken = ceil(most * graph.kept_per_microbatch(chunks))
            windows.append(window_of_bytes(num_bytes, taken, stage, graph.num_microbatches))
        in_microbatches = replace(ordering, window=tuple(windows))
        try:
            in_microbatches.fitted(model.placement, graph)
        except ValueError as error:
            held = ",".join(map(str, windows))
            raise ValueError(f"window {ordering.window} has room for {held} microbatches: {error}") from None
    order = in_microbatches.resolve(model.placement, graph, num_replicas=layout.data)
    # Microbatches of several sizes are admitted by the bytes that each of them takes, where nothing fixes their order.
    if num_bytes is not None and len(buckets) > 1 and ordering.consume != STRICT and not bounds_activations:
        order = replace(order, capacities=(num_bytes,) * layout.num_units)
    if (owners := _owners_of(model, graph.num_microbatches)) is None:
        return order, forecast_memory(order, sizes, graph.num_microbatches)
    shares = tuple(-(-layout.data // layout.replicas[layout.stage_of(unit)]) for unit in range(layout.num_units))
    order = order.with_shares(shares, widens=ordering.window is None, read_ahead=ordering.read_ahead)
    run = replace(order, graph=with_owners(order.graph, order.placement, owners))
    forecasts = {times: forecast_memory(run, sizes, times * graph.num_microbatches) for times in {*shares}}
    return order, [forecasts[times][unit] for unit, times in enumerate(shares)]


def _counted(evaluation: EvaluationShapes | None) -> Callable[[ChunkSizes], ChunkBytes]:
    """Returns the function that counts a chunk's bytes in evaluations."""
    return bytes_beside if evaluation is not None and evaluation.in_idle_time else chunk_bytes


def _with_evaluation(
    order: Order,
    forecast: Sequence[StageForecast],
    sizes: Mapping[int, ChunkBytes],
    evaluation: EvaluationShapes | None,
) -> tuple[list[StageForecast], list[StageForecast]]:
    """Returns the predicted memory of every unit in training, with evaluations that run beside it, and in evaluations
    that run between steps; nothing for these where there are none."""
    if evaluation is None:
        return [*forecast], []
    evaluating = forecast_evaluation(order.evaluating(evaluation.batches), sizes)
    return (with_evaluation(forecast, evaluating), []) if evaluation.in_idle_time else ([*forecast], evaluating)


def _owners_of(model: HostedModel, share: int) -> StepOwners | None:
    """Returns the owners of a step where units are absent, whose microbatches go to others; None where all are there.

    ``share`` is the number of microbatches of a replica."""
    layout = model.process.layout
    if not layout.absent:
        return None
    blocks = block_owners(layout.num_stages, share * layout.data, layout.data)
    living = [unit for unit in range(layout.num_units) if unit not in layout.absent]
    return StepOwners(adopted_owners(blocks, living, in_blocks=model.updates.deterministic), layout.absent)


# -- the stages --------------------------------------------------------------------------------------------------------


def _stage_maker(
    model: HostedModel,
    order: Order,
    state: HostedState,
    programs: HostedPrograms,
    *,
    copies: Replication,
    step_rules: StepRules,
    wrap: Callable[[StageExecutor], StageExecutor] | None,
    made: list[ProgramStage],
) -> Callable[[int, SendArray], StageExecutor]:
    """Returns a function that builds the executor of a hosted unit; the executors take ``state`` over."""
    process, layout = model.process, model.process.layout
    remaking = [TaskKind(op.letter) for op in order.graph.ops if op.remakes_stash]
    # Shared by the hosted units of a stage; without data parallelism there is nothing to share.
    replicas = {
        stage: StageReplicas(
            {c: programs.replicas[c] for c in model.placement.chunks_of_stage[stage] if c in programs.replicas},
            state.shared,
            model.grids[stage].local_replicas,
        )
        for stage in ({layout.stage_of(unit) for unit in process.units} if programs.replicas else ())
    }

    def make_stage(unit: int, send_array: SendArray) -> StageExecutor:
        own = {chunk: programs.chunks[chunk] for chunk in order.placement.chunks_of_stage[unit]}
        stage = ProgramStage(
            unit,
            own,
            {chunk: state.chunks[chunk] for chunk in own if chunk in state.chunks},
            graph=order.graph,
            placement=order.placement,
            copies=copies,
            update_rules=model.updates,
            norms=state.norms,
            step_rules=step_rules,
            stop_requests=process.stop_requests,
            replicas=replicas.get(layout.stage_of(unit)),
            meter=MemoryMeter(own, process.own_device(unit), remaking),
            send_array=send_array,
            in_transit=process.bytes_in_transit,
            pairs=programs.pairs,
        )
        made.append(stage)
        if wrap is None:
            return stage
        wrapped = wrap(stage)
        if not hasattr(wrapped, "launch"):
            raise ValueError(
                f"wrap_stage returns {with_type(wrapped)} for stage {unit}: return the executor that runs it"
            )
        return wrapped

    return make_stage
