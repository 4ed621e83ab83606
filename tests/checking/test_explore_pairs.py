"""Every interleaving of small pipelines whose stages run two ready tasks as one program, and random ones."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import HINTS, GroupProtocol, RunPair, StageArbiter, StepRules, group_arbiter
from rrfp_jax.core.groups import FollowingMember
from rrfp_jax.core.plan import Agreement
from rrfp_jax.schedules import Pair, ScheduleRequest, Task, build_schedule, chain, linear, looped, v_shaped
from tests.checking.guided import by_table
from tests.checking.test_random_foresight import random_setting
from tests.checking.test_random_walk import random_graph, random_placement
from tests.model_checker import CheckError, Explorer, Setting, explore
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs, small_settings
from tests.model_checker.random_walk import random_walk

FREE = frozenset[Pair]()
"""No row names a pair, so stages that go by readiness join what is ready."""
SIZES = [(1, 1, 3), (2, 1, 3), (2, 2, 2), (3, 1, 2)]
LARGER = [(3, 1, 3), (2, 2, 3)]


EARLY = pytest.mark.parametrize("early", [False, True], ids=["at the end", "early"])
"""Whether a stage may be told that a program is about to end, and chooses the next one then."""


@EARLY
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("size", [*SIZES, *(pytest.param(each, marks=pytest.mark.slow) for each in LARGER)], ids=str)
def test_every_hint_and_window(size, split, ordered, early):
    num_stages, per_stage, num_microbatches = size
    placement, rules = looped(num_stages, per_stage), replace(PIPELINE_ONLY, ordered=ordered)
    for graph in small_graphs(placement.num_chunks, num_microbatches, split=split).values():
        for found in small_settings(graph, placement, rules, numbers=()):
            explorer = Explorer()
            for setting in found:
                explorer.explore(replace(setting, pairs=FREE, decides_early=early))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "1f1b-split"])
def test_whole_steps_one_after_another(name):
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=3))
    rules = StepRules(agreement=Agreement.LOSS)
    explore(by_table(table, pairs=FREE, rules=rules, absences=((), ()), foresight=False))


@EARLY
@pytest.mark.parametrize("words", [{}, {"footprint": False}, {"foresight": False}], ids=str)
@pytest.mark.parametrize(("name", "num_microbatches"), [("1f1b", 3), ("zb-h1", 3), ("zb-v", 2), ("1f1b-split", 4)])
def test_tables_that_guide(name, num_microbatches, words, early):
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=num_microbatches))
    for extra in (0, 1):
        explore(by_table(table, pairs=FREE, extra=extra, decides_early=early, **words))


@EARLY
@pytest.mark.parametrize(("name", "num_stages"), [("stp", 2), ("stp", 3), ("dualpipe-v", 2), ("dualpipe-v", 3)])
def test_rows_that_name_pairs(name, num_stages, early):
    """The W of an I may be its partner there, and a stage waits until both of a pair are ready."""
    table = build_schedule(name, ScheduleRequest(num_stages=num_stages, num_microbatches=3 * num_stages - 1))
    setting = replace(strictly(table, table.pairs), decides_early=early)
    assert explore(setting).num_states > 2 * table.graph.num_microbatches
    counted = pairs_of_a_walk(setting, 0)
    assert set(counted) == table.pairs


@EARLY
@pytest.mark.parametrize("collective", [True, False], ids=["collectives", "separate ends"])
@pytest.mark.parametrize("groups", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("name", "num_microbatches", "words"),
    [
        ("1f1b", 2, {}),
        ("1f1b", 3, {"footprint": False}),
        ("zb-h1", 2, {"foresight": False}),
        pytest.param("zb-v", 2, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_members_of_groups_run_the_same_pairs(name, num_microbatches, words, groups, collective, early):
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=num_microbatches))
    setting = by_table(table, pairs=FREE, groups=groups, collective=collective, decides_early=early, **words)
    explore(setting)


@pytest.mark.parametrize("name", ["stp", "dualpipe-v"])
def test_members_of_groups_keep_to_the_pairs_of_a_row(name):
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=5))
    setting = replace(strictly(table, table.pairs), groups=(2, 1), decides_early=True)
    explore(setting)
    assert set(pairs_of_a_walk(replace(setting, groups=(3, 2)), 1)) <= table.pairs


def test_a_follower_that_takes_pairs_apart_diverges():
    class Alone(FollowingMember):
        def _dispatch(self, out):
            kept = self._kept.get(self.step, {})
            for number, note in list(kept.items()):
                if isinstance(number, int) and note.partner is not None:
                    kept[number] = note._replace(partner=None)
                    kept[number + 1] = note._replace(number=number + 1, task=note.partner, partner=None)
            super()._dispatch(out)

    def member(protocol, setup, number, num_members):
        sound = group_arbiter(protocol, setup, number, num_members)
        return Alone(setup, number, num_members) if number else sound

    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=3))
    setting = by_table(table, pairs=FREE, groups=(2, 1), foresight=False, footprint=False)
    explore(setting)
    with pytest.raises(CheckError, match="diverge"):
        explore(replace(setting, make_member=member))


def strictly(table, pairs):
    return Setting(
        graph=table.graph,
        placement=table.placement,
        windows=(1,) * table.num_stages,
        policies=table.orders,
        rules=PIPELINE_ONLY,
        pairs=pairs,
    )


def test_a_row_whose_pair_waits_for_what_comes_behind_it_deadlocks():
    first = tuple(map(Task.parse, ("0F0", "0F1", "0B0", "0B1")))
    second = tuple(map(Task.parse, ("1F0", "1B0", "1F1", "1B1")))
    pair = Pair(first[1], first[2])
    setting = Setting(
        graph=chain(2, 2),
        placement=linear(2),
        windows=(2, 2),
        policies=(first, second),
        rules=PIPELINE_ONLY,
        pairs=frozenset({pair}),
    )
    explore(setting)  # 0F1 waits for 1B0
    wrong = frozenset({pair, Pair(second[1], second[2])})
    with pytest.raises(CheckError, match="deadlock: stages \\[0, 1\\]"):
        explore(replace(setting, pairs=wrong))


class JoinsWhatIsNotReady(StageArbiter):
    """Takes the partner from the tasks that are left."""

    def _start_joined(self, node, position, out):
        super()._start_joined(node, position, out)
        left = [t for n, t in self._ranked.plan.present() if self._waiting[n] > 0 and t.microbatch >= 0]
        if left and not isinstance(out[-1], RunPair):
            out[-1] = RunPair(self.step, Pair(out[-1].task, left[0]))


class ForgetsMemory(StageArbiter):
    """Joins the first forward that is ready, whether memory admits it or not."""

    def _heads(self):
        heads = super()._heads()
        if self._running and (fresh := self._ready.lanes[0]):
            return (fresh[0], *heads[1:])
        return heads


class EndsAtTheFirst(StageArbiter):
    """Chooses again when the first of a pair has ended."""

    def _finish_task(self, task, out):
        super()._finish_task(task, out)
        self._capacity = 1 + len(self._running)


class ForgetsThePartner(StageArbiter):
    """Counts the second alone as ended when the program of both is about to end."""

    def _decide_now(self, task, out):
        firsts, self._firsts = self._firsts, set()
        told = super()._decide_now(task, out)
        self._firsts = firsts
        return told


@pytest.mark.parametrize("arbiter", [JoinsWhatIsNotReady, ForgetsMemory, EndsAtTheFirst, ForgetsThePartner])
def test_faults_are_found(arbiter):
    setting = Setting(
        graph=chain(2, 3),
        placement=linear(2),
        windows=(2, 2),
        policies=(HINTS["bf"],) * 2,
        rules=PIPELINE_ONLY,
        decides_early=arbiter is ForgetsThePartner,
        pairs=FREE,
    )
    explore(setting)
    with pytest.raises(CheckError):
        explore(replace(setting, arbiter=arbiter))


# -- random walks ------------------------------------------------------------------------------------------------------


def pairs_of_a_walk(setting, seed):
    """The pairs that ran."""
    counted = Counter()

    class Watched(setting.arbiter):
        def handle(self, event):
            out = super().handle(event)
            counted.update(i.task for i in out if isinstance(i, RunPair))
            return out

    random_walk(replace(setting, arbiter=Watched), Random(seed).randrange)
    return counted


def joined(random):
    """A random setting in which stages join tasks: guided by a table, or by a hint alone."""
    if random.random() < 0.6:
        setting = random_setting(random)
        return replace(setting, protocol=GroupProtocol.LEADER, certain_ahead=False, pairs=FREE)
    placement = random_placement(random, random.randint(1, 5), 3)
    return Setting(
        graph=random_graph(random, placement.num_chunks, random.randint(1, 8)),
        placement=placement,
        windows=tuple(random.randint(1, 8) for _ in range(placement.num_stages)),
        policies=tuple(random.choice(list(HINTS.values())) for _ in range(placement.num_stages)),
        rules=StepRules(ordered=random.random() < 0.5, agreement=random.choice(list(Agreement))),
        absences=((),) * random.randint(1, 3),
        decides_early=random.random() < 0.4,
        pairs=FREE,
    )


def check(random):
    setting = joined(random)
    report = random_walk(setting, random.randrange)
    assert report.num_tasks >= sum(len(list(setting.graph_of_step(n).tasks())) for n in range(setting.num_steps))


@given(st.randoms(use_true_random=False))
@settings(max_examples=40)
@pytest.mark.slow
def test_random_pipelines(random):
    check(random)


@pytest.mark.slow
@given(st.integers(0, 2**64))
@settings(max_examples=1000)
@pytest.mark.timeout(1800)
def test_very_many_random_pipelines(seed):
    check(Random(seed))


def test_walks_join_all_kinds():
    for split, kinds in ((False, {"FB", "BF"}), (True, {"FI", "IF", "FW", "WF", "IW", "WI"})):
        graph, placement = chain(6, 8, split=split), v_shaped(3)
        hints = [HINTS[name] for name in ("bf-deep", "b-priority", "f-priority", "fb")]
        found = Counter()
        for number, hint in enumerate(hints):
            setting = Setting(
                graph=graph,
                placement=placement,
                windows=(4,) * 3,
                policies=(hint,) * 3,
                rules=PIPELINE_ONLY,
                pairs=FREE,
            )
            for seed in range(10):
                found.update(a.kind + b.kind for a, b in pairs_of_a_walk(setting, 10 * number + seed))
        assert set(found) <= kinds
        assert len(found) >= len(kinds) - 2, found
