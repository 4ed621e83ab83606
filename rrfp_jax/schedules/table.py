"""The table of a schedule: for every stage, the order of its tasks; its checks; and operations put into such a table.

A table is one thing used in three ways: run strictly (each stage waits for its next entry), used as a hint (the rank
in the table breaks ties among ready tasks), and simulated. It says nothing about time: an empty cell only shows where
the construction left a gap, and execution ignores it.

The checks ask whether every task is there once, on its stage, and whether strict execution can finish. Strict execution
is monotone: a stage runs its next entry once everything it waits for has finished, and finishing a task never blocks
another. So one execution decides the question for all, and where it stops, each blocked stage's next entry waits for a
task that lies behind the next entry of another blocked stage. Following these waits leads into a cycle, which is the
reason named.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from rrfp_jax.field_rules import check_types, typed, with_type
from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.operations import COMPUTE, Op, Per
from rrfp_jax.schedules.tasks import BUILT_IN_KINDS, Pair, Placement, Task, TaskKind

_Orders = Sequence[Sequence[Task]]
_new_task = tuple.__new__
"""Makes a task in 0.4 of the time that its constructor takes."""


@dataclass(frozen=True)
class ScheduleTable:
    """The order of the tasks of every stage.

    ``rows[s]`` holds the cells of stage ``s``; None is an empty slot. Construction checks only the number of rows, so
    that a broken table can be looked at; :meth:`validate` checks the rest.
    """

    name: str
    placement: Placement
    graph: PipelineGraph
    rows: tuple[tuple[Task | None, ...], ...]
    pairs: frozenset[Pair] = frozenset()
    """The entries, each right behind the other in its row, that a stage runs as one program where it makes pairs, and
    one after the other elsewhere."""
    weights_fill: bool = field(default=False, compare=False)
    """Whether W stand where a stage would idle. As a hint they then rank behind all F and I, wherever a stage may hold
    more than these rows do."""
    hint: "ScheduleTable | None" = field(default=None, compare=False)
    """The table that ranks ready tasks in place of this one, where these rows suit strict consumption alone. A CSV file
    holds neither this nor :attr:`weights_fill`, and equal rows make equal tables."""
    for_microbatches: "Callable[[int], ScheduleTable] | None" = field(default=None, compare=False, repr=False)
    """Builds the same schedule for another number of microbatches, and raises ValueError where there is none; None:
    nothing is known but the rows."""

    def __post_init__(self) -> None:
        check_types(self, "name", "placement", "graph", "weights_fill", "hint")
        rows: Any = self.rows
        if not isinstance(rows, tuple | list) or not all(isinstance(row, tuple | list) for row in rows):
            raise ValueError(f"rows is {with_type(rows)}: give a tuple of tasks for each stage")
        if len(self.rows) != self.placement.num_stages:
            raise ValueError(
                f"table {self.name!r} has {len(self.rows)} rows, its placement {self.placement.num_stages} stages: "
                "give one row per stage"
            )
        if self.graph.num_chunks != self.placement.num_chunks:
            raise ValueError(
                f"table {self.name!r}: the graph has {self.graph.num_chunks} chunks, the placement "
                f"{self.placement.num_chunks}: give both the same chunks"
            )

    @classmethod
    def from_orders(
        cls, name: str, placement: Placement, graph: PipelineGraph, orders: Iterable[Iterable[Task]]
    ) -> "ScheduleTable":
        """Returns a table without empty slots."""
        return cls(name, placement, graph, tuple(tuple(order) for order in orders))

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each stage, in order, without the empty slots."""
        return tuple(tuple(task for task in row if task is not None) for row in self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the orders' tasks, a line per stage."""
        lines = "\n".join(" ".join(map(str, order)) for order in self.orders)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def validate(self) -> "ScheduleTable":
        """Returns the table itself if every stage can run its row to the end and all tasks appear exactly once.

        Raises ValueError, in one sentence, for a row that names a task that the graph does not have or that lives on
        another stage, for a duplicated or missing task, and for a deadlock (with the cycle of tasks that wait for each
        other).
        """
        _ = self.execution  # which checks, and keeps the result for whoever asks for it
        if self.pairs:
            _check_pairs(self)
        return self

    @cached_property
    def execution(self) -> tuple[Task, ...]:
        """All tasks in an order in which the stages can finish them, each keeping to its row.

        Raises ValueError as :meth:`validate`.
        """
        return check_orders(self.name, self.placement, self.graph, self.orders)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Returns the most microbatches that each stage holds at once, from the first F there to the last B or W."""
        peaks = []
        for order in self.orders:
            last = {task.microbatch: position for position, task in enumerate(order)}
            held: set[int] = set()
            peak = 0
            for position, task in enumerate(order):
                held.add(task.microbatch)
                peak = max(peak, len(held))
                if last[task.microbatch] == position:
                    held.remove(task.microbatch)
            peaks.append(peak)
        return tuple(peaks)

    def peak_activations(self, chunk_parts: Sequence[float] = ()) -> tuple[float, ...]:
        """Returns the most activations that each stage holds at once.

        One unit is all that a stage keeps of one microbatch over its chunks (of one direction, if the pipeline is
        bidirectional); each chunk keeps an equal part of it, or one in the proportions of ``chunk_parts``, from F to
        B or W.
        """
        sizes = relative_sizes(chunk_parts, self.graph.num_chunks)
        peaks = []
        for chunks, order in zip(self.placement.chunks_of_stage, self.orders, strict=True):
            peak = held = 0.0
            for task in order:
                takes, frees = self.graph.memory_effect(task)
                held += takes * sizes[task.chunk]
                peak = max(peak, held)
                held -= frees * sizes[task.chunk]
            peaks.append(peak * self.graph.memory_unit / self.graph.kept_per_microbatch(chunks))
        return tuple(peaks)

    def check_window(self, window: int | Sequence[int]) -> None:
        """Raises ValueError if some stage holds more microbatches than its window (one for all, or one per stage)."""
        windows = [window] * self.num_stages if isinstance(window, int) else list(window)
        if len(windows) != self.num_stages:
            raise ValueError(
                f"{len(windows)} windows do not fit the {self.num_stages} stages of table {self.name!r}: "
                "give one number, or one per stage"
            )
        for stage, (peak, limit) in enumerate(zip(self.peak_in_flight(), windows, strict=True)):
            if peak > limit:
                raise ValueError(
                    f"table {self.name!r} holds {peak} microbatches on stage {stage}, but the window there is {limit}: "
                    f"raise the window to {peak}, or take a schedule with a lower peak"
                )

    def check_accumulation(self) -> None:
        """Raises ValueError unless gradients are added up in microbatch order, and of each the last pass first."""
        graph = self.graph
        for order in self.orders:
            latest: dict[int, Task] = {}
            for task in order:
                if not graph.has_backward(task.chunk) or task.kind is not graph.accumulating_kind(task.chunk):
                    continue
                before = latest.setdefault(graph.holder(task.chunk), task)
                if (before.microbatch, -before.chunk) > (task.microbatch, -task.chunk):
                    raise ValueError(
                        f"schedule {self.name!r} runs {before} before {task}, and deterministic runs add gradients up "
                        "in microbatch order: take a schedule with its backwards in that order, or only rank by it "
                        "(ready, with footprint off)"
                    )
                latest[graph.holder(task.chunk)] = task


def relative_sizes(chunk_parts: Sequence[float], num_chunks: int) -> tuple[float, ...]:
    """Returns the sizes of the chunks, 1 on average and equal without parts. Raises ValueError unless there is a part
    per chunk."""
    if not chunk_parts:
        return (1.0,) * num_chunks
    if len(chunk_parts) != num_chunks:
        raise ValueError(f"{len(chunk_parts)} chunk parts for {num_chunks} chunks: give one per chunk")
    return tuple(part * num_chunks / sum(chunk_parts) for part in chunk_parts)


# -- checks of orders --------------------------------------------------------------------------------------------------


def check_orders(name: str, placement: Placement, graph: PipelineGraph, orders: _Orders) -> tuple[Task, ...]:
    """Returns all tasks in an order in which they can finish. Raises ValueError, naming the table, at the first defect
    that keeps these orders from running."""
    expected = all_needed(graph)
    for stage, order in enumerate(orders):
        for task in order:
            if task not in expected:
                raise ValueError(f"table {name!r}, stage {stage}: {why_unknown(task, graph)}")
            if placement.stage_of_chunk[task.chunk] != stage:
                raise ValueError(
                    f"table {name!r}, stage {stage}: {task} belongs to stage {placement.stage_of_chunk[task.chunk]}, "
                    f"which owns chunk {task.chunk}: move it to that row"
                )
    # Sets and counts tell whether anything is wrong; only then is it worth searching for the tasks to name.
    there = {task for order in orders for task in order}
    if len(there) < sum(map(len, orders)):
        counts = Counter(task for order in orders for task in order)
        duplicated = [task for task, count in counts.items() if count > 1]
        raise ValueError(f"table {name!r} runs {some(duplicated)} more than once: keep one entry each")
    if len(there) < len(expected):
        missing = [task for task in graph.tasks() if task not in there]
        stages = sorted({placement.stage_of_chunk[task.chunk] for task in missing})
        raise ValueError(f"table {name!r} misses {some(missing)}: add what is missing to the rows of stages {stages}")
    finished, position = execution_order(graph, orders)
    heads = {
        stage: order[at] for stage, (order, at) in enumerate(zip(orders, position, strict=True)) if at < len(order)
    }
    if heads:
        raise ValueError(f"table {name!r} {_why_blocked(placement, graph, heads, set(finished))}")
    return tuple(finished)


def _why_blocked(placement: Placement, graph: PipelineGraph, heads: dict[int, Task], done: set[Task]) -> str:
    """Returns the reason why no stage can run its next entry, with the remedy; ``heads`` has these entries."""
    stage_of = placement.stage_of_chunk
    stage = min(heads)
    path: dict[int, tuple[Task, Task]] = {}
    while stage not in path:
        task = heads[stage]
        needed = next(d for d in _needed_tasks(graph, task) if d not in done)
        path[stage] = (task, needed)
        stage = stage_of[needed.chunk]
    stages = list(path)
    cycle = [path[s] for s in stages[stages.index(stage) :]]
    if len(cycle) == 1:
        task, needed = cycle[0]
        return (
            f"breaks a dependency: stage {stage_of[task.chunk]} runs {task} before {needed}, for which it waits; "
            "exchange them"
        )
    links = []
    for (task, needed), (head, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        waits = f"{task} on stage {stage_of[task.chunk]} waits for {needed}"
        if needed != head:
            waits += f", which stage {stage_of[head.chunk]} runs only after {head}"
        links.append(waits)
    return f"deadlocks: {'; '.join(links)}; reorder one of these stages to break the cycle"


def some(tasks: Sequence[Task]) -> str:
    """Returns the first five tasks, and the number of further ones, as text."""
    shown = ", ".join(map(str, tasks[:5]))
    return shown if len(tasks) <= 5 else f"{shown} and {len(tasks) - 5} more"


def _needed_tasks(graph: PipelineGraph, task: Task) -> tuple[Task, ...]:
    """Returns the dependencies of a task that appear in a table. An operation that runs once per step is replaced by
    its own dependencies."""
    needed = graph.dependencies(task)
    if graph.ops and any(one.microbatch < 0 for one in needed):
        return tuple(d for one in needed for d in ((one,) if one.microbatch >= 0 else _needed_tasks(graph, one)))
    return needed


@lru_cache(maxsize=2)
def all_needed(graph: PipelineGraph) -> Mapping[Task, tuple[Task, ...]]:
    """Returns :func:`_needed_tasks` of each task, kept for the next table of the graph: a search makes many of them."""
    if graph.ops:
        return {task: _needed_tasks(graph, task) for task in graph.tasks()}
    # Without operations the same is put together chunk by chunk, in a third of the time: a table of 98,304 tasks waits
    # for little else. The tests compare it with `graph.dependencies`.
    chunks = range(graph.num_chunks)
    forwards = [{m: _new_task(Task, (TaskKind.F, c, m)) for m in graph.microbatches(c)} for c in chunks]
    kinds = [graph.input_gradient_kind(c) for c in chunks]
    gradients = [
        {m: _new_task(Task, (kinds[c], c, m)) for m in forwards[c]} if graph.has_backward(c) else {} for c in chunks
    ]
    needed: dict[Task, tuple[Task, ...]] = {}
    for chunk in chunks:
        inputs = [forwards[p] for p in graph.predecessors(chunk)]
        returned = [gradients[s] for s in graph.gradient_successors(chunk)]
        has_weights = graph.accumulating_kind(chunk) is TaskKind.W
        for m, forward in forwards[chunk].items():
            needed[forward] = tuple([each[m] for each in inputs if m in each])
            if gradients[chunk]:
                gradient = gradients[chunk][m]
                needed[gradient] = (forward, *[each[m] for each in returned if m in each])
                if has_weights:
                    needed[_new_task(Task, (TaskKind.W, chunk, m))] = (gradient,)
    return needed


def execution_order(
    graph: PipelineGraph, orders: _Orders, seconds: Mapping[Task, Task] | None = None
) -> tuple[list[Task], list[int]]:
    """Runs the orders strictly. Returns the tasks in an order in which they can finish, and each stage's position.

    ``seconds``: for the first task of each pair the second, whose inputs the stage waits for too.
    """
    finished: list[Task] = []
    done: set[Task] = set()
    waiting: dict[Task, list[int]] = {}
    position = [0] * len(orders)
    runnable = list(range(len(orders)))
    needed = all_needed(graph)
    if seconds:
        both = {a: (*needed[a], *(task for task in needed[b] if task != a)) for a, b in seconds.items()}
        needed = {**needed, **both}
    # A stage runs until its next entry is blocked, and is looked at again only once the blocker has finished: so every
    # entry is tried at most once per dependency, however many stages there are.
    while runnable:
        stage = runnable.pop()
        order = orders[stage]
        while position[stage] < len(order):
            task = order[position[stage]]
            for blocker in needed[task]:
                if blocker not in done:
                    waiting.setdefault(blocker, []).append(stage)
                    break
            else:
                done.add(task)
                finished.append(task)
                position[stage] += 1
                if task in waiting:
                    runnable.extend(waiting.pop(task))
                continue
            break
    return finished, position


def why_unknown(task: Task, graph: PipelineGraph) -> str:
    """Returns the reason why a table of this graph cannot have a task, with the remedy."""
    kind, chunk, m = task
    num_chunks, num_microbatches = graph.num_chunks, graph.num_microbatches
    if m < 0:
        why = "runs once per step and is not part of a table: remove it"
    elif chunk >= num_chunks:
        why = f"names chunk {chunk}, but there are {num_chunks}: use 0..{num_chunks - 1}"
    elif m >= num_microbatches:
        why = f"names microbatch {m}, but there are {num_microbatches}: use 0..{num_microbatches - 1}"
    elif not graph.exists(chunk, m):
        why = f"does not exist, because microbatch {m} skips chunk {chunk}: remove it"
    elif kind not in BUILT_IN_KINDS:
        known = ", ".join(graph.kinds(chunk))
        why = f"is an operation that chunk {chunk} does not have there: use {known}, or add it to the graph"
    elif not graph.has_backward(chunk):
        why = f"does not exist, because no gradient reaches chunk {chunk}: remove it"
    else:
        kinds = "I and W" if chunk in graph.split else "B"
        why = f"does not exist, because the backward of chunk {chunk} runs as {kinds}: write {kinds}"
    return f"{task} {why}"


_MAY_JOIN = {*product("F", "FBIW"), *product("BI", "F"), *product("I", "W"), *product("W", "FI")}
"""The kinds of two tasks that one program may run; of the last two the W may be that of the I."""


def _check_pairs(table: ScheduleTable) -> None:
    """Raise ValueError for a pair that no stage can run, and where strict execution in pairs cannot finish."""
    behind = {task: order[place - 1] for order in table.orders for place, task in enumerate(order) if place}
    firsts = {pair.first for pair in table.pairs}
    for first, second in sorted(table.pairs):
        if behind.get(second) != first:
            raise ValueError(f"table {table.name!r}: {second} is paired with {first}, so put it right behind that")
        if (first.kind, second.kind) not in _MAY_JOIN or second in firsts:
            raise ValueError(
                f"table {table.name!r}: {first} and {second} are no pair: join F with F, B, I or W, or I with W, once"
            )
        if first in all_needed(table.graph)[second] and (first.kind, second.kind) != (TaskKind.I, TaskKind.W):
            raise ValueError(f"table {table.name!r}: {second} waits for {first}, so the two cannot run as one program")
    seconds = {pair.first: pair.second for pair in table.pairs}
    _, position = execution_order(table.graph, table.orders, seconds)
    for stage, (order, at) in enumerate(zip(table.orders, position, strict=True)):
        if at < len(order):
            raise ValueError(
                f"table {table.name!r} can finish with one task after the other, but not in pairs: on stage {stage} "
                f"{order[at]} and its partner wait for tasks behind them; take a pair apart"
            )


# -- operations --------------------------------------------------------------------------------------------------------


@typed
def with_operations(table: ScheduleTable, ops: Iterable[Op]) -> ScheduleTable:
    """Returns the table with these operations as well, each put into its row where it is issued.

    A row then names the tasks of all lanes, in one sequence that could run one task after the other. Engines go on by
    themselves in execution; the sequence gives the order in which an engine takes its tasks, and the order in which
    memory is reserved for all of them.

    An operation that comes before a task stands ``lead`` tasks ahead of the first such one, but behind all that it
    comes after; any other one stands right behind the last task that it comes after. The table names no pairs any
    more. Raises ValueError where one does not fit the table's graph.
    """
    added = tuple(ops)
    stage_of, chunks = table.placement.stage_of_chunk, range(table.graph.num_chunks)
    for op in added:
        for task, other in sorted(op.waits):
            if other.chunk not in chunks or task.chunk not in chunks or stage_of[task.chunk] != stage_of[other.chunk]:
                raise ValueError(
                    f"operation {op.letter!r}: {task} waits for {other}, which is not on its stage: name a task of its "
                    "own stage"
                )
    graph = replace(table.graph, ops=(*table.graph.ops, *added))
    rows = []
    # An operation finds its place by those that it names, so these go into the row first.
    left, in_turn = [op for op in added if op.per is Per.MICROBATCH], list[Op]()
    while left:
        letters = {op.letter for op in left}
        in_turn.append(next(op for op in left if not letters.intersection((*op.after, *op.before))))
        left.remove(in_turn[-1])
    for own, order in zip(table.placement.chunks_of_stage, table.orders, strict=True):
        row = list(order)
        for op in in_turn:
            on = [c for c in own if op.is_on(c, graph.num_chunks)]
            for chunk, m in [(c, m) for c in on for m in graph.microbatches(c) if op.exists(c, m)]:
                task = Task(TaskKind(op.letter), chunk, m)
                row.insert(_place(task, op, row, graph), task)
        rows.append(tuple(row))
    hint = None if table.hint is None else with_operations(table.hint, added)
    # Operations may stand between the tasks of a pair, and no stage that has them joins tasks.
    return replace(table, graph=graph, rows=tuple(rows), pairs=frozenset(), hint=hint).validate()


def _place(task: Task, op: Op, row: list[Task], graph: PipelineGraph) -> int:
    needed = set(graph.dependencies(task))
    earliest = 1 + max((place for place, other in enumerate(row) if other in needed), default=-1)
    if not op.before:
        return earliest
    followers = (
        place
        for place, other in enumerate(row)
        if other.chunk == task.chunk and other.microbatch == task.microbatch and task in graph.dependencies(other)
    )
    # Count the lead in tasks of the compute lane alone: operations on other engines take none of the stage's time.
    at = place = min(followers)
    ahead = 0
    while at > earliest and ahead < op.lead:
        at -= 1
        if graph.lane(row[at].kind) == COMPUTE:
            place, ahead = at, ahead + 1
    return place
