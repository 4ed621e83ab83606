"""What of the step times is made small, and how sure a difference of two choices is."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]
_RESAMPLES = 200


@dataclass(frozen=True)
class Objective:
    """``mean``, ``p95`` or ``mean+Ksd``."""

    deviations: float = 0.0
    """Standard deviations above the mean."""
    is_p95: bool = False

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Raises ValueError for other words."""
        if text == "mean":
            return cls()
        if text == "p95":
            return cls(is_p95=True)
        found = re.fullmatch(r"mean\+(\d+(?:\.\d+)?)sd", text)
        if found is None:
            raise ValueError(f"objective {text!r} is unknown: give mean, p95, or mean+1sd with any number for the 1")
        return cls(deviations=float(found[1]))

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean alone, of whose error few draws tell."""
        return not self.is_p95 and not self.deviations

    def of(self, draws_ms: Draws) -> NDArray[np.float64]:
        """Of step times along the last axis."""
        if self.is_p95:
            return np.asarray(np.quantile(draws_ms, 0.95, axis=-1))
        mean = draws_ms.mean(axis=-1)
        if not self.deviations or draws_ms.shape[-1] < 2:
            return np.asarray(mean)
        return np.asarray(mean + self.deviations * draws_ms.std(axis=-1, ddof=1))

    def error_of_difference(self, one_ms: Draws, other_ms: Draws, seed: int = 0) -> float:
        """The standard error of ``of(other) - of(one)`` on the same draws; 0 for a single draw.

        For the mean it is that of the paired differences, else that of the draws taken again with replacement (Efron's
        bootstrap).
        """
        number = len(one_ms)
        if number < 2:
            return 0.0
        if self.is_mean:
            return float((other_ms - one_ms).std(ddof=1) / np.sqrt(number))
        picks = np.random.default_rng(seed).integers(0, number, (_RESAMPLES, number))
        return float((self.of(other_ms[picks]) - self.of(one_ms[picks])).std(ddof=1))
