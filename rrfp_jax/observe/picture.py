"""Timelines as a picture: one row per stage, one box per task, one panel per timeline, all on one time scale.

Engines beside a stage have thin rows under its own.

All lengths of the layout are inches, so that fonts and boxes keep their size whatever the number of stages. The same
timelines always give the same bytes (with one version of matplotlib).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rrfp_jax.observe.figure_files import check_format, plain_look, text_width, write_figure
from rrfp_jax.observe.panels import Panel, panels
from rrfp_jax.observe.rows import DIGIT, POINTS, Rows, label_points, row_label
from rrfp_jax.observe.style import FAINT_INK, IDLE_LOOKS, INK, PAPER, UNEXPLAINED_LABEL, shade
from rrfp_jax.schedules.timeline import IdleReason, Timeline

_RIGHT, _AXIS, _MARGIN = 0.7, 0.6, 0.12
_TITLE, _TITLE_OF_STEPS = 0.4, 0.55
_TIME_WIDTH = (9.5, 15.0)
"""Least and greatest width of the time axis, in inches."""
_KEY_ROW = 0.225
_HEADING = 0.27
_KEY_WIDTH, _KEY_HEIGHT = 0.3, 0.145
_KEY_GAP, _COLUMN_GAP = 0.08, 0.35
_POINTS = 8.5
_IDLE_HEADING = "Idle time of a stage (on the right of each row: its share of the makespan)"


def draw_timelines(timelines: Iterable[tuple[str, Timeline]], path: str | os.PathLike[str]) -> None:
    """Draws (caption, timeline) pairs one below another on one time scale, to a ``.png`` or ``.svg`` file.

    A timeline may hold several steps; its title then gives their means. Raises ValueError for another suffix and for a
    timeline without tasks, before anything is written.
    """
    check_format(path)
    drawn = panels(timelines)
    with plain_look():
        write_figure(figure_of(drawn), path)


def figure_of(drawn: list[Panel]) -> Figure:
    """Returns the laid out figure of some panels, not yet written."""
    end_ms = max(panel.end_ms for panel in drawn) or 1.0
    time_width = _time_width(drawn, end_ms)
    left = _left(drawn)
    width = left + time_width + _RIGHT
    rows = [Rows(panel, time_width=time_width, row_height=_row_height(panel), end_ms=end_ms) for panel in drawn]
    legend = _Legend(
        drawn,
        width - 2 * _MARGIN,
        numbered=any(one.number_points is not None for one in rows),
        thin=any(one.thin for one in rows),
    )
    height = 2 * _MARGIN + sum(_title(one.panel) + one.height for one in rows) + _AXIS + legend.height

    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    top = height - _MARGIN
    for one in rows:
        top -= _title(one.panel) + one.height
        axes = figure.add_axes((left / width, top / height, time_width / width, one.height / height))
        one.draw(axes, last=one is rows[-1])
    legend.draw(figure, _MARGIN, _MARGIN, width, height)
    return figure


def _title(panel: Panel) -> float:
    # Numbers of several steps stand between the title and the rows.
    return _TITLE if len(panel.steps) == 1 else _TITLE_OF_STEPS


def _left(drawn: list[Panel]) -> float:
    widths = [
        text_width(line, label_points(row, _row_height(panel)))
        for panel in drawn
        for row in panel.rows
        for line in row_label(panel, row, _row_height(panel)).splitlines()
    ]
    return _MARGIN + max(widths) + 0.1


def _row_height(panel: Panel) -> float:
    # Few stages get high rows; with many the whole panel stays on a screen.
    return float(np.clip(6.4 / panel.height, 0.11, 0.42))


def _time_width(drawn: list[Panel], end_ms: float) -> float:
    """Returns the width that the numbers of most microbatches need, within limits."""
    needed = 0.0
    for panel in drawn:
        stages = [boxes.width_ms for boxes in panel.tasks.values() if not panel.is_beside(boxes)]
        widths = np.concatenate(stages or [np.zeros(1)])
        digits = len(str(max(int(boxes.microbatch.max()) for boxes in panel.tasks.values())))
        typical_ms = float(np.quantile(widths[widths > 0], 0.25)) if (widths > 0).any() else end_ms
        needed = max(needed, end_ms / typical_ms * (digits * DIGIT * 6.5 + 2.5) / POINTS)
    return float(np.clip(needed, *_TIME_WIDTH))


@dataclass(frozen=True, kw_only=True)
class LegendKey:
    """One line of the legend: a swatch of one or several shades, and its words."""

    fills: tuple[str, ...]
    label: str
    hatch: str | None = None
    line: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Block:
    heading: str
    keys: Sequence[LegendKey]
    num_columns: int

    @property
    def num_rows(self) -> int:
        return -(-len(self.keys) // self.num_columns)

    @property
    def height(self) -> float:
        return _HEADING + _KEY_ROW * self.num_rows


class _Legend:
    """The legend below the panels: every colour that occurs, in plain words, in as many columns as fit.

    It is laid out within a width in inches; :attr:`height` is the height that it needs.
    """

    def __init__(self, drawn: Sequence[Panel], width: float, *, numbered: bool, thin: bool) -> None:
        tasks, idle = task_keys(drawn), idle_keys(drawn)
        self._blocks = [
            _Block(heading=heading, keys=keys, num_columns=_num_columns(keys, width))
            for heading, keys in ((_task_heading(drawn, numbered=numbered, thin=thin), tasks), (_IDLE_HEADING, idle))
            if keys
        ]
        self.height = sum(block.height for block in self._blocks)

    def draw(self, figure: Figure, left: float, bottom: float, width: float, height: float) -> None:
        """Draws with the lower left corner at (left, bottom), all in inches of a figure of width x height."""
        axes = figure.add_axes((0, 0, 1, 1), zorder=-1)
        axes.set_xlim(0, width)
        axes.set_ylim(0, height)
        axes.set_axis_off()
        top = bottom + self.height
        for block in self._blocks:
            axes.text(left, top - _HEADING / 2, block.heading, fontsize=_POINTS, color=FAINT_INK, va="center")
            for index, key in enumerate(block.keys):
                column, row = divmod(index, block.num_rows)
                x = left + column * _column_width(block.keys)
                y = top - _HEADING - (row + 0.5) * _KEY_ROW
                for patch in _swatch(key, x, y):
                    axes.add_patch(patch)
                axes.text(x + _KEY_WIDTH + _KEY_GAP, y, key.label, fontsize=_POINTS, color=INK, va="center_baseline")
            top -= block.height


def task_keys(drawn: Sequence[Panel]) -> list[LegendKey]:
    """Returns one key per visible kind of task, with all its shades."""
    num_shades = max(panel.num_shades for panel in drawn)
    present = set().union(*(panel.visible_kinds() for panel in drawn))
    return [
        LegendKey(
            fills=tuple(shade(look.colour, rank, num_shades) for rank in range(num_shades)),
            label=look.label,
        )
        for kind, look in drawn[0].looks.items()
        if kind in present
    ]


def idle_keys(drawn: Sequence[Panel]) -> list[LegendKey]:
    """Returns one key per reason that occurs, and one for idle time without a recorded reason."""
    present = {reason for panel in drawn for reason in panel.waits}
    keys = [
        LegendKey(fills=(look.fill,), label=look.label, hatch=look.hatch, line=look.line)
        for look in (IDLE_LOOKS[reason] for reason in IdleReason if reason in present)
    ]
    if any(not panel.waits for panel in drawn):
        keys.append(LegendKey(fills=(PAPER,), label=UNEXPLAINED_LABEL, line=FAINT_INK))
    return keys


def _task_heading(drawn: Sequence[Panel], *, numbered: bool, thin: bool) -> str:
    notes = []
    if numbered:
        notes.append("the number in a box is the microbatch")
    if thin:
        notes.append("tasks too thin to be seen are stacked: the height of a colour is its share of the time")
    if max(panel.num_shades for panel in drawn) > 1:
        notes.append("the lighter, the later the chunk among those of its stage")
    if any(len(panel.steps) > 1 for panel in drawn):
        notes.append("a black line marks a stage's first task of a step")
    return "Tasks" + (f" ({'; '.join(notes)})" if notes else "")


def _column_width(keys: Sequence[LegendKey]) -> float:
    return _KEY_WIDTH + _KEY_GAP + max(text_width(key.label, _POINTS) for key in keys) + _COLUMN_GAP


def _num_columns(keys: Sequence[LegendKey], width: float) -> int:
    """Returns as many columns as fit, but not more than the resulting number of rows needs."""
    if not keys:
        return 1
    fitting = max(1, min(len(keys), int((width + _COLUMN_GAP) // _column_width(keys))))
    num_rows = -(-len(keys) // fitting)
    return -(-len(keys) // num_rows)


def _swatch(key: LegendKey, x: float, y: float) -> list[Rectangle]:
    part = _KEY_WIDTH / len(key.fills)
    return [
        Rectangle(
            (x + index * part, y - _KEY_HEIGHT / 2),
            part,
            _KEY_HEIGHT,
            facecolor=fill,
            edgecolor=key.line or "none",
            hatch=key.hatch,
            linewidth=0.4 if key.line else 0,
        )
        for index, fill in enumerate(key.fills)
    ]
