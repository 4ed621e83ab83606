"""The reason why a shape does not fit, and the nearest changes that make it fit, each worked out."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.order_memory import forecast_memory
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.candidates import largest_windows, plain_hint
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.records import PlanShape, Refused
from rrfp_jax.planner.search_space import Point, SearchSpace, points_of
from rrfp_jax.planner.sites import costs_of


class Refusals:
    """Looks for shapes that fit by the forecast of memory alone."""

    def __init__(self, book: CostBook, space: SearchSpace, memory_bytes: int | None) -> None:
        self.book, self.space, self.memory_bytes = book, space, memory_bytes

    def refused(self, shape: PlanShape) -> Refused:
        """Returns why a shape does not fit, and the nearest changes with which it does."""
        assert self.memory_bytes is not None
        cut = self._leanest(next(points_of(shape, self.book, self.space)))
        peaks = _peaks(cut)
        needed = max(peaks)
        if needed <= self.memory_bytes:
            windows = largest_windows(cut, self.memory_bytes, self.space.window)
            reason = f"no order that is allowed fits {format_bytes(self.memory_bytes)}"
            change = "" if windows is None else f"ready with window {_list(windows)}, as hint {plain_hint(cut)}"
            return Refused(shape=shape, reason=reason, change=change)
        reason = (
            f"stage {peaks.index(needed)} needs {format_bytes(needed)} of {format_bytes(self.memory_bytes)} with one "
            "microbatch in flight"
        )
        found = [*self._other_shapes(shape), f"{format_bytes(needed + needed // 100)} per device"]
        return Refused(shape=shape, reason=reason, change=", or ".join(found))

    def _leanest(self, point: Point) -> CutModel:
        """Returns the cut for the least limit for which there is one, found by halving."""
        costs, shape, stages = costs_of(point, self.book), point.shape, point.shape.num_stages

        def cut_within(limit: int | None) -> CutModel:
            memory = MemoryBudget(limits=(limit,) * stages, footprints=(point.chunks,) * stages)
            return best_cut(
                costs, point.placement, shape.num_microbatches, split=False, memory=memory, replicas=shape.data
            )

        cut = cut_within(None)
        low, high = 0, max(_peaks(cut))
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            try:
                cut = cut_within(middle)
                high = min(middle, max(_peaks(cut)))
            except ValueError:
                low = middle
        return cut

    def _other_shapes(self, shape: PlanShape) -> Iterator[str]:
        """Yields the nearest shape of each kind that fits, in words."""
        for in_words, others in self._neighbours(shape):
            for other in others:
                windows = self._windows(other)
                if windows is not None:
                    yield in_words(other) + f" (window {_list(windows)})"
                    break

    def _windows(self, shape: PlanShape) -> tuple[int, ...] | None:
        """Returns the largest windows on the leanest cut; None where it does not fit."""
        assert self.memory_bytes is not None
        point = next(points_of(shape, self.book, self.space), None)
        if point is None:
            return None
        cut = self._leanest(point)
        return (
            largest_windows(cut, self.memory_bytes, self.space.window)
            if max(_peaks(cut)) <= self.memory_bytes
            else None
        )

    def _neighbours(self, shape: PlanShape) -> Iterator[tuple[Callable[[PlanShape], str], list[PlanShape]]]:
        """Yields shapes that differ in one way, the nearest first, and a function that says how."""
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
    """Returns the bytes of each stage with one microbatch in flight."""
    order = Ordering(hint=plain_hint(cut), window=1).resolve(cut.placement, cut.graph)
    return [each.peak for each in forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)]


def _list(windows: tuple[int, ...]) -> str:
    return str(windows[0]) if len(set(windows)) == 1 else ",".join(map(str, windows))
