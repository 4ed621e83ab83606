"""Pictures and traces that simulate and emulate write: checked before the work starts, written after it."""

from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.observe.output_files import check_file
from rrfp_jax.timeline import Timeline

_PAGES = (".html", ".htm")
_PICTURES = (".png", ".svg")


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


def draw(timelines: Sequence[tuple[str, Timeline]], path: str) -> None:
    """Draw (caption, timeline) pairs, as a page or a picture by the file's ending; its library is loaded only now."""
    if Path(path).suffix.lower() in _PAGES:
        from rrfp_jax.observe.page import write_page

        write_page(timelines, path)
    else:
        from rrfp_jax.observe.picture import draw_timelines

        draw_timelines(timelines, path)
