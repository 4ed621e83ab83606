"""The batch leaves of a stage's next microbatches, on their way to its devices before the tasks that read them.

A device begins to copy into new memory when it has done what was launched before that memory was taken. If a program
is given arrays of the host, their copies begin behind all that is queued, and the program waits for them: no byte is
copied while the device computes. So each chunk has the leaves of ``LEAVES_AHEAD`` microbatches on its devices or on
their way there, two, since the copy that begins as a task is launched is to take place during that task or the next.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD

Pair = tuple[int, int]
"""A step and a microbatch."""
Place = Callable[[], dict[str, Any]]
"""Begins to copy the leaves of a microbatch; returns them as they lie on the devices."""


class LeavesAhead:
    """Begins the copies on a thread of its own, which ends with this object: one begins within some tenths of a
    millisecond, which neither the event loop nor the thread that launches has. Used by any thread."""

    def __init__(self, stage: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rrfp-stage-{stage}-leaves")
        self._lock = Lock()
        self._coming: dict[int, dict[Pair, Place]] = defaultdict(dict)
        """By chunk, in the order in which its microbatches usually come, those whose copies have not begun."""
        self._begun: dict[int, dict[Pair, Future[dict[str, Any]]]] = defaultdict(dict)
        """By chunk, those that no task has read."""

    def expect(self, chunk: int, coming: Iterable[tuple[Pair, Place]]) -> None:
        """The chunk will read these microbatches, behind all that it was to read before."""
        with self._lock:
            self._coming[chunk].update(coming)
            self._go_on(chunk)

    def take(self, chunk: int, pair: Pair) -> dict[str, Any] | None:
        """The leaves of a microbatch, for the task that is to be launched; None where their copies have not begun."""
        with self._lock:
            self._coming[chunk].pop(pair, None)
            begun = self._begun[chunk].pop(pair, None)
            self._go_on(chunk)
        # what is being placed at this moment is waited for: to begin another copy would take as long
        return None if begun is None or begun.cancel() else begun.result()

    def forget(self, step: int) -> None:
        """The step has ended."""
        with self._lock:
            every: list[dict[Pair, Any]] = [*self._coming.values(), *self._begun.values()]
            for known in every:
                for pair in [pair for pair in known if pair[0] == step]:
                    del known[pair]

    def _go_on(self, chunk: int) -> None:
        coming, begun = self._coming[chunk], self._begun[chunk]
        while coming and len(begun) < LEAVES_AHEAD:
            pair = next(iter(coming))
            begun[pair] = self._thread.submit(coming.pop(pair))
