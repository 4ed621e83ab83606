"""Pipelines of any Python callables: tokens go through serial and parallel pipes, and ``lines`` bounds how many do at
once (Pipeflow, arXiv 2202.00717).

Rules
-----
A *token* is the number of one value that the source gives; a *pipe* is one callable, and the source is pipe 0. A token
is under way from the start of the source's call for it to the end of its last pipe.

* A serial pipe takes the tokens one at a time, in their order. A parallel one takes those that are there, the oldest
  first, as many at once as it has workers.
* At most ``lines`` tokens are under way, so no more values than that are in memory.
* A pipe that returns :data:`STOP` ends the stream: its token and all later ones go no further. The end of the source
  is the same, at pipe 0. Pipes before a later one that stops may have begun on tokens that now go nowhere.

Why nothing waits for ever
--------------------------
It is the argument of the window in :mod:`rrfp_jax.core.memory`, for forwards alone. Order all calls by token, and then
by pipe. Every call waits for calls before it only: the same token in the pipe before, older tokens in a serial pipe,
the end of an older token for a line, and the end of any call for a worker. The source takes tokens in order, so the
oldest one that is left always has a line. So the first call of that order that has not ended runs, or may.

:class:`TokenOrder` decides: ends of calls in, calls that may begin out; without threads or clocks. There are as many
threads as calls can run at once, so whatever may run has a thread, and nothing has to choose among calls. The thread
on which a call ends takes the end in and goes on with the first of the calls that may begin, as the stages of a
pipeline do (:mod:`rrfp_jax.runtime.serial_executor`), so a token mostly goes on without a change of threads. For the
others it wakes threads that have nothing to do. An arbiter for each pipe would begin the same calls. With all that it
can do beside, its events alone take three to nine times as long as bare queues and threads with tokens that need no
work, and this takes less time than they do (``python -m experiments.bench --only flow``).
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from heapq import heappop, heappush
from math import inf
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final

from rrfp_jax.field_rules import AT_LEAST_1, COUNTABLE, MOST, check_fields, is_whole
from rrfp_jax.readable import shown
from rrfp_jax.waiting import wait_for

STOP: Final = object()
"""The value by which the source or a serial pipe ends the stream."""
_PATIENCE_S = 0.8
"""How long calls that still run, after an error or a stop, are waited for; threads that run them end with them."""

Call = tuple[int, int]
"""A pipe and the token that it takes."""


@dataclass(frozen=True)
class Pipe:
    """One pipe of :func:`flow`: a callable that takes a token's value and returns the one for the next pipe.

    Raises ValueError or TypeError, in one sentence, for values without a meaning.
    """

    run: Callable[[Any], Any]
    _: KW_ONLY
    workers: int = 1
    """1: serial, one token at a time and in order. More: so many tokens at once, in any order."""
    name: str | None = None
    """The name in errors. None: that of the callable."""

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise TypeError(f"a pipe is {shown(self.run)}: give a function of one value")
        check_fields(self, AT_LEAST_1, "workers")
        check_fields(self, COUNTABLE, "workers")

    def __str__(self) -> str:
        return self.name or getattr(self.run, "__qualname__", None) or type(self.run).__name__


def flow(source: Iterable[Any], *pipes: Callable[[Any], Any] | Pipe, lines: int) -> int:
    """Sends the values of a source through pipes, on threads, and returns how many have gone through all of them.

    A callable alone is a serial pipe; the last pipe is the sink, whose results are dropped. At most ``lines`` values
    are under way. The stream ends with the source, or as the source or a serial pipe returns :data:`STOP`.

    >>> import rrfp_jax
    >>> read = iter(["one two", "three", "", "four five six"])
    >>> count = rrfp_jax.Pipe(lambda text: len(text.split()), workers=4)
    >>> counts = []
    >>> rrfp_jax.flow(read, str.strip, count, counts.append, lines=8)
    4
    >>> counts
    [2, 1, 0, 3]

    Raises the first error of a pipe, with a note that names the pipe and the token. All threads end then: at once, or
    with the call that they run, for which this waits less than a second. Threads gain speed where callables release
    the interpreter's lock, as NumPy, files and sockets do.
    """
    if not pipes:
        raise ValueError("flow has no pipe: give at least one callable, the last of which takes each value")
    if not is_whole(lines) or not 1 <= lines <= MOST:
        raise ValueError(f"lines is {shown(lines)}: give at least 1 value that may be under way, at most {MOST:,}")
    values = iter(source)
    first = Pipe(lambda _: next(values, STOP), name="the source")
    return _Flow([first, *(pipe if isinstance(pipe, Pipe) else Pipe(pipe) for pipe in pipes)], lines).run()


class TokenOrder:
    """Which pipe takes which token, and when; see the head of this module.

    Args:
        workers: of each pipe, the source's first.
        lines: the most tokens that may be under way.
    """

    def __init__(self, workers: list[int], lines: int) -> None:
        self._is_serial = [number == 1 for number in workers]
        self._free = list(workers)
        self._next = [0] * len(workers)
        """How many tokens each pipe has taken, which is the next one of a serial pipe."""
        self._waiting: list[list[int]] = [[] for _ in workers]
        """For each pipe a heap of the tokens that have come to it."""
        # A free line is a token that has come to the source: there are as many as lines at first, and each token that
        # ends brings the next one.
        self._waiting[0] = list(range(lines))
        self._num_lines = lines
        self._end = inf
        """The first token that the stream lacks, once it is known."""
        self.num_ended = 0

    @property
    def is_over(self) -> bool:
        """Whether the last token has gone through all pipes."""
        return self.num_ended == self._end

    def begin(self) -> list[Call]:
        """Returns the calls that may begin first."""
        return self._take(0, [])

    def end(self, pipe: int, token: int) -> list[Call]:
        """Takes in the end of a call. Returns the calls that may begin now, that of the same token first."""
        calls: list[Call] = []
        self._free[pipe] += 1
        after = pipe + 1
        if after < len(self._free):
            heappush(self._waiting[after], token)
        else:
            after = 0
            heappush(self._waiting[0], self.num_ended + self._num_lines)
            self.num_ended += 1
        self._take(after, calls)
        return self._take(pipe, calls)

    def stop(self, token: int) -> None:
        """Ends the stream before this token, at which a serial pipe has stopped: that pipe takes no other one."""
        self._end = min(self._end, token)

    def _take(self, pipe: int, calls: list[Call]) -> list[Call]:
        waiting = self._waiting[pipe]
        while waiting and self._free[pipe] and waiting[0] < self._end:
            if self._is_serial[pipe] and waiting[0] != self._next[pipe]:
                break
            self._free[pipe] -= 1
            self._next[pipe] += 1
            calls.append((pipe, heappop(waiting)))
        return calls


class _Flow:
    """The threads of one stream."""

    def __init__(self, pipes: list[Pipe], lines: int) -> None:
        self._pipes, self._runs = pipes, [pipe.run for pipe in pipes]
        workers = [pipe.workers for pipe in pipes]
        self._order, self._lock = TokenOrder(workers, lines), threading.Lock()
        self._num_threads = min(lines, sum(workers))
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        """Calls that may begin, for threads that have nothing to do; None ends a thread."""
        self._values: dict[int, Any] = {}
        """The result of its last pipe, for each token under way."""
        self._is_over = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> int:
        threads = [
            threading.Thread(target=self._work, name=f"flow {number}", daemon=True)
            for number in range(self._num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for call in self._order.begin():
                self._calls.put(call)
            wait_for(self._is_over)
        finally:  # a signal may have ended the wait
            self._finish(None)
            until_s = monotonic() + _PATIENCE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until_s - monotonic()))
        if self._failure is not None:
            raise self._failure
        return self._order.num_ended

    def _work(self) -> None:
        call = self._calls.get()
        while call is not None and not self._is_over.is_set():
            try:
                following = self._run(*call)
            except BaseException as error:
                where = f"pipe {call[0]}, {self._pipes[call[0]]}, at token {call[1]}"
                error.add_note(f"raised in {where}, counted from 0, of a flow")
                self._finish(error)
                return
            for other in following[1:]:
                self._calls.put(other)
            call = following[0] if following else self._calls.get()

    def _run(self, pipe: int, token: int) -> list[Call]:
        """Runs one call, on a thread of the flow. Returns the calls that may begin behind it."""
        values = self._values
        value = self._runs[pipe](values.get(token))
        if value is STOP:
            if self._pipes[pipe].workers > 1:
                raise ValueError("a parallel pipe returned STOP, at no place in the order: let a serial one stop")
            values.pop(token, None)
        elif pipe + 1 < len(self._runs):
            values[token] = value
        else:
            del values[token]
        with self._lock:
            if value is STOP:
                following: list[Call] = []
                self._order.stop(token)
            else:
                following = self._order.end(pipe, token)
            is_over = self._order.is_over
        if is_over:
            self._finish(None)
        return following

    def _finish(self, failure: BaseException | None) -> None:
        """Ends all threads: at once, or with the call that they run."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._failure = failure
            self._is_over.set()
        for _ in range(self._num_threads):
            self._calls.put(None)
