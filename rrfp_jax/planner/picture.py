"""Step time against memory: all that a search judged, and the frontier, where less of the one costs more of the other.

Colours are Okabe and Ito's; shape and filling tell the same in grey print. The paper is white and opaque, so that the
picture reads the same on a dark page.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rrfp_jax.byte_sizes import format_bytes, parse_bytes
from rrfp_jax.observe.figure_files import plain_look, write_figure
from rrfp_jax.observe.style import FAINT_INK, GRID, INK, PAPER, SERIES_COLOURS
from rrfp_jax.planner.records import Plan, Ranked
from rrfp_jax.planner.report import order_in_words, shape_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (8.0, 5.0)
_BLUE, _ORANGE, _GREEN, _RED = SERIES_COLOURS[:4]
_LOOKS = {
    (True, False): ("searched order, best cut", _BLUE, _BLUE, "D"),
    (True, True): ("searched order, even cut", PAPER, _BLUE, "D"),
    (False, False): ("named order, best cut", _ORANGE, _ORANGE, "o"),
    (False, True): ("named order, even cut", PAPER, _ORANGE, "o"),
}
"""(searched, even cut) -> legend, filling, rim, marker."""
_LABELS = 7
_NEAR = 1.5
"""Multiple of the largest memory up to which the memory of a device is drawn."""
_WIDE, _HIGH = 0.3, 0.055
"""Width and height of a label, in parts of the picture's."""
_RIGHT = 0.7
"""Part of the width from which on labels stand on the left of their marks."""


@dataclass(frozen=True)
class Mark:
    """One choice of the picture."""

    memory: float
    """In the unit of the picture."""
    time_ms: float
    ranked: Ranked


def draw_frontier(plan: Plan, path: str | os.PathLike[str], *, memory_bytes: int | None, title: str) -> None:
    """Draws to a ``.png`` or ``.svg`` file; raises ValueError for another suffix, and where nothing was judged."""
    if not (plan.judged or plan.ranking):
        raise ValueError("nothing fits, so that there is nothing to draw")
    with plain_look():
        write_figure(frontier_figure(plan, memory_bytes=memory_bytes, title=title), path)


def frontier_figure(plan: Plan, *, memory_bytes: int | None, title: str) -> Figure:
    """Returns the laid out figure, not yet written."""
    judged = plan.judged or plan.ranking
    unit = format_bytes(max(ranked.forecast.peak_bytes for ranked in judged)).split()[1]
    per_sample = len({ranked.choice.shape.batch_size for ranked in judged}) > 1
    best = plan.ranking[0] if plan.ranking else judged[0]
    marks = [mark_of(ranked, best, unit, per_sample=per_sample) for ranked in judged]
    figure = Figure(figsize=_SIZE, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    axes = figure.subplots()
    _draw_marks(axes, marks)
    _draw_frontier(axes, frontier(marks), with_shapes=len({one.ranked.choice.shape for one in marks}) > 1)
    _draw_memory(axes, marks, unit, memory_bytes)
    axes.set_ylabel("milliseconds per sample" if per_sample else "milliseconds per step", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def mark_of(ranked: Ranked, best: Ranked, unit: str, *, per_sample: bool) -> Mark:
    """Returns the mark of a choice.

    A choice that lost early was judged on fewer draws, which may have been easier than the others: its time is that of
    the best one and their difference on the draws that both had."""
    size = parse_bytes(f"1{unit}", "unit")
    samples, of_best = ((each.choice.shape.batch_size if per_sample else 1) for each in (ranked, best))
    draws_ms, best_ms = ranked.forecast.draws_ms, best.forecast.draws_ms
    time_ms = ranked.forecast.step_ms / samples
    if 0 < len(draws_ms) < len(best_ms):
        common_ms = fmean(best_ms[: len(draws_ms)])
        time_ms = fmean(draws_ms) / samples + (best.forecast.step_ms - common_ms) / of_best
    return Mark(ranked.forecast.peak_bytes / size, time_ms, ranked)


def frontier(marks: Sequence[Mark]) -> list[Mark]:
    """Returns the marks that nothing beats in time with as little memory, the smallest first."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.memory, mark.time_ms)):
        if not found or mark.time_ms < found[-1].time_ms:
            found.append(mark)
    return found


def _draw_marks(axes: "Axes", marks: Sequence[Mark]) -> None:
    for (is_searched, is_even), (label, filling, rim, marker) in _LOOKS.items():
        some = [m for m in marks if (m.ranked.choice.is_searched, m.ranked.choice.is_even) == (is_searched, is_even)]
        if some:
            axes.scatter(
                [mark.memory for mark in some],
                [mark.time_ms for mark in some],
                s=30,
                marker=marker,
                facecolor=filling,
                edgecolor=rim,
                linewidth=1.1,
                label=label,
                zorder=3,
            )


def _draw_frontier(axes: "Axes", marks: Sequence[Mark], *, with_shapes: bool) -> None:
    """Draws the frontier as steps, since between two of its points nothing is better than the left one, with the
    orders."""
    xs, ys = [mark.memory for mark in marks], [mark.time_ms for mark in marks]
    axes.step(xs, ys, where="post", color=_GREEN, linewidth=1.4, label="frontier", zorder=2)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    labelled: list[Mark] = []
    for mark in _worth_a_label(marks):
        across = [abs(mark.memory - other.memory) / (right - left) for other in labelled]
        down = [abs(mark.time_ms - other.time_ms) / (high - low) for other in labelled]
        if any(x < _WIDE and y < _HIGH for x, y in zip(across, down, strict=True)):
            continue
        labelled.append(mark)
        is_right = mark.memory > left + _RIGHT * (right - left)
        shape = f"{shape_in_words(mark.ranked.choice.shape)}: " if with_shapes else ""
        axes.annotate(
            f"{shape}{order_in_words(mark.ranked.choice)}",
            (mark.memory, mark.time_ms),
            xytext=(-6, -11) if is_right else (6, 5),
            textcoords="offset points",
            ha="right" if is_right else "left",
            fontsize=7.5,
            color=FAINT_INK,
        )


def _draw_memory(axes: "Axes", marks: Sequence[Mark], unit: str, memory_bytes: int | None) -> None:
    """Draws the axis, and the memory of a device as a line where that is not far beyond."""
    largest, words = max(mark.memory for mark in marks), f"memory of the fullest stage, {unit}"
    limit = None if memory_bytes is None else memory_bytes / parse_bytes(f"1{unit}", "unit")
    if limit is not None and limit <= _NEAR * largest:
        axes.axvline(limit, color=_RED, linewidth=1.0, linestyle="--", label="memory of a device")
    elif memory_bytes is not None:
        words += f", of {format_bytes(memory_bytes)}"
    axes.set_xlabel(words, fontsize=9, color=INK)


def _worth_a_label(marks: Sequence[Mark]) -> list[Mark]:
    """Returns the quickest first, then some of the others."""
    every = max(1, len(marks) // _LABELS)
    return [marks[-1], *marks[-2::-1][::every]] if marks else []
