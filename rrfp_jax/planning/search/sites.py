"""The best table that has a name, for each place where a model may be cut: bounds first, so that most are never tried.

A *site* is a point with a whole or a split backward. The sites wait with the least that their steps may take: first
what a perfect balance would, then the bound of their best cut. The smallest is taken; if that is a bound, its tables
are made and timed. Where the smallest is not below the best that fits, no other one is.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rrfp_jax.planning.costs import CostBook, CutModel
from rrfp_jax.planning.orders.activations import room_for_activations
from rrfp_jax.planning.orders.found import SEARCHED
from rrfp_jax.planning.orders.named import built_table, named_tables, split_orders
from rrfp_jax.planning.orders.problem import problem_of
from rrfp_jax.planning.orders.search import search_orders
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.cutting import best_cut_of, costs_of, cuts_of, lacks_memory
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.points import Point
from rrfp_jax.planning.search.records import Shape
from rrfp_jax.planning.search.step_bound import quick_bound_ms, step_bound_ms
from rrfp_jax.planning.search.tables import TriedTable
from rrfp_jax.planning.search.wishes import Wishes
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, chain

_SEARCHED = 4
"""How many orders of a search are judged."""
WORTH = 0.005
"""Of a step: what less than this would be gained by is not searched for."""
LARGE = 1500
"""Chunks times microbatches from which on tables are first estimated by fewer microbatches."""


@dataclass(eq=False)
class Site:
    """Where to look for an order."""

    point: Point
    split: bool
    least: float
    """Milliseconds per sample that no order beats."""
    cuts: list[tuple[CutModel, bool]] = field(default_factory=list)
    """The best one first, each with whether it is even; empty until they are needed."""


@dataclass
class Sites:
    """The sites that wait, and the tables that were tried."""

    book: CostBook
    wishes: Wishes
    judge: Judge
    memory_bytes: int | None
    num_draws: int
    """By which tables are compared."""
    opened: list[Site] = field(default_factory=list)
    tables: list[TriedTable] = field(default_factory=list)
    best: float = float("inf")
    """Milliseconds per sample of the best that fits."""
    refused: dict[Shape, None] = field(default_factory=dict)
    """What has no cut that fits."""
    num_waiting: int = 0
    """Sites that no table was tried for, as none could be better."""
    _waiting: list[tuple[float, int, Site]] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Let a point wait, with its backward whole and split."""
        if lacks_memory(point, self.book, self.memory_bytes):
            self.refused[point.shape] = None
            return
        for split in (True, False):
            site = Site(
                point=point,
                split=split,
                least=quick_bound_ms(point, costs_of(point, self.book), split=split) / point.shape.batch_size,
            )
            heapq.heappush(self._waiting, (site.least, len(self._waiting), site))
        self.num_waiting = len(self._waiting)

    def look(self, should_stop: Callable[[], bool]) -> Iterator[Site]:
        """Try one site after the other, at least one, until none can be better than the best."""
        number = len(self._waiting)
        while self._waiting and self._waiting[0][0] < self.best and not (self.tables and should_stop()):
            _, _, site = heapq.heappop(self._waiting)
            self.num_waiting = len(self._waiting)
            if not site.cuts:
                number += 1
                best = best_cut_of(site.point, self.book, split=site.split)
                site.cuts = [(best, False)]
                site.least = max(site.least, step_bound_ms(best) / site.point.shape.batch_size)
                heapq.heappush(self._waiting, (site.least, number, site))
                continue
            try:
                site.cuts = cuts_of(site.cuts[0][0], self.memory_bytes)
            except ValueError:
                self.refused[site.point.shape] = None
                continue
            self.opened.append(site)
            self._try_tables(site)
            yield site

    def note(self, one: Candidate) -> None:
        """A candidate that was found elsewhere."""
        if one.fits(self.memory_bytes):
            self.best = min(self.best, self.judge.value(one, self.num_draws))

    @property
    def least(self) -> float:
        """Milliseconds per sample that nothing beats, on any site."""
        sites = [*self.opened, *(site for _, _, site in self._waiting)]
        return min((site.least for site in sites), default=float("inf"))

    def search(self, number: int, effort: int, seed: int, should_stop: Callable[[], bool]) -> Iterator[Site]:
        """Look for orders without a name where the bounds say that there may be better ones."""
        for place, site in enumerate(sorted(self.opened, key=lambda site: site.least)[:number]):
            if place and is_large(site.point):
                return
            if site.least >= self.best * (1 - WORTH) or should_stop():
                return
            for cut, is_even in site.cuts[: 1 if self.memory_bytes is None else 2]:
                counted = _as_forecast(cut)
                room = room_of(counted, self.memory_bytes)
                found = search_orders(counted, room, seed=seed, effort=effort, should_stop=should_stop)
                searched = [order.table for order in found if not order.is_named]
                self._try(site, cut, searched[:_SEARCHED], is_even=is_even)
            yield site

    def _try_tables(self, site: Site) -> None:
        for cut, is_even in site.cuts:
            if not is_large(site.point):
                self._try(site, cut, [table for table, _ in self._named(cut)], is_even=is_even)
                continue
            for least, name, request in self._estimated(site, cut):
                if least < self.best:
                    self._try(site, cut, [built_table(name, request)], is_even=is_even)

    def _named(self, cut: CutModel) -> Iterator[tuple[ScheduleTable, ScheduleRequest]]:
        """The named tables that are allowed."""
        for table, request in named_tables(cut, problem_of(cut, room_of(cut, self.memory_bytes))):
            if self.wishes.schedules is None or table.name in self.wishes.schedules:
                yield table, request

    def _estimated(self, site: Site, cut: CutModel) -> list[tuple[float, str, ScheduleRequest]]:
        """What the tables of a large pipeline take at least, the best first: for a few microbatches as it is, and for
        each further one what the fullest stage works. Tables take long to make, and most are then not made whole."""
        m, placement = cut.num_microbatches, cut.placement
        few = replace(cut, num_microbatches=min(m, 2 * placement.num_stages))
        further_ms = max(cut.stage_work_ms) - max(few.stage_work_ms)
        found = []
        for table, request in self._named(few):
            tried = self._timed(site, few, table, is_even=False)
            if tried.may_fit(self.memory_bytes):
                whole = replace(
                    request,
                    num_microbatches=m,
                    graph=None if request.graph is None else chain(placement.num_chunks, m),
                )
                found.append((tried.value + further_ms / site.point.shape.batch_size, table.name, whole))
        return sorted(found, key=lambda each: each[:2])

    def _try(self, site: Site, cut: CutModel, tables: Iterable[ScheduleTable], *, is_even: bool) -> None:
        """Time tables, and see whether the quickest fit. Of those that say the same the first one stands for all."""
        known = {table.says for table in self.tables if table.cut is cut}
        tried: list[TriedTable] = []
        for made in tables:
            table = self._timed(site, cut, made, is_even=is_even)
            if table.says not in known:
                known.add(table.says)
                tried.append(table)
        self.tables += tried
        may_fit = [table for table in tried if table.may_fit(self.memory_bytes)]
        for table in sorted(may_fit, key=lambda table: table.value):
            if table.value >= self.best:
                return
            for one in table.fitting(self.wishes, self.memory_bytes):
                self.note(one)
                break

    def _timed(self, site: Site, cut: CutModel, table: ScheduleTable, *, is_even: bool) -> TriedTable:
        """One with a whole backward is tried with a split one where the cut has that."""
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
    """Whether its tables take long to make."""
    return point.shape.num_microbatches * point.shape.num_stages * point.chunks > LARGE


def _as_forecast(cut: CutModel) -> CutModel:
    """The cut with memory counted as the forecast does: what is owed to W takes as much as the stash did."""
    types = {
        name: replace(each, owed_bytes=max(each.owed_bytes, each.stash_bytes)) for name, each in cut.costs.types.items()
    }
    return replace(cut, costs=replace(cut.costs, types=types))


def room_of(cut: CutModel, memory_bytes: int | None) -> tuple[float, ...]:
    """What activations may take on each stage."""
    return room_for_activations(cut, [memory_bytes] * cut.placement.num_stages)
