"""Improvement of orders that were found: their start times are keys, and changed keys make other orders.

A chain begins with one of the best orders. Each turn takes the earliest or the latest starts of the present order, or
their mean (running the order's latest starts again from the front is *double justification*), changes some of them
together, and dispatches again. What is no slower becomes the present order, also where it is as quick: plateaus are
wide. Changes move the tasks of a stage, of a kind, of some microbatches, or of all of these; single tasks are not
moved, which gains nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rrfp_jax.planning.orders.dispatch import Keys, Manner
from rrfp_jax.planning.orders.found import Candidate, Pool
from rrfp_jax.planning.orders.problem import Problem
from rrfp_jax.planning.orders.replay import held_by_chunk, latest_starts

_CHAINS = 4
_PATIENCE = (0.0, 0.0, 0.25, 0.5, 1.0)
_SHIFTS = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
"""In periods."""


@dataclass
class _Chain:
    present: Candidate
    origin: str
    steps: int = 0


def improve(pool: Pool, seed: int, goes_on: Callable[[], bool]) -> None:
    """Change the best orders of the pool until told to stop."""
    rng = np.random.default_rng(seed)
    chains = [_Chain(candidate, candidate.origin) for candidate in pool.best[:_CHAINS]]
    moves = _Moves(pool.problem, rng)
    while chains and goes_on():
        chain = chains[min(int(rng.geometric(0.5)), len(chains)) - 1]
        manner = Manner(
            patience=_PATIENCE[int(rng.integers(len(_PATIENCE)))],
            keeps_reserve=bool(rng.random() < 0.5),
            windows=moves.windows(chain.present),
        )
        keys = moves.changed(_times(pool.problem, chain))
        cutoff = chain.present.makespan
        chain.steps += 1
        made = pool.dispatch(keys, manner, f"{chain.origin}, improved", cutoff=cutoff)
        if made is not None and made.makespan <= cutoff:
            chain.present = made
            chains.sort(key=lambda each: each.present.makespan)


def _times(problem: Problem, chain: _Chain) -> Keys:
    """Earliest starts, latest ones, and their mean, in turn."""
    candidate = chain.present
    earliest = np.array(candidate.run.starts, np.float64)
    if chain.steps % 3 == 0:
        return earliest
    latest = np.array(latest_starts(problem, candidate.rows, candidate.run), np.float64)
    return latest if chain.steps % 3 == 1 else (earliest + latest) / 2


class _Moves:
    """Changes of keys."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.rng, self.period = rng, problem.period
        numbers = np.arange(problem.num_tasks)
        self.stage = np.array(problem.stages)
        self.kind, self.microbatch = numbers // problem.num_ways, numbers % problem.num_microbatches
        self.num_stages, self.num_microbatches = problem.num_stages, problem.num_microbatches
        self.num_kinds = problem.num_tasks // problem.num_ways
        self.problem = problem

    def windows(self, candidate: Candidate) -> tuple[int, ...]:
        """Those it was made with, or what its rows hold of each chunk, at times one more of one; or none."""
        way = self.rng.integers(3)
        if way == 0:
            return ()
        found = list(candidate.manner.windows) or held_by_chunk(self.problem, candidate.rows)
        if way == 1:
            found[int(self.rng.integers(len(found)))] += 1
        return tuple(found)

    def changed(self, keys: Keys) -> Keys:
        """A copy with some keys moved together, or shaken; one in eight is left as it is."""
        rng = self.rng
        if rng.random() < 1 / 8:
            return keys
        chosen = np.ones(len(keys), np.bool_)
        if rng.random() < 0.5:
            chosen &= self.kind == rng.integers(self.num_kinds)
        if rng.random() < 0.5:
            first = rng.integers(self.num_stages)
            chosen &= (self.stage >= first) & (self.stage < first + rng.integers(1, 3))
        if rng.random() < 0.6:
            first = rng.integers(self.num_microbatches)
            chosen &= (self.microbatch >= first) & (
                self.microbatch < first + rng.integers(1, self.num_microbatches + 1)
            )
        if rng.random() < 0.6:
            by = rng.choice(_SHIFTS) * self.period
            return np.where(chosen, keys + by, keys)
        shaken = rng.normal(0.0, rng.choice([0.1, 0.3, 1.0]) * self.period, len(keys))
        return np.where(chosen, keys + shaken, keys)
