"""How the reports look: one console and one style of table."""

from rich import box
from rich.console import Console
from rich.table import Table


class _Console(Console):
    """One whose reader may go away (``| head``): rich would end the process there and then, as a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, is_quiet: bool = False) -> Console:
    """Numbers are never cut: where the output is no terminal, lines may be longer than 80 characters."""
    console = _Console(highlight=False, quiet=is_quiet)
    return console if console.is_terminal else _Console(highlight=False, width=120, quiet=is_quiet)


def make_table(title: str, *headings: str, header: bool = True, numeric: bool = False) -> Table:
    """An empty table; the first column is never cut, and of a ``numeric`` one the others neither."""
    table = Table(title=title, title_justify="left", show_header=header, box=box.SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        is_number = numeric and number > 0
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number or number == 0)
    return table
