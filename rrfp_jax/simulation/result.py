"""The numbers of a run and of its engines, simulated or real, by the definitions of the timeline."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from rrfp_jax.schedules import PipelineGraph, Placement, TaskKind
from rrfp_jax.schedules.table import relative_sizes
from rrfp_jax.schedules.timeline import IdleReason, Timeline
from rrfp_jax.simulation.costs import DURATION_SLOTS

_DECIMALS = 6
"""Decimals of milliseconds, which are nanoseconds: virtual time is exact, seconds in floating point are not."""


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """The numbers that ``emulate`` and ``simulate`` print about a run of one or more steps."""

    makespan_ms: list[float]
    """Per step: first start to last end."""
    makespan_ms_mean: float
    step_ms: list[float]
    """Per step: the interval between the ends of steps, on all stages and with the agreement."""
    step_ms_mean: float
    us_per_task: float
    """Mean step time over the number of tasks of a step on all stages."""
    bubble_fraction: float
    """``(cost - mean work of a stage) / cost``, cost being the longest span of a stage; mean over the steps."""
    stage_bubbles: list[float]
    """Per stage: 1 - work / makespan; mean over the steps."""
    idle_ms: list[dict[str, float]]
    """Per stage: idle time by reason; mean over the steps."""
    peak_in_flight: list[int]
    """Per stage: the most microbatches held at once in any step."""
    order: list[list[str]]
    """Per stage: the text forms of the tasks that it ran in the last step."""
    engine_busy: list[dict[str, float]]
    """Per stage: by engine beside it, the share of the makespan in which it was busy; mean over the steps."""

    @property
    def waited_for_engines(self) -> list[float]:
        """Per stage: the share of the makespan in which it waited for an engine."""
        makespan_ms = self.makespan_ms_mean
        return [idle.get(IdleReason.ENGINE, 0.0) / makespan_ms if makespan_ms else 0.0 for idle in self.idle_ms]


def run_metrics(timeline: Timeline, step_ms: Sequence[float]) -> RunMetrics:
    """Returns the numbers of a recorded run; ``step_ms`` holds the interval between ends of steps, for each step.

    Raises ValueError for a record without tasks, or with other steps than ``step_ms``.
    """
    steps = timeline.by_period()
    if not steps or len(steps) != len(step_ms):
        raise ValueError(f"the record has {len(steps)} steps, and {len(step_ms)} step times were given")
    makespans_ms = [_ms(step.makespan_s()) for step in steps]
    num_tasks = fmean(sum(span.task.microbatch >= 0 for span in step.spans) for step in steps)
    mean_step_ms = fmean(step_ms)
    overlaps = any(len({span.step for span in one.spans}) > 1 for one in steps)
    return RunMetrics(
        makespan_ms=makespans_ms,
        makespan_ms_mean=round(fmean(makespans_ms), _DECIMALS),
        step_ms=[round(ms, _DECIMALS) for ms in step_ms],
        step_ms_mean=round(mean_step_ms, _DECIMALS),
        us_per_task=mean_step_ms * 1e3 / num_tasks,
        bubble_fraction=fmean(step.bubble_fraction() for step in steps),
        stage_bubbles=[
            fmean(bubbles)
            for bubbles in zip(*(_own_bubbles(one) if overlaps else one.stage_bubbles() for one in steps), strict=True)
        ],
        idle_ms=[
            {reason.value: _ms(idle_s[reason] / len(steps)) for reason in IdleReason if reason in idle_s}
            for idle_s in timeline.idle_s_by_reason()
        ],
        peak_in_flight=timeline.peak_in_flight(),
        order=[[str(task) for task in tasks] for tasks in steps[-1].order()],
        engine_busy=engines_busy(timeline),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, _DECIMALS)


@dataclass(frozen=True, kw_only=True)
class MemoryWeights:
    """Memory that the tasks of one microbatch hold and free on a stage.

    The unit is all that a stage keeps of one microbatch over its chunks (of one direction, if the pipeline is
    bidirectional); every chunk has an equal part. Raises ValueError unless everything held is freed.
    """

    forward: float = 1.0
    """Memory held from the start of F."""
    input_gradient: float = 0.0
    """Memory freed at the end of I; negative if I leaves more behind than it takes."""
    weight_gradient: float = 1.0
    """Memory freed at the end of W. A fused backward frees everything at its end."""

    def __post_init__(self) -> None:
        if abs(self.forward - self.input_gradient - self.weight_gradient) > 1e-9:
            raise ValueError(
                f"memory weights: F holds {self.forward}, but I and W free {self.input_gradient} and "
                f"{self.weight_gradient}: make F the sum of the other two"
            )


_DEFAULT_WEIGHTS = MemoryWeights()


def memory_figures(timeline: Timeline, graph: PipelineGraph, placement: Placement) -> dict[str, list[float]]:
    """Returns the peaks of device and host per stage, in microbatches, where operations move memory; else nothing."""
    if not (graph.ops and graph.operations.moves_memory):
        return {}
    return {
        "peak_memory": peak_memory(timeline, graph, placement),
        "host_peak": host_peaks(timeline, graph, placement),
    }


def peak_memory(
    timeline: Timeline,
    graph: PipelineGraph,
    placement: Placement,
    weights: MemoryWeights = _DEFAULT_WEIGHTS,
    chunk_parts: Sequence[float] = (),
) -> list[float]:
    """Returns the most memory that each stage held at once, over all steps recorded, in microbatches.

    At the same time, ends free memory before starts take it. A chunk without a backward keeps nothing. Where
    operations move memory, it is that of the device, and ``weights`` do not count. ``chunk_parts`` are the proportions
    in which the chunks keep memory; empty: equal.
    """
    sizes = relative_sizes(chunk_parts, graph.num_chunks)
    frees_of = {TaskKind.I: weights.input_gradient, TaskKind.W: weights.weight_gradient}
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    moves_memory = bool(graph.ops) and graph.operations.moves_memory
    for span in timeline.spans:
        if span.task.microbatch < 0 or not graph.has_backward(span.task.chunk):
            continue
        if moves_memory:
            takes, frees = graph.memory_units(span.task)
            size = sizes[span.task.chunk]
            changes[span.stage] += [(span.start_s, 1, takes * size), (span.end_s, 0, -frees * size)]
        elif span.task.kind in DURATION_SLOTS:
            size = sizes[span.task.chunk] * graph.kept_units(span.task.chunk)
            if span.task.kind is TaskKind.F:
                changes[span.stage].append((span.start_s, 1, weights.forward * size))
            else:
                freed = frees_of.get(span.task.kind, weights.forward) * size
                changes[span.stage].append((span.end_s, 0, -freed))
    return _most_held(changes, graph, placement)


def _most_held(
    changes: list[list[tuple[float, int, float]]], graph: PipelineGraph, placement: Placement
) -> list[float]:
    """Returns each stage's peak, in microbatches, of (time, 0 for ends and 1 for starts, change in units of memory)."""
    kept = map(graph.kept_per_microbatch, placement.chunks_of_stage)
    return [
        max(accumulate((change for _, _, change in sorted(of_stage)), initial=0.0)) / of_microbatch
        for of_stage, of_microbatch in zip(changes, kept, strict=True)
    ]


def _own_bubbles(period: Timeline) -> list[float]:
    """Returns the share of each stage's own time in a period in which it was idle: stages end a step one after the
    other, so where steps overlap their periods lie askew."""
    sums = [period.of_stage(stage).sums() for stage in range(period.num_stages)]
    return [1 - own.work_s / own.cost_s if own.cost_s else 0.0 for own in sums]


_NOTICED = 0.01
"""The smallest share of the makespan for which :func:`bottleneck` has a sentence."""


def engines_busy(timeline: Timeline) -> list[dict[str, float]]:
    """Returns per stage the share of the makespan in which each of its engines was busy; mean over the steps."""
    shares: dict[tuple[int, str], list[float]] = {
        (stage, lane): [] for stage, lane in sorted({(span.stage, span.lane) for span in timeline.beside()})
    }
    for step in timeline.by_step():
        busy_s: dict[tuple[int, str], float] = defaultdict(float)
        for span in step.beside():
            busy_s[span.stage, span.lane] += span.end_s - span.start_s
        for engine, of_steps in shares.items():
            of_steps.append(busy_s[engine] / step.makespan_s() if step.makespan_s() else 0.0)
    return [
        {lane: fmean(of_steps) for (of, lane), of_steps in shares.items() if of == stage}
        for stage in range(timeline.num_stages)
    ]


def host_peaks(timeline: Timeline, graph: PipelineGraph, placement: Placement) -> list[float]:
    """Returns the most memory that each stage had moved to the host at once, in the unit of :func:`peak_memory`.

    Memory that one engine's operation frees, and that a later operation on an engine takes back, is on the host from
    the start of the first to the end of the second. Memory that is recomputed was not moved.
    """
    frees = {op.letter: op for op in graph.ops if op.is_beside and op.frees}
    back = {op.letter: op for op in graph.ops if op.is_beside and op.holds}
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    for span in timeline.beside():
        kind, chunk, m = span.task
        if m < 0 or not graph.has_backward(chunk):
            continue
        kept = graph.kept_units(chunk)
        if kind in frees and any(kind in op.after and op.exists(chunk, m) for op in back.values()):
            changes[span.stage].append((span.start_s, 1, frees[kind].frees * kept))
        if kind in back:
            changes[span.stage] += [
                (span.end_s, 0, -op.frees * kept)
                for letter, op in frees.items()
                if letter in back[kind].after and op.exists(chunk, m)
            ]
    return _most_held(changes, graph, placement)


def bottleneck(
    busy: list[dict[str, float]],
    stage_bubbles: list[float],
    waited: list[float],
    *,
    gain: float | None = None,
) -> str | None:
    """Returns one sentence about the engine that holds the steps up; None where none does.

    Args:
        busy: the result of :func:`engines_busy`.
        stage_bubbles: per stage, the idle share of the makespan.
        waited: per stage, the share of the makespan in which it waited for an engine.
        gain: the part of the makespan by which it would be shorter if engines took no time; None: unknown.
    """
    shares = {(stage, lane): share for stage, lanes in enumerate(busy) for lane, share in lanes.items()}
    if not shares or max(waited) < _NOTICED or (gain is not None and gain < _NOTICED):
        return None
    (stage, lane), most = max(shares.items(), key=lambda item: item[1])
    without = "" if gain is None else f" (if engines took no time, the makespan would be {gain:.0%} shorter)"
    if most > 1 - min(stage_bubbles):
        return (
            f"the engine {lane} of stage {stage} is busy {most:.0%} of the makespan, more than any stage computes: it "
            f"holds the step up{without}; give it fewer or shorter operations, or the stage more memory"
        )
    if gain is None:
        return None
    stage = max(range(len(waited)), key=waited.__getitem__)
    return (
        f"stage {stage} waits {waited[stage]:.0%} of the makespan for engines that are not always busy{without}: issue "
        "their operations earlier (lead), or give the stage more memory"
    )
