"""Every interleaving of small pipelines whose stages are told, at any moment, that a task is about to end."""

from dataclasses import replace
from itertools import product

import pytest

from rrfp_jax.core import Agreement, GroupProtocol, StepRules, schedule_hint
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.checking.choosing_early import (
    NUMBERS,
    SPLIT_OR_NOT,
    early,
    explore_strict_rows,
)
from tests.checking.test_reductions import check_same
from tests.model_checker import Explorer
from tests.model_checker.catalogue import PIPELINE_ONLY, nth_permutation, small_graphs, small_settings

ORDERED_OR_NOT = pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
GROUPS = [(2, 1), (1, 2)]


def explore_everything(graph, placement, rules):
    """Every hint and window; returns how many states there were."""
    num_states = 0
    for settings in small_settings(graph, placement, rules, numbers=NUMBERS):
        explorer = Explorer()
        for setting in settings:
            num_states += explorer.explore(replace(setting, decides_early=True)).num_states
    return num_states


SMALL = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (3, 1, 2), (2, 2, 1)]
LARGER = [(2, 1, 3), (3, 1, 3), (2, 2, 2), (2, 1, 4), (4, 1, 2)]
"""Stages, chunks of each, microbatches."""


@ORDERED_OR_NOT
@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [*SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in LARGER)], ids=str)
def test_pipelines(size, split, ordered):
    num_stages, per_stage, num_microbatches = size
    for graph in small_graphs(num_stages * per_stage, num_microbatches, split=split).values():
        explore_everything(graph, looped(num_stages, per_stage), replace(PIPELINE_ONLY, ordered=ordered))


@ORDERED_OR_NOT
def test_two_chunks_per_stage(ordered):
    rules = replace(PIPELINE_ONLY, ordered=ordered)
    explore_everything(chain(4, 2), looped(2, 2), rules)
    explore_everything(chain(2, 3), linear(2), rules)


def test_early_decisions_lead_to_more_states_than_late_ones():
    setting = early(chain(2, 2), linear(2))
    explorer = Explorer()
    states = [explorer.explore(replace(setting, decides_early=is_early)).num_states for is_early in (False, True)]
    assert states[0] < states[1]


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("updates", [False, True], ids=["no-updates", "updates"])
def test_whole_steps(agreement, updates):
    rules = StepRules(updates=updates, agreement=agreement)
    for (num_stages, per_stage), hint in product([(1, 1), (1, 2), (2, 1)], ("bf", "f-priority")):
        graph = chain(num_stages * per_stage, 2, shared=((0, num_stages * per_stage - 1),) * (num_stages > 1))
        Explorer().explore(early(graph, looped(num_stages, per_stage), hint=hint, rules=rules))


@pytest.mark.parametrize("agreement", Agreement)
def test_two_steps(agreement):
    rules = StepRules(agreement=agreement)
    Explorer().explore(early(chain(2, 1), linear(2), rules=rules, absences=((), ())))
    Explorer().explore(early(chain(1, 2), linear(1), rules=rules, absences=((), absences({(0, 0)}))))


@pytest.mark.parametrize("agreement", [Agreement.NONE, Agreement.ALL])
@pytest.mark.parametrize("lockstep", [False, True], ids=["loose", "lockstep"])
def test_replicas(agreement, lockstep):
    rules = StepRules(agreement=agreement, lockstep=lockstep)
    for num_stages, per_stage in [(1, 1), (1, 2), (2, 1)]:
        graph = replicated_graph(chain(num_stages * per_stage, 1), 2)
        Explorer().explore(early(graph, replicated_placement(looped(num_stages, per_stage), 2), rules=rules))


@SPLIT_OR_NOT
def test_strict_rows(split):
    explore_strict_rows(early, split=split)


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
def test_a_leader(groups, collective):
    """Each member is told of its own device alone, so members decide and start at different moments."""
    more = {"groups": groups, "collective": collective}
    for hint, window in product(("bf", "f-priority"), (1, 2)):
        Explorer().explore(early(chain(2, 2), linear(2), hint=hint, window=window, **more))
    Explorer().explore(early(chain(2, 1, split=True), linear(2), hint="bfw", **more))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
def test_proposals(groups, collective):
    more = {"groups": groups, "collective": collective, "protocol": GroupProtocol.PROPOSE}
    Explorer().explore(early(chain(2, 1), linear(2), **more))
    Explorer().explore(early(chain(2, 1, split=True), linear(2), hint="bfw", **more))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("protocol", [GroupProtocol.LEADER, GroupProtocol.PROPOSE])
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
def test_larger_groups(groups, protocol, collective):
    more = {"groups": groups, "collective": collective, "protocol": protocol}
    num_microbatches = 1 if groups == (2, 2) and protocol is GroupProtocol.PROPOSE else 2
    for hint, window in product(("bf", "fb"), (1, 2)):
        Explorer().explore(early(chain(2, num_microbatches), linear(2), hint=hint, window=window, **more))


# -- the reductions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", ["bf", "f-priority"])
@pytest.mark.parametrize("size", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_same_visible_states_where_silent_decisions_are_moves(size, hint):
    placement = looped(*size)
    for graph in small_graphs(placement.num_chunks, 1 if size == (2, 2) else 2).values():
        check_same(early(graph, placement, hint=hint, window=1))


def test_same_visible_states_of_a_whole_step_with_a_table_hint():
    graph, placement = chain(2, 2, split=True), linear(2)
    hints = tuple(schedule_hint(nth_permutation(graph.tasks(chunks), 3**25)) for chunks in placement.chunks_of_stage)
    check_same(early(graph, placement, policies=hints, rules=StepRules(agreement=Agreement.LOSS)))


@pytest.mark.parametrize("protocol", [GroupProtocol.LEADER, GroupProtocol.PROPOSE])
def test_same_visible_states_of_a_group(protocol):
    check_same(early(chain(1, 1), linear(1), groups=(2,), protocol=protocol))
    check_same(early(chain(2, 1), linear(2), groups=(1, 2), protocol=protocol, collective=False))
