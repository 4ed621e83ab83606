"""The reduced exploration sees what the plain one sees: the same visible states, whatever arrives when."""

import pytest

from rrfp_jax.core import HINTS, Agreement, StepRules, schedule_hint
from rrfp_jax.schedules import absences, chain, linear, looped
from tests.model_checker import Explorer, Setting
from tests.model_checker.catalogue import PIPELINE_ONLY, all_hints, nth_permutation, small_graphs

RULES = [
    PIPELINE_ONLY,
    StepRules(ordered=True),
    StepRules(agreement=Agreement.LOSS),
    StepRules(agreement=Agreement.NONE),
]


def explored(setting, *, reduced):
    """What the stages have done in each global state: started, finished and sent, without deliveries."""
    search = Explorer(reduced=reduced).search(setting)
    frontier = [search.start]
    while frontier:
        frontier, _ = search.advance(frontier)

    def visible(automaton, state):
        account = automaton.account(state)
        # notes within groups are numbered as they come up, so their numbers say nothing elsewhere
        sent = frozenset(search.packets.stimuli(account.sent)) if setting.groups else account.sent
        if not account.is_active:
            return (account.step + 1, 0, 0, sent, None)
        return (account.step, account.started, account.finished, sent, account.wake_s)

    return {tuple(map(visible, search.automata, state)) for state in search.came_from}, len(search.came_from)


def check_same(setting):
    reduced, num_reduced = explored(setting, reduced=True)
    plain, num_plain = explored(setting, reduced=False)
    assert reduced == plain
    assert num_reduced <= num_plain


def hints_by_size():
    """Those that make the same arbiters once."""
    placements = {size: looped(*size) for size in [(2, 1), (3, 1), (2, 2)]}
    return [
        pytest.param(size, hints, id=f"{size}-{hints[0].name}")
        for size, placement in placements.items()
        for hints in all_hints(chain(placement.num_chunks, 2), placement, ())
        if hints[0] in HINTS.values()
    ]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(("size", "hints"), hints_by_size())
def test_same_visible_states(rules, size, hints):
    placement = looped(*size)
    for graph in small_graphs(placement.num_chunks, 2).values():
        for windows in [(1,) * size[0], (2,) * size[0]]:
            check_same(Setting(graph=graph, placement=placement, windows=windows, policies=hints, rules=rules))


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_same_visible_states_with_three_microbatches_and_table_hints(split):
    graph, placement = small_graphs(3, 3, split=split)["two encoders"], linear(3)
    hints = tuple(schedule_hint(nth_permutation(graph.tasks(chunks), 3**25)) for chunks in placement.chunks_of_stage)
    check_same(Setting(graph=graph, placement=placement, windows=(2, 1, 2), policies=hints, rules=PIPELINE_ONLY))


@pytest.mark.parametrize("rules", RULES[1:], ids=str)
def test_same_visible_states_over_two_steps(rules):
    hint = HINTS["fb"]
    check_same(
        Setting(
            graph=chain(2, 2, shared=((0, 1),)),
            placement=linear(2),
            windows=(2, 2),
            policies=(hint, hint),
            rules=rules,
            absences=((), absences({(0, 0), (1, 0)})),
            certain_ahead=True,
        )
    )


def test_the_reduction_saves_states():
    hint = HINTS["bf"]
    graph = small_graphs(4, 3)["two encoders"]
    setting = Setting(graph=graph, placement=looped(2, 2), windows=(3, 3), policies=(hint, hint), rules=PIPELINE_ONLY)
    assert 3 * Explorer().explore(setting).num_states < 2 * Explorer(reduced=False).explore(setting).num_states


def test_automata_are_shared_between_settings():
    explorer = Explorer()
    hint = HINTS["bf"]
    settings = [
        Setting(graph=chain(2, 3), placement=linear(2), windows=windows, policies=(hint, hint), rules=PIPELINE_ONLY)
        for windows in [(1, 2), (2, 2), (1, 1)]
    ]
    assert [explorer.explore(s) for s in settings] == [Explorer().explore(s) for s in settings]
    assert len(explorer._automata) == 4
