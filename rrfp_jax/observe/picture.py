"""Timelines as a picture: one row per stage, one box per task, one panel per timeline, all on one time scale.

Engines beside a stage have thin rows under its own.

All lengths of the layout are inches, so that fonts and boxes keep their size whatever the number of stages. The same
timelines always give the same bytes (with one version of matplotlib).
"""

import os
from collections.abc import Iterable

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rrfp_jax.observe.figure_files import check_format, plain_look, write_figure
from rrfp_jax.observe.legend import Legend
from rrfp_jax.observe.measure import text_width
from rrfp_jax.observe.panels import Panel, panels
from rrfp_jax.observe.rows import DIGIT, POINTS, Rows, label_points, row_label
from rrfp_jax.observe.style import PAPER
from rrfp_jax.schedules.timeline import Timeline

_RIGHT, _AXIS, _MARGIN = 0.7, 0.6, 0.12
_TITLE, _TITLE_OF_STEPS = 0.4, 0.55
_TIME_WIDTH = (9.5, 15.0)
"""Least and greatest width of the time axis."""


def draw_timelines(timelines: Iterable[tuple[str, Timeline]], path: str | os.PathLike[str]) -> None:
    """Draw (caption, timeline) pairs one below another on one time scale, to a ``.png`` or ``.svg`` file.

    A timeline may hold several steps; its title then gives their means. Raises ValueError for another suffix and for a
    timeline without tasks, before anything is written.
    """
    check_format(path)
    drawn = panels(timelines)
    with plain_look():
        write_figure(figure_of(drawn), path)


def figure_of(drawn: list[Panel]) -> Figure:
    """The laid out figure of some panels, not yet written."""
    end_ms = max(panel.end_ms for panel in drawn) or 1.0
    time_width = _time_width(drawn, end_ms)
    left = _left(drawn)
    width = left + time_width + _RIGHT
    rows = [Rows(panel, time_width=time_width, row_height=_row_height(panel), end_ms=end_ms) for panel in drawn]
    legend = Legend(
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
    """Where several steps are drawn, their numbers stand between the title and the rows."""
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
    """Few stages get high rows; with many the whole panel stays on a screen."""
    return float(np.clip(6.4 / panel.height, 0.11, 0.42))


def _time_width(drawn: list[Panel], end_ms: float) -> float:
    """As wide as the numbers of most microbatches need, within limits."""
    needed = 0.0
    for panel in drawn:
        stages = [boxes.width_ms for boxes in panel.tasks.values() if not panel.is_beside(boxes)]
        widths = np.concatenate(stages or [np.zeros(1)])
        digits = len(str(max(int(boxes.microbatch.max()) for boxes in panel.tasks.values())))
        typical_ms = float(np.quantile(widths[widths > 0], 0.25)) if (widths > 0).any() else end_ms
        needed = max(needed, end_ms / typical_ms * (digits * DIGIT * 6.5 + 2.5) / POINTS)
    return float(np.clip(needed, *_TIME_WIDTH))
