"""Every interleaving of whole steps: reduction, agreement, update, and the next step with messages that come early."""

from itertools import product

import pytest

from rrfp_jax.core import HINTS, Agreement, StepRules
from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    ScheduleRequest,
    absences,
    build_schedule,
    chain,
    linear,
    looped,
    opposite_chains,
    v_shaped,
)
from tests.checking.guided import by_table
from tests.model_checker import Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs, small_settings

SHARED = {
    "no sharing": (),
    "first with last": ((0, -1),),
    "two pairs": ((0, -1), (1, -2)),
    "all": (tuple(range(-4, 0)),),
}


def sharing(graph: PipelineGraph, groups) -> PipelineGraph:
    numbered = {tuple(sorted({c % graph.num_chunks for c in group})) for group in groups}
    return PipelineGraph(
        graph.num_chunks,
        graph.num_microbatches,
        graph.edges,
        absent=graph.absent,
        split=graph.split,
        shared=tuple(sorted(group for group in numbered if len(group) > 1)),
    )


def shared_in_every_way(graph: PipelineGraph) -> dict[PipelineGraph, str]:
    """The graph with each sharing of ``SHARED``, under the first of its names: in small ones several are the same."""
    return {sharing(graph, groups): name for name, groups in reversed(SHARED.items())}


def explore_hints(graph, placement, rules, *, hints=tuple(HINTS), windows=((1,), (2,)), **more):
    explorer = Explorer()
    for name, window in product(hints, windows):
        explorer.explore(
            Setting(
                graph=graph,
                placement=placement,
                windows=window * placement.num_stages,
                policies=(HINTS[name],) * placement.num_stages,
                rules=rules,
                **more,
            )
        )


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("updates", [False, True], ids=["no-updates", "updates"])
@pytest.mark.parametrize("groups", SHARED)
def test_end_of_a_step(agreement, updates, groups):
    rules = StepRules(updates=updates, agreement=agreement)
    for num_stages, per_stage in [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2)]:
        for plain in small_graphs(num_stages * per_stage, 2).values():
            for graph, name in shared_in_every_way(plain).items():
                if name == groups:
                    explore_hints(graph, looped(num_stages, per_stage), rules, hints=("bf", "f-priority"))


@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_every_hint_and_window_with_updates(agreement, ordered):
    graph = sharing(chain(2, 2), [(0, 1)])
    rules = StepRules(agreement=agreement, ordered=ordered)
    for settings in small_settings(graph, linear(2), rules, numbers=(7**30,)):
        explorer = Explorer()
        for setting in settings:
            explorer.explore(setting)


@pytest.mark.parametrize("agreement", Agreement)
def test_end_of_a_step_with_split_backward(agreement):
    for num_stages, per_stage in [(2, 1), (3, 1), (2, 2)]:
        graph = sharing(chain(num_stages * per_stage, 2, split=True), [(0, -1)])
        explore_hints(graph, looped(num_stages, per_stage), StepRules(agreement=agreement), hints=("bf", "fb"))


@pytest.mark.parametrize("agreement", Agreement)
def test_bidirectional_chains_that_share_all_parameters(agreement):
    graph = opposite_chains(2, down_microbatches=[0], num_microbatches=2)
    explore_hints(graph, v_shaped(2), StepRules(agreement=agreement))


@pytest.mark.slow
@pytest.mark.parametrize("agreement", Agreement)
def test_bitpipe(agreement):
    """Strictly with four stages, and two steps with two; at the table's own memory; and by hints."""
    rules = StepRules(agreement=agreement)
    for num_stages, num_microbatches, num_steps in [(4, 4, 1), (2, 4, 2)]:
        sizes = ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches)
        table = build_schedule("bitpipe", sizes)
        explore(
            Setting(
                graph=table.graph,
                placement=table.placement,
                windows=(1,) * num_stages,
                policies=table.orders,
                rules=rules,
                absences=((),) * num_steps,
            )
        )
    explore(by_table(table))
    table = build_schedule("bitpipe", ScheduleRequest(num_stages=2, num_microbatches=2))
    explore(by_table(table, rules=rules, absences=((), ())))
    explore_hints(table.graph, table.placement, rules, hints=("bf", "f-priority"))


def test_several_losses_on_different_stages_agree():
    """Three sinks: the coordinator is not stage 0, and gets its reports while it is busy."""
    graph = PipelineGraph(4, 2, (Edge(0, 1), Edge(0, 2), Edge(0, 3)))
    for agreement, updates in product(Agreement, (False, True)):
        rules = StepRules(agreement=agreement, updates=updates)
        explore_hints(graph, linear(4), rules, hints=("bf", "f-priority"), windows=((2,),))


ABSENT = {
    "alike": ((), ()),
    "second step lacks a pair": ((), absences({(0, 0)})),
    "steps lack different pairs": (absences({(0, 0)}), absences({(1, 1)})),
    "an encoder has no work": (absences({(0, 0), (0, 1)}), ()),
}


@pytest.mark.parametrize("rules", [PIPELINE_ONLY, *(StepRules(agreement=a) for a in Agreement)], ids=str)
@pytest.mark.parametrize("absent", ABSENT.values(), ids=list(ABSENT))
def test_two_steps_with_early_messages(rules, absent):
    graph = sharing(small_graphs(3, 2)["two encoders"], [(0, 1)])
    explore_hints(graph, linear(3), rules, hints=("bf",), absences=absent)


@pytest.mark.parametrize("rules", [PIPELINE_ONLY, *(StepRules(agreement=a) for a in Agreement)], ids=str)
def test_two_steps_of_a_chain(rules):
    for num_stages, per_stage in [(1, 1), (2, 1), (3, 1), (2, 2)]:
        graph = chain(num_stages * per_stage, 2)
        explore_hints(graph, looped(num_stages, per_stage), rules, hints=("bf", "f-priority"), absences=ABSENT["alike"])


def test_three_steps_follow_each_other():
    explore_hints(chain(2, 1), linear(2), PIPELINE_ONLY, absences=((),) * 3)
    explore_hints(chain(2, 1), linear(2), StepRules(agreement=Agreement.LOSS), absences=((),) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("name", ["chain", "two encoders", "two encoders, some skipped", "fork and join"])
def test_larger_steps(agreement, name):
    for num_stages, per_stage, num_microbatches in [(2, 2, 3), (3, 2, 2)]:
        graph = sharing(small_graphs(num_stages * per_stage, num_microbatches)[name], SHARED["two pairs"])
        rules = StepRules(agreement=agreement)
        explore_hints(graph, looped(num_stages, per_stage), rules, hints=("bf", "fb"), absences=ABSENT["alike"])


@pytest.mark.parametrize("agreement", [Agreement.LOSS, Agreement.ALL])
@pytest.mark.parametrize("degree", [1, 2])
def test_reports_and_verdicts_along_trees_that_are_deeper_than_one(agreement, degree):
    """Four stages below each other, and as a tree of two; every stage's report may be the last to come."""
    rules = StepRules(agreement=agreement, tree_degree=degree)
    explore_hints(chain(4, 1), linear(4), rules, hints=("bf",), windows=((1,),), absences=((), ()))
