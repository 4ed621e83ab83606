"""The search as a user sees it: a bar on a terminal, and Ctrl-C ends it with the best so far."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rrfp_jax.commands.common.garbage import rare_collections
from rrfp_jax.commands.planning.asking import Asked
from rrfp_jax.commands.planning.words import milliseconds
from rrfp_jax.planning.search import planner
from rrfp_jax.planning.search.records import Plan


def search(asked: Asked, seed: int) -> Plan:
    """The plan; one that is not complete where the user had enough. Raises ValueError where wishes contradict costs."""
    with rare_collections(), _interruptible() as interrupt, _Bar() as bar:
        return planner.make_plan(asked.book, asked.wishes, seed=seed, progress=bar.tell, should_stop=interrupt.asked)


class _Interrupt:
    """The first Ctrl-C asks, the second one ends the process as ever."""

    def __init__(self) -> None:
        self._is_asked = False

    def asked(self) -> bool:
        return self._is_asked

    def note(self, number: int, _: FrameType | None) -> None:
        self._is_asked = True
        signal.signal(number, signal.default_int_handler)


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """On stderr, so that it never mixes with what is printed; gone once the search has ended."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            TextColumn("Ctrl-C takes the best so far"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("searching", total=None, told="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def tell(self, told: planner.Progress) -> None:
        best = "" if told.best_ms is None else f", {milliseconds(told.best_ms)} ms per sample"
        words = f"{told.done} of {told.total}{best}"
        self._progress.update(self._task, description=told.doing, completed=told.done, total=told.total, told=words)
