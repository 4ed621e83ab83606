"""What it would take to run a shape that does not fit: the nearest changes, each worked out."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rrfp_jax.arbitration import Ordering
from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.order_memory import forecast_memory
from rrfp_jax.planning.cuts import Room, best_cut
from rrfp_jax.planning.search.candidates import largest_windows
from rrfp_jax.planning.search.cutting import costs_of
from rrfp_jax.planning.search.points import Point, points_of
from rrfp_jax.planning.search.records import Refused, Shape
from rrfp_jax.planning.search.wishes import Wishes

_Neighbours = tuple[Callable[[Shape], str], list[Shape]]
"""Shapes that differ in one way, the nearest first, and how to say it."""


class Changes:
    """Looks for what fits by the forecast of memory alone."""

    def __init__(self, book: CostBook, wishes: Wishes, memory_bytes: int | None) -> None:
        self.book, self.wishes, self.memory_bytes = book, wishes, memory_bytes

    def refused(self, shape: Shape) -> Refused:
        """Why a shape does not fit, and the nearest changes with which it does."""
        cut, stage, needed = self._least(shape)
        assert self.memory_bytes is not None
        if needed <= self.memory_bytes:
            windows = largest_windows(cut, self.memory_bytes, self.wishes.window)
            reason = f"no order that is allowed fits {format_bytes(self.memory_bytes)}"
            change = "" if windows is None else f"ready with window {_list(windows)}, as hint {_hint(cut)}"
            return Refused(shape=shape, reason=reason, change=change)
        reason = (
            f"stage {stage} needs {format_bytes(needed)} of {format_bytes(self.memory_bytes)} with one microbatch in "
            "flight"
        )
        found = [*self._other_shapes(shape), f"{format_bytes(needed + needed // 100)} per device"]
        return Refused(shape=shape, reason=reason, change=", or ".join(found))

    def _least(self, shape: Shape) -> tuple[CutModel, int, int]:
        """The cut that takes least memory with one microbatch in flight, its fullest stage, and what that takes."""
        cut = self._leanest(next(points_of(shape, self.book, self.wishes)))
        peaks = _peaks(cut)
        return cut, peaks.index(max(peaks)), max(peaks)

    def _leanest(self, point: Point) -> CutModel:
        """The cut for the least limit for which there is one, found by halving."""
        costs, shape, stages = costs_of(point, self.book), point.shape, point.shape.num_stages
        m, footprints = shape.num_microbatches, (point.chunks,) * stages
        cut = best_cut(costs, point.placement, m, split=False, replicas=shape.data)
        low, high = 0, max(_peaks(cut))
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            room = Room(limits=(middle,) * stages, footprints=footprints)
            try:
                cut = best_cut(costs, point.placement, m, split=False, room=room, replicas=shape.data)
                high = min(middle, max(_peaks(cut)))
            except ValueError:
                low = middle
        return cut

    def _other_shapes(self, shape: Shape) -> Iterator[str]:
        """The nearest of each kind that fits."""
        for words, others in self._neighbours(shape):
            for other in others:
                windows = self._windows(other)
                if windows is not None:
                    yield words(other) + f" (window {_list(windows)})"
                    break

    def _windows(self, shape: Shape) -> tuple[int, ...] | None:
        """The largest windows on the leanest cut."""
        if not any(True for _ in points_of(shape, self.book, self.wishes)):
            return None
        cut, _, needed = self._least(shape)
        assert self.memory_bytes is not None
        return largest_windows(cut, self.memory_bytes, self.wishes.window) if needed <= self.memory_bytes else None

    def _neighbours(self, shape: Shape) -> Iterator[_Neighbours]:
        same = [entry for entry in self.book.entries if entry.tensor == shape.tensor]
        remats = [
            replace(shape, remat=entry.remat)
            for entry in same
            if entry.microbatch_size == shape.microbatch_size and entry.remat != shape.remat
        ]
        yield (lambda other: f"remat {other.remat}"), remats
        samples = shape.num_microbatches * shape.microbatch_size
        sizes = [
            replace(shape, microbatch_size=size, num_microbatches=samples // size)
            for size in sorted({entry.microbatch_size for entry in same if entry.remat == shape.remat}, reverse=True)
            if size < shape.microbatch_size and samples % size == 0
        ]
        yield (lambda other: f"microbatches of {other.microbatch_size} samples"), sizes
        units = shape.num_stages * shape.data
        stages = [
            replace(shape, num_stages=number, data=units // number, num_microbatches=count)
            for number in range(shape.num_stages + 1, units + 1)
            if units % number == 0
            for count in [shape.num_microbatches * shape.data // (units // number)]
            if count
        ]
        yield (lambda other: f"{other.num_stages} stages x {other.data} replicas"), stages


def _peaks(cut: CutModel) -> list[int]:
    """Of each stage with one microbatch in flight."""
    order = Ordering(hint=_hint(cut), window=1).resolve(cut.placement, cut.graph)
    return [each.peak for each in forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)]


def _hint(cut: CutModel) -> str:
    return "bfw" if cut.split else "bf"


def _list(windows: tuple[int, ...]) -> str:
    return str(windows[0]) if len(set(windows)) == 1 else ",".join(map(str, windows))
