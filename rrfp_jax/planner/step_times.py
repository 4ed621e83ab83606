"""Step times of an order that is kept to, for many draws of the noise at once, and bounds that no order beats.

A stage that keeps to its row starts each task as soon as the task before has ended and its inputs are there. So the
times are longest paths, and one walk over the tasks gives them for all draws: an array operation per task in place of
events per task and draw. The simulator gives the same figures for the same order, more slowly.

A step runs from verdict to verdict, as stage 0 knows it: U of the step before, the row, and R, behind which the stages
agree.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import MessageKind
from rrfp_jax.costs import CutModel, ModelCosts
from rrfp_jax.layout import parent
from rrfp_jax.planner.search_space import Point
from rrfp_jax.schedules import ScheduleTable, TaskKind
from rrfp_jax.schedules.table import all_needed
from rrfp_jax.simulation import lower_bound
from rrfp_jax.simulation.costs import DURATION_SLOTS, Durations

StepTimes = NDArray[np.float64]
"""Milliseconds of each draw."""
_KINDS = (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W)
WalkEntry = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]
"""Stage, kind, chunk, microbatch, kind of message, and (number, stage) of each task that it waits for."""


def walk_of(table: ScheduleTable) -> tuple[WalkEntry, ...]:
    """Returns the tasks of a table that runs to its end, in an order in which they can run; the same for all cuts."""
    needed_by, stage_of = all_needed(table.graph), table.placement.stage_of_chunk
    number = {task: place for place, task in enumerate(table.execution)}
    walk = []
    for task in table.execution:
        waits = tuple((number[needed], stage_of[needed.chunk]) for needed in needed_by[task])
        kind = _KINDS.index(task.kind)
        walk.append((stage_of[task.chunk], kind, task.chunk, task.microbatch, int(kind > 0), waits))
    return tuple(walk)


def strict_times_ms(cut: CutModel, walk: Sequence[WalkEntry], durations_ms: Durations) -> StepTimes:
    """Returns the intervals between the ends of steps [draws]; every step begins as its stages ended the one before.

    Args:
        cut: the cut, with links and the tasks that end a step.
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
    for stage, kind, chunk, microbatch, message, waits in walk:
        start = free[stage]
        for needed, source in waits:
            arrived = ends[needed]
            start = larger(start, arrived if source == stage else arrived + transfer_ms[message][source][stage])
        free[stage] = start + lengths[kind][chunk][microbatch]
        ends.append(free[stage])
    reported = [np.atleast_1d(end + of_stage) for end, of_stage in zip(free, reduce_ms, strict=True)]
    # The reports go up the tree of stages; a step ends when all have come to its root.
    for stage in reversed(range(1, num_stages)):
        above = parent(stage)
        assert above is not None
        reported[above] = np.maximum(reported[above], reported[stage] + links.control_ms)
    root: StepTimes = reported[0]
    return root


def starts_ms(cut: CutModel) -> list[float]:
    """Returns when each stage has ended a step, counted from its verdict: then it starts the next one."""
    _, update_ms = once_per_step_ms(cut)
    return [of_stage + _depth(stage) * cut.links.control_ms for stage, of_stage in enumerate(update_ms)]


def once_per_step_ms(cut: CutModel) -> tuple[list[float], list[float]]:
    """Returns the milliseconds of all R, and of all U, of each stage, with the host's time."""
    costs, host_ms = cut.simulated_costs(), cut.costs.task_ms
    found = []
    for each in (costs.reduce_ms, costs.update_ms):
        assert isinstance(each, tuple)
        found.append([sum(each[chunk] + host_ms for chunk in chunks) for chunks in cut.placement.chunks_of_stage])
    return found[0], found[1]


def _lengths(of_tasks: Durations, is_one: bool) -> Sequence[Any]:
    """Returns [chunks][microbatches], each a number or an array over the draws."""
    # A single draw is walked in Python's own numbers, which are many times as quick as arrays of one.
    return of_tasks[0].tolist() if is_one else [list(of_chunk) for of_chunk in np.moveaxis(of_tasks, 0, -1).copy()]


def _depth(stage: int) -> int:
    """Returns the number of messages from the root of the tree of stages."""
    above = parent(stage)
    return 0 if above is None else 1 + _depth(above)


def step_bound_ms(cut: CutModel) -> float:
    """Returns milliseconds between the ends of steps that no order of a cut beats, R and U included.

    It is the bound of the row's tasks, with the tasks that must come before and behind them. No stage runs anything of
    a step before U of the step before has run where the microbatches enter. Behind the last task of a stage whose
    backward is split come all its own R, as its last task may be a W; behind the drain of any other come those of the
    stage where the gradients end."""
    host_ms = cut.costs.task_ms
    bound = lower_bound(cut.graph, cut.placement, cut.durations_ms[0], links=cut.links, host_ms=host_ms)
    reduce_ms, update_ms = once_per_step_ms(cut)
    entry = cut.placement.stage_of_chunk[0]
    last_ms = cut.simulated_costs().reduce_ms
    assert isinstance(last_ms, tuple)
    longest = bound.critical_path_ms
    for stage, stage_ms in enumerate(bound.stage_ms):
        longest = max(longest, stage_ms + (reduce_ms[stage] if cut.split else last_ms[0]))
    own_ms = max(work_ms + reduce_ms[stage] + update_ms[stage] for stage, work_ms in enumerate(cut.stage_work_ms))
    return max(own_ms, longest + update_ms[entry])


def quick_bound_ms(point: Point, costs: ModelCosts, *, split: bool) -> float:
    """Returns milliseconds that no cut beats either, without making one.

    Let a stage work x_s for each of m microbatches, all stages X together. With one chunk per stage, stage s starts
    once those before it have run a forward, at least the share f of their work, so a step takes at least
    ``f (x_0 + ... + x_(s-1)) + m x_s``. The largest of these is least where all are equal, and then it is
    ``m X / sum of (1 - f / m)^s``. A whole backward must also come back through them: f is 1. With several chunks at
    least a layer and a message for each stage before come first, half of them on average.
    """
    shape, m, p = point.shape, point.shape.num_microbatches, point.shape.num_stages
    layers = range(costs.num_layers)
    works = [costs.of(layer).work_ms(split=split) for layer in layers]
    forwards = [costs.of(layer).forward_ms for layer in layers]
    once_ms = sum(
        costs.of(layer).update_ms + costs.links.sum_ms(costs.of(layer).gradient_bytes, shape.data) for layer in layers
    )
    even_ms = (m * sum(works) + once_ms) / p
    if point.chunks > 1:
        return even_ms + (min(forwards) + costs.links.latency_ms) * (p - 1) / 2
    share = min((f / x for f, x in zip(forwards, works, strict=True) if x), default=0.0) if split else 1.0
    left = 1 - share / m
    return max(even_ms, m * sum(works) / sum(left**stage for stage in range(p)))
