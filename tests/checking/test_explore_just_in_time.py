"""Every interleaving of small pipelines whose stages hand over certain choices early, and are told at any moment that a
task is about to end, for what is not certain."""

from dataclasses import replace
from itertools import product

import pytest

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, StageArbiter, StepRules
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.checking.choosing_early import (
    NUMBERS,
    SPLIT_OR_NOT,
    both,
    explore_random_rows,
    explore_strict_rows,
)
from tests.checking.test_reductions import check_same
from tests.model_checker import CheckError, Explorer, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs, small_settings

SMALL = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (3, 1, 2)]
LARGER = [(2, 2, 1), (2, 1, 3), (2, 2, 2), (4, 1, 2)]
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
                explorer.explore(replace(setting, certain_ahead=True, decides_early=True))


@pytest.mark.parametrize("agreement", Agreement)
def test_whole_steps_and_two_of_them(agreement):
    rules = StepRules(agreement=agreement)
    for (num_stages, per_stage), hint in product([(1, 2), (2, 1)], ("bf", "f-priority")):
        graph = chain(num_stages * per_stage, 2, shared=((0, num_stages * per_stage - 1),) * (num_stages > 1))
        Explorer().explore(both(graph, looped(num_stages, per_stage), hint=hint, rules=rules))
    Explorer().explore(both(chain(2, 1), linear(2), rules=rules, absences=((), ())))
    Explorer().explore(both(chain(1, 2), linear(1), rules=rules, absences=((), absences({(0, 0)}))))
    Explorer().explore(both(chain(2, 1), linear(2), rules=rules, absences=((), ()), evaluates=frozenset({1})))


def test_replicas_in_lockstep():
    rules = StepRules(agreement=Agreement.ALL, lockstep=True)
    for num_stages, per_stage in [(1, 1), (2, 1)]:
        graph = replicated_graph(chain(num_stages * per_stage, 1), 2)
        Explorer().explore(both(graph, replicated_placement(looped(num_stages, per_stage), 2), rules=rules))


@SPLIT_OR_NOT
def test_strict_rows(split):
    explore_strict_rows(both, split=split)


@SPLIT_OR_NOT
@pytest.mark.parametrize("size", [(2, 1, 2), pytest.param((3, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_tables_with_foresight_and_footprint(size, split):
    """A stage holds only behind a task that is about to end, and announces as the device begins a task."""
    explore_random_rows(size, split=split, decides_early=True)


@pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
@pytest.mark.parametrize("protocol", [GroupProtocol.LEADER, GroupProtocol.PROPOSE])
def test_groups(collective, protocol):
    more = {"groups": (2, 1), "collective": collective, "protocol": protocol}
    for hint, window in product(("bf", "f-priority"), (1, 2)):
        Explorer().explore(both(chain(2, 1), linear(2), hint=hint, window=window, **more))
    Explorer().explore(both(chain(1, 2), linear(1), groups=(2,), collective=collective, protocol=protocol))


@pytest.mark.parametrize("hint", HINTS)
def test_same_visible_states(hint):
    for graph in small_graphs(2, 1, split=hint == "bfw").values():
        check_same(both(graph, linear(2), hint=hint, window=1))


class _Broken(StageArbiter):
    def validate(self):
        """What is broken may show in it too; here the checks from outside are tested."""


class HeedsNoWord(_Broken):
    """Hands over what is certain only, whatever it is told."""

    def _decide_now(self, task, out):
        super()._decide_now(task, out)
        self._is_told = False
        return False


class RunsTwoBehind(_Broken):
    """Takes the word for a second permission, where the task counts as ended from its start."""

    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        self._capacity += was_news
        return was_news

    def _settle_due(self, node, task):
        self._capacity = 2 if node == self._due else self._capacity
        super()._settle_due(node, task)


class FreesSlotsTwice(_Broken):
    """Counts the task off its microbatch once more as it hears the word."""

    def _decide_now(self, task, out):
        was_news = super()._decide_now(task, out)
        if was_news and self._window.left[task.microbatch] > 0:
            self._window.finish(task.microbatch)
        return was_news


@pytest.mark.parametrize("broken", [HeedsNoWord, RunsTwoBehind, FreesSlotsTwice])
def test_what_is_broken_is_found(broken):
    with pytest.raises(CheckError):
        explore(replace(both(chain(2, 3), linear(2), hint="bf", window=2), arbiter=broken))
