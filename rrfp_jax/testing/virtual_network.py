"""A network among thousands of ranks in one process: no sockets, no threads, every message counted.

It serves parts of the control plane, which only send, subscribe and are called on "the loop". Nothing happens until
:meth:`VirtualNetwork.run`, which delivers messages and makes calls in the order in which they were sent, in virtual
time.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rrfp_jax.cluster import Handler, PackedHandler
from rrfp_jax.cluster.wire import pack_plain, unpack_plain


@dataclass
class Counts:
    """Counts of one rank's messages and of its time."""

    num_sent: int = 0
    num_received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    neighbours: set[int] = field(default_factory=set)
    """The ranks that it has sent to or heard from."""
    handlers_s: float = 0.0
    """Processor time of the rank's handlers and of its own calls, in seconds."""


class VirtualNetwork:
    """The network of all ranks of a run; ``ranks[r]`` is the part of rank r.

    Args:
        connections: returns the ranks to which a rank may send; None: all others.
    """

    def __init__(self, num_ranks: int, connections: Callable[[int], Iterable[int]] | None = None) -> None:
        self.queue: deque[tuple[VirtualRank, Callable[[], None]]] = deque()
        self.timers: list[tuple[float, int, VirtualRank, Callable[[], None]]] = []
        self.now_s = 0.0
        self.numbers = count()
        self.before: Callable[[VirtualRank], None] = lambda rank: None
        """Called before each call of a rank, outside that rank's counted time."""
        allowed = connections or (lambda rank: set(range(num_ranks)) - {rank})
        self.ranks = [VirtualRank(self, rank, num_ranks, frozenset(allowed(rank))) for rank in range(num_ranks)]

    def run(self) -> None:
        """Delivers messages and makes calls until none are left. Calls that are due later come last."""
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
        """Sets all counts to zero."""
        for rank in self.ranks:
            rank.counts = Counts()


class VirtualRank:
    """One rank's network; the methods are those of :class:`rrfp_jax.cluster.PeerNetwork` and its loop."""

    def __init__(self, network: VirtualNetwork, rank: int, num_ranks: int, connections: frozenset[int]) -> None:
        self._network, self.rank, self.num_ranks, self.connections = network, rank, num_ranks, connections
        self._handlers: dict[bytes, PackedHandler] = {}
        self.counts = Counts()

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Gives the messages of a topic to ``handler``."""
        self.subscribe_packed(topic.encode(), lambda rank, packed, frames: handler(rank, unpack_plain(packed), frames))

    def subscribe_packed(self, topic: bytes, handler: PackedHandler) -> None:
        """Gives the messages of a topic to ``handler``, with the header as it was sent."""
        self._handlers[topic] = handler

    def unsubscribe(self, topic: str | bytes) -> None:
        """Removes the handler of a topic."""
        del self._handlers[topic.encode() if isinstance(topic, str) else topic]

    def in_epoch(self, topic: str) -> str:
        """Returns the topic, since all ranks live."""
        return topic

    def call_soon(self, call: Callable[[], None]) -> None:
        """Makes a call in its turn."""
        self._network.queue.append((self, call))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Makes a call once everything that comes before it is done."""
        network = self._network
        heapq.heappush(network.timers, (network.now_s + delay_s, next(network.numbers), self, call))

    def send(self, rank: int, topic: str, header: Mapping[str, Any], frames: Sequence[Any] = ()) -> None:
        """Sends a message, with its header packed as for a socket."""
        self._send(rank, topic.encode(), pack_plain(header), frames)

    def send_arrays(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any] = (),
        *,
        may_drop: bool = False,  # noqa: ARG002 - no message waits here
    ) -> None:
        """Sends a message whose header is the sender's own bytes; here it keeps its place."""
        self._send(rank, topic, header, frames)

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
