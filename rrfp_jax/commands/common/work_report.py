"""Tells how far a long command has come: by a bar for each part of the work on a terminal, elsewhere by lines."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0
"""How often a line tells of progress where no bar can be drawn."""


class WorkReport:
    """A callback that takes the current part of the work, its finished and its total amount; ``words`` name the
    parts."""

    def __init__(self, console: Console, words: Mapping[str, str]) -> None:
        self._console, self._words, self._told_s = console, words, time.monotonic()
        self._totals: dict[str, int] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", visible=False)

    def __call__(self, part: str, done: int, total: int) -> None:
        if part not in self._totals:
            self._totals[part] = total
            self._bar.reset(self._task, total=total, description=self._words[part], visible=True)
        self._bar.update(self._task, completed=done)
        now_s = time.monotonic()
        if self._bar.disable and total and now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            self._console.print(f"{self._words[part]}: {done / total:.0%}")

    def total(self, part: str) -> int:
        """Returns the total amount of a part."""
        return self._totals.get(part, 0)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._bar.stop()
