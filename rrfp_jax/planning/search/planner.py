"""From costs to a ranking: sites by their bounds, tables and hints on them, and a contest on common noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rrfp_jax.costs import CostBook
from rrfp_jax.planning.search.candidates import Candidate, hints_for
from rrfp_jax.planning.search.changes import Changes
from rrfp_jax.planning.search.contest import CLEARLY, FEW_DRAWS, FEWEST_DRAWS, contest
from rrfp_jax.planning.search.forecasting import forecast
from rrfp_jax.planning.search.judging import HELD_OUT, ROUNDING, TRAINING, Judge, draws_for
from rrfp_jax.planning.search.points import points_of, refused_without_points, shapes_of
from rrfp_jax.planning.search.reasons import Reasons
from rrfp_jax.planning.search.records import Plan, Ranked, Refused, Sensitivity
from rrfp_jax.planning.search.sensitivity import GIB, bottleneck, sensitivities
from rrfp_jax.planning.search.sites import Site, Sites, is_large
from rrfp_jax.planning.search.tables import TriedTable
from rrfp_jax.planning.search.wishes import STRICT, Wishes

FIRST_DRAWS = 16
"""By which tables are compared."""
SEARCHED_SITES, EFFORT = 3, 60_000
"""On how many of the best sites orders are searched for, and how many tasks may be scheduled on each."""
SMALL = 8_000
"""Tasks of all named tables that are tried in every way to consume them; of those without a name half as many."""
MOST_REFUSED = 12
"""Shapes that are told of, of those that do not fit."""
TABLES, SITES = 3, 3
"""How many of the best tables, named or not, are at least tried so where there is noise, and on how many of the best
sites hints are."""


@dataclass(frozen=True)
class Progress:
    """How far a search has come."""

    doing: str
    done: int
    total: int
    best_ms: float | None
    """Per sample, of the best so far; None: nothing fits yet."""


def make_plan(
    book: CostBook,
    wishes: Wishes,
    *,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Plan:
    """The best ways to run a model on so many devices, ranked.

    The same costs, wishes and seed give the same plan. ``should_stop`` is asked again and again; once it says yes, the
    best so far is the result. Raises ValueError where costs and wishes contradict each other.
    """
    return _Planning(book, wishes, seed, progress or _nothing, should_stop or _never).plan()


def _nothing(_: Progress) -> None:
    pass


def _never() -> bool:
    return False


class _Planning:
    def __init__(
        self,
        book: CostBook,
        wishes: Wishes,
        seed: int,
        progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.book, self.wishes, self.seed, self.progress = book, wishes, seed, progress
        self.memory_bytes = wishes.memory_bytes or book.device_bytes
        self.shapes = shapes_of(book, wishes)
        self.judge = Judge(book.noise, wishes.objectives, wishes.draws or draws_for(self.shapes), seed)
        self.sites = Sites(book, wishes, self.judge, self.memory_bytes, FIRST_DRAWS)
        self.refused: list[Refused] = []
        self._hints_tried: list[Candidate] = []
        self.is_stopped = False
        self._ask = should_stop

    def should_stop(self) -> bool:
        self.is_stopped = self.is_stopped or self._ask()
        return self.is_stopped

    def plan(self) -> Plan:
        self._add_points()
        total = self.sites.num_waiting
        for _ in self.sites.look(self.should_stop):
            self._tell("tables", total - self.sites.num_waiting, total)
        for number, _ in enumerate(self._searching(self.sites)):
            self._tell("orders", number + 1, SEARCHED_SITES)
        best = contest(self._pool(), self.judge, should_stop=self.should_stop)
        return self._ranked(best)

    def _add_points(self) -> None:
        for shape in self.shapes:
            points = list(points_of(shape, self.book, self.wishes))
            if not points:
                self.refused.append(refused_without_points(shape, self.book))
            for point in points:
                self.sites.add(point)

    def _pool(self) -> list[Candidate]:
        """Who takes part in the contest: the best tables that fit, those on even cuts too, and hints."""
        may_fit = [table for table in self.sites.tables if table.may_fit(self.memory_bytes)]
        by_value = sorted(may_fit, key=lambda table: table.value)
        named = [table for table in by_value if not table.is_searched]
        searched = [table for table in by_value if table.is_searched]
        best = [*self._ways(named, SMALL), *self._ways(searched, SMALL // 2)]
        best += [one for one in self._ways([table for table in named if table.is_even], 0) if one not in best]
        return best + ([] if self._is_proven else self._hints())

    @property
    def _is_proven(self) -> bool:
        """Whether nothing on any site can be quicker than some table, kept to; then only kept tables are compared."""
        if not self.book.noise.is_none or STRICT not in self.wishes.consumptions:
            return False
        return self.sites.best <= self.sites.least * (1 + ROUNDING)

    def _ways(self, tables: list[TriedTable], num_tasks: int) -> list[Candidate]:
        """All ways to consume the first tables for which there is one, so many tasks together; at least those of one
        table, and with noise of a few."""
        found: list[Candidate] = []
        is_proven = self._is_proven
        number = 1 if not num_tasks or self.book.noise.is_none else TABLES
        for table in tables:
            ways = [one for one in table.fitting(self.wishes, self.memory_bytes) if one.is_strict or not is_proven]
            found += ways
            number -= bool(ways)
            num_tasks -= sum(map(len, table.table.orders)) * bool(ways)
            if number <= 0 and num_tasks <= 0:
                break
        return found

    def _hints(self) -> list[Candidate]:
        """On the sites with the best bounds, and on those of shapes for which there is no table."""
        found: list[Candidate] = []
        with_table = {table.point.shape for table in self.sites.tables if table.has_room}
        sites = sorted(self.sites.opened, key=lambda site: site.least)
        for place, site in enumerate(sites):
            few = is_large(site.point)
            if place < (1 if few else SITES) or site.point.shape not in with_table:
                for cut, is_even in site.cuts[: 1 if few else 2]:
                    found += hints_for(site.point, cut, self.wishes, self.memory_bytes, is_even=is_even)
        self._hints_tried = found
        return found

    def _ranked(self, best: list[Candidate]) -> Plan:
        distinct = _distinct(best)
        top = distinct[: self.wishes.top]
        close = top[: 1 + self._has_close_second(top)]
        ranking = [self._told(one, close) for one in top]
        reasons = Reasons(
            book=self.book,
            wishes=self.wishes,
            judge=self.judge,
            memory_bytes=self.memory_bytes,
            tables=self.sites.tables,
            num_draws=FEW_DRAWS,
        )
        for place in range(1, len(top)):
            ranking[place] = replace(ranking[place], why=reasons.why_lost(top[place - 1], top[place]))
        named = [one for one in best if not one.choice.is_searched]
        even = [one for one in named if one.choice.is_even]
        changes = self._sensitivities(top)
        return Plan(
            ranking=tuple(ranking),
            is_decided=self._is_decided(top, close),
            refused=tuple(self._refused()),
            sensitivities=tuple(changes),
            bottleneck=bottleneck(changes),
            even=self._told(even[0], close) if even else None,
            named=self._told(named[0], close) if named else None,
            judged=(*ranking, *(self._told(one, close, FEWEST_DRAWS) for one in distinct[self.wishes.top :])),
            objective=self.wishes.objective,
            evaluations=self.judge.evaluations,
            num_draws=self.judge.num_draws,
            seed=self.seed,
            is_complete=not self.is_stopped,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if self.memory_bytes is None:
            yield "how much memory a device has is not known, so nothing is refused for lack of it"
        if self.book.noise.is_none:
            yield "the costs do not say how durations vary, so all times are those of a step without noise"

    def _has_close_second(self, top: list[Candidate]) -> bool:
        """Whether the second may well be the first, by the draws that both were chosen by."""
        if len(top) < 2:
            return False
        number = FEW_DRAWS if self.should_stop() else max(FEW_DRAWS, min(map(self.judge.num_known, top[:2])))
        behind, error = self.judge.difference(top[0], top[1], number)
        return behind <= CLEARLY * error

    def _told(self, one: Candidate, close: list[Candidate], least: int = FEW_DRAWS) -> Ranked:
        number, which = self._draws_of(one, close, least)
        return Ranked(choice=one.choice, forecast=forecast(one, self.book, self.judge, number, which))

    def _draws_of(self, one: Candidate, close: list[Candidate], least: int = FEW_DRAWS) -> tuple[int, int]:
        """By how many draws, and which, a candidate is told: by draws that nothing was chosen by where it came close,
        else by those by which it lost, at least so many. By few where the user had enough."""
        is_close = one in close
        number = self._num_held_out(one, close) if is_close else max(least, self.judge.num_known(one))
        return FEW_DRAWS if self.should_stop() else number, HELD_OUT if is_close else TRAINING

    def _num_held_out(self, one: Candidate, close: list[Candidate]) -> int:
        """By how many draws that nothing was chosen by the first is told, or a close second: by a quarter, which say
        enough of a difference on the same draws, where it must be simulated and the mean counts."""
        is_quick = one.is_strict or not self.judge.objective.is_mean
        return self.judge.num_draws if one is close[0] or is_quick else max(FEW_DRAWS, self.judge.num_draws // 4)

    def _sensitivities(self, top: list[Candidate]) -> list[Sensitivity]:
        if not top or not self.wishes.sensitivities:
            return []
        more = None if self.memory_bytes is None else lambda: self._with_more_memory(top[0])
        return sensitivities(top[0], self.judge, FEW_DRAWS, more, self.should_stop)

    def _with_more_memory(self, one: Candidate) -> float:
        """Milliseconds per sample of the best table or order that its shape would have with a GiB more; what is no
        better than the candidate is not looked for."""
        assert self.memory_bytes is not None
        shape, present = one.choice.shape, self.judge.value(one, FEW_DRAWS)
        sites = Sites(self.book, self.wishes, self.judge, self.memory_bytes + GIB, FEW_DRAWS, best=present)
        for point in points_of(shape, self.book, self.wishes):
            sites.add(point)
        for _ in sites.look(self.should_stop):
            pass
        for _ in self._searching(sites):
            pass
        return sites.best

    def _searching(self, sites: Sites) -> Iterator[Site]:
        """Look for orders without a name, where they are wanted."""
        if not self.wishes.orders or self.wishes.schedules is not None:
            return iter(())
        return sites.search(SEARCHED_SITES, round(EFFORT * self.wishes.effort), self.seed, self.should_stop)

    def _refused(self) -> list[Refused]:
        """Shapes of which nothing fits; where the user had enough, only if that is all there is to tell."""
        fitting = {table.point.shape for table in self.sites.tables if table.has_room}
        fitting |= {one.choice.shape for one in self._hints_tried}
        short = [*self.sites.refused, *(table.point.shape for table in self.sites.tables)]
        is_enough = bool(fitting) and self.should_stop()
        lacking = [] if is_enough else [shape for shape in dict.fromkeys(short) if shape not in fitting]
        changes = Changes(self.book, self.wishes, self.memory_bytes)
        found = self.refused + [changes.refused(shape) for shape in lacking[:MOST_REFUSED]]
        distinct = {(each.shape.num_stages, each.shape.data, each.shape.tensor, each.reason): each for each in found}
        return list(distinct.values())

    def _is_decided(self, top: list[Candidate], close: list[Candidate]) -> bool:
        """Whether the first is ahead of the second by more than the error of their difference."""
        if len(top) < 2:
            return bool(top)
        number, which = self._draws_of(top[1], close)
        ahead, error = self.judge.difference(top[0], top[1], number, which)
        return ahead > error

    def _tell(self, doing: str, done: int, total: int) -> None:
        best = self.sites.best
        self.progress(Progress(doing, done, total, None if best == float("inf") else best))


def _distinct(best: list[Candidate]) -> list[Candidate]:
    """Of each order on a cut the best way to consume it."""
    found: dict[object, Candidate] = {}
    for one in best:
        choice = one.choice
        key = choice.shape, choice.cut.placement, choice.cut.counts, choice.order_name
        found.setdefault(key, one)
    return list(found.values())
