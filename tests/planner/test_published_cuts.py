"""Cuts beside times that others have measured: Vocabulary Parallelism (arXiv 2411.05288), 1F1B on 8 x A100."""

import csv
import random
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear
from rrfp_jax.simulation import simulate

STAGES, MICROBATCHES, LAYERS = 8, 128, 32
TIMES = Path(__file__).parents[2] / "experiments" / "paper" / "published" / "vocabulary_parallelism.csv"
REDISTRIBUTED = {
    32000: (4, 4, 4, 4, 4, 4, 4, 4),
    64000: (4, 4, 4, 4, 4, 4, 5, 3),
    128000: (4, 4, 4, 4, 4, 5, 5, 2),
    256000: (4, 4, 4, 5, 5, 5, 5, 0),
}
"""Layers of each stage beside embedding and head, as the paper's artefact redistributes them."""


def rows() -> list[dict[str, str]]:
    lines = TIMES.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def stage_times(row: dict[str, str]) -> list[tuple[float, float]]:
    """Forward and backward of each stage, in milliseconds."""
    forward, backward = ([float(each) / 1e3 for each in row[name].split()] for name in ("forward_us", "backward_us"))
    return list(zip(forward, backward, strict=True))


def layer(forward_ms: float, backward_ms: float) -> LayerCosts:
    return LayerCosts(forward_ms=max(0.0, forward_ms), input_gradient_ms=max(0.0, backward_ms), weight_gradient_ms=0.0)


def step_ms(cut: CutModel) -> float:
    """One step of strict 1F1B."""
    table = build_schedule("1f1b", ScheduleRequest(num_stages=STAGES, num_microbatches=MICROBATCHES))
    order = Ordering(schedule=table, consume="strict").resolve(cut.placement, cut.graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL))
    return simulate(arbiters, cut.simulated_costs(), machine=cut.machine).timeline.makespan_s() * 1e3


def cut_into(costs: ModelCosts, counts: tuple[int, ...]) -> CutModel:
    return CutModel(costs=costs, counts=counts, placement=linear(STAGES), num_microbatches=MICROBATCHES, split=False)


def cases(*cuts: str) -> list[Any]:
    """The rows of these cuts; most of them take long."""
    return [
        pytest.param(
            row,
            id=f"{row['cut']}-{row['vocabulary']}",
            marks=() if row["vocabulary"] == "128000" else pytest.mark.slow,
        )
        for row in rows()
        if row["cut"] in cuts
    ]


@pytest.mark.parametrize("row", cases("base", "redistribution"))
def test_the_measured_iteration_follows_from_the_stages_times(row: dict[str, str]) -> None:
    types = {str(stage): layer(*times) for stage, times in enumerate(stage_times(row))}
    cut = cut_into(ModelCosts(layers=tuple(types), types=types), (1,) * STAGES)
    assert step_ms(cut) == pytest.approx(float(row["iteration_ms"]), rel=0.02)


@pytest.mark.parametrize("row", cases("base"))
def test_the_best_cut_is_never_behind_the_redistribution_of_the_paper(row: dict[str, str]) -> None:
    times, share = stage_times(row), LAYERS // STAGES
    inner = [sum(each) / (STAGES - 2) for each in zip(*times[1:-1], strict=True)]
    types = {
        "layer": layer(*(each / share for each in inner)),
        "embedding": layer(*(whole - each for whole, each in zip(times[0], inner, strict=True))),
        "head": layer(*(whole - each for whole, each in zip(times[-1], inner, strict=True))),
    }
    costs = ModelCosts(layers=("embedding", *["layer"] * LAYERS, "head"), types=types)
    found = best_cut(costs, linear(STAGES), MICROBATCHES, split=False)
    vocabulary = int(row["vocabulary"])
    first, *middle, last = REDISTRIBUTED[vocabulary]
    theirs_ms, ours_ms = step_ms(cut_into(costs, (first + 1, *middle, last + 1))), step_ms(found)
    assert ours_ms <= theirs_ms * (0.92 if vocabulary == 128000 else 1)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_with_other_costs_it_is_not_behind_any_of_the_redistributions(seed: int) -> None:
    draw = random.Random(seed).uniform
    heads = draw(0, 8)
    types = {
        "layer": layer(1.0, draw(1.5, 2.3)),
        "embedding": layer(draw(0, 0.6), draw(0, 0.6)),
        "head": layer(heads, heads * draw(1.5, 2.3)),
    }
    costs = ModelCosts(layers=("embedding", *["layer"] * LAYERS, "head"), types=types)
    found_ms = step_ms(best_cut(costs, linear(STAGES), MICROBATCHES, split=False))
    for first, *middle, last in REDISTRIBUTED.values():
        assert found_ms <= step_ms(cut_into(costs, (first + 1, *middle, last + 1))) * (1 + 1e-9)
