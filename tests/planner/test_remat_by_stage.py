"""Rematerialisation by stage: where memory is short, each stage recomputes no more than it must."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.costs import CostBook, CostEntry, CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.costs.layer_costs import StageCosts
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.cut_problem import LayerCutProblem, MemoryBudget
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.schedules import linear

GB = 10**9
LAYER = LayerCosts(
    forward_ms=1.0,
    input_gradient_ms=1.0,
    weight_gradient_ms=1.0,
    stash_bytes=600 * 10**6,
    owed_bytes=300 * 10**6,
    fixed_bytes=GB,
    output_bytes=16 * 10**6,
    temporaries_bytes=10**8,
)
FULL = replace(LAYER, stash_bytes=16 * 10**6, input_gradient_ms=2.0)
HEAD = replace(LAYER, forward_ms=2.5, input_gradient_ms=2.5, weight_gradient_ms=2.5, stash_bytes=10**8)


def a_book(*remats: str) -> CostBook:
    types = {"none": {"layer": LAYER, "head": HEAD}, "full": {"layer": FULL, "head": HEAD}}
    return CostBook(
        layers=(*("layer",) * 16, "head"),
        entries=tuple(CostEntry(types=types[remat], remat=remat) for remat in remats),
        links=LinkCosts(latency_ms=0.2, gb_per_s=50.0),
        device_bytes=12 * GB,
    )


def test_early_stages_recompute_and_late_ones_do_not() -> None:
    space = SearchSpace(devices=4, stages=(4,), microbatches=(16,), chunks=(1,))
    both, alone = (make_plan(a_book(*remats), space).ranking for remats in (("none", "full"), ("full",)))
    best = both[0].choice
    assert both[0].forecast.step_ms < 0.95 * alone[0].forecast.step_ms
    assert best.remats == tuple(sorted(best.remats))
    assert set(best.remats) == {"none", "full"}
    assert best.peak_bytes <= 12 * GB
    plain = make_plan(a_book("none"), space).ranking
    assert not plain or both[0].forecast.step_ms <= plain[0].forecast.step_ms
    # Where memory suffices nothing is recomputed, and nothing else is tried.
    rich = make_plan(replace(a_book("none", "full"), device_bytes=200 * GB), space)
    assert {ranked.choice.remats for ranked in rich.ranking} == {("none",) * 4}


def on_stages(types: dict[str, LayerCosts], layers: tuple[str, ...], stages: int, remat: str) -> ModelCosts:
    alike = StageCosts(types=types, links=(LinkCosts(),) * stages, remat=remat)
    return ModelCosts(layers=layers, types=types, stages=(alike,) * stages)


@st.composite
def two_ways(draw: st.DrawFn, stages: int) -> tuple[ModelCosts, ModelCosts]:
    """A model run without and with rematerialisation, which takes a third more work and keeps a part of the bytes."""
    sizes = {name: (draw(st.integers(1, 9)), 100 * draw(st.integers(0, 9))) for name in "abc"}
    layers = tuple(draw(st.lists(st.sampled_from("abc"), min_size=stages, max_size=10)))
    part = draw(st.sampled_from([0.0, 0.25, 0.5]))
    types = {
        name: LayerCosts(
            forward_ms=float(work), input_gradient_ms=float(work), weight_gradient_ms=float(work), stash_bytes=stash
        )
        for name, (work, stash) in sizes.items()
    }
    again = {
        name: replace(each, input_gradient_ms=2 * each.forward_ms, stash_bytes=int(each.stash_bytes * part))
        for name, each in types.items()
    }
    return on_stages(types, layers, stages, "none"), on_stages(again, layers, stages, "full")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_cut_and_its_rematerialisation_equal_looking_at_all(data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, 3))
    ways = data.draw(two_ways(stages))
    room = MemoryBudget(
        limits=tuple(data.draw(st.lists(st.integers(1, 9000), min_size=stages, max_size=stages))),
        held=tuple(float(stages - stage) for stage in range(stages)),
    )
    number, found = ways[0].num_layers, []
    for inner, chosen in product(combinations(range(1, number), stages - 1), product((0, 1), repeat=stages)):
        counts = tuple(stop - start for start, stop in pairwise((0, *inner, number)))
        mixed = replace(ways[0], stages=tuple(ways[way].stages[stage] for stage, way in enumerate(chosen)))
        cut = CutModel(costs=mixed, counts=counts, placement=linear(stages), num_microbatches=4, split=False)
        peaks = [room.held[stage] * cut.chunk_bytes[stage].stash for stage in range(stages)]
        if all(peak <= limit for peak, limit in zip(peaks, room.limits, strict=True) if limit is not None):
            found.append(max(cut.stage_work_ms))
    if not found:
        with pytest.raises(ValueError, match="was found that fits"):
            best_cut(ways[0], linear(stages), 4, split=False, memory=room, others=ways[1:])
        return
    best = best_cut(ways[0], linear(stages), 4, split=False, memory=room, others=ways[1:])
    assert max(best.stage_work_ms) == pytest.approx(min(found))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_best_cut_lies_between_that_of_compute_and_that_of_memory(data: st.DataObject) -> None:
    """DawnPiper's theorem (arXiv 2505.05856) for two stages of 1F1B, of which the first holds two microbatches and the
    other one, and each recomputes if it must."""
    ways = data.draw(two_ways(2))
    number = ways[0].num_layers
    plain = LayerCutProblem(costs=ways[0], placement=linear(2), num_microbatches=4, split=False)
    work_ms, stash = plain.layer_work_ms[0], [ways[0].of(layer).stash_bytes for layer in range(number)]
    by_compute = [max(work_ms[:at].sum(), work_ms[at:].sum()) for at in range(1, number)]
    by_memory = [max(2 * sum(stash[:at]), sum(stash[at:])) for at in range(1, number)]
    compute = [at for at, each in enumerate(by_compute, 1) if each == min(by_compute)]
    memory = [at for at, each in enumerate(by_memory, 1) if each == min(by_memory)]
    limit = data.draw(st.integers(1, 2 * min(by_memory) + 1))
    room = MemoryBudget(limits=(limit, limit), held=(2.0, 1.0))
    try:
        cut = best_cut(ways[0], linear(2), 4, split=False, memory=room, others=ways[1:])
    except ValueError:
        return
    best_ms, optima = max(cut.stage_work_ms), []
    for at in range(1, number):
        for chosen in product((0, 1), repeat=2):
            costs = replace(ways[0], stages=tuple(ways[way].stages[stage] for stage, way in enumerate(chosen)))
            one = CutModel(costs=costs, counts=(at, number - at), placement=linear(2), num_microbatches=4, split=False)
            peaks = 2 * one.chunk_bytes[0].stash, one.chunk_bytes[1].stash
            if max(peaks) <= limit and max(one.stage_work_ms) <= best_ms * (1 + 1e-9):
                optima.append(at)
    # Layers are whole, so that either balance may lie beside a cut.
    assert any(min(*compute, *memory) - 1 <= at <= max(*compute, *memory) + 1 for at in optima)
