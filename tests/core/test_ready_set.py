"""The ready set keeps positions sorted by lane and offers the first admissible of each."""

import random

import pytest

from rrfp_jax.core import (
    HINTS,
    RunTask,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskFinished,
    Window,
    ready,
)
from rrfp_jax.core.dispatch import HELD, ReadySet
from rrfp_jax.schedules import chain, linear

MICROBATCH_AT = (2, 0, 1, 0, 1)
FORWARDS_OF = {0: (1, 3), 1: (2, 4), 2: (0,)}


def heads(made, window):
    return made.heads(window, MICROBATCH_AT, FORWARDS_OF)


def ready_set(*entries):
    made = ReadySet()
    for lane, position in entries:
        made.add(lane, position)
    return made


def test_empty():
    assert not any(ready_set().lanes)
    assert heads(ready_set(), Window(1, (1, 1, 1))) == (None,) * 4


def test_smallest_position_of_each_lane():
    made = ready_set((0, 4), (0, 1), (1, 3), (1, 2), (3, 0))
    assert heads(made, Window(None, (1, 1, 1))) == (1, 2, None, 0)


def test_the_window_restrains_forwards_only():
    made = ready_set((0, 0), (0, 1), (1, 0), (2, 0))
    assert heads(made, Window(1, (1, 1, 1))) == (1, 0, 0, None)
    full = Window(1, (1, 1, 1))
    full.start_forward(1)
    assert heads(made, full) == (None, 0, 0, None)


def test_remove_and_copy():
    made = ready_set((0, 4), (0, 1), (1, 2))
    made.hold((1, 3))
    twin = made.copy()
    twin.remove(HELD, 1)
    twin.remove(1, 2)
    assert heads(twin, Window(None, (1, 1, 1))) == (4, None, None, None)
    assert made.lanes == ([4], [2], [], [], [1])


@pytest.mark.parametrize("seed", range(20))
def test_the_head_of_the_forwards_is_the_first_that_the_window_admits(seed):
    random.seed(seed)
    num_microbatches, num_chunks = random.randint(1, 8), random.randint(1, 3)
    at = [m for m in range(num_microbatches) for _ in range(num_chunks)]
    random.shuffle(at)
    forwards_of = {m: [p for p, other in enumerate(at) if other == m] for m in range(num_microbatches)}
    window = Window(random.choice([1, 2, 3, None]), (num_chunks,) * num_microbatches)
    made, waiting, running = ReadySet(), list(range(len(at))), []
    random.shuffle(waiting)
    is_ready = set()
    while waiting or is_ready or running:
        forward, *others = made.heads(window, at, forwards_of)
        assert forward == min((p for p in is_ready if window.admits(at[p])), default=None)
        fresh = [m for m, left in enumerate(window.left) if left and m not in window.held]
        assert not fresh or window.is_full != any(map(window.admits, fresh))
        assert others == [None] * 3
        if waiting and random.random() < 0.6:
            is_ready.add(position := waiting.pop())
            made.add(HELD if at[position] in window.held else 0, position)
        elif forward is not None:
            is_ready.remove(forward)
            is_held = at[forward] in window.held
            made.remove(HELD if is_held else 0, forward)
            if not is_held:
                window.start_forward(at[forward])
                made.hold(forwards_of[at[forward]])
            running.append(forward)
        elif running:
            window.finish(at[running.pop(random.randrange(len(running)))])


class CountingWindow(Window):
    """Counts how often the rule is asked."""

    __slots__ = ()
    asked = 0

    def admits(self, microbatch):
        CountingWindow.asked += 1
        return super().admits(microbatch)


def test_forwards_that_wait_behind_a_full_window_cost_nothing(monkeypatch):
    """The rule is asked at most twice per choice, whether 64 or 1,024 microbatches wait."""
    monkeypatch.setattr("rrfp_jax.core.arbiter.Window", CountingWindow)
    per_task = []
    for num_microbatches in (64, 1024):
        arbiter = StageArbiter(
            StageSetup(
                chain(1, num_microbatches),
                linear(1),
                0,
                consumption=ready(HINTS["b-priority"]),
                window=4,
                rules=StepRules(updates=False),
            )
        )
        CountingWindow.asked = num_tasks = 0
        running = arbiter.handle(StepStarted(0, 0.0))
        while running:
            instruction = running.pop(0)
            if isinstance(instruction, RunTask):
                num_tasks += 1
                running += arbiter.handle(TaskFinished(0, 0.0, instruction.task))
        assert num_tasks == 2 * num_microbatches
        per_task.append(CountingWindow.asked / num_tasks)
    assert max(per_task) <= 3
