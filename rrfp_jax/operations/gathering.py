"""Gather and drop: parameters lie cut over their stage's devices, and are whole only around the tasks that use them.

::

    table = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=4, num_microbatches=16))
    ordering = Ordering(schedule=gathered(table, prefetch=1))

Every task that uses parameters gets an operation ahead of it that gathers them and one behind it that drops them, on an
engine of their own: ``GF`` and ``DF`` around F, ``GB`` and ``DB`` around B, and so on; parameters that are gathered
already stay. As the optimizer works on whole arrays, ``GU`` and ``DU`` stand around the update, one chunk after the
other. The first step begins with all parameters as they were initialised, whole.

How far ahead
-------------
``prefetch`` is the number of tasks ahead of which a gather may run: it waits until the task that stands one more ahead
in the stage's row has dropped its own, and drops go in the row's order. So no more than ``prefetch + 1`` uses are
served at a time, and no more chunks are whole: consumed ``ready``, a stage departs from its row by no more tasks.
Gathering itself is as in ZeRO-3 (Rajbhandari et al. 2020), along the devices that one unit has in one process.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules import ScheduleTable, with_operations
from rrfp_jax.tasks import COMPUTE, Op, Per, Task, TaskKind

NET = "net"
"""The engine of gathers and drops."""
Wait = tuple[Task, Task]
"""A task, and one that it waits for."""


@typed
def gathered(
    table: ScheduleTable, *, prefetch: int = 1, part: float = 0.0, ms: float = 0.0, lane: str = NET
) -> ScheduleTable:
    """The table with gathers and drops around all its tasks of the compute lane.

    Args:
        prefetch: how many tasks ahead of the one that needs them parameters are gathered; 0: only once the task before
            has dropped its own.
        part: what a chunk's whole parameters take, in parts of what it keeps of a microbatch for its backward. Each use
            counts by itself, also of parameters that are there already.
        ms: how long a gather takes, for simulation.

    Raises ValueError for a negative ``prefetch``. A table that ranks by another one, its ``hint``, ranks by itself.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}: give 0 or more tasks")
    graph, own_rows = table.graph, replace(table, hint=None)
    uses = [[task for task in row if graph.lane(task.kind) == COMPUTE] for row in table.orders]
    waits = {wait for of_stage in uses for wait in _waits(of_stage, prefetch)}
    waits |= {wait for of_stage in uses for wait in _waits_of_updates(of_stage, table)}
    common: dict[str, Any] = {"lane": lane}
    ops = []
    for kind in dict.fromkeys(task.kind for of_stage in uses for task in of_stage):
        chunks = frozenset(task.chunk for of_stage in uses for task in of_stage if task.kind is kind)
        of_kind: dict[str, Any] = common | {"chunks": chunks}
        whole: dict[str, Any] = {"holds": part, "ms": ms, "lead": prefetch, "run": _Gather("gather")}
        ops.append(_anchored(Op(f"G{kind}", before=(kind,), **whole, **of_kind), waits))
        ops.append(_anchored(Op(f"D{kind}", after=(kind,), frees=part, run=_Gather("drop"), **of_kind), waits))
    trained = frozenset(c for c in range(graph.num_chunks) if graph.trains(c))
    at_end: dict[str, Any] = common | {"chunks": trained, "per": Per.CHUNK}
    ops.append(_anchored(Op("GU", before=("U",), run=_Gather("gather_for_update"), **at_end), waits))
    ops.append(_anchored(Op("DU", after=("U",), run=_Gather("drop"), **at_end), waits))
    return with_operations(own_rows, ops)


def _waits(uses: list[Task], prefetch: int) -> Iterable[Wait]:
    drops = [_around("D", task) for task in uses]
    yield from ((later, earlier) for earlier, later in pairwise(drops))
    yield from ((_around("G", task), dropped) for task, dropped in zip(uses[prefetch + 1 :], drops, strict=False))


def _waits_of_updates(uses: list[Task], table: ScheduleTable) -> Iterable[Wait]:
    """Each update has its parameters gathered once those of the one before are dropped."""
    chunks = sorted({task.chunk for task in uses if table.graph.trains(task.chunk)})
    before = [_around("D", uses[-1]), *(Task(TaskKind("DU"), chunk) for chunk in chunks)]
    yield from ((Task(TaskKind("GU"), chunk), dropped) for chunk, dropped in zip(chunks, before, strict=False))


def _around(letter: str, task: Task) -> Task:
    return task._replace(kind=TaskKind(letter + task.kind))


def _anchored(op: Op, waits: Iterable[Wait]) -> Op:
    return replace(op, waits=frozenset(wait for wait in waits if wait[0].kind == op.letter))


@typed
def most_gathered(table: ScheduleTable) -> list[int]:
    """By stage, how many chunks are whole at once where the table's row runs one entry after the other."""
    found = []
    for row in table.orders:
        counts: dict[int, int] = {}
        most = 0
        for kind, chunk, _ in row:
            if table.graph.lane(kind) != COMPUTE and kind[0] in "GD":
                counts[chunk] = counts.get(chunk, 0) + (1 if kind[0] == "G" else -1)
                most = max(most, sum(count > 0 for count in counts.values()))
        found.append(most)
    return found


class _Gather:
    """The functions of ``G`` and ``D``, with JAX only where they run."""

    cuts_parameters = True
    """Whether parameters are cut between tasks: see :func:`rrfp_jax.runtime.operating.check_operations`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, context: Any) -> Any:
        from rrfp_jax.operations import parameter_copies

        return getattr(parameter_copies, self._name)(context)

    def check(self, devices: Collection[Any]) -> None:
        """Raise ValueError for a stage of one device."""
        if len(devices) < 2:
            raise ValueError(
                "gathered cuts parameters over the devices of a stage, and every stage has one: give it more (layout "
                "with tensor of at least 2), or leave gathered out"
            )
