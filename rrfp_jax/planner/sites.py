"""The best table for each place where a model may be cut; lower bounds spare most of them.

A *site* is a point of the search space with a whole or a split backward. The sites wait with a lower bound of their
steps: first that of a perfect balance, then the bound of their best cut. The site with the smallest bound is taken; if
that is the bound of a cut, its tables are made and timed. Where the smallest bound is not below the best step that
fits, no other site can be better.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rrfp_jax.costs import CostBook, CutModel, ModelCosts
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.candidates import TriedTable, largest_windows
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import Judge
from rrfp_jax.planner.named_tables import built_table, named_tables, split_orders
from rrfp_jax.planner.order_problem import memory_for_activations, order_problem
from rrfp_jax.planner.order_search import SEARCHED, search_orders
from rrfp_jax.planner.records import PlanShape
from rrfp_jax.planner.search_space import Point, SearchSpace
from rrfp_jax.planner.step_times import quick_bound_ms, step_bound_ms
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, chain

_SEARCHED_ORDERS = 4
"""Orders of a search that are judged."""
_WORTH = 0.005
"""Part of a step below which a gain is not searched for."""
_LARGE = 1500
"""Chunks times microbatches from which on tables are first estimated by fewer microbatches."""


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

    book: CostBook
    space: SearchSpace
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
    _waiting: list[tuple[float, int, Site]] = field(default_factory=list)
    _number: int = 0
    """Sites that have waited so far; among equal bounds the first one goes first."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def least(self) -> float:
        """Milliseconds per sample that nothing beats, on any site."""
        sites = [*self.opened, *(site for _, _, site in self._waiting)]
        return min((site.least for site in sites), default=float("inf"))

    def add(self, point: Point) -> None:
        """Lets a point wait, with its backward whole and split."""
        costs, stages = costs_of(point, self.book), point.shape.num_stages
        held = sum(costs.of(layer).fixed_bytes + costs.of(layer).stash_bytes for layer in range(costs.num_layers))
        if self.memory_bytes is not None and held > stages * self.memory_bytes:
            self.refused[point.shape] = None
            return
        for split in (True, False):
            bound_ms = quick_bound_ms(point, costs, split=split)
            self._push(Site(point=point, split=split, least=bound_ms / point.shape.batch_size))

    def _push(self, site: Site) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (site.least, self._number, site))

    def look(self) -> Iterator[Site]:
        """Tries one site after the other, at least one, until none can be better than the best."""
        while self._waiting and self._waiting[0][0] < self.best:
            _, _, site = heapq.heappop(self._waiting)
            shape = site.point.shape
            if not site.cuts:
                cut = best_cut(
                    costs_of(site.point, self.book), site.point.placement, shape.num_microbatches,
                    split=site.split, replicas=shape.data,
                )  # fmt: skip
                site.cuts = [(cut, False)]
                site.least = max(site.least, step_bound_ms(cut) / shape.batch_size)
                self._push(site)
                continue
            try:
                site.cuts = _cuts_of(site.cuts[0][0], self.memory_bytes)
            except ValueError:
                self.refused[shape] = None
                continue
            self.opened.append(site)
            self._try_named(site)
            yield site

    def search(self, number: int) -> Iterator[Site]:
        """Looks for orders without a name on the best ``number`` sites, where the bounds say that there may be some."""
        for place, site in enumerate(sorted(self.opened, key=lambda site: site.least)[:number]):
            if (place and is_large(site.point)) or site.least >= self.best * (1 - _WORTH):
                return
            for cut, is_even in site.cuts[: 1 if self.memory_bytes is None else 2]:
                found = search_orders(cut, self._available(cut))
                searched = [order.table for order in found if not order.is_named]
                self._try(site, cut, searched[:_SEARCHED_ORDERS], is_even=is_even)
            yield site

    def _available(self, cut: CutModel) -> tuple[float, ...]:
        return memory_for_activations(cut, [self.memory_bytes] * cut.placement.num_stages)

    def _try_named(self, site: Site) -> None:
        for cut, is_even in site.cuts:
            if not is_large(site.point):
                self._try(site, cut, [table for table, _ in self._named(cut)], is_even=is_even)
                continue
            for least, name, request in self._estimated(site, cut):
                if least < self.best:
                    self._try(site, cut, [built_table(name, request)], is_even=is_even)

    def _named(self, cut: CutModel) -> Iterator[tuple[ScheduleTable, ScheduleRequest]]:
        """Yields the named tables that are allowed."""
        for table, request in named_tables(cut, order_problem(cut, self._available(cut))):
            if self.space.schedules is None or table.name in self.space.schedules:
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
            one = next(table.fitting(self.space, self.memory_bytes), None)
            if one is not None:
                self.best = min(self.best, self.judge.value(one, self.num_draws))

    def _timed(self, site: Site, cut: CutModel, table: ScheduleTable, *, is_even: bool) -> TriedTable:
        is_searched = table.name == SEARCHED
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


def costs_of(point: Point, book: CostBook) -> ModelCosts:
    """Returns the costs of the layers in the shape of a point."""
    shape = point.shape
    return book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=shape.remat)


def _cuts_of(best: CutModel, memory_bytes: int | None) -> list[tuple[CutModel, bool]]:
    """Returns the best cut and the even one, each with whether it is even; equal ones once.

    Where memory is short for as many activations as schedules usually hold, the best cut for these comes too, or for
    half as many, or for as few as can be. Raises ValueError where not even one microbatch fits.
    """
    found, stages, m = [best], best.placement.num_stages, best.num_microbatches
    usual = min(stages, m)
    if memory_bytes is not None:
        windows = largest_windows(best, memory_bytes, usual)
        if windows is None or min(windows) < usual:
            found.append(_cut_in_memory(best, memory_bytes, sorted({usual, min(-(-stages // 2), m), 1}, reverse=True)))
    even = even_cut(best.costs, best.placement, m, split=best.split, replicas=best.replicas)
    distinct = {cut.counts: cut for cut in (*found, even)}
    return [(cut, counts == even.counts) for counts, cut in distinct.items()]


def _cut_in_memory(best: CutModel, memory_bytes: int, windows: list[int]) -> CutModel:
    """Returns the best cut that fits the first of these windows for which there is one."""
    placement = best.placement
    stages, passes = placement.num_stages, placement.num_chunks // placement.num_stages
    for window in windows:
        memory = MemoryBudget(limits=(memory_bytes,) * stages, footprints=(window * passes,) * stages)
        try:
            return best_cut(
                best.costs, placement, best.num_microbatches, split=best.split, memory=memory, replicas=best.replicas
            )
        except ValueError:
            if window == windows[-1]:
                raise
    raise AssertionError("there is at least one window")
