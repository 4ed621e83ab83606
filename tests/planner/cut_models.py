"""Small models with costs drawn by Hypothesis, and every way to cut them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import strategies as st

from rrfp_jax.costs import CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.costs.forecast import Reach, forecast_stage
from rrfp_jax.costs.layer_costs import StageCosts
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.schedules import Placement, linear, looped, v_shaped, waves

MICROBATCHES = 4
PLACEMENTS = {
    "linear": [linear(stages) for stages in (1, 2, 3, 4)],
    "looped": [looped(stages, 2) for stages in (2, 3, 4)],
    "v": [v_shaped(stages) for stages in (2, 3, 4)],
    "waves": [waves(2, 2)],
}

_tenths = st.integers(0, 60).map(lambda number: number / 10)
_kilobytes = st.integers(0, 40).map(lambda number: 1000 * number)


@st.composite
def layers(draw: st.DrawFn) -> LayerCosts:
    """One type."""
    return LayerCosts(
        forward_ms=draw(_tenths) + 0.1,
        input_gradient_ms=draw(_tenths),
        weight_gradient_ms=draw(_tenths),
        fixed_bytes=draw(_kilobytes),
        stash_bytes=draw(_kilobytes),
        owed_bytes=draw(_kilobytes),
        kept_bytes=draw(_kilobytes),
        temporaries_bytes=draw(_kilobytes),
        more_temporaries_bytes=draw(_kilobytes),
        split_temporaries_bytes=draw(st.none() | _kilobytes),
        output_bytes=draw(_kilobytes),
    )


@st.composite
def models(draw: st.DrawFn, chunks: int, stages: int) -> ModelCosts:
    """Of two types in any order, with at least as many layers as there are chunks; sometimes with an end, and sometimes
    on stages that differ in speed, or in the way in which they run layers."""
    names = draw(st.lists(st.sampled_from("ab"), min_size=chunks, max_size=12))
    ends = draw(st.sets(st.integers(0, len(names) - 2), max_size=min(1, chunks - 1))) if len(names) > 1 else set()
    types = {"a": draw(layers()), "b": draw(layers())}
    ways = [types, {name: replace(draw(layers()), output_bytes=each.output_bytes) for name, each in types.items()}]
    ways.append({name: each.at_speed(draw(st.sampled_from([0.5, 1.5]))) for name, each in types.items()})
    of_stages = draw(st.just([]) | st.lists(st.sampled_from(ways), min_size=stages, max_size=stages))
    return ModelCosts(
        layers=tuple(names),
        types=types,
        stages=tuple(StageCosts(types=each, links=(LinkCosts(),) * stages) for each in of_stages),
        ends=frozenset(ends),
        task_ms=draw(st.sampled_from([0.0, 0.3])),
    )


@st.composite
def rooms(draw: st.DrawFn, placement: Placement) -> MemoryBudget:
    """Limits from plenty to too little, for either way to count what is held."""
    stages, chunks = placement.num_stages, placement.num_chunks
    limits = draw(st.lists(st.integers(20_000, 1_500_000) | st.none(), min_size=stages, max_size=stages))
    reaches = draw(st.just(()) | st.tuples(*(_reaches(len(own)) for own in placement.chunks_of_stage)))
    if draw(st.booleans()):
        held = draw(st.lists(st.integers(0, MICROBATCHES), min_size=chunks, max_size=chunks))
        return MemoryBudget(limits=tuple(limits), held=tuple(map(float, held)), reaches=reaches)
    most = 2 * MICROBATCHES
    footprints = draw(st.lists(st.integers(1, most), min_size=stages, max_size=stages))
    return MemoryBudget(limits=tuple(limits), footprints=tuple(footprints), reaches=reaches)


@st.composite
def _reaches(draw: st.DrawFn, chunks: int) -> tuple[Reach, ...]:
    """For a stage of so many chunks: of each one, or of all together."""
    numbers = st.integers(1, 2 * MICROBATCHES)
    if draw(st.booleans()):
        return (Reach(chunks=tuple(range(chunks)), number=draw(numbers)),)
    return tuple(Reach(chunks=(place,), number=draw(numbers)) for place in range(chunks))


def every_cut(costs: ModelCosts, placement: Placement, *, split: bool) -> Iterator[CutModel]:
    """All that there are."""
    layers = costs.num_layers
    for inner in combinations(range(1, layers), placement.num_chunks - 1):
        bounds = list(pairwise((0, *inner, layers)))
        if all(end + 1 in inner or end == layers - 1 for end in costs.ends):
            yield CutModel(
                costs=costs,
                counts=tuple(stop - start for start, stop in bounds),
                placement=placement,
                num_microbatches=MICROBATCHES,
                split=split,
            )


def largest_ms(cut: CutModel) -> float:
    """The work of the fullest stage, its tasks' own time included."""
    kinds = 3 if cut.split else 2
    return max(
        work_ms / MICROBATCHES + kinds * len(chunks) * cut.costs.task_ms
        for work_ms, chunks in zip(cut.stage_work_ms, cut.placement.chunks_of_stage, strict=True)
    )


def fits(cut: CutModel, room: MemoryBudget) -> bool:
    """By the forecast of the stages' memory."""
    for stage, (chunks, limit) in enumerate(zip(cut.placement.chunks_of_stage, room.limits, strict=True)):
        if limit is not None and _peak(cut, room, stage, chunks) > limit:
            return False
    return True


def _peak(cut: CutModel, room: MemoryBudget, stage: int, chunks: tuple[int, ...]) -> float:
    sizes = [cut.chunk_bytes[chunk] for chunk in chunks]
    reaches = room.reaches[stage] if room.reaches else ()
    if room.footprints:
        footprint = room.footprints[stage]
        return forecast_stage(sizes, MICROBATCHES, MICROBATCHES, reaches=reaches, footprint=footprint).peak
    reached = min(MICROBATCHES, max((reach.number for reach in reaches), default=MICROBATCHES))
    lasting = sum(each.fixed + reached * each.inputs for each in sizes)
    held = sum(
        room.held[chunk] * max(0, each.per_microbatch - each.inputs) for chunk, each in zip(chunks, sizes, strict=True)
    )
    return lasting + held + max(each.temporaries + each.outputs for each in sizes)
