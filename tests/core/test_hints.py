"""Hints rank ready tasks; BF is the RRFP paper's Algorithm 1, to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import HINTS, hint_by_name, ready, schedule_hint, strict
from rrfp_jax.core.plan import LANE, StepRules, stage_plan
from rrfp_jax.schedules import Placement, Task, TaskKind, chain
from tests.model_checker.catalogue import PIPELINE_ONLY

NUM_CHUNKS, NUM_MICROBATCHES = 3, 4
ONE_STAGE = Placement((0,) * NUM_CHUNKS)
FUSED = chain(NUM_CHUNKS, NUM_MICROBATCHES)
SPLIT = chain(NUM_CHUNKS, NUM_MICROBATCHES, split=True)


class Chooser:
    """Applies a hint to sets of ready tasks, as an arbiter does that has no window."""

    def __init__(self, consumption, graph=FUSED, rules=PIPELINE_ONLY):
        self.plan = stage_plan(graph, ONE_STAGE, 0, rules)
        self.order = consumption.order(self.plan)
        self.consumption, self.state = consumption, consumption.initial

    def choose(self, *tasks):
        heads = [None] * 4
        for position, node in reversed(list(enumerate(self.order))):
            task = self.plan.tasks[node]
            if task in tasks:
                heads[LANE[task.kind]] = position
        position, state = self.consumption.choose(self.state, tuple(heads))
        if position is None:
            return None
        self.state = state
        return self.plan.tasks[self.order[position]]

    def run(self, *texts):
        """Which tasks run, one after another, if all are ready from the start."""
        left = [Task.parse(t) for t in texts]
        done = []
        while left:
            done.append(self.choose(*left))
            left.remove(done[-1])
        return " ".join(map(str, done))


def algorithm_1(ready_sets):
    """RRFP, appendix A: rounds in which one B runs if any is ready, and then one F if any is ready.

    A generator that yields the task to run, given a function that tells what is ready at the time of asking; the stage
    waits by not asking. W where neither is ready is BFW.
    """

    def best(kinds, rank):
        candidates = [t for t in ready_sets() if t.kind in kinds]
        return min(candidates, key=rank, default=None)

    while True:
        backward = best((TaskKind.B, TaskKind.I), lambda t: (-t.chunk, t.microbatch))
        if backward is not None:
            yield backward
        forward = best((TaskKind.F,), lambda t: (t.chunk, t.microbatch))
        if forward is not None:
            yield forward
        if backward is None and forward is None:
            yield best((TaskKind.W,), lambda t: (t.microbatch, -t.chunk))


def all_tasks(graph):
    return st.lists(st.sampled_from(list(graph.tasks())), unique=True)


@pytest.mark.parametrize("graph", [FUSED, SPLIT], ids=["fused", "split"])
def test_bf_is_algorithm_1(graph):
    """Tasks become ready at random times; wherever anything is ready, both run the same task."""

    @given(st.lists(all_tasks(graph), max_size=12))
    def compare(arrivals):
        ready_now, seen = [], set()
        chooser = Chooser(ready(HINTS["bf"]), graph)
        reference = algorithm_1(lambda: ready_now)
        for batch in [*arrivals, *[[]] * 40]:
            ready_now += [t for t in batch if t not in seen]
            seen |= set(batch)
            if ready_now:
                chosen = chooser.choose(*ready_now)
                assert chosen == next(reference)
                ready_now.remove(chosen)

    compare()


def test_bf_alternates():
    assert Chooser(ready(HINTS["bf"])).run("0F0", "0F1", "0B2", "0B3", "1F0") == "0B2 0F0 0B3 0F1 1F0"


def test_bf_starts_a_round_anew_where_no_forward_followed():
    chooser = Chooser(ready(HINTS["bf"]))
    assert [chooser.choose(Task.parse(t)) for t in ("0B0", "0B1")] == [Task.parse("0B0"), Task.parse("0B1")]
    assert chooser.choose(Task.parse("0F2"), Task.parse("0B2")) == Task.parse("0F2")
    assert chooser.choose(Task.parse("0F3"), Task.parse("0B2")) == Task.parse("0B2")


def test_fb_alternates_the_other_way_round():
    assert Chooser(ready(HINTS["fb"])).run("0F0", "0F1", "0B2", "0B3", "1F0") == "0F0 0B2 0F1 0B3 1F0"


def test_priorities_do_not_alternate():
    tasks = ("0F0", "0F1", "0B2", "0B3", "1F0")
    assert Chooser(ready(HINTS["b-priority"])).run(*tasks) == "0B2 0B3 0F0 0F1 1F0"
    assert Chooser(ready(HINTS["f-priority"])).run(*tasks) == "0F0 0F1 1F0 0B2 0B3"


@pytest.mark.parametrize("name", ["bf", "fb", "b-priority", "f-priority"])
def test_smaller_chunk_first_in_forwards_and_larger_in_backwards(name):
    ran = Chooser(ready(HINTS[name])).run("2F0", "0F2", "0F1", "0B0", "2B2", "2B1").split()
    assert [t for t in ran if "F" in t] == ["0F1", "0F2", "2F0"]
    assert [t for t in ran if "B" in t] == ["2B1", "2B2", "0B0"]


def test_bf_deep_prefers_the_larger_chunk_in_forwards_too():
    ran = Chooser(ready(HINTS["bf-deep"])).run("2F0", "0F2", "0F1", "2F3", "0B0", "2B2").split()
    assert ran == ["2B2", "2F0", "0B0", "2F3", "0F1", "0F2"]


@pytest.mark.parametrize("name", HINTS)
def test_weight_gradients_fill_gaps_oldest_first(name):
    chooser = Chooser(ready(HINTS[name]), SPLIT)
    assert chooser.run("0W1", "2W0", "1W0", "0F3", "2I2").split()[2:] == ["2W0", "1W0", "0W1"]


@pytest.mark.parametrize("name", HINTS)
def test_the_end_of_the_step_comes_last_r_as_chunks_complete(name):
    rules = StepRules()
    chooser = Chooser(ready(HINTS[name]), rules=rules)
    assert chooser.run("2U", "0U", "1R", "2R", "0B3", "0R") == "0B3 2R 1R 0R 0U 2U"


@pytest.mark.parametrize("name", HINTS)
def test_nothing_ready_nothing_chosen_and_the_state_stays(name):
    chooser = Chooser(ready(HINTS[name]))
    chooser.choose(Task.parse("0B0"))
    before = chooser.state
    assert chooser.choose() is None
    assert chooser.state == before


def test_schedule_hint_follows_the_table_and_ranks_the_rest_last():
    row = [Task.parse(t) for t in ("1F0", "0B3", "0F0")]
    chooser = Chooser(ready(schedule_hint(row)), rules=StepRules())
    assert chooser.run("0F1", "0F0", "0B3", "2F0", "1F0", "0R") == "1F0 0B3 0F0 0F1 2F0 0R"


def test_schedule_hint_skips_what_is_absent():
    row = tuple(Task.parse(t) for t in ("0F0", "0F1", "0F2"))
    assert Chooser(ready(schedule_hint(row))).run("0F2", "0F1") == "0F1 0F2"


def test_strict_waits_for_the_next_entry():
    row = tuple(Task.parse(t) for t in ("0F0", "0F1", "0B0"))
    chooser = Chooser(strict(row))
    assert chooser.choose(Task.parse("0F1"), Task.parse("0B0")) is None
    assert chooser.choose(Task.parse("0F0"), Task.parse("0B0")) == Task.parse("0F0")
    assert chooser.choose(Task.parse("0B0")) is None
    assert chooser.choose(Task.parse("0B0"), Task.parse("0F1")) == Task.parse("0F1")


def test_strict_ends_with_reductions_then_updates():
    order = Chooser(strict(tuple(FUSED.tasks())), rules=StepRules())
    assert [str(order.plan.tasks[n]) for n in order.order][-6:] == ["2R", "1R", "0R", "0U", "1U", "2U"]


def test_hints_are_found_by_name():
    assert hint_by_name("fb") is HINTS["fb"]
    with pytest.raises(ValueError, match=r"hint 'fastest' is unknown: choose one of bf, .*, fb, .*, schedule"):
        hint_by_name("fastest")
