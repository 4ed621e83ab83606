"""Step times of candidates: the same noise for all, some draws to choose by and others to tell by.

An order that is kept to is walked (:mod:`rrfp_jax.planning.search.strict_times`), any other one simulated, step after
step, so that foresight has learnt what tasks take. The first steps are without noise. Where more draws are asked for, a
simulation goes on from where it was left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rrfp_jax.arbitration import StepRules
from rrfp_jax.planning.costs import CutModel, Noise
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.objective import Draws, Objective
from rrfp_jax.planning.search.strict_times import Walk, starts_ms, strict_times_ms
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.simulation import simulated_steps_ms
from rrfp_jax.simulation.jitter import Durations

TRAINING, HELD_OUT = 0, 1
"""Which draws."""
ROUNDING = 1e-9
"""What two ways to add up the same times may differ by, in parts of them."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Step times of a candidate."""

    nominal_ms: float
    draws_ms: Draws
    """Those of the first draws; without noise the nominal one alone."""

    def first(self, num_draws: int) -> "Times":
        """Without the draws behind so many."""
        return replace(self, draws_ms=self.draws_ms[:num_draws])

    def value(self, objective: Objective) -> float:
        """What is made small."""
        return float(objective.of(self.draws_ms))


class Judge:
    """Draws of the noise, and what was simulated with them."""

    def __init__(self, noise: Noise, objective: Objective, num_draws: int, seed: int) -> None:
        self.noise, self.objective, self.seed = noise, objective, seed
        self.num_draws = 1 if noise.is_none else num_draws
        self.evaluations = 0
        """Orders whose step was worked out, each with all its draws."""
        self._factors: dict[tuple[int, int, int], Durations] = {}
        self._walks: dict[int, tuple[ScheduleTable, Walk]] = {}
        self._known: dict[tuple[int, int], tuple[Candidate, Times]] = {}
        self._runs: dict[tuple[int, int], tuple[list[float], Iterator[float]]] = {}
        """Simulated steps, and those that are left to simulate."""

    def times(self, one: Candidate, num_draws: int, which: int = TRAINING) -> Times:
        """Of so many of the first draws."""
        num_draws = min(num_draws, self.num_draws)
        key = id(one), TRAINING if self.noise.is_none else which
        if key not in self._known or len(self._known[key][1].draws_ms) < num_draws:
            self._known[key] = one, self._times(one, num_draws, key)
        return self._known[key][1].first(num_draws)

    def num_known(self, one: Candidate) -> int:
        """On how many of the draws to choose by it was judged."""
        return len(self._known[id(one), TRAINING][1].draws_ms) if (id(one), TRAINING) in self._known else 0

    def difference(
        self, before: Candidate, one: Candidate, num_draws: int, which: int = TRAINING
    ) -> tuple[float, float]:
        """How much longer a sample takes with ``one`` than with the one before it, and what may lie between two that
        are alike: the standard error, at least rounding."""
        draws_ms = [
            self.times(each, num_draws, which).draws_ms / each.choice.shape.batch_size for each in (before, one)
        ]
        values = [float(self.objective.of(each)) for each in draws_ms]
        error = self.objective.error_of_difference(draws_ms[0], draws_ms[1], self.seed)
        return values[1] - values[0], max(error, values[0] * ROUNDING)

    def nominal_of(self, cut: CutModel, table: ScheduleTable) -> float:
        """Of a table that is kept to, without noise."""
        return self.strict_times(cut, table, cut.durations_ms).nominal_ms

    def nominal_ms(self, one: Candidate) -> float:
        """Without noise."""
        if one.is_strict:
            return self._kept_to(one, one.choice.cut.durations_ms).nominal_ms
        return self._timed(np.fromiter(_simulated_ms(one, one.choice.cut.durations_ms), float)).nominal_ms

    def value(self, one: Candidate, num_draws: int, which: int = TRAINING) -> float:
        """The objective by the first draws, over the samples of a step."""
        return self.times(one, num_draws, which).value(self.objective) / one.choice.shape.batch_size

    def steps_ms(self, cut: CutModel, num_draws: int, which: int = TRAINING) -> Durations:
        """A step without noise and so many draws, [1 + draws, chunks, microbatches, 3]; without noise that step."""
        nominal = cut.durations_ms
        if self.noise.is_none:
            return nominal
        key = nominal.shape[1], nominal.shape[2], which
        if key not in self._factors:
            rng = np.random.default_rng((self.seed, which))
            self._factors[key] = self.noise.draws(np.ones_like(nominal), self.num_draws, rng)
        return np.concatenate([nominal, nominal * self._factors[key][:num_draws]])

    def _times(self, one: Candidate, num_draws: int, key: tuple[int, int]) -> Times:
        cut, which = one.choice.cut, key[1]
        if one.is_strict:
            return self._kept_to(one, self.steps_ms(cut, num_draws, which))
        if key not in self._runs:
            self._runs[key] = [], _simulated_ms(one, self.steps_ms(cut, self.num_draws, which))
        taken, left = self._runs[key]
        taken += islice(left, 1 + num_draws - len(taken))
        return self._timed(np.array(taken))

    def _kept_to(self, one: Candidate, steps_ms: Durations) -> Times:
        assert one.choice.ordering.schedule is not None
        return self.strict_times(one.choice.cut, one.choice.ordering.schedule, steps_ms)

    def strict_times(self, cut: CutModel, table: ScheduleTable, steps_ms: Durations) -> Times:
        """Of a table that is kept to, whether memory has room for it or not."""
        if id(table) not in self._walks:
            self._walks[id(table)] = table, Walk.of(table)
        return self._timed(strict_times_ms(cut, self._walks[id(table)][1], steps_ms))

    def _timed(self, step_ms: Draws) -> Times:
        """Of a step without noise and those with noise behind it."""
        self.evaluations += 1
        return Times(nominal_ms=float(step_ms[0]), draws_ms=step_ms[min(1, len(step_ms) - 1) :])


def _simulated_ms(one: Candidate, steps_ms: Durations) -> Iterator[float]:
    """The intervals of these steps. Where stages have foresight, the first one is simulated twice, and counts when its
    durations are known; all others leave nothing to the next step, so that each is as if one had gone before."""
    cut = one.choice.cut
    learns = one.order.foresight is not None
    durations_ms = np.concatenate([steps_ms[:1], steps_ms]) if learns else steps_ms
    rules = StepRules(lockstep=one.choice.shape.data > 1)
    run = simulated_steps_ms(
        one.order.arbiters(rules),
        cut.simulated_costs(durations_ms),
        machine=cut.machine,
        num_steps=len(durations_ms),
        starts_ms=starts_ms(cut),
    )
    if learns:
        next(run)
    return run
