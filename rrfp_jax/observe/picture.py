"""Timelines as a picture: one row per stage, one box per task, one panel per timeline, all on one time scale.

Engines beside a stage have thin rows under its own.

All lengths of the layout are inches, so that fonts and boxes keep their size whatever the number of stages. The same
timelines always give the same bytes (with one version of matplotlib).

Boxes that are thinner than a pixel become an image. Drawn one over another, such boxes show only the last, in
misleading bands. Instead every pixel column of a row is divided among the colours by their share of the time around it,
stacked from the bottom, so that nothing is lost and no colour appears that the legend does not explain.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from rrfp_jax.observe.output_files import DPI, check_format, plain_look, shortened, text_width, write_figure
from rrfp_jax.observe.panels import Boxes, Panel, PanelRow, panels
from rrfp_jax.observe.style import (
    FAINT_INK,
    GRID,
    IDLE_LOOKS,
    INK,
    PAPER,
    UNEXPLAINED_LABEL,
    rgb,
    shade,
    text_colour,
)
from rrfp_jax.schedules.timeline import IdleReason, Timeline

_POINTS = 72
"""Points of one inch."""
_DIGIT = 0.64
"""Width of a digit of DejaVu Sans, in font sizes."""
_RIGHT, _AXIS, _MARGIN = 0.7, 0.6, 0.12
_TIME_WIDTH = (9.5, 15.0)
"""Least and greatest width of the time axis, in inches."""
_BOX = 0.84
"""Height of a box, of a row."""
_LABEL_POINTS, _ENGINE_POINTS, _NUMBER_POINTS = 9.0, 6.5, (4.2, 8.5)
_CAPTION_POINTS, _FACTS_POINTS, _SMALL_POINTS = 10.5, 9.5, 7.5
_TINY = 1e-9
_MAX_NUMBERS = 8000
"""More are neither legible nor quick to draw."""
_MAX_HATCHED = 6000
_WINDOW = 10
"""Pixels over which shares are taken: enough boxes that neighbouring columns look alike."""
_BESIDE = 8
"""Distance in points from the time axis to the text on its right."""
_KEY_ROW, _HEADING, _KEY_WIDTH, _KEY_HEIGHT, _KEY_GAP, _COLUMN_GAP = 0.225, 0.27, 0.3, 0.145, 0.08, 0.35
_KEY_POINTS = 8.5


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
    # The numbers of most microbatches decide the width of the time axis, within limits.
    needed = 0.0
    for panel in drawn:
        widths = np.concatenate([np.zeros(1), *(each.width_ms for each in panel.tasks.values() if not each.is_beside)])
        digits = len(str(max(int(boxes.microbatch.max()) for boxes in panel.tasks.values())))
        typical_ms = float(np.quantile(widths[widths > 0], 0.25)) if (widths > 0).any() else end_ms
        needed = max(needed, end_ms / typical_ms * (digits * _DIGIT * 6.5 + 2.5) / _POINTS)
    time_width = float(np.clip(needed, *_TIME_WIDTH))
    rows = [_Rows(panel, time_width=time_width, end_ms=end_ms) for panel in drawn]
    left = _MARGIN + max(one.label_width() for one in rows) + 0.1
    width = left + time_width + _RIGHT
    has_numbers, is_thin = any(one.number_points is not None for one in rows), any(one.thin for one in rows)
    blocks = _legend(drawn, width - 2 * _MARGIN, numbered=has_numbers, thin=is_thin)
    # Numbers of several steps stand between the title and the rows.
    titles = [0.4 if len(panel.steps) == 1 else 0.55 for panel in drawn]
    legend_height = sum(block.height for block in blocks)
    height = 2 * _MARGIN + sum(titles) + sum(one.height for one in rows) + _AXIS + legend_height

    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    top = height - _MARGIN
    for title, one in zip(titles, rows, strict=True):
        top -= title + one.height
        axes = figure.add_axes((left / width, top / height, time_width / width, one.height / height))
        one.draw(axes, last=one is rows[-1])
    axes = figure.add_axes((0, 0, 1, 1), zorder=-1)
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    top = _MARGIN + legend_height
    for block in blocks:
        block.draw(axes, top)
        top -= block.height
    return figure


# -- the rows of a panel -----------------------------------------------------------------------------------------------


class _Rows:
    """Draws the rows of one panel: idle time, tasks, numbers, labels and the time axis. All sizes are in inches."""

    def __init__(self, panel: Panel, *, time_width: float, end_ms: float) -> None:
        self.panel = panel
        # Few stages get high rows; with many the whole panel stays on a screen.
        self._row_height = float(np.clip(6.4 / panel.height, 0.11, 0.42))
        self.height = panel.height * self._row_height
        self._time_width, self._end_ms = time_width, end_ms
        self._points_per_ms = time_width * _POINTS / end_ms
        of_stages = [boxes for boxes in panel.tasks.values() if not boxes.is_beside]
        widths = np.concatenate([np.zeros(0), *(boxes.width_ms for boxes in of_stages)])
        widths = widths[widths > 0]
        # Thin: a quarter of the boxes with any length is thinner than two pixels.
        self.thin = bool(widths.size) and float(np.quantile(widths, 0.25)) * time_width * DPI / end_ms < 2
        """Whether tasks are drawn as shares of the time."""
        self.number_points: float | None = None
        """Font size of the numbers in the boxes of stages; None where too few would fit."""
        largest_fits = [self._largest_points(boxes) for boxes in of_stages]
        fitting = np.concatenate([np.zeros(0), *(points[points > 0] for points in largest_fits)])
        smallest, largest = _NUMBER_POINTS
        largest = min(largest, self._row_height * _POINTS * _BOX * 0.72)
        if not self.thin and fitting.size and largest >= smallest:
            size = float(np.clip(np.quantile(fitting, 0.1), smallest, largest))
            if 0.3 * len(fitting) <= int(_fits(fitting, size).sum()) <= _MAX_NUMBERS:
                self.number_points = size
        self._middle = np.array([row.middle for row in panel.rows])
        self._half_box = np.array([row.height for row in panel.rows]) * _BOX / 2

    def label_width(self) -> float:
        """Returns the width of the widest label on the left."""
        labels = [(self._label(row), self._label_points(row)) for row in self.panel.rows]
        return max(text_width(line, points) for label, points in labels for line in label.splitlines())

    def draw(self, axes: Axes, *, last: bool) -> None:
        """Draws into ``axes``. The last panel carries the time scale of all."""
        axes.set_xlim(0, self._end_ms)
        axes.set_ylim(self.panel.height, 0)
        axes.set_autoscale_on(False)
        self._draw_texts(axes)
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
        self._draw_boxes(axes)
        if self.number_points is not None:
            self._draw_numbers(axes, self.number_points)
        if len(self.panel.steps) > 1:
            self._draw_step_marks(axes)

    def _draw_texts(self, axes: Axes) -> None:
        """Draws the caption on the left and the facts on the right; a stage's name on the left and its idle share on
        the right, in low rows only of every few stages."""
        panel, up = self.panel, 6 if len(self.panel.steps) == 1 else 17
        left = self._time_width - text_width(panel.summary, _FACTS_POINTS) - 0.3
        caption = shortened(panel.caption, _CAPTION_POINTS, left, bold=True)
        _note(axes, caption, (0, 1), (0, up), fontsize=_CAPTION_POINTS, fontweight="bold", color=INK)
        _note(axes, panel.summary, (1, 1), (0, up), fontsize=_FACTS_POINTS, color=INK, ha="right")
        _note(axes, "idle", (1, 1), (_BESIDE, 3), fontsize=_SMALL_POINTS, color=FAINT_INK)
        size = float(np.clip(self._row_height * _POINTS * 0.6, 6, _LABEL_POINTS))
        every = max(1, int(np.ceil(0.125 / self._row_height)))
        shown = {row: label for row in panel.rows if row.stage % every == 0 and (label := self._label(row))}
        axes.set_yticks([row.middle for row in shown])
        written = axes.set_yticklabels(list(shown.values()), color=INK, linespacing=1.1)
        axes.tick_params(axis="y", length=0, pad=5)
        for row, text in zip(shown, written, strict=True):
            points = self._label_points(row, size)
            text.set_fontsize(points)
            share, place = f"{panel.idle_shares[panel.rows.index(row)]:.1%}", (1, 1 - row.middle / panel.height)
            _note(axes, share, place, (_BESIDE, 0), fontsize=points, color=FAINT_INK, va="center_baseline")

    def _label_points(self, row: PanelRow, size: float = _LABEL_POINTS) -> float:
        """Returns the font size of a row's label. An engine's is so small that neighbours stay apart."""
        return min(size, _ENGINE_POINTS, 0.85 * row.height * self._row_height * _POINTS) if row.is_beside else size

    def _label(self, row: PanelRow) -> str:
        """Returns ``stage 2``, with its chunks on a second line if it has several and the row is high enough; for an
        engine its name, or nothing if its row is too low."""
        if row.is_beside:
            return row.lane if self._label_points(row) > _NUMBER_POINTS[0] else ""
        chunks = self.panel.chunks_of_stage[row.stage]
        if self.panel.num_shades == 1 or self._row_height < 0.3:
            return f"stage {row.stage}"
        named = [str(chunk) for chunk in chunks]
        if len(named) > 4:
            named[2:-1] = ["…"]
        return f"stage {row.stage}\nchunk{'' if len(chunks) == 1 else 's'} {', '.join(named)}"

    def _draw_boxes(self, axes: Axes) -> None:
        hatched = sum(map(len, self.panel.waits.values())) <= _MAX_HATCHED
        for reason, boxes in self.panel.waits.items():
            look = IDLE_LOOKS[reason]
            style: dict[str, Any] = {"facecolor": look.fill, "edgecolor": look.line, "linewidth": 0}
            hatch = 3 * look.pattern if hatched else None  # three times as dense as by itself
            polygons = self._polygons(boxes, **style, hatch=hatch, rasterized=not hatched, zorder=1)
            axes.add_collection(polygons, autolim=False)
        if self.thin:
            num_levels = max(1, round(self._row_height * _BOX * DPI))
            num_columns = round(self._time_width * DPI)
            images = share_images(self.panel, end_ms=self._end_ms, num_columns=num_columns, num_levels=num_levels)
            for middle, half, image in zip(self._middle, self._half_box, images, strict=True):
                extent = (0, self._end_ms, middle + half, middle - half)
                axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", zorder=2)
            return
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

    def _largest_points(self, boxes: Boxes) -> NDArray[np.float64]:
        """Returns the greatest font size in which each box holds its number, [boxes]; 0 for boxes without a number or
        without length."""
        num_digits = 1 + np.floor(np.log10(np.maximum(boxes.microbatch, 1)))
        points = (boxes.width_ms * self._points_per_ms - 1.5) / (num_digits * _DIGIT)
        return np.where((boxes.microbatch >= 0) & (boxes.width_ms > 0), np.maximum(points, _TINY), 0)

    def _draw_numbers(self, axes: Axes, size: float) -> None:
        smallest = _NUMBER_POINTS[0]
        for group, boxes in self.panel.tasks.items():
            largest, points = self._largest_points(boxes), size
            if boxes.is_beside:
                # In thin rows numbers are smaller; infinity, which fits nowhere, where they would be too small.
                height = 2 * float(self._half_box[boxes.row[0]]) * self._row_height * _POINTS
                fitting = largest[largest > 0]
                most_fit = max(smallest, float(np.quantile(fitting, 0.1))) if fitting.size else smallest
                points = min(size, 0.72 * height, most_fit)
                points = points if points >= smallest else np.inf
            colour = text_colour(self.panel.colour(group))
            for i in np.flatnonzero(_fits(largest, points)):
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

    def _draw_step_marks(self, axes: Axes) -> None:
        """Draws a line at each stage's first task of a step, and the step's number above."""
        starts = self.panel.step_starts_ms
        tops = {row.stage: row.top for row in self.panel.rows if not row.is_beside}
        lines = [
            [(start_ms, tops[stage]), (start_ms, tops[stage] + 1)]
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


def _fits(largest: NDArray[np.float64], size: float) -> NDArray[np.bool_]:
    """Returns which boxes hold a font size, alike for boxes whose lengths differ by rounding alone."""
    return largest >= size * (1 - 1e-6)


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

    def elapsed(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns for each edge the sum of (edge - time) over the times before it."""
        ordered = np.sort(times)
        before = np.searchsorted(ordered, edges)
        return edges * before - np.concatenate([[0.0], np.cumsum(ordered)])[before]

    images = []
    for number, row in enumerate(panel.rows):
        shares = []
        for boxes in (*panel.tasks.values(), *panel.waits.values()):
            starts, stops = boxes.start_ms[boxes.row == number], boxes.end_ms[boxes.row == number]
            covered = [elapsed(starts, edges) - elapsed(stops, edges) for edges in (begins, ends)]
            shares.append((covered[1] - covered[0]) / (ends - begins))
        stacked = np.cumsum(shares, axis=0)
        height = max(1, round(num_levels * row.height))
        # The lowest level comes last in an image.
        levels = (np.arange(height)[::-1] + 0.5) / height
        index = (stacked[:, None, :] < levels[None, :, None]).sum(axis=0)
        idle = stacked[len(panel.tasks) - 1] < _TINY
        images.append(palette[np.where(idle, len(shares), index)])
    return images


# -- the legend --------------------------------------------------------------------------------------------------------


class LegendKey(NamedTuple):
    """One line of the legend: a swatch of one or several shades, and its words."""

    fills: tuple[str, ...]
    label: str
    hatch: str | None = None
    line: str | None = None


class _Block:
    """A part of the legend: a heading, and keys in as many columns as fit, but not more than the rows then need."""

    def __init__(self, heading: str, keys: Sequence[LegendKey], width: float) -> None:
        self._heading, self._keys = heading, keys
        labels = [text_width(key.label, _KEY_POINTS) for key in keys]
        self._column_width = _KEY_WIDTH + _KEY_GAP + max(labels) + _COLUMN_GAP
        fitting = max(1, min(len(keys), int((width + _COLUMN_GAP) // self._column_width)))
        num_columns = -(-len(keys) // -(-len(keys) // fitting))
        self._num_rows = -(-len(keys) // num_columns)
        self.height = _HEADING + _KEY_ROW * self._num_rows

    def draw(self, axes: Axes, top: float) -> None:
        """Draws below ``top``, in inches of axes that cover the figure."""
        heading = {"fontsize": _KEY_POINTS, "color": FAINT_INK, "va": "center"}
        axes.text(_MARGIN, top - _HEADING / 2, self._heading, **heading)  # type: ignore[arg-type]
        for index, key in enumerate(self._keys):
            column, row = divmod(index, self._num_rows)
            x, y = _MARGIN + column * self._column_width, top - _HEADING - (row + 0.5) * _KEY_ROW
            part = _KEY_WIDTH / len(key.fills)
            for number, fill in enumerate(key.fills):
                swatch = Rectangle((x + number * part, y - _KEY_HEIGHT / 2), part, _KEY_HEIGHT, facecolor=fill)
                swatch.set(edgecolor=key.line or "none", hatch=key.hatch, linewidth=0.4 if key.line else 0)
                axes.add_patch(swatch)
            axes.text(x + _KEY_WIDTH + _KEY_GAP, y, key.label, fontsize=_KEY_POINTS, color=INK, va="center_baseline")


def _legend(drawn: Sequence[Panel], width: float, *, numbered: bool, thin: bool) -> list[_Block]:
    """Returns the legend below the panels: every colour that occurs, in plain words, within a width in inches."""
    notes = []
    if numbered:
        notes.append("the number in a box is the microbatch")
    if thin:
        notes.append("tasks too thin to be seen are stacked: the height of a colour is its share of the time")
    if max(panel.num_shades for panel in drawn) > 1:
        notes.append("the lighter, the later the chunk among those of its stage")
    if any(len(panel.steps) > 1 for panel in drawn):
        notes.append("a black line marks a stage's first task of a step")
    tasks = "Tasks" + (f" ({'; '.join(notes)})" if notes else "")
    idle = "Idle time of a stage (on the right of each row: its share of the makespan)"
    blocks = ((tasks, task_keys(drawn)), (idle, idle_keys(drawn)))
    return [_Block(heading, keys, width) for heading, keys in blocks if keys]


def task_keys(drawn: Sequence[Panel]) -> list[LegendKey]:
    """Returns one key, with all its shades, per kind of task that a reader can see: whose boxes take half a pixel of
    1,000 on a stage of some panel, or more."""
    num_shades, present = max(panel.num_shades for panel in drawn), set()
    for panel in drawn:
        width_ms = dict.fromkeys((group.kind for group in panel.tasks), 0.0)
        for group, boxes in panel.tasks.items():
            width_ms[group.kind] += float(boxes.width_ms.sum()) / panel.num_stages
        seen = {kind for kind, width in width_ms.items() if width >= panel.end_ms / 2000 and width > 0}
        present |= seen or {*width_ms}
    return [
        LegendKey(tuple(shade(look.colour, rank, num_shades) for rank in range(num_shades)), look.label)
        for kind, look in drawn[0].looks.items()
        if kind in present
    ]


def idle_keys(drawn: Sequence[Panel]) -> list[LegendKey]:
    """Returns one key per reason that occurs, and one for idle time without a recorded reason."""
    present = {reason for panel in drawn for reason in panel.waits}
    keys = [
        LegendKey((look.fill,), look.label, hatch=3 * look.pattern, line=look.line)
        for look in (IDLE_LOOKS[reason] for reason in IdleReason if reason in present)
    ]
    if any(not panel.waits for panel in drawn):
        keys.append(LegendKey((PAPER,), UNEXPLAINED_LABEL, line=FAINT_INK))
    return keys
