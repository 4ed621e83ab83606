"""From timelines to boxes: what picture and page both draw, in milliseconds from the first start.

A panel is one captioned timeline. Its boxes are grouped by colour, as arrays, because that is how many boxes
are drawn quickly.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.observe.lanes import Row, rows_of
from rrfp_jax.observe.style import TaskLook, shade, task_looks
from rrfp_jax.schedules import COMPUTE, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Boxes of one look; all arrays have the shape [boxes]."""

    row: NDArray[np.int64]
    """Which of the panel's rows."""
    step: NDArray[np.int64]
    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]
    chunk: NDArray[np.int64]
    """-1 for idle time."""
    microbatch: NDArray[np.int64]
    """-1 for idle time and for tasks that run once per step."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def width_ms(self) -> NDArray[np.float64]:
        return self.end_ms - self.start_ms


class TaskGroup(NamedTuple):
    """Tasks of one colour: a kind, and the rank of the chunk among those of its stage."""

    kind: TaskKind
    rank: int


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One captioned timeline, ready to be drawn."""

    caption: str
    num_stages: int
    rows: tuple[Row, ...]
    looks: Mapping[TaskKind, TaskLook]
    """Of all kinds in this drawing, in the order of legends."""
    steps: tuple[int, ...]
    chunks_of_stage: tuple[tuple[int, ...], ...]
    """The chunks that ran on each stage, ascending."""
    tasks: Mapping[TaskGroup, Boxes]
    waits: Mapping[IdleReason, Boxes]
    end_ms: float
    """The last end, of a task or of idle time."""
    makespan_ms: float
    """Mean over the steps."""
    bubble_fraction: float
    """Mean over the steps."""
    idle_shares: tuple[float, ...]
    """Per row, of the makespan: the bubble of a stage, the idle time of an engine; mean over the steps."""
    step_starts_ms: Mapping[int, Mapping[int, float]]
    """step -> stage -> start of the stage's first task of that step, engines apart."""

    @property
    def height(self) -> float:
        """Of all rows, in heights of a stage's."""
        return self.rows[-1].bottom

    def is_beside(self, boxes: Boxes) -> bool:
        """Whether tasks of one look ran on an engine."""
        return bool(len(boxes)) and self.rows[boxes.row[0]].is_beside

    @property
    def num_shades(self) -> int:
        return max(len(chunks) for chunks in self.chunks_of_stage)

    @property
    def num_boxes(self) -> int:
        return sum(len(boxes) for boxes in (*self.tasks.values(), *self.waits.values()))

    def visible_kinds(self) -> set[TaskKind]:
        """The kinds that one finds by looking: all together they take half a pixel of 1,000 on a stage, or more."""
        found = dict.fromkeys((group.kind for group in self.tasks), 0.0)
        for group, boxes in self.tasks.items():
            found[group.kind] += float(boxes.width_ms.sum()) / self.num_stages
        return {kind for kind, width_ms in found.items() if width_ms >= self.end_ms / 2000 and width_ms > 0} or {
            group.kind for group in self.tasks
        }

    def colour(self, group: TaskGroup) -> str:
        return shade(self.looks[group.kind].colour, group.rank, self.num_shades)

    def summary(self) -> str:
        """The facts of the title line: makespan, bubble fraction, step."""
        text = _facts(self.makespan_ms, self.bubble_fraction)
        if len(self.steps) == 1:
            return f"{text} · step {self.steps[0]}"
        return f"steps {self.steps[0]} to {self.steps[-1]}, mean: {text}"


def facts(step: Timeline) -> str:
    """The makespan and the bubble fraction of one step."""
    return _facts(step.makespan_s() * 1e3, step.bubble_fraction())


def _facts(makespan_ms: float, bubble_fraction: float) -> str:
    return f"makespan {format_ms(makespan_ms)} · bubble {bubble_fraction:.1%}"


def panels(timelines: Iterable[tuple[str, Timeline]]) -> list[Panel]:
    """One panel per (caption, timeline).

    Raises ValueError for no timeline at all, and for a timeline that is empty or that cannot be drawn.
    """
    given = list(timelines)
    looks = task_looks({span.task.kind: span.lane for _, timeline in given for span in timeline.spans})
    found = [_panel(" ".join(caption.split()), timeline, looks) for caption, timeline in given]
    if not found:
        raise ValueError("there is no timeline to draw: give at least one (caption, timeline) pair")
    return found


def require_drawable(timeline: Timeline, name: str = "the timeline") -> None:
    """Raise ValueError with one sentence where ``timeline`` holds nothing, or what no stage can have done."""
    if not timeline.spans:
        raise ValueError(
            f"{name} holds no task (and {len(timeline.waits)} idle intervals): record at least one step first"
        )
    for entry in _entries(timeline):
        if not 0 <= entry.stage < timeline.num_stages:
            raise ValueError(
                f"{name} has an entry of stage {entry.stage}, but {timeline.num_stages} stages: "
                f"give num_stages={entry.stage + 1} or more"
            )
        if not (math.isfinite(entry.start_s) and math.isfinite(entry.end_s) and entry.start_s <= entry.end_s):
            raise ValueError(
                f"{name} has an entry of stage {entry.stage} that lasts from {entry.start_s} s to {entry.end_s} s: "
                "give finite times, the start not after the end"
            )


def first_start_s(timeline: Timeline) -> float:
    """The zero of every drawn axis: the first start of a task or of idle time."""
    return min(entry.start_s for entry in _entries(timeline))


def format_ms(milliseconds: float) -> str:
    """Four significant digits and the unit, for example ``57.25 ms`` or ``1,234 ms``."""
    if milliseconds <= 0:
        return "0 ms"
    decimals = max(0, 3 - math.floor(math.log10(milliseconds)))
    return f"{milliseconds:,.{decimals}f} ms"


def _panel(caption: str, timeline: Timeline, looks: Mapping[TaskKind, TaskLook]) -> Panel:
    require_drawable(timeline, f"timeline {caption!r}")
    zero_s = first_start_s(timeline)
    chunks_of_stage = _chunks_of_stage(timeline)
    rows = rows_of(timeline.num_stages, timeline.spans)
    steps = tuple(timeline.steps())
    by_step = timeline.by_step()
    starts: dict[int, dict[int, float]] = {step: {} for step in steps}
    for span in sorted(timeline.spans, key=lambda s: s.start_s, reverse=True):
        if not span.is_beside:
            starts[span.step][span.stage] = _ms(span.start_s, zero_s)
    return Panel(
        caption=caption,
        num_stages=timeline.num_stages,
        rows=rows,
        looks=looks,
        steps=steps,
        chunks_of_stage=chunks_of_stage,
        tasks=_task_boxes(timeline.spans, chunks_of_stage, zero_s, rows, list(looks)),
        waits=_wait_boxes(timeline.waits, zero_s, rows),
        end_ms=_ms(max(entry.end_s for entry in _entries(timeline)), zero_s),
        makespan_ms=fmean(one.makespan_s() for one in by_step) * 1e3,
        bubble_fraction=fmean(one.bubble_fraction() for one in by_step),
        idle_shares=tuple(map(fmean, zip(*(_idle_shares(one, rows) for one in by_step), strict=True))),
        step_starts_ms=starts,
    )


def _idle_shares(step: Timeline, rows: Sequence[Row]) -> list[float]:
    bubbles, makespan_s = step.stage_bubbles(), step.makespan_s()
    busy_s: dict[tuple[int, str], float] = defaultdict(float)
    for span in step.beside():
        busy_s[span.stage, span.lane] += span.end_s - span.start_s
    return [
        max(0.0, 1 - busy_s[row.stage, row.lane] / makespan_s if makespan_s else 0.0)
        if row.is_beside
        else bubbles[row.stage]
        for row in rows
    ]


def _entries(timeline: Timeline) -> Iterator[Span | Wait]:
    yield from timeline.spans
    yield from timeline.waits


def _chunks_of_stage(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    chunks: list[set[int]] = [set() for _ in range(timeline.num_stages)]
    for span in timeline.spans:
        chunks[span.stage].add(span.task.chunk)
    return tuple(tuple(sorted(found)) for found in chunks)


def _task_boxes(
    spans: Sequence[Span],
    chunks_of_stage: Sequence[Sequence[int]],
    zero_s: float,
    rows: Sequence[Row],
    kinds: Sequence[TaskKind],
) -> dict[TaskGroup, Boxes]:
    rank_of = [{chunk: rank for rank, chunk in enumerate(chunks)} for chunks in chunks_of_stage]
    groups: dict[TaskGroup, list[Span]] = defaultdict(list)
    for span in spans:
        groups[TaskGroup(span.task.kind, rank_of[span.stage][span.task.chunk])].append(span)
    ordered = sorted(groups, key=lambda group: (kinds.index(group.kind), group.rank))
    return {group: _boxes(groups[group], zero_s, rows) for group in ordered}


def _wait_boxes(waits: Sequence[Wait], zero_s: float, rows: Sequence[Row]) -> dict[IdleReason, Boxes]:
    groups: dict[IdleReason, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.end_s > wait.start_s:
            groups[wait.reason].append(wait)
    return {reason: _boxes(groups[reason], zero_s, rows) for reason in IdleReason if reason in groups}


def _boxes(entries: Sequence[Span] | Sequence[Wait], zero_s: float, rows: Sequence[Row]) -> Boxes:
    number = {(row.stage, row.lane): at for at, row in enumerate(rows)}
    tasks = [(e.task.chunk, e.task.microbatch) if isinstance(e, Span) else (-1, -1) for e in entries]
    chunk, microbatch = np.array(tasks).T
    return Boxes(
        row=np.array([number[e.stage, e.lane if isinstance(e, Span) else COMPUTE] for e in entries]),
        step=np.array([e.step for e in entries]),
        start_ms=np.array([_ms(e.start_s, zero_s) for e in entries]),
        end_ms=np.array([_ms(e.end_s, zero_s) for e in entries]),
        chunk=chunk,
        microbatch=microbatch,
    )


def _ms(time_s: float, zero_s: float) -> float:
    return (time_s - zero_s) * 1e3
