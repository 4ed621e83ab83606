"""Names, requests, and sizes that a schedule refuses."""

import ast
import inspect
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rrfp_jax.schedules import ScheduleRequest, build_schedule, chain, schedule_entry, schedule_names

ALL = {
    *("seq1f1b", "slimpipe", "vocabulary"),
    *("1f1b", "1f1b-split", "asymmetric-chimera", "bitpipe", "breadth-first", "chimera", "dualpipe-v", "eager-1f1b"),
    *(
        "gis",
        "gpipe",
        "greedy-chimera",
        "hanayo",
        "interleaved-1f1b",
        "interleaved-1f1b-split",
        "stp",
        "v-half",
        "v-min",
        "zb-auto",
        "zb-h1",
        "zb-h2",
        "zb-v",
    ),
}


def test_every_schedule_is_registered_with_its_source() -> None:
    assert set(schedule_names()) == ALL
    assert all(schedule_entry(name).source for name in ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_only_tables_made_from_times_differ_with_them(name: str) -> None:
    sizes, differ = ((4, 8), (3, 9), (6, 12)), False
    for stages, microbatches in sizes:
        plain = ScheduleRequest(num_stages=stages, num_microbatches=microbatches)
        try:
            table = build_schedule(name, plain)
        except ValueError:  # these sizes do not suit it
            continue
        for times_ms, comm_ms in (((3.0, 2.0, 1.0), 0.5), ((1.0, 4.0, 0.3), 2.0)):
            request = replace(plain, durations_ms=times_ms, comm_ms=comm_ms)
            differ |= build_schedule(name, request).orders != table.orders
    assert differ == schedule_entry(name).from_times


def test_a_description_has_at_most_15_lines() -> None:
    for name in ALL:
        description = schedule_entry(name).describe
        function = description.func if isinstance(description, partial) else description
        (definition,) = ast.parse(inspect.getsource(function)).body
        statements = definition.body[1:]  # behind the docstring
        assert statements[-1].end_lineno - statements[0].lineno < 15, name


def test_an_entry_tells_the_truth_about_its_tables() -> None:
    for name in schedule_names():
        table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
        entry = schedule_entry(name)
        assert table.name == name
        assert bool(table.graph.split) == bool(entry.split_backward)
        assert bool(table.graph.passes) == entry.shape.is_sliced
        times = 4 if entry.shape.is_sliced else 1
        ends = 9 if entry.shape.is_sharded else 0
        assert table.placement.num_chunks == 4 * entry.shape.chunks_per_stage * times + ends


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("1f1bb", {}, "did you mean '1f1b'"),
        ("interleaved-1f1b", {"num_stages": 8, "num_microbatches": 20}, "use 16 or 24 instead of 20"),
        ("interleaved-1f1b", {"num_stages": 8, "num_microbatches": 3}, "use 8 instead of 3"),
        ("interleaved-1f1b", {"chunks_per_stage": 1}, "take that, or give chunks_per_stage=2"),
        ("1f1b", {"chunks_per_stage": 2}, "has 1 chunks per stage, not 2: give chunks_per_stage=1"),
        ("zb-v", {"chunks_per_stage": 1}, "give chunks_per_stage=2"),
        ("hanayo", {"chunks_per_stage": 3}, "give chunks_per_stage=4"),
        ("chimera", {"num_stages": 3}, "num_stages (3) must be even: give num_stages=4 or 2"),
        ("asymmetric-chimera", {"num_microbatches": 7}, "num_microbatches (7) must be even"),
        ("bitpipe", {"num_stages": 3}, "num_stages (3) must be even: give num_stages=4 or 2"),
        ("bitpipe", {"num_microbatches": 7}, "use 4 or 8 instead of 7"),
        ("bitpipe", {"num_microbatches": 6}, "divisible by num_stages (4): use 4 or 8 instead of 6"),
        ("bitpipe", {"num_microbatches": 2}, "use 4 instead of 2"),
        ("bitpipe", {"chunks_per_stage": 2}, "give chunks_per_stage=4"),
        ("dualpipe-v", {"num_microbatches": 6}, "at least 2 * num_stages = 8 microbatches"),
        ("interleaved-1f1b-split", {"num_stages": 8, "num_microbatches": 20}, "use 16 or 24 instead of 20"),
        ("gis", {"chunks_per_stage": 1}, "take 1f1b-split, or chunks_per_stage=2"),
        ("gis", {"num_stages": 8, "num_microbatches": 11}, "groups of 4 to 8 microbatches on 8 stages"),
        ("gis", {"num_stages": 8, "num_microbatches": 11}, "use 12 instead of 11"),
        ("gis", {"num_stages": 8, "num_microbatches": 3}, "use 4 instead of 3"),
        ("gis", {"num_stages": 8, "num_microbatches": 24, "group_size": 3}, "a group_size from 4 to 8 that divides 24"),
        ("gis", {"num_stages": 8, "num_microbatches": 24, "group_size": 5}, "that divides 24 is 4 or 6 or 8"),
        ("1f1b", {"group_size": 2}, "schedule '1f1b' has no groups of microbatches: leave group_size out, or take gis"),
        ("zb-auto", {"memory_limit": 0.5}, "give at least 1"),
        ("zb-v", {"slices": 2}, "'zb-v' runs sequences whole: leave slices out, or take 1f1b, 1f1b-split, gpipe"),
        ("slimpipe", {"num_stages": 8, "slices": 4}, "4 are too few: give slices=8 or more, or chunks_per_stage=1"),
        ("vocabulary", {"slices": 2}, "'vocabulary' runs sequences whole: leave slices out, or take 1f1b, 1f1b-split"),
        ("vocabulary", {"chunks_per_stage": 2}, "has 1 chunks per stage, not 2: give chunks_per_stage=1"),
        ("vocabulary:0", {}, "a stage sends the stream to 0 others: give at least 1, or None"),
        ("seq1f1b", {"slices": 257}, "a sequence has 257 slices: give 1 to 256"),
        ("1f1b", {"slices": 2, "graph": chain(4, 8)}, "leave them out, or graph and placement"),
        ("eager-1f1b", {"window": (2, 3, 1, 1)}, "window 3 of stage 1 is larger than window 2 of stage 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_remedy(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        build_schedule(name, ScheduleRequest(**{"num_stages": 4, "num_microbatches": 8} | sizes))


def test_one_number_limits_eager_1f1b_and_falls_by_one_per_stage() -> None:
    def peaks(window: int | tuple[int, ...] | None) -> tuple[int, ...]:
        request = ScheduleRequest(num_stages=4, num_microbatches=16, window=window)
        return build_schedule("eager-1f1b", request).peak_in_flight()

    assert peaks(None) == (7, 5, 3, 1)
    assert peaks(4) == (4, 3, 2, 1)
    assert peaks(6) == (6, 5, 3, 1)
    assert peaks(2) == (2, 1, 1, 1)
    assert peaks((8, 8, 8, 2)) == (8, 8, 8, 2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_microbatches": -1}, "num_microbatches is -1"),
        ({"chunks_per_stage": 0}, "chunks_per_stage is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"slices": 0}, "slices is 0: give at least 1"),
        ({"window": 0}, "window 0 holds no microbatch"),
        ({"window": (1, 2)}, "2 windows for 4 stages"),
        ({"durations_ms": (1.0, -1.0, 1.0)}, "must not be negative"),
        ({"input_gradient_frees": 2.0}, "between 0 and 1"),
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ScheduleRequest(**{"num_stages": 4, "num_microbatches": 8} | wrong)
