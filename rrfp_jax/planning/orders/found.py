"""Orders that were found, and the best of them."""

from bisect import insort
from dataclasses import dataclass
from math import inf

from rrfp_jax.planning.orders.bounds import memory_bound
from rrfp_jax.planning.orders.dispatch import PLAIN, Keys, Manner, dispatch
from rrfp_jax.planning.orders.problem import NS_PER_MS, Problem, Rows
from rrfp_jax.planning.orders.replay import Replayed, peaks, replay
from rrfp_jax.planning.orders.rule import Rule
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable

SEARCHED = "searched"
"""The name of what has none."""
_KEPT = 8
PER_ORDER = 200
"""What an order costs beside its tasks, in tasks."""


@dataclass(frozen=True, kw_only=True)
class FoundOrder:
    """An order of a cut's tasks that fits."""

    table: ScheduleTable
    name: str
    """That of a named schedule, or ``searched``."""
    origin: str
    """What it came from, in words."""
    request: ScheduleRequest | None
    """What the named table is built from; None: it has no name."""
    makespan_ms: float
    """From first start to last end, every row strictly kept to."""
    peak: tuple[float, ...]
    """What activations take on each stage at most, in the unit of the room."""
    bound_ms: float
    """No order of the cut that fits is quicker."""
    evaluations: int
    """Orders whose time was worked out by then."""

    @property
    def is_named(self) -> bool:
        return self.request is not None

    @property
    def gap(self) -> float:
        """How far it lies above the bound, in parts of it."""
        return self.makespan_ms / self.bound_ms - 1 if self.bound_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An order in numbers."""

    makespan: int
    rows: Rows
    run: Replayed
    peak: tuple[int, ...]
    origin: str
    name: str = SEARCHED
    request: ScheduleRequest | None = None
    evaluations: int = 0
    manner: Manner = PLAIN
    """In which it was made."""
    rule: Rule | None = None
    """By which it was made, if by none but that."""

    @property
    def place(self) -> tuple[int, bool, int]:
        """Smaller is better: quicker, then named, then leaner."""
        return self.makespan, self.request is None, sum(self.peak)


class Pool:
    """The best candidates that fit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bound = max(problem.bound, memory_bound(problem))
        self.best: list[Candidate] = []
        """The quickest first; of equal makespan, origin and name one."""
        self.evaluations = 0
        self.tasks = 0
        """Of all evaluations together, and what each of them costs beside, in tasks."""

    @property
    def cutoff(self) -> float:
        """What is slower is not wanted."""
        return self.best[0].makespan if self.best else inf

    @property
    def is_settled(self) -> bool:
        """Whether nothing can be quicker than the best."""
        return bool(self.best) and self.best[0].makespan <= self.bound

    def count(self, num_tasks: int | None = None) -> None:
        """Another order is being evaluated, at the cost of so many tasks; None: of all there are."""
        self.evaluations += 1
        self.tasks += PER_ORDER + (self.problem.num_tasks if num_tasks is None else num_tasks)

    def dispatch(
        self, keys: Keys, manner: Manner, origin: str, *, cutoff: float | None = None, rule: Rule | None = None
    ) -> Candidate | None:
        """The candidate of these keys, if it is no slower than ``cutoff``; None: than the best."""
        made = dispatch(self.problem, keys, manner, cutoff=self.cutoff if cutoff is None else cutoff)
        self.count(sum(map(len, made.rows)))
        return self.offer(made.rows, origin, manner=manner, rule=rule) if made.is_complete else None

    def offer(
        self,
        rows: Rows,
        origin: str,
        *,
        name: str = SEARCHED,
        request: ScheduleRequest | None = None,
        manner: Manner = PLAIN,
        rule: Rule | None = None,
    ) -> Candidate | None:
        """The candidate, if the rows run and fit."""
        peak = peaks(self.problem, rows)
        if any(most > room for most, room in zip(peak, self.problem.room, strict=True)):
            return None
        run = replay(self.problem, rows)
        if run is None:
            return None
        made = Candidate(
            makespan=run.makespan,
            rows=rows,
            run=run,
            peak=peak,
            origin=origin,
            name=name,
            request=request,
            evaluations=self.evaluations,
            manner=manner,
            rule=rule,
        )
        if not any(other.place[:2] == made.place[:2] and other.name == made.name for other in self.best):
            insort(self.best, made, key=lambda candidate: candidate.place)
            self._trim()
        return made

    def _trim(self) -> None:
        """Named ones stay, so that the best of them is always known."""
        searched = [candidate for candidate in self.best if candidate.request is None]
        for candidate in searched[_KEPT:]:
            self.best.remove(candidate)

    def found(self) -> list[FoundOrder]:
        """All of them as tables."""
        return [self._found(candidate) for candidate in self.best]

    def _found(self, candidate: Candidate) -> FoundOrder:
        problem = self.problem
        orders = [map(problem.tasks.__getitem__, row) for row in candidate.rows]
        return FoundOrder(
            table=ScheduleTable.from_orders(candidate.name, problem.placement, problem.graph, orders),
            name=candidate.name,
            origin=candidate.origin,
            request=candidate.request,
            makespan_ms=candidate.makespan / NS_PER_MS,
            peak=tuple(map(float, candidate.peak)),
            bound_ms=self.bound / NS_PER_MS,
            evaluations=candidate.evaluations,
        )
