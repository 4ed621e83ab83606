"""Variability of task durations, drawn before the run.

Every draw belongs to a (step, chunk, microbatch, slot), never to a moment, so that two orders simulated from the same
seed meet the same noise on the same tasks. The generator comes in as an argument; nothing here holds one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.tasks import Placement

Durations = NDArray[np.float64]
"""Milliseconds, [steps, chunks, microbatches, 3] for F, input gradient and weight gradient."""

EMA_KEPT = 0.9
"""How much of the moving average of compute times one more task leaves (RRFP paper, RQ4)."""


def lognormal(durations_ms: Durations, sigma: float, rng: np.random.Generator) -> Durations:
    """Multiply each duration by ``exp(sigma z - sigma^2 / 2)``, z standard normal.

    The factor has mean 1, so that more jitter does not mean more work: what changes is variability alone.
    """
    if sigma < 0:
        raise ValueError(f"log-normal sigma is {sigma}: give 0 or more")
    return durations_ms * np.exp(sigma * rng.standard_normal(durations_ms.shape) - sigma**2 / 2)


def bimodal(durations_ms: Durations, probability: float, factor: float, rng: np.random.Generator) -> Durations:
    """With this probability a duration is ``factor`` times as long.

    Mean work grows to ``1 + probability (factor - 1)`` of what it was.
    """
    _check_probability(probability)
    if factor < 0:
        raise ValueError(f"bimodal factor is {factor}: give 0 or more")
    return durations_ms * np.where(rng.random(durations_ms.shape) < probability, factor, 1.0)


def straggler(durations_ms: Durations, placement: Placement, stage: int, factor: float) -> Durations:
    """Every task of one stage takes ``factor`` times as long, in all steps."""
    if not 0 <= stage < placement.num_stages:
        raise ValueError(f"straggler stage {stage} does not exist: give 0..{placement.num_stages - 1}")
    if factor < 0:
        raise ValueError(f"straggler factor is {factor}: give 0 or more")
    slowed = durations_ms.copy()
    slowed[:, list(placement.chunks_of_stage[stage])] *= factor
    return slowed


@dataclass(frozen=True, kw_only=True)
class SleepLevel:
    """A level of the RRFP paper's jitter (RQ4)."""

    probability: float
    base_ms: float
    alpha: float


PAPER_LEVELS = {
    "J0": SleepLevel(probability=0.0, base_ms=0.0, alpha=0.0),
    "J1": SleepLevel(probability=0.1, base_ms=5.0, alpha=0.5),
    "J2": SleepLevel(probability=0.2, base_ms=10.0, alpha=1.0),
    "J3": SleepLevel(probability=0.3, base_ms=15.0, alpha=1.5),
}


@dataclass(frozen=True, kw_only=True)
class InjectedSleeps:
    """Sleeps inside F and B (or I) tasks: ``factor * max(base_ms, e)``.

    ``e = 0.9 e + 0.1 c`` is the stage's own moving average of compute times c without the sleeps, from 0 at the start
    of the run, over its F and B (or I) tasks, the present one included. W tasks neither sleep nor count, for the paper
    names F and B only, and its B of a split backward is our I.
    """

    base_ms: float
    factors: Durations
    """[steps, chunks, microbatches, 2] for F and B (or I): ``alpha (0.5 + U(0, 1))``, or 0 where none is injected."""

    def at_least_ms(self) -> Durations:
        """What each sleep takes whatever ran before, [steps, chunks, microbatches, 2]."""
        return self.factors * self.base_ms


def paper(level: SleepLevel, shape: tuple[int, ...], rng: np.random.Generator) -> InjectedSleeps:
    """Draw the sleeps of durations of this shape ([steps, chunks, microbatches, 3])."""
    _check_probability(level.probability)
    size = (*shape[:-1], 2)
    injected = rng.random(size) < level.probability
    return InjectedSleeps(base_ms=level.base_ms, factors=injected * level.alpha * (0.5 + rng.random(size)))


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}: give a number between 0 and 1")
