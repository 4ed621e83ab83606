"""Every interleaving of small pipelines whose devices wait for inputs: what is announced is promised, and a stage may
hand over the next entry of its table before its inputs are there, at every moment at which it could."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from rrfp_jax.core import Agreement, StepRules
from rrfp_jax.core.foresight import PendingInputs
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.checking.guided import guided, random_rows
from tests.checking.test_random_foresight import random_setting
from tests.checking.test_reductions import check_same
from tests.model_checker import CheckError, explore
from tests.model_checker.catalogue import small_graphs
from tests.model_checker.random_walk import random_walk

EARLY = [{}, {"certain_ahead": True}, {"decides_early": True}, {"certain_ahead": True, "decides_early": True}]
"""When stages choose what follows a task."""


def drawn(graph, placement, number=1, **more):
    return guided(graph, placement, random_rows(graph, placement, Random(number)), awaits_inputs=True, **more)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("size", [(2, 1, 2), (3, 1, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_random_tables(size, split):
    num_stages, per_stage, num_microbatches = size
    placement = looped(num_stages, per_stage)
    graphs = small_graphs(placement.num_chunks, num_microbatches, split=split).values()
    for graph, words in product(graphs, EARLY):
        explore(drawn(graph, placement, **words))


def test_windows_and_whole_steps():
    for words in EARLY:
        explore(drawn(chain(2, 2), linear(2), footprint=False, window=1, **words))
        explore(drawn(chain(2, 1), linear(2), rules=StepRules(agreement=Agreement.ALL), **words))
        explore(drawn(chain(2, 1), linear(2), absences=((), ()), **words))
    explore(drawn(chain(2, 2), linear(2), absences=(absences({(0, 1), (1, 1)}), ())))


@pytest.mark.parametrize("words", EARLY, ids=str)
def test_the_reduction_hides_nothing(words):
    check_same(drawn(chain(2, 1), linear(2), **words))


def test_handing_over_what_nobody_promised_is_found(monkeypatch):
    monkeypatch.setattr(PendingInputs, "cover", lambda self, missing: True)
    with pytest.raises(CheckError, match="before"):
        explore(drawn(chain(2, 2), linear(2)))


@pytest.mark.parametrize("seed", range(25))
def test_large_random_pipelines_with_late_and_lost_pending(seed):
    random = Random(seed)
    setting = replace(random_setting(random), groups=(), awaits_inputs=True)
    setting = replace(setting, certain_ahead=random.random() < 0.5)
    random_walk(setting, random.randrange)
