"""Waking the event loop from another thread, for half of what ``call_soon_threadsafe`` takes.

That makes a handle, a context and, within uvloop, two turns of the loop with five system calls. A descriptor that the
loop reads is served in the turn that it wakes: one write, one wait and one read.
"""

import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress


class WakeUp:
    """Has the loop make one call.

    A wake-up that is on its way serves everything until it arrives, so what rings first says what there is to do; the
    call looks for it.

    Args:
        call: made on the loop; must not raise.
    """

    def __init__(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call = loop, call
        self._is_ringing = False
        self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else None
        """Linux alone has such a descriptor."""

    def ring(self) -> None:
        """From any thread: have the call made, unless it is about to be."""
        if self._is_ringing:
            return
        self._is_ringing = True
        if self._number is not None:
            os.eventfd_write(self._number, 1)
            return
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._rung)

    def _rung(self) -> None:
        """The flag is cleared before the call looks, so nothing that comes meanwhile is missed."""
        if self._number is not None:
            os.eventfd_read(self._number)
        self._is_ringing = False
        self._call()

    # -- on the event loop -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Make the call from now on, also for what has rung before."""
        if self._number is not None:
            self._loop.add_reader(self._number, self._rung)

    def hush(self) -> None:
        """Make it no more."""
        if self._number is not None:
            self._loop.remove_reader(self._number)

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Once nobody rings any more: free the descriptor, whose number may then be another file's."""
        if self._number is not None:
            os.close(self._number)
            self._number = None
