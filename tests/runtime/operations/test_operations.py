"""Operations of one's own, as far as the core knows them: the record, the graph, tables, memory and simulation."""

from dataclasses import replace
from functools import cache

import pytest

from rrfp_jax.core import Agreement, GroupProtocol, Ordering, StepRules
from rrfp_jax.schedules import (
    Edge,
    Op,
    PipelineGraph,
    ScheduleRequest,
    Task,
    TaskKind,
    absences,
    build_schedule,
    chain,
    linear,
    with_operations,
)
from rrfp_jax.schedules.timeline import IdleReason, Timeline
from rrfp_jax.simulation import simulate
from rrfp_jax.simulation.costs import Costs, constant
from rrfp_jax.simulation.result import peak_memory

RULES = StepRules(updates=False, agreement=Agreement.NONE)


def tasks(text):
    return [Task.parse(word) for word in text.split()]


def offload(pairs=None, *, ms=5.0, part=1.0, lead=1, lanes=("d2h", "h2d")):
    out = Op("O", after="F", lane=lanes[0], frees=part, ms=ms, pairs=pairs)
    return out, Op("L", after=out, before="B", lane=lanes[1], holds=part, ms=ms, lead=lead, pairs=pairs)


def offloaded(slots, *, name="1f1b", p=8, m=32, **more):
    """1F1B whose stages move what does not fit into so many slots."""
    table = build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m))
    peaks = table.peak_activations()
    pairs = frozenset((c, i) for c in range(p) for i in range(m) if peaks[c] > slots)
    return with_operations(table, offload(pairs, **more)) if pairs else table


def run(table, slots, *, consume="strict", **more):
    ordering = Ordering(schedule=table, consume=consume, window=slots if table.graph.ops else None, **more)
    order = ordering.resolve(table.placement, replace(table.graph, ops=()))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    arbiters = order.arbiters(RULES)
    timeline = simulate(arbiters, costs, num_steps=2).timeline
    for arbiter in arbiters:
        arbiter.validate()
    assert max(peak_memory(timeline.of_step(1), order.graph, table.placement)) <= slots
    return timeline


# -- the record and the graph ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"letter": "o", "after": "F"}, "capital letters"),
        ({"letter": "F", "after": "B"}, "letter of a built-in task"),
        ({"letter": "O"}, "comes after nothing and before nothing"),
        ({"letter": "O", "after": "O"}, "after or before itself"),
        ({"letter": "O", "after": "F", "lane": ""}, "has no lane"),
        ({"letter": "O", "after": "F", "frees": -1}, "frees is -1"),
        ({"letter": "O", "after": "F", "ms": float("inf")}, "ms is inf"),
        ({"letter": "O", "before": "B", "lead": 1.5}, "lead is 1.5, give a whole number"),
        ({"letter": "O", "after": "F", "run": "print"}, "run is 'print', give a function"),
        ({"letter": "O", "after": "F", "per": "layer"}, "per is 'layer'"),
        ({"letter": "O", "after": "F", "per": "step", "holds": 0.5}, "runs once per step"),
    ],
)
def test_an_operation_that_means_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Op(fields.pop("letter"), **fields)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((Op("O", after="X"),), "names 'X', which its chunk does not have"),
        ((Op("O", after="P"), Op("P", after="O")), "wait for each other"),
        ((Op("O", after="B", before="F"),), "the other way round"),
        ((Op("O", after="F"), Op("O", after="B")), "two operations have the letter 'O'"),
        ((Op("O", after="F", chunks=frozenset({7})),), "on chunk 7: there are 2"),
        ((Op("O", after="F", pairs=frozenset({(0, 9)})),), "no chunk 0 with microbatch 9"),
        ((Op("O", after="F", holds=2.0),), "take more memory"),
        ((Op("O", before="F", frees=0.5),), "frees more than chunk 0 may hold"),
        ((Op("O", after="F", frees=0.5),), "frees what nothing takes back, and the backward of chunk 0 needs all"),
        ((Op("O", after="F", holds=0.5),), "may take memory behind the backward of chunk 0, where nothing frees it"),
        ((Op("O", after="B", holds=0.5),), "let it come before B, or free as much as it holds"),
        ((*offload(), Op("P", after="F", frees=1.0), Op("Q", after="P", before="B", holds=1.0)), "frees more than"),
        ((Op("S", after="F", before="B", per="chunk"),), "both after and before the tasks of all microbatches"),
        ((Op("S", after="U", before="R", per="chunk"),), "after and before R or U"),
        ((Op("S", after="X", per="chunk"),), "names 'X', which chunk 0 does not have"),
    ],
)
def test_an_operation_that_does_not_fit_the_graph_is_refused(ops, words):
    with pytest.raises(ValueError, match=words):
        replace(chain(2, 2), ops=ops)


def test_operations_are_tasks_with_dependencies():
    graph = replace(chain(2, 2), ops=offload(frozenset({(0, 0), (0, 1), (1, 1)})))
    assert list(graph.tasks([0])) == tasks("0F0 0O0 0L0 0B0 0F1 0O1 0L1 0B1")
    assert list(graph.tasks([1])) == tasks("1F0 1B0 1F1 1O1 1L1 1B1")
    assert set(graph.dependencies(Task.parse("0B0"))) == set(tasks("0F0 1B0 0L0"))
    assert graph.dependencies(Task.parse("0L0")) == tuple(tasks("0O0"))
    assert [graph.memory_effect(task) for task in tasks("0F0 0O0 0L0 0B0")] == [(1, 0), (0, 1), (1, 0), (0, 1)]


def test_b_means_the_whole_backward_where_it_is_split():
    graph = replace(chain(1, 1, split=True), ops=(Op("P", before="B"), Op("Q", after="B")))
    assert graph.kinds(0) == ("F", "P", "I", "W", "Q")
    assert graph.dependencies(Task.parse("0Q0")) == tuple(tasks("0W0"))


def test_forward_takes_what_operations_do_not_take_later():
    graph = replace(chain(1, 1), ops=(Op("C", after="F", before="B", holds=0.75),))
    assert [graph.memory_effect(task) for task in tasks("0F0 0C0 0B0")] == [(0.25, 0), (0.75, 0), (0, 1)]


def test_there_is_one_object_for_each_kind():
    assert TaskKind("OF") is TaskKind("OF")
    assert Task.parse("3OF12") == Task(TaskKind("OF"), 3, 12)
    with pytest.raises(ValueError, match="capital letters"):
        TaskKind("of")


# -- tables ------------------------------------------------------------------------------------------------------------


def test_an_operation_stands_where_it_is_issued():
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=3))
    rows = with_operations(table, offload(frozenset({(0, m) for m in range(3)}))).orders
    assert list(rows[0]) == tasks("0F0 0O0 0L0 0F1 0O1 0B0 0L1 0F2 0O2 0L2 0B1 0B2")
    assert rows[1] == table.orders[1]
    rows = with_operations(table, offload(frozenset({(0, m) for m in range(3)}), lead=0)).orders
    assert list(rows[0]) == tasks("0F0 0O0 0F1 0O1 0L0 0B0 0F2 0O2 0L1 0B1 0L2 0B2")


def test_the_peak_counts_operations():
    assert max(offloaded(3).peak_activations()) == 3
    assert offloaded(3).peak_activations()[0] == 2


def test_a_group_without_a_leader_refuses_an_engine_beside_compute():
    table = offloaded(1, p=2, m=2)
    order = Ordering(schedule=table, window=2).resolve(table.placement, chain(2, 2))
    assert order.footprints == (2, 2)
    assert len(order.arbiters(RULES, members={0: (0, 2)})) == 1
    for protocol in (GroupProtocol.PROPOSE, GroupProtocol.OFF):
        with pytest.raises(ValueError, match="operation O runs beside compute on stage 0, which spans 2 processes"):
            order.arbiters(RULES, members={0: (0, 2)}, protocol=protocol)


def test_a_hint_that_would_drop_a_tables_operations_is_refused():
    with pytest.raises(ValueError, match="has operations, and hint bf does not follow it: give hint schedule"):
        Ordering(schedule=offloaded(1, p=2, m=2), hint="bf")


# -- simulation --------------------------------------------------------------------------------------------------------


@cache
def whole_s():
    """A step of which nothing is moved."""
    return run(offloaded(8), 8).of_step(1).makespan_s()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("slots", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("lanes", [("d2h", "h2d"), ("copy", "copy")])
def test_offload_costs_nothing_while_a_round_trip_fits_beside_a_turn(slots, lanes, consume):
    for ms in (1.0, 7.5, 15.0):
        table = offloaded(slots, ms=ms, lanes=lanes)
        assert run(table, slots, consume=consume).of_step(1).makespan_s() == pytest.approx(whole_s())


def test_a_copy_that_is_too_slow_is_named():
    timeline = run(offloaded(3, ms=40.0, lanes=("copy", "copy")), 3)
    idle = timeline.idle_s_by_reason()[0]
    assert max(idle, key=idle.__getitem__) is IdleReason.ENGINE
    assert timeline.makespan_s() > 1.5 * run(offloaded(8), 8).makespan_s()


def test_a_hint_moves_memory_too():
    """Without a table memory is reserved microbatch by microbatch, and taken back when the gradient is here."""
    graph = replace(chain(4, 16), ops=offload(ms=2.0))
    for window in (1, 2, 3):
        order = Ordering(hint="bf", window=window, ops=graph.ops).resolve(linear(4), chain(4, 16))
        timeline = simulate(
            order.arbiters(RULES), Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
        ).timeline
        assert max(peak_memory(timeline, order.graph, linear(4))) <= window
        assert {span.task for span in timeline.spans} == set(graph.tasks())


@pytest.mark.parametrize("window", [1, 2])
def test_a_hint_moves_memory_in_steps_that_lack_some_pairs(window):
    graph = PipelineGraph(4, 4, (Edge(0, 2, is_optional=True), Edge(1, 2), Edge(2, 3)))
    order = Ordering(hint="bf", window=window, ops=offload(ms=2.0)).resolve(linear(4), graph)
    steps = [absences([(0, 1)]), absences([(0, 0), (0, 2)]), ()]
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    run = simulate(order.arbiters(StepRules()), costs, num_steps=6, absent=steps)
    ran = [sum(span.task.kind == "L" for span in run.timeline.of_step(step).spans) for step in range(3)]
    assert ran == [15, 14, 16]


def test_an_operation_of_the_compute_lane_runs_in_bubbles():
    ops = (Op("S", after="F", ms=4.0),)
    order = Ordering(hint="bf", window=4, ops=ops).resolve(linear(4), chain(4, 8))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    timeline = simulate(order.arbiters(RULES), costs).timeline
    assert sum(span.task.kind == "S" for span in timeline.spans) == 32
    plain = Ordering(hint="bf", window=4).resolve(linear(4), chain(4, 8))
    alone = simulate(plain.arbiters(RULES), costs).timeline
    assert timeline.makespan_s() < alone.makespan_s() + 4 * 8 * 4e-3


def test_operations_once_per_step_and_chunk():
    ops = (Op("G", before="F", per="chunk", lane="net", ms=3.0), Op("E", after="B", per="step", ms=1.0))
    order = Ordering(hint="bf", window=4, ops=ops).resolve(linear(2), chain(2, 2))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    timeline = simulate(order.arbiters(RULES), costs).timeline
    assert timeline.makespan_s() == pytest.approx(0.08 + 0.01)
    once = sorted(str(span.task) for span in timeline.spans if span.task.microbatch < 0)
    assert once == ["0E", "0G", "1G"]


@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("lane", ["compute", "net"])
@pytest.mark.parametrize("agreement", list(Agreement))
def test_operations_once_per_step_run_beside_a_table_that_names_none(consume, lane, agreement):
    ops = (
        Op("G", before="F", per="chunk", lane=lane, ms=3.0),
        Op("H", after="R", before="U", per="chunk", lane=lane, ms=1.0),
        Op("E", after="U", per="step", lane=lane, ms=1.0),
    )
    table = with_operations(build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=4)), ops)
    order = Ordering(schedule=table, consume=consume).resolve(table.placement, chain(2, 4))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    timeline = simulate(order.arbiters(StepRules(agreement=agreement)), costs, num_steps=2).timeline.of_step(1)
    end_s = {str(span.task): span.end_s for span in timeline.spans}
    start_s = {str(span.task): span.start_s for span in timeline.spans}
    for before, after in (("0G", "0F0"), ("1G", "1F0"), ("0R", "0H"), ("0H", "0U"), ("1H", "1U"), ("0U", "0E")):
        assert end_s[before] <= start_s[after]


def test_spans_keep_their_lane():
    timeline = run(offloaded(2, p=4, m=4), 2)
    again = Timeline.from_plain(4, timeline.as_plain())
    assert again.spans == timeline.spans
    assert {span.lane for span in again.beside()} == {"d2h", "h2d"}


def test_an_operation_around_a_backward_that_is_not_there_is_refused():
    frozen = replace(chain(3, 2), frozen=frozenset({0}))
    around = Op("C", after="F", before="B", holds=1.0)
    with pytest.raises(ValueError, match=r"'C' goes with the backward of chunk 0, which has none.*leave \[0\] out"):
        replace(frozen, ops=(around,))
    assert replace(frozen, ops=(replace(around, chunks=frozenset({1, 2})),)).operations.has("C", 1, 0)
