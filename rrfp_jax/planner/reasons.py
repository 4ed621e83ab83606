"""The reason why one choice lost to another, and why a shape does not fit with the nearest changes that make it fit.

Each is a sentence with its figures, and each change is worked out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import Judge, once_per_step_ms
from rrfp_jax.planner.records import PlanChoice, PlanShape, Point, Refused
from rrfp_jax.planner.search_space import SearchSpace, points_of
from rrfp_jax.planner.sites import TriedTable, costs_of, largest_windows, plain_hint

_WORDS = {
    "work": "work: an average stage works {0:.4g} ms, {1:.4g} ms in the one before",
    "recomputed": "recomputation: it takes {0:.4g} ms of each stage, {1:.4g} ms in the one before",
    "once": "sums of gradients and updates: they take {0:.4g} ms, {1:.4g} ms in the one before",
    "imbalance": "imbalance of the cut: the fullest stage works {0:.4g} ms more than an average one, {1:.4g} ms in the "
    "one before",
    "communication": "communication: messages make the step {0:.4g} ms longer, {1:.4g} ms in the one before",
    "bubble": "bubble: stages fill, drain and wait for {0:.4g} ms, {1:.4g} ms in the one before",
    "noise": "variability: it makes the step {0:.4g} ms longer, {1:.4g} ms in the one before",
}
"""A sentence for each part of a step."""


def step_parts_ms(one: PlanChoice, book: CostBook, judge: Judge, num_draws: int) -> dict[str, float]:
    """Returns the milliseconds of the parts of a step, which add up to the mean by which it was compared.

    ``work`` is that of an average stage without ``recomputed``; ``once`` are sums of gradients and updates where they
    take longest; ``imbalance`` is the work of the fullest stage beyond an average one; ``communication`` is how much
    shorter the step would be if messages took no time; ``bubble`` is the rest of a step without noise; and ``noise`` is
    how much longer steps with noise are.
    """
    cut, nominal_ms = one.cut, judge.nominal_ms(one)
    works = cut.stage_work_ms
    host_ms = cut.costs.task_ms * cut.num_microbatches * (3 if cut.split else 2)
    average = sum(works) / len(works) + host_ms * cut.placement.num_chunks / len(works)
    once = max(r + u for r, u in zip(*once_per_step_ms(cut), strict=True))
    recomputed = _recomputed_ms(one, book)
    # Sums of gradients stay as they are where messages take no time: they have a part of their own.
    rate = cut.costs.links.replicas_gb_per_s or cut.costs.links.gb_per_s
    links = replace(cut.costs.links, latency_ms=0.0, gb_per_s=None, control_ms=0.0, replicas_gb_per_s=rate)
    silent = judge.nominal_on(replace(cut, costs=replace(cut.costs, links=links)), one)
    imbalance = max(works) - sum(works) / len(works)
    return {
        "work": average - recomputed,
        "recomputed": recomputed,
        "once": once,
        "imbalance": imbalance,
        "communication": nominal_ms - silent,
        "bubble": silent - average - once - imbalance,
        "noise": float(judge.draws_ms(one, num_draws).mean()) - nominal_ms,
    }


def _recomputed_ms(one: PlanChoice, book: CostBook) -> float:
    """Returns the milliseconds of an average stage beyond those of the same layers without rematerialisation."""
    shape, cut = one.shape, one.cut
    if shape.remat == NONE:
        return 0.0
    try:
        plain = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor)
    except ValueError:  # nothing is known of them
        return 0.0
    kept = replace(cut, costs=plain, own_costs=())
    return max(0.0, (sum(cut.stage_work_ms) - sum(kept.stage_work_ms)) / shape.num_stages)


@dataclass
class Reasons:
    """Finds the sentences for the candidates of a search."""

    book: CostBook
    space: SearchSpace
    judge: Judge
    memory_bytes: int | None
    tables: Sequence[TriedTable]
    num_draws: int
    """The least number of draws by which choices are compared."""
    _known: dict[PlanChoice, dict[str, float]] = field(default_factory=dict)

    def why_lost(self, before: PlanChoice, one: PlanChoice) -> str:
        """Returns the largest advantage of the candidate before, in words."""
        number = max(self.num_draws, min(self.judge.num_known(before), self.judge.num_known(one)))
        longer, error = self.judge.difference(before, one, number)
        if longer <= error:
            return "equal: no difference" + ("" if self.judge.noise.is_none else " beyond the noise")
        # Steps may have different numbers of samples: the parts of both are those of as many as the loser has.
        ahead, behind = self._parts_ms(before), self._parts_ms(one)
        times = one.shape.batch_size / before.shape.batch_size
        name = max(behind, key=lambda part: behind[part] - ahead[part] * times)
        told = _WORDS[name].format(behind[name], ahead[name] * times)
        return told + (self._for_lack_of_memory(before, one) if name in ("bubble", "noise") else "")

    def _parts_ms(self, one: PlanChoice) -> dict[str, float]:
        if one not in self._known:
            self._known[one] = step_parts_ms(one, self.book, self.judge, self.num_draws)
        return self._known[one]

    def _for_lack_of_memory(self, before: PlanChoice, one: PlanChoice) -> str:
        """Returns the quickest table on this cut that would be ahead, if memory sufficed for it."""
        if self.memory_bytes is None:
            return ""
        cut, limit = one.cut, self.judge.value(before, self.num_draws)
        ahead = [table for table in self.tables if table.cut is cut and table.value < limit]
        for table in sorted(ahead, key=lambda table: table.value):
            allowed = [way for way in table.ways if way.ordering.consume in self.space.consumptions]
            needed = min((way.peak_bytes for way in allowed), default=0)
            if needed > self.memory_bytes:
                return (
                    f"; for lack of memory: {table.table.name} would take "
                    f"{table.value * one.shape.batch_size:.4g} ms, and needs {format_bytes(needed)} of "
                    f"{format_bytes(self.memory_bytes)}"
                )
        return ""


@dataclass
class Refusals:
    """Looks for shapes that fit by the forecast of memory alone."""

    book: CostBook
    space: SearchSpace
    memory_bytes: int

    def refused(self, shape: PlanShape) -> Refused:
        """Returns why a shape does not fit, and the nearest changes with which it does."""
        cut = self._leanest(next(points_of(shape, self.book, self.space)))
        peaks = _peaks(cut)
        needed = max(peaks)
        if needed <= self.memory_bytes:
            windows = largest_windows(cut, self.memory_bytes)
            reason = f"no order that is allowed fits {format_bytes(self.memory_bytes)}"
            change = "" if windows is None else f"ready with window {_list(windows)}, as hint {plain_hint(cut)}"
            return Refused(shape=shape, reason=reason, change=change)
        reason = (
            f"stage {peaks.index(needed)} needs {format_bytes(needed)} of {format_bytes(self.memory_bytes)} with one "
            "microbatch in flight"
        )
        found = list[str]()
        for others in self._neighbours(shape):  # the nearest of each kind that fits
            fitting = ((words, self._windows(other)) for words, other in others)
            told = (f"{words} (window {_list(windows)})" for words, windows in fitting if windows is not None)
            found += islice(told, 1)
        found.append(f"{format_bytes(needed + needed // 100)} per device")
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

    def _windows(self, shape: PlanShape) -> tuple[int, ...] | None:
        """Returns the largest windows on the leanest cut; None where it does not fit."""
        point = next(points_of(shape, self.book, self.space), None)
        if point is None:
            return None
        cut = self._leanest(point)
        return largest_windows(cut, self.memory_bytes) if max(_peaks(cut)) <= self.memory_bytes else None

    def _neighbours(self, shape: PlanShape) -> Iterator[list[tuple[str, PlanShape]]]:
        """Yields shapes that differ in one way, the nearest first, each with the difference in words."""
        same = [entry for entry in self.book.entries if entry.tensor == shape.tensor]
        yield [
            (f"remat {entry.remat}", replace(shape, remat=entry.remat))
            for entry in same
            if entry.microbatch_size == shape.microbatch_size and entry.remat != shape.remat
        ]
        samples = shape.num_microbatches * shape.microbatch_size
        yield [
            (f"microbatches of {size} samples", replace(shape, microbatch_size=size, num_microbatches=samples // size))
            for size in sorted({entry.microbatch_size for entry in same if entry.remat == shape.remat}, reverse=True)
            if size < shape.microbatch_size and samples % size == 0
        ]
        units = shape.num_stages * shape.data
        yield [
            (
                f"{number} stages x {units // number} replicas",
                replace(shape, num_stages=number, data=units // number, num_microbatches=count),
            )
            for number in range(shape.num_stages + 1, units + 1)
            if units % number == 0
            for count in [shape.num_microbatches * shape.data // (units // number)]
            if count
        ]


def _peaks(cut: CutModel) -> list[int]:
    """Returns the bytes of each stage with one microbatch in flight."""
    order = Ordering(hint=plain_hint(cut), window=1).resolve(cut.placement, cut.graph)
    return [each.peak for each in forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)]


def _list(windows: tuple[int, ...]) -> str:
    return str(windows[0]) if len(set(windows)) == 1 else ",".join(map(str, windows))
