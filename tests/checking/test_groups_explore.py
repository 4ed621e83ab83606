"""Every interleaving of small pipelines whose stages span processes: arrivals, notes and ends in any order."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from rrfp_jax.core import HINTS, Agreement, GroupProtocol, StepRules, group_arbiter
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, all_hints, fitting_tables, small_graphs

LEADER, PROPOSE, OFF = GroupProtocol
NUMBERS = (7**30,)
"""Of the permutations that serve as tables."""
COLLECTIVE_OR_NOT = pytest.mark.parametrize("collective", [True, False], ids=["collective", "separate"])
ORDERED_OR_NOT = pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
BOTH = pytest.mark.parametrize("protocol", [LEADER, PROPOSE])


in_a_row = partial(group_arbiter, degree=1)


def explore_all(graph, *, groups, hints, windows, placement=None, ordered=False, rules=PIPELINE_ONLY, **more):
    """Explore a pipeline with each of these windows and hints; returns how many states there were."""
    placement = placement or linear(graph.num_chunks)
    num_states = 0
    for policies in hints:
        explorer = Explorer()
        for window in windows:
            setting = Setting(
                graph=graph,
                placement=placement,
                windows=window if isinstance(window, tuple) else (window,) * placement.num_stages,
                policies=policies if isinstance(policies, tuple) else (HINTS[policies],) * placement.num_stages,
                rules=replace(rules, ordered=ordered),
                groups=groups,
                **more,
            )
            num_states += explorer.explore(setting).num_states
    return num_states


def hints_of(graph):
    return all_hints(graph, linear(graph.num_chunks), NUMBERS)


@pytest.mark.parametrize("groups", [(2, 2), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@ORDERED_OR_NOT
def test_leader(groups, split, ordered):
    graph = chain(2, 2, split=split)
    explore_all(graph, groups=groups, hints=hints_of(graph), windows=[1, (1, 2), (2, 1), 2], ordered=ordered)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(2, 2), (2, 1), (1, 2)], ids=str)
@ORDERED_OR_NOT
def test_leader_with_three_microbatches(groups, ordered):
    graph = chain(2, 3)
    hints = ["bf", "fb", "b-priority"]
    explore_all(graph, groups=groups, hints=hints, windows=[1, 2, 3], ordered=ordered)


@pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_proposals(groups, split):
    graph = chain(2, 2, split=split)
    hints = hints_of(graph) if not split else ["bfw", "fb", "b-priority"]
    explore_all(graph, groups=groups, hints=hints, windows=[1, 2], ordered=split, protocol=PROPOSE)


@COLLECTIVE_OR_NOT
def test_proposals_on_both_stages(collective):
    explore_all(chain(2, 2), groups=(2, 2), hints=["bf"], windows=[1, 2], protocol=PROPOSE, collective=collective)


@BOTH
def test_tasks_that_end_on_each_member_by_itself(protocol):
    """As emulated tasks do, or those of a group that only looks like one; a follower may be far behind."""
    for groups in [(2, 1), (1, 2)]:
        hints = ["bf", "f-priority", "b-priority"]
        explore_all(chain(2, 2), groups=groups, hints=hints, windows=[1, 2], protocol=protocol, collective=False)


@COLLECTIVE_OR_NOT
def test_three_members_and_their_leader(collective):
    for groups in [(3, 1), (1, 3), (2, 3), (3, 2)]:
        explore_all(chain(2, 2), groups=groups, hints=["bf", "fb"], windows=[1, 2], collective=collective)


@COLLECTIVE_OR_NOT
def test_members_behind_others(collective):
    """In a tree in which nobody has more than one child the last member hears of nothing but by the one between."""
    for groups in [(3, 1), (1, 3)]:
        more = {"collective": collective, "make_member": in_a_row}
        explore_all(chain(2, 2), groups=groups, hints=["bf"], windows=[1, 2], **more)
    explore_all(chain(2, 1), groups=(1, 3), hints=["bf"], windows=[1], rules=StepRules(), make_member=in_a_row)


@COLLECTIVE_OR_NOT
def test_two_steps_of_members_behind_others(collective):
    more = {"collective": collective, "make_member": in_a_row, "absences": ((),) * 2}
    explore_all(chain(2, 1), groups=(1, 3), hints=["bf"], windows=[1], **more)


@pytest.mark.slow
@COLLECTIVE_OR_NOT
def test_a_group_as_a_tree_of_three_levels(collective):
    more = {"collective": collective, "make_member": partial(group_arbiter, degree=2)}
    explore_all(chain(2, 1), groups=(1, 4), hints=["bf"], windows=[1], **more)
    explore_all(
        chain(2, 2), groups=(3, 3), hints=["bf", "fb"], windows=[1, 2], collective=collective, make_member=in_a_row
    )


def test_three_members_that_propose():
    explore_all(chain(2, 1), groups=(1, 3), hints=["bf", "fb"], windows=[1], protocol=PROPOSE)


@BOTH
def test_strict_rows(protocol):
    graph = chain(2, 2)
    rows = [table.orders for table in fitting_tables(graph, linear(2))]
    assert len(rows) > 1
    for groups in [(2, 1), (1, 2)]:
        explore_all(graph, groups=groups, hints=rows, windows=[2], protocol=protocol)
    explore_all(graph, groups=(2, 2), hints=rows[:1], windows=[2], protocol=protocol)


@BOTH
@pytest.mark.parametrize("agreement", Agreement)
def test_the_end_of_a_step(protocol, agreement):
    """Of stage 0, which coordinates, and of stage 1, which reports; with tied parameters."""
    graph = replace(chain(2, 1), shared=((0, 1),))
    rules = StepRules(agreement=agreement)
    for groups in [(2, 2), (2, 1), (1, 2)]:
        explore_all(graph, groups=groups, hints=["bf"], windows=[1], rules=rules, protocol=protocol)


@BOTH
@COLLECTIVE_OR_NOT
def test_two_steps(protocol, collective):
    """The members of a group may be in different steps."""
    steps = [((),) * 2, ((), absences({(0, 1), (1, 1)}))]
    for absent, groups in product(steps, [(2, 1), (1, 2)]):
        num_microbatches = 1 if absent[0] == absent[1] else 2
        graph = chain(2, num_microbatches)
        explore_all(
            graph, groups=groups, hints=["bf"], windows=[1], protocol=protocol, collective=collective, absences=absent
        )


@pytest.mark.parametrize("name", small_graphs(3, 2))
def test_a_group_amid_other_stages(name):
    graph = small_graphs(3, 2)[name]
    for groups in [(1, 2, 1), (1, 1, 2)]:
        explore_all(graph, groups=groups, hints=["bf"], windows=[1, 2])
    explore_all(graph, groups=(1, 2, 1), hints=["bf"], windows=[1], protocol=PROPOSE)


def test_several_chunks_per_stage():
    for groups, hint in product([(2, 1), (1, 2)], ["bf", "bf-deep"]):
        explore_all(chain(4, 1), placement=looped(2, 2), groups=groups, hints=[hint], windows=[1])
    explore_all(chain(4, 2), placement=looped(2, 2), groups=(1, 2), hints=["bf-deep"], windows=[2])


@pytest.mark.slow
@BOTH
@COLLECTIVE_OR_NOT
@ORDERED_OR_NOT
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=str)
def test_all_hints_and_three_microbatches(protocol, groups, split, ordered, collective):
    graph = chain(2, 2 if protocol is PROPOSE and split else 3, split=split)
    explore_all(
        graph,
        groups=groups,
        hints=hints_of(graph) if protocol is LEADER else ["bf", "fb"],
        windows=[1, 2, 3] if protocol is LEADER else [1, 2],
        ordered=ordered,
        protocol=protocol,
        collective=collective,
    )


@pytest.mark.slow
def test_three_members_that_propose_two_microbatches():
    explore_all(chain(2, 2), groups=(3, 1), hints=["bf"], windows=[2], protocol=PROPOSE)


@pytest.mark.slow
@BOTH
def test_three_stages_and_two_groups(protocol):
    for groups in [(2, 2, 1), (1, 2, 2), (2, 1, 2)]:
        explore_all(chain(3, 1), groups=groups, hints=["bf"], windows=[1], protocol=protocol)
    explore_all(chain(3, 2), groups=(1, 2, 1), hints=["bf", "b-priority"], windows=[1, 2], protocol=protocol)


# -- the reductions --------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=str)
def test_exploring_without_the_reductions_finds_nothing_more(protocol, groups):
    one = {"graph": chain(2, 1), "placement": linear(2), "windows": (1, 1), "policies": (HINTS["bf"],) * 2}
    setting = Setting(**one, rules=PIPELINE_ONLY, groups=groups, protocol=protocol)
    assert explore(setting, reduced=False).num_states > explore(setting).num_states


# -- without agreement -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority"])
@COLLECTIVE_OR_NOT
def test_without_agreement_members_launch_different_sequences(hint, collective):
    for groups in [(1, 2), (2, 2)]:
        with pytest.raises(CheckError, match=r"members of stage 1 diverge: task . is .* on member 0, .* on") as error:
            explore_all(chain(2, 2), groups=groups, hints=[hint], windows=[2], protocol=OFF, collective=collective)
        assert "member 1 of stage 1: runs" in str(error.value)


def test_without_agreement_there_are_orders_that_cannot_diverge():
    rows = [table.orders for table in fitting_tables(chain(2, 2), linear(2))]
    explore_all(chain(2, 2), groups=(1, 2), hints=rows, windows=[2], protocol=OFF)
    explore_all(chain(2, 2), groups=(1, 2), hints=["bf"], windows=[1], protocol=OFF)


def test_a_wrong_number_of_groups_is_named():
    with pytest.raises(ValueError, match=r"groups is \(2,\) for 2 stages: give each at least 1 process"):
        explore_all(chain(2, 1), groups=(2,), hints=["bf"], windows=[1])
