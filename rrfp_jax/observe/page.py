"""Timelines as one interactive HTML page that works without a network: zoom, pan, and point at a box for its facts.

The panels stand one above another and share the time axis, so that zooming one zooms all. Colours, hatchings and words
are those of the picture (:mod:`rrfp_jax.observe.style`).
"""

import os
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
from plotly import graph_objects as go
from plotly.io import to_html

from rrfp_jax.observe.marks import MAX_BARS, idle_marker, task_marker, traces
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.panels import Panel, panels
from rrfp_jax.observe.style import FAINT_INK, GRID, IDLE_LOOKS, INK, PAPER, TASK_LOOKS
from rrfp_jax.tasks import TaskKind
from rrfp_jax.timeline import IdleReason, Timeline

_TITLE, _AXIS, _LEGEND = 54, 60, 74
"""Pixels above each panel, below the last, and for the legend above the first."""
_LEFT, _RIGHT = 76, 16
_LETTER = 5.9
"""Pixels of a letter of the legend."""
_CONFIG = {
    "displaylogo": False,
    "scrollZoom": True,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font-family: "DejaVu Sans", Verdana, sans-serif; color: {ink}; background: {paper}; margin: 16px 20px; }}
h1 {{ font-size: 20px; margin: 0 0 6px; }}
p {{ font-size: 13px; color: {faint}; margin: 0 0 8px; max-width: 1000px; line-height: 1.45; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>One row per stage, one box per task, coloured by what the task does; the number in a box is the microbatch. Pale
boxes are idle time, hatched by its reason. Point at a box for its facts. Drag or scroll to zoom in time (all timelines
zoom together), double-click to see everything again; click on an entry of the legend to hide it.{note}</p>
{figure}
</body>
</html>
"""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Makes the browser refuse every request to a network."""
_SHADE_NOTE = " Where a stage has several chunks, the lighter a box, the later its chunk."
_STEP_NOTE = " A black line marks a stage's first task of a step."
_BLEND_NOTE = " Boxes thinner than a pixel blend with their neighbours: zoom in to tell them apart."


def write_page(
    timelines: Iterable[tuple[str, Timeline]], path: str | os.PathLike[str], *, title: str = "Pipeline timelines"
) -> None:
    """Write (caption, timeline) pairs as one self-contained HTML file, in one piece.

    Raises ValueError for a timeline without tasks, before anything is written.
    """
    drawn = panels(timelines)
    figure = to_html(
        _figure(drawn), config=_CONFIG, include_plotlyjs=True, full_html=False, div_id="timelines", default_width="100%"
    )
    note = _SHADE_NOTE if any(panel.num_shades > 1 for panel in drawn) else ""
    note += _STEP_NOTE if any(len(panel.steps) > 1 for panel in drawn) else ""
    note += _BLEND_NOTE if any(panel.num_boxes > MAX_BARS for panel in drawn) else ""
    colours = {"ink": INK, "paper": PAPER, "faint": FAINT_INK}
    text = _PAGE.format(title=escape(title), note=note, figure=figure, policy=_POLICY, **colours)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _figure(drawn: list[Panel]) -> go.Figure:
    heights = [panel.num_stages * _row_pixels(panel) for panel in drawn]
    plot_height = sum(heights) + _TITLE * len(drawn)
    end_ms = max(panel.end_ms for panel in drawn) or 1.0
    layout: dict[str, Any] = {
        "height": _LEGEND + plot_height + _AXIS,
        "margin": {"l": _LEFT, "r": _RIGHT, "t": _LEGEND, "b": _AXIS},
        "barmode": "overlay",
        "bargap": 0,
        "dragmode": "zoom",
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "namelength": -1},
        "uniformtext": {"mode": "hide", "minsize": 7},
        "font": {"family": "DejaVu Sans, Verdana, sans-serif", "color": INK, "size": 12},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "legend": _legend_place(drawn),
        "annotations": [],
        "shapes": [],
    }
    shown: list[Any] = _legend(drawn)
    bottom = plot_height
    for number, (panel, rows) in enumerate(zip(drawn, heights, strict=True), start=1):
        top = bottom - _TITLE
        bottom = top - rows
        axis = "" if number == 1 else str(number)
        domain = [max(0.0, bottom / plot_height), top / plot_height]
        layout[f"yaxis{axis}"] = _stage_axis(panel, f"x{axis}", domain)
        layout[f"xaxis{axis}"] = _time_axis(f"y{axis}", end_ms, first=number == 1, last=number == len(drawn))
        layout["annotations"] += _titles(panel, domain[1])
        layout["shapes"] += _step_marks(panel, axis)
        shown += traces(panel, axis)
    return go.Figure(data=shown, layout=layout)


def _row_pixels(panel: Panel) -> int:
    return int(np.clip(800 // panel.num_stages, 13, 42))


def _stage_axis(panel: Panel, anchor: str, domain: list[float]) -> dict[str, Any]:
    every = 1 if _row_pixels(panel) > 14 else 2
    shown = list(range(0, panel.num_stages, every))
    return {
        "anchor": anchor,
        "domain": domain,
        "range": [panel.num_stages - 0.5, -0.5],
        "fixedrange": True,
        "tickvals": shown,
        "ticktext": [f"stage {stage}" for stage in shown],
        "tickfont": {"size": 12 if _row_pixels(panel) > 18 else 9},
        "showgrid": False,
        "zeroline": False,
    }


def _time_axis(anchor: str, end_ms: float, *, first: bool, last: bool) -> dict[str, Any]:
    axis = {
        "anchor": anchor,
        "range": [0, end_ms],
        "minallowed": 0,
        "maxallowed": end_ms,
        "gridcolor": GRID,
        "zeroline": False,
        "showline": True,
        "linecolor": FAINT_INK,
        "showticklabels": last,
        "tickformat": ",~r",
        "ticks": "outside" if last else "",
    }
    if not first:
        axis["matches"] = "x"
    if last:
        axis["title"] = {"text": "time since the first start (ms)"}
    return axis


def _titles(panel: Panel, top: float) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"xref": "paper", "x": 0, "xanchor": "left", "showarrow": False}
    common |= {"yref": "paper", "y": top, "yanchor": "bottom"}
    caption = {"text": f"<b>{_plain(panel.caption)}</b>", "yshift": 21, "font": {"size": 14}}
    facts = {"text": panel.summary(), "yshift": 3, "font": {"size": 12, "color": FAINT_INK}}
    return [common | caption, common | facts]


def _step_marks(panel: Panel, axis: str) -> list[dict[str, Any]]:
    """Where several steps are drawn: a line at each stage's first task of a step."""
    if len(panel.steps) == 1:
        return []
    common = {"type": "line", "xref": f"x{axis}", "yref": f"y{axis}", "line": {"color": INK, "width": 1.5}}
    return [
        {**common, "x0": start_ms, "x1": start_ms, "y0": stage - 0.5, "y1": stage + 0.5}
        for starts in panel.step_starts_ms.values()
        for stage, start_ms in starts.items()
    ]


def _plain(text: str) -> str:
    """``text`` so that plotly shows it letter by letter: neither as tags nor, between dollar signs, as a formula."""
    return escape(text, quote=False).replace("$", "&#36;")


def _legend_labels(drawn: list[Panel]) -> list[tuple[TaskKind | IdleReason, str]]:
    kinds = {group.kind for panel in drawn for group in panel.tasks}
    reasons = {reason for panel in drawn for reason in panel.waits}
    return [
        *((kind, TASK_LOOKS[kind].label) for kind in TaskKind if kind in kinds),
        *((reason, f"idle: {IDLE_LOOKS[reason].label}") for reason in IdleReason if reason in reasons),
    ]


def _legend_place(drawn: list[Panel]) -> dict[str, Any]:
    longest = max(len(label) for _, label in _legend_labels(drawn))
    return {
        "orientation": "h",
        "x": 0,
        "y": 1,
        "yanchor": "bottom",
        "entrywidth": longest * _LETTER,
        "font": {"size": 12},
        "groupclick": "togglegroup",
    }


def _legend(drawn: list[Panel]) -> list[Any]:
    """One empty trace per colour, so that the legend is complete and in order whatever the panels hold."""
    num_shades = max(panel.num_shades for panel in drawn)
    return [
        go.Bar(
            x=[None],
            y=[0],
            orientation="h",
            name=label,
            marker=task_marker(what, 0, num_shades) if isinstance(what, TaskKind) else idle_marker(what),
            legendgroup=what.value,
            showlegend=True,
        )
        for what, label in _legend_labels(drawn)
    ]
