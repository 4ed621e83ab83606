"""The ideal slot table against an independent longest path, and its measures."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import networkx as nx
import pytest

from rrfp_jax.schedules import (
    Op,
    Per,
    ScheduleRequest,
    ScheduleTable,
    Task,
    build_schedule,
    from_csv,
    schedule_names,
    with_operations,
)
from rrfp_jax.schedules.slots import BACKWARD_AS_FORWARD, EQUAL, SlotLengths, SlotTable, drawing, execute, per_stage

UNEVEN = SlotLengths(1.25, 1.5, 0.75)
"""Sums of these are exact in binary, so that equality may be exact too."""


def longest_paths(table: ScheduleTable, length: SlotLengths, hop: float) -> tuple[float, dict[Task | str, float]]:
    """Makespan and start of every task, from the graph of all orders and dependencies alone."""
    graph = nx.DiGraph()
    stage_of = {task: stage for stage, order in enumerate(table.orders) for task in order}
    for task, stage in stage_of.items():
        graph.add_edge("start", task, weight=0.0)
        graph.add_edge(task, "end", weight=length(task))
        for needed in table.graph.dependencies(task):
            delay = hop if stage_of[needed] != stage else 0.0
            graph.add_edge(needed, task, weight=length(needed) + delay)
    for order in table.orders:
        for before, after in pairwise(order):
            weight = max(length(before), graph.get_edge_data(before, after, {"weight": 0.0})["weight"])
            graph.add_edge(before, after, weight=weight)
    start: dict[Task | str, float] = {"start": 0.0}
    for node in list(nx.topological_sort(graph))[1:]:
        start[node] = max(start[p] + graph[p][node]["weight"] for p in graph.predecessors(node))
    assert start["end"] == nx.dag_longest_path_length(graph)
    return start["end"], start


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("hop", [0.0, 0.375])
def test_strict_execution_is_the_longest_path(name: str, hop: float) -> None:
    for stages, microbatches in ((2, 4), (4, 8), (6, 12)):
        table = build_schedule(name, ScheduleRequest(num_stages=stages, num_microbatches=microbatches))
        slots = execute(table, UNEVEN, hop=hop)
        makespan, starts = longest_paths(table, UNEVEN, hop)
        assert slots.timeline.makespan_s() == makespan
        assert all(start == starts[task] for task, (start, _) in slots.spans.items())


def gpipe() -> SlotTable:
    return execute(build_schedule("gpipe", ScheduleRequest(num_stages=2, num_microbatches=2)))


def test_measures_of_a_table_that_fits_on_one_hand() -> None:
    slots = gpipe()
    gap = " " * 12
    assert drawing(slots).splitlines() == [f"0F0 0F1 {gap}0B0 --- 0B1 ---", "    1F0 1F1 1B0 --- 1B1 ---"]
    assert (slots.makespan, slots.timeline.sums().cost_s) == (9.0, 9.0)
    assert slots.timeline.bubble_fraction() == pytest.approx(3 / 9)
    assert fmean(slots.timeline.stage_bubbles()) == pytest.approx(3 / 9)
    assert slots.timeline.peak_in_flight() == [2, 2]


def test_a_parallelogram_has_no_bubble_but_idle_time() -> None:
    slots = execute(build_schedule("zb-h2", ScheduleRequest(num_stages=4, num_microbatches=8)))
    assert slots.timeline.bubble_fraction() == 0.0
    assert fmean(slots.timeline.stage_bubbles()) == pytest.approx(3 / 27)


def test_aligned_cells_show_the_starts() -> None:
    assert execute(from_csv("0F0,0B0\n1F0,1B0")).aligned().rows[1] == (None, *map(Task.parse, ("1F0", "1B0")))
    with pytest.raises(ValueError, match="give a slot that divides all lengths"):
        execute(from_csv("0F0,0B0\n1F0,1B0"), SlotLengths(0.5, 1.0, 1.0)).aligned()


def test_lengths_of_a_whole_stage_are_cut_for_its_chunks() -> None:
    looped = build_schedule("breadth-first", ScheduleRequest(num_stages=2, num_microbatches=2, chunks_per_stage=4))
    assert per_stage(looped, EQUAL)(Task.parse("3F0")) == 0.25
    chimera = build_schedule("chimera", ScheduleRequest(num_stages=2, num_microbatches=2))
    assert per_stage(chimera, EQUAL)(Task.parse("3F1")) == 1.0
    assert per_stage(chimera, EQUAL, (1, 2, 1, 2))(Task.parse("3F1")) == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="3 chunk parts for 4 chunks"):
        per_stage(chimera, EQUAL, (1, 2, 3))


def test_a_deadlock_is_refused_before_anything_is_measured() -> None:
    good = gpipe().table
    broken = replace(good, rows=(tuple(reversed(good.rows[0])), good.rows[1]))
    with pytest.raises(ValueError, match="breaks a dependency: stage 0 runs 0B1 before 0F1"):
        execute(broken)


def with_copies(*more: Op, ms: float = 1.0) -> ScheduleTable:
    """1F1B on 2 stages, the first of which moves its activations away and back."""
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=2))
    out = Op("O", after=("F",), lane="d2h", frees=1.0, ms=ms, chunks=frozenset({0}))
    back = Op("L", after=("O",), before=("B",), lane="h2d", holds=1.0, ms=ms, chunks=frozenset({0}))
    return with_operations(table, (out, back, *more))


def test_engines_run_beside_compute_and_have_lines_of_their_own() -> None:
    slots = execute(with_copies(Op("G", before=("F",), per=Per.CHUNK, lane="net", ms=1.0, chunks=frozenset({0}))))
    assert drawing(slots) == (
        "stage 0      0F0 0F1         0B0 ---     0B1 ---\n"
        "  d2h            0O0 0O1\n"
        "  h2d                0L0 0L1\n"
        "  net    0G\n"
        "stage 1          1F0 1B0 --- 1F1 1B1 ---\n"
    )
    assert (slots.makespan, execute(with_copies(ms=4.0)).makespan) == (9, 15)


def test_an_operation_on_the_compute_lane_takes_its_own_time() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=1, num_microbatches=2))
    slots = execute(with_operations(table, [Op("S", after=("F",), ms=3.0)]), BACKWARD_AS_FORWARD)
    assert drawing(slots) == "0F0 0S0 --- --- 0B0 0F1 0S1 --- --- 0B1\n"
    assert [str(task or "") for task in slots.aligned().rows[0]] == [
        "0F0",
        "0S0",
        "",
        "",
        "0B0",
        "0F1",
        "0S1",
        "",
        "",
        "0B1",
    ]


def test_tasks_that_share_a_cell_cannot_be_aligned() -> None:
    with pytest.raises(ValueError, match="0F1 has no cell of its own, since slot 1 is taken: draw the table"):
        execute(with_copies()).aligned()
