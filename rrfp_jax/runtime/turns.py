"""Calls that are made one after another, on whichever thread brings one: so the arbiters of a process are driven.

An arbiter and what is around it belong to no thread, but to one call at a time: a *turn*. What is asked for while
another thread has the turn, or within a call, is made afterwards by who has it; nobody ever waits. So the thread on
which a task has ended chooses what its stage runs next, and neither it nor the event loop has to be woken for that,
which takes longer than all else that the runtime does for a task.

What may be called on one thread only, such as timers and most of the network, is for the event loop: a call that needs
it has the loop do that.
"""

import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rrfp_jax.cluster.loop_thread import runs_here
from rrfp_jax.runtime.wake_up import WakeUp

_T = TypeVar("_T")
_AT_ONCE = 8
"""After so many calls a stage's thread leaves the rest to the loop: its own stage may have work for it."""

_Call = tuple[Callable[..., None], tuple[Any, ...], bool]
"""What to call, with what, and whether also once the turns are stopped."""


class Turns:
    """The calls of one process.

    Args:
        goes_on: asked before each call, and if it says no, that one is dropped.
        failed: told of an error that a call has raised; the turns are stopped then.
    """

    def __init__(
        self, loop: AbstractEventLoop, goes_on: Callable[[], bool], failed: Callable[[Exception], None]
    ) -> None:
        self._loop, self._goes_on, self._failed = loop, goes_on, failed
        self._calls: deque[_Call] = deque()
        self._turn = threading.Lock()
        """Held by the thread that makes calls; others only try it, but for :meth:`apart`."""
        self._maker: int | None = None
        self._is_stopped = False
        self._wake_up = WakeUp(loop, self._take)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call this on this thread, or after the call that is under way."""
        self._calls.append((function, arguments, False))
        self._take()

    def call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Leave a call to the loop; another thread may make this one too."""
        self._calls.append((function, arguments, False))
        self._wake_up.ring()

    def always(self, function: Callable[..., None], *arguments: Any) -> None:
        """As :meth:`call`, also when no other calls are made any more."""
        self._calls.append((function, arguments, True))
        self._take()

    def apart(self, function: Callable[[], _T]) -> _T:
        """What a function returns while no call is under way, other than one that asks for this."""
        if self._maker == threading.get_ident():
            return function()
        try:
            with self._turn:
                return function()
        finally:
            self._take()

    def stop(self) -> None:
        """Make no more calls but those that are always made."""
        self._is_stopped = True

    def _take(self) -> None:
        while self._calls and self._turn.acquire(False):
            is_enough, error = False, None
            self._maker = threading.get_ident()
            try:
                is_enough = self._make()
            except Exception as caught:
                self.stop()
                error = caught
            finally:  # who came in vain has left its call before: the turn is tried again if there is one
                self._maker = None
                self._turn.release()
            if error is not None:
                self._failed(error)
            if is_enough and self._calls and not runs_here(self._loop):
                self._wake_up.ring()
                return

    def _make(self) -> bool:
        """Make the calls that there are; tells whether it stopped at enough."""
        calls = self._calls
        for _ in range(_AT_ONCE):
            if not calls:
                return False
            function, arguments, is_always = calls.popleft()
            if is_always or (self._goes_on() and not self._is_stopped):
                function(*arguments)
        return True

    # -- on the event loop -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Make what is left to the loop from now on, also what was left to it before."""
        self._wake_up.listen()

    def hush(self) -> None:
        """Make it no more."""
        self._wake_up.hush()

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Once no other thread calls any more."""
        self._wake_up.close()
