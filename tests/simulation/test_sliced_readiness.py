"""Readiness on sequences in slices: with equal slices and without a table it beats the published order, whose stages
wait for the longest slice."""

from statistics import fmean

import numpy as np
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import Costs, simulate

QUIET = StepRules(updates=False, agreement=Agreement.NONE)
SLICES, SHARE = 4, 0.5
"""Number of slices, and the part of a sequence's time that attention takes."""
WINDOW = {"window": 4}


def makespan(p: int, m: int, noise: float = 0.0, seed: int = 0, **words: object) -> float:
    """The time of a step in forwards of a whole sequence; a backward takes twice as long as its forward."""
    ends = [(1 - SHARE) * part + SHARE * part**2 for part in np.linspace(0, 1, SLICES + 1)]
    parts = np.tile(np.diff(ends), p)[None, :, None, None]
    times = parts * np.ones((1, p * SLICES, m, 3)) * [1.0, 2.0, 0.0]
    drawn = times * np.exp(noise * np.random.default_rng(seed).normal(size=times.shape) - noise**2 / 2)
    table = build_schedule("seq1f1b", ScheduleRequest(num_stages=p, num_microbatches=m, slices=SLICES))
    asked = Ordering(**({"schedule": table, "consume": "strict"} if words.get("strict") else WINDOW))
    arbiters = asked.resolve(table.placement, table.graph).arbiters(QUIET)
    return simulate(arbiters, Costs(durations_ms=drawn)).timeline.makespan_s() * 1e3


@pytest.mark.parametrize(("p", "m", "strict", "ready"), [(8, 16, 72.09, 60.88), (4, 8, 34.97, 27.09)])
def test_a_window_of_four_sequences(p: int, m: int, strict: float, ready: float) -> None:
    assert makespan(p, m, strict=True) == pytest.approx(strict, abs=0.005)
    assert makespan(p, m) == pytest.approx(ready, abs=0.006)


def test_noise() -> None:
    strict = fmean(makespan(8, 16, 0.3, seed, strict=True) for seed in range(5))
    ready = fmean(makespan(8, 16, 0.3, seed) for seed in range(5))
    assert (round(strict, 1), round(ready, 1)) == (78.3, 68.2)
