"""Recompute as a task of its own: the same bits in less memory, and where it gains."""

from dataclasses import replace

import jax
import optax
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.compiled import CompiledChunk, Variant
from rrfp_jax.programs.remat import remat_of_chunks
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.runtime.operations import part_made, recompute, recomputed
from rrfp_jax.schedules import ScheduleRequest, TaskKind, build_schedule, chain, linear, looped
from rrfp_jax.simulation import simulate
from rrfp_jax.simulation.costs import Costs, constant
from rrfp_jax.simulation.result import peak_memory
from tests.runtime.operations.deep_chunks import (
    NUM_MICROBATCHES,
    assert_same_bits,
    make_batch,
    make_chunks,
    pipeline,
    train,
)

STAGES = 3


def table(name="1f1b", p=STAGES, m=NUM_MICROBATCHES):
    return build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m))


def bucket():
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in make_batch().items()}


# -- the table and the simulation --------------------------------------------------------------------------------------


def test_c_stands_as_far_ahead_of_its_backward_as_asked():
    row = recomputed(table("1f1b", 2, 3), 0.9).orders[0]
    assert list(map(str, row)) == ["0F0", "0F1", "0C0", "0B0", "0F2", "0C1", "0B1", "0C2", "0B2"]
    row = recomputed(table("1f1b", 2, 3), 0.9, lead=1, pairs=[(0, 1)]).orders[0]
    assert list(map(str, row)) == ["0F0", "0F1", "0B0", "0C1", "0F2", "0B1", "0B2"]


def test_where_nothing_waits_recompute_is_refused():
    with pytest.raises(ValueError, match="no backward of schedule '1f1b' comes more than 0 tasks behind"):
        recomputed(table("1f1b", 1, 4), 0.9)


@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_gaps_take_recompute(consume, num_microbatches):
    """Against a backward that computes again within itself: the path of the gradient is shorter by one forward on
    every stage but the last two, and from the first to the last backward."""
    plain = table("1f1b", 8, num_microbatches)
    within, peak = step(plain, (10.0, 20.0, 10.0), consume)
    beside, less = step(recomputed(plain, 0.9, ms=10.0), (10.0, 10.0, 10.0), consume)
    assert (within, peak) == (pytest.approx((num_microbatches + 7) * 40.0), 8)
    assert within - beside == pytest.approx(90.0)
    assert less == pytest.approx(8 * 0.1 + 0.9)


def step(plan, durations, consume):
    order = Ordering(schedule=plan, consume=consume).resolve(plan.placement, replace(plan.graph, ops=()))
    return simulated(order, durations)


def simulated(order, durations):
    costs = Costs(durations_ms=constant(durations, order.graph))
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.NONE))
    timeline = simulate(arbiters, costs).timeline
    for arbiter in arbiters:
        arbiter.validate()
    return timeline.makespan_s() * 1e3, max(peak_memory(timeline, order.graph, order.placement))


def test_a_hint_has_room_for_more_microbatches():
    whole = Ordering(hint="bf", window=2).resolve(linear(8), chain(8, 32))
    again = Ordering(hint="bf", window=2, ops=(recompute(0.9, ms=10.0),)).resolve(linear(8), chain(8, 32))
    lengths = (10.0, 10.0, 10.0)
    (slow, peak), (fast, less) = simulated(whole, lengths), simulated(again, lengths)
    assert fast < 0.5 * slow
    assert less <= peak == 2


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    return pipeline(schedule=table())


@pytest.fixture(scope="module")
def expected(plain):
    return train(plain)


def recomputed_runs(result):
    return sum(span.task.kind == "C" for span in result.timeline.spans)


@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_bits_are_the_same_in_less_memory(plain, expected, consume):
    part = part_made(make_chunks(STAGES), chain(STAGES, 1), bucket())
    assert part > 0.8
    again = plain.reordered(Ordering(schedule=recomputed(table(), part), consume=consume))
    found = train(again)
    assert_same_bits(found, expected)
    assert recomputed_runs(found[2]) == 2 * NUM_MICROBATCHES
    assert again.order.footprints is None or again.order.table.peak_activations()[0] < 1.4
    assert found[2].peak_memory_bytes[0] < expected[2].peak_memory_bytes[0]
    for peak, forecast in zip(found[2].peak_memory_bytes, again.forecast, strict=True):
        assert peak <= forecast.peak


def test_without_deterministic_mode_forwards_make_no_stash(expected):
    """A program of their own makes the outputs; the losses differ by rounding at most."""
    lean = pipeline(schedule=recomputed(table(), 0.8), deterministic=False)
    done = []
    with lean:
        lean.init(jax.random.key(0))
        lean.prepare(make_batch(), progress=lambda *counted: done.append(counted))
    assert done[-1][0] == done[-1][1]
    found = train(lean.reordered(lean.ordering))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_the_lean_forward_returns_outputs_alone():
    chunks, graph = make_chunks(STAGES), chain(STAGES, 1)
    shapes = derive_shapes(chunks, graph, bucket())
    plan = plan_chunk(0, chunks, graph, shapes, lean_forward=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    compiled = CompiledChunk(
        0, chunks, graph, [Variant(shapes[0], plan)], optimizer=optax.sgd(0.1), sharding=sharding
    ).compiled
    sizes = {name: compiled[name].memory_analysis().output_size_in_bytes for name in ("forward", "forward_lean")}
    assert plan.num_programs == 3
    assert sizes["forward_lean"] < 0.2 * sizes["forward"]


def test_remat_full_has_nothing_left_to_recompute():
    again = pipeline(schedule=recomputed(table(), 0.8), remat="full")
    with pytest.raises(ValueError, match="leave recompute out there, or take remat none or dots"):
        train(again, 1)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", ("full", "none", "dots")])
@pytest.mark.parametrize(
    "order",
    [
        {"name": "1f1b", "lead": 2},
        {"name": "gpipe"},
        {"name": "zb-h1"},
        {"name": "zb-h1", "consume": "strict", "lead": 1},
        {"hint": "bf"},
        {"hint": "bfw"},
    ],
    ids=str,
)
def test_bits_are_the_same_whatever_is_kept_and_ordered(order, remat):
    chunks = [c for c, each in enumerate(remat_of_chunks(remat, STAGES)) if each != "full"]
    options = dict(order)
    if "hint" in order:
        before, after = options | {"window": 2}, options | {"window": 2, "ops": (recompute(0.5, chunks=chunks),)}
    else:
        plan, lead = table(options.pop("name")), options.pop("lead", 0)
        pairs = [(c, m) for c in chunks for m in range(NUM_MICROBATCHES)]
        before, after = (
            options | {"schedule": plan},
            options | {"schedule": recomputed(plan, 0.5, lead=lead, pairs=pairs)},
        )
    base = pipeline(remat=remat, **before)
    again = base.reordered(Ordering(**after))
    expected, found = train(base), train(again)
    assert_same_bits(found, expected)
    assert recomputed_runs(found[2]) == len(chunks) * NUM_MICROBATCHES
    for peak, forecast in zip(found[2].peak_memory_bytes, again.forecast, strict=True):
        assert peak <= forecast.peak


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2}])
def test_bits_are_the_same_on_replicas_and_meshes(layout):
    plan = table(p=2, m=NUM_MICROBATCHES // layout.get("data", 1))
    base = pipeline(2, schedule=plan, **layout)
    again = base.reordered(Ordering(schedule=recomputed(plan, 0.8)))
    found = train(again)
    assert_same_bits(found, train(base))
    assert recomputed_runs(found[2]) == NUM_MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["bf-deep", "schedule"])
def test_bits_are_the_same_with_several_chunks_per_stage(hint):
    plan = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES))
    base = pipeline(4, placement=looped(2, 2), schedule=plan)
    more = {"schedule": recomputed(plan, 0.8)} if hint == "schedule" else {"ops": (recompute(0.8),), "hint": hint}
    found = train(base.reordered(Ordering(**more)))
    assert_same_bits(found, train(base))
    assert any(span.task.kind == TaskKind("C") for span in found[2].timeline.spans)
