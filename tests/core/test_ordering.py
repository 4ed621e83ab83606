"""Tables that stages must keep to, strictly or within their memory, must be able to run; others are refused early."""

from dataclasses import replace

import pytest

from rrfp_jax.core import Ordering, StepRules
from rrfp_jax.schedules import (
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    Task,
    build_schedule,
    chain,
    from_csv,
    linear,
)
from tests.checking.guided import by_table
from tests.model_checker import CheckError, explore
from tests.model_checker.catalogue import PIPELINE_ONLY

YOUNGER_FIRST = from_csv("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n", name="younger first")
"""Microbatch 1 goes ahead, backwards included; the second stage holds one activation."""
ORDERED = StepRules(ordered=True)
REFUSAL = (
    "schedule 'younger first' runs 0B1 before 0B0, and deterministic runs add gradients up in microbatch order: take a "
)


def resolved(table, **words):
    return Ordering(schedule=table, **words).resolve(table.placement, table.graph)


def test_why_it_is_refused_in_order():
    """1B1 waits for 1B0, and 1F0 for the memory of 1B1."""
    setting = by_table(YOUNGER_FIRST)
    explore(setting)
    with pytest.raises(CheckError, match="deadlock: stages"):
        explore(replace(setting, rules=replace(PIPELINE_ONLY, ordered=True)), demand_work=False)


@pytest.mark.parametrize("words", [{}, {"consume": "strict"}, {"foresight": False}, {"window": 2}], ids=str)
def test_a_table_with_its_backwards_in_another_order_is_refused_in_deterministic_runs(words):
    order = resolved(YOUNGER_FIRST, **words)
    assert len(order.arbiters(StepRules())) == 2
    with pytest.raises(ValueError, match=REFUSAL):
        order.arbiters(ORDERED)
    with pytest.raises(ValueError, match=REFUSAL):
        Ordering(schedule=YOUNGER_FIRST, **words).check_deterministic()


@pytest.mark.parametrize("words", [{"footprint": False}, {"hint": "bf"}], ids=str)
def test_where_it_only_ranks_it_may_run(words):
    Ordering(schedule=YOUNGER_FIRST, **words).check_deterministic()
    assert len(resolved(YOUNGER_FIRST, **words).arbiters(ORDERED)) == 2


def test_with_a_split_backward_weight_gradients_count():
    table = from_csv("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1F1,1I1,1W0,1W1\n", name="weights")
    with pytest.raises(ValueError, match="schedule 'weights' runs 0W1 before 0W0"):
        resolved(table).arbiters(ORDERED)
    inputs = from_csv("0F0,0F1,0I1,0I0,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1\n", name="inputs")
    assert len(resolved(inputs).arbiters(ORDERED)) == 2


CIRCLE = ScheduleTable(
    "circle",
    linear(2),
    chain(2, 2),
    tuple(tuple(map(Task.parse, row.split())) for row in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")),
)


@pytest.mark.parametrize("words", [{}, {"consume": "strict"}], ids=str)
def test_a_table_that_waits_in_a_circle_is_refused(words):
    with pytest.raises(ValueError, match="table 'circle'"):
        resolved(CIRCLE, **words)
    resolved(CIRCLE, footprint=False)


def test_a_table_must_be_able_to_run_on_the_pipeline_that_it_is_given():
    """It was made for two chunks that nothing connects; here one feeds the other."""
    placement, apart = Placement((0, 0)), PipelineGraph(2, 1, ())
    row = tuple(map(Task.parse, ("1F0", "1B0", "0F0", "0B0")))
    table = ScheduleTable("apart", placement, apart, (row,)).validate()
    Ordering(schedule=table).resolve(placement, apart)
    with pytest.raises(ValueError, match="table 'apart'"):
        Ordering(schedule=table).resolve(placement, chain(2, 1))
    Ordering(schedule=table, footprint=False).resolve(placement, chain(2, 1))


def test_weights_wait_for_idle_time_only_where_memory_has_room_for_more():
    """Where a stage's row fills its memory, W keeps its place in it: it makes room for the next F."""
    table = build_schedule("1f1b-split", ScheduleRequest(num_stages=3, num_microbatches=4))

    def ranked(**words):
        order = Ordering(schedule=table, **words).resolve(table.placement, table.graph)
        rows = zip(table.orders, order.consumptions, strict=True)
        return [sorted(row, key=lambda task, one=one: one.hint.rank(task)) == list(row) for row, one in rows]

    assert ranked() == [True, True, True]
    assert ranked(window=(3, 3, 1)) == [True, False, True]
    assert ranked(footprint=False, foresight=False) == [False, False, False]


def test_steps_that_overlap_are_for_stages_of_one_process() -> None:
    order = Ordering(hint="bf", delay=1).resolve(linear(2), chain(2, 2))
    with pytest.raises(ValueError, match="for stages of one process: give every stage one process"):
        order.arbiters(StepRules(), members={0: (0, 2), 1: (0, 1)})
