"""Strict consumption runs exactly its table, whatever arrives when, and ignores the window."""

import pytest

from rrfp_jax.schedules import BUILT_IN_KINDS, Task, TaskKind, chain, linear, looped, v_shaped
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, fitting_tables, small_graphs


def sequential_rows(graph, placement):
    """A table for any graph: microbatch after microbatch, forwards in order of the chunks, then the rest backwards."""
    kinds = list(BUILT_IN_KINDS)

    def rank(task):
        return (
            task.microbatch,
            task.kind is not TaskKind.F,
            -task.chunk if task.kind is not TaskKind.F else task.chunk,
        )

    return tuple(
        tuple(sorted(graph.tasks(c), key=lambda t: (*rank(t), kinds.index(t.kind)))) for c in placement.chunks_of_stage
    )


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("size", [(1, 1, 3), (2, 1, 3), (3, 1, 3), (2, 2, 2), (2, 2, 3), (3, 2, 3)], ids=str)
def test_every_schedule_that_fits(size, split):
    num_stages, per_stage, num_microbatches = size
    for placement in {looped(num_stages, per_stage), v_shaped(num_stages)}:
        graph = chain(placement.num_chunks, num_microbatches, split=split)
        for table in fitting_tables(graph, placement):
            setting = Setting(
                graph=graph, placement=placement, windows=(1,) * num_stages, policies=table.orders, rules=PIPELINE_ONLY
            )
            assert Explorer().explore(setting).num_states > 2 * num_microbatches, table.name


def test_schedules_fit_at_all():
    assert len(list(fitting_tables(chain(3, 3), linear(3)))) >= 2


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_tables_of_graphs(split):
    for num_stages, per_stage in [(3, 1), (2, 2)]:
        placement = looped(num_stages, per_stage)
        for graph in small_graphs(placement.num_chunks, 3, split=split).values():
            rows = sequential_rows(graph, placement)
            explore(Setting(graph=graph, placement=placement, windows=(1,) * num_stages, policies=rows))


def test_two_strict_steps():
    graph = chain(2, 2)
    rows = sequential_rows(graph, linear(2))
    absences = ((), ())
    explore(Setting(graph=graph, placement=linear(2), windows=(1, 1), policies=rows, absences=absences))


def test_a_table_that_waits_in_a_circle_deadlocks_with_a_trace():
    first = tuple(map(Task.parse, ["0F0", "0B0", "0F1", "0B1"]))
    second = tuple(map(Task.parse, ["1F1", "1B1", "1F0", "1B0"]))
    setting = Setting(graph=chain(2, 2), placement=linear(2), windows=(2, 2), policies=(first, second))
    with pytest.raises(CheckError, match="deadlock: stages \\[0, 1\\]") as error:
        explore(setting)
    assert "0B0 waits for gradient of microbatch 0 from chunk 1 to chunk 0" in str(error.value)
