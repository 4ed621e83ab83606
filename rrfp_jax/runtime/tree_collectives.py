"""Collectives of plain data along the control tree (:mod:`rrfp_jax.layout`): the all-gather, and the step statistics.

In both a rank sends and receives one message per tree neighbour and direction, whatever the size of the run.

All-gather: every rank brings plain data, and rank 0, or every rank, gets the data of all. A rank waits for its
children's data, puts its own beside and passes all of it on as bytes that it never looks into. Rank 0 sends the answer
down the same way, packed once, and only the thread that asked for it unpacks anything. An all-gather is complete on a
rank when the answer is there, so none returns before all ranks have come.

Step statistics: sums that merge on their way to rank 0. When the units of a rank have ended a step, and its children's
statistics are here, it passes one message on to its parent. That message is of constant size, but for the peak memory
of every unit, one number each, of which no sum says enough; these travel as bytes that only rank 0 takes apart. Whole
timelines stay where they were recorded, see :meth:`rrfp_jax.runtime.process.Process.whole_timeline`.
"""

import logging
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.wire import field, pack_plain, unpack_plain
from rrfp_jax.layout import ControlTree, children, parent, whole_tree
from rrfp_jax.schedules.timeline import IdleReason, StepSums
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_GATHER, _STATISTICS = "gather", "outcome"
_SPEAK_AFTER_S = 5.0
"""Seconds after which rank 0 logs the ranks that it waits for."""
_ENTRY = struct.Struct("<IQ")
"""A rank, and the number of bytes of its data, which follow."""
_MAX_BYTES = 1 << 30
"""Most bytes that one rank may bring."""
_REASONS = tuple(IdleReason)
_HEADER = struct.Struct(f"<QQI4dI{len(_REASONS)}d")
"""The pipeline's epoch, the step, and its sums: last the seconds of idleness, by reason."""
_PEAK = struct.Struct("<IQ")
"""Twice a unit's number, and the most bytes that it held on its devices; or one more, and the most bytes in host
memory, where there were any."""


class PeerFailed(ConnectionError):
    """An all-gather cannot be completed: a rank is lost or has given up, or the time is over."""


class _Gathering:
    """One all-gather under way."""

    def __init__(self) -> None:
        self.brought: dict[int, bytes | memoryview] = {}
        """Contributions by contributing rank (this rank or a child); cleared once forwarded to the parent."""
        self.to_all = True
        self.answer: bytes | memoryview | None = None
        self.complete = threading.Event()
        self.is_given_up = False
        """Whether the thread that asked for it waits no more."""


class TreeAllGather:
    """The all-gathers of one rank, told apart by names that are alike on all ranks and new for every all-gather."""

    def __init__(self, network: PeerNetwork) -> None:
        self._network, self.rank = network, network.rank
        self._parent, self._children = parent(self.rank), children(self.rank, network.num_ranks)
        self._known: dict[str, _Gathering] = {}
        self._failure: str | None = None
        network.subscribe(_GATHER, self._receive)

    # -- called from any thread but the loop's -----------------------------------------------------------------------

    def gather(
        self, name: str, data: Any = None, *, to_all: bool = True, deadline_s: float | None = None
    ) -> dict[int, Any]:
        """Brings plain data, blocks until every rank has, and returns the data of all, by rank.

        Args:
            name: new for every all-gather, and the same on all ranks.
            to_all: False returns the data of all to rank 0 alone, and rank 0's data to all others.
            deadline_s: None waits as long as nobody is lost; give one where somebody may never come.

        Raises PeerFailed where a rank is lost before, or does not come within the deadline.
        """
        gathering = self.bring(name, data, to_all=to_all)
        first_s = _SPEAK_AFTER_S if deadline_s is None else min(deadline_s, _SPEAK_AFTER_S)
        if not wait_for(gathering.complete, first_s) and first_s != deadline_s:
            if not self.rank:
                _LOG.info("waiting for %s (%s)", self._missing(gathering), name)
            wait_for(gathering.complete, None if deadline_s is None else deadline_s - first_s)
        if gathering.answer is None:
            gathering.is_given_up = True
            late = f"{name}: {self._missing(gathering)} did not come within {deadline_s} s"
            raise PeerFailed(self._failure or late)
        return self.result(name)

    def bring(self, name: str, data: Any = None, *, to_all: bool = True) -> _Gathering:
        """Does the first half of :meth:`gather`, and returns at once."""
        packed = pack_plain(data, _MAX_BYTES)
        gathering = self._known.setdefault(name, _Gathering())  # Atomic: the loop may be first.
        if self._failure is not None:
            gathering.complete.set()
        own = _ENTRY.pack(self.rank, len(packed)) + packed
        self._network.call_soon(lambda: self._bring(name, self.rank, own, to_all=to_all))
        return gathering

    def result(self, name: str) -> dict[int, Any]:
        """Does the second half, once it is complete: returns the result of :meth:`gather`."""
        answer = self._known.pop(name).answer
        assert answer is not None
        view, at, found = memoryview(answer), 0, {}
        while at < len(view):
            rank, size = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size
            found[rank] = unpack_plain(bytes(view[at : at + size]), _MAX_BYTES)
            at += size
        return dict(sorted(found.items()))

    # -- on the event loop -------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Ends every all-gather that is not complete, now and later: a rank is gone."""
        self._failure = why
        for gathering in list(self._known.values()):
            gathering.complete.set()

    def _receive(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        name = field(header, "name", str)
        if len(frames) != 1:
            raise MalformedMessage(f"a gathering's message has {len(frames)} frames")
        if sender == self._parent:
            self._answer(name, frames[0], frames[0])
        elif sender in self._children:
            self._bring(name, sender, frames[0])
        else:
            raise MalformedMessage(f"rank {sender} is no neighbour of rank {self.rank} in the control tree")

    def _bring(self, name: str, rank: int, packed: bytes | memoryview, *, to_all: bool = True) -> None:
        gathering = self._known.setdefault(name, _Gathering())
        gathering.brought[rank] = packed
        if rank == self.rank:
            gathering.to_all = to_all
        if len(gathering.brought) <= len(self._children):
            return
        # All children have brought theirs: one message goes up, and nothing of it is kept here.
        whole = b"".join(gathering.brought.values())
        if self._parent is not None:
            self._network.send(self._parent, _GATHER, {"name": name}, [whole])
        else:
            self._answer(name, whole, whole if gathering.to_all else gathering.brought[0])
        gathering.brought.clear()

    def _answer(self, name: str, answer: bytes | memoryview, passed_on: bytes | memoryview) -> None:
        for child in self._children:
            self._network.send(child, _GATHER, {"name": name}, [passed_on])
        gathering = self._known.setdefault(name, _Gathering())
        gathering.answer = answer
        gathering.complete.set()
        if gathering.is_given_up:
            del self._known[name]

    def _missing(self, gathering: _Gathering) -> str:
        """Returns the names of the ranks that have not come, as far as they can be known here."""
        below = [child for child in self._children if child not in gathering.brought]
        if not below or not gathering.brought:
            return "others"
        is_leaf = [not children(child, self._network.num_ranks) for child in below]
        names = [f"rank {c}" if leaf else f"rank {c} or one below it" for c, leaf in zip(below, is_leaf, strict=True)]
        return " and ".join(names)


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of a step on some units."""

    sums: StepSums
    peaks: bytes | memoryview

    def peak_memory_bytes(self) -> dict[int, int]:
        """Returns the most bytes that each unit held on its devices during the step, ascending by unit."""
        return {number // 2: peak for number, peak in sorted(_PEAK.iter_unpack(self.peaks)) if not number % 2}

    def peak_host_bytes(self) -> dict[int, int]:
        """Returns the most bytes that operations of each unit held in host memory, ascending by unit."""
        peaks = dict(_PEAK.iter_unpack(self.peaks))
        return {number // 2: peaks.get(number + 1, 0) for number in sorted(peaks) if not number % 2}


class StatisticsReduction:
    """Merges the statistics of steps that pass through one rank; everything happens on the event loop.

    Steps of different pipelines, one after another in the same process, are told apart by their epoch.
    """

    def __init__(self, network: PeerNetwork) -> None:
        self._network = network
        self._tree = whole_tree(network.rank, network.num_ranks)
        self._epoch = 0
        self._ended: Callable[[int, StepStatistics], None] = lambda step, statistics: None
        self._known: dict[tuple[int, int], list[StepStatistics]] = {}
        self._listen()

    def begin(self, ended: Callable[[int, StepStatistics], None]) -> None:
        """Starts another pipeline, on all ranks; rank 0 calls ``ended`` with every step that all have ended."""
        self._epoch += 1
        self._ended = ended
        self._known = {key: known for key, known in self._known.items() if key[0] >= self._epoch}

    def follow(self, tree: ControlTree) -> None:
        """Goes by another tree in a new epoch, without the statistics that were on their way; before :meth:`begin`."""
        self._network.unsubscribe(self._topic)
        self._tree, self._known = tree, {}
        self._epoch = 0  # Not all ranks have started equally often: some come late.
        self._listen()

    def _listen(self) -> None:
        self._topic = self._network.in_epoch(_STATISTICS).encode()
        self._network.subscribe_packed(self._topic, self._receive)

    def add(self, step: int, sums: StepSums, peaks_of_units: Mapping[int, tuple[int, int]]) -> None:
        """Adds a step that the units of this rank have ended.

        ``peaks_of_units`` has the peaks of the units of which this is the first rank, on devices and in host memory.
        """
        peaks = []
        for unit, (on_devices, in_host_memory) in peaks_of_units.items():
            peaks.append(_PEAK.pack(2 * unit, on_devices))
            if in_host_memory:
                peaks.append(_PEAK.pack(2 * unit + 1, in_host_memory))
        self._add(self._epoch, step, StepStatistics(sums, b"".join(peaks)))

    def _receive(self, child: int, header: bytes, frames: list[memoryview]) -> None:
        is_whole = len(header) == _HEADER.size and len(frames) == 1 and not frames[0].nbytes % _PEAK.size
        if child not in self._tree.children or not is_whole:
            raise MalformedMessage(f"an outcome that rank {child} cannot have sent")
        epoch, step, num_stages, start_s, end_s, cost_s, work_s, looking_ahead, *idle_s = _HEADER.unpack(header)
        sums = StepSums(
            num_stages=num_stages,
            start_s=start_s,
            end_s=end_s,
            cost_s=cost_s,
            work_s=work_s,
            idle_s={reason: seconds for reason, seconds in zip(_REASONS, idle_s, strict=True) if seconds},
            looking_ahead=looking_ahead,
        )
        if epoch >= self._epoch:
            self._add(epoch, step, StepStatistics(sums, frames[0]))

    def _add(self, epoch: int, step: int, statistics: StepStatistics) -> None:
        known = self._known.setdefault((epoch, step), [])
        known.append(statistics)
        if len(known) <= len(self._tree.children):
            return
        del self._known[epoch, step]
        first, *others = (each.sums for each in known)
        sums, peaks = first.merged(*others), b"".join(each.peaks for each in known)
        if self._tree.parent is None:
            self._ended(step, StepStatistics(sums, peaks))
            return
        seconds = sums.start_s, sums.end_s, sums.cost_s, sums.work_s
        idle_s = (sums.idle_s.get(reason, 0.0) for reason in _REASONS)
        header = _HEADER.pack(epoch, step, sums.num_stages, *seconds, sums.looking_ahead, *idle_s)
        self._network.send_arrays(self._tree.parent, self._topic, header, [peaks])
