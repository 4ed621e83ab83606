"""Arrays between ranks, over several connections each: what a channel takes for a link.

Messages to a rank arrive in order. Their parts travel over whichever of its connections is free, so sealing them takes
several cores. A rank's connections are made when it is known that arrays go there, over the proven network
(:mod:`~rrfp_jax.network.lane_meeting`); what is sent before waits.
"""

import os
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from rrfp_jax.network.assembly import CLEAR_PART_BYTES, PART_BYTES, Assembly, cut
from rrfp_jax.network.buffers import BufferPool
from rrfp_jax.network.lane import Lane, Parts, Proven
from rrfp_jax.network.link import Message, listen

_END_S = 2.0


class _Bundle:
    """The connections to one rank."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.parts: Parts = SimpleQueue()
        self.lanes: list[Lane] = []
        self.num_sent = 0

    def finish(self) -> None:
        """Have the threads end that send, when everything has been sent."""
        for _ in self.lanes:
            self.parts.put(None)


class LaneLink:
    """Carries messages, each a head and frames, in order per rank. Used on the event loop, but for what says otherwise.

    Args:
        encrypts: whether frames are sealed; heads always are.
        keep_bytes: how much memory is kept for what arrives next.
        broken: called on the threads of connections, perhaps several times, where one to a rank has ended.
    """

    def __init__(self, rank: int, *, encrypts: bool, keep_bytes: int, broken: Callable[[int, str], None]) -> None:
        self.rank, self._encrypts, self._broken = rank, encrypts, broken
        self._part_bytes = PART_BYTES if encrypts else CLEAR_PART_BYTES
        self._pool = BufferPool(keep_bytes)
        self._bundles: dict[int, _Bundle] = {}
        self._ended: list[_Bundle] = []
        self._arrived: deque[Message] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hush: Callable[[], None] | None = None

    is_complete = True
    """Nobody has to be welcomed."""

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        """Have ``read`` called on the loop where messages may have arrived."""
        self._hush = listen(loop, self._descriptor, read)

    def welcome(self) -> list[int]:
        """Nobody greets here."""
        return []

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002 - :meth:`open` brings the connections
        """Messages to a rank may be sent from now on; they travel when it is connected."""
        self._bundles[rank] = _Bundle(Assembly(self._pool, partial(self._complete, rank)))

    def open(self, rank: int, connections: Sequence[Proven]) -> None:
        """Begin to exchange messages with a rank over these connections."""
        bundle = self._bundles.get(rank)
        if bundle is None:  # it was lost meanwhile
            for proven in connections:
                proven.connection.close()
            return
        for number, proven in enumerate(connections):
            lane = Lane(
                f"{rank}-{number}",
                proven,
                bundle.parts,
                bundle.assembly,
                encrypts=self._encrypts,
                broken=partial(self._broken, rank),
            )
            bundle.lanes.append(lane)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Never blocks. What cannot be sent since the rank is gone is discarded: its loss is reported anyway."""
        bundle = self._bundles.get(rank)
        if bundle is None:
            return
        for part in cut(bundle.num_sent, head, frames, self._part_bytes):
            bundle.parts.put(part)
        bundle.num_sent += 1

    def receive(self) -> Message | None:
        """The next message, if one has arrived."""
        if not self._arrived:
            with suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
        # what has come since the descriptor was read has made it readable again
        return self._arrived.popleft() if self._arrived else None

    def disconnect(self, rank: int) -> None:
        """Send nothing more to a rank, and expect nothing."""
        if bundle := self._bundles.pop(rank, None):
            for lane in bundle.lanes:
                lane.end()
            bundle.finish()
            self._ended.append(bundle)

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - :meth:`join` waits
        """Send nothing that is new; connections stand until :meth:`join`."""
        if self._hush is not None:
            self._hush()
        for bundle in self._bundles.values():
            bundle.finish()

    def join(self) -> None:
        """After :meth:`close`, on any thread: end all connections and threads."""
        bundles = [*self._bundles.values(), *self._ended]
        lanes = [lane for bundle in bundles for lane in bundle.lanes]
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join(_END_S)
        os.close(self._descriptor)

    def _complete(self, rank: int, frames: list[memoryview]) -> None:
        """On the thread of a connection."""
        self._arrived.append((rank, frames))
        os.eventfd_write(self._descriptor, 1)
