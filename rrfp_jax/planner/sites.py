"""The best table for each place where a model may be cut; lower bounds spare most of them.

A *site* is a point of the search space with a whole or a split backward. The sites wait with a lower bound of their
steps: first that of a perfect balance, then the bound of their best cut. The site with the smallest bound is taken; if
that is the bound of a cut, its tables are made and timed. Where the smallest bound is not below the best step that
fits, no other site can be better.
"""

import heapq
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from math import inf

from rrfp_jax.core import READY, STRICT, Ordering
from rrfp_jax.costs import CutModel, ModelCosts
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.costs.layer_costs import StageCosts
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import ROUNDING, Judge, quick_bound_ms, step_bound_ms, strict_times_ms, walk_of
from rrfp_jax.planner.list_scheduler import memory_for_activations, order_problem
from rrfp_jax.planner.order_search import (
    OFFLOADED,
    SEARCHED,
    built_table,
    named_tables,
    order_with_copies,
    search_orders,
    split_orders,
)
from rrfp_jax.planner.records import LINEAR, MIXED, PlanChoice, PlanShape, Point
from rrfp_jax.planner.search_space import PointCosts, SearchSpace
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, chain, linear

PLANNED_HINTS = ("bf", "bfw", "bf-deep")
_WAYS = ((STRICT, None), (READY, None), (READY, False))
"""Consumption and foresight of the ways to consume a table."""
_SEARCHED_ORDERS = 4
"""Orders of a search that are judged."""
_WORTH = 0.005
"""Part of a step below which a gain is not searched for."""
_SHIFTED_TASKS = 400_000
"""Tasks that are timed, all together, to improve a cut where stages differ."""
_LARGE = 1500
"""Chunks times microbatches from which on tables are first estimated by fewer microbatches."""


def largest_windows(cut: CutModel, memory_bytes: int | None, most: int | None = None) -> tuple[int, ...] | None:
    """Returns the most microbatches that memory of each stage holds, all or ``most``; None where some stage holds
    none."""
    most = most or cut.num_microbatches
    order = Ordering(hint=plain_hint(cut), window=most).resolve(cut.placement, cut.graph)
    found = forecast_memory(order, dict(enumerate(cut.chunk_bytes)), cut.num_microbatches)
    windows = [
        most if limit is None else stage.largest_window(limit)
        for stage, limit in zip(found, cut.limits(memory_bytes), strict=True)
    ]
    return tuple(windows) if min(windows) > 0 else None


def plain_hint(cut: CutModel) -> str:
    """Returns the hint that runs the backward as the cut has it."""
    return "bfw" if cut.split else "bf"


def hints_for(
    point: Point, cut: CutModel, space: SearchSpace, memory_bytes: int | None, *, is_even: bool
) -> Iterator[PlanChoice]:
    """Yields the hints whose backward is as the cut has it, with the largest windows that fit, and with short ones."""
    windows = largest_windows(cut, memory_bytes)
    if windows is None or READY not in space.consumptions:
        return
    most = 2 * point.shape.num_stages
    for name in PLANNED_HINTS[:2] if point.family == LINEAR else PLANNED_HINTS:
        if (name != "bf") != cut.split or (space.schedules is not None and name not in space.schedules):
            continue
        for window in dict.fromkeys([windows, tuple(min(each, most) for each in windows)]):
            ordering = Ordering(hint=name, window=window, backward="split" if cut.split else "fused")
            yield PlanChoice(shape=point.shape, cut=cut, is_even=is_even, ordering=ordering, order_name=name)


@dataclass(eq=False, kw_only=True)
class TriedTable:
    """A table that was tried on a cut: its time where it is kept to, and the ways to consume it that fit."""

    point: Point
    cut: CutModel
    table: ScheduleTable
    judge: Judge
    num_draws: int
    """Draws by which it is timed."""
    is_even: bool
    is_searched: bool = False
    has_fit: bool = False
    """Whether some way to consume it was found to fit."""

    @cached_property
    def tasks_of_stages(self) -> tuple[object, ...]:
        """The tasks that stages run in order, strictly and by readiness; equal for tables that differ in name alone."""
        hint = self.table.hint
        return self.table.graph, self.table.orders, self.table.weights_fill, None if hint is None else hint.orders

    @cached_property
    def value(self) -> float:
        """Milliseconds per sample where the table is kept to, whether memory suffices for it or not."""
        if self.table.graph.ops:
            return self.judge.value(self.ways[0], self.num_draws)
        times_ms = self.judge.strict_times_ms(self.cut, self.table, self.num_draws)
        return float(times_ms.mean()) / self.point.shape.batch_size

    @cached_property
    def ways(self) -> tuple[PlanChoice, ...]:
        """The ways to consume the table: strictly, ready with foresight, and ready without."""
        return tuple(
            PlanChoice(
                shape=self.point.shape,
                cut=self.cut,
                is_even=self.is_even,
                ordering=Ordering(schedule=self.table, consume=consume, foresight=foresight),
                order_name=self.table.name,
                is_searched=self.is_searched,
            )
            for consume, foresight in _WAYS
        )

    def fitting(self, space: SearchSpace, memory_bytes: int | None) -> Iterator[PlanChoice]:
        """Yields the ways that are allowed and fit the memory, the strict one first."""
        if not self.may_fit(memory_bytes):
            return
        for one in self.ways:
            if one.ordering.consume in space.consumptions and one.fits(memory_bytes):
                self.has_fit = True
                yield one

    def may_fit(self, memory_bytes: int | None) -> bool:
        """Returns whether the activations of the table's row, counted as the smallest of the stage, fit the memory.

        Quick, where the forecast takes longer; True is no promise.
        """
        for stage, limit in enumerate(self.cut.limits(memory_bytes)):
            if limit is None:
                continue
            chunks = self.cut.placement.chunks_of_stage[stage]
            sizes = [self.cut.chunk_bytes[chunk] for chunk in chunks]
            held = round(self._peaks[stage] * len(chunks)) * min(each.per_microbatch for each in sizes)
            if sum(each.fixed for each in sizes) + held > limit:
                return False
        return True

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        return self.table.peak_activations()


@dataclass(eq=False)
class Site:
    """A place to look for an order."""

    point: Point
    split: bool
    least: float
    """Milliseconds per sample that no order beats."""
    cuts: list[tuple[CutModel, bool]] = field(default_factory=list)
    """The best cut first, each with whether it is even; empty until they are needed."""


@dataclass
class Sites:
    """The sites that wait, and the tables that were tried."""

    costs: PointCosts
    judge: Judge
    memory_bytes: int | None
    num_draws: int
    """Draws by which tables are compared."""
    opened: list[Site] = field(default_factory=list)
    tables: list[TriedTable] = field(default_factory=list)
    best: float = float("inf")
    """Milliseconds per sample of the best that fits."""
    refused: dict[PlanShape, None] = field(default_factory=dict)
    """Shapes that have no cut that fits."""
    waiting: list[tuple[float, int, Site]] = field(default_factory=list)
    """A heap of bounds and sites; among equal bounds the first one goes first."""
    _mixed: set[Point] = field(default_factory=set)
    _cuts: dict[Point, CutModel] = field(default_factory=dict)
    """Best cuts that are the same with a whole and a split backward."""
    _number: int = 0
    """Sites that have waited so far."""

    @property
    def least(self) -> float:
        """Milliseconds per sample that nothing beats, on any site."""
        sites = [*self.opened, *(site for _, _, site in self.waiting)]
        return min((site.least for site in sites), default=float("inf"))

    def add(self, point: Point) -> None:
        """Lets a point wait, with its backward whole and split."""
        costs, stages = self.costs.of(point), point.shape.num_stages
        held = sum(costs.of(layer).fixed_bytes + costs.of(layer).stash_bytes for layer in range(costs.num_layers))
        limits = [stage.limit for stage in costs.stages] or [self.memory_bytes] * stages
        room = sum(inf if limit is None else limit for limit in limits)
        if held > room and point.shape.remat != MIXED:
            self.refused[point.shape] = None
            self._add_mixed(point)
            return
        for split in (True, False):
            bound_ms = quick_bound_ms(point, costs, split=split)
            self._push(Site(point=point, split=split, least=bound_ms / point.shape.batch_size))

    def _add_mixed(self, point: Point) -> None:
        """Lets the point wait whose stages may recompute differently, where memory is short."""
        mixed = replace(point, shape=replace(point.shape, remat=MIXED))
        if point.family != LINEAR or point.shape.num_stages == 1 or mixed in self._mixed:
            return
        remats = self.costs.remats(mixed.shape)
        if len(remats) > 1 and point.shape.remat == remats[0]:
            self._mixed.add(mixed)
            self.add(mixed)

    def _push(self, site: Site) -> None:
        self._number += 1
        heapq.heappush(self.waiting, (site.least, self._number, site))

    def look(self) -> Iterator[Site]:
        """Tries one site after the other, at least one, until none can be better than the best."""
        while self.waiting and self.waiting[0][0] < self.best:
            _, _, site = heapq.heappop(self.waiting)
            shape = site.point.shape
            if not site.cuts:
                cut = self._best_cut(site)
                site.cuts = [(cut, False)]
                # The bound of the cut is larger, so the site waits again: another one may now be the best.
                site.least = max(site.least, step_bound_ms(cut) / shape.batch_size)
                self._push(site)
                continue
            best = site.cuts[0][0]
            short = is_short(best, self.memory_bytes)
            if short:
                self._add_mixed(site.point)
            try:
                if shape.remat == MIXED:
                    site.cuts = _mixed_cuts(best, self.costs.others(site.point))
                else:
                    if best.costs.stages and site.point.family == LINEAR and not is_large(site.point):
                        best = _shifted(best, self.memory_bytes)
                    site.cuts = _cuts_of(best, self.memory_bytes, short=short)
            except ValueError:
                self.refused[shape] = None
                continue
            self.opened.append(site)
            for cut, is_even in site.cuts:
                if not is_large(site.point):
                    self._try(site, cut, [table for table, _ in self._named(cut)], is_even=is_even)
                    continue
                for least, name, request in self._estimated(site, cut):
                    if least < self.best:
                        self._try(site, cut, [built_table(name, request)], is_even=is_even)
            yield site

    def _best_cut(self, site: Site) -> CutModel:
        """Returns the best cut of a site, were there memory enough."""
        point, costs = site.point, self.costs.of(site.point)
        if point in self._cuts:
            return replace(self._cuts[point], split=site.split)
        found = best_cut(
            costs, point.placement, point.shape.num_microbatches, split=site.split, replicas=point.shape.data
        )
        # Of several chunks per stage only work counts: where layers take as long with either backward, it is the same
        # cut, and the search for it takes long.
        layers = [each for types in [costs.types, *(stage.types for stage in costs.stages)] for each in types.values()]
        if point.chunks > 1 and all(each.work_ms(split=True) == each.work_ms(split=False) for each in layers):
            self._cuts[point] = found
        return found

    def search(self, number: int) -> Iterator[Site]:
        """Looks for orders without a name on the best ``number`` sites, where the bounds say that there may be some."""
        # A site whose stages may recompute differently stands for that where all recompute least.
        stood_for = {
            replace(one, shape=replace(one.shape, remat=self.costs.remats(one.shape)[0])) for one in self._mixed
        }
        sites = [site for site in self.opened if site.point not in stood_for]
        for place, site in enumerate(sorted(sites, key=lambda site: site.least)[:number]):
            if (place and is_large(site.point)) or site.least >= self.best * (1 - _WORTH):
                return
            for cut, is_even in site.cuts[: 1 if set(site.cuts[0][0].limits(self.memory_bytes)) == {None} else 2]:
                found = search_orders(cut, self._available(cut))
                searched = [order.table for order in found if not order.is_named]
                self._try(site, cut, searched[:_SEARCHED_ORDERS], is_even=is_even)
            yield site

    def tables_on(self, shape: PlanShape, cut: CutModel) -> list[TriedTable]:
        """Returns the best tables on a cut that is of no site, with names and without."""
        site = Site(point=Point(shape=shape, family=LINEAR, chunks=1), split=cut.split, least=0.0)
        found = search_orders(cut, self._available(cut))[:_SEARCHED_ORDERS]
        return [self._timed(site, cut, order.table, is_even=False) for order in found]

    def offload(self, number: int) -> Iterator[Site]:
        """Looks for orders of tasks and copies to the host together on the best ``number`` sites where memory is
        short."""
        for site in sorted(self.opened, key=lambda site: site.least):
            if not number or site.least >= self.best * (1 - _WORTH):
                return
            # The best cut, and the best one for few activations.
            cuts = [each for each in site.cuts[:2] if each[0].copies_ms and is_short(each[0], self.memory_bytes)]
            for cut, is_even in cuts:
                known = [each.table for each in self.tables if each.cut is cut]
                table = order_with_copies(cut, self.memory_bytes, known)
                self._try(site, cut, [] if table is None else [table], is_even=is_even)
            if cuts:
                number -= 1
                yield site

    def _available(self, cut: CutModel) -> tuple[float, ...]:
        return memory_for_activations(cut, cut.limits(self.memory_bytes))

    def _named(self, cut: CutModel) -> Iterator[tuple[ScheduleTable, ScheduleRequest]]:
        """Yields the named tables that are allowed."""
        for table, request in named_tables(cut, order_problem(cut, self._available(cut))):
            if self.costs.space.schedules is None or table.name in self.costs.space.schedules:
                yield table, request

    def _estimated(self, site: Site, cut: CutModel) -> list[tuple[float, str, ScheduleRequest]]:
        """Returns the least time of the tables of a large pipeline with their requests, the best first.

        It is their time with a few microbatches, and for each further one the work of the fullest stage. Tables take
        long to make, and most are then not made whole.
        """
        m, placement = cut.num_microbatches, cut.placement
        few = replace(cut, num_microbatches=min(m, 2 * placement.num_stages))
        further_ms = max(cut.stage_work_ms) - max(few.stage_work_ms)
        found = []
        for table, request in self._named(few):
            tried = self._timed(site, few, table, is_even=False)
            if tried.may_fit(self.memory_bytes):
                graph = None if request.graph is None else chain(placement.num_chunks, m)
                whole = replace(request, num_microbatches=m, graph=graph)
                found.append((tried.value + further_ms / site.point.shape.batch_size, table.name, whole))
        return sorted(found, key=lambda each: each[:2])

    def _try(self, site: Site, cut: CutModel, tables: Iterable[ScheduleTable], *, is_even: bool) -> None:
        """Times tables, and sees whether the quickest fit. The first one stands for all that order the same tasks."""
        known = {table.tasks_of_stages for table in self.tables if table.cut is cut}
        tried: list[TriedTable] = []
        for made in tables:
            table = self._timed(site, cut, made, is_even=is_even)
            if table.tasks_of_stages not in known:
                known.add(table.tasks_of_stages)
                tried.append(table)
        self.tables += tried
        may_fit = [table for table in tried if table.may_fit(self.memory_bytes)]
        for table in sorted(may_fit, key=lambda table: table.value):
            if table.value >= self.best:
                return
            one = next(table.fitting(self.costs.space, self.memory_bytes), None)
            if one is not None:
                self.best = min(self.best, self.judge.value(one, self.num_draws))

    def _timed(self, site: Site, cut: CutModel, table: ScheduleTable, *, is_even: bool) -> TriedTable:
        is_searched = table.name in (SEARCHED, OFFLOADED)
        if bool(table.graph.split) != cut.split:
            name, orders = f"{table.name}, backward split", split_orders(table.orders)
            table, is_searched = ScheduleTable.from_orders(name, cut.placement, cut.graph, orders), True
        return TriedTable(
            point=site.point,
            cut=cut,
            table=table,
            judge=self.judge,
            num_draws=self.num_draws,
            is_even=is_even,
            is_searched=is_searched,
        )


def is_large(point: Point) -> bool:
    """Returns whether the tables of a point take long to make."""
    return point.shape.num_microbatches * point.shape.num_stages * point.chunks > _LARGE


def is_short(cut: CutModel, memory_bytes: int | None) -> bool:
    """Returns whether memory is short for as many activations as schedules usually hold."""
    usual = min(cut.placement.num_stages, cut.num_microbatches)
    if set(cut.limits(memory_bytes)) == {None}:
        return False
    windows = largest_windows(cut, memory_bytes, usual)
    return windows is None or min(windows) < usual


def _cuts_of(best: CutModel, memory_bytes: int | None, *, short: bool) -> list[tuple[CutModel, bool]]:
    """Returns the best cut and the even one, each with whether it is even; equal ones once.

    Where memory is short for as many activations as schedules usually hold, the best cut for these comes too, or for
    half as many, or for as few as can be. Raises ValueError where not even one microbatch fits.
    """
    found, placement, m = [best], best.placement, best.num_microbatches
    stages, passes = placement.num_stages, placement.num_chunks // placement.num_stages
    usual = min(stages, m)
    if short:
        shorter = sorted({usual, min(-(-stages // 2), m), 1}, reverse=True)
        for window in shorter:
            memory = MemoryBudget(limits=best.limits(memory_bytes), footprints=(window * passes,) * stages)
            try:
                found.append(
                    best_cut(best.costs, placement, m, split=best.split, memory=memory, replicas=best.replicas)
                )
                break
            except ValueError:
                if window == shorter[-1]:
                    raise
    even = even_cut(best.costs, placement, m, split=best.split, replicas=best.replicas)
    distinct = {cut.counts: cut for cut in (*found, even)}
    return [(cut, counts == even.counts) for counts, cut in distinct.items()]


def cut_for_replicas(costs: ModelCosts, shape: PlanShape, memory_bytes: int | None, *, split: bool) -> CutModel:
    """Returns the best cut where stages have different numbers of replicas, which divide the work among them; where
    memory is short for the usual activations, the best one for these, for half as many, or for one."""
    number, m = shape.num_stages, shape.num_microbatches
    stages = costs.stages or (StageCosts(types=costs.types, links=(costs.links,) * number),) * number
    shared = tuple(
        replace(stage, types={name: each.at_speed(replicas) for name, each in stage.types.items()})
        for stage, replicas in zip(stages, shape.replicas, strict=True)
    )

    def cut_within(memory: MemoryBudget | None) -> CutModel:
        cut = best_cut(replace(costs, stages=shared), linear(number), m, split=split, memory=memory)
        return replace(cut, costs=costs, replicas=shape.replicas)

    best = cut_within(None)
    if is_short(best, memory_bytes):
        for window in sorted({min(number, m), min(-(-number // 2), m), 1}, reverse=True):
            held = (float(window),) * number
            with suppress(ValueError):  # for which no cut has room
                return cut_within(MemoryBudget(limits=best.limits(memory_bytes), held=held))
    return best


def _shifted(best: CutModel, memory_bytes: int | None) -> CutModel:
    """Returns the cut to which transfers of a layer between stages lead from the best one, as long as a step of 1F1B
    gets shorter: where stages differ, those behind and before the fullest one count too."""
    stages, m = best.placement.num_stages, best.num_microbatches
    name = "1f1b-split" if best.split else "1f1b"
    walk = walk_of(built_table(name, ScheduleRequest(num_stages=stages, num_microbatches=m)))

    def step_ms(cut: CutModel) -> float:
        return float(strict_times_ms(cut, walk, cut.durations_ms)[0])

    best_ms, is_better, left = step_ms(best), True, _SHIFTED_TASKS
    while is_better and left > 0:
        is_better = False
        for giver, taker in permutations(range(stages), 2):
            left -= len(walk)
            counts = list(best.counts)
            counts[giver] -= 1
            counts[taker] += 1
            try:
                cut = replace(best, counts=tuple(counts))
            except ValueError:  # an empty chunk, or one that passes an end
                continue
            if (other_ms := step_ms(cut)) < best_ms * (1 - ROUNDING) and not is_short(cut, memory_bytes):
                best, best_ms, is_better = cut, other_ms, True
    return best


def _mixed_cuts(best: CutModel, others: list[ModelCosts]) -> list[tuple[CutModel, bool]]:
    """Returns the best cuts where each stage recomputes no more than memory asks for: with as many activations on all
    stages as one usually holds, and with those of 1F1B, or with fewer. Raises ValueError where not even one microbatch
    fits."""
    stages, m = best.placement.num_stages, best.num_microbatches
    found = list[CutModel]()
    for window in sorted({min(stages, m), min(-(-stages // 2), m), 1}, reverse=True):
        for held in ((window,) * stages, tuple(max(1, min(window, stages - stage)) for stage in range(stages))):
            memory = MemoryBudget(limits=best.limits(None), held=tuple(map(float, held)))
            try:
                found.append(
                    best_cut(
                        best.costs, best.placement, m, split=best.split, memory=memory, replicas=best.replicas,
                        others=others,
                    )
                )  # fmt: skip
            except ValueError:
                if window == 1 and not found:
                    raise
        if found:
            break
    distinct = {(cut.counts, tuple(stage.remat for stage in cut.costs.stages)): cut for cut in found}
    return [(cut, False) for cut in distinct.values()]
