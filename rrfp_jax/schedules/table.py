"""The table of a schedule: for every stage, the order of its tasks; and operations put into such a table.

A table is one thing used in three ways: run strictly (each stage waits for its next entry), used as a hint (the rank
in the table breaks ties among ready tasks), and simulated. It says nothing about time: an empty cell only shows where
the construction left a gap, and execution ignores it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rrfp_jax.field_rules import check_types, typed, with_type
from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.operations import COMPUTE, Op, Per
from rrfp_jax.schedules.tasks import Placement, Task, TaskKind
from rrfp_jax.schedules.validation import check_orders, out_of_order, peak_in_flight


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
    weights_fill: bool = field(default=False, compare=False)
    """Whether W stand where a stage would idle. As a hint they then rank behind all F and I, wherever a stage may hold
    more than these rows do."""
    hint: "ScheduleTable | None" = field(default=None, compare=False)
    """The table that ranks ready tasks in place of this one, where these rows suit strict consumption alone. A CSV file
    holds neither this nor :attr:`weights_fill`, and equal rows make equal tables."""

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
        return self

    @cached_property
    def execution(self) -> tuple[Task, ...]:
        """All tasks in an order in which the stages can finish them, each keeping to its row.

        Raises ValueError as :meth:`validate`.
        """
        return check_orders(self.name, self.placement, self.graph, self.orders)

    @property
    def was_validated(self) -> bool:
        """Whether :meth:`validate` has found nothing wrong."""
        return "execution" in self.__dict__

    def peak_in_flight(self) -> tuple[int, ...]:
        """Returns the most microbatches that each stage holds at once, from the first F there to the last B or W."""
        return tuple(peak_in_flight(order) for order in self.orders)

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
            peaks.append(peak / self.graph.passes_per_microbatch(chunks))
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
        """Raises ValueError unless every chunk adds up its gradients in microbatch order."""
        found = out_of_order(self.graph, self.orders)
        if found is not None:
            raise ValueError(
                f"schedule {self.name!r} runs {found[0]} before {found[1]}, and deterministic runs add gradients up in "
                "microbatch order: take a schedule with its backwards in that order, or only rank by it (ready, with "
                "footprint off)"
            )

    def __iter__(self) -> Iterator[tuple[Task | None, ...]]:
        return iter(self.rows)


def relative_sizes(chunk_parts: Sequence[float], num_chunks: int) -> tuple[float, ...]:
    """Returns the sizes of the chunks, 1 on average and equal without parts. Raises ValueError unless there is a part
    per chunk."""
    if not chunk_parts:
        return (1.0,) * num_chunks
    if len(chunk_parts) != num_chunks:
        raise ValueError(f"{len(chunk_parts)} chunk parts for {num_chunks} chunks: give one per chunk")
    return tuple(part * num_chunks / sum(chunk_parts) for part in chunk_parts)


@typed
def with_operations(table: ScheduleTable, ops: Iterable[Op]) -> ScheduleTable:
    """Returns the table with these operations as well, each put into its row where it is issued.

    A row then names the tasks of all lanes, in one sequence that could run one task after the other. Engines go on by
    themselves in execution; the sequence gives the order in which an engine takes its tasks, and the order in which
    memory is reserved for all of them.

    An operation that comes before a task stands ``lead`` tasks ahead of the first such one, but behind all that it
    comes after; any other one stands right behind the last task that it comes after. Raises ValueError where one does
    not fit the table's graph.
    """
    added = tuple(ops)
    _check_waits(added, table)
    graph = replace(table.graph, ops=(*table.graph.ops, *added))
    rows = []
    # An operation finds its place by those that it names, so these go into the row first.
    left, in_turn = [op for op in added if op.per is Per.MICROBATCH], list[Op]()
    while left:
        letters = {op.letter for op in left}
        in_turn.append(next(op for op in left if not letters.intersection((*op.after, *op.before))))
        left.remove(in_turn[-1])
    for chunks, order in zip(table.placement.chunks_of_stage, table.orders, strict=True):
        row = list(order)
        for op in in_turn:
            on = [c for c in chunks if op.is_on(c, graph.num_chunks)]
            for chunk, m in [(c, m) for c in on for m in graph.microbatches(c) if op.exists(c, m)]:
                task = Task(TaskKind(op.letter), chunk, m)
                row.insert(_place(task, op, row, graph), task)
        rows.append(tuple(row))
    hint = None if table.hint is None else with_operations(table.hint, added)
    return replace(table, graph=graph, rows=tuple(rows), hint=hint).validate()


def _check_waits(ops: Iterable[Op], table: ScheduleTable) -> None:
    stage_of, chunks = table.placement.stage_of_chunk, range(table.graph.num_chunks)
    for op in ops:
        for task, other in sorted(op.waits):
            if other.chunk not in chunks or task.chunk not in chunks or stage_of[task.chunk] != stage_of[other.chunk]:
                raise ValueError(
                    f"operation {op.letter!r}: {task} waits for {other}, which is not on its stage: name a task of its "
                    "own stage"
                )


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
