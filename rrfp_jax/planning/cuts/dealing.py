"""Consecutive layers dealt to chunks in order, by dynamic programmes: exact where each chunk has a cost of its own.

``costs[chunk, first, stop]`` is what a chunk costs; infinite where it cannot be. With one chunk on each stage this
settles the best cut; elsewhere it gives cuts to start from.
"""

import numpy as np

from rrfp_jax.planning.cuts.problem import Cuts, Floats

_SLACK = 1 + 1e-12
"""Sums in another order may differ by so much."""


def smallest_largest(costs: Floats) -> float:
    """The least that the dearest chunk can cost; infinite where nothing goes."""
    chunks, size, _ = costs.shape
    best = np.full(size, np.inf)
    best[0] = -np.inf
    for chunk in range(chunks):
        best = np.maximum(best[:, None], costs[chunk]).min(axis=0)
    return float(best[-1])


def least_sum(costs: Floats) -> Cuts | None:
    """The cut [1, chunks + 1] whose chunks cost least together; among equal ones that with the smallest first chunks.
    None where nothing goes."""
    chunks, size, _ = costs.shape
    rest = np.full((chunks + 1, size), np.inf)
    rest[chunks, size - 1] = 0.0
    for chunk in reversed(range(chunks)):
        rest[chunk] = (costs[chunk] + rest[chunk + 1]).min(axis=1)
    if not np.isfinite(rest[0, 0]):
        return None
    bounds = [0]
    for chunk in range(chunks):
        onwards = costs[chunk, bounds[-1]] + rest[chunk + 1]
        bounds.append(int(np.flatnonzero(onwards <= rest[chunk, bounds[-1]] * _SLACK)[0]))
    return np.array([bounds])


def most_even(costs: Floats, *others: Floats) -> Cuts | None:
    """The cut whose dearest chunk costs least, of those the one that costs least by ``others`` in turn, and of those
    the one with the least sum of squares. None where nothing goes."""
    for each in (costs, *others):
        cap = smallest_largest(np.where(np.isfinite(costs), each, np.inf)) * _SLACK
        if not np.isfinite(cap):
            return None
        costs = np.where(each <= cap, costs, np.inf)
    return least_sum(costs**2)
