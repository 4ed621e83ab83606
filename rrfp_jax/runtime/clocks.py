"""The offset of this process's clock from rank 0's, measured along the control tree and again from time to time.

A rank asks its parent for the time several times and believes the answer that came back soonest, to half a round trip.
To that it adds the offset of the parent's own clock from rank 0's; the parent holds its first answer back until it
knows that. Clocks of hosts drift by seconds a day, so an offset measured at the start is worth little later on.

The shortest of these round trips also tells how long a control message takes. A parent measures it too, from its answer
to the child's next question, so that every rank of several knows one.
"""

import threading
from collections.abc import Callable
from typing import Any

from rrfp_jax.cluster import PeerNetwork
from rrfp_jax.cluster.wire import field, pack_plain
from rrfp_jax.layout import parent
from rrfp_jax.runtime.tree_collectives import PeerFailed
from rrfp_jax.waiting import wait_for

_TOPIC = "clock"
_NUM_PINGS = 8
_FRESH_S = 60.0


class Clocks:
    """Compares this rank's clock with rank 0's; all ranks call :meth:`synchronise` equally often."""

    def __init__(self, network: PeerNetwork, clock: Callable[[], float]) -> None:
        self._network, self._clock = network, clock
        self._parent = parent(network.rank)
        self.offset_s = 0.0
        """Seconds to add to this process's clock to have rank 0's."""
        self._round = self._num_asked = 0
        """Number of comparisons that were completed here, and that were begun."""
        self.round_trip_s: float | None = None
        """Shortest time from a message of this rank to the answer; None: nothing was measured yet."""
        self._answered: dict[int, tuple[int, int, float]] = {}
        """Latest answer to each child: round, number and time."""
        self._measured_s = clock()
        self._pings: list[tuple[float, float]] = []
        self._unanswered: list[tuple[int, dict[str, Any]]] = []
        self._done = threading.Event()
        self._failure: str | None = None
        network.subscribe(_TOPIC, self._receive)

    def synchronise(self, *, deadline_s: float | None = None) -> None:
        """Measures the offset; on any thread but the loop's. Raises PeerFailed where the parent does not answer."""
        self._done.clear()
        self._network.call_soon(self._begin)
        if not wait_for(self._done, deadline_s) or self._failure is not None:
            why = self._failure or f"rank {self._parent} did not answer within {deadline_s:g} s"
            raise PeerFailed(f"rank {self._network.rank} could not compare its clock: {why}")

    # -- on the event loop -------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Ends all waits, since a rank is gone."""
        self._failure = why
        self._done.set()

    def refresh(self) -> None:
        """Measures the offset again, without waiting for it, where that was last done a minute ago or more."""
        is_known = self._round == self._num_asked > 0
        if self._parent is not None and is_known and self._clock() - self._measured_s > _FRESH_S:
            self._measured_s = self._clock()
            self._pings = []
            self._ask(1)

    def _begin(self) -> None:
        self._num_asked += 1
        self._pings = []
        if self._parent is None:
            self._know(0.0)
        else:
            self._ask(0)

    def _ask(self, number: int) -> None:
        assert self._parent is not None
        header = {"round": self._num_asked, "number": number, "sent_s": self._clock()}
        self._network.send_arrays(self._parent, _TOPIC.encode(), pack_plain(header), ())

    def _receive(self, sender: int, header: dict[str, Any], _: list[memoryview]) -> None:
        if sender == self._parent:
            self._hear(header)
        elif field(header, "number", int) == 0 and field(header, "round", int) > self._round:
            self._unanswered.append((sender, header))
        else:
            self._reply(sender, header)

    def _reply(self, child: int, header: dict[str, Any]) -> None:
        place, now_s = (field(header, "round", int), field(header, "number", int)), self._clock()
        *before, answered_s = self._answered.get(child, (0, 0, now_s))
        if before == [place[0], place[1] - 1]:
            self._note_trip(now_s - answered_s)
        self._answered[child] = (*place, now_s)
        answer = {**header, "clock_s": self._clock(), "offset_s": self.offset_s}
        self._network.send_arrays(child, _TOPIC.encode(), pack_plain(answer), ())

    def _hear(self, header: dict[str, Any]) -> None:
        now_s, number = self._clock(), field(header, "number", int)
        if field(header, "round", int) != self._num_asked:
            return  # A refresh asked this, before all ranks began to measure again.
        sent_s, theirs_s, offset_s = (field(header, name, float) for name in ("sent_s", "clock_s", "offset_s"))
        if number:  # The first answer may have been held back.
            self._pings.append((now_s - sent_s, theirs_s - (sent_s + now_s) / 2))
            self._note_trip(now_s - sent_s)
        if number < _NUM_PINGS:
            self._ask(number + 1)
        else:
            self._know(min(self._pings)[1] + offset_s)

    def _note_trip(self, trip_s: float) -> None:
        self.round_trip_s = trip_s if self.round_trip_s is None else min(self.round_trip_s, trip_s)

    def _know(self, offset_s: float) -> None:
        self.offset_s, self._round, self._measured_s = offset_s, self._num_asked, self._clock()
        held, self._unanswered = self._unanswered, []
        for sender, header in held:
            self._reply(sender, header)
        self._done.set()
