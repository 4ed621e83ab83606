"""The boxes of a page as plotly traces, with the facts that appear when one points at them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plotly import graph_objects as go

from rrfp_jax.observe.panels import Boxes, Panel, TaskGroup
from rrfp_jax.observe.style import IDLE_LOOKS, PAPER, TASK_LOOKS, shade, text_colour
from rrfp_jax.tasks import TaskKind
from rrfp_jax.timeline import IdleReason

MAX_BARS = 12_000
"""More boxes are drawn as one shape per colour, which a browser handles far more quickly than single bars."""
_MAX_NUMBERS = 4000
_BAR = 0.84
_WHERE = (
    "<br>stage %{y:.0f}, step %{customdata[2]}<br>%{customdata[3]:,.3f} to %{customdata[4]:,.3f} ms: "
    "%{customdata[5]:,.3f} ms<extra></extra>"
)


def task_marker(kind: TaskKind, rank: int, num_shades: int) -> dict[str, Any]:
    """How plotly fills tasks of a kind, on the ``rank``-th of a stage's chunks."""
    return {"color": shade(TASK_LOOKS[kind].colour, rank, num_shades), "line": {"color": PAPER, "width": 0.6}}


def idle_marker(reason: IdleReason) -> dict[str, Any]:
    """How plotly fills idle time of a reason."""
    look = IDLE_LOOKS[reason]
    pattern = {"shape": look.pattern, "fgcolor": look.line, "bgcolor": look.fill, "size": 7, "solidity": 0.15}
    return {"color": look.fill, "pattern": pattern, "line": {"width": 0}}


def traces(panel: Panel, axis: str) -> list[Any]:
    """The boxes of a panel, on the axes numbered ``axis`` (empty for the first)."""
    draw = _bars if panel.num_boxes <= MAX_BARS else _shapes
    place = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "showlegend": False}
    found: list[Any] = []
    for reason, boxes in panel.waits.items():
        hover = f"<b>idle</b>: {IDLE_LOOKS[reason].label}{_WHERE}"
        found += draw(boxes, idle_marker(reason), hover, numbers=None, legendgroup=reason.value, **place)
    for group, boxes in panel.tasks.items():
        marker = task_marker(group.kind, group.rank, panel.num_shades)
        has_numbers = group.is_numbered and panel.num_boxes <= _MAX_NUMBERS
        numbers = [str(microbatch) for microbatch in boxes.microbatch] if has_numbers else None
        found += draw(boxes, marker, _task_hover(group), numbers=numbers, legendgroup=group.kind.value, **place)
    return found


def _task_hover(group: TaskGroup) -> str:
    name, what = f"%{{customdata[0]}}{group.kind}", "chunk %{customdata[0]}"
    if group.is_numbered:
        name, what = name + "%{customdata[1]}", what + ", microbatch %{customdata[1]}"
    return f"<b>{TASK_LOOKS[group.kind].label}</b><br>task {name}: {what}{_WHERE}"


def _facts(boxes: Boxes) -> NDArray[np.float32]:
    """What the hover texts above name by column, [boxes, 6]; to a microsecond in a timeline of 10 s."""
    columns = (boxes.chunk, boxes.microbatch, boxes.step, boxes.start_ms, boxes.end_ms, boxes.width_ms)
    return np.stack([column.astype(np.float32) for column in columns], axis=-1)


def _bars(
    boxes: Boxes, marker: Mapping[str, Any], hover: str, *, numbers: list[str] | None, **place: Any
) -> list[go.Bar]:
    return [
        go.Bar(
            orientation="h",
            base=boxes.start_ms.astype(np.float32),
            x=boxes.width_ms.astype(np.float32),
            y=boxes.stage,
            width=_BAR,
            marker=marker,
            hovertemplate=hover,
            customdata=_facts(boxes),
            text=numbers,
            textposition="inside" if numbers else "none",
            insidetextanchor="middle",
            insidetextfont={"color": text_colour(marker["color"])},
            textangle=0,
            **place,
        )
    ]


def _shapes(
    boxes: Boxes, marker: Mapping[str, Any], hover: str, *, numbers: list[str] | None, **place: Any
) -> list[go.Scatter]:
    """All boxes of a colour as one path, and invisible points at their middles that carry the hover texts."""
    del numbers  # so many boxes are too thin for them
    gap = np.full(len(boxes), np.nan)
    left, right = boxes.start_ms, boxes.end_ms
    low, high = boxes.stage - _BAR / 2, boxes.stage + _BAR / 2
    path = go.Scatter(
        x=np.stack([left, left, right, right, left, gap], axis=-1).ravel().astype(np.float32),
        y=np.stack([low, high, high, low, low, gap], axis=-1).ravel().astype(np.float32),
        mode="none",
        fill="toself",
        fillcolor=marker["color"],
        fillpattern=marker.get("pattern"),
        hoverinfo="skip",
        **place,
    )
    middles = go.Scatter(
        x=(left + right) / 2, y=boxes.stage, mode="none", hovertemplate=hover, customdata=_facts(boxes), **place
    )
    return [path, middles]
