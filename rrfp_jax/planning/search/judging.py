"""Step times of candidates: the same noise for all, some draws to choose by and others to tell by.

An order that is kept to is walked (:mod:`rrfp_jax.planning.search.strict_times`), any other one simulated, step after
step, so that foresight has learnt what tasks take. Where more draws are asked for, a simulation goes on from where it
was left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rrfp_jax.arbitration import Order, StageArbiter, StepRules
from rrfp_jax.planning.costs import CutModel, Noise
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.objective import Draws, Objective
from rrfp_jax.planning.search.records import Shape
from rrfp_jax.planning.search.strict_times import Walk, starts_ms, strict_times_ms
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.simulation import simulated_steps_ms
from rrfp_jax.simulation.costs import Durations

TRAINING, HELD_OUT = 0, 1
"""Which draws."""
ROUNDING = 1e-9
"""What two ways to add up the same times may differ by, in parts of them."""


_DRAWS, _LEAST_DRAWS = 64, 16
_DRAWN = 1 << 15
"""Stages times microbatches times draws, from which on there are fewer draws: each then has more tasks, whose lengths
even out."""


def draws_for(shapes: Sequence[Shape]) -> int:
    """How many draws tell enough, where nobody says."""
    most = max(shape.num_stages * shape.num_microbatches for shape in shapes)
    return max(_LEAST_DRAWS, min(_DRAWS, _DRAWN // most))


@dataclass(frozen=True)
class Times:
    """Step times of a candidate."""

    draws_ms: Draws
    """Those of the first draws; without noise that of a step without it."""

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
        self._luck_ms: dict[tuple[int, int], tuple[CutModel, Draws]] = {}
        self._walks: dict[int, tuple[ScheduleTable, Walk]] = {}
        self._known: dict[tuple[int, int], tuple[Candidate, Draws]] = {}
        self._nominal_ms: dict[int, tuple[Candidate, float]] = {}
        self._runs: dict[tuple[int, int], Iterator[float]] = {}
        """Simulated steps that are left to simulate."""
        self._arbiters: dict[int, tuple[Order, list[StageArbiter]]] = {}
        """Made once for an order, which many costs are tried with; every simulation runs fresh ones of theirs."""

    def times(self, one: Candidate, num_draws: int, which: int = TRAINING) -> Times:
        """Of so many of the first draws."""
        num_draws = min(num_draws, self.num_draws)
        key = id(one), TRAINING if self.noise.is_none else which
        known = self._known[key][1] if key in self._known else np.empty(0)
        if len(known) < num_draws:
            self.evaluations += not len(known)
            known = self._draws_ms(one, num_draws, key, known)
            self._known[key] = one, known
        return Times(known[:num_draws])

    def num_known(self, one: Candidate) -> int:
        """On how many of the draws to choose by it was judged."""
        return len(self._known[id(one), TRAINING][1]) if (id(one), TRAINING) in self._known else 0

    def difference(
        self, before: Candidate, one: Candidate, num_draws: int, which: int = TRAINING
    ) -> tuple[float, float]:
        """How much longer a sample takes with ``one`` than with the one before it, and what may lie between two that
        are alike: the standard error, at least rounding."""
        draws_ms = [self._comparable_ms(each, num_draws, which) for each in (before, one)]
        values = [float(self.objective.of(each)) for each in draws_ms]
        error = self.objective.error_of_difference(draws_ms[0], draws_ms[1], self.seed)
        return values[1] - values[0], max(error, values[0] * ROUNDING)

    def standing(self, one: Candidate, num_draws: int) -> float:
        """The objective by the first draws, over the samples of a step, as candidates are compared by it."""
        return float(self.objective.of(self._comparable_ms(one, num_draws, TRAINING)))

    def _comparable_ms(self, one: Candidate, num_draws: int, which: int) -> Draws:
        """Over the samples of a step. Where the mean counts, without the luck of the draw, of which the mean is 0:
        candidates with other numbers of chunks have other draws."""
        draws_ms = self.times(one, num_draws, which).draws_ms
        if self.objective.is_mean and not self.noise.is_none:
            draws_ms = draws_ms - self._luck_of(one.choice.cut, which)[: len(draws_ms)]
        return draws_ms / one.choice.shape.batch_size

    def _luck_of(self, cut: CutModel, which: int) -> Draws:
        """By how much an average stage works longer in each draw than without noise: a control variate of step times,
        which has about the same effect on every order."""
        key = id(cut), which
        if key not in self._luck_ms:
            works_ms = self.steps_ms(cut, self.num_draws, which).sum(axis=(1, 2, 3)) / cut.placement.num_stages
            self._luck_ms[key] = cut, works_ms[1:] - works_ms[0]
        return self._luck_ms[key][1]

    def nominal_ms(self, one: Candidate) -> float:
        """Without noise."""
        if self.noise.is_none:
            return float(self.times(one, 1).draws_ms[0])
        if id(one) not in self._nominal_ms:
            nominal = one.choice.cut.durations_ms
            step_ms = self._kept_to(one, nominal)[0] if one.is_strict else next(self._simulated_ms(one, nominal))
            self._nominal_ms[id(one)] = one, float(step_ms)
        return self._nominal_ms[id(one)][1]

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

    def _draws_ms(self, one: Candidate, num_draws: int, key: tuple[int, int], known: Draws) -> Draws:
        cut, which = one.choice.cut, key[1]
        if one.is_strict:
            return self._kept_to(one, self._drawn(self.steps_ms(cut, num_draws, which)))
        if key not in self._runs:
            self._runs[key] = self._begun(one, which)
        return np.append(known, list(islice(self._runs[key], num_draws - len(known))))

    def _begun(self, one: Candidate, which: int) -> Iterator[float]:
        """A simulation of all draws; one that learns begins with the step without noise, which is kept."""
        steps_ms = self.steps_ms(one.choice.cut, self.num_draws, which)
        if one.order.foresight is None or self.noise.is_none:
            return self._simulated_ms(one, self._drawn(steps_ms))
        run = self._simulated_ms(one, steps_ms)
        self._nominal_ms[id(one)] = one, next(run)
        return run

    def _kept_to(self, one: Candidate, steps_ms: Durations) -> Draws:
        assert one.choice.ordering.schedule is not None
        return strict_times_ms(one.choice.cut, self._walk_of(one.choice.ordering.schedule), steps_ms)

    def strict_times(self, cut: CutModel, table: ScheduleTable, steps_ms: Durations) -> Times:
        """Of a table that is kept to, whether memory has room for it or not."""
        self.evaluations += 1
        return Times(strict_times_ms(cut, self._walk_of(table), self._drawn(steps_ms)))

    def _walk_of(self, table: ScheduleTable) -> Walk:
        if id(table) not in self._walks:
            self._walks[id(table)] = table, Walk.of(table)
        return self._walks[id(table)][1]

    def _drawn(self, steps_ms: Durations) -> Durations:
        """Without the step that has no noise, where there is any other."""
        return steps_ms[min(1, len(steps_ms) - 1) :]

    def _simulated_ms(self, one: Candidate, steps_ms: Durations) -> Iterator[float]:
        """The intervals of these steps. Where stages have foresight, one without noise goes before, from which it
        learns; all others leave nothing to the next step, so that each is as if one had gone before."""
        cut = one.choice.cut
        learning = int(one.order.foresight is not None)
        durations_ms = np.concatenate([cut.durations_ms] * learning + [steps_ms])
        run = simulated_steps_ms(
            self.fresh_arbiters(one),
            cut.simulated_costs(durations_ms),
            machine=cut.machine,
            num_steps=len(durations_ms),
            starts_ms=starts_ms(cut),
        )
        return islice(run, learning, None)

    def fresh_arbiters(self, one: Candidate) -> list[StageArbiter]:
        """Of the stages of a candidate, to be simulated."""
        key = id(one.order)
        if key not in self._arbiters:
            rules = StepRules(lockstep=one.choice.shape.data > 1)
            self._arbiters[key] = one.order, one.order.arbiters(rules)
        return [each.fresh(None) for each in self._arbiters[key][1]]
