"""What becomes of the other ranks: brought from the thread that watches to the event loop, and to who connects."""

import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress

from rrfp_jax.network.liveness import Watchers
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_MORE_LOSSES_S = 0.3
"""How long others may be missed after the first, which may have ended for the loss of one of them."""


class Losses:
    """Who is gone. Methods are called on the event loop, but for what says otherwise.

    Args:
        drop: called with a rank that is gone, and whether it left in good order, before anybody else is told.
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
        self._is_closed = False

    def start(
        self,
        loop: AbstractEventLoop,
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None,
        broken: Callable[[str], None] | None,
    ) -> None:
        """Whom to tell on ``loop``; see :meth:`PeerNetwork.start`. Called on any thread, before anything is noticed."""
        self._on_lost, self._on_left, self._on_broken = lost, left, broken
        self._loop = loop

    def close(self) -> None:
        """Tell nobody any more."""
        self._is_closed = True

    def wait_connected(self, timeout_s: float) -> None:
        """Wait, on another thread than the loop's, until every connection stands.

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

    def lose(self, rank: int, reason: str) -> None:
        """A rank was lost."""
        self.gone.add(rank)
        if self._is_closed:
            return
        self._drop(rank, False)
        _LOG.warning("rank %d lost rank %d: %s", self._rank, rank, reason)
        self._on_lost(rank, reason)

    def _leave(self, rank: int) -> None:
        self.gone.add(rank)
        if self._is_closed:
            return
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

    # -- on the thread that watches ----------------------------------------------------------------------------------

    def watchers(self) -> Watchers:
        """What that thread reports to."""
        return Watchers(
            connected=self._decided.set, lost=self._tell_lost, left=self._tell_left, broken=self._tell_broken
        )

    def _tell_lost(self, rank: int, reason: str) -> None:
        self._miss(f"rank {rank}: {reason}")
        self._call_soon(lambda: self.lose(rank, reason))

    def _tell_left(self, rank: int) -> None:
        if not self._missed:
            self._miss(f"rank {rank}: it has ended")
        self._call_soon(lambda: self._leave(rank))

    def _tell_broken(self, text: str) -> None:
        self._miss(text)
        self._call_soon(lambda: self._break(text))

    def _miss(self, what: str) -> None:
        if self._missed or not self._decided.is_set():
            self._missed.append(what)
            self._decided.set()

    def _call_soon(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(call)
