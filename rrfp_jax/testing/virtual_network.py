"""A network among thousands of ranks in one process: no sockets, no threads, every message counted.

For the parts of the control plane, which only need to send, to subscribe and to be called on "the loop". Nothing
happens until :meth:`VirtualNetwork.run`, which delivers messages and makes calls in the order in which they were sent,
in virtual time.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rrfp_jax.cluster.topics import Handler, PackedHandler, unpacked
from rrfp_jax.cluster.wire import pack_plain


@dataclass
class Counts:
    """What one rank has done."""

    num_sent: int = 0
    num_received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    neighbours: set[int] = field(default_factory=set)
    """The ranks that it has sent to or heard from."""
    handlers_s: float = 0.0
    """Processor time of its handlers, those of its own calls included."""


class VirtualNetwork:
    """All ranks of a run; ``ranks[r]`` is what rank r has of it.

    Args:
        connections: whom each rank may send to; None: all others.
    """

    def __init__(self, num_ranks: int, connections: Callable[[int], Iterable[int]] | None = None) -> None:
        self.queue: deque[tuple[VirtualRank, Callable[[], None]]] = deque()
        self.timers: list[tuple[float, int, VirtualRank, Callable[[], None]]] = []
        self.now_s = 0.0
        self.numbers = count()
        self.before: Callable[[VirtualRank], None] = lambda rank: None
        """Called before each call of a rank, whose time does not count it."""
        allowed = connections or (lambda rank: set(range(num_ranks)) - {rank})
        self.ranks = [VirtualRank(self, rank, num_ranks, frozenset(allowed(rank))) for rank in range(num_ranks)]

    def run(self) -> None:
        """Deliver messages and make calls until none are left, those that are due later last."""
        clock = time.process_time
        while self.queue or self.timers:
            if not self.queue:
                self.now_s, _, rank, call = heapq.heappop(self.timers)
            else:
                rank, call = self.queue.popleft()
            self.before(rank)
            start_s = clock()
            call()
            rank.counts.handlers_s += clock() - start_s

    def reset_counts(self) -> None:
        """Count from now on."""
        for rank in self.ranks:
            rank.counts = Counts()


class VirtualRank:
    """One rank's network; the methods are those of :class:`rrfp_jax.cluster.PeerNetwork` and its loop."""

    def __init__(self, network: VirtualNetwork, rank: int, num_ranks: int, connections: frozenset[int]) -> None:
        self._network, self.rank, self.num_ranks, self.connections = network, rank, num_ranks, connections
        self._handlers: dict[bytes, PackedHandler] = {}
        self.counts = Counts()

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Give the messages of a topic to ``handler``."""
        self.subscribe_packed(topic.encode(), unpacked(handler))

    def subscribe_packed(self, topic: bytes, handler: PackedHandler) -> None:
        """The same, with the header as it was sent."""
        self._handlers[topic] = handler

    def unsubscribe(self, topic: str | bytes) -> None:
        """Nobody takes the messages of a topic any more."""
        del self._handlers[topic.encode() if isinstance(topic, str) else topic]

    def call_soon(self, call: Callable[[], None]) -> None:
        """Make a call in its turn."""
        self._network.queue.append((self, call))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Make a call when nothing is under way any more that comes before it."""
        network = self._network
        heapq.heappush(network.timers, (network.now_s + delay_s, next(network.numbers), self, call))

    def send(self, rank: int, topic: str, header: Mapping[str, Any], frames: Sequence[Any] = ()) -> None:
        """Send a message; its header is packed as it would be for a socket."""
        self._send(rank, topic.encode(), pack_plain(header), frames)

    def send_arrays(self, rank: int, topic: bytes, header: bytes, frames: Sequence[Any]) -> None:
        """Send a message whose header is bytes of the sender's own making; here it keeps its place."""
        self._send(rank, topic, header, frames)

    def send_if_room(self, rank: int, topic: bytes, header: bytes) -> None:
        """Send a message of the sender's own making; there is always room here."""
        self._send(rank, topic, header, ())

    def _send(self, rank: int, topic: bytes, packed: bytes, frames: Sequence[Any]) -> None:
        if rank not in self.connections:
            raise ValueError(f"rank {self.rank} has no connection to rank {rank}")
        other, counts = self._network.ranks[rank], self.counts
        num_bytes = len(packed) + sum(memoryview(frame).nbytes for frame in frames)
        counts.num_sent += 1
        counts.sent_bytes += num_bytes
        counts.neighbours.add(rank)
        other.call_soon(lambda: other._receive(self.rank, topic, packed, [memoryview(f) for f in frames], num_bytes))

    def _receive(self, sender: int, topic: bytes, packed: bytes, frames: list[memoryview], num_bytes: int) -> None:
        counts = self.counts
        counts.num_received += 1
        counts.received_bytes += num_bytes
        counts.neighbours.add(sender)
        self._handlers[topic](sender, packed, frames)
