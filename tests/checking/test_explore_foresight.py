"""Every interleaving of small pipelines that tables guide: footprints, and every hold that foresight might choose."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import Agreement, GroupProtocol, StepRules, schedule_hint
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import (
    ScheduleRequest,
    Task,
    absences,
    build_schedule,
    chain,
    linear,
    looped,
    schedule_entry,
    schedule_names,
    v_shaped,
)
from tests.checking.guided import by_table, guided, random_rows
from tests.checking.test_reductions import check_same
from tests.model_checker import Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, nth_permutation, small_graphs

SPLIT_OR_NOT = pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
ORDERED_OR_NOT = pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
WORDS = [{}, {"footprint": False}, {"foresight": False}]
"""Both, foresight within a window, a footprint alone."""
GROUPS = [(2, 1), (1, 2), (2, 2)]


def tables(num_stages, num_microbatches, per_stage):
    """Every registered schedule of this size, but those of slices (:mod:`tests.checking.test_explore_slices`)."""
    request = ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
    for name in (name for name in schedule_names() if not schedule_entry(name).shape.is_sliced):
        try:
            yield build_schedule(name, request)
        except ValueError:
            continue


def drawn(graph, placement, number, **more):
    """A random valid table of this pipeline."""
    return guided(graph, placement, random_rows(graph, placement, Random(number)), **more)


SMALL = [(2, 2, 1), (2, 3, 1), (3, 2, 1), (2, 2, 2)]
LARGER = [(3, 3, 1), (2, 3, 2), (2, 4, 1), (4, 2, 1), (2, 4, 2), (3, 3, 2), (2, 2, 4)]
"""Stages, microbatches, chunks of each stage."""


@pytest.mark.parametrize("size", [*SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in LARGER)], ids=str)
def test_every_schedule_at_its_own_memory(size):
    """And, where that is small, with room for one more."""
    found = list(tables(*size))
    assert len(found) > 3
    for table in found:
        Explorer().explore(by_table(table))
        if size in SMALL:
            Explorer().explore(by_table(table, extra=1))


@SPLIT_OR_NOT
@pytest.mark.parametrize(
    "size", [(2, 1, 2), (3, 1, 2), (2, 1, 3), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_random_tables_of_graphs(size, split):
    num_stages, per_stage, num_microbatches = size
    for placement in {looped(num_stages, per_stage), *([v_shaped(num_stages)] if per_stage == 2 else [])}:
        for graph in small_graphs(placement.num_chunks, num_microbatches, split=split).values():
            for number, words in enumerate(WORDS):
                explore(drawn(graph, placement, number, **words))


@pytest.mark.slow
@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [(2, 2, 3), (3, 1, 3), (4, 1, 2), (3, 2, 2)], ids=str)
def test_random_tables_of_larger_graphs(size, split):
    num_stages, per_stage, num_microbatches = size
    placement = looped(num_stages, per_stage)
    for graph in small_graphs(placement.num_chunks, num_microbatches, split=split).values():
        for number in range(2):
            explore(drawn(graph, placement, number))


@pytest.mark.parametrize("size", [(2, 1, 2), (3, 1, 2), (2, 1, 3)], ids=str)
def test_weight_gradients_that_rank_last(size):
    """The hint's order is not the row's then, by which memory counts."""
    num_stages, per_stage, num_microbatches = size
    graph = chain(num_stages, num_microbatches, split=True)
    for number, words in enumerate(WORDS):
        explore(drawn(graph, looped(num_stages, per_stage), number, weights_last=True, **words))
    explore(drawn(graph, linear(num_stages), 3, weights_last=True, decides_early=size == (2, 1, 2)))


def test_foresight_alone_needs_no_valid_table():
    """A window takes care of itself whatever the order, and a hold only takes time."""
    for (num_stages, per_stage), number, window in product(
        [(2, 1), (3, 1), (2, 2)], range(7**19, 7**20, 7**19), (1, 2)
    ):
        placement = looped(num_stages, per_stage)
        graph = chain(placement.num_chunks, 2)
        rows = tuple(nth_permutation(graph.tasks(c), number * (1 + s)) for s, c in enumerate(placement.chunks_of_stage))
        explore(guided(graph, placement, rows, footprint=False, window=window))


def test_a_forward_that_keeps_nothing_runs_though_one_before_it_may_not():
    """Chunk 0 is frozen, so its forwards take no memory; 2F1 is ready and must wait for the end of 2B0."""
    graph = small_graphs(4, 3)["frozen first chunk"]
    rows = (
        "0F0 0F1 2F0 2B0 2F1 2B1 0F2 2F2 2B2",
        "1F0 1F1 3F0 3B0 1B0 3F1 3B1 1B1 1F2 3F2 3B2 1B2",
    )
    setting = guided(graph, looped(2, 2), tuple(tuple(map(Task.parse, row.split())) for row in rows), foresight=False)
    assert setting.footprints == (1, 3)
    explore(setting)
    explore(replace(setting, foresight=by_table(next(tables(2, 2, 1))).foresight))


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("updates", [False, True], ids=["no-updates", "updates"])
def test_whole_steps(agreement, updates):
    rules = StepRules(updates=updates, agreement=agreement)
    for num_stages, per_stage in [(1, 1), (1, 2), (2, 1), (2, 2)]:
        num_chunks = num_stages * per_stage
        graph = chain(num_chunks, 2, shared=((0, num_chunks - 1),) * (num_chunks > 1))
        explore(drawn(graph, looped(num_stages, per_stage), 3, rules=rules))


@ORDERED_OR_NOT
def test_two_steps_that_lack_pairs(ordered):
    rules = replace(PIPELINE_ONLY, ordered=ordered)
    for number, absent in product(range(2), [((), ()), ((), absences({(0, 0), (1, 0)}))]):
        graph = chain(2, 2)
        rows = random_rows(graph, linear(2), Random(number), ordered=ordered)
        explore(guided(graph, linear(2), rows, rules=rules, absences=absent))


def test_accumulation_in_order():
    for number, split in product(range(4), (False, True)):
        graph = chain(2, 3, split=split)
        rows = random_rows(graph, linear(2), Random(number), ordered=True)
        explore(guided(graph, linear(2), rows, rules=replace(PIPELINE_ONLY, ordered=True)))


@pytest.mark.parametrize("lockstep", [False, True], ids=["loose", "lockstep"])
def test_replicas(lockstep):
    rules = StepRules(agreement=Agreement.LOSS, lockstep=lockstep)
    for num_stages, per_stage in [(1, 2), (2, 1)]:
        graph = replicated_graph(chain(num_stages * per_stage, 1), 2)
        explore(drawn(graph, replicated_placement(looped(num_stages, per_stage), 2), 1, rules=rules))


# -- early decisions ---------------------------------------------------------------------------------------------------


@SPLIT_OR_NOT
def test_early_decisions(split):
    for number, words in product(range(3), WORDS):
        explore(drawn(chain(2, 2, split=split), linear(2), number, decides_early=True, **words))
    explore(drawn(chain(2, 3, split=split), linear(2), 5, decides_early=True))
    explore(drawn(chain(4, 2, split=split), looped(2, 2), 5, decides_early=True))


def test_early_decisions_over_whole_steps():
    explore(drawn(chain(2, 2), linear(2), 1, decides_early=True, rules=StepRules(), absences=((), ())))


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
def test_a_leader_holds_for_its_group(groups, collective):
    for number, words in product(range(2), WORDS):
        explore(drawn(chain(2, 2), linear(2), number, groups=groups, collective=collective, **words))
    explore(drawn(chain(2, 2, split=True), linear(2), 1, groups=groups, collective=collective))


@pytest.mark.parametrize("groups", GROUPS[:2], ids=str)
def test_a_leader_that_decides_early(groups):
    for number, collective in product(range(2), (True, False)):
        more = {"groups": groups, "collective": collective, "decides_early": True}
        explore(drawn(chain(2, 2), linear(2), number, **more))
        more = {"groups": groups, "collective": collective, "certain_ahead": True}
        explore(drawn(chain(2, 2), linear(2), number, **more))


def test_members_that_propose_have_a_footprint():
    for groups in GROUPS[:2]:
        more = {"groups": groups, "protocol": GroupProtocol.PROPOSE}
        explore(drawn(chain(2, 2), linear(2), 1, **more))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_larger_groups(groups, early):
    for number in range(2):
        explore(drawn(chain(2, 2 if early else 3), linear(2), number, groups=groups, decides_early=early))
        explore(drawn(chain(4, 1), looped(2, 2), number, groups=groups, decides_early=early))


# -- what is explored --------------------------------------------------------------------------------------------------


def accounts(setting):
    """What the judges knew of each place in each state."""
    search = Explorer().search(setting)
    frontier = [search.start]
    while frontier:
        frontier, _ = search.advance(frontier)
    return [automaton.account(n) for automaton in search.automata for n in range(automaton.num_states)]


def test_free_choice_holds_and_fills_where_the_table_alone_decides_nothing():
    setting = by_table(build_schedule("zb-h1", ScheduleRequest(num_stages=2, num_microbatches=2)))
    assert any(account.wake_s is not None for account in accounts(setting))
    assert not any(account.wake_s is not None for account in accounts(replace(setting, foresight=None)))
    assert explore(setting).num_states > explore(replace(setting, foresight=None)).num_states


@SPLIT_OR_NOT
def test_same_visible_states_without_the_reductions(split):
    for number in range(2):
        check_same(drawn(chain(2, 2, split=split), linear(2), number))
    check_same(drawn(chain(4, 1, split=split), looped(2, 2), 1))
    check_same(drawn(chain(2, 2), linear(2), 2, rules=StepRules(agreement=Agreement.LOSS), absences=((), ())))


def test_same_visible_states_of_early_decisions_and_groups():
    check_same(drawn(chain(2, 2), linear(2), 1, decides_early=True))
    check_same(drawn(chain(2, 2), linear(2), 1, certain_ahead=True))
    check_same(drawn(chain(2, 1), linear(2), 1, groups=(1, 2)))
    check_same(drawn(chain(2, 1), linear(2), 1, groups=(2, 1), decides_early=True))


def test_a_setting_refuses_rows_that_cannot_guide():
    graph = chain(2, 1)
    with pytest.raises(ValueError, match="the row of stage 0 lacks tasks"):
        guided(graph, linear(2), ((), ()))
    with pytest.raises(ValueError, match="1 footprints for 2 stages"):
        Setting(
            graph=graph,
            placement=linear(2),
            windows=(1, 1),
            policies=tuple(schedule_hint(tuple(graph.tasks([c]))) for c in (0, 1)),
            footprints=(1,),
        )
