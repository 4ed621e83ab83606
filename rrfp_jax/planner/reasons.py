"""Why the best choice won, why others lost to it, and why a shape does not fit with the nearest changes that make it
fit.

Each is a sentence with its figures, and each change is worked out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import Judge, once_per_step_ms, step_bound_ms
from rrfp_jax.planner.records import PlanChoice, PlanShape, Point, Refused
from rrfp_jax.planner.search_space import PointCosts, SearchSpace, points_of
from rrfp_jax.planner.sites import TriedTable, largest_windows, plain_hint
from rrfp_jax.readable import format_bytes

_WORDS = {
    "work": "work: an average stage works {0:.4g} ms, {1:.4g} ms in the best",
    "recomputed": "recomputation: it takes {0:.4g} ms of each stage, {1:.4g} ms in the best",
    "once": "sums of gradients and updates: they take {0:.4g} ms, {1:.4g} ms in the best",
    "imbalance": "imbalance of the cut: the fullest stage works {0:.4g} ms more than an average one, {1:.4g} ms in the "
    "best",
    "communication": "communication: messages make the step {0:.4g} ms longer, {1:.4g} ms in the best",
    "bubble": "bubble: stages fill, drain and wait for {0:.4g} ms, {1:.4g} ms in the best",
    "noise": "variability: it makes the step {0:.4g} ms longer, {1:.4g} ms in the best",
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
    # Sums of gradients have a part of their own.
    silent = judge.nominal_on(replace(cut, costs=cut.costs.without_messages()), one)
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
    if set(one.remats) == {NONE}:
        return 0.0
    try:
        plain = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor)
    except ValueError:  # nothing is known of them
        return 0.0
    stages = tuple(
        replace(stage, types={name: each.at_speed(stage.speed) for name, each in plain.types.items()})
        for stage in cut.costs.stages
    )
    plain = replace(plain, layers=cut.costs.layers, ends=cut.costs.ends, stages=stages)
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

    def why_won(self, best: PlanChoice, even: PlanChoice | None) -> tuple[str, str]:
        """Returns two sentences: where the time of the best choice goes, and its gain over an even cut."""
        parts, bound_ms = dict(self._parts_ms(best)), step_bound_ms(best.cut)
        work_ms = parts.pop("work") + parts.pop("recomputed")
        most = max(parts, key=parts.__getitem__)
        where = (
            f"an average stage works {work_ms:.4g} of {work_ms + sum(parts.values()):.4g} ms, most is lost to "
            f"{_WORDS[most].split(':')[0]}, {max(0.0, parts[most]):.4g} ms, and no order of this cut takes less than "
            f"{bound_ms:.4g} ms"
        )
        if even is None:
            return where, "no named order on an even cut fits"
        if even is best:
            return where, "its cut is the even one, and its order the best named one"
        return where, f"the best named order on an even cut is {self.why_lost(best, even)}"

    def why_lost(self, best: PlanChoice, one: PlanChoice) -> str:
        """Returns how much longer a sample takes than with the best, and the largest advantage of that, in words."""
        number = max(self.num_draws, min(self.judge.num_known(best), self.judge.num_known(one)))
        longer, error = self.judge.difference(best, one, number)
        if longer <= error:
            return "equal: no difference" + ("" if self.judge.noise.is_none else " beyond the noise")
        # Steps may have different numbers of samples: the parts of both are those of as many as the loser has.
        ahead, behind = self._parts_ms(best), self._parts_ms(one)
        times = one.shape.batch_size / best.shape.batch_size
        name = max(behind, key=lambda part: behind[part] - ahead[part] * times)
        share, told = longer / self.judge.value(best, number), _WORDS[name].format(behind[name], ahead[name] * times)
        return f"{share:.1%} longer: {told}" + (
            self._for_lack_of_memory(best, one) if name in ("bubble", "noise") else ""
        )

    def _parts_ms(self, one: PlanChoice) -> dict[str, float]:
        if one not in self._known:
            self._known[one] = step_parts_ms(one, self.book, self.judge, self.num_draws)
        return self._known[one]

    def _for_lack_of_memory(self, best: PlanChoice, one: PlanChoice) -> str:
        """Returns the quickest table on this cut that would be ahead, if memory sufficed for it."""
        cut, limit = one.cut, self.judge.value(best, self.num_draws)
        limits = cut.limits(self.memory_bytes)
        ahead = [table for table in self.tables if table.cut is cut and table.value < limit]
        for table in sorted(ahead, key=lambda table: table.value):
            allowed = [way for way in table.ways if way.ordering.consume in self.space.consumptions]
            if allowed and not any(way.fits(self.memory_bytes) for way in allowed):
                leanest = min(allowed, key=lambda way: way.peak_bytes)
                _, needed, room = _fullest([each.peak for each in leanest.memory], limits)
                return (
                    f"; for lack of memory: {table.table.name} would take "
                    f"{table.value * one.shape.batch_size:.4g} ms, and needs {format_bytes(needed)} of "
                    f"{format_bytes(room)}"
                )
        return ""


@dataclass
class Refusals:
    """Looks for shapes that fit by the forecast of memory alone."""

    costs: PointCosts
    memory_bytes: int | None

    def refused(self, shape: PlanShape) -> Refused:
        """Returns why a shape does not fit, and the nearest changes with which it does."""
        cut = self._leanest(self._points(shape)[0])
        limits = cut.limits(self.memory_bytes)
        stage, needed, room = _fullest(_peaks(cut), limits)
        if needed <= room:
            windows = largest_windows(cut, self.memory_bytes)
            reason = f"no order that is allowed fits {format_bytes(room)}"
            change = "" if windows is None else f"ready with window {_list(windows)}, as hint {plain_hint(cut)}"
            return Refused(shape=shape, reason=reason, change=change)
        of = "".join(f" (device {_list(each.devices)})" for each in cut.costs.stages[stage : stage + 1] if each.devices)
        reason = f"stage {stage}{of} needs {format_bytes(needed)} of {format_bytes(room)} with one microbatch in flight"
        found = list[str]()
        for others in self._neighbours(shape):  # the nearest of each kind that fits
            fitting = ((words, self._windows(other)) for words, other in others)
            told = (f"{words} (window {_list(windows)})" for words, windows in fitting if windows is not None)
            found += islice(told, 1)
        found.append(f"{format_bytes(needed + needed // 100)} per device")
        return Refused(shape=shape, reason=reason, change=", or ".join(found))

    def _points(self, shape: PlanShape) -> list[Point]:
        costs = self.costs
        order = costs.orders(shape)[0]
        return [replace(point, order=order) for point in points_of(shape, costs.book, costs.space)]

    def _leanest(self, point: Point) -> CutModel:
        """Returns the cut for the least limits for which there is one, found by halving shares of the stages' own."""
        costs, shape, stages = self.costs.of(point), point.shape, point.shape.num_stages

        def cut_within(limits: tuple[int | None, ...]) -> CutModel:
            memory = MemoryBudget(limits=limits, footprints=(point.chunks,) * stages)
            return best_cut(
                costs, point.placement, shape.num_microbatches, split=False, memory=memory, replicas=shape.data
            )

        cut = cut_within((None,) * stages)
        own = cut.limits(self.memory_bytes)

        def share(cut: CutModel) -> float:
            return max(peak / limit for peak, limit in zip(_peaks(cut), own, strict=True) if limit)

        low, high = 0.0, share(cut)
        while high - low > high / 100:
            middle = (low + high) / 2
            try:
                cut = cut_within(tuple(limit and max(1, int(limit * middle)) for limit in own))
                high = min(middle, share(cut))
            except ValueError:
                low = middle
        return cut

    def _windows(self, shape: PlanShape) -> tuple[int, ...] | None:
        """Returns the largest windows on the leanest cut; None where it does not fit."""
        points = self._points(shape)
        if not points:
            return None
        cut = self._leanest(points[0])
        _, needed, room = _fullest(_peaks(cut), cut.limits(self.memory_bytes))
        return largest_windows(cut, self.memory_bytes) if needed <= room else None

    def _neighbours(self, shape: PlanShape) -> Iterator[list[tuple[str, PlanShape]]]:
        """Yields shapes that differ in one way, the nearest first, each with the difference in words."""
        same = [entry for entry in self.costs.book.entries if entry.tensor == shape.tensor]
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


def _fullest(peaks: Sequence[int], limits: Sequence[int | None]) -> tuple[int, int, int]:
    """Returns the stage that needs most of its limit, the bytes that it needs, and the limit."""
    bounded = [
        (peak / limit, stage, peak, limit)
        for stage, (peak, limit) in enumerate(zip(peaks, limits, strict=True))
        if limit
    ]
    _, stage, needed, room = max(bounded, key=lambda each: (each[0], -each[1]))
    return stage, needed, room


def _list(windows: tuple[int, ...]) -> str:
    return str(windows[0]) if len(set(windows)) == 1 else ",".join(map(str, windows))
