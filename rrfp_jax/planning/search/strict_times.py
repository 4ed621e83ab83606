"""Step times of an order that is kept to, as a table that is consumed strictly, for many draws of the noise at once.

A stage that keeps to its row starts each task as soon as the one before has ended and what it waits for is there. So
the times are longest paths, and one walk over the tasks gives them for all draws: an array operation per task in place
of events per task and draw. The simulator gives the same figures for the same order.

A step runs from verdict to verdict, as stage 0 knows it: U of the step before, the row, and R, behind which the stages
agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.arbitration import MessageKind
from rrfp_jax.planning.costs import CutModel
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleTable, Task, TaskKind
from rrfp_jax.schedules.validation import all_needed
from rrfp_jax.simulation.costs import DURATION_SLOTS, Durations
from rrfp_jax.tree import parent

Times = NDArray[np.float64]
_KINDS = (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W)
_Entry = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]
"""Stage, kind, chunk, microbatch, kind of message, and (number, stage) of each task that it waits for."""


@dataclass(frozen=True, eq=False)
class Walk:
    """The tasks of a step in an order in which they can run; the same for all cuts."""

    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, table: ScheduleTable) -> "Walk":
        """``table`` must be one that can run to its end."""
        return cls.along(table.execution, table.graph, table.placement)

    @classmethod
    def along(cls, tasks: Sequence[Task], graph: PipelineGraph, placement: Placement) -> "Walk":
        """All tasks of a step, each behind what it waits for; those of a stage in its order."""
        needed_by, stage_of = all_needed(graph), placement.stage_of_chunk
        number = {task: place for place, task in enumerate(tasks)}

        def entry(task: Task) -> _Entry:
            waits = tuple((number[needed], stage_of[needed.chunk]) for needed in needed_by[task])
            kind = _KINDS.index(task.kind)
            return stage_of[task.chunk], kind, task.chunk, task.microbatch, int(kind > 0), waits

        return cls(tuple(map(entry, tasks)))


def strict_times_ms(cut: CutModel, walk: Walk, durations_ms: Durations) -> Times:
    """The intervals between the ends of steps [draws] where every step begins as its stages have ended the one before.

    Args:
        cut: the cut, with links and what ends a step.
        walk: of an order on its placement and graph.
        durations_ms: [draws, chunks, microbatches, 3].
    """
    links, num_stages = cut.links, cut.placement.num_stages
    is_one = len(durations_ms) == 1
    larger: Callable[[Any, Any], Any] = max if is_one else np.maximum
    lengths = [
        _lengths(durations_ms[..., DURATION_SLOTS[kind]].sum(axis=-1) + cut.costs.task_ms, is_one) for kind in _KINDS
    ]
    stages = range(num_stages)
    transfer_ms = [
        [[links.transfer_ms(kind, a, b) for b in stages] for a in stages]
        for kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT)
    ]
    reduce_ms, _ = once_per_step_ms(cut)
    free: list[Any] = starts_ms(cut)
    ends: list[Any] = []
    for stage, kind, chunk, microbatch, message, waits in walk.entries:
        start = free[stage]
        for needed, source in waits:
            arrived = ends[needed]
            start = larger(start, arrived if source == stage else arrived + transfer_ms[message][source][stage])
        free[stage] = start + lengths[kind][chunk][microbatch]
        ends.append(free[stage])
    reported = [np.atleast_1d(end + of_stage) for end, of_stage in zip(free, reduce_ms, strict=True)]
    return _verdict(reported, links.control_ms)


def starts_ms(cut: CutModel) -> list[float]:
    """When each stage has ended a step, from its verdict on: then it starts the next one."""
    _, update_ms = once_per_step_ms(cut)
    return [of_stage + _depth(stage) * cut.links.control_ms for stage, of_stage in enumerate(update_ms)]


def once_per_step_ms(cut: CutModel) -> tuple[list[float], list[float]]:
    """What all R, and all U, of each stage take, with the host's time."""
    costs, host_ms = cut.simulated_costs(), cut.costs.task_ms
    found = []
    for each in (costs.reduce_ms, costs.update_ms):
        assert isinstance(each, tuple)
        found.append([sum(each[chunk] + host_ms for chunk in chunks) for chunks in cut.placement.chunks_of_stage])
    return found[0], found[1]


def _lengths(of_tasks: Durations, is_one: bool) -> Sequence[Any]:
    """[chunks][microbatches], each a number or one per draw."""
    return of_tasks[0].tolist() if is_one else [list(of_chunk) for of_chunk in np.moveaxis(of_tasks, 0, -1).copy()]


def _depth(stage: int) -> int:
    """Messages from the root of the tree of stages."""
    above = parent(stage)
    return 0 if above is None else 1 + _depth(above)


def _verdict(reported: list[Times], control_ms: float) -> Times:
    """When the reports of all have come to the root of the tree of stages."""
    for stage in reversed(range(1, len(reported))):
        above = parent(stage)
        assert above is not None
        reported[above] = np.maximum(reported[above], reported[stage] + control_ms)
    return reported[0]
