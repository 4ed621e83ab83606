"""The one look of every timeline: which colour, hatching and words stand for which task or idle time.

Task colours come from Okabe and Ito's palette for all kinds of colour vision (https://jfly.uni-koeln.de/color/). Tasks
are saturated, idle time is pale and hatched, so that work and bubble differ at a glance; the hatchings differ too,
because pale colours alone are hard to tell apart.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rrfp_jax.schedules import COMPUTE, TaskKind
from rrfp_jax.schedules.timeline import IdleReason

INK = "#111111"
"""Text and axes."""
FAINT_INK = "#666666"
"""Ink of secondary text."""
GRID = "#dddddd"
PAPER = "#ffffff"

SERIES_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#3d3d3d")
"""Okabe and Ito's, for lines and bars that stand for methods."""

_LIGHTEST = 0.62
"""How far the last of a stage's chunks is blended into white."""


class TaskLook(NamedTuple):
    """The look of tasks of one kind."""

    colour: str
    label: str
    """Plain words for the legend."""


class IdleLook(NamedTuple):
    """The look of idle time of one reason."""

    fill: str
    line: str
    """Colour of the hatching."""
    pattern: str
    """The letter by which matplotlib knows the hatching; the page draws the same."""
    label: str
    """Plain words for the legend."""


TASK_LOOKS: Mapping[TaskKind, TaskLook] = {
    TaskKind.F: TaskLook(colour="#0072b2", label="F: forward"),
    TaskKind.B: TaskLook(colour="#d55e00", label="B: backward"),
    TaskKind.I: TaskLook(colour="#e69f00", label="I: backward, gradient of the input"),
    TaskKind.W: TaskLook(colour="#009e73", label="W: backward, gradient of the weights"),
    TaskKind.R: TaskLook(colour="#cc79a7", label="R: norm of the gradients, and their sum over copies"),
    TaskKind.U: TaskLook(colour="#3d3d3d", label="U: optimizer update"),
}

OPERATION_COLOURS = ("#9955ff", "#663300", "#9999ff", "#440055", "#0000dd")
"""Colours of operations, one after the other. They are apart from each other, from the above and from the pale ones,
also for colour-blind readers. A drawing with more operations begins again."""


def task_looks(lane_of: Mapping[TaskKind, str]) -> Mapping[TaskKind, TaskLook]:
    """Returns the looks of the built-in kinds, and of the operations among the given kinds in the order of letters."""
    looks = dict(TASK_LOOKS)
    for number, kind in enumerate(sorted(set(lane_of).difference(TASK_LOOKS))):
        where = "" if lane_of[kind] == COMPUTE else f" on {lane_of[kind]}"
        colour = OPERATION_COLOURS[number % len(OPERATION_COLOURS)]
        looks[kind] = TaskLook(colour=colour, label=f"{kind}: operation{where}")
    return looks


IDLE_LOOKS: Mapping[IdleReason, IdleLook] = {
    IdleReason.FILL: IdleLook("#f2f2f2", "#c4c4c4", "/", "pipeline fills: no input has come yet"),
    IdleReason.INPUT: IdleLook("#fff4b3", "#d9bf3f", ".", "waits for an input from another stage"),
    IdleReason.WINDOW: IdleLook("#ded0f2", "#9c7bcb", "|", "window, footprint or read-ahead full: forwards are ready"),
    IdleReason.ORDER: IdleLook("#ffc9c4", "#dd6f66", "x", "fixed order: others are ready, the next is not"),
    IdleReason.HOLD: IdleLook("#f7d9ec", "#c77fb0", "o", "holds for the table's next entry, which is in sight"),
    IdleReason.AGREEMENT: IdleLook("#d9edc8", "#86b35a", "+", "waits for the other processes of its stage"),
    IdleReason.DRAIN: IdleLook("#dcdcdc", "#a6a6a6", "\\", "pipeline drains: own microbatches are done"),
    IdleReason.ENGINE: IdleLook("#e8dcc8", "#a88a58", "*", "waits for an engine beside it, for example a copy"),
    IdleReason.HOST: IdleLook("#bfe6ef", "#4fa0b3", "-", "host hands the task to the device"),
    IdleReason.PIECE: IdleLook("#cfe3d4", "#5f9a72", "O", "runs a piece of other work"),
}

UNEXPLAINED_LABEL = "idle, reason not recorded"


def shade(colour: str, rank: int, count: int) -> str:
    """Returns the colour of a stage's chunk by its rank among ``count``: the first is full, later ones are lighter."""
    blend = _LIGHTEST * rank / max(count - 1, 1)
    if count == 2:
        blend *= 0.75
    return "#" + "".join(f"{round(channel + (255 - channel) * blend):02x}" for channel in rgb(colour))


def text_colour(colour: str) -> str:
    """Returns dark or white ink, whichever stands out more against ``colour`` (contrast ratio of WCAG 2.1)."""
    luminance = relative_luminance(colour)
    contrast_with_white = 1.05 / (luminance + 0.05)
    contrast_with_ink = (luminance + 0.05) / (relative_luminance(INK) + 0.05)
    return PAPER if contrast_with_white >= contrast_with_ink else INK


def relative_luminance(colour: str) -> float:
    """Returns the luminance of a colour, from 0 for black to 1 for white (WCAG 2.1)."""
    parts = [channel / 255 for channel in rgb(colour)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> tuple[int, int, int]:
    """Returns the channels of ``#rrggbb``, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
