"""How far chunks without a backward run ahead: the reserve, its turns, what the arbiter does, what a user may ask."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import (
    HINTS,
    AheadBound,
    FinishStep,
    InputArrived,
    Message,
    MessageKind,
    Ordering,
    RunTask,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskFinished,
    ready,
)
from rrfp_jax.core.memory import Window, holding_turns, peak_of_turns, turns_of_table
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, ScheduleTable, Task, TaskKind, absences, linear
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs

NUM_MICROBATCHES = 6


@st.composite
def histories(draw):
    """A limit, ends per microbatch, and a list of wishes (which microbatch to start, or to give one end)."""
    ends = draw(st.lists(st.integers(0, 3), min_size=1, max_size=NUM_MICROBATCHES))
    wishes = draw(st.lists(st.tuples(st.booleans(), st.integers(0, len(ends) - 1)), max_size=40))
    return draw(st.integers(1, NUM_MICROBATCHES)), ends, wishes


@given(histories(), st.integers(0, 5), st.booleans())
def test_equal_weights_by_number_keep_a_slot_for_the_oldest(history, first, is_weighed):
    limit, ends, wishes = history
    numbers = range(first, first + len(ends))
    window = Window(limit, ends, first, weights=(1,) * len(ends) if is_weighed else ())
    for starts, place in wishes:
        m = place + first
        unfinished = [p + first for p, left in enumerate(window.left) if left]
        oldest = min(unfinished, default=numbers.stop)
        free = limit - len(window.held)
        expected = [
            m for m in unfinished if m in window.held or free > 1 or (free and (m == oldest or oldest in window.held))
        ]
        assert [m for m in unfinished if window.admits(m)] == expected
        if starts and window.left[place] and window.admits(m):
            window.start_forward(m)
        elif not starts and m in window.held:
            window.finish(m)
        unfinished = [p + first for p, left in enumerate(window.left) if left]
        assert window.oldest == min(unfinished, default=numbers.stop)
        assert window.load == len(window.held)


@given(histories(), st.randoms(use_true_random=False))
def test_what_is_left_always_finds_room_in_the_order_and_the_first_is_admitted(history, random):
    _, ends, wishes = history
    order = tuple(sorted([*range(len(ends))] * 2, key=lambda _: random.random()))
    weights = [random.randint(1, 5) for _ in ends]
    events = holding_turns(range(len(ends)), order)
    reserve = Window(peak_of_turns(events, dict(enumerate(weights))) + random.randint(0, 3), ends, 0, order, weights)
    started: set[int] = set()
    for starts, m in wishes:
        if starts and ends[m] and m not in started and reserve.admits(m):
            started.add(m)
            reserve.start_forward(m)
        elif not starts and m in reserve.held:
            reserve.finish(m)
        load = reserve.load
        assert load == sum(weights[m] for m in reserve.held)
        assert load <= reserve.limit
        left = [(m, is_start) for m, is_start in events if reserve.left[m] and not (is_start and m in started)]
        if left and left[0][1]:
            assert reserve.admits(left[0][0])
        for other, is_start in left:
            load += weights[other] if is_start else -weights[other]
            assert load <= reserve.limit


def test_a_limit_below_the_orders_peak_is_refused():
    with pytest.raises(ValueError, match="a limit of 1 is less than the 2 that its order needs"):
        Window(1, (1, 1), 0, (0, 1, 0, 1))


def test_an_order_names_each_microbatch_twice():
    with pytest.raises(ValueError, match="name each microbatch twice"):
        holding_turns(range(2), (0, 0, 1))


# -- turns of tables ---------------------------------------------------------------------------------------------------


def tasks(text):
    return [Task.parse(word) for word in text.split()]


def frozen_first(num_microbatches):
    return small_graphs(2, num_microbatches)["frozen first chunk"]


def test_forwards_alone_come_as_late_as_possible():
    order = tasks("0F0 0F1 0F2 1F2 1B2 1F0 1B0 1F1 1B1")
    assert turns_of_table(frozen_first(3), order) == {0: (2, 2, 0, 0, 1, 1)}


def test_turns_by_number_need_no_words():
    assert turns_of_table(frozen_first(2), tasks("0F0 0F1 1F0 1F1 1B1 1B0")) == {0: ()}


def test_a_microbatch_waits_for_all_readers():
    graph = PipelineGraph(3, 2, (Edge(0, 1, False), Edge(0, 2, False), Edge(1, 2)))
    order = tasks("0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1")
    assert turns_of_table(graph, order) == {0: (0, 1, 0, 1)}


def test_chunks_that_feed_each_other_and_pairs_that_do_not_exist():
    edges = (Edge(0, 1, False), Edge(1, 2, False, is_optional=True))
    graph = PipelineGraph(3, 3, edges, absent=absences([(0, 1), (1, 1)]))
    order = tasks("0F0 0F2 1F2 1F0 2F2 2B2 2F1 2B1 2F0 2B0")
    assert turns_of_table(graph, order) == {0: (2, 2, 0, 0, 1, 1), 1: (2, 2, 0, 0, 1, 1)}


# -- the arbiter -------------------------------------------------------------------------------------------------------


def encoder(limit, num_microbatches=4, *, graph=None, absent=(), window=1, chunk_turns=()):
    """The arbiter of stage 0, which runs chunk 0 ahead of chunk 1; its first step has started."""
    setup = StageSetup(
        graph or frozen_first(num_microbatches),
        linear(2),
        0,
        consumption=ready(HINTS["bf"]),
        window=window,
        rules=PIPELINE_ONLY,
        read_ahead=(AheadBound(chunk=0, limit=limit, turns=chunk_turns),),
    )
    arbiter = StageArbiter(setup)
    return arbiter, arbiter.handle(StepStarted(0, 0.0, absent))


def run_out(arbiter, answer):
    """End every task as it starts; what ran."""
    ran = []
    while any(isinstance(i, RunTask) for i in answer):
        (task,) = [i.task for i in answer if isinstance(i, RunTask)]
        ran.append(task.microbatch)
        answer = arbiter.handle(TaskFinished(0, 0.0, task))
        arbiter.validate()
    return ran, answer


def receipt(microbatch, step=0):
    return InputArrived(step, 0.0, Message(MessageKind.TAKEN, 1, 0, microbatch))


def test_a_chunk_stops_at_its_bound_and_goes_on_once_something_is_taken():
    arbiter, answer = encoder(2)
    assert run_out(arbiter, answer)[0] == [0, 1]
    assert [str(w) for w in arbiter.waiting()][:1] == [
        "0F2 waits for receipt of microbatch 0 from chunk 1 to chunk 0, receipt of microbatch 1 from chunk 1 to chunk 0"
    ]
    assert arbiter.idle_reason() is not None
    assert run_out(arbiter, arbiter.handle(receipt(1)))[0] == [2]
    assert arbiter.handle(receipt(1)) == []  # twice
    ran, _ = run_out(arbiter, arbiter.handle(receipt(0)))
    assert ran == [3]


def test_a_step_ends_when_everything_is_taken():
    arbiter, answer = encoder(4)
    _, answer = run_out(arbiter, answer)
    assert not any(isinstance(i, FinishStep) for i in answer)
    assert [arbiter.handle(receipt(m)) for m in (3, 0, 2)] == [[], [], []]
    assert arbiter.handle(receipt(1)) == [FinishStep(0)]
    assert arbiter.handle(receipt(1)) == []  # too late
    assert arbiter.handle(receipt(0, step=1)) == []  # early, kept
    arbiter.handle(StepStarted(1, 0.0))
    arbiter.validate()


def test_absent_pairs_are_not_waited_for():
    graph = PipelineGraph(2, 4, (Edge(0, 1, False, is_optional=True),))
    arbiter, answer = encoder(1, graph=graph, absent=absences([(0, 0), (0, 2)]))
    assert run_out(arbiter, answer)[0] == [1]
    assert run_out(arbiter, arbiter.handle(receipt(1)))[0] == [3]
    assert arbiter.handle(receipt(3)) == [FinishStep(0)]


def test_a_step_without_any_microbatch_of_the_chunk_ends_at_once():
    graph = PipelineGraph(2, 2, (Edge(0, 1, False, is_optional=True),))
    _, answer = encoder(1, graph=graph, absent=absences([(0, 0), (0, 1)]))
    assert answer == [FinishStep(0)]


def test_a_table_s_turn_is_kept_free():
    arbiter, answer = encoder(1, window=4, chunk_turns=(2, 2, 0, 0, 1, 1, 3, 3))
    assert run_out(arbiter, answer)[0] == [2]


@pytest.mark.parametrize(("stages", "expected"), [((0, 0), [0, 1]), ((0, 1), [0, 1, 2, 3])])
def test_the_window_counts_beside_it(stages, expected):
    """On a stage of its own the chunk's window of two is free again as each F ends; with its reader it fills up."""
    setup = StageSetup(
        small_graphs(3, 4)["frozen first chunk"],
        Placement((*stages, 2 - (stages == (0, 0)))),
        0,
        consumption=ready(HINTS["f-priority"]),
        window=2,
        rules=PIPELINE_ONLY,
        read_ahead=(AheadBound(chunk=0, limit=4),),
    )
    arbiter = StageArbiter(setup)
    ran, _ = run_out(arbiter, arbiter.handle(StepStarted(0, 0.0)))
    assert sorted(set(ran)) == expected


# -- what a user may ask -----------------------------------------------------------------------------------------------


def bounds(graph, placement=None, **asked):
    order = Ordering(**asked).resolve(placement or linear(graph.num_chunks), graph)
    return dict(order.read_ahead)


def two_frozen(num_microbatches=8):
    return PipelineGraph(3, num_microbatches, (Edge(0, 1), Edge(1, 2)), frozen=frozenset({0, 1}))


def test_twice_the_readers_window_unless_said_otherwise():
    assert bounds(two_frozen(), window=(1, 2, 3)) == {0: 6, 1: 6}
    assert bounds(two_frozen(), window=(1, 2, 3), read_ahead=1) == {0: 1, 1: 1}


def table(graph, *rows):
    return ScheduleTable("mine", linear(graph.num_chunks), graph, tuple(map(tuple, rows)))


def one_forward_one_backward(chunk, num_microbatches, warm_up=1):
    row = [Task(TaskKind.F, chunk, m) for m in range(warm_up)]
    for m in range(num_microbatches):
        row += [Task(TaskKind.F, chunk, m + warm_up)] * (m + warm_up < num_microbatches) + [Task(TaskKind.B, chunk, m)]
    return row


def test_twice_what_the_readers_table_holds():
    graph = frozen_first(4)
    rows = [Task(TaskKind.F, 0, m) for m in range(4)], one_forward_one_backward(1, 4)
    assert bounds(graph, schedule=table(graph, *rows)) == {0: 4}
    assert bounds(graph, schedule=table(graph, *rows), consume="strict") == {}


def test_less_than_a_table_needs_is_refused():
    graph = PipelineGraph(3, 4, (Edge(0, 1, False), Edge(0, 2, False), Edge(1, 2)))
    forwards = [Task(TaskKind.F, 0, m) for m in range(4)]
    late = [Task(k, 2, m) for m in range(4) for k in (TaskKind.F, TaskKind.B)]
    mine = table(graph, forwards, one_forward_one_backward(1, 4, warm_up=2), late)
    with pytest.raises(ValueError, match="read_ahead is 1 for chunk 0, of which 3 microbatches are waited for at once"):
        Ordering(schedule=mine, read_ahead=1).resolve(linear(3), graph)


@pytest.mark.parametrize(
    ("asked", "why"), [({"read_ahead": 0}, "at least 1"), ({"read_ahead": 2, "consume": "strict"}, "strict")]
)
def test_bounds_that_mean_nothing_are_refused(asked, why):
    graph = frozen_first(2)
    rows = [Task(TaskKind.F, 0, m) for m in range(2)], one_forward_one_backward(1, 2)
    with pytest.raises(ValueError, match=why):
        Ordering(schedule=table(graph, *rows), **asked)


@pytest.mark.parametrize(("chunk", "stage", "why"), [(1, 1, "has a backward"), (0, 1, "is not on stage 1")])
def test_bounds_of_other_chunks_are_refused(chunk, stage, why):
    with pytest.raises(ValueError, match=why):
        StageSetup(
            frozen_first(2),
            linear(2),
            stage,
            consumption=ready(HINTS["bf"]),
            window=1,
            rules=StepRules(),
            read_ahead=(AheadBound(chunk=chunk, limit=1),),
        )
