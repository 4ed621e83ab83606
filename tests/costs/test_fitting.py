"""Costs of layers found again in what chunks take, and noise in what was drawn with it."""

import numpy as np
import pytest

from rrfp_jax.costs import Noise
from rrfp_jax.costs.fitting import ChunkTimes, fit_noise, fit_times

TIMES = {
    "embedding": {"F": 0.3, "I": 0.0, "W": 0.5, "B": 0.4, "U": 0.2},
    "layer": {"F": 2.0, "I": 2.2, "W": 1.8, "B": 3.5, "U": 0.1},
    "head": {"F": 9.0, "I": 8.0, "W": 7.0, "B": 14.0, "U": 0.4},
}
CUTS = [("embedding",), ("layer",), ("layer",) * 3, ("head",)]
TASK_MS = 0.07


def taken(layers: tuple[str, ...], *, returns_gradient: bool = True, kinds: str = "FIWBU") -> ChunkTimes:
    sums = {kind: sum(TIMES[name][kind] for name in layers) + TASK_MS * (kind != "U") for kind in kinds}
    if not returns_gradient and "I" in kinds:
        sums |= {"I": TASK_MS, "W": sums["W"] + sums["I"] - TASK_MS}
    return ChunkTimes(
        layers=layers, runs_ms={kind: [ms] * 3 for kind, ms in sums.items()}, returns_gradient=returns_gradient
    )


@pytest.mark.parametrize("first", [CUTS[0], ("embedding", "layer")])
def test_layers_and_what_every_task_takes_come_apart(first: tuple[str, ...]) -> None:
    found = fit_times([taken(first, returns_gradient=False), *(taken(layers) for layers in CUTS[1:])])
    assert found.task_ms == pytest.approx(TASK_MS)
    for name, times in TIMES.items():
        for kind in set(times) - {"I"} if name == "embedding" else times:
            assert found.types[name][kind] == pytest.approx(times[kind], abs=1e-9), (name, kind)
    assert max(found.off.values()) < 1e-9


def test_noisy_times_give_no_negative_costs() -> None:
    rng = np.random.default_rng(0)
    chunks = []
    for number, layers in enumerate(CUTS):
        exact = taken(layers, returns_gradient=number > 0)
        noisy = {kind: list(runs[0] * rng.lognormal(sigma=0.05, size=40)) for kind, runs in exact.runs_ms.items()}
        chunks.append(ChunkTimes(layers=layers, runs_ms=noisy, returns_gradient=number > 0))
    found = fit_times(chunks)
    assert min(ms for times in found.types.values() for ms in times.values()) >= 0
    assert found.types["layer"]["F"] == pytest.approx(2.0, rel=0.05)


def test_whole_backwards_alone_are_enough_and_frozen_layers_have_none() -> None:
    found = fit_times([taken(layers, returns_gradient=number > 0, kinds="FB") for number, layers in enumerate(CUTS)])
    assert found.types["layer"] == pytest.approx({"F": 2.0, "B": 3.5, "U": 0.0})
    frozen = fit_times([taken(layers, kinds="F") for layers in CUTS[1:3]])
    assert frozen.types["layer"] == pytest.approx({"F": 2.0, "U": 0.0})
    with pytest.raises(ValueError, match="'head' was seen to run no forward"):
        fit_times([taken(("head",), kinds="B")])


@pytest.mark.parametrize(
    "noise",
    [
        Noise(sigma={"F": 0.02, "I": 0.1, "W": 0.05}),
        Noise(sigma={"F": 0.1, "I": 0.1, "W": 0.2}, tail=0.05, tail_factor=4.0),
        Noise(sigma={"F": 0.0, "I": 0.0, "W": 0.0}, tail=0.02, tail_factor=2.0),
    ],
    ids=["body", "tail", "tail alone"],
)
def test_noise_is_found_again_in_what_was_drawn_with_it(noise: Noise) -> None:
    drawn = 5.0 * noise.draws(np.ones((1, 1, 3000, 3)), 1, np.random.default_rng(1))[0, 0]
    runs = {kind: list(drawn[:, slot]) for slot, kind in enumerate("FIW")}
    found = fit_noise([ChunkTimes(layers=("layer",), runs_ms=runs)])
    for kind, sigma in noise.sigma.items():
        assert found.sigma[kind] == pytest.approx(sigma, rel=0.15, abs=0.005)
    assert found.tail == pytest.approx(noise.tail, rel=0.25, abs=0.002)
    assert noise.tail == 0 or found.tail_factor == pytest.approx(noise.tail_factor, rel=0.15)


def test_few_runs_show_no_noise() -> None:
    assert fit_noise([ChunkTimes(layers=("layer",), runs_ms={"F": [1.0, 2.0, 3.0]})]).is_none
