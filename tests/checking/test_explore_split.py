"""Every interleaving of small pipelines whose backward is split into I and W."""

from dataclasses import replace
from itertools import product

import pytest

from rrfp_jax.schedules import looped
from tests.model_checker import Explorer
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs, small_settings

PERMUTATIONS = (31415926535897932384,)


def explore_everything(num_stages, per_stage, num_microbatches, name, ordered, *, numbers=PERMUTATIONS, windows=None):
    graph = small_graphs(num_stages * per_stage, num_microbatches, split=True)[name]
    rules = replace(PIPELINE_ONLY, ordered=ordered)
    for settings in small_settings(graph, looped(num_stages, per_stage), rules, numbers=numbers):
        explorer = Explorer()
        for setting in settings:
            if windows is None or setting.windows in windows:
                explorer.explore(setting)


def cases(sizes):
    return [
        (num_stages, per_stage, num_microbatches, name)
        for num_stages, per_stage, num_microbatches in sizes
        for name in small_graphs(num_stages * per_stage, 1)
    ]


LINES = {"chain", "frozen first chunk"}
"""The graphs without forks; of the others the fast tests explore smaller pipelines only."""
FORKED = [case for case in cases([(3, 2, 2), (3, 1, 3)]) if case[-1] not in LINES]
SMALL = [
    case for case in cases([*product((1, 2, 3), (1, 2), (1, 2)), *product((1, 2, 3), (1,), (3,))]) if case not in FORKED
]
LARGE = [*FORKED, *cases(product((1, 2), (2,), (3,)))]
LARGEST = [(3, 2, 3)]
HUGE = {"two encoders", "fork and join"}
"""Ten million states each, where accumulation is free and windows are wide: these windows only."""
SOME_WINDOWS = [(1, 1, 1), (2, 2, 2), (1, 2, 4), (4, 2, 1), (4, 4, 4)]


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("num_stages", "per_stage", "num_microbatches", "name"), SMALL)
def test_small_pipelines(num_stages, per_stage, num_microbatches, name, ordered):
    explore_everything(num_stages, per_stage, num_microbatches, name, ordered)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("num_stages", "per_stage", "num_microbatches", "name"), LARGE)
def test_larger_pipelines(num_stages, per_stage, num_microbatches, name, ordered):
    explore_everything(num_stages, per_stage, num_microbatches, name, ordered)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize(("num_stages", "per_stage", "num_microbatches", "name"), cases(LARGEST))
def test_the_largest_pipelines_with_the_named_hints(num_stages, per_stage, num_microbatches, name, ordered):
    windows = SOME_WINDOWS if name in HUGE and not ordered else None
    explore_everything(num_stages, per_stage, num_microbatches, name, ordered, numbers=(), windows=windows)


@pytest.mark.parametrize("split", [{0}, {1}, {2}, {0, 2}], ids=str)
def test_split_in_some_chunks_only(split):
    graph = replace(small_graphs(3, 2)["chain"], split=frozenset(split))
    for settings in small_settings(graph, looped(3, 1), PIPELINE_ONLY, numbers=PERMUTATIONS):
        explorer = Explorer()
        for setting in settings:
            explorer.explore(setting)
