"""Windows in which microbatches weigh differently: the rule, the arbiter, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import (
    HINTS,
    GroupHeard,
    GroupProtocol,
    IllegalTransition,
    RunTask,
    StageArbiter,
    StageSetup,
    StepStarted,
    TaskFinished,
    check_weights,
    group_arbiter,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.core.memory import Window
from rrfp_jax.schedules import Task, TaskKind, chain, linear
from tests.model_checker.catalogue import PIPELINE_ONLY


@given(data=st.data())
def test_the_rule_by_its_definition(data):
    weights = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    capacity = max(weights) + data.draw(st.integers(0, 8))
    reserve = Window(capacity, [1] * len(weights), weights=weights)
    for _ in range(data.draw(st.integers(0, 12))):
        unfinished = [m for m, left in enumerate(reserve.left) if left]
        for m in unfinished:
            held = reserve.held | {m}
            older = [other for other in unfinished if other < m and other not in held]
            fits = sum(weights[h] for h in held) <= capacity and all(
                sum(weights[h] for h in held if h > other) + weights[other] <= capacity for other in older
            )
            assert reserve.admits(m) == (m in reserve.held or fits)
        if unfinished:
            assert reserve.admits(unfinished[0])
            chosen = data.draw(st.sampled_from(unfinished))
            if chosen in reserve.held:
                reserve.finish(chosen)
            elif reserve.admits(chosen):
                reserve.start_forward(chosen)


def setup(capacity=10, window=1, num_microbatches=5, hint="f-priority", **more):
    return StageSetup(
        chain(2, num_microbatches),
        linear(2),
        0,
        consumption=more.pop("consumption", ready(HINTS[hint])),
        window=window,
        capacity=capacity,
        rules=PIPELINE_ONLY,
        **more,
    )


def forwards(arbiter, weights, step=0):
    """The forwards that run before any gradient comes."""
    answer, ran = arbiter.handle(StepStarted(step, 0.0, (), weights)), []
    arbiter.validate()
    while tasks := [i.task for i in answer if isinstance(i, RunTask)]:
        ran += [task.microbatch for task in tasks]
        answer = arbiter.handle(TaskFinished(step, 0.0, tasks[0]))
        arbiter.validate()
    return ran


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((), [0]),  # counted: the window is 1
        ((10, 10, 10, 10, 10), [0]),
        ((5, 5, 5, 5, 5), [0, 1]),
        ((2, 2, 2, 2, 2), [0, 1, 2, 3, 4]),
        ((6, 6, 2, 2, 2), [0, 2, 3]),  # 1 does not fit, and finds 6 free once 0 has gone: not beside 2, 3 and 4
        ((6, 6, 2, 1, 1), [0, 2, 3, 4]),
        ((1, 10, 1, 1, 1), [0]),  # 1 needs everything, once 0 has gone
    ],
)
def test_what_a_stage_starts(weights, expected):
    assert forwards(StageArbiter(setup()), weights) == expected


def test_more_light_microbatches_than_heavy_ones():
    arbiter = StageArbiter(setup(num_microbatches=64, capacity=64))
    assert [len(forwards(arbiter.fresh(None), (weight,) * 64)) for weight in (1, 4, 16, 64)] == [64, 16, 4, 1]


def test_a_plan_brings_its_weights():
    arbiter = StageArbiter(setup())
    plan = arbiter.plan_without(((0, 0b10), (1, 0b10)), (3, 0, 3, 3, 3))
    arbiter.prepare(plan)
    assert (plan.absent, plan.weights) == (((0, 0b10), (1, 0b10)), (3, 0, 3, 3, 3))
    arbiter.handle(StepStarted(0, 0.0, plan.absent, plan.weights))
    assert arbiter.held() == {0}
    assert arbiter.plan_without(()).weights == ()


def test_steps_with_and_without_weights_take_turns():
    arbiter = StageArbiter(setup(window=3))
    last = arbiter.fresh(4)
    assert forwards(last, (10,) * 5, step=5) == [0]
    assert forwards(arbiter.fresh(4), (), step=5) == [0, 1, 2]
    assert last.key() != arbiter.fresh(4).key()


@pytest.mark.parametrize(
    ("weights", "capacity", "why"),
    [
        ((1, 2), None, "given weights of microbatches and no capacity"),
        ((1,), 4, "has 2 microbatches and is given 1 weights"),
        ((-1, 2), 4, "negative weight"),
        ((1, 5), 4, "a microbatch weighs 5 on stage 3, which may hold 4: give at least that"),
    ],
)
def test_wrong_weights_are_refused(weights, capacity, why):
    with pytest.raises(ValueError, match=why):
        check_weights(weights, 2, capacity, 3)


def test_wrong_weights_change_nothing():
    arbiter = StageArbiter(setup())
    with pytest.raises(ValueError, match="weighs 11"):
        arbiter.plan_without((), (1, 11, 1, 1, 1))
    with pytest.raises(IllegalTransition, match="step 0 was started with wrong weights"):
        arbiter.handle(StepStarted(0, 0.0, (), (1, 11, 1, 1, 1)))
    assert not arbiter.is_active


def test_a_capacity_needs_a_window():
    row = tuple(Task(kind, 0, m) for m in range(5) for kind in (TaskKind.F, TaskKind.B))
    for more in ({"consumption": strict(row)}, {"consumption": ready(schedule_hint(row)), "footprint": 5}):
        with pytest.raises(ValueError, match="a capacity takes the place of the window"):
            setup(**more)
    with pytest.raises(ValueError, match="capacity of stage 0 is 0"):
        setup(capacity=0)


def test_members_of_a_group_must_agree_on_the_weights():
    leader = group_arbiter(GroupProtocol.LEADER, setup(), 0, 2)
    follower = group_arbiter(GroupProtocol.LEADER, setup(), 1, 2)
    (told,) = follower.handle(StepStarted(0, 0.0, (), (2,) * 5))
    leader.handle(StepStarted(0, 0.0, (), (1,) * 5))
    with pytest.raises(IllegalTransition, match=r"and with weights \(2, 2, 2, 2, 2\)"):
        leader.handle(GroupHeard(0, 0.0, 1, told.note))
