"""Step times of choices on common draws of the noise, and bounds that no order beats.

All choices meet the same draws, so that their differences have a small error. An order that is kept to starts each task
as soon as the task before on its stage has ended and its inputs are there. So its times are longest paths, and one walk
over the tasks gives them for all draws: an array operation per task in place of events per task and draw. Any other
order is simulated step after step, so that foresight has learnt how long tasks take. Where more draws are asked for, a
simulation goes on from where it was left. The simulator gives the same figures for an order that is kept to, more
slowly.

A step runs from verdict to verdict, as stage 0 knows it: U of the step before, the row, and R, behind which the stages
agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import MessageKind, Order, StageArbiter, StepRules
from rrfp_jax.costs import CutModel, ModelCosts, Noise
from rrfp_jax.layout import parent
from rrfp_jax.planner.records import PlanChoice, PlanShape, Point
from rrfp_jax.schedules import ScheduleTable, TaskKind
from rrfp_jax.schedules.table import all_needed
from rrfp_jax.simulation import lower_bound, simulate, simulated_steps_ms
from rrfp_jax.simulation.costs import DURATION_SLOTS, Durations

ROUNDING = 1e-9
"""Relative difference of the same times added up in two ways."""
_DRAWS, _LEAST_DRAWS = 64, 16
_DRAWN = 1 << 15
"""Stages times microbatches times draws, from which on there are fewer draws: each then has more tasks, whose lengths
even out."""
StepTimes = NDArray[np.float64]
"""Milliseconds of each draw."""
_KINDS = (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W)
WalkEntry = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]
"""Stage, kind, chunk, microbatch, kind of message, and (number, stage) of each task that it waits for."""


def draws_for(shapes: Sequence[PlanShape]) -> int:
    """Returns a number of draws that suffices for these shapes."""
    most = max(shape.num_stages * shape.num_microbatches for shape in shapes)
    return max(_LEAST_DRAWS, min(_DRAWS, _DRAWN // most))


class Judge:
    """Draws of the noise, and the steps that were simulated with them."""

    def __init__(self, noise: Noise, num_draws: int, seed: int) -> None:
        self.noise, self.seed = noise, seed
        self.num_draws = 1 if noise.is_none else num_draws
        self.evaluations = 0
        """Orders whose step was worked out, each with all its draws."""
        # Cuts, tables and orders by their identity: they are kept beside, so that no identity is used again.
        self._factors: dict[tuple[int, int], Durations] = {}
        self._luck_ms: dict[int, tuple[CutModel, StepTimes]] = {}
        self._walks: dict[int, tuple[ScheduleTable, tuple[WalkEntry, ...]]] = {}
        self._arbiters: dict[int, tuple[Order, list[StageArbiter]]] = {}
        self._known: dict[PlanChoice, StepTimes] = {}
        self._nominal_ms: dict[PlanChoice, float] = {}
        self._runs: dict[PlanChoice, Iterator[float]] = {}

    def draws_ms(self, one: PlanChoice, num_draws: int) -> StepTimes:
        """Returns the step times of the first draws; without noise that of a step without it."""
        num_draws = min(num_draws, self.num_draws)
        known = self._known.get(one, np.empty(0))
        if len(known) < num_draws:
            self.evaluations += not len(known)
            if _is_walked(one):
                assert one.ordering.schedule is not None
                steps_ms = _drawn(self.steps_ms(one.cut, num_draws))
                known = strict_times_ms(one.cut, self._walk_of(one.ordering.schedule), steps_ms)
            else:
                if one not in self._runs:
                    self._runs[one] = self._begun(one)
                known = np.append(known, list(islice(self._runs[one], num_draws - len(known))))
            self._known[one] = known
        return known[:num_draws]

    def num_known(self, one: PlanChoice) -> int:
        """Returns the number of draws on which a choice was judged."""
        return len(self._known.get(one, ()))

    def value(self, one: PlanChoice, num_draws: int) -> float:
        """Returns the mean over the first draws, in milliseconds per sample of a step."""
        return float(self.draws_ms(one, num_draws).mean()) / one.shape.batch_size

    def standing(self, one: PlanChoice, num_draws: int) -> float:
        """Returns the mean by which choices are compared: that of the first draws, without the luck of the draw."""
        return float(self._comparable_ms(one, num_draws).mean())

    def difference(self, before: PlanChoice, one: PlanChoice, num_draws: int) -> tuple[float, float]:
        """Returns how much longer a sample takes with ``one``, and the standard error of that, at least rounding."""
        ahead_ms, behind_ms = (self._comparable_ms(each, num_draws) for each in (before, one))
        number = len(ahead_ms)
        error = float((behind_ms - ahead_ms).std(ddof=1)) / number**0.5 if number > 1 else 0.0
        return float(behind_ms.mean() - ahead_ms.mean()), max(error, float(ahead_ms.mean()) * ROUNDING)

    def _comparable_ms(self, one: PlanChoice, num_draws: int) -> StepTimes:
        draws_ms, cut = self.draws_ms(one, num_draws), one.cut
        if not self.noise.is_none:
            # Choices with other numbers of chunks have other draws. The work of an average stage in each draw is a
            # control variate: its mean is known, and it has about the same effect on every order.
            if id(cut) not in self._luck_ms:
                works_ms = self.steps_ms(cut, self.num_draws).sum(axis=(1, 2, 3)) / cut.placement.num_stages
                self._luck_ms[id(cut)] = cut, works_ms[1:] - works_ms[0]
            draws_ms = draws_ms - self._luck_ms[id(cut)][1][: len(draws_ms)]
        return draws_ms / one.shape.batch_size

    def nominal_ms(self, one: PlanChoice) -> float:
        """Returns the step time without noise."""
        if self.noise.is_none:
            return float(self.draws_ms(one, 1)[0])
        if one not in self._nominal_ms:
            self._nominal_ms[one] = self.nominal_on(one.cut, one)
        return self._nominal_ms[one]

    def nominal_on(self, cut: CutModel, one: PlanChoice) -> float:
        """Returns the step time without noise of a choice's order on a cut with as many chunks on the same stages."""
        if not _is_walked(one):
            return next(self._simulated_ms(one, cut, cut.durations_ms))
        assert one.ordering.schedule is not None
        return float(strict_times_ms(cut, self._walk_of(one.ordering.schedule), cut.durations_ms)[0])

    def steps_ms(self, cut: CutModel, num_draws: int) -> Durations:
        """Returns a step without noise and ``num_draws`` with it, [1 + draws, chunks, microbatches, 3]; without noise
        that step alone."""
        nominal = cut.durations_ms
        if self.noise.is_none:
            return nominal
        key = nominal.shape[1], nominal.shape[2]
        if key not in self._factors:
            rng = np.random.default_rng((self.seed, 0))
            self._factors[key] = self.noise.draws(np.ones_like(nominal), self.num_draws, rng)
        return np.concatenate([nominal, nominal * self._factors[key][:num_draws]])

    def strict_times_ms(self, cut: CutModel, table: ScheduleTable, num_draws: int) -> StepTimes:
        """Returns the step times of a table that is kept to, whether memory suffices for it or not."""
        self.evaluations += 1
        return strict_times_ms(cut, self._walk_of(table), _drawn(self.steps_ms(cut, num_draws)))

    def _walk_of(self, table: ScheduleTable) -> tuple[WalkEntry, ...]:
        if id(table) not in self._walks:
            self._walks[id(table)] = table, walk_of(table)
        return self._walks[id(table)][1]

    def _begun(self, one: PlanChoice) -> Iterator[float]:
        """Begins a simulation of all draws; one that learns starts with the step without noise, which is kept."""
        steps_ms = self.steps_ms(one.cut, self.num_draws)
        if one.order.foresight is None or self.noise.is_none:
            return self._simulated_ms(one, one.cut, _drawn(steps_ms))
        run = self._simulated_ms(one, one.cut, steps_ms)
        self._nominal_ms[one] = next(run)
        return run

    def _simulated_ms(self, one: PlanChoice, cut: CutModel, steps_ms: Durations) -> Iterator[float]:
        """Simulates these steps and yields their intervals.

        Where stages have foresight, a step without noise goes before, from which it learns. All other orders leave
        nothing to the next step, so that each is as if one had gone before.
        """
        learning = int(one.order.foresight is not None)
        durations_ms = np.concatenate([cut.durations_ms] * learning + [steps_ms])
        if one.shape.replicas:
            return islice(_unequal_ms(one, cut, durations_ms), learning, None)
        if id(one.order) not in self._arbiters:
            rules = StepRules(lockstep=one.shape.data > 1)
            self._arbiters[id(one.order)] = one.order, one.order.arbiters(rules)
        run = simulated_steps_ms(
            [each.fresh(None) for each in self._arbiters[id(one.order)][1]],
            cut.simulated_costs(durations_ms),
            machine=cut.machine,
            num_steps=len(durations_ms),
            starts_ms=_starts_ms(cut),
        )
        return islice(run, learning, None)


def _unequal_ms(one: PlanChoice, cut: CutModel, steps_ms: Durations) -> Iterator[float]:
    """Yields the intervals between the ends of steps where stages have different numbers of replicas."""
    most, (order, owners) = one.shape.data, one.replicated
    costs = cut.simulated_costs()
    assert isinstance(costs.reduce_ms, tuple)
    assert isinstance(costs.update_ms, tuple)
    # The cut's times are those of the slowest replica of each stage.
    times = np.ones((len(cut.counts), most))
    for chunk, stage in enumerate(cut.placement.stage_of_chunk):
        for replica, speed in enumerate(cut.speeds_of_stage[stage]):
            times[chunk, replica] = min(cut.speeds_of_stage[stage]) / speed
    of_chunks = times.reshape(-1)
    run = simulate(
        order.arbiters(StepRules()),
        replace(
            costs,
            durations_ms=np.tile(np.repeat(steps_ms, most, axis=1), (1, 1, most, 1)) * of_chunks[:, None, None],
            reduce_ms=tuple(np.repeat(costs.reduce_ms, most).tolist()),
            update_ms=tuple((np.repeat(costs.update_ms, most) * of_chunks).tolist()),
        ),
        machine=replace(cut.machine, links=cut.unit_links),
        num_steps=len(steps_ms),
        owners=[owners],
    )
    return iter(run.step_ms)


def _is_walked(one: PlanChoice) -> bool:
    """Returns whether a walk tells the times of a choice: memory decides when a copy, or a task behind it, starts."""
    table = one.ordering.schedule
    return one.is_strict and table is not None and not table.graph.ops


def _drawn(steps_ms: Durations) -> Durations:
    """Returns the steps without the first, which has no noise, where there is any other."""
    return steps_ms[min(1, len(steps_ms) - 1) :]


# -- orders that are kept to -------------------------------------------------------------------------------------------


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
    # A single draw is walked in Python's own numbers, which are many times as quick as arrays of one.
    is_one = len(durations_ms) == 1
    larger: Callable[[Any, Any], Any] = max if is_one else np.maximum
    lengths: list[Sequence[Any]] = []  # by kind, [chunks][microbatches], each a number or an array over the draws
    for kind in _KINDS:
        of_tasks = durations_ms[..., DURATION_SLOTS[kind]].sum(axis=-1) + cut.costs.task_ms
        draws_last = () if is_one else np.moveaxis(of_tasks, 0, -1).copy()
        lengths.append(of_tasks[0].tolist() if is_one else [list(of_chunk) for of_chunk in draws_last])
    stages = range(num_stages)
    transfer_ms = [
        [[links.transfer_ms(kind, a, b) for b in stages] for a in stages]
        for kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT)
    ]
    reduce_ms, _ = once_per_step_ms(cut)
    free: list[Any] = _starts_ms(cut)
    ends: list[Any] = []
    for stage, kind_number, chunk, microbatch, message, waits in walk:
        start = free[stage]
        for needed, source in waits:
            arrived = ends[needed]
            start = larger(start, arrived if source == stage else arrived + transfer_ms[message][source][stage])
        free[stage] = start + lengths[kind_number][chunk][microbatch]
        ends.append(free[stage])
    reported = [np.atleast_1d(end + of_stage) for end, of_stage in zip(free, reduce_ms, strict=True)]
    # The reports go up the tree of stages; a step ends when all have come to its root.
    for stage in reversed(range(1, num_stages)):
        above = parent(stage)
        assert above is not None
        reported[above] = np.maximum(reported[above], reported[stage] + links.control_ms)
    root: StepTimes = reported[0]
    return root


def _starts_ms(cut: CutModel) -> list[float]:
    """Returns when each stage has ended a step, counted from its verdict: then it starts the next one."""
    starts, depths = [], list[int]()
    for stage, update_ms in enumerate(once_per_step_ms(cut)[1]):
        above = parent(stage)  # the verdict comes down the tree of stages, message by message
        depths.append(0 if above is None else 1 + depths[above])
        starts.append(update_ms + depths[stage] * cut.links.control_ms)
    return starts


def once_per_step_ms(cut: CutModel) -> tuple[list[float], list[float]]:
    """Returns the milliseconds of all R, and of all U, of each stage, with the host's time."""
    costs, host_ms = cut.simulated_costs(), cut.costs.task_ms
    found = []
    for each in (costs.reduce_ms, costs.update_ms):
        assert isinstance(each, tuple)
        found.append([sum(each[chunk] + host_ms for chunk in chunks) for chunks in cut.placement.chunks_of_stage])
    return found[0], found[1]


# -- bounds ------------------------------------------------------------------------------------------------------------


def step_bound_ms(cut: CutModel) -> float:
    """Returns milliseconds between the ends of steps that no order of a cut beats, R and U included.

    It is the bound of the row's tasks, with the tasks that must come before and behind them. No stage runs anything of
    a step before U of the step before has run where the microbatches enter. Behind the last task of a stage whose
    backward is split come all its own R, as its last task may be a W; behind the drain of any other come those of the
    stage where the gradients end. Where replicas differ, the way to a stage may lead through the quickest ones, and the
    slowest of a stage may have less than the others."""
    host_ms = cut.costs.task_ms
    if any(len(set(speeds)) > 1 for speeds in cut.speeds_of_stage) or any(each.pairs for each in cut.costs.stages):
        return _unlike_bound_ms(cut)
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


def _unlike_bound_ms(cut: CutModel) -> float:
    """Returns the same for a line of stages whose replicas differ."""
    reduce_ms, update_ms = once_per_step_ms(cut)
    numbers, microbatches = cut.replicas_of_stage, max(cut.replicas_of_stage) * cut.num_microbatches
    bound = before_ms = 0.0
    for stage, (work_ms, speeds) in enumerate(zip(cut.stage_work_ms, cut.speeds_of_stage, strict=True)):
        number, quickest = numbers[stage], min(speeds) / max(speeds)
        slowest_ms = work_ms * (microbatches // number) / (microbatches / number)
        own_ms = max(slowest_ms, work_ms * min(speeds) * number / sum(speeds))
        bound = max(bound, own_ms + before_ms, own_ms + reduce_ms[stage] + update_ms[stage] * quickest)
        (chunk,) = cut.placement.chunks_of_stage[stage]
        task_ms = cut.durations_ms[0, chunk, 0]
        before_ms += float(task_ms[0] if cut.split else task_ms.sum()) * quickest
    return bound


def quick_bound_ms(point: Point, costs: ModelCosts, *, split: bool) -> float:
    """Returns milliseconds that no cut beats either, without making one.

    Let a stage work x_s for each of m microbatches, all stages X together. With one chunk per stage, stage s starts
    once those before it have run a forward, at least the share f of their work, so a step takes at least
    ``f (x_0 + ... + x_(s-1)) + m x_s``. The largest of these is least where all are equal, and then it is
    ``m X / sum of (1 - f / m)^s``. A whole backward must also come back through them: f is 1. Sums of gradients, R all
    together, follow a stage's work: with f of forwards a step takes ``(m X + R) / sum of (1 - f / m)^s - R f / m`` too.
    With several chunks at least a layer and a message for each stage before come first, half of them on average. Stage
    s counts as often as it is as quick as the device that costs were measured on: X is the work there.
    """
    shape, m, p = point.shape, point.shape.num_microbatches, point.shape.num_stages
    layers = [costs.types[name] for name in costs.layers]
    works = [layer.work_ms(split=split) for layer in layers]
    forwards = [layer.forward_ms for layer in layers]
    speeds = [stage.speed for stage in costs.stages] or [1.0] * p
    ways = [costs.link(stage, stage + 1) for stage in range(p - 1)]
    within = [costs.link(stage, stage) for stage in range(p)]
    num_bytes = [layer.gradient_bytes for layer in layers]
    sums_ms = min(links.sum_ms(sum(num_bytes), shape.data) for links in within)
    # Every chunk has a sum of its own, if all layers are trained.
    least_ms = 2 * (shape.data - 1) * min(links.latency_ms for links in within) if all(num_bytes) else 0.0
    sums_ms += (p * point.chunks - 1) * least_ms
    once_ms = sum(layer.update_ms for layer in layers) + min(speeds) * sums_ms
    even_ms = (m * sum(works) + once_ms) / sum(speeds)
    host_ms = costs.task_ms * m * point.chunks * (3 if split else 2)
    # Updates of the stages behind the first one may pass while they wait for it.
    entry_ms = layers[0].update_ms / max(speeds)
    summed_ms = m * sum(works) + min(speeds) * sums_ms
    if point.chunks > 1:
        before_ms = min(forwards) / max(speeds) + min(link.latency_ms for link in ways)
        summed_ms += before_ms * sum(stage * speed for stage, speed in enumerate(speeds))
        return max(even_ms, summed_ms / sum(speeds) + entry_ms) + host_ms
    of_forwards = min((f / x for f, x in zip(forwards, works, strict=True) if x), default=0.0)
    most_ms = max(
        links.sum_ms(sum(num_bytes), shape.data) + (p - 1) * 2 * (shape.data - 1) * links.latency_ms for links in within
    )
    filled_ms = m * sum(works) / _most_filled(speeds, 1 - (of_forwards if split else 1.0) / m)
    summed_ms = summed_ms / _most_filled(speeds, 1 - of_forwards / m) - most_ms * of_forwards / m
    # The sums of the first layer come last where the backward is whole.
    last_ms = least_ms if split else min(links.sum_ms(num_bytes[0], shape.data) for links in within)
    return max(even_ms, filled_ms + last_ms + entry_ms, summed_ms + entry_ms) + host_ms


def _most_filled(speeds: Sequence[float], left: float) -> float:
    """Returns the most work of a time of 1 where of the time that a stage has, the next one has lost ``1 - left`` of
    what the stage uses. A slow one does best to use none where quicker ones follow."""
    found = 0.0
    for speed in reversed(speeds):
        found = max(found, speed + left * found)
    return found
