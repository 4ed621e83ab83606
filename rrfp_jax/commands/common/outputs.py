"""Pictures and traces that simulate and emulate write: checked before the work starts, written after it."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.observe.output_files import check_file
from rrfp_jax.schedules.timeline import Timeline

RUNS = Path("runs")
"""Folder for the output of commands without a path of their own."""
_log = logging.getLogger(__name__)

_PAGES = (".html", ".htm")
_PICTURES = (".png", ".svg")
_PAGE_BOXES = 100_000
"""How many a browser draws at once without delay; in a file they take a little less than a megabyte."""


def check_outputs(*, timeline: str | None, trace: str | None, events: str | None = None) -> None:
    """Raise ValueError on names that cannot be written, so that a long run is not lost to one."""
    if timeline is not None:
        _check_ending("timeline", timeline, (*_PICTURES, *_PAGES), ".png, .svg or .html")
    if trace is not None:
        _check_ending("trace", trace, (".json",), ".json")
    if events is not None:
        _check_ending("events", events, (".gz",), ".json.gz")


def _check_ending(what: str, path: str, endings: Sequence[str], advice: str) -> None:
    if Path(path).suffix.lower() not in endings:
        raise ValueError(f"{what} {path!r}: let the name end in {advice}")
    check_file(Path(path), what)


def add_timeline_argument(group: argparse._ArgumentGroup, command: str) -> None:
    """``--timeline``, which writes below ``runs/`` where no file is named."""
    page = str(RUNS / f"{command}.html")
    group.add_argument(
        "--timeline",
        nargs="?",
        const=page,
        metavar="FILE",
        help=f"draw it: as a page in which to look around (.html; {page} where no FILE is given), or the last step as "
        "a picture (.png, .svg)",
    )


def draw(timelines: Sequence[tuple[str, Timeline]], path: str, *, num_steps: int | None = None) -> None:
    """Draw the last steps of (caption, timeline) pairs, as a page or a picture by the file's ending.

    A picture shows one step unless told otherwise; in a page one chooses among as many as it can well hold. Its
    libraries are imported only now.
    """
    if Path(path).suffix.lower() in _PAGES:
        from rrfp_jax.observe.page import write_page

        shown = num_steps or _steps_that_fit([one for _, one in timelines])
        write_page([(caption, one.last_steps(shown)) for caption, one in timelines], path)
    else:
        from rrfp_jax.observe.picture import draw_timelines

        draw_timelines([(caption, one.last_steps(num_steps or 1)) for caption, one in timelines], path)
    _log.info("the timeline is in %s", path)


def _steps_that_fit(timelines: Sequence[Timeline]) -> int:
    num_steps = max(len(one.steps()) for one in timelines)
    num_boxes = sum(len(one.spans) + len(one.waits) for one in timelines)
    return max(1, num_steps * _PAGE_BOXES // max(num_boxes, _PAGE_BOXES))
