"""Operations put into the rows of a table, each where it is issued.

A row then names the tasks of all lanes, in one sequence that could run one task after the other. Its engines go on by
themselves in execution; the sequence says in which order an engine takes its tasks, and in which order memory is
reserved for all of them.
"""

from collections.abc import Iterable
from dataclasses import replace

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import COMPUTE, Op, Per, PipelineGraph, Task, TaskKind


@typed
def with_operations(table: ScheduleTable, ops: Iterable[Op]) -> ScheduleTable:
    """The table with these operations as well.

    An operation that comes before a task stands ``lead`` tasks ahead of the first such one, but behind all that it
    comes after; any other one stands right behind what it comes after. Raises ValueError where one does not fit the
    table's graph.
    """
    added = tuple(ops)
    _check_waits(added, table)
    graph = replace(table.graph, ops=(*table.graph.ops, *added))
    rows = []
    for chunks, order in zip(table.placement.chunks_of_stage, table.orders, strict=True):
        row = list(order)
        for op in _in_turn(added):
            for task in _tasks_of(op, graph, chunks):
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


def _in_turn(ops: tuple[Op, ...]) -> list[Op]:
    """Each behind those that it names."""
    left, turn = [op for op in ops if op.per is Per.MICROBATCH], list[Op]()
    while left:
        letters = {op.letter for op in left}
        op = next(op for op in left if not letters.intersection((*op.after, *op.before)))
        left.remove(op)
        turn.append(op)
    return turn


def _tasks_of(op: Op, graph: PipelineGraph, chunks: Iterable[int]) -> list[Task]:
    return [
        Task(TaskKind(op.letter), c, m)
        for c in chunks
        if op.is_on(c, graph.num_chunks)
        for m in graph.microbatches(c)
        if op.exists(c, m)
    ]


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
    at = place = min(followers)
    ahead = 0
    while at > earliest and ahead < op.lead:
        at -= 1
        if graph.lane(row[at].kind) == COMPUTE:
            place, ahead = at, ahead + 1
    return place
