"""Peer-loss callbacks: conclusions of the liveness thread, for the event loop and for the thread that connects."""

import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress

from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_MORE_LOSSES_S = 0.3
"""Seconds within which others may be missed after the first, which may have ended for the loss of one of them."""


class PeerLossCallbacks:
    """Tells the user of the network which ranks are gone.

    ``connected``, ``lost``, ``left`` and ``broken`` are called on the liveness thread, :meth:`wait_connected` on any
    thread but the loop's, everything else on the event loop.

    Args:
        drop: called on the loop with a rank that is gone, and whether it left in good order, before any callback.
    """

    def __init__(self, rank: int, num_ranks: int, drop: Callable[[int, bool], None]) -> None:
        self._rank, self._num_ranks, self._drop = rank, num_ranks, drop
        self.gone: set[int] = set()
        self._loop: AbstractEventLoop | None = None
        self._on_lost: Callable[[int, str], None] = lambda rank, reason: None
        self._on_left: Callable[[int], None] | None = None
        self._on_broken: Callable[[str], None] | None = None
        self._decided = threading.Event()
        self._missed: list[str] = []
        """Reasons why :meth:`wait_connected` fails."""
        self._is_closed = False

    def start(
        self,
        loop: AbstractEventLoop,
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None,
        broken: Callable[[str], None] | None,
    ) -> None:
        """Sets the callbacks, see :meth:`PeerNetwork.start`; called on any thread, before anything is noticed."""
        self._on_lost, self._on_left, self._on_broken = lost, left, broken
        self._loop = loop

    def close(self) -> None:
        """Calls nobody any more."""
        self._is_closed = True

    def wait_connected(self, timeout_s: float) -> None:
        """Blocks until every connection stands.

        Raises:
            ConnectionError: where a peer is lost or leaves before, or the time is over.
        """
        if not wait_for(self._decided, timeout_s):
            raise ConnectionError(
                f"rank {self._rank} of {self._num_ranks} has not reached all ranks after {timeout_s} s"
            )
        if self._missed:
            time.sleep(_MORE_LOSSES_S)
            raise ConnectionError(f"rank {self._rank} could not connect to {'; '.join(self._missed)}")

    # -- called on the liveness thread -------------------------------------------------------------------------------

    def connected(self) -> None:
        """Notes that every connection to every peer stands, and each has been heard; called once."""
        self._decided.set()

    def lost(self, rank: int, reason: str) -> None:
        """Reports that a rank died or hangs, or, with this rank, that its own watch has failed."""
        self._miss(f"rank {rank}: {reason}")
        self._call_soon(lambda: self.lose(rank, reason))

    def left(self, rank: int) -> None:
        """Reports that a rank has ended in good order."""
        if not self._missed:
            self._miss(f"rank {rank}: it has ended")
        self._call_soon(lambda: self._leave(rank))

    def broken(self, text: str) -> None:
        """Reports that ranks live which no longer hear each other; called at most once."""
        self._miss(text)
        self._call_soon(lambda: self._break(text))

    def _miss(self, reason: str) -> None:
        # Only until all were connected: a later loss is told by the callbacks, and nobody waits any more.
        if self._missed or not self._decided.is_set():
            self._missed.append(reason)
            self._decided.set()

    def _call_soon(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(call)

    # -- called on the event loop ------------------------------------------------------------------------------------

    def lose(self, rank: int, reason: str) -> None:
        """Drops a rank that is lost, and tells the user."""
        self.gone.add(rank)
        if not self._is_closed:
            self._drop(rank, False)
            _LOG.warning("rank %d lost rank %d: %s", self._rank, rank, reason)
            self._on_lost(rank, reason)

    def _leave(self, rank: int) -> None:
        self.gone.add(rank)
        if not self._is_closed:
            self._drop(rank, True)
            if self._on_left is not None:
                self._on_left(rank)

    def _break(self, text: str) -> None:
        if self._is_closed:
            return
        _LOG.warning("rank %d: %s", self._rank, text)
        if self._on_broken is not None:
            self._on_broken(text)
        else:
            self._on_lost(self._rank, text)
