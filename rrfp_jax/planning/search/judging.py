"""Step times of candidates: the same noise for all, some draws to choose by and others to tell by.

An order that is kept to is walked (:mod:`rrfp_jax.planning.search.strict_times`), any other one simulated, step after
step, so that foresight has learnt what tasks take. The first steps are without noise.
"""

from dataclasses import dataclass

import numpy as np

from rrfp_jax.arbitration import StepRules
from rrfp_jax.planning.costs import CutModel, Noise
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.objective import Draws, Objective
from rrfp_jax.planning.search.strict_times import Walk, strict_times_ms
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.simulation import simulate
from rrfp_jax.simulation.jitter import Durations

TRAINING, HELD_OUT = 0, 1
"""Which draws."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Step times of a candidate."""

    nominal_ms: float
    draws_ms: Draws
    """Those of the first draws; without noise the nominal one alone."""

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

    def times(self, one: Candidate, num_draws: int, which: int = TRAINING) -> Times:
        """Of the first draws, at least so many as asked for."""
        num_draws = min(num_draws, self.num_draws)
        key = id(one), TRAINING if self.noise.is_none else which
        if key in self._known and len(self._known[key][1].draws_ms) >= num_draws:
            return self._known[key][1]
        found = self._times(one, num_draws, which)
        self._known[key] = one, found
        return found

    def nominal_of(self, cut: CutModel, table: ScheduleTable) -> float:
        """Of a table that is kept to, without noise."""
        return self.strict_times(cut, table, cut.durations_ms).nominal_ms

    def nominal_ms(self, one: Candidate) -> float:
        """Without noise."""
        return self._of_steps(one, one.choice.cut.durations_ms).nominal_ms

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

    def _times(self, one: Candidate, num_draws: int, which: int) -> Times:
        return self._of_steps(one, self.steps_ms(one.choice.cut, num_draws, which))

    def _of_steps(self, one: Candidate, steps_ms: Durations) -> Times:
        if one.is_strict:
            assert one.choice.ordering.schedule is not None
            return self.strict_times(one.choice.cut, one.choice.ordering.schedule, steps_ms)
        return self._timed(_simulated_ms(one, steps_ms))

    def strict_times(self, cut: CutModel, table: ScheduleTable, steps_ms: Durations) -> Times:
        """Of a table that is kept to, whether memory has room for it or not."""
        if id(table) not in self._walks:
            self._walks[id(table)] = table, Walk.of(table)
        return self._timed(strict_times_ms(cut, self._walks[id(table)][1], steps_ms))

    def _timed(self, step_ms: Draws) -> Times:
        """Of a step without noise and those with noise behind it."""
        self.evaluations += 1
        return Times(nominal_ms=float(step_ms[0]), draws_ms=step_ms[min(1, len(step_ms) - 1) :])


def _simulated_ms(one: Candidate, steps_ms: Durations) -> Draws:
    """The intervals of these steps; the first one is simulated twice, and counts when its durations are known."""
    cut = one.choice.cut
    twice = np.concatenate([steps_ms[:1], steps_ms])
    rules = StepRules(lockstep=one.choice.shape.data > 1)
    run = simulate(one.order.arbiters(rules), cut.simulated_costs(twice), machine=cut.machine, num_steps=len(twice))
    return np.array(run.step_ms[1:])
