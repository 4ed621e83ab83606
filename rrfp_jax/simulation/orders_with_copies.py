"""A good order of tasks and copies to the host together, where memory is short, found without a solver.

:func:`better_order` begins with rows of a few patterns and improves the best ones. The solver
(:mod:`rrfp_jax.simulation.optimum`) begins with what it finds. Times are whole units, so that sums are exact.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import product
from math import ceil, gcd, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core.memory import canonical_row
from rrfp_jax.schedules import (
    Op,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    Task,
    TaskKind,
    build_schedule,
    schedule_names,
)
from rrfp_jax.schedules.operations import operations_in
from rrfp_jax.simulation.bounds import lower_bound, task_lengths_ms, transfer_ms
from rrfp_jax.simulation.links import Links

UNITS_PER_MS = 10**6
_TRIED, _STARTS, _MOVES, _MOVED, _PRUNED = 120_000, 3, 4_000, 400_000, 1_000_000
"""Entries of the patterns tried, how many of these are improved, by how many random moves, entries of these moves, and
of the sequences in which a copy is left out."""
_WARMTH, _LEADS_ON = 0.02, 0.02
"""Parts of the makespan by which moves may make it worse at first, and of other ends that count beside it."""
_TWICE, _COPIES, _FURTHER = 0.3, 0.15, 0.6
"""How often two moves are made at once, a move concerns copies, and it goes further. No logarithms: all ranks of a run
must find the same order, whatever their libraries."""
_Wait = tuple[Task, Task, int]
"""A task, one that waits for it, and the transfer between them in units of time."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best order and the bound that the solver found in its time."""

    makespan_ms: float
    """Makespan of the best order found."""
    at_least_ms: float
    """No order that was asked for is better than this; equal to ``makespan_ms`` if that is proven optimal."""
    is_proven: bool
    table: ScheduleTable
    """The best order found: the tasks of each stage as they start, copies too."""


@dataclass(frozen=True)
class UnitTimes:
    """Lengths and transfers in whole units of time."""

    durations: dict[Task, int]
    waits: list[_Wait]
    copies: dict[str, int]
    """The lengths of copies by their letters."""
    moves: frozenset[tuple[int, int]]
    """The (chunk, microbatch) pairs whose activations may move."""
    units_per_ms: float

    def spans(self, starts: dict[Task, int]) -> dict[Task, tuple[int, int]]:
        """Returns start and end of tasks and copies that start at these times."""
        lengths = {task: self.durations[task] if task in self.durations else self.copies[task.kind] for task in starts}
        return {task: (start, start + lengths[task]) for task, start in starts.items()}


def times_in_units(
    graph: PipelineGraph, placement: Placement, durations_ms: NDArray[np.float64], links: Links, copies: Sequence[Op]
) -> UnitTimes:
    """Returns the times of all tasks, and of the copies that may be made."""
    lengths_ms = task_lengths_ms(graph, durations_ms, {})
    in_units = {task: round(ms * UNITS_PER_MS) for task, ms in lengths_ms.items()}
    waits = [
        (earlier, task, round(transfer_ms(earlier, task, placement, links) * UNITS_PER_MS))
        for task in in_units
        for earlier in graph.dependencies(task)
        if earlier in in_units
    ]
    of_copies = {op.letter: round(op.ms * UNITS_PER_MS) for op in copies}
    # Whole units of time, their greatest common divisor taken out: the solver's domains stay small.
    common = gcd(*in_units.values(), *of_copies.values(), *(transfer for *_, transfer in waits)) or 1
    return UnitTimes(
        {task: units // common for task, units in in_units.items()},
        [(earlier, later, transfer // common) for earlier, later, transfer in waits],
        {letter: units // common for letter, units in of_copies.items()},
        frozenset(
            (c, m)
            for c in range(graph.num_chunks)
            if graph.has_backward(c)
            for m in graph.microbatches(c)
            if any(op.exists(c, m) for op in copies)
        ),
        UNITS_PER_MS / common,
    )


def better_order(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    slots: Sequence[int],
    copies: tuple[Op, Op] | None = None,
    links: Links | None = None,
    tables: Iterable[ScheduleTable] = (),
    than_ms: float = inf,
) -> Optimum | None:
    """Returns a good order of tasks and copies together, found without the solver in about a second; None where it
    does not take less than ``than_ms``.

    Args:
        graph, placement, durations_ms, copies, links: as in :func:`find_optimum`; each way of the copies may have an
            engine of its own.
        slots: the most microbatches' activations that each stage may hold on its devices.
        tables: orders of this graph to begin with, whatever they hold.
    """
    times = times_in_units(graph, placement, durations_ms, links or Links(), copies or ())
    least_ms = lower_bound(graph, placement, durations_ms, links=links).total_ms
    if than_ms <= least_ms * (1 + 1e-9):
        return None
    steps = CopiedSteps(graph, placement, times, slots, copies or ())
    bound = ceil(least_ms * times.units_per_ms - 1e-3)
    best = steps.searched([steps.numbered(table.orders) for table in tables], bound)
    if best.makespan >= than_ms * times.units_per_ms:
        return None
    makespan_ms = best.makespan / times.units_per_ms
    return Optimum(
        makespan_ms=makespan_ms,
        at_least_ms=min(least_ms, makespan_ms),
        is_proven=best.makespan <= bound,
        table=table_of_spans(times.spans(steps.starts(best)), graph, placement, copies or ()),
    )


def tables_like(
    graph: PipelineGraph, placement: Placement, durations_ms: NDArray[np.float64], slots: Sequence[int]
) -> Iterator[ScheduleTable]:
    """Yields the named tables of this graph on this placement."""
    forward, input_gradient, weight_gradient = np.nanmean(durations_ms, axis=(0, 1)).tolist()
    request = ScheduleRequest(
        num_stages=placement.num_stages,
        num_microbatches=graph.num_microbatches,
        window=max(slots),
        durations_ms=(forward, input_gradient, weight_gradient),
        memory_limit=float(max(slots)),
    )
    for name in schedule_names():
        try:
            table = build_schedule(name, request)
        except ValueError:  # not for these sizes
            continue
        if (table.graph, table.placement) == (graph, placement):
            yield table


def _random_parts() -> Iterator[float]:
    """Yields numbers from 0 to 1, the same ones each time."""
    generator = np.random.default_rng(0)
    while True:
        yield from generator.random(1024).tolist()


class TimedSequence(NamedTuple):
    """A sequence of steps that fits, and the times that it leads to."""

    makespan: int
    cost: float
    """The makespan, and small parts of the ends of stages and tasks, which lead on where makespans are equal."""
    sequence: list[int]
    ends: list[int]


class CopiedSteps:
    """The tasks and possible copies of a step by number, for orders that are found without the solver.

    A *sequence* names all tasks, and the copies that are made. It is the order in which a stage's tasks, its copies and
    its memory take their turns. Each entry starts once its lane has ended the entry before it there, all that it waits
    for has ended and, where it takes memory, a slot is free that an entry before it has left. So the slots always
    suffice, and a sequence whose entry takes a slot that nothing before it frees does not fit.

    The search begins with rows of a few patterns: F up to a number in flight, then backwards and F in turn, each W some
    backwards behind its I; copies are put into a row as its slots ask for. The best one is improved by random moves of
    entries and copies, of which a few that make it worse are taken (simulated annealing). Microbatches keep their
    order on each chunk.
    """

    def __init__(
        self, graph: PipelineGraph, placement: Placement, times: UnitTimes, slots: Sequence[int], copies: Sequence[Op]
    ) -> None:
        self.graph, self.placement, stage_of = graph, placement, placement.stage_of_chunk
        pairs = [(c, m) for c in range(graph.num_chunks) if graph.has_backward(c) for m in graph.microbatches(c)]
        made = [Task(TaskKind(op.letter), *pair) for op in copies for pair in pairs if pair in times.moves]
        self.tasks = [*times.durations, *made]
        self.num_computed = len(times.durations)
        self.number = number = {task: n for n, task in enumerate(self.tasks)}
        spans = times.spans(dict.fromkeys(self.tasks, 0))
        self.lengths = [max(1, end) for _, end in spans.values()]
        """Units of each entry; at least 1, so that entries that wait for each other start one after the other."""
        self.stages = [stage_of[task.chunk] for task in self.tasks]
        engines = {
            op.letter: n
            for op in copies
            for n, lane in enumerate({each.lane: 0 for each in copies}, 1)
            if lane == op.lane
        }
        self.lanes = [
            engines.get(task.kind, 0) * placement.num_stages + stage
            for task, stage in zip(self.tasks, self.stages, strict=True)
        ]
        self.before: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        """For each entry those that it waits for, with transfers; a copy that is not made ends at 0."""
        for earlier, later, transfer in times.waits:
            self.before[number[later]].append((number[earlier], transfer))
        self.slots = [
            most * graph.passes_per_microbatch(chunks)
            for most, chunks in zip(slots, placement.chunks_of_stage, strict=True)
        ]
        self.takes, self.frees = [False] * len(self.tasks), [False] * len(self.tasks)
        self.stays: list[tuple[int, ...]] = []
        """For each activation its F, its first and its last backward task and, if it may move, its two copies."""
        for c, m in pairs:
            kinds = TaskKind.F, graph.input_gradient_kind(c), graph.accumulating_kind(c)
            ways = [op.letter for op in copies if (c, m) in times.moves]
            stay = tuple(number[Task(TaskKind(kind), c, m)] for kind in (*kinds, *ways))
            self.stays.append(stay)
            self.takes[stay[0]] = self.frees[stay[2]] = True
            if ways:
                out, back = stay[3:]
                self.frees[out] = self.takes[back] = True
                self.before[out].append((stay[0], 0))
                self.before[back].append((out, 0))
                self.before[stay[1]].append((back, 0))
        self.movable = [stay for stay in self.stays if len(stay) > 3]
        self.after: list[list[int]] = [[] for _ in self.tasks]
        for n, needed in enumerate(self.before):
            for other, _ in needed:
                self.after[other].append(n)
        for task, n in number.items():  # microbatches keep their order
            following = number.get(task._replace(microbatch=task.microbatch + 1))
            if n < self.num_computed and following is not None:
                self.after[n].append(following)

    def numbered(self, orders: Iterable[Iterable[Task]]) -> list[list[int]]:
        return [[self.number[task] for task in order] for order in orders]

    def starts(self, found: TimedSequence, *, by_number: bool = False) -> dict[Task, int]:
        """Returns the start of each entry; if asked, copies of a chunk take their turns by microbatch."""
        starts: dict[Task, int] = {}
        copied: dict[tuple[TaskKind, int], list[Task]] = defaultdict(list)
        for n in found.sequence:
            task = self.tasks[n]
            starts[task] = found.ends[n] - self.lengths[n]
            if by_number and n >= self.num_computed:
                copied[task.kind, task.chunk].append(task)
        for each in copied.values():  # they may, since F and backwards are in order
            starts |= zip(sorted(each), sorted(starts[task] for task in each), strict=True)
        return starts

    def without_needless_copies(self, starts: dict[Task, int], makespan: int) -> dict[Task, int]:
        """Returns an order that takes no longer, without copies that buy no time."""
        known = self.timed(sorted(map(self.number.__getitem__, starts), key=lambda n: starts[self.tasks[n]]))
        return starts if known is None or known.makespan > makespan else self.starts(self.pruned(known))

    def timed(self, sequence: list[int] | None, most: float = inf) -> TimedSequence | None:
        """Returns the times of a sequence; None where it does not fit, or costs more than ``most``."""
        if sequence is None:
            return None
        lengths, lanes, stages, before = self.lengths, self.lanes, self.stages, self.before
        takes, frees, num_stages = self.takes, self.frees, self.placement.num_stages
        ends, free = [0] * len(lengths), [0] * (max(lanes) + 1)
        slots = [[0] * most_held for most_held in self.slots]
        for n in sequence:
            lane = lanes[n]
            start = free[lane]
            for other, transfer in before[n]:
                arrival = ends[other] + transfer
                if arrival > start:  # noqa: PLR1730 (max takes twice the time, and this runs a million times)
                    start = arrival
            if takes[n]:
                left = slots[stages[n]]
                if not left:
                    return None
                start = max(start, heappop(left))
            end = start + lengths[n]
            if end > most:
                return None
            ends[n] = free[lane] = end
            if frees[n]:
                heappush(slots[stages[n]], end)
        computed = free[:num_stages]
        makespan = max(computed)
        cost = makespan + _LEADS_ON * (sum(computed) / num_stages + sum(ends) / len(ends) / 5)
        return TimedSequence(makespan, cost, sequence, ends) if cost <= most else None

    def merged(self, rows: Sequence[Sequence[int]]) -> list[int] | None:
        """Returns a sequence in which each stage keeps to its row; None where they wait for each other."""
        there = {n for row in rows for n in row}
        done, places, sequence, goes_on = set[int](), [0] * len(rows), list[int](), True
        while goes_on:
            goes_on = False
            for stage, row in enumerate(rows):
                while places[stage] < len(row):
                    n = row[places[stage]]
                    if not all(other in done or other not in there for other, _ in self.before[n]):
                        break
                    done.add(n)
                    sequence.append(n)
                    places[stage] += 1
                    goes_on = True
        return sequence if len(sequence) == len(there) else None

    # -- patterns ------------------------------------------------------------------------------------------------------

    def searched(self, bases: Iterable[list[list[int]]], bound: int) -> TimedSequence:
        """Returns the best sequence found, from rows of the patterns and of ``bases`` on."""
        starts: dict[int, TimedSequence] = {}  # by their makespans, the first of each
        for tried, rows in enumerate(self._patterns([each for each in bases if self.is_by_number(each)])):
            if starts and (tried * len(self.tasks) > _TRIED or min(starts) <= bound):
                break
            found = self.timed(self.merged(rows))
            if found is not None:
                starts.setdefault(found.makespan, found)
        # One microbatch after the other always fits, so there is a start.
        best = starts[min(starts)]
        for makespan in sorted(starts)[:_STARTS]:
            if best.makespan > bound:
                best = min(best, self._annealed(starts[makespan], bound), key=lambda each: each.makespan)
        return self.pruned(best)

    def is_by_number(self, rows: list[list[int]]) -> bool:
        place = {n: at for row in rows for at, n in enumerate(row)}
        return all(
            place[n] < place[other]
            for n in place
            for other in self.after[n]
            if other in place and self.lanes[n] == self.lanes[other] and self.tasks[n][:2] == self.tasks[other][:2]
        )

    def _patterns(self, bases: list[list[list[int]]]) -> Iterator[list[list[int]]]:
        """Yields rows with copies that fit, those that have proved best first."""
        graph, chunks_of_stage = self.graph, self.placement.chunks_of_stage
        plain = [self.numbered([canonical_row(replace(graph, ops=()), chunks)])[0] for chunks in chunks_of_stage]
        to_end, from_start = [0] * graph.num_chunks, [0] * graph.num_chunks
        for c in range(graph.num_chunks):
            from_start[c] = max((from_start[b] + 1 for b in graph.predecessors(c)), default=0)
        for c in reversed(range(graph.num_chunks)):
            to_end[c] = max((to_end[a] + 1 for a in graph.successors(c)), default=0)
        ahead = [max(to_end[c] for c in chunks) for chunks in chunks_of_stage]
        behind = [min(from_start[c] for c in chunks) for chunks in chunks_of_stage]
        for further, (spare, lead) in product((0, -1, -2, -3, 1), ((0, 0), (1, 1))):
            lasts = [max(0, most - 1 - spare) for most in self.slots]
            for lag, slope in product((max(lasts), 0, 1), (1, 2)):
                depths = [slope * hops + 1 + further for hops in ahead]
                lags = [min(lag, *each) for each in zip(behind, lasts, strict=True)]
                for rows, late in product((plain, *bases), (lags, lasts)):
                    made = [self._row(*each) for each in zip(rows, depths, lags, late, strict=True)]
                    yield from self._with_copies(made, spare, lead)
            for rows in (plain, *bases):
                yield from self._with_copies(rows, spare, lead)

    def _row(self, row: list[int], depth: int, lag: int, last_lag: int) -> list[int]:
        """Returns a stage's row with F until ``depth`` activations are in flight, and each W ``lag`` backwards late."""
        kinds = [self.tasks[n].kind for n in row]
        forwards = [n for n, kind in zip(row, kinds, strict=True) if kind is TaskKind.F]
        backwards = [n for n, kind in zip(row, kinds, strict=True) if kind in (TaskKind.B, TaskKind.I)]
        weights = {self.tasks[n][1:]: n for n, kind in zip(row, kinds, strict=True) if kind is TaskKind.W}
        forward_of = {stay[1]: stay[0] for stay in self.stays}
        found, owed, done = list[int](), list[int](), set[int]()
        left = iter(forwards)
        for number, back in enumerate(backwards):
            while len(done) - number < depth or (back in forward_of and forward_of[back] not in done):
                forward = next(left, None)
                if forward is None:
                    break
                found.append(forward)
                if self.takes[forward]:
                    done.add(forward)
            found.append(back)
            owed += [weights[self.tasks[back][1:]]] if self.tasks[back][1:] in weights else []
            if len(owed) > (lag if len(done) < len(forwards) else last_lag):
                found.append(owed.pop(0))
        return [*found, *left, *owed]

    def _with_copies(self, rows: list[list[int]], spare: int, lead: int) -> Iterator[list[list[int]]]:
        """Yields the rows with the fewest copies by which they hold no more than the slots less the spare ones, each
        way back ``lead`` entries early; nothing where that cannot be."""
        made = []
        for row, most in zip(rows, self.slots, strict=True):
            place = {n: at for at, n in enumerate(row)}
            held, copies = [0] * len(row), list[tuple[int, int]]()
            stays = sorted((stay for stay in self.stays if stay[0] in place), key=lambda stay: place[stay[0]])
            for stay in stays:
                for at in range(place[stay[0]], place[stay[2]] + 1):
                    held[at] += 1
            here, waiting = list[tuple[int, ...]](), iter(stays)
            upcoming = next(waiting, None)
            for at in range(len(row)):
                while upcoming is not None and place[upcoming[0]] < at:
                    here.append(upcoming)
                    upcoming = next(waiting, None)
                here = [stay for stay in here if place[stay[1]] > at and len(stay) > 3]
                while held[at] > max(1, most - spare) and here:
                    last = max(here, key=lambda stay: place[stay[1]])
                    here.remove(last)
                    first, end = place[last[0]], place[last[1]]
                    copies += [(first, last[3]), (max(first + 1, end - lead) - 1, last[4])]
                    for between in range(first + 1, end):
                        held[between] -= 1
            if max(held, default=0) > most:
                return
            behind: dict[int, list[int]] = defaultdict(list)
            for at, copy in sorted(copies, key=lambda each: self.takes[each[1]]):  # what leaves makes room first
                behind[at].append(copy)
            made.append([n for at, entry in enumerate(row) for n in (entry, *behind[at])])
        yield made

    # -- improvement ---------------------------------------------------------------------------------------------------

    def _annealed(self, best: TimedSequence, bound: int) -> TimedSequence:
        random, present = _random_parts(), best
        num_moves = min(_MOVES, _MOVED // len(best.sequence))
        for move in range(num_moves):
            warmth = _WARMTH * best.makespan * (1 - move / num_moves) ** 2
            sequence = self._moved(present.sequence, random)
            if next(random) < _TWICE:
                sequence = self._moved(sequence, random)
            found = self.timed(sequence, present.cost + warmth * next(random) ** 2)
            if found is not None:
                present = self._by_start(found)
                if found.makespan < best.makespan:
                    best = present
                    if best.makespan <= bound:
                        break
        return best

    def _by_start(self, found: TimedSequence) -> TimedSequence:
        ends, lengths = found.ends, self.lengths
        return found._replace(sequence=sorted(found.sequence, key=lambda n: ends[n] - lengths[n]))

    def _moved(self, sequence: list[int], random: Iterator[float]) -> list[int]:
        """Returns the sequence with one entry at another place, or with the copies of one activation or without."""
        sequence = sequence.copy()
        if next(random) < _COPIES and self.movable:
            forward, backward, _, out, back = self.movable[int(next(random) * len(self.movable))]
            if out in sequence:
                sequence.remove(out)
                sequence.remove(back)
                return sequence
            first, last = sequence.index(forward) + 1, sequence.index(backward)
            leaves = first + (int(next(random) * (last - first + 1)) if next(random) < 0.5 else 0)
            sequence.insert(last - (int(next(random) * (last - leaves + 1)) if next(random) < 0.5 else 0), back)
            sequence.insert(leaves, out)
            return sequence
        at = place = int(next(random) * len(sequence))
        entry = sequence[at]
        stage, further = self.stages[entry], 1
        while next(random) < _FURTHER:
            further += 1
        if next(random) < 0.5:
            while place > 0 and further and entry not in self.after[sequence[place - 1]]:
                place -= 1
                further -= self.stages[sequence[place]] == stage
        else:
            after = self.after[entry]
            while place < len(sequence) - 1 and further and sequence[place + 1] not in after:
                place += 1
                further -= self.stages[sequence[place]] == stage
        sequence.insert(place, sequence.pop(at))
        return sequence

    def pruned(self, best: TimedSequence) -> TimedSequence:
        """Returns the sequence without copies that buy no time, as many of them as can be looked at in a moment."""
        copied = set(best.sequence)
        moved = [stay[3:] for stay in self.stays if not copied.isdisjoint(stay[3:])]
        for out, back in moved[: _PRUNED // len(best.sequence)]:
            found = self.timed([n for n in best.sequence if n not in (out, back)], best.cost * (1 + _LEADS_ON))
            if found is not None and found.makespan <= best.makespan:
                best = self._by_start(found)
        return best


# -- the order that it found -------------------------------------------------------------------------------------------


def table_of_spans(
    spans: dict[Task, tuple[int, int]], graph: PipelineGraph, placement: Placement, copies: Sequence[Op]
) -> ScheduleTable:
    """Returns the table of tasks that run at these times, with the copies among them as operations."""
    letters = {op.letter for op in copies}
    before = TopologicalSorter({task: graph.dependencies(task) for task in spans if task.kind not in letters})
    turn = {task: n for n, task in enumerate(before.static_order())}  # decides where tasks take no time
    in_time = sorted(
        (task for task in spans if task.microbatch >= 0), key=lambda task: (*spans[task], turn.get(task, 0))
    )
    rows: list[list[Task]] = [[] for _ in range(placement.num_stages)]
    for task in in_time:
        rows[placement.stage_of_chunk[task.chunk]].append(task)
    graph = replace(graph, ops=(*graph.ops, *operations_in(rows, copies)))
    return ScheduleTable.from_orders("optimum", placement, graph, rows).validate()
