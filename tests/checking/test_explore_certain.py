"""Every interleaving of small pipelines whose stages hand over certain choices while the task before runs."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, StepRules
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.checking.choosing_early import (
    NUMBERS,
    SPLIT_OR_NOT,
    certain,
    explore_random_rows,
    explore_strict_rows,
)
from tests.checking.guided import guided, random_rows
from tests.checking.test_reductions import check_same
from tests.model_checker import Explorer
from tests.model_checker.catalogue import PIPELINE_ONLY, fitting_tables, small_graphs, small_settings

GROUPS = [(2, 1), (1, 2)]


SMALL = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (3, 1, 2), (2, 2, 1)]
LARGER = [(2, 1, 3), (3, 1, 3), (2, 2, 2), (2, 1, 4), (4, 1, 2)]
"""Stages, chunks of each, microbatches."""


@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [*SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in LARGER)], ids=str)
def test_pipelines(size, split):
    """Every hint and window."""
    num_stages, per_stage, num_microbatches = size
    for graph, ordered in product(
        small_graphs(num_stages * per_stage, num_microbatches, split=split).values(), (False, True)
    ):
        rules = replace(PIPELINE_ONLY, ordered=ordered)
        for settings in small_settings(graph, looped(num_stages, per_stage), rules, numbers=NUMBERS):
            explorer = Explorer()
            for setting in settings:
                explorer.explore(replace(setting, certain_ahead=True))


def test_two_tasks_are_handed_over_at_once_where_a_row_is_strict():
    """It can fail: the judge counts what runs beside what."""
    graph = chain(2, 3)
    (table, *_) = fitting_tables(graph, linear(2))
    setting = certain(graph, linear(2), policies=table.orders)
    with pytest.raises(Exception, match="beside 1 other tasks"):
        Explorer().explore(_Unannounced.of(setting))


class _Unannounced:
    """A setting whose arbiters hand over certain choices, which its judge does not know of."""

    @staticmethod
    def of(setting):
        plain = replace(setting, certain_ahead=False)
        object.__setattr__(plain, "make_arbiter", setting.make_arbiter)
        return plain


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("updates", [False, True], ids=["no-updates", "updates"])
def test_whole_steps(agreement, updates):
    rules = StepRules(updates=updates, agreement=agreement)
    for (num_stages, per_stage), hint in product([(1, 1), (1, 2), (2, 1)], ("bf", "f-priority")):
        graph = chain(num_stages * per_stage, 2, shared=((0, num_stages * per_stage - 1),) * (num_stages > 1))
        Explorer().explore(certain(graph, looped(num_stages, per_stage), hint=hint, rules=rules))


@pytest.mark.parametrize("agreement", Agreement)
def test_two_steps(agreement):
    rules = StepRules(agreement=agreement)
    Explorer().explore(certain(chain(2, 1), linear(2), rules=rules, absences=((), ())))
    Explorer().explore(certain(chain(1, 2), linear(1), rules=rules, absences=((), absences({(0, 0)}))))
    Explorer().explore(certain(chain(2, 1), linear(2), rules=rules, absences=((), ()), evaluates=frozenset({1})))


@pytest.mark.parametrize("lockstep", [False, True], ids=["loose", "lockstep"])
def test_replicas(lockstep):
    rules = StepRules(agreement=Agreement.ALL, lockstep=lockstep)
    for num_stages, per_stage in [(1, 1), (1, 2), (2, 1)]:
        graph = replicated_graph(chain(num_stages * per_stage, 1), 2)
        Explorer().explore(certain(graph, replicated_placement(looped(num_stages, per_stage), 2), rules=rules))


@SPLIT_OR_NOT
def test_strict_rows(split):
    explore_strict_rows(certain, split=split)


@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [(2, 1, 2), (3, 1, 2), (2, 1, 3)], ids=str)
def test_tables_with_foresight_and_footprint(size, split):
    """Announcements come as the device begins a task, not as it is handed over."""
    explore_random_rows(size, split=split)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
@pytest.mark.parametrize("protocol", [GroupProtocol.LEADER, GroupProtocol.PROPOSE])
def test_groups(groups, collective, protocol):
    more = {"groups": groups, "collective": collective, "protocol": protocol}
    size = 2 if protocol is GroupProtocol.LEADER else 1
    for hint, window in product(("bf", "f-priority"), (1, 2)):
        Explorer().explore(certain(chain(2, size), linear(2), hint=hint, window=window, **more))
    Explorer().explore(certain(chain(2, 1, split=True), linear(2), hint="bfw", **more))


@pytest.mark.slow
@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
def test_larger_groups(collective):
    for hint, window in product(("bf", "fb"), (1, 2)):
        Explorer().explore(
            certain(chain(2, 2), linear(2), hint=hint, window=window, groups=(2, 2), collective=collective)
        )
    rows = random_rows(chain(2, 2), linear(2), Random(1))
    Explorer().explore(guided(chain(2, 2), linear(2), rows, certain_ahead=True, groups=(2, 2), collective=collective))


@pytest.mark.parametrize("hint", HINTS)
def test_same_visible_states(hint):
    for graph in small_graphs(2, 2, split=hint == "bfw").values():
        check_same(certain(graph, linear(2), hint=hint, window=1))
