"""Certain choices, handed over while the task before runs: the same order, nothing uncertain, announced in time."""

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.agreement_overhead import agreement_overhead, launches
from rrfp_jax.core import (
    HINTS,
    Announce,
    DecideNow,
    DecisionTimer,
    ForesightRules,
    GroupHeard,
    Message,
    MessageKind,
    Ordering,
    RunTask,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskFinished,
    TellGroup,
    group_arbiter,
    ready,
    schedule_hint,
)
from rrfp_jax.core.dispatch import Certainty
from rrfp_jax.schedules import ScheduleRequest, Task, build_schedule, chain, linear
from rrfp_jax.simulation import Costs, Links, Machine, constant, for_steps, lognormal, simulate
from tests.model_checker.catalogue import PIPELINE_ONLY

TABLES = ("1f1b", "gpipe", "zb-h1", "1f1b-split", "interleaved-1f1b", "zb-v")
NUM_STEPS = 3


def task(text):
    return Task.parse(text)


def arbiter(stage=1, *, hint=HINTS["bf"], num_stages=2, **more):
    graph = chain(num_stages, 2)
    setup = StageSetup(
        graph, linear(num_stages), stage, consumption=ready(hint), window=4, rules=PIPELINE_ONLY, certain_ahead=True
    )
    return StageArbiter(replace(setup, **more))


def runs(instructions):
    return [str(i.task) for i in instructions if isinstance(i, RunTask)]


def test_a_row_that_needs_nothing_else_is_handed_over_one_task_ahead():
    only = arbiter(0, num_stages=1)
    assert runs(only.handle(StepStarted(0, 0.0))) == ["0F0", "0B0"]
    assert runs(only.handle(TaskFinished(0, 1.0, task("0F0")))) == ["0F1"]
    assert runs(only.handle(TaskFinished(0, 2.0, task("0B0")))) == ["0B1"]
    assert runs(only.handle(TaskFinished(0, 3.0, task("0F1")))) == []


def test_a_forward_waits_where_a_backward_that_ranks_before_it_may_still_come():
    first = arbiter(0)
    assert runs(first.handle(StepStarted(0, 0.0))) == ["0F0"], "bf takes 0B0 as soon as its gradient is here"
    assert runs(first.handle(TaskFinished(0, 1.0, task("0F0")))) == ["0F1"]


def test_a_row_says_that_the_forward_is_next():
    row = tuple(map(Task.parse, ("0F0", "0F1", "0B0", "0B1")))
    first = arbiter(0, hint=schedule_hint(row))
    assert runs(first.handle(StepStarted(0, 0.0))) == ["0F0", "0F1"]


def test_an_announcement_is_made_as_the_device_begins_the_task():
    row = tuple(map(Task.parse, ("0F0", "0F1", "0B0", "0B1")))
    first = arbiter(0, hint=schedule_hint(row), foresight=ForesightRules())
    started = first.handle(StepStarted(0, 0.0))
    sent = [Message(MessageKind.ACTIVATION, 0, 1, m) for m in (0, 1)]
    assert runs(started) == ["0F0", "0F1"]
    assert [i for i in started if isinstance(i, Announce)] == [Announce(0, sent[0], 1)]
    assert Announce(0, sent[1], 1) in first.handle(TaskFinished(0, 1.0, task("0F0")))


def test_a_copy_looks_for_itself():
    only = arbiter(0, num_stages=1)
    twin = only.copy()
    assert runs(only.handle(StepStarted(0, 0.0))) == runs(twin.handle(StepStarted(0, 0.0)))
    later = only.copy()
    for each in (only, later):
        assert runs(each.handle(TaskFinished(0, 1.0, task("0F0")))) == ["0F1"]


@given(state=st.sampled_from([0, 1]), seed=st.integers(0, 10**6), name=st.sampled_from(sorted(HINTS)))
@settings(deadline=None, max_examples=60)
def test_what_is_certain_is_chosen_from_any_tasks_that_it_is_among(state, seed, name):
    """The definition, for every hint: more tasks to choose from never unseat what all of them would choose."""
    consumption = ready(HINTS[name])
    made = StageArbiter(
        StageSetup(chain(3, 3, split=True), linear(3), 1, consumption=consumption, window=4, rules=PIPELINE_ONLY)
    )
    ranked, draw = made._ranked, np.random.default_rng(seed)
    waiting = [int(draw.integers(-1, 2)) for _ in ranked.plan.needs]
    chosen = Certainty(ranked).choice(consumption.choose, state, waiting)
    left = [[p for p in lane if waiting[ranked.at[p]] >= 0] for lane in ranked.in_lanes]
    for _ in range(20):
        some = [[p for p in lane if p == chosen or draw.random() < 0.5] for lane in left]
        heads = tuple(lane[0] if lane else None for lane in some)
        assert consumption.choose(state, heads)[0] == chosen


def simulated(certain_ahead, name, consume, hint, sigma, seed, *, timer=None, **more):
    table = build_schedule(name, ScheduleRequest(num_stages=3, num_microbatches=6))
    words = {"hint": hint} if hint else {"consume": consume, **more}
    order = Ordering(schedule=table, **words).resolve(table.placement, table.graph)
    durations_ms = for_steps(constant((10.0, 10.0, 10.0), order.graph), NUM_STEPS)
    costs = Costs(durations_ms=lognormal(durations_ms, sigma, np.random.default_rng(seed)))
    arbiters = order.arbiters(StepRules(updates=False), certain_ahead=certain_ahead)
    machine = Machine(links=Links(latency_ms=1.0), just_in_time=timer)
    return simulate(arbiters, costs, machine=machine, num_steps=NUM_STEPS, record_events=True)


@given(
    name=st.sampled_from(TABLES),
    consume=st.sampled_from(["ready", "strict"]),
    hint=st.sampled_from([None, None, "bf", "f-priority"]),
    sigma=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=40)
def test_a_simulated_run_is_the_same_to_the_last_digit(name, consume, hint, sigma, seed):
    early, late = (simulated(certain, name, consume, hint, sigma, seed) for certain in (True, False))
    assert sorted(early.timeline.spans) == sorted(late.timeline.spans)
    assert early.timeline.waits == late.timeline.waits
    assert early.step_ends_ms == late.step_ends_ms


class Sometime(DecisionTimer):
    """Has what follows decided so many milliseconds after a task's start, on average."""

    __slots__ = ("_mean_ms",)

    def __init__(self, mean_ms, rule):
        super().__init__(rule)
        self._mean_ms = mean_ms

    def delay_s(self, task):
        return np.random.default_rng([*task[1:], ord(task.kind)]).exponential(self._mean_ms) / 1e3


def num_words(simulation):
    return sum(isinstance(event, DecideNow) for log in simulation.logs for event, _ in log)


@given(
    name=st.sampled_from(TABLES),
    consume=st.sampled_from(["ready", "strict"]),
    hint=st.sampled_from([None, None, "bf", "f-priority"]),
    mean_ms=st.sampled_from([0.0, 3.0, 10.0]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=40)
def test_the_word_that_a_task_is_about_to_end_finds_the_same_choice(name, consume, hint, mean_ms, seed):
    """What was certain before is chosen at the moment of the word, too; without foresight, for announcements of choices
    that are not certain come later then."""
    words = {"foresight": False} if consume == "ready" else {}
    early, late = (
        simulated(certain, name, consume, hint, 0.5, seed, timer=partial(Sometime, mean_ms), **words)
        for certain in (True, False)
    )
    assert sorted(early.timeline.spans) == sorted(late.timeline.spans)
    assert early.step_ends_ms == late.step_ends_ms
    assert num_words(early) < num_words(late)


def test_most_of_a_table_is_certain_where_nothing_varies():
    simulation = simulated(True, "1f1b", "ready", None, 0.0, 0)
    behind = 0
    for log in simulation.logs:
        running = 0
        for event, instructions in log:
            running -= isinstance(event, TaskFinished)
            for _ in runs(instructions):
                behind += running > 0
                running += 1
    assert behind > len(simulation.timeline.spans) / 3


def test_a_group_pays_nothing_for_a_choice_that_came_while_the_task_before_ran():
    """Choices behind the first arrive before they are due, though the leader's device is the last to end a task."""
    plain = StageSetup(chain(1, 2), linear(1), 0, consumption=ready(HINTS["bf"]), window=4, rules=PIPELINE_ONLY)
    costs = []
    for certain in (True, False):
        made = [group_arbiter("leader", replace(plain, certain_ahead=certain), member, 2) for member in range(2)]
        logs = run_group(made, hop_s=1.0, task_s=(8.0, 5.0))
        overhead = agreement_overhead([launches(each, log) for each, log in zip(made, logs, strict=True)])
        costs.append([overhead[RunTask(0, task(t))] for t in ("0F0", "0B0", "0F1", "0B1")])
    assert costs == [[2.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 1.0]]


def run_group(members, *, hop_s, task_s):
    """The logs of members whose tasks take each so long on its device, which keeps to its order."""
    logs, free_s = [[] for _ in members], [0.0] * len(members)
    coming = [(0.0, number, number, StepStarted(0, 0.0)) for number in range(len(members))]
    count = len(coming)
    while coming:
        coming.sort(key=lambda entry: entry[:2])
        now_s, _, place, event = coming.pop(0)
        answer = members[place].handle(event._replace(time_s=now_s))
        logs[place].append((event._replace(time_s=now_s), answer))
        for instruction in answer:
            count += 1
            if isinstance(instruction, RunTask):
                free_s[place] = max(free_s[place], now_s) + task_s[place]
                coming.append((free_s[place], count, place, TaskFinished(0, 0.0, instruction.task)))
            elif isinstance(instruction, TellGroup):
                heard = GroupHeard(instruction.step, 0.0, place, instruction.note)
                coming.append((now_s + hop_s, count, instruction.member, heard))
    return logs
