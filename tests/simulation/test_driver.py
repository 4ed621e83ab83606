"""The discrete-event driver: figures, exactness against an independent computation, record and determinism."""

import itertools
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import DecideNow, DecisionTimer, StageArbiter, StepRules, TaskFinished, strict
from rrfp_jax.schedules import (
    ScheduleRequest,
    ScheduleTable,
    Task,
    TaskKind,
    build_schedule,
    chain,
    linear,
    looped,
    schedule_names,
)
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.simulation import (
    Communication,
    Costs,
    Links,
    Machine,
    Simulation,
    constant,
    for_steps,
    lognormal,
    simulate,
    simulated_steps_ms,
)
from tests.simulation.helpers import arbiters, by_hint, by_table, makespan_ms, run, starts_ms

TEN = (10.0, 10.0, 10.0)


def longest_path_ms(table: ScheduleTable, durations_ms: np.ndarray, comm_ms: float) -> float:
    """The end of strict execution, as the longest path through dependencies and rows."""
    duration = {
        task: {
            TaskKind.F: durations_ms[task.chunk, task.microbatch, 0],
            TaskKind.B: durations_ms[task.chunk, task.microbatch, 1:].sum(),
            TaskKind.I: durations_ms[task.chunk, task.microbatch, 1],
            TaskKind.W: durations_ms[task.chunk, task.microbatch, 2],
        }[task.kind]
        for task in table.graph.tasks()
    }
    stage = table.placement.stage_of_chunk
    paths = nx.DiGraph()
    for task in table.graph.tasks():
        paths.add_edge(task, "end", weight=duration[task])
        for earlier in table.graph.dependencies(task):
            transfer_ms = comm_ms if stage[earlier.chunk] != stage[task.chunk] else 0.0
            paths.add_edge(earlier, task, weight=duration[earlier] + transfer_ms)
    for order in table.orders:
        for earlier, later in itertools.pairwise(order):
            known = paths.get_edge_data(earlier, later, {"weight": 0.0})["weight"]
            paths.add_edge(earlier, later, weight=max(known, duration[earlier]))
    return float(nx.dag_longest_path_length(paths))


@pytest.mark.parametrize("comm_ms", [0.0, 3.0])
@pytest.mark.parametrize("name", schedule_names())
def test_strict_consumption_equals_the_longest_path_of_the_table(name, comm_ms):
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    rng = np.random.default_rng(len(name))
    whole_ms = rng.integers(1, 40, (1, table.graph.num_chunks, 8, 3)).astype(float)
    simulation = run(by_table(table), whole_ms, machine=Machine(links=Links(latency_ms=comm_ms)))
    assert min(span.start_s for span in simulation.timeline.spans) == 0
    assert max(span.end_s for span in simulation.timeline.spans) == longest_path_ms(table, whole_ms[0], comm_ms) / 1e3
    assert simulation.timeline.order() == [list(order) for order in table.orders]


def test_strict_1f1b_takes_the_ideal_time():
    table = build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=16))
    assert makespan_ms(run(by_table(table), TEN)) == 570


@pytest.mark.parametrize(("window", "expected_ms"), [(4, 540), (6, 510), (8, 510), (32, 510)])
def test_bfw_fills_the_bubble_if_the_window_lets_it(window, expected_ms):
    assert makespan_ms(run(by_hint(chain(4, 16, split=True), linear(4), window=window), TEN)) == expected_ms


@pytest.mark.parametrize(("hint", "expected_ms"), [("bf", 570), ("bf-deep", 535)])
def test_with_two_chunks_per_stage_deep_first_is_better(hint, expected_ms):
    assert makespan_ms(run(by_hint(chain(8, 16), looped(4, 2), hint, window=8), (5.0, 5.0, 5.0))) == expected_ms


def test_strict_interleaved_1f1b_divides_the_bubble():
    table = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=4, num_microbatches=16))
    assert makespan_ms(run(by_table(table), (5.0, 5.0, 5.0))) == 525


def test_messages_take_their_time():
    simulation = run(by_hint(chain(2, 1), linear(2)), TEN, machine=Machine(links=Links(latency_ms=1)))
    assert starts_ms(simulation) == {"0F0": 0, "1F0": 11, "1B0": 21, "0B0": 42}


def test_an_arrival_counts_at_the_moment_of_a_choice():
    # 1F0 ends at 20, and at 20 the second activation arrives: it is there for the choice.
    simulation = run(by_hint(chain(2, 2), linear(2), "f-priority"), TEN)
    assert [str(t) for t in simulation.timeline.order()[1]] == ["1F0", "1F1", "1B0", "1B1"]


def test_a_step_begins_when_the_one_before_has_ended_everywhere():
    stages = by_hint(chain(2, 2), linear(2))
    simulation = run(stages, TEN, num_steps=3)
    assert simulation.step_ends_ms == (90, 180, 270)
    assert simulation.step_ms == [90, 90, 90]
    assert [span.step for span in simulation.timeline.spans] == sorted(span.step for span in simulation.timeline.spans)


def test_control_messages_delay_the_next_step():
    machine = Machine(links=Links(control_ms=2))
    simulation = run(by_hint(chain(2, 2), linear(2)), TEN, num_steps=2, machine=machine)
    # Stage 0 finishes last and coordinates: its verdict needs 2 ms to stage 1, its own next step begins at once.
    assert simulation.step_ends_ms[0] == 92
    assert {s.stage: s.start_s for s in reversed(simulation.timeline.spans) if s.step == 1}[0] == 0.09


def test_steps_of_a_durations_array_come_round_again():
    durations_ms = np.ones((2, 1, 1, 3)) * np.array([1.0, 5.0])[:, None, None, None]
    simulation = run(by_hint(chain(1, 1), linear(1)), durations_ms, num_steps=3)
    assert simulation.step_ms == [3, 15, 3]


def test_updates_and_reductions_take_their_time():
    stages = by_hint(chain(2, 1), linear(2), rules=StepRules())
    costs = Costs(durations_ms=constant(TEN, stages[0].graph), reduce_ms=3, update_ms=4)
    simulation = simulate(stages, costs)
    assert starts_ms(simulation) == {
        "0F0": 0, "1F0": 10, "1B0": 20, "0B0": 40, "1R": 40, "0R": 60, "0U": 63, "1U": 63
    }  # fmt: skip
    assert makespan_ms(simulation) == 60
    assert simulation.step_ends_ms == (67,)


def test_dispatch_overhead_delays_every_task():
    machine = Machine(dispatch_overhead_ms=1, agreement_ms=0.5)
    simulation = run(by_hint(chain(1, 2), linear(1)), TEN, machine=machine)
    assert starts_ms(simulation) == {"0F0": 1.5, "0B0": 13, "0F1": 34.5, "0B1": 46}
    assert simulation.timeline.idle_s_by_reason() == [{IdleReason.HOST: pytest.approx(0.006)}]


def test_just_in_time_hides_the_overhead_and_keeps_the_order():
    """The timer has learnt how long each task takes once one of its kind has ended."""
    machine = Machine(dispatch_overhead_ms=1.5, just_in_time=DecisionTimer)
    simulation = run(by_hint(chain(1, 3), linear(1)), TEN, machine=machine, record_events=True)
    assert makespan_ms(simulation) == 90
    assert [str(t) for t in simulation.timeline.order()[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    decided_ms = [event.time_s * 1e3 for event, _ in simulation.logs[0] if isinstance(event, DecideNow)]
    assert decided_ms == pytest.approx([1.5, 11.5, 40, 60, 70, 90])


def test_what_becomes_ready_after_the_decision_starts_once_the_host_is_ready():
    """Stages that wait for their inputs cannot hide the host, which never costs more than without."""
    machine = Machine(dispatch_overhead_ms=1, just_in_time=DecisionTimer, links=Links(latency_ms=4))
    early = run(by_hint(chain(2, 4), linear(2)), TEN, machine=machine)
    late = run(by_hint(chain(2, 4), linear(2)), TEN, machine=replace(machine, just_in_time=None))
    free = run(by_hint(chain(2, 4), linear(2)), TEN, machine=replace(machine, dispatch_overhead_ms=0))
    assert makespan_ms(free) < makespan_ms(early) < makespan_ms(late)


def test_just_in_time_loses_little_when_durations_vary():
    """Against deciding at the end with a host that takes no time; 2 ms tasks, 0.3 ms on the host."""
    graph = chain(4, 32)
    rng = np.random.default_rng(0)
    durations_ms = lognormal(for_steps(constant((2.0, 2.0, 2.0), graph), 20), 0.5, rng)

    def step_ms(overhead_ms, timer=None):
        machine = Machine(dispatch_overhead_ms=overhead_ms, just_in_time=timer)
        simulation = run(by_hint(graph, linear(4)), durations_ms, machine=machine, num_steps=20)
        return simulation.step_ends_ms[-1]

    best = step_ms(0)
    assert step_ms(0.3, DecisionTimer) < 1.01 * best
    assert step_ms(0.3) > 1.08 * best


def test_the_log_replays_to_the_same_instructions():
    graph, placement = chain(3, 5, split=True), linear(3)
    simulation = run(by_hint(graph, placement, window=3), TEN, num_steps=2, record_events=True)
    assert len(simulation.logs) == 3
    for twin, log in zip(by_hint(graph, placement, window=3), simulation.logs, strict=True):
        assert sum(isinstance(event, TaskFinished) for event, _ in log) == 2 * 15
        for event, instructions in log:
            assert tuple(twin.handle(event)) == instructions


def test_without_asking_no_log_is_kept():
    assert run(by_hint(chain(1, 1), linear(1)), TEN).logs == ()


def test_an_order_that_deadlocks_is_reported():
    graph = chain(2, 1)
    orders = [[Task(TaskKind.B, 0, 0), Task(TaskKind.F, 0, 0)], [Task(TaskKind.F, 1, 0), Task(TaskKind.B, 1, 0)]]
    stages = arbiters(graph, linear(2), [strict(tuple(order)) for order in orders])
    with pytest.raises(RuntimeError, match=r"cannot end(.|\n)*stage 1: 1F0 waits for activation"):
        run(stages, TEN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "at least 1"),
        ({"machine": lambda: Machine(dispatch_overhead_ms=-1)}, "must not be negative"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(by_hint(chain(1, 1), linear(1)), TEN, **{k: v() if callable(v) else v for k, v in options.items()})


def test_durations_of_another_pipeline_are_refused():
    with pytest.raises(ValueError, match="2 chunks and 1 microbatches, the pipeline has 1 and 1"):
        run(by_hint(chain(1, 1), linear(1)), constant(TEN, chain(2, 1)))


@st.composite
def cases(draw) -> tuple[list[StageArbiter], np.ndarray, Machine, int]:
    num_stages = draw(st.integers(1, 4))
    per_stage = draw(st.integers(1, 2))
    num_microbatches = draw(st.integers(1, 5))
    graph = chain(num_stages * per_stage, num_microbatches, split=draw(st.booleans()))
    hint = draw(st.sampled_from(["bf", "bf-deep", "fb", "b-priority", "f-priority"]))
    communication = draw(st.sampled_from(list(Communication)))
    is_async = communication is Communication.ASYNC
    stages = by_hint(
        graph,
        looped(num_stages, per_stage),
        hint,
        window=draw(st.integers(1, 5)),
        certain_ahead=draw(st.booleans()) if is_async else False,
    )
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    durations_ms = rng.integers(0, 9, (1, graph.num_chunks, num_microbatches, 3)).astype(float)
    links = Links(
        latency_ms=draw(st.sampled_from([0.0, 1.0, 5.0])),
        contention=draw(st.booleans()) if is_async else False,
    )
    machine = Machine(
        links=links,
        communication=communication,
        dispatch_overhead_ms=draw(st.sampled_from([0.0, 0.5])),
        just_in_time=DecisionTimer if is_async and draw(st.booleans()) else None,
    )
    return stages, durations_ms, machine, draw(st.integers(1, 2))


@given(cases())
def test_work_and_idle_time_fill_every_stage(case):
    stages, durations_ms, machine, num_steps = case
    twins = [stage.copy() for stage in stages]
    simulation = run(stages, durations_ms, machine=machine, num_steps=num_steps)
    for stage in stages:
        stage.validate()
    assert len(simulation.timeline.spans) == num_steps * len(list(stages[0].graph.tasks()))
    for stage in range(len(stages)):
        record = simulation.timeline.of_stage(stage)
        pieces = sorted((e.start_s, e.end_s) for e in (*record.spans, *record.waits))
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(pieces))
        filled_ms = sum(end - start for start, end in pieces) * 1e3
        assert filled_ms == pytest.approx(simulation.step_ends_ms[-1], abs=1e-6)
    assert_same(simulation, run([twin.copy() for twin in twins], durations_ms, machine=machine, num_steps=num_steps))
    steps_ms = simulated_steps_ms(twins, Costs(durations_ms=durations_ms), machine=machine, num_steps=num_steps)
    assert [*steps_ms] == simulation.step_ms


def test_steps_that_go_on_of_their_own_are_told_one_by_one():
    graph, placement = chain(3, 6), linear(3)
    durations_ms = lognormal(for_steps(constant((5.0, 5.0, 5.0), graph), 5), 0.5, np.random.default_rng(3))
    one, other = (by_hint(graph, placement, window=3, rules=StepRules(updates=False)) for _ in range(2))
    whole = run(one, durations_ms, num_steps=5)
    steps_ms = simulated_steps_ms(other, Costs(durations_ms=durations_ms), num_steps=5)
    assert [next(steps_ms), next(steps_ms), *steps_ms] == whole.step_ms


def assert_same(one: Simulation, other: Simulation) -> None:
    assert one.timeline == other.timeline
    assert one.step_ends_ms == other.step_ends_ms
