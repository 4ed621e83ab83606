"""The numbers of a run, simulated or real, by one set of definitions (see :mod:`rrfp_jax.timeline`)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rrfp_jax.timeline import IdleReason, Span, Timeline, Wait

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
    """Per stage: the text forms of what ran in the last step."""

    def as_dict(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


def run_metrics(timeline: Timeline, step_ms: Sequence[float]) -> RunMetrics:
    """The numbers of a recorded run; ``step_ms`` holds the interval between ends of steps, one per step recorded.

    Raises ValueError for a record without tasks, or with other steps than ``step_ms``.
    """
    steps = by_step(timeline)
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
    )


def by_step(timeline: Timeline) -> list[Timeline]:
    """The record of each step, ascending, in one pass."""
    spans: dict[int, list[Span]] = defaultdict(list)
    waits: dict[int, list[Wait]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.step].append(span)
    for wait in timeline.waits:
        waits[wait.step].append(wait)
    return [Timeline(timeline.num_stages, spans[step], waits[step]) for step in sorted(spans)]


def _mean_idle_ms(idle_s: dict[IdleReason, float], num_steps: int) -> dict[str, float]:
    return {reason.value: _ms(idle_s[reason] / num_steps) for reason in IdleReason if reason in idle_s}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, _DECIMALS)
