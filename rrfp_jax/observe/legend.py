"""The legend below a picture: every colour that occurs, in plain words, in as many columns as fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rrfp_jax.observe.measure import text_width
from rrfp_jax.observe.panels import Panel
from rrfp_jax.observe.style import FAINT_INK, IDLE_LOOKS, INK, PAPER, UNEXPLAINED_LABEL, shade
from rrfp_jax.schedules.timeline import IdleReason

_ROW = 0.225
_HEADING = 0.27
_KEY_WIDTH, _KEY_HEIGHT = 0.3, 0.145
_KEY_GAP, _COLUMN_GAP = 0.08, 0.35
_POINTS = 8.5


@dataclass(frozen=True, kw_only=True)
class Key:
    """One explained colour: a swatch (of several shades side by side) and its words."""

    fills: tuple[str, ...]
    label: str
    hatch: str | None = None
    line: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Block:
    heading: str
    keys: Sequence[Key]
    num_columns: int

    @property
    def num_rows(self) -> int:
        return -(-len(self.keys) // self.num_columns)

    @property
    def height(self) -> float:
        return _HEADING + _ROW * self.num_rows


class Legend:
    """Lays the keys of some panels out within a width in inches; :attr:`height` is what it needs."""

    def __init__(self, drawn: Sequence[Panel], width: float, *, numbered: bool, thin: bool) -> None:
        tasks, idle = task_keys(drawn), idle_keys(drawn)
        self._blocks = [
            _Block(heading=heading, keys=keys, num_columns=_num_columns(keys, width))
            for heading, keys in ((_task_heading(drawn, numbered=numbered, thin=thin), tasks), (_IDLE_HEADING, idle))
            if keys
        ]
        self.height = sum(block.height for block in self._blocks)

    def draw(self, figure: Figure, left: float, bottom: float, width: float, height: float) -> None:
        """Draw with the lower left corner at (left, bottom), all in inches of a figure of width x height."""
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
                y = top - _HEADING - (row + 0.5) * _ROW
                for patch in _swatch(key, x, y):
                    axes.add_patch(patch)
                axes.text(x + _KEY_WIDTH + _KEY_GAP, y, key.label, fontsize=_POINTS, color=INK, va="center_baseline")
            top -= block.height


def task_keys(drawn: Sequence[Panel]) -> list[Key]:
    """One key per kind that is to be seen, with all its shades."""
    num_shades = max(panel.num_shades for panel in drawn)
    present = set().union(*(panel.visible_kinds() for panel in drawn))
    return [
        Key(
            fills=tuple(shade(look.colour, rank, num_shades) for rank in range(num_shades)),
            label=look.label,
        )
        for kind, look in drawn[0].looks.items()
        if kind in present
    ]


def idle_keys(drawn: Sequence[Panel]) -> list[Key]:
    """One key per reason that occurs, and one for idle time of which no reason was recorded."""
    present = {reason for panel in drawn for reason in panel.waits}
    keys = [
        Key(fills=(look.fill,), label=look.label, hatch=look.hatch, line=look.line)
        for look in (IDLE_LOOKS[reason] for reason in IdleReason if reason in present)
    ]
    if any(not panel.waits for panel in drawn):
        keys.append(Key(fills=(PAPER,), label=UNEXPLAINED_LABEL, line=FAINT_INK))
    return keys


_IDLE_HEADING = "Idle time of a stage (on the right of each row: its share of the makespan)"


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


def _column_width(keys: Sequence[Key]) -> float:
    return _KEY_WIDTH + _KEY_GAP + max(text_width(key.label, _POINTS) for key in keys) + _COLUMN_GAP


def _num_columns(keys: Sequence[Key], width: float) -> int:
    """As many as fit, but not more than the rows that they then make need."""
    if not keys:
        return 1
    fitting = max(1, min(len(keys), int((width + _COLUMN_GAP) // _column_width(keys))))
    num_rows = -(-len(keys) // fitting)
    return -(-len(keys) // num_rows)


def _swatch(key: Key, x: float, y: float) -> list[Rectangle]:
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
