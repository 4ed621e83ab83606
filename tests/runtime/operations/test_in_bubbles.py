"""A user's own operation that runs in bubbles only, which docs/schedules.md names as an example."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import Op, ScheduleRequest, build_schedule
from rrfp_jax.schedules.language import B, F, Stage, TaskOrder, rounds, stream
from rrfp_jax.schedules.registry import KNOWN, schedule
from rrfp_jax.simulation import simulate
from rrfp_jax.simulation.costs import Costs, constant
from tests.runtime.operations.deep_chunks import NUM_MICROBATCHES, assert_same_bits, pipeline, train


@pytest.fixture(autouse=True)
def _forget_schedules():
    known = dict(KNOWN)
    yield
    KNOWN.clear()
    KNOWN.update(known)


def noted(ms, p, m, run=None):
    """1F1B with a note on every microbatch, last in its row."""
    KNOWN.pop("noted", None)
    op = Op("S", after="F", ms=ms, run=run)

    @schedule("noted", ops=(op,), source="a test")
    def _(s: Stage) -> TaskOrder:
        return rounds(F.ahead(s.p - 1 - s.i), B) + stream(op).rest

    return build_schedule("noted", ScheduleRequest(num_stages=p, num_microbatches=m))


def step_ms(table, consume="ready"):
    order = Ordering(schedule=table, consume=consume).resolve(table.placement, replace(table.graph, ops=()))
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.NONE))
    timeline = simulate(arbiters, Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))).timeline
    assert {span.task for span in timeline.spans} == set(order.graph.tasks())
    return timeline.makespan_s() * 1e3


@pytest.mark.parametrize("ms", [1.0, 2.0])
def test_what_fits_into_bubbles_costs_nothing(ms):
    alone = step_ms(build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=16)))
    assert step_ms(noted(ms, 4, 16)) == pytest.approx(alone)
    assert step_ms(noted(ms, 4, 16), "strict") == pytest.approx(alone + 16 * ms)


def test_it_reads_what_is_there_and_changes_no_bit():
    seen, missed = {}, []

    def note(context):
        if context.stash is None:
            missed.append(context.task)
            return None
        leaves = [leaf for leaf in jax.tree.leaves(context.stash) if isinstance(leaf, jax.Array)]
        seen[context.step, context.task] = found = jnp.stack([jnp.abs(leaf).max() for leaf in leaves])
        return found

    plain = pipeline(schedule=build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=NUM_MICROBATCHES)))
    expected = train(plain)
    found = train(plain.reordered(Ordering(schedule=noted(0.0, 3, NUM_MICROBATCHES, note))))
    assert_same_bits(found, expected)
    assert len(seen) + len(missed) == 3 * 3 * NUM_MICROBATCHES
    assert missed, "the last stage has a backward right behind each forward"
    assert all(jnp.isfinite(values).all() for values in seen.values())
