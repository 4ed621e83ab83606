"""Arbiters that are broken where they decide early must be caught, by complete exploration and by random walks."""

from random import Random

import pytest

from rrfp_jax.core import HINTS, DecideNow, Send, StageArbiter, StepRules
from rrfp_jax.core.explain import RUNNING
from rrfp_jax.schedules import chain, linear, looped
from tests.model_checker import CheckError, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY
from tests.model_checker.random_walk import random_walk


def setting(broken, *, graph=None, placement=None, window=2, hint="bf", rules=PIPELINE_ONLY):
    graph = graph or chain(2, 2)
    placement = placement or linear(2)
    num_stages = placement.num_stages
    return Setting(
        graph=graph,
        placement=placement,
        windows=(window,) * num_stages,
        policies=(HINTS[hint],) * num_stages,
        rules=rules,
        decides_early=True,
        arbiter=broken,
    )


class Broken(StageArbiter):
    def validate(self):
        """What is broken may show in it too; here the checks from outside are tested."""


class SendsWhenDue(Broken):
    """Sends what a task has not computed yet."""

    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        if was_news:
            out += [Send(self.step, *send) for send in self._ranked.plan.sends[self._due]]
        return was_news


class OpensGatesWhenDue(Broken):
    """Counts gates down with the tasks, so that a report leaves before its last task has ended."""

    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        if was_news:
            plan = self._ranked.plan
            self._count_down(tuple(n for n in plan.dependents[self._due] if n >= len(plan.tasks)), out)
        return was_news


class FreesSlotsTwice(Broken):
    """Counts a due task off its microbatch again when it ends."""

    def _finish_task(self, task, out):
        was_due = self._ranked.plan.index[task] == self._due
        super()._finish_task(task, out)
        if was_due and self._window.left[task.microbatch] > 0:
            self._window.finish(task.microbatch)


class FreesSlotsLate(Broken):
    """Frees the slot of a due task when it ends, so that what it admits is not seen before."""

    def _decide_now(self, task, out):
        window = self._window
        self._window = window.copy()
        was_news = super()._decide_now(task, out)
        self._window = window
        return was_news

    def _finish_task(self, task, out):
        if self._ranked.plan.index[task] == self._due:
            self._window.finish(task.microbatch)
        super()._finish_task(task, out)


class RunsTwoBehind(Broken):
    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        self._capacity += was_news
        return was_news

    def _settle_due(self, node, task):
        self._capacity -= node == self._due
        super()._settle_due(node, task)


class MarksASecondOneDue(Broken):
    """Lets the successor become due while the first one runs."""

    def _decide_now(self, task, out):
        node = self._ranked.plan.index[task]
        if self._due is not None and self._running[-1] == node and node != self._due:
            self._waiting[self._due] = RUNNING
            self._due = None
        return super()._decide_now(task, out)


class ForgetsThePermission(Broken):
    """Takes the next task at the moment of the decision or not before the end."""

    def handle(self, event):
        if self._due is not None and self._running == [self._due] and not isinstance(event, DecideNow):
            self._capacity = 1
        return super().handle(event)

    def _settle_due(self, node, task):
        self._capacity = 2
        super()._settle_due(node, task)


class KeepsThePermission(Broken):
    """Goes on running two tasks after the due one has ended."""

    def _settle_due(self, node, task):
        super()._settle_due(node, task)
        self._capacity = 2


class DoesNotCountDown(Broken):
    """Never finds a task ready that waits for a due one."""

    def _decide_now(self, task, out):
        plan, waiting = self._ranked.plan, self._waiting
        node = plan.index[task]
        is_news = self._due is None and self._running[-1:] == [node]
        if is_news and waiting[node] == RUNNING and self.stage == 1:
            return False
        return super()._decide_now(task, out)


class TakesAnyDecision(Broken):
    """Gives a permission for a decision that comes too late."""

    def _decide_now(self, task, out):
        last = self._running[-1:]
        if last and self._due is None:
            task = self._ranked.plan.tasks[last[0]]
        return super()._decide_now(task, out)


TWO_CHUNKS = {"graph": chain(4, 2), "placement": looped(2, 2), "window": 1, "hint": "bf-deep"}
BROKEN = [
    (SendsWhenDue, {}, "stage 0 sends activation of microbatch 0 from chunk 0 to chunk 1 to stage 1 before it is comp"),
    (OpensGatesWhenDue, {"rules": StepRules()}, "shows after the end of its task|before it is complete"),
    (FreesSlotsTwice, TWO_CHUNKS, "and holds microbatches \\[0, 1\\]: its window is 1"),
    (FreesSlotsLate, {"window": 1}, "stage 0 idles although 0F1 is ready and admissible"),
    (RunsTwoBehind, {"graph": chain(2, 3), "window": 3}, "stage 0 runs 0F2 beside 2 other tasks"),
    (MarksASecondOneDue, {"graph": chain(2, 3), "window": 3}, "too late, or comes twice, changes something"),
    (ForgetsThePermission, {}, "idles although"),
    (KeepsThePermission, {"graph": chain(2, 3), "window": 3}, "stage 0 runs 0F2 beside 1 other tasks"),
    (DoesNotCountDown, {}, "stage 1 idles although 1B0 is ready and admissible"),
    (TakesAnyDecision, {}, "too late, or comes twice, changes something"),
]


@pytest.mark.parametrize(("broken", "more", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("reduced", [True, False])
def test_a_broken_arbiter_is_caught(broken, more, what, reduced):
    with pytest.raises(CheckError, match=what) as error:
        explore(setting(broken, **more), reduced=reduced)
    assert "was about to end" in str(error.value)


@pytest.mark.parametrize(("broken", "more"), [entry[:2] for entry in BROKEN], ids=lambda v: getattr(v, "__name__", ""))
def test_random_walks_catch_it_too(broken, more):
    with pytest.raises(CheckError):
        walk_often(setting(broken, **more))


def walk_often(one):
    for seed in range(400):
        random_walk(one, Random(seed).randrange)


def test_the_same_settings_pass_with_a_sound_arbiter():
    for _, more, _ in BROKEN:
        explore(setting(StageArbiter, **more))
