"""Large problems: the search runs with fewer microbatches, and what it finds is extended to all of them.

A pipeline fills, repeats itself, and drains. With two to three microbatches per stage it does each of these once; more
of them repeat what is in the middle. A rule is a rule for any number; of an order without one the start times are the
keys, those in the middle repeated, a period later each time, in groups of as many microbatches as there are stages,
after which the orders of published schedules repeat at the latest. Extended orders are timed as all others are.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rrfp_jax.costs import CutModel
from rrfp_jax.planning.orders.dispatch import Keys
from rrfp_jax.planning.orders.found import Candidate, Pool
from rrfp_jax.planning.orders.problem import Problem
from rrfp_jax.planning.orders.rule import keys, manner

_LARGE = 5_000
"""Tasks; below it all microbatches are searched with."""


def reduced(cut: CutModel) -> CutModel | None:
    """The cut with fewer microbatches, where it is large enough for that."""
    p, chunks = cut.placement.num_stages, cut.placement.num_chunks
    fewer = (3 if chunks <= 2 * p else 2) * p
    if 3 * chunks * cut.num_microbatches <= _LARGE or fewer * 4 > cut.num_microbatches * 3:
        return None
    return replace(cut, num_microbatches=fewer)


def extend(small: Pool, pool: Pool, goes_on: Callable[[], bool]) -> None:
    """Offer the orders of a reduced problem, extended."""
    for candidate in small.best:
        for of_rule in {candidate.rule is not None, False}:
            if not goes_on():
                return
            _try(small.problem, candidate, pool, by_rule=of_rule)


def _try(small: Problem, candidate: Candidate, pool: Pool, *, by_rule: bool) -> None:
    rule = candidate.rule if by_rule else None
    as_made = candidate.manner if rule is None else manner(pool.problem, rule)
    ranks = _extended(small, candidate, pool.problem) if rule is None else keys(pool.problem, rule)
    pool.dispatch(ranks, as_made, f"{candidate.origin}, for fewer microbatches, extended", rule=rule)


def _extended(small: Problem, candidate: Candidate, problem: Problem) -> Keys:
    starts = np.array(candidate.run.starts, np.float64)
    return extended_starts(starts, small.num_microbatches, problem, problem.period)


def extended_starts(starts: Keys, fewer: int, problem: Problem, period: float) -> Keys:
    """Start times of so many microbatches for all of a problem, of which one enters per period."""
    m, group = problem.num_microbatches, problem.num_stages
    first, more = (fewer - group) // 2, problem.num_microbatches - fewer
    microbatch = np.arange(m)
    past = np.clip(microbatch - first, 0, None)
    repeats = np.where(microbatch < first + more, past // group * group, more)
    found: Keys = (starts.reshape(-1, fewer)[:, microbatch - repeats] + repeats * period).reshape(-1)
    return found
