"""Every interleaving of small pipelines in which steps evaluate before, between and behind steps that train."""

from dataclasses import replace
from random import Random

import pytest

from rrfp_jax.core import (
    HINTS,
    Agreement,
    ForesightRules,
    GroupHeard,
    GroupProtocol,
    IllegalTransition,
    StageArbiter,
    StepRules,
)
from rrfp_jax.core.replicas import replicated_graph, replicated_placement
from rrfp_jax.schedules import absences, chain, linear, looped, opposite_chains, v_shaped
from rrfp_jax.schedules.request import TWO_VS
from tests.checking.guided import guided, random_rows
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, evaluation_settings, optional_graphs, skipped, small_graphs
from tests.model_checker.random_walk import random_walk

TRAIN_EVALUATE_TRAIN = {"absences": ((),) * 3, "evaluates": frozenset({1})}
LOSS = StepRules(agreement=Agreement.LOSS)


def explore_all(graph, placement, rules=PIPELINE_ONLY, **more):
    for settings in evaluation_settings(graph, placement, rules, **more):
        explorer = Explorer()
        for setting in settings:
            explorer.explore(setting)


def small(graph, placement, **more):
    return Setting(
        graph=graph,
        placement=placement,
        windows=(1,) * placement.num_stages,
        policies=(HINTS["bf"],) * placement.num_stages,
        **{"rules": LOSS, **TRAIN_EVALUATE_TRAIN, **more},
    )


@pytest.mark.parametrize("rules", [PIPELINE_ONLY, *(StepRules(agreement=a) for a in Agreement)], ids=str)
def test_every_hint_and_strict_table(rules):
    explore_all(chain(2, 1), linear(2), rules, num_batches=2)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_more_microbatches_and_stages(split):
    explore_all(chain(2, 2, split=split), linear(2))
    explore_all(chain(3, 1, split=split), linear(3))


def test_several_chunks_on_a_stage():
    explore(small(chain(4, 1), looped(2, 2)))
    explore(small(opposite_chains(2, down_microbatches=[0], num_microbatches=2), v_shaped(2), rules=PIPELINE_ONLY))
    explore(small(opposite_chains(4, [0], 2), TWO_VS.placement(2, 4), rules=PIPELINE_ONLY))


@pytest.mark.parametrize("name", ["two encoders", "two encoders, one frozen", "frozen first chunk"])
def test_encoders(name):
    explore(small(small_graphs(3, 1)[name], linear(3)))


def test_microbatches_that_skip_an_encoder_only_while_evaluating():
    graph = optional_graphs(2)["encoder"]
    of_step = skipped(graph.evaluating(2), [0, 3])
    explore(small(graph, linear(2), rules=PIPELINE_ONLY, absences=((), of_step, ()), evaluation_batches=2))


def test_a_last_evaluation_that_is_short():
    """Fewer batches than a step has room for: the rest is absent everywhere."""
    missing = absences((chunk, m) for chunk in range(2) for m in (2, 3))
    explore(small(chain(2, 2), linear(2), absences=((), missing, ()), evaluation_batches=2))


def test_replicas():
    rules = StepRules(agreement=Agreement.LOSS, lockstep=True)
    graph, placement = replicated_graph(chain(2, 1), 2), replicated_placement(linear(2), 2)
    explore(small(graph, placement, rules=rules, absences=((), ()), evaluates=frozenset({0})))
    missing = absences((chunk, 1) for chunk in (1, 3))  # a replica without any microbatch
    explore(small(graph, placement, rules=rules, absences=(missing, ()), evaluates=frozenset({0})))


@pytest.mark.parametrize("protocol", [GroupProtocol.LEADER, GroupProtocol.PROPOSE])
@pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=str)
def test_groups(groups, protocol):
    more = {"rules": PIPELINE_ONLY, "groups": groups, "protocol": protocol}
    explore(small(chain(2, 1), linear(2), evaluation_batches=2, **more))


def test_members_that_start_different_kinds_of_steps_are_refused():
    setting = small(chain(2, 1), linear(2), rules=PIPELINE_ONLY, groups=(2, 1))
    training = replace(setting, evaluates=frozenset())
    leader = setting.make_arbiter(0)
    (told,) = setting.make_arbiter(1).handle(training.start_of(1))
    leader.handle(setting.start_of(1))
    with pytest.raises(IllegalTransition, match=r"started on member 1 without .* elsewhere to evaluate"):
        leader.handle(GroupHeard(told.step, 0.0, 1, told.note))


def test_a_stage_that_was_not_made_for_evaluations_refuses_them():
    setting = small(chain(2, 1), linear(2))
    arbiter = replace(setting, evaluates=frozenset()).make_arbiter(0)
    with pytest.raises(IllegalTransition, match="step 1 was started to evaluate: stage 0 was not made for steps"):
        arbiter.handle(setting.start_of(1))


def test_foresight_footprints_and_early_decisions():
    graph, placement = chain(2, 2), linear(2)
    rows = random_rows(graph, placement, Random(3))
    explore(guided(graph, placement, rows, **TRAIN_EVALUATE_TRAIN))
    explore(small(graph, placement, rules=PIPELINE_ONLY, decides_early=True))
    explore(small(graph, placement, rules=PIPELINE_ONLY, certain_ahead=True))


def test_capacities_count_in_training_alone():
    graph = chain(2, 2)
    explore(small(graph, linear(2), rules=PIPELINE_ONLY, capacities=(2, 2), weights=((1, 2), (), (2, 1))))


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_of_larger_ones(seed):
    random = Random(seed)
    graph = small_graphs(6, 8)["two encoders, one frozen"]
    setting = small(
        graph,
        linear(6),
        rules=StepRules(),
        groups=(1, 2, 1, 2, 1, 1),
        absences=((),) * 5,
        evaluates=frozenset({0, 2, 3}),
        evaluation_batches=3,
        decides_early=bool(seed % 2),
    )
    random_walk(setting, random.randrange)


class _TrainsAlways(StageArbiter):
    """Broken: it takes every step for one that trains."""

    def handle(self, event):
        return super().handle(event._replace(evaluates=False) if hasattr(event, "evaluates") else event)


class _ForgetsBounds(StageArbiter):
    """Broken: outputs pile up while it evaluates."""

    def _begin(self, ranked):
        super()._begin(ranked)
        if ranked.evaluates:
            self._ahead = None


def test_training_in_place_of_an_evaluation_is_found():
    with pytest.raises(CheckError, match=r"waits for it|not a task of it"):
        explore(small(chain(2, 1), linear(2), arbiter=_TrainsAlways))


def test_outputs_that_pile_up_are_found():
    more = {"rules": PIPELINE_ONLY, "absences": ((),), "evaluates": frozenset({0}), "evaluation_batches": 5}
    explore(small(chain(2, 1), linear(2), **more))
    with pytest.raises(CheckError, match="5 outputs of 4"):
        explore(small(chain(2, 1), linear(2), arbiter=_ForgetsBounds, **more))


def test_rules_of_foresight_rest_during_evaluations():
    """What was learnt in training is there again afterwards, and nothing was learnt of an evaluation."""
    graph, placement = chain(2, 2), linear(2)
    rows = random_rows(graph, placement, Random(3))
    setting = guided(graph, placement, rows, **TRAIN_EVALUATE_TRAIN)
    assert isinstance(setting.foresight, ForesightRules)
    arbiter = setting.make_arbiter(0)
    before = arbiter.estimates()
    arbiter.handle(setting.start_of(1))
    assert arbiter.evaluates
    assert not arbiter.looks_ahead
    assert arbiter.estimates() == before
