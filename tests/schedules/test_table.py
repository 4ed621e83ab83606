"""Tables: what is refused, in which words, and what a table knows of itself."""

from dataclasses import replace

import pytest

from rrfp_jax.schedules import (
    Edge,
    Op,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    Task,
    absences,
    build_schedule,
    chain,
    linear,
    opposite_chains,
)
from rrfp_jax.schedules.table import all_needed


def table(*rows: str, graph: PipelineGraph | None = None, placement: Placement | None = None) -> ScheduleTable:
    """A table of two microbatches from rows of space-separated tasks; ``.`` is an empty slot."""
    cells = tuple(tuple(None if cell == "." else Task.parse(cell) for cell in row.split()) for row in rows)
    placement = placement or linear(len(rows))
    return ScheduleTable("mine", placement, graph or chain(placement.num_chunks, 2), cells)


def refusal(broken: ScheduleTable) -> str:
    with pytest.raises(ValueError, match="mine") as caught:
        broken.validate()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_good_table_returns_itself_and_ignores_empty_slots() -> None:
    good = table("0F0 0F1 . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1")
    assert good.validate() is good
    assert good.orders[1] == tuple(map(Task.parse, ["1F0", "1B0", "1F1", "1B1"]))
    assert good.peak_in_flight() == (2, 1)
    assert good.peak_activations() == (2.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), ["misses 0B1", "rows of stages [0]"]),
        (("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), ["0B1 more than once"]),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 2F0"), ["stage 1", "2F0 names chunk 2", "use 0..1"]),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1F7"), ["1F7 names microbatch 7", "use 0..1"]),
        (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), ["stage 0: 1F0 belongs to stage 1"]),
        (("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1B1"), ["0I0 does not exist", "runs as B: write B"]),
        (("0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1"), ["0U runs once per step"]),
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), ["stage 1 runs 1B0 before 1F0"]),
    ],
)
def test_every_defect_is_named_with_its_remedy(rows: tuple[str, ...], words: list[str]) -> None:
    message = refusal(table(*rows))
    assert all(word in message for word in words), message


def test_a_deadlock_is_told_as_the_chain_of_tasks_that_wait_for_each_other() -> None:
    message = refusal(table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert "deadlocks: 0B0 on stage 0 waits for 1B0, which stage 1 runs only after 1F1" in message
    assert "1F1 on stage 1 waits for 0F1, which stage 0 runs only after 0B0" in message


def test_a_stage_that_only_waits_for_a_cycle_is_not_part_of_it() -> None:
    message = refusal(table("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert "on stage 0" not in message
    assert "1B0 on stage 1 waits for 2B0, which stage 2 runs only after 2F1" in message


def test_a_task_that_skips_a_chunk_does_not_exist() -> None:
    graph = chain(1, 2).skipping(absences([(0, 1)]))
    assert "microbatch 1 skips chunk 0" in refusal(table("0F0 0B0 0F1 0B1", graph=graph))


def test_rows_and_chunks_must_fit_the_placement() -> None:
    with pytest.raises(ValueError, match="has 1 rows, its placement 2 stages"):
        table("0F0 0B0", placement=linear(2))
    with pytest.raises(ValueError, match="graph has 3 chunks, the placement 1"):
        table("0F0 0B0", graph=chain(3, 1), placement=linear(1))


def test_the_window_is_checked_per_stage() -> None:
    one_f_one_b = build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=8))
    one_f_one_b.check_window(4)
    one_f_one_b.check_window((4, 3, 2, 1))
    with pytest.raises(ValueError, match="holds 4 microbatches on stage 0, but the window there is 3: raise"):
        one_f_one_b.check_window(3)
    with pytest.raises(ValueError, match="holds 3 microbatches on stage 1"):
        one_f_one_b.check_window((4, 2, 2, 2))
    with pytest.raises(ValueError, match="2 windows do not fit the 4 stages"):
        one_f_one_b.check_window((4, 4))


TWO_ENCODERS = PipelineGraph(4, 5, (Edge(0, 2), Edge(1, 2, is_optional=True), Edge(2, 3)))
GRAPHS = {
    "a chain": chain(3, 4),
    "a split chain": chain(3, 4, split=True),
    "opposite chains": opposite_chains(2, [0, 2], 4, split=True),
    "absent pairs": TWO_ENCODERS.skipping(absences([(1, 0), (1, 3)])),
    "a frozen encoder": replace(TWO_ENCODERS, frozen=frozenset({0}), split=frozenset({1, 2})),
    "frozen chunks that pass gradients on": replace(chain(4, 3, split=True), frozen=frozenset({1, 2})),
    "replicas": PipelineGraph(2, 4, (), absent=((0, 0b1000), (1, 0b0111)), num_replicas=2),
    "an operation": replace(chain(2, 3), ops=(Op("O", after="F", before="B"),)),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_a_table_waits_for_what_its_graph_says(graph: PipelineGraph) -> None:
    assert dict(all_needed(graph)) == {task: graph.dependencies(task) for task in graph.tasks()}
    assert list(all_needed(graph)) == list(graph.tasks())
    for chunks in ([0], [1, 0], None):
        assert graph.num_tasks(chunks) == len(list(graph.tasks(chunks)))
