"""A rank's own connections, beside ZeroMQ's: to whom there are any, how they come about, what follows where one ends.

There are two kinds: some for large arrays, which threads serve, and one for small messages, which the event loop does.
"""

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from rrfp_jax.network.channel import Carrier, Channel, Deliver
from rrfp_jax.network.lane import Proven
from rrfp_jax.network.lane_meeting import LaneMeeting
from rrfp_jax.network.settings import NetworkSettings

_LOG = logging.getLogger(__name__)
LANE_BYTES = 1 << 18
"""What arrays have at least that travel over connections of their own; for less, those of messages do as well:
the thread that has them sends them itself, where one that serves lanes would first have to wake up, on a core that
computes only after some milliseconds."""
NUM_OWN_FILES = 2


class OwnLink(Carrier, Protocol):
    """What carries messages over such connections."""

    def open(self, rank: int, connections: Sequence[Proven]) -> None:
        """Begin to exchange messages with a rank over these connections."""

    def join(self) -> None:
        """After ``close``, on any thread: end all connections."""


class Lanes:
    """Used on the event loop, but for what says otherwise.

    Args:
        purpose: what the connections are for, in messages.
        host: where this rank listens.
        num_connections: to each rank.
        make_link: makes the link; what it takes may be called on any thread where a connection to a rank has ended.
        tell: sends a dict to a rank, whose :meth:`receive` gets it.
        suspect: called with a rank that has ended a connection.
        failed: called with a rank that cannot be reached, and why.
    """

    def __init__(
        self,
        purpose: str,
        rank: int,
        host: str,
        settings: NetworkSettings,
        *,
        num_connections: int,
        make_link: Callable[[Callable[[int, str], None]], OwnLink],
        loop: AbstractEventLoop,
        deliver: Deliver,
        tell: Callable[[int, dict[str, Any]], None],
        suspect: Callable[[int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._purpose, self._rank, self._loop, self._suspect = purpose, rank, loop, suspect
        self._ranks: set[int] = set()
        self._is_closed = False
        self._link = make_link(self._broke)
        self.channel = Channel(self._link, loop, deliver, settings.high_water_bytes)
        self._meeting = LaneMeeting(
            purpose,
            rank,
            host,
            num_connections=num_connections,
            encrypts=settings.encrypt_arrays,
            tell=tell,
            made=self._link.open,
            failed=failed,
        )

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def want(self, rank: int) -> None:
        """Have connections to and from a rank, from now on."""
        if rank not in self._ranks and not self._is_closed:
            self._add(rank)
            self._meeting.want(rank)

    def receive(self, rank: int, header: dict[str, Any], host: str) -> None:
        """What another rank tells about connections; ``host`` is where it listens. Raises MalformedMessage."""
        if not self._is_closed:
            self._add(rank)
            self._meeting.receive(rank, header, host)

    def _add(self, rank: int) -> None:
        self.channel.add(rank, "")
        self._ranks.add(rank)  # last: from now on other threads may send there

    def drop(self, rank: int, *, has_left: bool) -> None:
        """The rank is gone."""
        self.channel.drop(rank, has_left=has_left)

    def close(self, linger_s: float) -> None:
        """Make no more connections, and send nothing that is new."""
        self._is_closed = True
        self._meeting.close(self._loop)
        self.channel.close(linger_s)

    def join(self) -> None:
        """After :meth:`close`, on any thread: end the connections. Those at their other ends have been told before."""
        self._link.join()

    def _broke(self, rank: int, why: str) -> None:
        """On the thread of a connection."""
        with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._broken, rank, why)

    def _broken(self, rank: int, why: str) -> None:
        if not self._is_closed:
            _LOG.debug("rank %d: a connection for %s with rank %d ended: %s", self._rank, self._purpose, rank, why)
            self._suspect(rank)
