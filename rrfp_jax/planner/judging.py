"""Step times of candidates on common draws of the noise.

All candidates meet the same draws, so that their differences have a small error. An order that is kept to is walked
(:mod:`rrfp_jax.planner.step_times`), any other one is simulated step after step, so that foresight has learnt how long
tasks take. Where more draws are asked for, a simulation goes on from where it was left.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from rrfp_jax.core import Order, StageArbiter, StepRules
from rrfp_jax.costs import CutModel, Noise
from rrfp_jax.planner.candidates import PlanCandidate
from rrfp_jax.planner.records import PlanShape
from rrfp_jax.planner.step_times import StepTimes, WalkEntry, starts_ms, strict_times_ms, walk_of
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.simulation import simulated_steps_ms
from rrfp_jax.simulation.costs import Durations

ROUNDING = 1e-9
"""Relative difference of the same times added up in two ways."""
_DRAWS, _LEAST_DRAWS = 64, 16
_DRAWN = 1 << 15
"""Stages times microbatches times draws, from which on there are fewer draws: each then has more tasks, whose lengths
even out."""


def draws_for(shapes: Sequence[PlanShape]) -> int:
    """Returns a number of draws that suffices for these shapes."""
    most = max(shape.num_stages * shape.num_microbatches for shape in shapes)
    return max(_LEAST_DRAWS, min(_DRAWS, _DRAWN // most))


class Judge:
    """Draws of the noise, and the steps that were simulated with them."""

    def __init__(self, noise: Noise, num_draws: int, seed: int) -> None:
        self.noise, self.seed = noise, seed
        self.num_draws = 1 if noise.is_none else num_draws
        self.evaluations = 0
        """Orders whose step was worked out, each with all its draws."""
        # Cuts and tables by their identity: they are kept beside, so that no identity is used again.
        self._factors: dict[tuple[int, int], Durations] = {}
        self._luck_ms: dict[int, tuple[CutModel, StepTimes]] = {}
        self._walks: dict[int, tuple[ScheduleTable, tuple[WalkEntry, ...]]] = {}
        self._known: dict[PlanCandidate, StepTimes] = {}
        self._nominal_ms: dict[PlanCandidate, float] = {}
        self._runs: dict[PlanCandidate, Iterator[float]] = {}
        self._arbiters: dict[int, tuple[Order, list[StageArbiter]]] = {}

    def draws_ms(self, one: PlanCandidate, num_draws: int) -> StepTimes:
        """Returns the step times of the first draws; without noise that of a step without it."""
        num_draws = min(num_draws, self.num_draws)
        known = self._known.get(one, np.empty(0))
        if len(known) < num_draws:
            self.evaluations += not len(known)
            known = self._known[one] = self._more_draws_ms(one, num_draws, known)
        return known[:num_draws]

    def num_known(self, one: PlanCandidate) -> int:
        """Returns the number of draws on which a candidate was judged."""
        return len(self._known.get(one, ()))

    def value(self, one: PlanCandidate, num_draws: int) -> float:
        """Returns the mean over the first draws, in milliseconds per sample of a step."""
        return float(self.draws_ms(one, num_draws).mean()) / one.choice.shape.batch_size

    def standing(self, one: PlanCandidate, num_draws: int) -> float:
        """Returns the mean by which candidates are compared: that of the first draws, without the luck of the draw."""
        return float(self._comparable_ms(one, num_draws).mean())

    def difference(self, before: PlanCandidate, one: PlanCandidate, num_draws: int) -> tuple[float, float]:
        """Returns how much longer a sample takes with ``one``, and the standard error of that, at least rounding."""
        ahead_ms, behind_ms = (self._comparable_ms(each, num_draws) for each in (before, one))
        number = len(ahead_ms)
        error = float((behind_ms - ahead_ms).std(ddof=1)) / number**0.5 if number > 1 else 0.0
        return float(behind_ms.mean() - ahead_ms.mean()), max(error, float(ahead_ms.mean()) * ROUNDING)

    def _comparable_ms(self, one: PlanCandidate, num_draws: int) -> StepTimes:
        draws_ms = self.draws_ms(one, num_draws)
        if not self.noise.is_none:
            # Candidates with other numbers of chunks have other draws. The work of an average stage in each draw is a
            # control variate: its mean is known, and it has about the same effect on every order.
            draws_ms = draws_ms - self._luck_of(one.choice.cut)[: len(draws_ms)]
        return draws_ms / one.choice.shape.batch_size

    def _luck_of(self, cut: CutModel) -> StepTimes:
        if id(cut) not in self._luck_ms:
            works_ms = self.steps_ms(cut, self.num_draws).sum(axis=(1, 2, 3)) / cut.placement.num_stages
            self._luck_ms[id(cut)] = cut, works_ms[1:] - works_ms[0]
        return self._luck_ms[id(cut)][1]

    def nominal_ms(self, one: PlanCandidate) -> float:
        """Returns the step time without noise."""
        if self.noise.is_none:
            return float(self.draws_ms(one, 1)[0])
        if one not in self._nominal_ms:
            nominal = one.choice.cut.durations_ms
            step_ms = self._kept_to(one, nominal)[0] if one.is_strict else next(self._simulated_ms(one, nominal))
            self._nominal_ms[one] = float(step_ms)
        return self._nominal_ms[one]

    def steps_ms(self, cut: CutModel, num_draws: int) -> Durations:
        """Returns a step without noise and ``num_draws`` with it, [1 + draws, chunks, microbatches, 3]; without noise
        that step alone."""
        nominal = cut.durations_ms
        if self.noise.is_none:
            return nominal
        key = nominal.shape[1], nominal.shape[2]
        if key not in self._factors:
            rng = np.random.default_rng((self.seed, 0))
            self._factors[key] = self.noise.draws(np.ones_like(nominal), self.num_draws, rng)
        return np.concatenate([nominal, nominal * self._factors[key][:num_draws]])

    def strict_times_ms(self, cut: CutModel, table: ScheduleTable, num_draws: int) -> StepTimes:
        """Returns the step times of a table that is kept to, whether memory suffices for it or not."""
        self.evaluations += 1
        return strict_times_ms(cut, self._walk_of(table), _drawn(self.steps_ms(cut, num_draws)))

    def _more_draws_ms(self, one: PlanCandidate, num_draws: int, known: StepTimes) -> StepTimes:
        if one.is_strict:
            return self._kept_to(one, _drawn(self.steps_ms(one.choice.cut, num_draws)))
        if one not in self._runs:
            self._runs[one] = self._begun(one)
        return np.append(known, list(islice(self._runs[one], num_draws - len(known))))

    def _begun(self, one: PlanCandidate) -> Iterator[float]:
        """Begins a simulation of all draws; one that learns starts with the step without noise, which is kept."""
        steps_ms = self.steps_ms(one.choice.cut, self.num_draws)
        if one.order.foresight is None or self.noise.is_none:
            return self._simulated_ms(one, _drawn(steps_ms))
        run = self._simulated_ms(one, steps_ms)
        self._nominal_ms[one] = next(run)
        return run

    def _kept_to(self, one: PlanCandidate, steps_ms: Durations) -> StepTimes:
        assert one.choice.ordering.schedule is not None
        return strict_times_ms(one.choice.cut, self._walk_of(one.choice.ordering.schedule), steps_ms)

    def _walk_of(self, table: ScheduleTable) -> tuple[WalkEntry, ...]:
        if id(table) not in self._walks:
            self._walks[id(table)] = table, walk_of(table)
        return self._walks[id(table)][1]

    def _simulated_ms(self, one: PlanCandidate, steps_ms: Durations) -> Iterator[float]:
        """Simulates these steps and yields their intervals.

        Where stages have foresight, a step without noise goes before, from which it learns. All other orders leave
        nothing to the next step, so that each is as if one had gone before.
        """
        cut = one.choice.cut
        learning = int(one.order.foresight is not None)
        durations_ms = np.concatenate([cut.durations_ms] * learning + [steps_ms])
        if id(one.order) not in self._arbiters:
            rules = StepRules(lockstep=one.choice.shape.data > 1)
            self._arbiters[id(one.order)] = one.order, one.order.arbiters(rules)
        run = simulated_steps_ms(
            [each.fresh(None) for each in self._arbiters[id(one.order)][1]],
            cut.simulated_costs(durations_ms),
            machine=cut.machine,
            num_steps=len(durations_ms),
            starts_ms=starts_ms(cut),
        )
        return islice(run, learning, None)


def _drawn(steps_ms: Durations) -> Durations:
    """Returns the steps without the first, which has no noise, where there is any other."""
    return steps_ms[min(1, len(steps_ms) - 1) :]
