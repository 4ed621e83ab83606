"""The numbers of a run, simulated or real, by one set of definitions (see :mod:`rrfp_jax.timeline`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from rrfp_jax.arbitration.footprint import memory_effect, memory_unit
from rrfp_jax.schedules.table import relative_sizes
from rrfp_jax.simulation.costs import SLOTS
from rrfp_jax.simulation.engine_figures import engines_busy, host_peaks
from rrfp_jax.tasks import PipelineGraph, Placement, TaskKind
from rrfp_jax.timeline import IdleReason, Timeline

_DECIMALS = 6
"""Of milliseconds: nanoseconds. Virtual time is exact, seconds in floating point are not."""


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """What ``emulate`` and ``simulate`` print about a run of one or more steps."""

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
    """Per stage: the text forms of what it computed in the last step."""
    engine_busy: list[dict[str, float]]
    """Per stage: by engine beside it, the share of the makespan in which it was busy; mean over the steps."""

    @property
    def waited_for_engines(self) -> list[float]:
        """Per stage: the share of the makespan in which it was idle for an engine's sake."""
        makespan_ms = self.makespan_ms_mean
        return [idle.get(IdleReason.ENGINE, 0.0) / makespan_ms if makespan_ms else 0.0 for idle in self.idle_ms]

    def as_dict(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


def run_metrics(timeline: Timeline, step_ms: Sequence[float]) -> RunMetrics:
    """The numbers of a recorded run; ``step_ms`` holds the interval between ends of steps, one per step recorded.

    Raises ValueError for a record without tasks, or with other steps than ``step_ms``.
    """
    steps = timeline.by_step()
    if not steps or len(steps) != len(step_ms):
        raise ValueError(f"the record has {len(steps)} steps, and {len(step_ms)} step times were given")
    makespans_ms = [_ms(step.makespan_s()) for step in steps]
    num_tasks = fmean(sum(span.task.microbatch >= 0 for span in step.spans) for step in steps)
    mean_step_ms = fmean(step_ms)
    return RunMetrics(
        makespan_ms=makespans_ms,
        makespan_ms_mean=round(fmean(makespans_ms), _DECIMALS),
        step_ms=[round(ms, _DECIMALS) for ms in step_ms],
        step_ms_mean=round(mean_step_ms, _DECIMALS),
        us_per_task=mean_step_ms * 1e3 / num_tasks,
        bubble_fraction=fmean(step.bubble_fraction() for step in steps),
        stage_bubbles=[fmean(bubbles) for bubbles in zip(*(step.stage_bubbles() for step in steps), strict=True)],
        idle_ms=[_mean_idle_ms(idle, len(steps)) for idle in timeline.idle_s_by_reason()],
        peak_in_flight=timeline.peak_in_flight(),
        order=[[str(task) for task in tasks] for tasks in steps[-1].order()],
        engine_busy=engines_busy(timeline),
    )


def _mean_idle_ms(idle_s: dict[IdleReason, float], num_steps: int) -> dict[str, float]:
    return {reason.value: _ms(idle_s[reason] / num_steps) for reason in IdleReason if reason in idle_s}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, _DECIMALS)


@dataclass(frozen=True, kw_only=True)
class MemoryWeights:
    """What the tasks of one microbatch hold and free on a stage.

    The unit is what a stage keeps of one microbatch over all its chunks (of one direction, if the pipeline is
    bidirectional); every chunk has an equal part. Raises ValueError unless everything held is freed.
    """

    forward: float = 1.0
    """Held from the start of F."""
    input_gradient: float = 0.0
    """Freed at the end of I; negative if I leaves more behind than it takes."""
    weight_gradient: float = 1.0
    """Freed at the end of W. A fused backward frees everything at its end."""

    def __post_init__(self) -> None:
        if abs(self.forward - self.input_gradient - self.weight_gradient) > 1e-9:
            raise ValueError(
                f"memory weights: F holds {self.forward}, but I and W free {self.input_gradient} and "
                f"{self.weight_gradient}: make F the sum of the other two"
            )

    def freed_by(self, kind: TaskKind) -> float:
        """What a backward task of this kind frees."""
        return {TaskKind.I: self.input_gradient, TaskKind.W: self.weight_gradient}.get(kind, self.forward)


DEFAULT_WEIGHTS = MemoryWeights()


def memory_figures(timeline: Timeline, graph: PipelineGraph, placement: Placement) -> dict[str, list[float]]:
    """The peaks of device and host per stage, in microbatches, where operations move memory; nothing elsewhere."""
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
    weights: MemoryWeights = DEFAULT_WEIGHTS,
    chunk_parts: Sequence[float] = (),
) -> list[float]:
    """The largest memory that each stage held at once, over all steps recorded, in microbatches.

    What ends at a time is freed before what starts then is held. A chunk without a backward keeps nothing. Where
    operations move memory, it is that of the device, and ``weights`` do not count. ``chunk_parts`` are the proportions
    of what chunks keep; empty: equal.
    """
    sizes = relative_sizes(chunk_parts, graph.num_chunks)
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(placement.num_stages)]
    moves_memory = bool(graph.ops) and graph.operations.moves_memory
    for span in timeline.spans:
        if span.task.microbatch < 0 or not graph.has_backward(span.task.chunk):
            continue
        if moves_memory:
            takes, frees = memory_effect(span.task, graph)
            size = sizes[span.task.chunk] / memory_unit(graph)
            changes[span.stage] += [(span.start_s, 1, takes * size), (span.end_s, 0, -frees * size)]
        elif span.task.kind in SLOTS:
            if span.task.kind is TaskKind.F:
                changes[span.stage].append((span.start_s, 1, weights.forward * sizes[span.task.chunk]))
            else:
                freed = weights.freed_by(span.task.kind) * sizes[span.task.chunk]
                changes[span.stage].append((span.end_s, 0, -freed))
    return [
        max(accumulate((change for _, _, change in sorted(of_stage)), initial=0.0))
        / graph.passes_per_microbatch(chunks)
        for of_stage, chunks in zip(changes, placement.chunks_of_stage, strict=True)
    ]
