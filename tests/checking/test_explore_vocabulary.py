"""Shards of the vocabulary explored: any hint at windows from 1, the table strictly and with foresight, tied or not."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, StepRules
from rrfp_jax.schedules import ScheduleRequest, build_schedule, vocabulary_sharded
from rrfp_jax.schedules.published import heads_first
from tests.checking.guided import guided
from tests.model_checker import Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY
from tests.model_checker.random_walk import random_walk


def sharded(p, m, **options):
    """The graph without weights: the checker counts activations."""
    graph, placement = vocabulary_sharded(p, m, **options)
    return replace(graph, weights=()), placement


def by_hint(hint, windows, graph, placement, **more):
    more = {"rules": PIPELINE_ONLY} | more
    return Setting(graph=graph, placement=placement, windows=windows, policies=(HINTS[hint],) * len(windows), **more)


def by_table(graph, placement, **more):
    request = ScheduleRequest(
        num_stages=placement.num_stages, num_microbatches=graph.num_microbatches, graph=graph, placement=placement
    )
    return guided(graph, placement, build_schedule(heads_first, request).orders, **more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("hint", ["bf", "f-priority", "bf-deep"])
def test_no_interleaving_is_stuck_at_windows_from_1(hint, barriers):
    for windows, is_tied in product([(1, 1), (1, 2), (2, 1)], [False, True]):
        graph, placement = sharded(2, 2, barriers=barriers, is_tied=is_tied)
        assert explore(by_hint(hint, windows, graph, placement)).num_states > 20


def explore_table(m, barriers, **options):
    made = by_table(*sharded(2, m, barriers=barriers, **options))
    strict = replace(made, policies=tuple(hint.row for hint in made.policies), footprints=(), foresight=None)
    assert explore(made).num_states > 10
    assert explore(strict).num_states > 10


@pytest.mark.parametrize("barriers", [1, 2])
def test_tables_are_never_stuck(barriers):
    for m, is_tied in product((1, 2), [False, True]):
        explore_table(m, barriers, is_tied=is_tied)


@pytest.mark.slow
@pytest.mark.parametrize("barriers", [1, 2])
def test_tables_of_three_microbatches_are_never_stuck(barriers):
    explore_table(3, barriers)


def test_rows_are_tied_and_updated():
    rules = StepRules(agreement=Agreement.LOSS)
    assert explore(by_hint("bf", (1, 1), *sharded(2, 1, is_tied=True), rules=rules)).num_states > 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fan_out", [None, 1])
@pytest.mark.parametrize("barriers", [1, 2])
def test_three_stages(barriers, fan_out):
    graph, placement = sharded(3, 3, barriers=barriers, fan_out=fan_out)
    explore(by_hint("bf", (1, 1, 1), graph, placement))
    explore(by_hint("f-priority", (1, 2, 1), graph, placement))
    explore(by_hint("b-priority", (2, 1, 1), graph, placement))


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["bf", "bf-deep"])
@pytest.mark.parametrize("barriers", [1, 2])
def test_three_stages_with_room_for_two(barriers, hint):
    graph, placement = sharded(3, 3, barriers=barriers)
    explore(by_hint(hint, (2, 2, 2), graph, placement))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(24))
def test_larger_pipelines_at_random(seed):
    random = Random(seed)
    p, m = random.choice([2, 3, 4, 5]), random.choice([1, 2, 3, 6])
    graph, placement = sharded(
        p, m, barriers=random.choice([1, 2]), fan_out=random.choice([None, 1, 2]), is_tied=random.random() < 0.5
    )
    rules = StepRules(agreement=random.choice(list(Agreement)))
    if seed % 3 == 0:
        made = by_table(graph, placement, rules=rules)
    else:
        windows = tuple(random.choice([1, 1, 2, 3]) for _ in range(p))
        made = by_hint(random.choice(list(HINTS)), windows, graph, placement, rules=rules)
    assert random_walk(replace(made, absences=((), ())), random.randrange).num_tasks
