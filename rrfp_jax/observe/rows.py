"""Draws the rows of one panel of a picture: idle time, tasks, numbers, labels and the time axis.

Boxes that are thinner than a pixel become an image. Drawn one over another, such boxes show only the last, in
misleading bands. Instead every pixel column of a row is divided among the colours by their share of the time around it,
stacked from the bottom, so that nothing is lost and no colour appears that the legend does not explain.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from rrfp_jax.observe.figure_files import DPI, shortened, text_width
from rrfp_jax.observe.panels import Boxes, Panel, PanelRow
from rrfp_jax.observe.style import FAINT_INK, GRID, IDLE_LOOKS, INK, PAPER, rgb, text_colour

POINTS = 72
"""Points of one inch."""
DIGIT = 0.64
"""Width of a digit of DejaVu Sans, in font sizes."""
LABEL_POINTS = 9.0
_ENGINE_POINTS = 6.5

_BOX = 0.84
"""Height of a box, of a row."""
_NUMBER_POINTS = (4.2, 8.5)
_NO_ROOM = 1e-9
_MAX_NUMBERS = 8000
"""More are neither legible nor quick to draw."""
_MAX_HATCHED = 6000
_WINDOW = 10
"""Pixels over which shares are taken: enough boxes that neighbouring columns look alike."""
_CAPTION_POINTS, _FACTS_POINTS, _SMALL_POINTS = 10.5, 9.5, 7.5
_BESIDE = 8
"""Distance in points from the time axis to the text on its right."""


class Rows:
    """Draws one panel. All sizes are in inches."""

    def __init__(self, panel: Panel, *, time_width: float, row_height: float, end_ms: float) -> None:
        self.panel = panel
        self.height = panel.height * row_height
        self._time_width = time_width
        self._row_height = row_height
        self._end_ms = end_ms
        self._points_per_ms = time_width * POINTS / end_ms
        widths = [boxes.width_ms for boxes in panel.tasks.values() if not panel.is_beside(boxes)]
        self.thin = _are_thin(widths, time_width * DPI / end_ms)
        """Whether tasks are drawn as shares of the time."""
        self.number_points = self._number_points()
        """Font size of the numbers in the boxes of stages; None where too few would fit."""
        self._middle = np.array([row.middle for row in panel.rows])
        self._half_box = np.array([row.height for row in panel.rows]) * _BOX / 2

    def draw(self, axes: Axes, *, last: bool) -> None:
        """Draws into ``axes``. The last panel carries the time scale of all."""
        axes.set_xlim(0, self._end_ms)
        axes.set_ylim(self.panel.height, 0)
        axes.set_autoscale_on(False)
        self._draw_titles(axes)
        self._draw_stage_labels(axes)
        _draw_time_axis(axes, last=last)
        self._draw_idle(axes)
        if self.thin:
            self._draw_shares(axes)
        else:
            self._draw_tasks(axes)
        if self.number_points is not None:
            self._draw_numbers(axes, self.number_points)
        self._draw_step_marks(axes)

    def _draw_titles(self, axes: Axes) -> None:
        """Draws the caption on the left and the facts on the right."""
        facts = self.panel.summary()
        room = self._time_width - text_width(facts, _FACTS_POINTS) - 0.3
        caption = shortened(self.panel.caption, _CAPTION_POINTS, room, bold=True)
        up = 6 if len(self.panel.steps) == 1 else 17
        _note(axes, caption, (0, 1), (0, up), fontsize=_CAPTION_POINTS, fontweight="bold", color=INK)
        _note(axes, facts, (1, 1), (0, up), fontsize=_FACTS_POINTS, color=INK, ha="right")
        _note(axes, "idle", (1, 1), (_BESIDE, 3), fontsize=_SMALL_POINTS, color=FAINT_INK)

    def _draw_stage_labels(self, axes: Axes) -> None:
        """Draws a stage's name on the left and its idle share on the right; in low rows only of every few stages."""
        size = float(np.clip(self._row_height * POINTS * 0.6, 6, LABEL_POINTS))
        every = max(1, int(np.ceil(0.125 / self._row_height)))
        labels = {
            row: row_label(self.panel, row, self._row_height) for row in self.panel.rows if row.stage % every == 0
        }
        shown = {row: label for row, label in labels.items() if label}
        axes.set_yticks([row.middle for row in shown])
        written = axes.set_yticklabels(list(shown.values()), color=INK, linespacing=1.1)
        axes.tick_params(axis="y", length=0, pad=5)
        for row, text in zip(shown, written, strict=True):
            points = label_points(row, self._row_height, size)
            text.set_fontsize(points)
            share = f"{self.panel.idle_shares[self.panel.rows.index(row)]:.1%}"
            place = (1, 1 - row.middle / self.panel.height)
            _note(axes, share, place, (_BESIDE, 0), fontsize=points, color=FAINT_INK, va="center_baseline")

    def _draw_idle(self, axes: Axes) -> None:
        hatched = sum(map(len, self.panel.waits.values())) <= _MAX_HATCHED
        for reason, boxes in self.panel.waits.items():
            look = IDLE_LOOKS[reason]
            style = {"facecolor": look.fill, "edgecolor": look.line, "linewidth": 0}
            hatch = look.hatch if hatched else None
            polygons = self._polygons(boxes, **style, hatch=hatch, rasterized=not hatched, zorder=1)
            axes.add_collection(polygons, autolim=False)

    def _draw_tasks(self, axes: Axes) -> None:
        for group, boxes in self.panel.tasks.items():
            separated = float(np.median(boxes.width_ms)) * self._points_per_ms > 4
            style = {
                "facecolor": self.panel.colour(group),
                "edgecolor": PAPER if separated else "none",
                "linewidth": 0.5 if separated else 0,
            }
            many = len(boxes) > _MAX_NUMBERS
            axes.add_collection(self._polygons(boxes, **style, rasterized=many, zorder=2), autolim=False)

    def _polygons(self, boxes: Boxes, **style: Any) -> PolyCollection:
        left, right = boxes.start_ms, boxes.end_ms
        middle, half = self._middle[boxes.row], self._half_box[boxes.row]
        top, bottom = middle - half, middle + half
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        # One array, [boxes, 4, 2], is quick; the annotations of matplotlib know lists only.
        vertices: Any = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        return PolyCollection(vertices, **style)

    def _draw_shares(self, axes: Axes) -> None:
        num_columns = round(self._time_width * DPI)
        num_levels = max(1, round(self._row_height * _BOX * DPI))
        images = share_images(self.panel, end_ms=self._end_ms, num_columns=num_columns, num_levels=num_levels)
        for middle, half, image in zip(self._middle, self._half_box, images, strict=True):
            extent = (0, self._end_ms, middle + half, middle - half)
            axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", zorder=2)

    def _number_points(self) -> float | None:
        rooms = [self._room(boxes) for boxes in self.panel.tasks.values() if not self.panel.is_beside(boxes)]
        fitting = np.concatenate([room[room > 0] for room in rooms]) if rooms else np.zeros(0)
        smallest, largest = _NUMBER_POINTS
        largest = min(largest, self._row_height * POINTS * _BOX * 0.72)
        if self.thin or not fitting.size or largest < smallest:
            return None
        size = float(np.clip(np.quantile(fitting, 0.1), smallest, largest))
        num_fitting = int(_fits(fitting, size).sum())
        return size if 0.3 * len(fitting) <= num_fitting <= _MAX_NUMBERS else None

    def _room(self, boxes: Boxes) -> NDArray[np.float64]:
        """Returns the greatest font size in which each box holds its number, [boxes]; 0 for boxes without a number or
        without length."""
        num_digits = 1 + np.floor(np.log10(np.maximum(boxes.microbatch, 1)))
        room = (boxes.width_ms * self._points_per_ms - 1.5) / (num_digits * DIGIT)
        return np.where((boxes.microbatch >= 0) & (boxes.width_ms > 0), np.maximum(room, _NO_ROOM), 0)

    def _draw_numbers(self, axes: Axes, size: float) -> None:
        for group, boxes in self.panel.tasks.items():
            room, points = self._room(boxes), size
            if self.panel.is_beside(boxes):
                points = self._engine_points(boxes, room, size)
            colour = text_colour(self.panel.colour(group))
            for i in np.flatnonzero(_fits(room, points)):
                axes.text(
                    (boxes.start_ms[i] + boxes.end_ms[i]) / 2,
                    self._middle[boxes.row[i]],
                    str(boxes.microbatch[i]),
                    fontsize=points,
                    color=colour,
                    ha="center",
                    va="center_baseline",
                    zorder=3,
                )

    def _engine_points(self, boxes: Boxes, room: NDArray[np.float64], size: float) -> float:
        """Returns the font size of numbers in a thin row; infinity, which fits nowhere, if they would be too small."""
        height, fitting = 2 * float(self._half_box[boxes.row[0]]) * self._row_height * POINTS, room[room > 0]
        smallest = _NUMBER_POINTS[0]
        most_fit = max(smallest, float(np.quantile(fitting, 0.1))) if fitting.size else smallest
        points = min(size, 0.72 * height, most_fit)
        return points if points >= smallest else np.inf

    def _draw_step_marks(self, axes: Axes) -> None:
        """Draws a line at each stage's first task of a step, and the step's number above; nothing for a single step."""
        if len(self.panel.steps) == 1:
            return
        starts = self.panel.step_starts_ms
        row_of = {row.stage: row for row in self.panel.rows if not row.is_beside}
        lines = [
            [(start_ms, row_of[stage].top), (start_ms, row_of[stage].bottom)]
            for of_stage in starts.values()
            for stage, start_ms in of_stage.items()
        ]
        axes.add_collection(LineCollection(lines, colors=INK, linewidths=1.1, zorder=4), autolim=False)
        end_of_last_in = -1.0
        for step, of_stage in starts.items():
            start_in = min(of_stage.values()) / self._end_ms * self._time_width
            # A label that would run into its left neighbour is left out.
            if start_in > end_of_last_in:
                place = (start_in / self._time_width, 1)
                _note(axes, f"step {step}", place, (0, 2), fontsize=_SMALL_POINTS, color=FAINT_INK)
                end_of_last_in = start_in + text_width(f"step {step}", _SMALL_POINTS) + 0.08


def label_points(row: PanelRow, row_height: float, size: float = LABEL_POINTS) -> float:
    """Returns the font size of a row's label. An engine's is so small that neighbours stay apart."""
    return min(size, _ENGINE_POINTS, 0.85 * row.height * row_height * POINTS) if row.is_beside else size


def row_label(panel: Panel, row: PanelRow, row_height: float) -> str:
    """Returns ``stage 2``, with its chunks on a second line if it has several and the row is high enough; for an engine
    its name, or nothing if its row is too low."""
    if row.is_beside:
        return row.lane if label_points(row, row_height) > _NUMBER_POINTS[0] else ""
    stage = row.stage
    chunks = panel.chunks_of_stage[stage]
    if panel.num_shades == 1 or row_height < 0.3:
        return f"stage {stage}"
    named = [str(chunk) for chunk in chunks]
    if len(named) > 4:
        named[2:-1] = ["…"]
    return f"stage {stage}\nchunk{'' if len(chunks) == 1 else 's'} {', '.join(named)}"


def _fits(room: NDArray[np.float64], size: float) -> NDArray[np.bool_]:
    """Returns which boxes have room for a font size, alike for boxes whose lengths differ by rounding alone."""
    return room >= size * (1 - 1e-6)


def _draw_time_axis(axes: Axes, *, last: bool) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, min_n_ticks=3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}" if x < 1e6 else f"{x:,.0f}"))
    axes.tick_params(axis="x", length=3, color=FAINT_INK, labelcolor=INK, labelsize=8.5, labelbottom=last)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    if last:
        axes.set_xlabel("time since the first start (ms)", fontsize=9, color=INK)


def _note(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Writes text at a place in fractions of the axes, moved by points. It is never read as mathematics."""
    axes.annotate(
        text,
        place,
        xycoords="axes fraction",
        xytext=offset,
        textcoords="offset points",
        parse_math=False,
        annotation_clip=False,
        **{"va": "bottom", **style},
    )


def share_images(panel: Panel, *, end_ms: float, num_columns: int, num_levels: int) -> list[NDArray[np.uint8]]:
    """Returns one image per row, [levels, num_columns, 4] in RGBA, of the time from 0 to ``end_ms``; a stage's row has
    ``num_levels``.

    A pixel is transparent where no task ran, so that the hatching of long idle times behind it stays visible.
    """
    colours = [panel.colour(group) for group in panel.tasks] + [IDLE_LOOKS[reason].fill for reason in panel.waits]
    palette = np.array([(*rgb(colour), 255) for colour in colours] + [(255, 255, 255, 0)], dtype=np.uint8)
    middles = (np.arange(num_columns) + 0.5) * end_ms / num_columns
    reach = _WINDOW / 2 * end_ms / num_columns
    begins, ends = np.maximum(middles - reach, 0), np.minimum(middles + reach, end_ms)
    images = []
    for number, row in enumerate(panel.rows):
        height = max(1, round(num_levels * row.height))
        # The lowest level comes last in an image.
        levels = (np.arange(height)[::-1] + 0.5) / height
        boxes = (*panel.tasks.values(), *panel.waits.values())
        stacked = np.cumsum([_shares(one, number, begins, ends) for one in boxes], axis=0)
        index = (stacked[:, None, :] < levels[None, :, None]).sum(axis=0)
        idle = stacked[len(panel.tasks) - 1] < 1e-9
        images.append(palette[np.where(idle, len(boxes), index)])
    return images


def _are_thin(widths_ms: Sequence[NDArray[np.float64]], pixels_per_ms: float) -> bool:
    """Returns whether a quarter of the boxes with any length is thinner than two pixels."""
    widths = np.concatenate(widths_ms)
    widths = widths[widths > 0]
    return bool(widths.size) and float(np.quantile(widths, 0.25)) * pixels_per_ms < 2


def _shares(boxes: Boxes, row: int, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the part of each interval that the boxes of a row cover, [intervals]."""
    mine = boxes.row == row
    starts, stops = np.sort(boxes.start_ms[mine]), np.sort(boxes.end_ms[mine])
    covered = [_ramp(starts, edges) - _ramp(stops, edges) for edges in (begins, ends)]
    return (covered[1] - covered[0]) / (ends - begins)


def _ramp(ordered: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each edge the sum of (edge - time) over the ordered times before it."""
    before = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return edges * before - sums[before]
