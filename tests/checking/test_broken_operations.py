"""Arbiters that are broken in their engines or in the memory that operations move must be caught."""

from dataclasses import replace

import pytest

from rrfp_jax.core import StageArbiter, StepRules, TaskFinished, stage_plan
from rrfp_jax.core.dispatch import NOTHING
from rrfp_jax.core.memory import Footprint, RowMemory
from rrfp_jax.core.plan import end_followers
from rrfp_jax.core.stage_setup import StepPlan
from rrfp_jax.schedules import ScheduleRequest, build_schedule, chain, linear, looped, with_operations
from tests.checking.operated import ONE, by_hint, by_row, offload, recompute, strictly, with_ops
from tests.checking.test_broken_early import walk_often
from tests.model_checker import CheckError, explore, replay


class Broken(StageArbiter):
    def validate(self):
        """What is broken may show in it too; here the checks from outside are tested."""


# -- naive rules that deadlock -----------------------------------------------------------------------------------------


class FitsNow(Footprint):
    """Admits whatever there is memory for."""

    __slots__ = ()

    def admits(self, position, waiting, due=None):
        held = self.held + (0 if due is None else self._row.frees[due])
        return held + self._row.takes[position] <= self.limit


class CountsSlots(Broken):
    def _begin(self, ranked):
        super()._begin(ranked)
        self._footprint.__class__ = FitsNow


class ReloadsAtOnce(CountsSlots):
    """Only engines take whatever there is memory for: copies come back as soon as they can."""

    def _heads(self):
        self._footprint.__class__ = Footprint
        heads = super()._heads()
        self._footprint.__class__ = FitsNow
        return heads


class KeepsNoSlot(CountsSlots):
    """Forwards, and whatever else is computed, take the last slot that a copy needs first."""

    def _admits_beside(self, position):
        self._footprint.__class__ = Footprint
        admits = super()._admits_beside(position)
        self._footprint.__class__ = FitsNow
        return admits


class WaitsForItsNext(Broken):
    """Keeps its engines waiting for the first of what they have left in the hint's order."""

    def _admits_beside(self, position):
        ranked = self._ranked
        node = ranked.at[position]
        lane = ranked.plan.lanes[node]
        left = [n for n in ranked.at if ranked.plan.lanes[n] == lane and self._waiting[n] >= 0]
        return left[0] == node and super()._admits_beside(position)


def table(name, num_stages, num_microbatches, ops, per_stage=None):
    request = ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
    made = with_operations(build_schedule(name, request), ops)
    return made.graph, made.placement, made.orders


PAIRS = frozenset({(0, 0), (1, 0)})
INTERLEAVED = by_row(*table("interleaved-1f1b", 2, 2, offload(lead=0), 2), foresight=False)
STRICTLY = strictly(*table("1f1b", 2, 3, offload(lead=0)))
BY_HINT = by_hint(with_ops(chain(4, 3), offload(frozenset({(0, 0), (1, 1)}))), looped(2, 2), "f-priority")
IN_ORDER = by_row(*table("1f1b", 2, 3, offload(PAIRS)), foresight=False, rules=StepRules(ordered=True))
ON_ONE_ENGINE = by_hint(with_ops(chain(4, 2), offload(lanes=ONE)), looped(2, 2), "bf")
RECOMPUTED = by_row(*table("1f1b", 2, 3, recompute(0.5)), foresight=False)
DEADLOCKS = [
    *((CountsSlots, setting) for setting in (INTERLEAVED, STRICTLY, BY_HINT, IN_ORDER, RECOMPUTED)),
    *((ReloadsAtOnce, setting) for setting in (INTERLEAVED, STRICTLY)),
    *((KeepsNoSlot, setting) for setting in (BY_HINT, IN_ORDER, RECOMPUTED)),
    (WaitsForItsNext, ON_ONE_ENGINE),
]


@pytest.mark.parametrize(("broken", "setting"), DEADLOCKS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_naive_rule_deadlocks(broken, setting):
    with pytest.raises(CheckError, match="deadlock: stages") as error:
        explore(replace(setting, arbiter=broken), demand_work=False)
    events = [stimulus for stimulus, _ in replay(error.value.setting, error.value.trace)]
    assert events == list(error.value.trace)


def test_the_same_settings_pass_with_a_sound_arbiter():
    for one in (INTERLEAVED, STRICTLY, BY_HINT, IN_ORDER, ON_ONE_ENGINE, RECOMPUTED):
        explore(one)


# -- what breaks the contract ------------------------------------------------------------------------------------------


class FreesAsItStarts(Broken):
    """Counts the memory that a copy moves as free from the copy's start."""

    def _dispatch_beside(self, engines, out):
        before = len(out)
        super()._dispatch_beside(engines, out)
        for run in out[before:]:
            self._footprint.finish(self._ranked.position[self._ranked.plan.index[run.task]])

    def _free(self, node, microbatch):
        super()._free(node, microbatch)
        if self._ranked.plan.lanes[node] < 0:
            self._footprint.held += self._footprint._row.frees[self._ranked.position[node]]


class TakesWhatIsDue(Broken):
    """Lets an engine take the memory that a task holds until its end."""

    def _admits_beside(self, position):
        return self._footprint.admits(position, self._waiting)


class CopiesWhatIsDue(Broken):
    """Starts copies behind a task that is about to end, as if engines waited in its queue."""

    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        node = self._ranked.plan.index[task]
        if was_news:
            self._count_down(end_followers(self._ranked.plan, self._ranked.plan.dependents[node]), out)
        return was_news


class RunsTwoAtOnce(Broken):
    def _dispatch_beside(self, engines, out):
        super()._dispatch_beside(engines, out)
        engines.running = [NOTHING] * len(engines.running)


class TakesTheLast(Broken):
    """Lets an engine run the last of its row that can run."""

    def _admits_beside(self, position):
        later = [p for ready in self._engines.ready if position in ready for p in ready if p > position]
        return super()._admits_beside(position) and not any(super(TakesTheLast, self)._admits_beside(p) for p in later)


class SleepsOnEnds(Broken):
    """Looks for something to copy when inputs arrive or copies end alone."""

    def handle(self, event):
        is_end = isinstance(event, TaskFinished) and self.graph.lane(event.task.kind) == "compute"
        self.sleeps = is_end
        return super().handle(event)

    def _dispatch_beside(self, engines, out):
        if not self.sleeps:
            super()._dispatch_beside(engines, out)


class ReloadsBeforeTheGradient(Broken):
    """Takes memory back for a backward whose gradient is not here."""

    def __init__(self, setup):
        super().__init__(setup)
        plan = stage_plan(self.graph, self.placement, self.stage, self.rules, has_row=True)
        self._mode.full = self._prepared = StepPlan(plan, self.consumption)
        self._mode.row_memory = RowMemory(plan, self._mode.full.at, self.graph, self._mode.row_tasks)
        self._begin(self._mode.full)


class RestrainsOffloads(Broken):
    """Makes a copy that takes nothing wait until what is about to end has ended."""

    def _admits_beside(self, position):
        return self._due is None and super()._admits_beside(position)


ROW = by_row(*table("1f1b", 2, 3, offload()), foresight=False)
EARLY = by_row(*table("1f1b", 2, 3, offload()), foresight=False, decides_early=True)
HINT = by_hint(with_ops(chain(2, 3), offload()), linear(2), "bf", window=2)
BROKEN = [
    (FreesAsItStarts, ROW, "and holds 3 activations of 2"),
    (TakesWhatIsDue, EARLY, "and holds . activations of ."),
    (CopiesWhatIsDue, EARLY, "stage 0 runs 0O0 before 0F0"),
    (RunsTwoAtOnce, ROW, "stage . runs .[OL]. on (d2h|h2d) beside .[OL]."),
    (TakesTheLast, ROW, "stage . runs .[OL]. on (d2h|h2d) before .[OL]."),
    (SleepsOnEnds, ROW, "stage 0 leaves d2h idle although 0O0 is ready and admissible"),
    (ReloadsBeforeTheGradient, HINT, "stage 0 runs 0L0 before gradient of microbatch 0"),
    (RestrainsOffloads, EARLY, "stage . leaves ... idle although .[OL]. is ready and admissible"),
    (WaitsForItsNext, ON_ONE_ENGINE, "stage . leaves copy idle although"),
]


@pytest.mark.parametrize(("broken", "setting", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("reduced", [True, False])
def test_a_broken_arbiter_is_caught(broken, setting, what, reduced):
    with pytest.raises(CheckError, match=what):
        explore(replace(setting, arbiter=broken), reduced=reduced)


@pytest.mark.parametrize(
    ("broken", "setting"), [entry[:2] for entry in BROKEN], ids=lambda v: getattr(v, "__name__", "")
)
def test_random_walks_catch_it_too(broken, setting):
    with pytest.raises(CheckError):
        walk_often(replace(setting, arbiter=broken))


def test_these_settings_pass_with_a_sound_arbiter():
    for one in (ROW, EARLY, HINT):
        explore(one)
