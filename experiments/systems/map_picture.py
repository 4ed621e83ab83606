"""Map of the fastest schedules: a cell for each size and ratio, with the schedule's letter on its colour."""

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments.systems.cells import Case, Setting
from experiments.systems.results import Study, distinct_hops
from experiments.systems.turnovers import TIE
from rrfp_jax.observe.style import INK, PAPER, SERIES_COLOURS, text_colour
from rrfp_jax.simulation import Communication

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL = (0.46, 0.24)
"""Inches of a cell across and down."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_map(study: Study) -> Figure:
    """Draws columns of panels for the orders, rows for the modes of communication."""
    modes = study.wishes.communications
    num_hops = len(distinct_hops(study.wishes.systems, study.wishes.stages[0]))
    width = len(study.wishes.orders) * (num_hops * _CELL[0] + 0.3) + 1.0
    height = len(modes) * (len(study.sizes) * _CELL[1] + 0.75) + 1.1
    figure = Figure(figsize=(max(width, 7.0), height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    title = "Which schedule is fastest in each cell? One step; with several letters they are equal"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
    grid = figure.subplots(len(modes), len(study.wishes.orders), squeeze=False, sharey=True)
    for axes_of_mode, mode in zip(grid, modes, strict=True):
        for axes, order in zip(axes_of_mode, study.wishes.orders, strict=True):
            _draw_panel(axes, study, mode, order)
    stages = max(study.wishes.stages)
    for axes in grid[-1]:
        axes.set_xlabel(f"time of a hop / forward, with {stages} stages", fontsize=8, color=INK)
    figure.supylabel("stages x microbatches", fontsize=9, color=INK)
    keys = [
        Patch(facecolor=_colour(number), edgecolor=INK, label=f"{_letter(number)}: {entry.label}")
        for number, entry in enumerate(study.wishes.entries)
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _draw_panel(axes: "Axes", study: Study, mode: Communication, order: str) -> None:
    sizes = study.sizes
    for row, size in enumerate(sizes):
        for column, hop in enumerate(distinct_hops(study.wishes.systems, size[0])):
            winners = _fastest(study, size, Setting(hop, mode, order))
            if not winners:
                continue
            colour = _colour(winners[0])
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor=PAPER, linewidth=1.0))
            letters = "".join(_letter(number) for number in winners[:4])
            place = (column + 0.5, row + 0.5)
            axes.text(*place, letters, ha="center", va="center", fontsize=8, color=text_colour(colour))
    hops = distinct_hops(study.wishes.systems, max(study.wishes.stages))
    axes.set(xlim=(0, len(hops)), ylim=(len(sizes), 0))
    axes.set_xticks([column + 0.5 for column in range(len(hops))], [f"{hop.ratio:.1g}" for hop in hops])
    axes.set_yticks([row + 0.5 for row in range(len(sizes))], [f"{p} x {m}" for p, m in sizes])
    axes.tick_params(labelsize=8, length=0)
    axes.set_title(f"{order}, {mode.value}", fontsize=8.5, loc="left", color=INK)
    axes.spines[:].set_visible(False)


def _fastest(study: Study, size: tuple[int, int], setting: Setting) -> list[int]:
    """Returns the numbers of the fastest schedules; steps that differ by less than a tie are equal."""
    steps = {
        number: study.executed[case, setting].step
        for number, entry in enumerate(study.wishes.entries)
        if (case := Case(entry, *size)) in study.ideals
    }
    least = min(steps.values(), default=0.0)
    return [number for number, step in steps.items() if step * (1 - TIE) <= least]


def _colour(number: int) -> str:
    return SERIES_COLOURS[number % len(SERIES_COLOURS)]


def _letter(number: int) -> str:
    return _LETTERS[number % len(_LETTERS)]
