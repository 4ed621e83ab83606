"""The outcomes of steps on their way to rank 0: sums, merged along the control tree.

When the units of a rank have ended a step, and its children have told what they and those below them have to tell, it
passes one message on to its parent. That message is of constant size, but for the peak memory of every unit, one number
each, of which no sum says enough; these travel as bytes that only rank 0 takes apart. Whole timelines stay where they
were recorded, see :meth:`rrfp_jax.runtime.process.Process.whole_timeline`.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.runtime.gatherings import Network
from rrfp_jax.schedules.timeline import IdleReason, StepSums
from rrfp_jax.tree import children, parent

_TOPIC = b"outcome"
_REASONS = tuple(IdleReason)
_HEADER = struct.Struct(f"<QQI4dI{len(_REASONS)}d")
"""The pipeline's epoch, the step, and its sums: last the seconds of idleness, by reason."""
_PEAK = struct.Struct("<IQ")
"""Twice a unit's number, and the most bytes that it held on its devices; or one more, and those in host memory, where
there were any."""


@dataclass(frozen=True)
class Summary:
    """What a step was like on some units."""

    sums: StepSums
    peaks: bytes | memoryview

    def peak_memory_bytes(self) -> dict[int, int]:
        """The most bytes that each unit held on its devices during the step, ascending by unit."""
        return {number // 2: peak for number, peak in sorted(_PEAK.iter_unpack(self.peaks)) if not number % 2}

    def peak_host_bytes(self) -> dict[int, int]:
        """And in host memory."""
        peaks = dict(_PEAK.iter_unpack(self.peaks))
        return {number // 2: peaks.get(number + 1, 0) for number in sorted(peaks) if not number % 2}


class Outcomes:
    """The outcomes that pass through one rank; everything happens on the event loop.

    Steps of different pipelines, one after another in the same process, are told apart by their epoch.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._parent, self._children = parent(network.rank), children(network.rank, network.num_ranks)
        self._epoch = 0
        self._ended: Callable[[int, Summary], None] = lambda step, summary: None
        self._known: dict[tuple[int, int], list[Summary]] = {}
        network.subscribe_packed(_TOPIC, self._receive)

    def begin(self, ended: Callable[[int, Summary], None]) -> None:
        """Another pipeline starts, on all ranks; ``ended`` is called on rank 0 with every step that all have ended."""
        self._epoch += 1
        self._ended = ended
        self._known = {key: told for key, told in self._known.items() if key[0] >= self._epoch}

    def add(self, step: int, sums: StepSums, peaks_of_units: Mapping[int, tuple[int, int]]) -> None:
        """The units of this rank have ended a step; given are the peaks of those of which it is the first rank, on
        their devices and in host memory."""
        told = []
        for unit, (on_devices, in_host_memory) in peaks_of_units.items():
            told.append(_PEAK.pack(2 * unit, on_devices))
            if in_host_memory:
                told.append(_PEAK.pack(2 * unit + 1, in_host_memory))
        self._add(self._epoch, step, Summary(sums, b"".join(told)))

    def _receive(self, child: int, header: bytes, frames: list[memoryview]) -> None:
        is_whole = len(header) == _HEADER.size and len(frames) == 1 and not frames[0].nbytes % _PEAK.size
        if child not in self._children or not is_whole:
            raise MalformedMessage(f"an outcome that rank {child} cannot have sent")
        epoch, step, sums = _unpack(header)
        if epoch >= self._epoch:
            self._add(epoch, step, Summary(sums, frames[0]))

    def _add(self, epoch: int, step: int, summary: Summary) -> None:
        told = self._known.setdefault((epoch, step), [])
        told.append(summary)
        if len(told) <= len(self._children):
            return
        del self._known[epoch, step]
        first, *others = (each.sums for each in told)
        sums, peaks = first.merged(*others), b"".join(each.peaks for each in told)
        if self._parent is None:
            self._ended(step, Summary(sums, peaks))
        else:
            self._network.send_arrays(self._parent, _TOPIC, _pack(epoch, step, sums), [peaks])


def _pack(epoch: int, step: int, sums: StepSums) -> bytes:
    idle_s = (sums.idle_s.get(reason, 0.0) for reason in _REASONS)
    seconds = sums.start_s, sums.end_s, sums.cost_s, sums.work_s
    return _HEADER.pack(epoch, step, sums.num_stages, *seconds, sums.looking_ahead, *idle_s)


def _unpack(header: bytes) -> tuple[int, int, StepSums]:
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
    return epoch, step, sums
