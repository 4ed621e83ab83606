"""The order's flags: defaults, what contradicts what, and what the arbiters are made of."""

from argparse import ArgumentParser
from dataclasses import replace

import pytest

from rrfp_jax.commands.common.ordering import (
    OrderingOptions,
    add_ordering_arguments,
    given_order,
    hint_names,
    parse_window,
)
from rrfp_jax.core import ForesightRules, StepRules
from rrfp_jax.schedules import Edge, PipelineGraph, ScheduleRequest, absences, build_schedule, linear, looped, write_csv

SIZES = {"num_stages": 4, "num_microbatches": 8}


def resolve(sizes=None, **words):
    return OrderingOptions(**words).resolve(**{**SIZES, **(sizes or {})})


def test_without_words_bf_runs_on_a_chain():
    resolved = resolve()
    assert (resolved.label, resolved.table, resolved.placement) == ("bf", None, linear(4))
    assert resolved.windows == (32, 32, 32, 32)
    assert not resolved.graph.split
    assert resolved.is_bf


def test_several_chunks_per_stage_run_deep_first():
    resolved = resolve({"chunks_per_stage": 2})
    assert (resolved.label, resolved.placement, resolved.is_bf) == ("bf-deep", looped(4, 2), False)


def test_a_schedule_alone_is_a_hint():
    resolved = resolve(schedule="interleaved-1f1b")
    assert (resolved.label, resolved.placement) == ("interleaved-1f1b with foresight", looped(4, 2))
    task = resolved.table.orders[0][5]
    assert resolved.consumptions[0].hint.rank(task) == (5, False, *task[1:])
    assert not resolved.consumptions[0].is_strict


@pytest.mark.parametrize(
    ("words", "label", "bounds", "looks_ahead"),
    [
        ({}, "interleaved-1f1b with foresight", ("5.5", "4.5", "3.5", "2.5"), True),
        ({"window": 8}, "interleaved-1f1b with foresight", ("8",) * 4, True),
        ({"foresight": "off"}, "interleaved-1f1b as hint", ("5.5", "4.5", "3.5", "2.5"), False),
        ({"footprint": "off"}, "interleaved-1f1b with foresight", ("32",) * 4, True),
        ({"footprint": "off", "foresight": "off", "window": 2}, "interleaved-1f1b as hint", ("2",) * 4, False),
    ],
)
def test_footprint_and_foresight_are_on_unless_switched_off(words, label, bounds, looks_ahead):
    resolved = resolve(schedule="interleaved-1f1b", **words)
    assert (resolved.label, resolved.bounds) == (label, bounds)
    assert {arbiter.looks_ahead for arbiter in resolved.arbiters(StepRules())} == {looks_ahead}


def test_tasks_must_be_as_long_as_driver_and_rules_ask_for():
    def shortest(order, shortest_s):
        rules = [arbiter.setup.foresight for arbiter in order.arbiters(StepRules(), shortest_s=shortest_s)]
        return {None if each is None else each.shortest_s for each in rules}

    order = resolve(schedule="1f1b")
    assert (shortest(order, 0.0), shortest(order, 0.25)) == ({0.0}, {0.25})
    assert shortest(replace(order, foresight=ForesightRules(shortest_s=0.5)), 0.25) == {0.5}
    assert shortest(resolve(schedule="1f1b", foresight=False), 0.25) == {None}


def test_switching_off_what_is_off_anyway_is_no_contradiction():
    assert resolve(footprint="off", foresight="off").label == "bf"
    assert resolve(schedule="1f1b", consume="strict", footprint=False, foresight=False).label == "1f1b strict"


def test_strict_needs_no_window_and_shows_the_peak():
    resolved = resolve(schedule="1f1b", consume="strict")
    assert (resolved.label, resolved.windows) == ("1f1b strict", (4, 3, 2, 1))
    assert all(consumption.is_strict for consumption in resolved.consumptions)


def test_strict_ignores_the_hint():
    assert resolve(schedule="1f1b", consume="strict", hint="bf").label == "1f1b strict"
    assert not resolve(schedule="1f1b", consume="strict", hint="bfw").graph.split


def test_a_hint_beside_a_schedule_takes_only_its_placement():
    resolved = resolve(schedule="zb-v", hint="bf-deep")
    assert (resolved.label, resolved.placement.num_chunks) == ("bf-deep on zb-v", 8)
    assert len(resolved.graph.split) == 8
    assert not resolve(schedule="zb-v", hint="bf-deep", backward="fused").graph.split


@pytest.mark.parametrize("words", [{"hint": "bfw"}, {"backward": "split"}, {"schedule": "1f1b", "hint": "bfw"}])
def test_a_split_backward(words):
    resolved = resolve(**words)
    assert resolved.graph.split == frozenset(range(4))
    assert resolved.is_bf


def test_the_window_of_eager_1f1b_is_the_flag_s():
    resolved = resolve(schedule="eager-1f1b", consume="strict", window="6,5,4,3")
    assert resolved.table.peak_in_flight() == (6, 5, 4, 3)


def test_the_memory_of_the_automatic_schedule_is_the_window():
    small = resolve(schedule="zb-auto", consume="strict", window=4)
    large = resolve(schedule="zb-auto", consume="strict", window=8)
    assert max(small.table.peak_in_flight()) <= 4 < max(large.table.peak_in_flight()) <= 8


def test_durations_are_those_of_a_chunk_and_schedules_get_those_of_a_stage():
    sizes = {"num_stages": 8, "num_microbatches": 16, "comm_ms": 1.0}
    words = {"schedule": "interleaved-1f1b-split", "consume": "strict"}
    order = resolve({**sizes, "durations_ms": (5.0, 5.0, 5.0)}, **words)
    of_stage = ScheduleRequest(**sizes, durations_ms=(10.0, 10.0, 10.0))
    assert order.table == build_schedule("interleaved-1f1b-split", of_stage)
    assert order.table != build_schedule(
        "interleaved-1f1b-split", ScheduleRequest(**sizes, durations_ms=(5.0, 5.0, 5.0))
    )


def test_groups_are_the_flag_s():
    assert resolve(schedule="gis", consume="strict").table.peak_activations()[0] == 3
    assert resolve(schedule="gis", consume="strict", group_size=4).table.peak_activations()[0] == 4


def test_a_table_from_a_file(tmp_path):
    table = build_schedule("zb-h1", ScheduleRequest(**SIZES))
    write_csv(table, tmp_path / "mine.csv")
    resolved = resolve(schedule=str(tmp_path / "mine.csv"), consume="strict")
    assert resolved.table.orders == table.orders
    with pytest.raises(ValueError, match="4 stages and 8 microbatches, but 4 and 9 were asked for"):
        resolve({"num_microbatches": 9}, schedule=str(tmp_path / "mine.csv"))
    with pytest.raises(ValueError, match="leave chunks_per_stage out"):
        resolve({"chunks_per_stage": 2}, schedule=str(tmp_path / "mine.csv"))


def test_a_model_with_its_own_graph():
    graph = PipelineGraph(2, 8, (Edge(0, 1),), absent=())
    resolved = resolve({"num_stages": 2, "placement": linear(2), "graph": graph}, hint="bfw")
    assert resolved.graph == PipelineGraph(2, 8, (Edge(0, 1),), split=frozenset({0, 1}))
    with pytest.raises(ValueError, match=r"(?s)puts chunks on stages as .* the model as"):
        resolve({"placement": looped(4, 2)}, schedule="1f1b")
    skipping = PipelineGraph(4, 8, (Edge(0, 2), Edge(1, 2), Edge(2, 3)), absent=absences({(0, 3)}))
    assert resolve({"placement": linear(4), "graph": skipping}, schedule="1f1b", consume="strict").graph == skipping


def test_the_arbiters_run_the_step():
    arbiters = resolve(window="8,6,4,2").arbiters(StepRules(), certain_ahead=True)
    assert [a.setup.window for a in arbiters] == [8, 6, 4, 2]
    assert all(a.certain_ahead for a in arbiters)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"consume": "loose"}, "consume 'loose' is unknown: choose ready or strict"),
        ({"backward": "half"}, "backward 'half' is unknown: choose split or fused"),
        ({"hint": "best"}, "hint 'best' is unknown: choose one of bf,"),
        ({"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"consume": "strict"}, "needs a schedule to wait for"),
        ({"group_size": 4}, "group_size is for schedules with groups of microbatches: take gis, or leave it out"),
        ({"schedule": "mine.csv", "group_size": 4}, "take gis, or leave it out"),
        ({"schedule": "1f1b", "group_size": 4}, "schedule '1f1b' has no groups of microbatches: leave group_size out"),
        ({"schedule": "gis", "group_size": 0}, "group_size is 0"),
        ({"schedule": "gis", "group_size": 3}, "a group_size from 2 to 4 that divides 8 is 2 or 4"),
        ({"hint": "schedule"}, "needs a schedule to rank by"),
        ({"hint": "bfw", "backward": "fused"}, "needs a split backward"),
        ({"schedule": "1f1b", "backward": "split"}, "orders a fused backward, not a split one"),
        ({"schedule": "zb-h1", "consume": "strict", "backward": "fused"}, "orders a split backward, not a fused one"),
        (
            {"schedule": "1f1b", "consume": "strict", "window": 3},
            "4 microbatches on stage 0, but the window .* 3",
        ),
        ({"window": "8,8"}, "2 numbers for 4 stages"),
        ({"window": 0}, "window is 0"),
        ({"window": "8;8"}, "write 8, or 8,6,4,2"),
        ({"window": "8,0"}, "at least 1"),
        ({"footprint": "maybe", "schedule": "1f1b"}, "footprint is 'maybe': write on or off"),
        ({"footprint": "on"}, "footprint needs a schedule that ranks what is ready: give one, for example zb-h1"),
        ({"foresight": "on", "hint": "bfw", "schedule": "1f1b"}, "foresight needs a schedule .* no other hint"),
        ({"foresight": True, "schedule": "1f1b", "consume": "strict"}, "foresight needs a schedule .* consume ready"),
        ({"schedule": "1f1b", "window": 3}, "window 3 of stage 0 is less than the 4 microbatches .* give at least 4"),
        ({"schedule": "zb-v", "window": "4,4,3,4"}, "window 3 of stage 2 .* or switch footprint off"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(words, message):
    with pytest.raises(ValueError, match=message):
        resolve(**words)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="must both be at least 1"):
        resolve({"num_stages": 0})


def test_windows_are_numbers_or_lists():
    assert (parse_window("8"), parse_window("8,6"), OrderingOptions(window=[8, 6]).window) == (8, (8, 6), (8, 6))


def test_the_flags_default_to_nothing_said():
    parser = ArgumentParser()
    add_ordering_arguments(parser)
    assert OrderingOptions(**given_order(parser.parse_args([]))) == OrderingOptions()
    given = ["--schedule", "zb-h1", "--footprint", "off", "--foresight", "on"]
    assert OrderingOptions(**given_order(parser.parse_args(given))) == OrderingOptions(
        schedule="zb-h1", footprint=False, foresight=True
    )
    assert all(hint in parser.format_help() for hint in hint_names())


def test_offload_that_moves_nothing_says_so(caplog):
    caplog.set_level("INFO", logger="rrfp_jax")
    for slots in (3, 4, 8):
        resolve(schedule="1f1b", offload=slots)
    told = [f"offload {slots} moves nothing: no stage of 1f1b holds more than 4" for slots in (4, 8)]
    assert [record.getMessage() for record in caplog.records] == told


def test_offload_in_another_order_says_so(caplog):
    caplog.set_level("INFO", logger="rrfp_jax")
    resolve(schedule="zb-h1", offload=2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "offload 2: stages follow another order than zb-h1, chosen together with its copies"


def test_offload_bounds_what_stages_hold_on_their_devices():
    for consume in ("strict", "ready"):
        resolved = resolve(schedule="1f1b", consume=consume, offload=3)
        assert resolved.bounds == ("3", "3", "2", "1")
        assert {op.letter for op in resolved.graph.ops} == {"O", "L"}
        assert max(resolved.table.peak_activations()) <= 3
    assert resolve(schedule="1f1b", offload=8).bounds == ("4", "3", "2", "1")
    assert resolve({"num_replicas": 2}, schedule="1f1b", offload=3).bounds == ("3", "3", "2", "1") * 2
    within = resolve(schedule="zb-v", consume="strict", offload=8)  # 8 microbatches are begun, 4 activations held
    assert within.bounds == resolve(schedule="zb-v", consume="strict").bounds
    assert not within.graph.ops
    quick = resolve({"lengths_ms": (10.0, 10.0, 10.0)}, schedule="1f1b", offload=2, copy_ms=1.0)
    assert {op.ms for op in quick.graph.ops} == {1.0}


def test_a_file_may_have_copies(tmp_path):
    moved, path = resolve(schedule="zb-h1", consume="strict", offload=2), str(tmp_path / "moved.csv")
    write_csv(moved.table, path)
    for consume in ("strict", "ready"):
        read = resolve({"durations_ms": (4.0, 4.0, 4.0)}, schedule=path, consume=consume)
        assert (read.bounds, read.table.orders) == (("2",) * 4, moved.table.orders)
        assert {op.ms for op in read.graph.ops} == {6.0}
        assert resolve({"num_replicas": 2}, schedule=path, consume=consume).bounds == ("2",) * 8
    assert {op.ms for op in resolve(schedule=path, copy_ms=1.0).graph.ops} == {1.0}
    for words in ({"offload": 2}, {"recompute": 0}):
        with pytest.raises(ValueError, match="has copies to the host of its own: leave offload and recompute out"):
            resolve(schedule=path, **words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"offload": 2}, "give one, for example --schedule 1f1b$"),
        ({"offload": 2, "hint": "bf"}, "for example --schedule 1f1b --hint schedule$"),
        (
            {"offload": 2, "schedule": "1f1b", "hint": "bf"},
            "in place of 1f1b: give --hint schedule or --consume strict",
        ),
        ({"offload": 2, "schedule": "1f1b", "window": 4}, "leave window and footprint out"),
        ({"offload": 2, "schedule": "1f1b", "footprint": "off"}, "leave window and footprint out"),
        ({"copy_ms": 2.0, "schedule": "1f1b"}, "give offload too"),
        ({"offload": 0, "schedule": "1f1b"}, "offload has 0 slots"),
    ],
)
def test_an_offload_that_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        resolve(**words)


def test_recompute_stands_ahead_of_backwards_that_wait():
    for consume in ("strict", "ready"):
        resolved = resolve({"lengths_ms": (7.0, 10.0, 10.0)}, schedule="1f1b", consume=consume, recompute=0)
        assert [(op.letter, op.ms) for op in resolved.graph.ops] == [("C", 7.0)]
        assert max(resolved.table.peak_activations()) < 1.4
    assert resolve({"num_replicas": 2}, schedule="1f1b", recompute=1, window=3).bounds == ("3",) * 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"recompute": 0}, "give one, for example --schedule 1f1b"),
        ({"recompute": 0, "schedule": "1f1b", "hint": "bf"}, "give --hint schedule or --consume strict"),
        ({"recompute": -1, "schedule": "1f1b"}, "recompute is -1: give 0 or more"),
        ({"recompute": 0, "schedule": "1f1b", "offload": 2}, "leave one of them out"),
    ],
)
def test_a_recompute_that_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        resolve(**words)
