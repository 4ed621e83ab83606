"""How durations vary from step to step: a log-normal body and a tail of rare, much longer tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rrfp_jax.field_rules import NOT_NEGATIVE, Rule, check_fields
from rrfp_jax.simulation.costs import Durations

_SHARE = Rule("a share between 0 and 1", lambda value: 0 <= value <= 1)
SLOTS = ("F", "I", "W")
"""What the last axis of durations holds."""
MOST_SIGMA = 5
"""Of a logarithm; with more, one task in a hundred takes longer than all others together."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Independent factors of every task, with mean 1 each. Raises ValueError for what no distribution has."""

    sigma: Mapping[str, float] = field(default_factory=dict)
    """Of the logarithm, by kind F, I and W; a kind that is not named does not vary."""
    tail: float = 0.0
    """The share of tasks that take ``tail_factor`` times as long."""
    tail_factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, _SHARE, "tail")
        check_fields(self, NOT_NEGATIVE, "tail_factor")
        for kind, sigma in self.sigma.items():
            if kind not in SLOTS or not 0 <= sigma <= MOST_SIGMA:
                raise ValueError(f"sigma {sigma} of kind {kind!r}: give 0 to {MOST_SIGMA}, for {', '.join(SLOTS)}")
        if not self.tail_mean > 0:
            raise ValueError(f"tail {self.tail}, {self.tail_factor}: no task takes any time, give a factor above 0")

    @classmethod
    def alike(cls, sigma: float) -> "Noise":
        """The same for all kinds, without a tail."""
        return cls(sigma=dict.fromkeys(SLOTS, sigma))

    @property
    def is_none(self) -> bool:
        """Whether nothing varies."""
        return not any(self.sigma.values()) and (not self.tail or self.tail_factor == 1)

    @property
    def tail_mean(self) -> float:
        """How many times as long tasks take for their tail."""
        return 1 + self.tail * (self.tail_factor - 1)

    def draws(self, durations_ms: Durations, num_draws: int, rng: np.random.Generator) -> Durations:
        """So many steps [draws, chunks, microbatches, 3] of the first step of ``durations_ms``."""
        sigmas = np.array([self.sigma.get(kind, 0.0) for kind in SLOTS])
        shape = (num_draws, *durations_ms.shape[1:])
        factors = np.exp(sigmas * rng.standard_normal(shape) - sigmas**2 / 2)
        if self.tail:
            factors *= np.where(rng.random(shape) < self.tail, self.tail_factor, 1.0) / self.tail_mean
        drawn: Durations = durations_ms[:1] * factors
        return drawn
