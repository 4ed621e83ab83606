"""Pictures of a study over systems, as PNG files: for each question rows of panels, and a map of the fastest.

Colours are Okabe and Ito's, told apart by all kinds of colour vision; markers and letters tell the same in grey print.
"""

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.systems.map_picture import draw_map
from experiments.systems.questions import RATIO, Line, Panel, Question, questions
from experiments.systems.results import Study
from rrfp_jax.observe.output_files import plain_look, write_figure
from rrfp_jax.observe.style import FAINT_INK, GRID, INK, PAPER, SERIES_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX"
_PANEL = (2.9, 2.3)
"""Inches of a panel across and down."""
_LINEAR = 10
"""Value up to which an axis is linear where values span orders of magnitude."""
_TICKS = (-100, -30, -10, -5, 0, 5, 10, 30, 100, 300)


def draw_study(study: Study, folder: Path) -> list[str]:
    """Draws all pictures and returns their names."""
    names = []
    with plain_look():
        for question in questions(study):
            names.append(f"{question.name}.png")
            write_figure(figure_of(question), folder / names[-1])
        names.append("fastest.png")
        write_figure(draw_map(study), folder / names[-1])
    return names


def figure_of(question: Question) -> Figure:
    """Returns the laid out figure of a question."""
    rows, columns = len(question.panels), max(map(len, question.panels))
    figure = Figure(figsize=(columns * _PANEL[0] + 0.4, rows * _PANEL[1] + 0.9), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(question.text, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axes_of_row, panels in zip(grid, question.panels, strict=True):
        for axes, panel in zip_longest(axes_of_row, panels):
            if panel is None:
                axes.set_visible(False)
            else:
                _draw_panel(axes, panel, question)
    for axes in grid[-1]:
        axes.set_xlabel(question.across, fontsize=8, color=INK)
    figure.supylabel(question.up, fontsize=9, color=INK)
    lines = [line.label for line in question.panels[0][0].lines]
    figure.legend(
        grid[0][0].lines[1 : len(lines) + 1],
        lines,
        loc="outside lower center",
        ncols=min(len(lines), 2 * columns + 1),
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_panel(axes: "Axes", panel: Panel, question: Question) -> None:
    axes.axhline(0.0, color=INK, linewidth=0.8)
    for line in panel.lines:
        _draw_line(axes, line)
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    if question.across == RATIO:
        axes.set_xscale("log")
        names = dict(zip(xs, question.before, strict=False))
        axes.set_xticks(xs, [names.get(x, f"{x:.1g}") for x in xs])
        if names:
            axes.axvline(xs[len(names)] / 10**0.5, color=FAINT_INK, linewidth=0.8, linestyle=":")
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    if question.is_wide:
        axes.set_yscale("symlog", linthresh=_LINEAR)
        ys = [y for panels in question.panels for each in panels for line in each.lines for _, y in line.points]
        ticks = [tick for tick in _TICKS if 1.2 * min(ys) <= tick <= 1.2 * max(ys)]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(panel.title, fontsize=8.5, loc="left", color=INK)
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: "Axes", line: Line) -> None:
    xs, ys = zip(*line.points, strict=True) if line.points else ((), ())
    colour = SERIES_COLOURS[line.style % len(SERIES_COLOURS)]
    size = max(7.0 - 0.7 * line.style, 2.5)  # what lies on another line leaves its rim to be seen
    axes.plot(
        xs,
        ys,
        color=colour,
        linestyle="--" if line.is_dashed else "-",
        linewidth=1.3,
        marker=_MARKERS[line.style % len(_MARKERS)],
        markersize=size,
        markerfacecolor=PAPER if line.is_dashed else colour,
    )
