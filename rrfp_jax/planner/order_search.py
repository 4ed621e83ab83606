"""The quickest order of a cut in given memory: named tables, and a search for rules that the list scheduler runs.

The *named tables* are those of every schedule of the registry that has the cut's placement, in the variants that memory
allows. Schedules that take profiled times get the cut's own, those that take a limit of memory or windows get the
largest that memory allows. A fused table also orders a split backward, each I with its W right behind it: it sends
gradients on sooner, and is never slower; such an order has no name of its own.

Named tables come first, so that no found order is slower than one that fits. A *rule* ranks tasks by the key ``T m +
head(task)``, where ``T`` is the time of a microbatch on the fullest stage and ``head`` the time of a task on the way of
its microbatch when nothing holds that up: microbatches follow each other as in the building blocks of controllable
memory (arXiv 2405.15362). A rule may change that key: backwards come earlier by a part of the way forth, as in 1F1B; W
come later by some T, as in the zero-bubble schedules (arXiv 2401.10241); F of deeper chunks come earlier; microbatches
follow in groups, as in interleaved 1F1B (arXiv 2104.04473). The search takes the best value of one field after the
other, from a few rules on.

In ``experiments/paper/README.md`` a searched order is worth 1.004 times the best named table, where the cut is worth
1.241 times; a more thorough search (building blocks, perturbed orders) was not worth its code."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np

from rrfp_jax.costs import CutModel
from rrfp_jax.costs.forecast import ChunkBytes, forecast_stage
from rrfp_jax.planner.list_scheduler import (
    NS_PER_MS,
    OrderProblem,
    TaskKeys,
    TaskRows,
    memory_peaks,
    order_problem,
    run_list_scheduler,
    time_rows,
)
from rrfp_jax.schedules import Op, Task, TaskKind, chain
from rrfp_jax.schedules.operations import copy_ops
from rrfp_jax.schedules.registry import KNOWN, ScheduleEntry, build_schedule, schedule_names
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.simulation import better_order

SEARCHED = "searched"
"""Name of the orders that have none."""
BUDGET = 60_000
"""Tasks that a search may schedule beside the named tables."""
_PER_ORDER = 200
"""Cost of an order beside its tasks, in tasks."""
_KEPT = 8


OFFLOADED = "offloaded"
"""Name of the orders with copies to the host."""
_SHORTEST_MS = 1e-3
"""The least that a copy takes, as none takes no time."""


# -- named tables ------------------------------------------------------------------------------------------------------


def named_tables(cut: CutModel, problem: OrderProblem) -> Iterator[tuple[ScheduleTable, ScheduleRequest]]:
    """Yields all named tables with their requests, quick or not, whether they fit the memory or not.

    For a cut with a split backward those with a whole one are among them, but where they have a split twin.
    """
    for name in schedule_names():
        entry = KNOWN[name]
        plain = _request(cut, entry)
        if plain is None or (cut.split and f"{name}-split" in KNOWN):
            continue
        seen: list[ScheduleTable] = []
        for request in _variants(name, entry, plain, problem):
            try:
                table = built_table(name, request)
            except ValueError:  # the schedule does not exist for these sizes
                continue
            if (cut.split or not table.graph.split) and table not in seen:
                seen.append(table)
                yield table, request


@lru_cache(maxsize=256)  # another cut on the same placement has the same tables, but for those made from times
def built_table(name: str, request: ScheduleRequest) -> ScheduleTable:
    """Returns a named table, made once for equal requests; raises ValueError where these sizes do not suit it."""
    return build_schedule(name, request)


def _request(cut: CutModel, entry: ScheduleEntry) -> ScheduleRequest | None:
    """Returns the plain request; None where the schedule does not order a chain on this placement."""
    placement, m = cut.placement, cut.num_microbatches
    per_stage = placement.num_chunks // placement.num_stages
    plain = ScheduleRequest(num_stages=placement.num_stages, num_microbatches=m)
    if entry.from_times:
        times_ms = cut.durations_ms[0].mean(axis=1).sum(axis=0) / placement.num_stages
        forward_ms, input_gradient_ms, weight_gradient_ms = (float(ms) + cut.costs.task_ms for ms in times_ms)
        durations_ms = forward_ms, input_gradient_ms, weight_gradient_ms
        plain = replace(plain, durations_ms=durations_ms, comm_ms=cut.links.latency_ms)
    graph = chain(placement.num_chunks, m)
    if entry.any_graph:
        return replace(plain, graph=graph, placement=placement)
    if (
        entry.shape.is_sliced
        or entry.shape.is_sharded
        or (entry.shape.fixed_chunks and per_stage != entry.shape.chunks_per_stage)
    ):
        return None
    try:
        suits = (
            entry.shape.placement(placement.num_stages, per_stage) == placement
            and entry.shape.graph(placement.num_stages, per_stage, m) == graph
        )
    except ValueError:
        return None
    return replace(plain, chunks_per_stage=per_stage) if suits else None


def _variants(
    name: str, entry: ScheduleEntry, plain: ScheduleRequest, problem: OrderProblem
) -> Iterator[ScheduleRequest]:
    """Yields the request itself and others that may be quicker or hold less."""
    yield plain
    p, m = plain.num_stages, plain.num_microbatches
    if entry.has_groups:
        yield from (replace(plain, group_size=size) for size in range(-(-p // 2), p + 1) if m % size == 0)
    # For each stage the microbatches that fit with all their chunks, at most all of them.
    sums = [sum(problem.weights[c * m] for c in chunks) for chunks in problem.placement.chunks_of_stage]
    held = [
        m if available == inf or not each else min(m, int(available // each))
        for available, each in zip(problem.available, sums, strict=True)
    ]
    if name == "zb-auto":
        for limit in sorted({min(held), max(held), p, (min(held) + max(held)) // 2}):
            if limit >= 1 and limit != 2 * p:
                yield replace(plain, memory_limit=float(limit))
    if name == "eager-1f1b" and min(held) >= 1:
        windows = tuple(min(held[: stage + 1]) for stage in range(p))
        yield replace(plain, window=windows)
        yield replace(plain, window=tuple(max(1, min(windows[0], windows[stage]) - stage) for stage in range(p)))


def split_orders(orders: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """Returns the orders with I and W in the place of B."""
    parts = (TaskKind.I, TaskKind.W)
    return [
        [
            part
            for task in order
            for part in ([task._replace(kind=k) for k in parts] if task.kind is TaskKind.B else [task])
        ]
        for order in orders
    ]


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OrderRule:
    """A way to rank tasks, and to run the ranking."""

    lag: float = 4.0
    """Periods by which W come later than their I; infinite: W only fill gaps."""
    patience: float = 0.0
    pull: float = 0.5
    """Part of the way forth by which backwards come earlier."""
    keeps_reserve: bool = True
    group: int = 1
    """Microbatches that follow each other closely."""
    deepen: float = 0.0
    """Part of their head by which F come earlier."""

    def keys(self, problem: OrderProblem) -> TaskKeys:
        """Returns the keys of all tasks, in nanoseconds."""
        ways, m = problem.num_ways, problem.num_microbatches
        head, period = problem.heads, problem.period
        microbatch = np.arange(len(problem.durations)) % m
        close = microbatch % self.group
        found = head + period * (microbatch - close + close * problem.num_stages / problem.num_chunks)
        found[:ways] -= self.deepen * head[:ways]
        found[ways : 2 * ways] -= self.pull * head[ways : 2 * ways].min()
        if problem.is_split:
            found[2 * ways :] += found.max() if self.lag == inf else self.lag * period
        return found


_STARTS = (OrderRule(), OrderRule(lag=1.0, patience=0.5), OrderRule(lag=inf, pull=0.0), OrderRule(lag=0.0, pull=1.0))


@dataclass(frozen=True, kw_only=True)
class FoundOrder:
    """An order of a cut's tasks that fits."""

    problem: OrderProblem
    rows: TaskRows
    name: str
    """The name of the schedule, or ``searched``."""
    is_named: bool
    """Whether a schedule of that name has this very order."""
    makespan: int
    """Nanoseconds from the first start to the last end, every row strictly kept to."""
    peak: tuple[int, ...]
    """The most bytes that activations take on each stage."""

    @property
    def place(self) -> tuple[int, bool, int]:
        """Sorts quicker orders first, then named ones, then leaner ones."""
        return self.makespan, not self.is_named, sum(self.peak)

    @cached_property
    def table(self) -> ScheduleTable:
        """The order as a table."""
        orders = [map(self.problem.tasks.__getitem__, row) for row in self.rows]
        return ScheduleTable.from_orders(self.name, self.problem.placement, self.problem.graph, orders)

    @property
    def makespan_ms(self) -> float:
        """The makespan in milliseconds."""
        return self.makespan / NS_PER_MS

    @property
    def bound_ms(self) -> float:
        """Milliseconds that no order of the cut beats, whatever the memory."""
        return self.problem.bound / NS_PER_MS


def search_orders(
    cut: CutModel,
    available: Sequence[float] | None,
    *,
    budget: int = BUDGET,
) -> list[FoundOrder]:
    """Returns orders that fit, the quickest first; none where nothing fits.

    Args:
        cut: durations, links, and the bytes of chunks.
        available: bytes of each stage for activations; None: unlimited.
        budget: tasks that may be scheduled on the way, all orders together, beside the named tables. They are counted,
            so that the same costs give the same orders on every machine.
    """
    search = _Search(cut, available)
    search.try_named()
    search.try_rules(budget)
    return search.best


def named_orders(cut: CutModel, available: Sequence[float] | None) -> list[FoundOrder]:
    """Returns the orders of named tables that fit, the quickest first."""
    search = _Search(cut, available)
    search.try_named()
    return [order for order in search.best if order.is_named]


class _Search:
    """The best orders of a cut that are known to fit."""

    def __init__(self, cut: CutModel, available: Sequence[float] | None) -> None:
        self.cut, self.problem = cut, order_problem(cut, available)
        self.best: list[FoundOrder] = []
        self.num_tasks = 0
        self._makespans: dict[object, tuple[float, float]] = {}
        """Makespan and cutoff of each ranking that was run. Many rules rank all tasks alike."""

    def try_named(self) -> None:
        """Times every named table, with its backward split where the cut has that."""
        for table, _ in named_tables(self.cut, self.problem):
            is_named = bool(table.graph.split) == self.cut.split
            orders = table.orders if is_named else split_orders(table.orders)
            self._offer(self.problem.numbered(orders), table.name if is_named else SEARCHED, is_named=is_named)
            if self._is_settled():
                return

    def try_rules(self, budget: int) -> None:
        """Takes the best value of each field in turn until none is better, from each of some rules on."""
        tried: dict[OrderRule, float] = {}
        self.num_tasks = 0

        def goes_on() -> bool:
            return self.num_tasks < budget and not self._is_settled()

        def makespan(rule: OrderRule, present: float) -> float:
            if rule not in tried:
                tried[rule] = self._run(rule, max(present, self.best[0].makespan if self.best else inf))
            return tried[rule]

        p, values = self.problem.num_stages, dict[str, tuple[Any, ...]]()
        if self.problem.is_split:
            values["lag"] = (0.0, 0.5, 1.0, 2.0, 4.0, inf)
        values |= {"patience": (0.0, 0.25, 0.5, 1.0, 2.0), "pull": (0.0, 0.5, 1.0)}
        if self.problem.num_chunks > p:
            groups = tuple(sorted({1, -(-p // 2), p}))
            values |= {"keeps_reserve": (True, False), "group": groups, "deepen": (0.0, 0.5, -0.5)}
        for start in _STARTS:
            if not goes_on():
                return
            rule, best, is_better = start, makespan(start, inf), True
            while is_better:
                is_better = False
                for name, of_field in values.items():
                    for other in (replace(rule, **{name: value}) for value in of_field):
                        if other not in tried and not goes_on():
                            return
                        if (found := makespan(other, best)) < best:
                            rule, best, is_better = other, found, True

    def _run(self, rule: OrderRule, cutoff: float) -> float:
        """Returns the makespan of a rule; infinite where it gets stuck, or lasts longer than the cutoff."""
        keys = rule.keys(self.problem)
        ranking = blake2b(np.argsort(keys, kind="stable").tobytes()).digest(), rule.patience, rule.keeps_reserve
        known, known_cutoff = self._makespans.get(ranking, (inf, -inf))
        self.num_tasks += _PER_ORDER  # also for what is known, so that the search always comes to its end
        if known < inf or cutoff <= known_cutoff:
            return known
        rows, is_complete = run_list_scheduler(
            self.problem, keys, patience=rule.patience, keeps_reserve=rule.keeps_reserve, cutoff=cutoff
        )
        self.num_tasks += sum(map(len, rows))
        makespan = self._offer(rows) if is_complete else inf
        self._makespans[ranking] = makespan, cutoff
        return makespan

    def _offer(self, rows: TaskRows, name: str = SEARCHED, *, is_named: bool = False) -> float:
        """Keeps the order if it is among the best; returns its makespan, infinite where it deadlocks or does not
        fit."""
        peak = memory_peaks(self.problem, rows)
        if any(most > limit for most, limit in zip(peak, self.problem.available, strict=True)):
            return inf
        makespan = time_rows(self.problem, rows)
        if makespan is None:
            return inf
        made = FoundOrder(problem=self.problem, rows=rows, name=name, is_named=is_named, makespan=makespan, peak=peak)
        if not any(other.place[:2] == made.place[:2] and other.name == name for other in self.best):
            insort(self.best, made, key=lambda each: each.place)
            # Named orders all stay, so that the best of them is always known.
            for other in [each for each in self.best if not each.is_named][_KEPT:]:
                self.best.remove(other)
        return made.makespan

    def _is_settled(self) -> bool:
        """Returns whether nothing can be quicker than the best."""
        return bool(self.best) and self.best[0].makespan <= self.problem.bound


# -- with copies to the host -------------------------------------------------------------------------------------------


def copies_of(cut: CutModel) -> tuple[Op, Op] | None:
    """Returns the copies by which activations of a cut may move to the host and back, each as long as the longest; None
    where nothing tells how long they take."""
    if not cut.copies_ms:
        return None
    out, back = copy_ops(max(_SHORTEST_MS, *cut.copies_ms.values()))
    chunks = frozenset(cut.copies_ms)
    return replace(out, chunks=chunks), replace(back, chunks=chunks)


def slots_with_copies(cut: CutModel, memory_bytes: int | None) -> tuple[int, ...] | None:
    """Returns the most microbatches whose activations each stage may hold on its devices while all others are on the
    host; None where a stage holds none."""
    m, found = cut.num_microbatches, list[int]()
    for chunks, limit in zip(cut.placement.chunks_of_stage, cut.limits(memory_bytes), strict=True):
        sizes, most = [cut.chunk_bytes[chunk] for chunk in chunks], len(chunks) * m

        def peak(slots: int, sizes: Sequence[ChunkBytes] = sizes, most: int = most) -> int:
            return forecast_stage(sizes, m, m, footprint=slots * len(sizes), moved=(most, most)).peak

        found.append(m if limit is None else bisect_right(range(1, m + 1), limit, key=peak))
    return tuple(found) if min(found) > 0 else None


def order_with_copies(
    cut: CutModel, memory_bytes: int | None, tables: Iterable[ScheduleTable] = ()
) -> ScheduleTable | None:
    """Returns a good order of tasks and copies to the host together, begun from some orders of the cut; None where none
    is known to fit."""
    copies, slots = copies_of(cut), slots_with_copies(cut, memory_bytes)
    if copies is None or slots is None:
        return None
    found = better_order(
        cut.graph, cut.placement, cut.task_lengths_ms, slots=slots, copies=copies, links=cut.links, tables=tables
    )
    if found is None:
        return None
    return replace(found.table, name=OFFLOADED if found.table.graph.ops else SEARCHED)
