"""Jitter: its statistics, its reproducibility, and the sleeps that depend on the order."""

import numpy as np
import pytest

from rrfp_jax.schedules import chain, linear, looped
from rrfp_jax.simulation import PAPER_LEVELS, Costs, InjectedSleeps, bimodal, lognormal, paper, simulate, straggler
from tests.simulation.helpers import by_hint, starts_ms

MANY = np.full((50, 8, 64, 3), 10.0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_lognormal_keeps_the_mean_and_spreads_by_sigma(sigma):
    factors = lognormal(MANY, sigma, rng()) / MANY
    assert factors.mean() == pytest.approx(1, abs=0.02)
    assert np.log(factors).std() == pytest.approx(sigma, rel=0.02)


def test_no_jitter_changes_nothing():
    assert (lognormal(MANY, 0.0, rng()) == MANY).all()
    assert (bimodal(MANY, 0.0, 4.0, rng()) == MANY).all()
    assert not paper(PAPER_LEVELS["J0"], MANY.shape, rng()).factors.any()


def test_bimodal_slows_this_share_by_this_factor():
    factors = bimodal(MANY, 0.1, 4.0, rng()) / MANY
    assert set(np.unique(factors)) == {1.0, 4.0}
    assert (factors == 4).mean() == pytest.approx(0.1, abs=0.005)


def test_a_straggler_slows_all_chunks_of_its_stage_always():
    slowed = straggler(MANY, looped(4, 2), 1, 2.5) / MANY
    assert (slowed[:, [1, 5]] == 2.5).all()
    assert (slowed[:, [0, 2, 3, 4, 6, 7]] == 1).all()


@pytest.mark.parametrize("level", ["J1", "J2", "J3"])
def test_paper_levels_inject_with_their_probability_and_size(level):
    spec = PAPER_LEVELS[level]
    factors = paper(spec, MANY.shape, rng()).factors
    assert factors.shape == (50, 8, 64, 2)
    injected = factors[factors > 0]
    assert len(injected) / factors.size == pytest.approx(spec.probability, abs=0.01)
    assert injected.min() >= 0.5 * spec.alpha
    assert injected.max() <= 1.5 * spec.alpha
    assert injected.mean() == pytest.approx(spec.alpha, rel=0.01)


@pytest.mark.parametrize(
    "draw", [lambda g: lognormal(MANY, 0.5, g), lambda g: paper(PAPER_LEVELS["J3"], MANY.shape, g)]
)
def test_the_seed_decides(draw):
    def numbers(seed: int) -> np.ndarray:
        drawn = draw(rng(seed))
        return drawn.factors if isinstance(drawn, InjectedSleeps) else drawn

    assert (numbers(7) == numbers(7)).all()
    assert (numbers(7) != numbers(8)).any()


def test_sleeps_follow_the_moving_average_of_the_stage():
    # e after F: 10, after B: 0.9 * 10 + 0.1 * 200 = 29, after W as before; factor 1 for all, base 15 ms.
    graph = chain(1, 2, split=True)
    durations_ms = np.array([[[(100.0, 200.0, 1000.0)] * 2]])
    sleeps = InjectedSleeps(base_ms=15.0, factors=np.ones((1, 1, 2, 2)))
    simulation = simulate(by_hint(graph, linear(1)), Costs(durations_ms=durations_ms, sleeps=sleeps))
    lasts_ms = {str(s.task): round((s.end_s - s.start_s) * 1e3, 6) for s in simulation.timeline.spans}
    average = 10.0
    expected = {"0F0": 100 + max(15, average)}
    average = 0.9 * average + 20
    expected["0I0"] = round(200 + average, 6)
    average = 0.9 * average + 10
    expected["0F1"] = round(100 + average, 6)
    average = 0.9 * average + 20
    expected["0I1"] = round(200 + average, 6)
    assert lasts_ms == {**expected, "0W0": 1000, "0W1": 1000}
    assert list(starts_ms(simulation)) == ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: lognormal(MANY, -0.1, rng()),
        lambda: bimodal(MANY, 1.1, 4, rng()),
        lambda: bimodal(MANY, 0.1, -4, rng()),
        lambda: straggler(MANY, linear(8), 8, 2),
        lambda: straggler(MANY, linear(8), 0, -2),
    ],
)
def test_impossible_jitter_is_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        wrong()
