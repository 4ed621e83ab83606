"""Parameters cut over a stage's devices, and whole only around the tasks that use them."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.arbitration import Agreement, Ordering, StepRules
from rrfp_jax.operations import gathered, most_gathered, recomputed
from rrfp_jax.runtime.evaluating import EvaluationShapes
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, build_schedule, with_operations
from rrfp_jax.simulation import simulate
from rrfp_jax.simulation.costs import Costs, constant
from rrfp_jax.simulation.result import peak_memory
from rrfp_jax.tasks import Op, Task, looped
from rrfp_jax.testing import DelayedStage
from tests.environment import of_child
from tests.operations.deep_chunks import NUM_MICROBATCHES, assert_same_bits, make_batch, pipeline, train

CHUNKS_PER_STAGE = 3


def table(name="interleaved-1f1b", p=4, m=16, **more):
    if name == "interleaved-1f1b":
        more = {"chunks_per_stage": CHUNKS_PER_STAGE} | more
    return build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m, **more))


def whole_at_once(timeline):
    """The most chunks of a stage whose parameters are whole, from the start of a gather to the end of a drop."""
    most = 0
    for stage in range(timeline.num_stages):
        changes = []
        for span in timeline.beside():
            if span.stage == stage and span.task.kind[0] == "G":
                changes.append((span.start_s, 1, span.task.chunk))
            elif span.stage == stage:
                changes.append((span.end_s, -1, span.task.chunk))
        counts = {}
        for _, change, chunk in sorted(changes):
            counts[chunk] = counts.get(chunk, 0) + change
            most = max(most, sum(count > 0 for count in counts.values()))
    return most


# -- the table and the simulation --------------------------------------------------------------------------------------


def test_gathers_stand_so_many_tasks_ahead_and_wait_for_drops():
    plan = gathered(table("1f1b", 2, 2), prefetch=1)
    row = list(map(str, plan.orders[0]))
    assert row == ["0GF0", "0GF1", "0F0", "0DF0", "0GB0", "0F1", "0DF1", "0GB1", "0B0", "0DB0", "0B1", "0DB1"]
    waits = {str(task): list(map(str, plan.graph.dependencies(task))) for task in plan.orders[0]}
    assert waits["0GB0"] == ["0DF0"]
    assert waits["0DB0"] == ["0B0", "0DF1"]
    assert "0GB0" in waits["0B0"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_chunks_are_whole_than_are_prefetched_and_one(prefetch):
    assert most_gathered(gathered(table(), prefetch=prefetch)) == [min(prefetch + 1, CHUNKS_PER_STAGE)] * 4


def run(plan, consume, jitter=0.0):
    order = Ordering(schedule=plan, consume=consume).resolve(plan.placement, replace(plan.graph, ops=()))
    durations = constant((10.0, 10.0, 10.0), order.graph)
    if jitter:
        durations = durations * np.random.default_rng(1).lognormal(0, jitter, durations.shape)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.NONE))
    timeline = simulate(arbiters, Costs(durations_ms=durations)).timeline
    for arbiter in arbiters:
        arbiter.validate()
    assert {span.task for span in timeline.spans if span.task.microbatch >= 0} == set(order.graph.tasks())
    peaks = peak_memory(timeline, order.graph, order.placement)
    assert all(held <= peak + 1e-9 for held, peak in zip(peaks, plan.peak_activations(), strict=True))
    return timeline


@pytest.mark.one_in(3)
@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "1f1b", "zb-v", "zb-h1"])
def test_a_prefetch_of_one_task_hides_gathers_that_take_no_longer_than_it(name, consume):
    plain = table(name)
    alone = run(plain, consume).makespan_s()
    hidden = run(gathered(plain, prefetch=1, ms=8.0, part=0.5), consume).makespan_s()
    late = run(gathered(plain, prefetch=0, ms=8.0, part=0.5), consume).makespan_s()
    assert hidden == pytest.approx(alone)
    assert late > 1.3 * alone


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_bound_holds_where_readiness_leaves_the_row(prefetch):
    timeline = run(gathered(table(), prefetch=prefetch, ms=4.0), "ready", jitter=0.5)
    assert whole_at_once(timeline) <= prefetch + 1


def test_the_row_that_gathers_wait_along_is_needed():
    plan = gathered(table("1f1b", 2, 2))
    with pytest.raises(ValueError, match="ops that wait for tasks of a row need that row"):
        Ordering(hint="bf", ops=plan.graph.ops)
    with pytest.raises(ValueError, match="prefetch is -1: give 0 or more"):
        gathered(table("1f1b", 2, 2), prefetch=-1)


def test_an_anchor_on_another_stage_is_refused():
    op = Op("G", before="F", lane="net", waits=frozenset({(Task.parse("0G1"), Task.parse("1F0"))}))
    with pytest.raises(ValueError, match="0G1 waits for 1F0, which is not on its stage"):
        with_operations(table("1f1b", 2, 2), [op])


def test_a_stage_that_spans_processes_refuses():
    plan = gathered(table("1f1b", 2, 2))
    order = Ordering(schedule=plan).resolve(plan.placement, replace(plan.graph, ops=()))
    with pytest.raises(ValueError, match="runs beside compute, and stage 0 spans 2 processes"):
        order.arbiters(StepRules(), members={0: (0, 2)})


# -- for real ----------------------------------------------------------------------------------------------------------


def one_f_one_b():
    return table("1f1b", 2, NUM_MICROBATCHES)


@pytest.fixture(scope="module")
def plain():
    return pipeline(2, schedule=one_f_one_b(), tensor=2)


@pytest.fixture(scope="module")
def expected(plain):
    return train(plain)


@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_bits_are_the_same_with_parameters_cut(plain, expected, consume):
    again = plain.reordered(Ordering(schedule=gathered(one_f_one_b()), consume=consume))
    found = train(again)
    assert_same_bits(found, expected)
    cut = [leaf for _, state in again._model.by_chunk(again._state) for leaf in jax.tree.leaves(state.params)]
    assert all(leaf.addressable_shards[0].data.nbytes * 2 == leaf.nbytes for leaf in cut)


def test_tables_with_gathers_and_recompute_need_no_jax():
    program = """
import sys
from rrfp_jax.operations import gathered, recomputed
from rrfp_jax.schedules import ScheduleRequest, build_schedule, with_operations
gathered(recomputed(build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=4)), 0.9))
assert "jax" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", program], env=of_child(), check=False).returncode == 0


def test_a_stage_with_one_device_has_nothing_to_gather():
    with pytest.raises(ValueError, match="gathered cuts parameters over the devices of a stage, and every stage has"):
        pipeline(2, schedule=gathered(one_f_one_b()))


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parameters_that_are_whole_at_once(prefetch, consume, delayed):
    plan = table(p=2, m=NUM_MICROBATCHES)
    base = pipeline(6, placement=looped(2, 3), schedule=plan, tensor=2)
    rng = np.random.default_rng(0)
    options = RuntimeOptions(
        wrap_stage=(lambda stage: DelayedStage(stage, lambda step, task: rng.uniform(0, 1e-3))) if delayed else None
    )
    again = base.reordered(Ordering(schedule=gathered(plan, prefetch=prefetch), consume=consume), options=options)
    found = train(again)
    assert_same_bits(found, train(base))
    assert whole_at_once(found[2].timeline) <= prefetch + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "data": 2}])
def test_bits_are_the_same_with_recompute_and_replicas(name, layout):
    plan = table(name, 2, NUM_MICROBATCHES // layout.get("data", 1))
    base = pipeline(2, schedule=plan, **layout)
    again = base.reordered(Ordering(schedule=gathered(recomputed(plan, 0.8), prefetch=1)))
    found = train(again)
    assert_same_bits(found, train(base))
    assert {"GC", "DC", "GU", "DU"} <= {span.task.kind for span in found[2].timeline.beside()}


@pytest.mark.slow
def test_a_step_that_lacks_pairs_gathers_for_the_rest():
    plan = one_f_one_b()
    base = pipeline(2, schedule=plan, tensor=2)
    again = base.reordered(Ordering(schedule=gathered(plan)))
    losses = []
    for each in (base, again):
        with each:
            state = each.init(jax.random.key(0))
            for _ in range(2):
                state, metrics = each.step(state, make_batch(), absent=[(0, 1), (1, 1), (0, 4), (1, 4)])
                losses.append(metrics.result().loss)
    assert losses[:2] == losses[2:]


def test_states_that_are_asked_for_while_parameters_are_cut_can_be_restored():
    gathering = Ordering(schedule=gathered(one_f_one_b()))
    base = pipeline(2, schedule=one_f_one_b(), tensor=2)
    first, second = base.reordered(gathering), base.reordered(gathering)
    with first:
        state = first.init(jax.random.key(0))
        state, _ = first.step(state, make_batch())
        kept = ("params", "optimizer_state", "accumulators")
        states = [
            replace(held, **jax.tree.map(jnp.copy, {name: getattr(held, name) for name in kept}), derived=None)
            for _, held in first.chunk_states(state)
        ]
        state, expected = first.step(state, make_batch())
        loss = expected.result().loss
    with second:
        state = second.restore(states, 1)
        assert second.step(state, make_batch())[1].result().loss == loss


def test_what_needs_whole_parameters_or_cuts_them_itself_is_refused_beside_gathered():
    plan = gathered(one_f_one_b())
    with pytest.raises(ValueError, match="operation 'GF' cuts parameters that fsdp 2 cuts already: leave"):
        pipeline(2, schedule=plan, mesh={"fsdp": 2})
    each = pipeline(2, schedule=plan, tensor=2)
    each.init(jax.random.key(0))
    shapes = EvaluationShapes(buckets=[{name: leaf[0] for name, leaf in make_batch().items()}])
    with each, pytest.raises(ValueError, match="leaves parameters cut between steps, which an evaluation needs whole"):
        each.prepare(make_batch(), evaluation=shapes)
