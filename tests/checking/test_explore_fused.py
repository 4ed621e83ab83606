"""Every interleaving of every small pipeline with a fused backward: all windows, all hints, ordered or not."""

from dataclasses import replace
from itertools import product

import pytest

from rrfp_jax.core import HINTS
from rrfp_jax.schedules import PipelineGraph, Placement, chain, linear, looped, v_shaped
from tests.model_checker import Explorer, Report, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs, small_settings

PERMUTATIONS = (12345678901234567, 98765432109876543210)
SIZES = list(product((1, 2, 3), (1, 2)))


def is_large(num_chunks: int, num_microbatches: int, name: str) -> bool:
    """Whether a pipeline is explored by the slow tests; smaller ones of its graph are explored by the fast ones."""
    return num_chunks * num_microbatches > (12 if name == "chain" else 9)


def explore_everything(graph: PipelineGraph, placement: Placement, *, numbers=PERMUTATIONS, **rules) -> Report:
    num_states = num_transitions = 0
    for settings in small_settings(graph, placement, replace(PIPELINE_ONLY, **rules), numbers=numbers):
        explorer = Explorer()
        for setting in settings:
            report = explorer.explore(setting)
            num_states += report.num_states
            num_transitions += report.num_transitions
    return Report(num_states, num_transitions)


def cases(*, is_slow: bool):
    found = []
    for num_stages, per_stage in SIZES:
        num_chunks = num_stages * per_stage
        for name, num_microbatches in product(small_graphs(num_chunks, 1), (1, 2, 3)):
            if is_large(num_chunks, num_microbatches, name) == is_slow:
                label = f"{num_stages}x{per_stage}-{num_microbatches}-{name.replace(' ', '-').replace(',', '')}"
                found.append(pytest.param(num_stages, per_stage, num_microbatches, name, id=label))
    return found


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("num_stages", "per_stage", "num_microbatches", "name"), cases(is_slow=False))
def test_small_pipelines(num_stages, per_stage, num_microbatches, name, ordered):
    graph = small_graphs(num_stages * per_stage, num_microbatches)[name]
    explore_everything(graph, looped(num_stages, per_stage), ordered=ordered)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("num_stages", "per_stage", "num_microbatches", "name"), cases(is_slow=True))
def test_larger_pipelines(num_stages, per_stage, num_microbatches, name, ordered):
    graph = small_graphs(num_stages * per_stage, num_microbatches)[name]
    explore_everything(graph, looped(num_stages, per_stage), ordered=ordered)


@pytest.mark.parametrize("placement", [v_shaped(2), Placement((0, 0, 1)), Placement((0, 1, 0)), Placement((1, 0, 0))])
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_other_placements(placement, ordered):
    for graph in small_graphs(placement.num_chunks, 2).values():
        explore_everything(graph, placement, ordered=ordered)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "two encoders"])
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_four_microbatches(name, ordered):
    explore_everything(small_graphs(3, 4)[name], linear(3), numbers=PERMUTATIONS[:1], ordered=ordered)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_many_permutations(ordered):
    for graph in small_graphs(4, 3).values():
        explore_everything(graph, looped(2, 2), numbers=range(10**9, 10**9 * 20, 10**9 + 7), ordered=ordered)


@pytest.mark.parametrize("hint", HINTS.values(), ids=list(HINTS))
def test_windows_of_at_least_the_number_of_microbatches_are_one_class(hint):
    """This is what lets the product above leave out the larger windows."""
    for windows in [(2, 2), (2, 3), (4, 2), (4, 4)]:
        setting = Setting(
            graph=chain(4, 2), placement=looped(2, 2), windows=windows, policies=(hint, hint), rules=PIPELINE_ONLY
        )
        assert explore(setting) == explore(replace(setting, windows=(2, 2)))
