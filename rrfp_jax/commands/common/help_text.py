"""How help texts look: as wide as the terminal, between 80 and 120 columns, no word broken, examples at the end."""

import os
import re
import shutil
import sys
import textwrap
from argparse import Action, HelpFormatter

NARROWEST, WIDEST = 80, 120


def width() -> int:
    """Columns of ``COLUMNS`` or of the terminal, also that of a pager; the widest where there is none."""
    columns = shutil.get_terminal_size((0, 0)).columns
    for stream in (sys.__stderr__, sys.__stdin__):
        if columns == 0 and stream is not None:
            try:
                columns = os.get_terminal_size(stream.fileno()).columns
            except (OSError, ValueError):  # no terminal, or closed
                continue
    return min(max(columns, NARROWEST), WIDEST) if columns else WIDEST


def wrap(text: str, columns: int | None = None, *, indent: str = "", start: str = "") -> list[str]:
    """The lines of a text, its words whole: no hyphen of an option's name is a place to break.

    The first line begins with ``start``, the others with ``indent``. Without ``columns`` they fill the terminal.
    """
    return textwrap.wrap(
        " ".join(text.split()),
        width() if columns is None else columns,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def examples_in(doc: str) -> str:
    """The block of commands that a module's docstring begins with, behind ``::``; empty where it has none."""
    _, mark, rest = doc.partition("\n::\n\n")
    lines = []
    for line in rest.splitlines() if mark else ():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


class HelpText(HelpFormatter):
    """Says of every option what it is without being given, and keeps the lines of examples."""

    def __init__(self, prog: str) -> None:
        columns = width()
        super().__init__(prog, max_help_position=min(34, columns // 3), width=columns)

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or re.search(r"\b(default|required|optional)\b", text):
            return text
        missing = "required" if action.required else "optional"
        if not action.required and action.default is not None:
            missing = f"default {action.default:g}" if isinstance(action.default, float) else "default %(default)s"
        return f"{text} ({missing})"

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return "N" if action.type is int else "X" if action.type is float else "TEXT"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled, indented lines stay as they are."""
        lines: list[str] = []
        for line in text.splitlines():
            is_kept = not line or line.startswith(" ")
            lines += [line] if is_kept else wrap(line, width - len(indent))
        return "\n".join(indent + line if line else line for line in lines)
