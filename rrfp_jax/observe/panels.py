"""Timelines as boxes for picture and page, in milliseconds from the first start.

A panel is one captioned timeline. It has a row for each stage, and right under it a thin one for each engine that ran
beside the stage. Boxes are grouped by colour, as arrays, because many boxes are drawn quickly that way.

The page works without a network: choose a step, zoom, point at a box for its facts. ``page.html`` draws the boxes with
a small script of its own, on canvases, from compressed numbers that :func:`write_page` puts in. Colours, hatchings and
words are those of the picture (:mod:`rrfp_jax.observe.style`).
"""

import base64
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.style import IDLE_LOOKS, TaskLook, shade, task_looks, text_colour
from rrfp_jax.schedules import COMPUTE, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait

_THIN = 0.45
"""Height of an engine's row, in heights of a stage's row."""


class PanelRow(NamedTuple):
    """One row; lengths are in heights of a stage's row, from the top of the panel."""

    stage: int
    lane: str
    top: float
    height: float

    @property
    def is_beside(self) -> bool:
        """Whether the row shows an engine beside its stage."""
        return self.lane != COMPUTE

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Boxes of one look; all arrays have the shape [boxes]."""

    row: NDArray[np.int64]
    """Number of the row in its panel."""
    step: NDArray[np.int64]
    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]
    chunk: NDArray[np.int64]
    """Chunk of the task; -1 for idle time."""
    microbatch: NDArray[np.int64]
    """Microbatch of the task; -1 for idle time and for tasks that run once per step."""
    is_beside: bool
    """Whether they ran on an engine beside a stage."""

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
    summary: str
    """The facts of the title line: makespan, bubble fraction, step."""
    num_stages: int
    rows: tuple[PanelRow, ...]
    height: float
    """Height of all rows, in heights of a stage's row."""
    looks: Mapping[TaskKind, TaskLook]
    """Looks of all kinds in the drawing, in the order of legends."""
    steps: tuple[int, ...]
    chunks_of_stage: tuple[tuple[int, ...], ...]
    """The chunks that ran on each stage, ascending."""
    num_shades: int
    """The most chunks of a stage."""
    tasks: Mapping[TaskGroup, Boxes]
    waits: Mapping[IdleReason, Boxes]
    end_ms: float
    """Last end of a task or of idle time."""
    idle_shares: tuple[float, ...]
    """For each row its idle share of the makespan, mean over the steps: a stage's bubble, or an engine's idle time."""
    step_starts_ms: Mapping[int, Mapping[int, float]]
    """step -> stage -> start of the stage's first task of that step, engines apart."""

    def colour(self, group: TaskGroup) -> str:
        return shade(self.looks[group.kind].colour, group.rank, self.num_shades)


def panels(timelines: Iterable[tuple[str, Timeline]]) -> list[Panel]:
    """Returns one panel per (caption, timeline).

    Raises ValueError for no timeline at all, and for a timeline that is empty or that cannot be drawn.
    """
    given = list(timelines)
    looks = task_looks({span.task.kind: span.lane for _, timeline in given for span in timeline.spans})
    found = [_panel(" ".join(caption.split()), timeline, looks) for caption, timeline in given]
    if not found:
        raise ValueError("there is no timeline to draw: give at least one (caption, timeline) pair")
    return found


def first_start_s(timeline: Timeline, name: str = "the timeline") -> float:
    """Returns the zero of every drawn axis: the first start of a task or of idle time.

    Raises ValueError with one sentence for a timeline without tasks, or with times that no stage can have.
    """
    if not timeline.spans:
        raise ValueError(
            f"{name} holds no task (and {len(timeline.waits)} idle intervals): record at least one step first"
        )
    entries: list[Span | Wait] = [*timeline.spans, *timeline.waits]
    for entry in entries:
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
    return min(entry.start_s for entry in entries)


def facts(*steps: Timeline) -> str:
    """Returns the makespan and the bubble fraction of a step, mean over the steps, as text."""
    makespan_ms = fmean(step.makespan_s() for step in steps) * 1e3
    return f"makespan {format_ms(makespan_ms)} · bubble {fmean(step.bubble_fraction() for step in steps):.1%}"


def format_ms(milliseconds: float) -> str:
    """Returns four significant digits and the unit, for example ``57.25 ms`` or ``1,234 ms``."""
    if milliseconds <= 0:
        return "0 ms"
    decimals = max(0, 3 - math.floor(math.log10(milliseconds)))
    return f"{milliseconds:,.{decimals}f} ms"


def _panel(caption: str, timeline: Timeline, looks: Mapping[TaskKind, TaskLook]) -> Panel:
    zero_s, num_stages = first_start_s(timeline, f"timeline {caption!r}"), timeline.num_stages
    # The rows from top to bottom; a stage's engines stand in the order of their names.
    engines, rows, top = sorted({(span.stage, span.lane) for span in timeline.beside()}), list[PanelRow](), 0.0
    for stage in range(num_stages):
        for lane in (COMPUTE, *(lane for of, lane in engines if of == stage)):
            rows.append(PanelRow(stage, lane, top, 1.0 if lane == COMPUTE else _THIN))
            top += rows[-1].height
    chunks: list[set[int]] = [set() for _ in range(num_stages)]
    for span in timeline.spans:
        chunks[span.stage].add(span.task.chunk)
    chunks_of_stage = tuple(tuple(sorted(found)) for found in chunks)
    steps, by_step = tuple(timeline.steps()), timeline.by_step()
    starts: dict[int, dict[int, float]] = {step: {} for step in steps}
    for span in sorted(timeline.spans, key=lambda s: s.start_s, reverse=True):
        # In descending order, so that the first start of a stage is the last to be written.
        if not span.is_beside:
            starts[span.step][span.stage] = (span.start_s - zero_s) * 1e3
    tasks: dict[TaskGroup, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        tasks[TaskGroup(span.task.kind, chunks_of_stage[span.stage].index(span.task.chunk))].append(span)
    waits: dict[IdleReason, list[Wait]] = defaultdict(list)
    for wait in timeline.waits:
        if wait.end_s > wait.start_s:
            waits[wait.reason].append(wait)
    place = list(looks).index
    mean = "" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, mean: "
    return Panel(
        caption=caption,
        summary=mean + facts(*by_step) + (f" · step {steps[0]}" if not mean else ""),
        num_stages=num_stages,
        rows=tuple(rows),
        height=top,
        looks=looks,
        steps=steps,
        chunks_of_stage=chunks_of_stage,
        num_shades=max(map(len, chunks_of_stage)),
        tasks={
            group: _boxes(tasks[group], zero_s, rows)
            for group in sorted(tasks, key=lambda group: (place(group.kind), group.rank))
        },
        waits={reason: _boxes(waits[reason], zero_s, rows) for reason in IdleReason if reason in waits},
        end_ms=(max([*(span.end_s for span in timeline.spans), *(wait.end_s for wait in timeline.waits)]) - zero_s)
        * 1e3,
        idle_shares=tuple(map(fmean, zip(*(_idle_shares(one, rows) for one in by_step), strict=True))),
        step_starts_ms=starts,
    )


def _idle_shares(step: Timeline, rows: Sequence[PanelRow]) -> list[float]:
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


def _boxes(entries: Sequence[Span] | Sequence[Wait], zero_s: float, rows: Sequence[PanelRow]) -> Boxes:
    number = {(row.stage, row.lane): at for at, row in enumerate(rows)}
    tasks = [(e.task.chunk, e.task.microbatch) if isinstance(e, Span) else (-1, -1) for e in entries]
    chunk, microbatch = np.array(tasks).T
    row = np.array([number[e.stage, e.lane if isinstance(e, Span) else COMPUTE] for e in entries])
    return Boxes(
        row=row,
        step=np.array([e.step for e in entries]),
        start_ms=np.array([(e.start_s - zero_s) * 1e3 for e in entries]),
        end_ms=np.array([(e.end_s - zero_s) * 1e3 for e in entries]),
        chunk=chunk,
        microbatch=microbatch,
        is_beside=rows[row[0]].is_beside,
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def write_page(
    timelines: Iterable[tuple[str, Timeline]], path: str | os.PathLike[str], *, title: str = "Pipeline timelines"
) -> None:
    """Writes (caption, timeline) pairs as one self-contained HTML file, in one piece.

    The page opens on the last step. Raises ValueError for a timeline without tasks, before anything is written.
    """
    given = list(timelines)
    drawn = panels(given)
    num_shades = max(panel.num_shades for panel in drawn)
    looks: list[dict[str, str]] = []
    groups: list[TaskGroup | IdleReason] = []
    for kind, look in drawn[0].looks.items():
        for rank in range(num_shades):
            colour = shade(look.colour, rank, num_shades)
            groups.append(TaskGroup(kind, rank))
            looks.append({"label": look.label, "kind": kind, "colour": colour, "ink": text_colour(colour)})
    for reason in IdleReason:
        idle = IDLE_LOOKS[reason]
        groups.append(reason)
        looks.append({"label": f"idle: {idle.label}", "colour": idle.fill, "line": idle.line, "pattern": idle.pattern})
    data = {
        "looks": looks,
        "panels": [_of_page(panel, timeline, groups) for panel, (_, timeline) in zip(drawn, given, strict=True)],
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=9)
    text = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    text = text.replace("@SHADES@", "; the lighter, the later its chunk on that stage" if num_shades > 1 else "")
    text = text.replace("@DATA@", base64.b64encode(packed).decode()).replace("@TITLE@", escape(title))
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _of_page(panel: Panel, timeline: Timeline, groups: Sequence[TaskGroup | IdleReason]) -> dict[str, Any]:
    by_group: list[tuple[TaskGroup | IdleReason, Boxes]] = [*panel.waits.items(), *panel.tasks.items()]
    boxes = []
    for group, found in by_group:
        start_us, end_us = (np.rint(times * 1e3).astype(np.int64) for times in (found.start_ms, found.end_ms))
        columns = (found.step, found.row, start_us, end_us - start_us, found.chunk, found.microbatch)
        boxes.append([groups.index(group), *(column.tolist() for column in columns)])
    by_step = zip(timeline.steps(), timeline.by_step(), strict=True)
    return {
        "caption": panel.caption,
        "rows": [
            {"stage": row.stage, "lane": row.lane if row.is_beside else "", "top": row.top, "height": row.height}
            for row in panel.rows
        ],
        "height": panel.height,
        "facts": {"all": panel.summary, **{step: facts(one) for step, one in by_step}},
        "boxes": boxes,
    }
