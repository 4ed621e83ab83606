"""Timelines as one HTML page that works without a network: choose a step, zoom, point at a box for its facts.

``page.html`` draws them with a small script of its own, on canvases, from compressed numbers that are put in here.
Colours, hatchings and words are those of the picture (:mod:`rrfp_jax.observe.style`).
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.panels import Boxes, Panel, TaskGroup, facts, panels
from rrfp_jax.observe.style import IDLE_LOOKS, shade, text_colour
from rrfp_jax.schedules.timeline import IdleReason, Timeline


def write_page(
    timelines: Iterable[tuple[str, Timeline]], path: str | os.PathLike[str], *, title: str = "Pipeline timelines"
) -> None:
    """Writes (caption, timeline) pairs as one self-contained HTML file, in one piece.

    The page opens on the last step. Raises ValueError for a timeline without tasks, before anything is written.
    """
    given = list(timelines)
    drawn = panels(given)
    num_shades = max(panel.num_shades for panel in drawn)
    looks: list[dict[str, str]] = []
    groups: list[TaskGroup | IdleReason] = []
    for kind, look in drawn[0].looks.items():
        for rank in range(num_shades):
            colour = shade(look.colour, rank, num_shades)
            groups.append(TaskGroup(kind, rank))
            looks.append({"label": look.label, "kind": kind, "colour": colour, "ink": text_colour(colour)})
    for reason in IdleReason:
        idle = IDLE_LOOKS[reason]
        groups.append(reason)
        looks.append({"label": f"idle: {idle.label}", "colour": idle.fill, "line": idle.line, "pattern": idle.pattern})
    data = {
        "looks": looks,
        "panels": [_panel(panel, timeline, groups) for panel, (_, timeline) in zip(drawn, given, strict=True)],
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=9)
    text = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    text = text.replace("@SHADES@", "; the lighter, the later its chunk on that stage" if num_shades > 1 else "")
    text = text.replace("@DATA@", base64.b64encode(packed).decode()).replace("@TITLE@", escape(title))
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _panel(panel: Panel, timeline: Timeline, groups: Sequence[TaskGroup | IdleReason]) -> dict[str, Any]:
    by_group: list[tuple[TaskGroup | IdleReason, Boxes]] = [*panel.waits.items(), *panel.tasks.items()]
    boxes = []
    for group, found in by_group:
        start_us, end_us = (np.rint(times * 1e3).astype(np.int64) for times in (found.start_ms, found.end_ms))
        columns = (found.step, found.row, start_us, end_us - start_us, found.chunk, found.microbatch)
        boxes.append([groups.index(group), *(column.tolist() for column in columns)])
    by_step = zip(timeline.steps(), timeline.by_step(), strict=True)
    return {
        "caption": panel.caption,
        "rows": [
            {"stage": row.stage, "lane": row.lane if row.is_beside else "", "top": row.top, "height": row.height}
            for row in panel.rows
        ],
        "height": panel.height,
        "facts": {"all": panel.summary, **{step: facts(one) for step, one in by_step}},
        "boxes": boxes,
    }
