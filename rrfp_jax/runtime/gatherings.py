"""Gatherings: every rank brings plain data, and rank 0, or everybody, gets what all have brought.

They travel along the control tree (:mod:`rrfp_jax.tree`). A rank waits for what its children bring, puts its own beside
and passes all of it on as bytes that it never looks into; rank 0 sends the answer down the same way, packed once. So a
rank sends and receives one message per tree neighbour and direction, whatever the size of the run, and only the thread
that asked for the gathering unpacks anything. A gathering is complete on a rank when the answer is there, so none
returns before all ranks have come.
"""

import logging
import struct
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.cluster.wire import field, pack_plain, unpack_plain
from rrfp_jax.tree import children, parent
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_TOPIC = "gather"
_SPEAK_AFTER_S = 5.0
"""Rank 0 says for whom it waits that long."""
_ENTRY = struct.Struct("<IQ")
"""A rank, and how many bytes follow that it has brought."""
_MAX_BYTES = 1 << 30
"""The most that one rank may bring."""


class PeerFailed(ConnectionError):
    """A gathering cannot be completed: a rank is lost or has given up, or the time is over."""


class Network(Protocol):
    """What gatherings, outcomes and clocks need of a :class:`~rrfp_jax.cluster.PeerNetwork`."""

    rank: int
    num_ranks: int

    def subscribe(self, topic: str, handler: Any) -> None: ...
    def subscribe_packed(self, topic: bytes, handler: Any) -> None: ...
    def send(self, rank: int, topic: str, header: Any, frames: Any = ()) -> None: ...
    def send_arrays(self, rank: int, topic: bytes, header: bytes, frames: Any) -> None: ...
    def call_soon(self, call: Any) -> None: ...


class Gatherings:
    """The gatherings of one rank, told apart by names that are the same on all ranks and new for every gathering."""

    def __init__(self, network: Network) -> None:
        self._network, self.rank = network, network.rank
        self._parent, self._children = parent(self.rank), children(self.rank, network.num_ranks)
        self._known: dict[str, Gathering] = {}
        self._failure: str | None = None
        network.subscribe(_TOPIC, self._receive)

    # -- called from any thread but the loop's -----------------------------------------------------------------------

    def gather(
        self, name: str, data: Any = None, *, to_all: bool = True, deadline_s: float | None = None
    ) -> dict[int, Any]:
        """Bring plain data and wait until every rank has; returns everybody's, by rank.

        Args:
            name: new for every gathering, and the same on all ranks.
            to_all: False returns everybody's data to rank 0 alone, and to all others what rank 0 has brought.
            deadline_s: None waits as long as nobody is lost; give one where somebody may never come.

        Raises PeerFailed where a rank is lost before, or does not come within the deadline.
        """
        gathering = self.bring(name, data, to_all=to_all)
        if (deadline_s is None or deadline_s > _SPEAK_AFTER_S) and not wait_for(gathering.complete, _SPEAK_AFTER_S):
            if not self.rank:
                _LOG.info("waiting for %s (%s)", self._missing(gathering), name)
            wait_for(gathering.complete, None if deadline_s is None else deadline_s - _SPEAK_AFTER_S)
        else:
            wait_for(gathering.complete, deadline_s)
        if gathering.answer is None:
            gathering.is_given_up = True
            late = f"{name}: {self._missing(gathering)} did not come within {deadline_s} s"
            raise PeerFailed(self._failure or late)
        return self.result(name)

    def bring(self, name: str, data: Any = None, *, to_all: bool = True) -> "Gathering":
        """The first half of :meth:`gather`: returns at once."""
        packed = pack_plain(data, _MAX_BYTES)
        gathering = self._known.setdefault(name, Gathering())  # atomic: the loop may be first
        if self._failure is not None:
            gathering.complete.set()
        own = _ENTRY.pack(self.rank, len(packed)) + packed
        self._network.call_soon(lambda: self._bring(name, self.rank, own, to_all=to_all))
        return gathering

    def result(self, name: str) -> dict[int, Any]:
        """The second half: what :meth:`gather` returns, once it is complete."""
        answer = self._known.pop(name).answer
        assert answer is not None
        return {rank: unpack_plain(packed, _MAX_BYTES) for rank, packed in _entries(answer)}

    # -- on the event loop -------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """No gathering that is not complete can be completed any more."""
        self._failure = why
        for gathering in list(self._known.values()):
            gathering.complete.set()

    def _receive(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        name = field(header, "name", str)
        if len(frames) != 1:
            raise MalformedMessage(f"a gathering's message has {len(frames)} frames")
        if sender == self._parent:
            self._answer(name, frames[0])
        elif sender in self._children:
            self._bring(name, sender, frames[0])
        else:
            raise MalformedMessage(f"rank {sender} is no neighbour of rank {self.rank} in the control tree")

    def _bring(self, name: str, who: int, packed: bytes | memoryview, *, to_all: bool = True) -> None:
        gathering = self._known.setdefault(name, Gathering())
        gathering.brought[who] = packed
        if who == self.rank:
            gathering.to_all = to_all
        if len(gathering.brought) <= len(self._children):
            return
        whole = b"".join(gathering.brought.values())
        if self._parent is not None:
            self._network.send(self._parent, _TOPIC, {"name": name}, [whole])
        else:
            self._answer(name, whole, whole if gathering.to_all else gathering.brought[0])
        gathering.brought.clear()

    def _answer(self, name: str, answer: bytes | memoryview, passed_on: bytes | memoryview | None = None) -> None:
        for child in self._children:
            self._network.send(child, _TOPIC, {"name": name}, [answer if passed_on is None else passed_on])
        gathering = self._known.setdefault(name, Gathering())
        gathering.answer = answer
        gathering.complete.set()
        if gathering.is_given_up:
            del self._known[name]

    def _missing(self, gathering: "Gathering") -> str:
        """Who has not come, as far as it can be known here."""
        below = [child for child in self._children if child not in gathering.brought]
        if not below or not gathering.brought:
            return "others"
        is_leaf = [not children(child, self._network.num_ranks) for child in below]
        names = [f"rank {c}" if leaf else f"rank {c} or one below it" for c, leaf in zip(below, is_leaf, strict=True)]
        return " and ".join(names)


class Gathering:
    """What has come of one gathering."""

    def __init__(self) -> None:
        self.brought: dict[int, bytes | memoryview] = {}
        """By who of this rank and its children has brought it; emptied when it is passed on."""
        self.to_all = True
        self.answer: bytes | memoryview | None = None
        self.complete = threading.Event()
        self.is_given_up = False
        """Whoever asked for it does not wait any more."""


def _entries(packed: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """The ranks' own data, ascending by rank."""
    view, at, found = memoryview(packed), 0, []
    while at < len(view):
        rank, size = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        found.append((rank, bytes(view[at : at + size])))
        at += size
    return iter(sorted(found))
