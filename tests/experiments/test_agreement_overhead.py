"""What agreement costs, from hand-made logs and from real members under a virtual clock with one hop of 1 s."""

from collections import Counter
from heapq import heappop, heappush
from itertools import count

import pytest

from experiments.agreement_overhead import agreement_overhead, launches
from rrfp_jax.core import (
    HINTS,
    DecideNow,
    FinishStep,
    GroupHeard,
    InputArrived,
    Message,
    MessageKind,
    RunTask,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskFinished,
    TellGroup,
    group_arbiter,
    ready,
)
from rrfp_jax.schedules import Task, chain, linear
from tests.model_checker.catalogue import PIPELINE_ONLY

F0, F1, B0, B1 = map(Task.parse, ("1F0", "1F1", "1B0", "1B1"))


def arbiter(**more):
    more = {"rules": PIPELINE_ONLY, "consumption": ready(HINTS["bf"]), "window": 4, **more}
    return StageArbiter(StageSetup(chain(2, 2), linear(2), 1, **more))


def arrival(time_s, microbatch, step=0):
    return InputArrived(step, time_s, Message(MessageKind.ACTIVATION, 0, 1, microbatch))


def run(task, step=0):
    return RunTask(step, task)


def overhead(member, *logs):
    return agreement_overhead([launches(member, log) for log in logs])


def test_counted_from_the_last_input_and_the_last_idle_member_to_the_last_launch():
    early = [
        (StepStarted(0, 0.0), []),
        (arrival(1.0, 0), []),
        (GroupHeard(0, 2.5, 0, None), [run(F0)]),
        (TaskFinished(0, 9.0, F0), [run(B0)]),
    ]
    late = [(StepStarted(0, 0.0), []), (arrival(2.0, 0), [run(F0)]), (TaskFinished(0, 7.0, F0), [run(B0)])]
    assert overhead(arbiter(), early, late) == {run(F0): 0.5, run(B0): 0.0}


def test_a_step_begins_when_the_last_one_has_ended():
    log = [
        (StepStarted(0, 0.0), []),
        (arrival(0.0, 0, step=1), []),
        (StepStarted(1, 1.0), []),
        (arrival(2.0, 0), [run(F0), FinishStep(0)]),
        (TaskFinished(0, 2.0, F0), []),
        (GroupHeard(1, 5.0, 0, None), [run(F0, step=1)]),
    ]
    assert overhead(arbiter(), log) == {run(F0): 0.0, run(F0, step=1): 3.0}


def test_steps_whose_start_some_log_lacks_are_left_out():
    whole = [(StepStarted(0, 0.0), []), (arrival(1.0, 0), [run(F0)])]
    assert overhead(arbiter(), whole, whole[1:]) == {}
    assert overhead(arbiter(), whole, whole[:1]) == {}
    assert overhead(arbiter()) == {}


def test_where_a_task_is_due_its_successor_could_follow_at_once():
    log = [
        (StepStarted(0, 0.0), []),
        (arrival(1.0, 0), [run(F0)]),
        (DecideNow(0, 3.0, F0), []),
        (GroupHeard(0, 3.5, 0, None), [run(B0)]),
        (DecideNow(0, 3.75, B0), []),
        (TaskFinished(0, 4.0, F0), []),
        (TaskFinished(0, 8.0, B0), []),
        (arrival(9.0, 1), []),
        (GroupHeard(0, 9.5, 0, None), [run(F1)]),
    ]
    assert overhead(arbiter(), log) == {run(F0): 0.0, run(B0): 0.5, run(F1): 0.5}


def test_a_successor_that_came_late_could_have_followed_since_its_input():
    log = [
        (StepStarted(0, 0.0), []),
        (arrival(1.0, 0), [run(F0)]),
        (TaskFinished(0, 2.0, F0), [run(B0)]),
        (DecideNow(0, 3.0, B0), []),
        (TaskFinished(0, 4.0, B0), []),
        (arrival(5.0, 1), []),
        (GroupHeard(0, 5.25, 0, None), [run(F1)]),
    ]
    assert overhead(arbiter(), log) == {run(F0): 0.0, run(B0): 0.0, run(F1): 0.25}


def test_gates_count():
    """U of the coordinator waits for the other stage's report."""
    coordinator = StageArbiter(
        StageSetup(chain(2, 1), linear(2), 0, consumption=ready(HINTS["bf"]), window=1, rules=StepRules())
    )
    tasks = [Task.parse(text) for text in ("0F0", "0B0", "0R", "0U")]
    log = [(StepStarted(0, 0.0), [run(tasks[0])])]
    log += [(TaskFinished(0, 1.0 + n, tasks[n]), [run(tasks[n + 1])]) for n in (0, 1)]
    log.append((TaskFinished(0, 3.0, tasks[2]), []))
    log.append((InputArrived(0, 6.0, Message(MessageKind.REPORT, 1, 0)), []))
    log.append((GroupHeard(0, 6.25, 0, None), [run(tasks[3])]))
    assert overhead(coordinator, log)[run(tasks[3])] == 0.25


def virtual_run(protocol, *, num_members=2):
    """What agreement costs where each task is a collective of 10 s, a note takes 1 s, and all inputs come at 5 s."""
    members = [
        group_arbiter(
            protocol,
            StageSetup(
                chain(2, 2),
                linear(2),
                1,
                consumption=ready(HINTS["bf"]),
                window=4,
                rules=PIPELINE_ONLY,
            ),
            member,
            num_members,
        )
        for member in range(num_members)
    ]
    order, logs, launched, free_at_s = count(), [[] for _ in members], Counter(), 0.0
    queue = [(0.0, next(order), m, StepStarted(0, 0.0)) for m in range(num_members)]
    queue += [(5.0, next(order), m, arrival(5.0, microbatch)) for m in range(num_members) for microbatch in (0, 1)]
    while queue:
        now_s, _, m, event = heappop(queue)
        event = event._replace(time_s=now_s)
        out = members[m].handle(event)
        logs[m].append((event, out))
        for i in out:
            if isinstance(i, TellGroup):
                heappush(queue, (now_s + 1.0, next(order), i.member, GroupHeard(i.step, 0.0, m, i.note)))
            if isinstance(i, RunTask):
                launched[i] += 1
                if launched[i] == num_members:
                    free_at_s = max(free_at_s, now_s) + 10.0
                    for other in range(num_members):
                        heappush(queue, (free_at_s, next(order), other, TaskFinished(i.step, 0.0, i.task)))
    return overhead(members[0], *logs)


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize("protocol", ["leader", "propose"])
def test_a_choice_costs_one_hop_and_a_leader_hears_of_inputs_by_another(protocol, num_members):
    first = 2.0 if protocol == "leader" else 1.0
    assert virtual_run(protocol, num_members=num_members) == {run(F0): first, run(B0): 1.0, run(F1): 1.0, run(B1): 1.0}


def test_without_agreement_nothing_is_lost():
    assert set(virtual_run("off").values()) == {0.0}
