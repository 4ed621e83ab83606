"""Settings whose stages choose a task while another one runs, and what all ways of doing so are explored on."""

from dataclasses import replace
from random import Random

import pytest

from rrfp_jax.core import HINTS
from rrfp_jax.schedules import chain, linear, looped
from tests.checking.guided import guided, random_rows
from tests.model_checker import Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, fitting_tables, small_graphs

NUMBERS = (10**15 + 37,)
"""Of the permutations that serve as tables."""
SPLIT_OR_NOT = pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])


def early(graph, placement, *, hint="bf", window=2, rules=PIPELINE_ONLY, **more):
    """Every stage is told, at any moment, that a task is about to end."""
    num_stages = placement.num_stages
    policies = more.pop("policies", (HINTS[hint],) * num_stages)
    return Setting(
        graph=graph,
        placement=placement,
        windows=(window,) * num_stages,
        policies=policies,
        rules=rules,
        decides_early=True,
        **more,
    )


def certain(graph, placement, **more):
    """Every stage hands over what is certain while the task before runs."""
    return replace(early(graph, placement, **more), decides_early=False, certain_ahead=True)


def both(graph, placement, **more):
    return replace(early(graph, placement, **more), certain_ahead=True)


def explore_strict_rows(make, *, split):
    """All tables of a few sizes, each stage in its row's order; ``make`` is one of the above."""
    for num_stages, num_microbatches in [(2, 3), (3, 2)]:
        graph = chain(num_stages, num_microbatches, split=split)
        for table in fitting_tables(graph, linear(num_stages)):
            Explorer().explore(make(graph, linear(num_stages), policies=table.orders))


def explore_random_rows(size, *, split, **more):
    """Random tables with foresight and footprint, and with either alone."""
    num_stages, per_stage, num_microbatches = size
    placement = looped(num_stages, per_stage)
    for graph in small_graphs(placement.num_chunks, num_microbatches, split=split).values():
        for number, words in enumerate([{}, {"footprint": False}, {"foresight": False}]):
            rows = random_rows(graph, placement, Random(number))
            explore(guided(graph, placement, rows, certain_ahead=True, **more, **words))
