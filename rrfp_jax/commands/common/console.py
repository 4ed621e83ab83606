"""How commands speak: one console, one style of table, one form of logged lines, and the files of timelines."""

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rrfp_jax.readable import printable

if TYPE_CHECKING:
    from rrfp_jax.schedules.timeline import Timeline

_log = logging.getLogger(__name__)
_OURS = ("rrfp_jax", "experiments", "root")
_FOREIGN_LINES = 2
"""Lines that are kept of a message of another library; some log the whole traceback of an error that this program
handles."""
_BOUNDLESS = 10_000
RUNS = Path("runs")
"""Folder for the output of commands without a path of their own."""
_PAGES = (".html", ".htm")
_PAGE_BOXES = 100_000
"""How many a browser draws at once without delay; in a file they take a little less than a megabyte."""


class _Console(Console):
    """A console whose reader may go away (``| head``); rich itself would end the process at once, as a failure.

    A table that is wider than the terminal goes on in the next line, where rich would leave its end out.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text of a line or a table's cell, made printable because it may hold names that others gave."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def say(text: str) -> None:
    """Print a report of several lines, which may hold names and words of others."""
    print(printable(text))


def show_text(text: str) -> None:
    """Print a text that others wrote; on a terminal, escape the characters that the terminal would obey."""
    print(printable(text) if sys.stdout.isatty() else text)


def make_console(*, is_quiet: bool = False) -> Console:
    """Numbers are never cut: where the output is no terminal, lines may be longer than 80 characters."""
    console = _Console(highlight=False, quiet=is_quiet)
    return console if console.is_terminal else _Console(highlight=False, width=120, quiet=is_quiet)


class _Forgiving(io.RawIOBase):
    """A standard stream that never fails: output that cannot be written is lost, and one line on stderr says so."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._has_told = descriptor, False

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if self._descriptor == 1 and not self._has_told:
                self._has_told = True
                sys.stderr.write(f"standard output cannot be written ({error.strerror}): the run goes on without it\n")
                sys.stderr.flush()
            return len(data)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


_replaced: dict[str, io.TextIOWrapper] = {}


def go_on_without_output() -> None:
    """From now on, lose output that cannot be written, instead of ending the work that it tells of.

    A reader may go away (``| head``), a terminal may hang up, and the disk of a log may be full.
    """
    for name, descriptor in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        # Replace a stream only if nobody else has.
        if type(stream) is io.TextIOWrapper and stream.fileno() == descriptor and stream is not _replaced.get(name):
            with suppress(OSError):
                stream.flush()
            _replaced[name] = io.TextIOWrapper(
                io.BufferedWriter(_Forgiving(descriptor)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, _replaced[name])


class _LogLines(logging.Handler):
    """Writes the message alone to stderr, without the names of modules; a message of another library bears the
    library's name."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Other libraries are heard from warnings on, whatever level they have set for themselves."""
        return record.levelno >= logging.WARNING or _library(record) in _OURS

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(self.format(record)), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        library, message = _library(record), record.getMessage()
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        if library in _OURS:
            text = f"{level}{message}"
            if record.exc_info is None or record.levelno < logging.ERROR:
                return text
            return f"{text}\n{logging.Formatter().formatException(record.exc_info)}"  # a defect of this program
        lines = message.strip().splitlines() or [""]
        if record.exc_info is not None and record.exc_info[1] is not None:
            lines[:] = [lines[0], traceback.format_exception_only(record.exc_info[1])[-1].strip()]
        return f"{level}{library}: {' '.join(lines[:_FOREIGN_LINES])}"


def _library(record: logging.LogRecord) -> str:
    return record.name.partition(".")[0]


def log_plainly() -> None:
    """Log each message as one plain line, in place of the handlers that another library may have set up."""
    logging.basicConfig(level=logging.WARNING, handlers=[_LogLines()], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)


class _NumberTable(Table):
    """A table that breaks its headings between words, and no number, where the terminal is too narrow."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        boundless = options.update(width=_BOUNDLESS)
        if Measurement.get(console, boundless, self).maximum > options.max_width:
            for column in self.columns:
                heading = Measurement.get(console, boundless, column.header).minimum
                cells = (Measurement.get(console, boundless, cell).maximum for cell in column.cells)
                column.width = max(heading, *cells, 0)
            width = Measurement.get(console, boundless, self).maximum
            options = options.update(width=max(width, options.max_width))
        yield from super().__rich_console__(console, options)


def make_table(title: str, *headings: str, header: bool = True, numeric: bool = False) -> Table:
    """An empty table; of a ``numeric`` one no column is cut, of others the first one is not, and texts are broken."""
    kind = _NumberTable if numeric else Table
    table = kind(title=title, title_justify="left", show_header=header, box=box.SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if numeric and number > 0 else "left"
        table.add_column(heading, justify=justify, no_wrap=not numeric and number == 0, overflow="fold")
    return table


# -- pictures and traces, checked before the work starts and written after it ------------------------------------------


def check_outputs(*, timeline: str | None, trace: str | None, events: str | None = None) -> None:
    """Raise ValueError on names that cannot be written, so that a long run is not lost to one."""
    from rrfp_jax.observe.output_files import check_file

    for what, path, endings, advice in (
        ("timeline", timeline, (".png", ".svg", *_PAGES), ".png, .svg or .html"),
        ("trace", trace, (".json",), ".json"),
        ("events", events, (".gz",), ".json.gz"),
    ):
        if path is not None:
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


def draw(timelines: "Sequence[tuple[str, Timeline]]", path: str, *, num_steps: int | None = None) -> None:
    """Draw the last steps of (caption, timeline) pairs, as a page or a picture by the file's ending.

    A picture shows one step unless told otherwise; in a page one chooses among as many as it can well hold. Its
    libraries are imported only now.
    """
    if Path(path).suffix.lower() in _PAGES:
        from rrfp_jax.observe.panels import write_page

        most_steps = max(len(one.steps()) for _, one in timelines)
        num_boxes = sum(len(one.spans) + len(one.waits) for _, one in timelines)
        shown = num_steps or max(1, most_steps * _PAGE_BOXES // max(num_boxes, _PAGE_BOXES))
        write_page([(caption, one.last_steps(shown)) for caption, one in timelines], path)
    else:
        from rrfp_jax.observe.picture import draw_timelines

        draw_timelines([(caption, one.last_steps(num_steps or 1)) for caption, one in timelines], path)
    _log.info("the timeline is in %s", path)
