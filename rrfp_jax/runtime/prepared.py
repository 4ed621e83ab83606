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

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax

from rrfp_jax.core import (
    GroupProtocol,
    Message,
    MessageKind,
    Order,
    Ordering,
    StepRules,
    dispatch_of,
)
from rrfp_jax.core.replicas import Replication, microbatches_per_replica, replication
from rrfp_jax.costs.forecast import ChunkBytes, StageForecast, check_stages_fit
from rrfp_jax.costs.order_memory import check_evaluation_fits, forecast_evaluation
from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.compiled import ChunkSizes
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.target import memory_bytes_of
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.evaluating import EvaluationShapes, PreparedEvaluation, prepared_evaluation
from rrfp_jax.runtime.executor import StageExecutor
from rrfp_jax.runtime.fitting_order import fitting_order, forecast_order
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms, HostedState
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.runtime.memory_meter import MemoryMeter, chunk_bytes
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.program_stage import ProgramStage
from rrfp_jax.runtime.same_programs import check_same_plans, check_same_programs
from rrfp_jax.runtime.same_state import check_same_state
from rrfp_jax.runtime.stage_replicas import StageReplicas
from rrfp_jax.runtime.transports import Edge
from rrfp_jax.runtime.weights import Weights
from rrfp_jax.schedules import PipelineGraph, TaskKind


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A pipeline that runs, for microbatches of some shapes."""

    buckets: Buckets
    skipped: tuple[frozenset[int], ...]
    """By bucket, the chunks of a replica that its microbatches skip."""
    num_microbatches: int
    """Of a step, over all replicas."""
    order: Order
    """Of all replicas."""
    copies: Replication
    """How the chunks and microbatches of ``order`` belong to replicas."""
    forecast: tuple[StageForecast, ...]
    """The predicted memory of every unit."""
    sizes: Mapping[int, ChunkSizes]
    """What the chunks that this process hosts hold, by number among all replicas."""
    runtime: PipelineRuntime
    weights: Weights
    """Of microbatches, where their bytes are bounded."""
    evaluation: PreparedEvaluation | None
    """For steps that evaluate; None: there are none."""


def prepare(
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
    """Compile and start everything; the stages take ``state`` over.

    Args:
        graph: the graph of one replica; its number of microbatches counts only if it is a schedule's.
        buckets: the shapes that microbatches may have.
        num_microbatches: the number of microbatches of a step, over all replicas.
        step: how many steps the state has been trained.
        progress: is told how many programs are compiled, and out of how many.
        evaluation: the shapes of steps that evaluate; None: no step will.

    Raises ValueError if chunks, graph, batch and memory do not fit, before anything runs.
    """
    process, data = model.process, model.process.layout.data
    graph = _for_batch(graph, num_microbatches, ordering, data)
    evaluated = None if evaluation is None else Buckets(model.chunks, evaluation.buckets)
    with process.losses_first():
        check_same_state(model, state, step)  # before programs are compiled, which may take minutes
        programs = model.compile(
            graph,
            buckets,
            progress,
            max_programs=options.max_programs,
            evaluation=evaluated,
            check_plans=partial(check_same_plans, model),
        )
        order, forecast = fitting_order(
            model,
            graph,
            programs,
            buckets,
            ordering=ordering,
            options=options,
            evaluation=evaluation,
            evaluated=evaluated,
        )
        check_same_programs(model, programs)
        programs.make_constants()
        model.connect(programs)
    copies, rules = replication(graph, data), model.updates.step_rules(data)
    make_stage = _stage_maker(model, order, state, programs, copies=copies, step_rules=rules)
    wrap = options.wrap_stage or (lambda stage: stage)
    dispatch = dispatch_of(options.dispatch_ahead, on_host=process.own_device(process.units[0]).platform == "cpu")
    runtime = process.start(
        order.arbiters(
            rules,
            certain_ahead=dispatch.certain,
            members=process.members(),
            protocol=GroupProtocol(options.group_protocol),
            shortest_s=process.shortest_foreseen_s(),
            evaluation_batches=0 if evaluation is None else evaluation.batches,
        ),
        lambda unit, ship: _wrapped(wrap, make_stage(unit, ship), unit),
        edge=_edge_of(model, programs),
        num_buckets=len(programs.shapes),
        progress_deadline_s=options.progress_deadline_s,
        log_steps=options.log_steps,
        just_in_time=dispatch.just_in_time,
    )
    skipped = [frozenset(c for c, each in enumerate(of) if not each.exists) for of in programs.shapes]
    of_evaluation = None
    if evaluation is not None and evaluated is not None:
        of_evaluation = prepared_evaluation(
            evaluated,
            graph.evaluating(evaluation.batches),
            skipped[len(buckets) :],
            first_bucket=len(buckets),
            num_replicas=data,
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
        weights=Weights(order, programs.chunks, process.units),
        evaluation=of_evaluation,
    )


@dataclass(frozen=True, kw_only=True)
class CompiledOnly:
    """What a pipeline has whose programs are compiled for devices that are not here."""

    programs: HostedPrograms
    """The programs of the first replica of every stage; the others are alike."""
    order: Order
    """Of all replicas."""
    forecast: tuple[StageForecast, ...]
    """The predicted memory of every unit."""
    evaluation: tuple[StageForecast, ...]
    """The same in steps that evaluate; empty where none does."""
    limit_bytes: int | None
    """The memory of every unit; None where it is unknown."""

    def check_fits(self, *, is_strict: bool) -> None:
        """Raise ValueError where a unit is predicted to need more than it has, with what would help."""
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
    """Compile everything as :func:`prepare` does, and start nothing; the arguments are the same.

    Raises ValueError if chunks, graph and batch do not fit.
    """
    process, data = model.process, model.process.layout.data
    graph = _for_batch(graph, num_microbatches, ordering, data)
    evaluated = None if evaluation is None else Buckets(model.chunks, evaluation.buckets)
    programs = model.compile(graph, buckets, progress, max_programs=options.max_programs, evaluation=evaluated)
    copies = replication(graph, data)

    def of_all_replicas(sizes: Mapping[int, ChunkSizes]) -> dict[int, ChunkBytes]:
        return {
            copies.chunk(copies.base(number), replica): chunk_bytes(each)
            for number, each in sizes.items()
            for replica in range(data)
        }

    sizes = of_all_replicas({number: each.sizes for number, each in programs.chunks.items()})
    order, forecast = forecast_order(model, graph, sizes, buckets, ordering)
    of_evaluation: list[StageForecast] = []
    if evaluation is not None:
        evaluated_sizes = of_all_replicas(programs.sizes_of_evaluation)
        of_evaluation = forecast_evaluation(order.evaluating(evaluation.batches), evaluated_sizes)
    limit = options.memory_limit_bytes
    return CompiledOnly(
        programs=programs,
        order=order,
        forecast=tuple(forecast),
        evaluation=tuple(of_evaluation),
        limit_bytes=memory_bytes_of(process.own_device(process.units[0])) if limit is None else limit,
    )


def _wrapped(wrap: Callable[[StageExecutor], StageExecutor], stage: StageExecutor, unit: int) -> StageExecutor:
    wrapped = wrap(stage)
    if not hasattr(wrapped, "launch"):
        raise ValueError(f"wrap_stage returns {with_type(wrapped)} for stage {unit}: return the executor that runs it")
    return wrapped


def _edge_of(model: HostedModel, programs: HostedPrograms) -> Callable[[Message, int], Edge | None]:
    """What messages carry; one and the same edge for all buckets in which that has the same shapes."""
    known: dict[Hashable, Edge] = {}

    def edge(message: Message, bucket: int) -> Edge | None:
        made = model.edge(message, bucket, programs.shapes)
        if made is None or message.kind is MessageKind.SHARED:
            return made
        return known.setdefault((*message[:3], *jax.tree.leaves(made.spec), jax.tree.structure(made.spec)), made)

    return edge


def _for_batch(graph: PipelineGraph, num_microbatches: int, ordering: Ordering, num_replicas: int) -> PipelineGraph:
    share, table = microbatches_per_replica(num_microbatches, num_replicas), ordering.schedule
    if table is not None and table.graph.num_microbatches != share:
        raise ValueError(
            f"schedule {table.name!r} is for {table.graph.num_microbatches} microbatches, the batch has {share}"
            f"{' for each replica' if num_replicas > 1 else ''}: build the schedule for {share}"
        )
    return replace(graph, num_microbatches=share)


def _stage_maker(
    model: HostedModel,
    order: Order,
    state: HostedState,
    programs: HostedPrograms,
    *,
    copies: Replication,
    step_rules: StepRules,
) -> Callable[[int, Ship], ProgramStage]:
    """A function that builds the executor of a hosted unit; the executors take ``state`` over."""
    process, replicas = model.process, _stage_replicas(model, state, programs)

    def make_stage(unit: int, ship: Ship) -> ProgramStage:
        own = {chunk: programs.chunks[chunk] for chunk in order.placement.chunks_of_stage[unit]}
        return ProgramStage(
            order.graph,
            order.placement,
            unit,
            programs=own,
            states={chunk: state.chunks[chunk] for chunk in own},
            update_rules=model.updates,
            step_rules=step_rules,
            copies=copies,
            replicas=replicas.get(process.layout.stage_of(unit)),
            meter=MemoryMeter(
                own,
                process.own_device(unit),
                remaking=[TaskKind(op.letter) for op in order.graph.ops if op.remakes_stash],
            ),
            ship=ship,
            wishes=process.wishes,
            in_transit=process.bytes_in_transit,
        )

    return make_stage


def _stage_replicas(model: HostedModel, state: HostedState, programs: HostedPrograms) -> dict[int, StageReplicas]:
    """By stage, what its hosted replicas do together; empty without data parallelism."""
    process = model.process
    stages = {process.layout.stage_of(unit) for unit in process.units} if programs.replicas else set()
    return {
        stage: StageReplicas(
            {chunk: programs.replicas[chunk] for chunk in model.placement.chunks_of_stage[stage]},
            state.shared,
            model.grids[stage].local_replicas,
        )
        for stage in stages
    }
