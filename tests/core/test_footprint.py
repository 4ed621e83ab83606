"""Memory bound by the table's own row: what it holds, what it admits, and what it refuses."""

from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import Ordering, StageSetup, ready, schedule_hint, stage_plan, strict
from rrfp_jax.core.explain import DUE, RUNNING
from rrfp_jax.core.memory import Footprint, RowMemory
from rrfp_jax.core.plan import FINISHED
from rrfp_jax.core.stage_setup import StepPlan
from rrfp_jax.schedules import ScheduleRequest, Task, TaskKind, build_schedule, chain, linear, looped, schedule_names
from tests.checking.guided import peak, random_rows
from tests.core.test_arbiter import Stage
from tests.model_checker.catalogue import PIPELINE_ONLY, small_graphs


def parse(row):
    return tuple(map(Task.parse, row.split()))


def row_memory(graph, placement, stage, row):
    plan = stage_plan(graph, placement, stage, PIPELINE_ONLY)
    return RowMemory(plan, ready(schedule_hint(row)).order(plan), graph, row)


def changes(memory):
    return [change for _, change in memory.entries]


def stage_of(row, limit, *, graph=None, placement=None, **more):
    return Stage(graph, placement, consumption=ready(schedule_hint(parse(row))), footprint=limit, **more)


# -- what a row holds --------------------------------------------------------------------------------------------------


def test_f_takes_and_b_frees():
    memory = row_memory(chain(2, 3), linear(2), 0, parse("0F0 0F1 0B0 0F2 0B1 0B2"))
    assert changes(memory) == [1, 1, -1, 1, -1, -1]
    assert memory.peak == 2


def test_with_a_split_backward_w_frees():
    memory = row_memory(chain(2, 2, split=True), linear(2), 0, parse("0F0 0F1 0I0 0I1 0W0 0W1"))
    assert changes(memory) == [1, 1, -1, -1]


def test_a_frozen_chunk_keeps_nothing():
    memory = row_memory(small_graphs(2, 2)["frozen first chunk"], linear(2), 0, parse("0F0 0F1"))
    assert (changes(memory), memory.peak, memory.has_costless) == ([], 0, True)


@pytest.mark.parametrize("name", schedule_names())
def test_the_peak_is_that_of_the_table(name):
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    for stage, (row, parts) in enumerate(zip(table.orders, table.peak_activations(), strict=True)):
        kept = table.graph.kept_per_microbatch(table.placement.chunks_of_stage[stage])
        assert (
            row_memory(table.graph, table.placement, stage, row).peak == round(parts * kept) == peak(table.graph, row)
        )


# -- what is admitted --------------------------------------------------------------------------------------------------


def test_a_forward_waits_until_memory_is_free():
    stage = stage_of("0F0 0F1 0B0 0F2 0B1 0B2", 2, graph=chain(2, 3))
    assert stage.start() == ["run 0F0"]
    assert stage.finish("0F0")[-1] == "run 0F1"
    assert stage.finish("0F1") == ["send activation of microbatch 1 from chunk 0 to chunk 1"]
    assert stage.gradient(1, 0, 1) == ["run 0B1"]
    assert stage.finish("0B1") == ["run 0F2"]


def test_room_for_one_more_lets_the_next_forward_run():
    stage = stage_of("0F0 0F1 0B0 0F2 0B1 0B2", 3, graph=chain(2, 3))
    stage.start()
    stage.finish("0F0")
    assert stage.finish("0F1")[-1] == "run 0F2"


def test_memory_that_the_row_needs_first_is_kept_for_it():
    """2F0 of the row comes before 0F2 and takes the last activation; a count of what is held alone would admit 0F2."""
    row = "0F0 0F1 2F0 2B0 0B0 0F2 2F1 2B1 0B1 2F2 2B2 0B2"
    stage = stage_of(row, 3, graph=chain(4, 3), placement=looped(2, 2))
    stage.start()
    stage.finish("0F0")
    assert stage.finish("0F1") == ["send activation of microbatch 1 from chunk 0 to chunk 1"]
    assert stage.activation(1, 2, 0) == ["run 2F0"]
    roomy = stage_of(row, 4, graph=chain(4, 3), placement=looped(2, 2))
    roomy.start()
    roomy.finish("0F0")
    assert roomy.finish("0F1")[-1] == "run 0F2"


def test_a_window_has_no_say_beside_a_footprint():
    stage = stage_of("0F0 0F1 0B0 0B1", 2, window=1)
    stage.start()
    assert stage.arbiter._mode.limit is None
    assert stage.finish("0F0")[-1] == "run 0F1"


def test_a_due_backward_frees_already():
    stage = stage_of("0F0 0B0 0F1 0B1", 1)
    stage.start()
    stage.finish("0F0")
    assert stage.gradient(1, 0, 0) == ["run 0B0"]
    assert stage.decide("0B0") == ["run 0F1"]


def test_a_step_that_lacks_pairs_holds_no_more():
    stage = stage_of("0F0 0F1 0B0 0F2 0B1 0B2", 2, graph=chain(2, 3))
    assert stage.start(absent={(0, 1), (1, 1)}) == ["run 0F0"]
    assert stage.finish("0F0")[-1] == "run 0F2"
    assert stage.finish("0F2") == ["send activation of microbatch 2 from chunk 0 to chunk 1"]


# -- the rule from its definition, in every state of random runs -------------------------------------------------------


class Run:
    """One stage with several chunks that runs drawn tasks of those that it may."""

    def __init__(self, graph, row, limit, *, weights_last=False):
        self.graph, self.row, self.limit = graph, row, limit
        plan = stage_plan(graph, looped(1, graph.num_chunks), 0, PIPELINE_ONLY)
        self.step = StepPlan(plan, ready(schedule_hint(row, weights_last=weights_last)))
        memory = RowMemory(plan, self.step.at, graph, row)
        self.footprint = Footprint(memory, limit)
        self.changes = {task: int(takes - frees) for task in row for takes, frees in [graph.memory_effect(task)]}
        self.waiting = [0] * len(row)
        self.done = set()

    def position(self, task):
        return self.step.position[self.step.plan.index[task]]

    def admits(self, task):
        return task.kind is not TaskKind.F or self.footprint.admits(self.position(task), self.waiting)

    def choices(self):
        ready_now = [t for t in self.row if t not in self.done and self.done.issuperset(self.graph.dependencies(t))]
        return [task for task in ready_now if self.admits(task)]

    def run(self, task):
        position, node = self.position(task), self.step.plan.index[task]
        self.waiting[node] = RUNNING
        self.footprint.start(position)
        self.waiting[node] = FINISHED
        self.footprint.finish(position)
        self.done.add(task)

    def most(self, first=()):
        """The most held if these run now and then everything that is left follows in the row's order."""
        order = [*first, *(task for task in self.row if task not in self.done and task not in first)]
        return max(accumulate((self.changes[t] for t in order), initial=self.footprint.held))


@st.composite
def runs(draw):
    split, name = draw(st.booleans()), draw(st.sampled_from(["chain", "frozen first chunk", "two encoders"]))
    graph = small_graphs(3, draw(st.integers(2, 4)), split=split)[name]
    (row,) = random_rows(graph, looped(1, 3), Random(draw(st.integers(0, 2**32))))
    return Run(graph, row, peak(graph, row) + draw(st.integers(0, 2)), weights_last=draw(st.booleans()))


@given(runs(), st.randoms(use_true_random=False))
def test_a_forward_is_admitted_where_the_row_still_fits_behind_it(run, random):
    while len(run.done) < len(run.row):
        assert run.most() <= run.limit
        left = [task for task in run.row if task.kind is TaskKind.F and task not in run.done]
        for task in left:
            before = run.row[: run.row.index(task)]
            held = run.footprint.held + run.changes[task]
            rest = (run.changes[t] for t in before if t not in run.done)
            assert run.admits(task) == (max(accumulate(rest, initial=held)) <= run.limit)
            if run.admits(task):
                assert run.most([task]) <= run.limit
        choices = run.choices()
        assert choices, "a single stage that is stuck"
        run.run(choices[random.randrange(len(choices))])
    assert run.footprint.held == 0


@given(runs(), st.randoms(use_true_random=False))
def test_for_what_waits_for_its_end_a_due_task_is_a_running_one(run, random):
    """As engines beside compute ask, before and after the decision about the task that runs."""
    while len(run.done) < len(run.row):
        choices = run.choices()
        task = choices[random.randrange(len(choices))]
        position, node = run.position(task), run.step.plan.index[task]
        running = run.footprint.copy()
        running.start(position)
        due = running.copy()
        due.finish(position)
        left = [run.position(t) for t in run.row if t.kind is TaskKind.F and t not in run.done and t != task]
        for asked in left[random.randrange(len(left)) :] if left else ():
            run.waiting[node] = RUNNING
            wanted = running.admits(asked, run.waiting)
            run.waiting[node] = DUE
            assert due.admits(asked, run.waiting, position) == wanted
        run.run(task)


@given(runs(), st.randoms(use_true_random=False))
def test_if_a_forward_is_not_admitted_none_behind_it_is_that_takes_memory(run, random):
    while len(run.done) < len(run.row):
        forwards = [task for task in run.row if task.kind is TaskKind.F and task not in run.done]
        costly = [run.admits(task) for task in forwards if run.graph.has_backward(task.chunk)]
        assert costly == sorted(costly, reverse=True)
        assert all(run.admits(task) for task in forwards if not run.graph.has_backward(task.chunk))
        next_entry = next(task for task in run.row if task not in run.done)
        assert run.admits(next_entry)
        choices = run.choices()
        run.run(choices[random.randrange(len(choices))])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_less_than_the_row_holds_is_refused():
    with pytest.raises(ValueError, match=r"footprint of stage 0 is 1 activations and its table holds 2: allow at leas"):
        stage_of("0F0 0F1 0B0 0B1", 1)


def test_a_row_that_does_not_name_every_task_is_refused():
    with pytest.raises(ValueError, match=r"the row of stage 0 lacks 0F1, 0B1, and memory follows it: name every task"):
        stage_of("0F0 0B0", 2)


def test_a_footprint_needs_a_table_that_ranks():
    consumption = strict(parse("0F0 0B0"))
    with pytest.raises(ValueError, match="footprint need a table as hint"):
        StageSetup(chain(2, 1), linear(2), 0, consumption=consumption, window=1, footprint=3)


def test_a_window_below_what_the_table_holds_is_refused():
    table = build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=8))
    with pytest.raises(ValueError, match="window 3 of stage 0 is less than the 4 microbatches that schedule '1f1b'"):
        Ordering(schedule=table, window=3).fitted(table.placement, table.graph)
    order = Ordering(schedule=table, window=(4, 3, 2, 2)).resolve(table.placement, table.graph)
    assert order.footprints == (4, 3, 2, 2)
    assert Ordering(schedule=table).resolve(table.placement, table.graph).footprints == (4, 3, 2, 1)
    assert Ordering(schedule=table, footprint=False).resolve(table.placement, table.graph).footprints is None


def test_replicas_have_the_same_footprints():
    table = build_schedule("zb-v", ScheduleRequest(num_stages=2, num_microbatches=4))
    order = Ordering(schedule=table).resolve(table.placement, table.graph, num_replicas=2)
    once = Ordering(schedule=table).resolve(table.placement, table.graph)
    assert order.footprints == once.footprints * 2
    assert len(order.arbiters(PIPELINE_ONLY)) == 4
