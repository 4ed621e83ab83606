"""The checks themselves are checked: arbiters broken in one way each must be caught, with a trace that leads there."""

from collections import Counter
from copy import copy
from dataclasses import replace

import pytest

from rrfp_jax.core import HINTS, FinishStep, Hint, RunTask, Send, StageArbiter, StepRules, Window
from rrfp_jax.schedules import Task, TaskKind, chain, linear, looped
from tests.model_checker import CheckError, Explorer, Setting, explore, replay
from tests.model_checker.catalogue import PIPELINE_ONLY, fitting_tables, small_graphs, small_settings
from tests.model_checker.random_walk import random_walk

BF = HINTS["bf"]


class WithoutSecondCondition(Window):
    """Admits a forward whenever a slot is free, whether or not the oldest microbatch finds one later."""

    __slots__ = ()

    def admits(self, microbatch):
        return self.limit is None or microbatch in self.held or len(self.held) < self.limit


class LooseArbiter(StageArbiter):
    def _begin(self, ranked):
        super()._begin(ranked)
        self._window.__class__ = WithoutSecondCondition

    def validate(self):
        """Its invariant is what is left out here."""


class CountingArbiter(LooseArbiter):
    """The counter of the RRFP paper, appendix C: forwards minus backwards executed; at the limit no forward runs."""

    executed = 0

    def _begin(self, ranked):
        super()._begin(ranked)
        self.executed = 0

    def _dispatch(self, out):
        forwards = self._ready.lanes[0], self._ready.lanes[-1]
        limit = self._mode.limit
        hidden = [list(lane) if limit is not None and self.executed >= limit else [] for lane in forwards]
        for lane, some in zip(forwards, hidden, strict=True):
            del lane[: len(some)]
        super()._dispatch(out)
        for lane, some in zip(forwards, hidden, strict=True):
            lane[:0] = some

    def _start(self, node, position, out):
        self.executed += self._ranked.plan.tasks[node].kind is TaskKind.F
        super()._start(node, position, out)

    def _finish_task(self, task, out):
        self.executed -= task.kind in (TaskKind.B, TaskKind.I)
        super()._finish_task(task, out)


def simple_setting(arbiter, *, num_microbatches=2, window=2, rules=PIPELINE_ONLY, hint=BF, **more):
    return Setting(
        graph=chain(2, num_microbatches),
        placement=linear(2),
        windows=(window, window),
        policies=(hint, hint),
        rules=rules,
        arbiter=arbiter,
        **more,
    )


def deadlocks(arbiter, graph, placement, **rules):
    """How many settings of a pipeline deadlock, and how many there are."""
    found = Counter()
    for settings in small_settings(graph, placement, replace(PIPELINE_ONLY, **rules), numbers=(7**19, 2 * 7**19)):
        explorer = Explorer(demand_work=False)
        for setting in settings:
            found["settings"] += 1
            try:
                explorer.explore(replace(setting, arbiter=arbiter))
            except CheckError as error:
                found["deadlocks"] += error.what.startswith("deadlock")
                found["other errors"] += not error.what.startswith("deadlock")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arbiter", [LooseArbiter, CountingArbiter])
def test_the_papers_counter_deadlocks_under_general_hints_graphs_and_orders(arbiter):
    total = Counter()
    for name in ("chain", "two encoders"):
        for ordered in (False, True):
            total += deadlocks(arbiter, small_graphs(3, 3)[name], linear(3), ordered=ordered)
    assert total["deadlocks"] > 200, total
    assert not total["other errors"]


def test_a_free_slot_alone_is_not_enough_with_two_chunks_per_stage():
    assert deadlocks(LooseArbiter, chain(4, 2), looped(2, 2), ordered=True)["deadlocks"] > 0


def test_the_papers_counter_is_safe_where_the_paper_proves_it():
    """BF, a chain with one chunk per stage, free accumulation: no window deadlocks, equal or not."""
    for windows in [(1, 1, 1), (2, 2, 2), (1, 2, 2), (2, 1, 2), (3, 2, 1)]:
        explore(
            Setting(
                graph=chain(3, 3),
                placement=linear(3),
                windows=windows,
                policies=(BF,) * 3,
                rules=PIPELINE_ONLY,
                arbiter=CountingArbiter,
            )
        )


def test_the_shortest_known_deadlock_of_a_free_slot_is_told_and_replayed():
    graph = small_graphs(3, 2)["two encoders"]
    second_first = Hint("younger first", lambda task: (-task.microbatch,), BF.choose)
    setting = Setting(
        graph=graph,
        placement=linear(3),
        windows=(1, 1, 1),
        policies=(BF, second_first, BF),
        rules=PIPELINE_ONLY,
        arbiter=LooseArbiter,
    )
    with pytest.raises(CheckError, match="deadlock: stages \\[0, 1, 2\\]") as error:
        explore(setting, demand_work=False)
    assert "holds microbatches [1], limit 1" in str(error.value)
    assert "2F0 waits for activation of microbatch 0 from chunk 1 to chunk 2" in str(error.value)
    ran = [i.task for _, out in replay(setting, error.value.trace) for i in out if isinstance(i, RunTask)]
    assert sorted(map(str, ran)) == ["0F0", "1F1"]
    explore(replace(setting, arbiter=StageArbiter))


class ForgetsDependency(StageArbiter):
    """The backward of microbatch 1 does not wait for its gradient."""

    def _begin(self, ranked):
        node = ranked.plan.index.get(Task.parse("0B1"))
        needs = list(ranked.plan.needs)
        if node is not None and needs[node] == 2:
            needs[node] = 1
            ranked = copy(ranked)
            waits_at = ranked.plan.awaited_by
            arrivals = {m: number for m, number in ranked.plan.arrivals.items() if waits_at[number] != node}
            ranked.plan = replace(ranked.plan, needs=tuple(needs), arrivals=arrivals)
        super()._begin(ranked)

    def _arrive(self, message, out):
        if message in self._ranked.plan.arrivals:
            super()._arrive(message, out)


class RunsUnready(StageArbiter):
    """Starts a forward that has no input where nothing else is ready."""

    def _dispatch(self, out):
        super()._dispatch(out)
        if self.is_active and not self._running and not any(self._ready.lanes) and self.stage == 1:
            node = next((n for n, left in enumerate(self._waiting) if left > 0), None)
            if node is not None:
                self._waiting[node] = 0
                self._make_ready(node, out)
                super()._dispatch(out)


class Answers(StageArbiter):
    """Broken in what it answers: ``spoil`` changes the instructions."""

    def handle(self, event):
        return self.spoil(super().handle(event))

    def spoil(self, out):
        return out

    def validate(self):
        pass


class SendsTwice(Answers):
    def spoil(self, out):
        return [i for i in out for _ in range(1 + isinstance(i, Send))]


class SendsTooEarly(Answers):
    def handle(self, event):
        out = super().handle(event)
        early = {n: s for n, s in enumerate(self._ranked.plan.sends) if s and self._waiting[n] == -1}
        return [*out, *(Send(self.step, *s[0]) for s in early.values())]


class SendsToTheWrongStage(Answers):
    def spoil(self, out):
        return [i._replace(stage=i.stage + 1) if isinstance(i, Send) else i for i in out]


class NeverSendsGradients(Answers):
    def spoil(self, out):
        return [i for i in out if not (isinstance(i, Send) and i.message.kind == "gradient")]


class EndsEarly(Answers):
    def spoil(self, out):
        return [*out, FinishStep(self.step)] if self.is_active and self.running() == () else out


class RunsTwo(Answers):
    def _begin(self, plan):
        super()._begin(plan)
        self._capacity = 2


class RunsTwice(Answers):
    def spoil(self, out):
        return [i for i in out for _ in range(1 + isinstance(i, RunTask))]


class RunsForeignTasks(Answers):
    def spoil(self, out):
        return [i._replace(task=i.task._replace(chunk=7)) if isinstance(i, RunTask) else i for i in out]


class HoldsOneMore(Answers):
    def __init__(self, setup):
        super().__init__(replace(setup, window=setup.window + 1))


class Unordered(Answers):
    def __init__(self, setup):
        super().__init__(replace(setup, rules=replace(setup.rules, ordered=False)))


class NumbersStepsWrongly(Answers):
    def spoil(self, out):
        return [i._replace(step=i.step + 1) for i in out]


class DropsArrivals(Answers):
    """Loses the message of microbatch 1 if it arrives while a task runs."""

    def _arrive(self, event, out):
        if not (event.message.microbatch == 1 and self._running):
            super()._arrive(event, out)


class PrefersTheLatestArrival(Answers):
    """Remembers in which order messages came."""

    latest = ()

    def _arrive(self, event, out):
        self.latest = (*self.latest, event.message)
        super()._arrive(event, out)

    def key(self):
        return (super().key(), self.latest)


BROKEN = {
    ForgetsDependency: "stage 0 runs 0B1 before gradient of microbatch 1 from chunk 1 to chunk 0",
    RunsUnready: "stage 1 runs 1F0 before activation of microbatch 0",
    SendsTwice: "stage 0 sends activation of microbatch 0 from chunk 0 to chunk 1 to stage 1 twice",
    SendsTooEarly: "before it is complete",
    SendsToTheWrongStage: "stage 0 sends .* to stage 2, which waits for no such message",
    NeverSendsGradients: "stage 1 ends step 0 without having sent gradient of microbatch 0",
    EndsEarly: "stage 1 ends step 0 without",
    RunsTwo: "beside 1 other tasks",
    RunsTwice: "stage 0 runs 0F0 twice",
    RunsForeignTasks: "stage 0 runs 7F0, which is not a task of it",
    HoldsOneMore: "stage 0 runs 0F1 and holds microbatches \\[0, 1\\]: its window is 1",
    NumbersStepsWrongly: "stage 0 is in step 0 and answers RunTask",
}


@pytest.mark.parametrize(("arbiter", "what"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("reduced", [True, False])
def test_a_broken_arbiter_is_caught(arbiter, what, reduced):
    setting = simple_setting(arbiter, window=1 if arbiter is HoldsOneMore else 2)
    with pytest.raises(CheckError, match=what) as error:
        explore(setting, reduced=reduced)
    assert error.value.trace
    assert f"{len(error.value.trace):4}. stage" in str(error.value)


@pytest.mark.parametrize("arbiter", BROKEN)
def test_a_random_walk_catches_it_too(arbiter):
    setting = simple_setting(arbiter, window=1 if arbiter is HoldsOneMore else 2)
    with pytest.raises(CheckError):
        random_walk(setting, lambda n: 3 % n)


def test_accumulation_out_of_order_is_caught():
    younger_first = Hint("younger first", lambda task: (-task.microbatch,), HINTS["f-priority"].choose)
    setting = simple_setting(Unordered, hint=younger_first, rules=replace(PIPELINE_ONLY, ordered=True))
    with pytest.raises(CheckError, match="stage 1 runs 1B1 before 1B0"):
        explore(setting)


def test_a_lost_message_is_caught():
    with pytest.raises(CheckError, match="although 1F1 is ready"):
        explore(simple_setting(DropsArrivals))
    with pytest.raises(CheckError, match="deadlock: stages"):
        explore(simple_setting(DropsArrivals), demand_work=False)


def test_an_arbiter_that_remembers_the_order_of_arrivals_is_caught():
    with pytest.raises(CheckError, match="order of arrivals"):
        explore(simple_setting(PrefersTheLatestArrival, num_microbatches=3, window=3))


@pytest.mark.parametrize("forgotten", range(4))
def test_a_hint_that_drops_a_task_is_caught(forgotten):
    def choose(state, heads):
        return BF.choose(state, tuple(None if head == forgotten else head for head in heads))

    dropping = Hint("dropping", BF.rank, choose)
    with pytest.raises(CheckError, match="idles although"):
        explore(simple_setting(StageArbiter, hint=dropping))
    with pytest.raises(CheckError, match="deadlock"):
        explore(simple_setting(StageArbiter, hint=dropping), demand_work=False)


def test_a_strict_stage_that_leaves_its_row_is_caught():
    class Eager(StageArbiter):
        def __init__(self, setup):
            loose = replace(setup.consumption, choose=BF.choose, is_strict=False)
            super().__init__(replace(setup, consumption=loose))

    graph, placement = chain(2, 3), linear(2)
    gpipe = next(t for t in fitting_tables(graph, placement) if t.name == "gpipe")
    setting = Setting(
        graph=graph, placement=placement, windows=(3, 3), policies=gpipe.orders, rules=PIPELINE_ONLY, arbiter=Eager
    )
    with pytest.raises(CheckError, match="stage 1 runs 1F1, but entry 0 of its strict row is 1F0"):
        explore(setting)


def test_broken_ends_of_steps_are_caught():
    class UpdatesAlone(Answers):
        """Does not wait for the other stages before it updates."""

        def _begin(self, ranked):
            plan = ranked.plan
            verdict = next(n for n in range(plan.num_nodes) if plan.name(n) == "verdict")
            if self.stage == 1 and plan.dependents[verdict]:
                dependents, needs = list(plan.dependents), list(plan.needs)
                (update,), dependents[verdict] = dependents[verdict], ()
                needs[update] -= 1
                ranked = copy(ranked)
                ranked.plan = replace(plan, needs=tuple(needs), dependents=tuple(dependents))
            super()._begin(ranked)

    with pytest.raises(CheckError, match="stage 1 runs 1U before verdict from stage 0"):
        explore(simple_setting(UpdatesAlone, rules=StepRules()))
