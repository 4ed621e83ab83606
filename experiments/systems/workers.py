"""Run a study's jobs in several processes, with a bar on a terminal. Ctrl-C ends all and tells their progress."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rrfp_jax.exit_codes import NO_PROGRESS, PEER_LOST
from rrfp_jax.waiting import end_with_parent, spawning

_PATIENCE_S = 1800.0
"""Seconds without the end of any job before the study fails; the longest job takes seconds."""


class WorkersFailed(RuntimeError):
    """The processes of a study have not ended their jobs; the message says what to do."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Job(Protocol):
    """Unit of work of a process."""

    @property
    def size(self) -> int:
        """Estimate of the amount of work, in any unit."""


J = TypeVar("J", bound=Job)
R = TypeVar("R")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes for the jobs of a study, or this process alone where one is enough; to be used in a ``with``."""

    def __init__(self, processes: int) -> None:
        self._pool, self._starting = None, ExitStack()
        if processes > 1:
            context = self._starting.enter_context(spawning())
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
        self._starting.close()

    def run(self, work: Callable[[J], R], jobs: Sequence[J], words: str) -> list[R]:
        """Returns the results of the jobs, in order; the largest begin first. ``words`` name the jobs on the bar."""
        largest_first = sorted(range(len(jobs)), key=lambda number: -jobs[number].size)
        results: dict[int, R] = {}
        with _bar(words) as bar:
            task = bar.add_task(words, total=sum(job.size for job in jobs), ended=f"0/{len(jobs)}")
            try:
                for number, result in self._in_any_order(work, jobs, largest_first):
                    results[number] = result
                    bar.update(task, advance=jobs[number].size, ended=f"{len(results)}/{len(jobs)}")
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"{len(results)} of {len(jobs)} {words} had ended; nothing was written")
                raise
            except BrokenProcessPool as broken:
                raise WorkersFailed(
                    f"a process was killed after {len(results)} of {len(jobs)} {words}, perhaps for want of memory: "
                    "give fewer --processes",
                    PEER_LOST,
                ) from broken
        return [results[number] for number in range(len(jobs))]

    def _in_any_order(self, work: Callable[[J], R], jobs: Sequence[J], order: Sequence[int]) -> Iterator[tuple[int, R]]:
        if self._pool is None:
            yield from ((number, work(jobs[number])) for number in order)
            return
        numbers: dict[Future[R], int] = {self._pool.submit(work, jobs[number]): number for number in order}
        pending = set(numbers)
        while pending:
            ended, pending = wait(pending, _PATIENCE_S, FIRST_COMPLETED)
            if not ended:
                minutes = f"{_PATIENCE_S / 60:.0f} minutes"
                raise WorkersFailed(f"nothing has ended for {minutes}: see whether a process is stopped", NO_PROGRESS)
            yield from ((numbers[future], future.result()) for future in ended)


def _bar(words: str) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn(words),
        BarColumn(),
        TextColumn("{task.fields[ended]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
