"""A cut improved step by step: layers go from one chunk to another, by moving all bounds between the two by one.

In a row of equal layers that is a transfer, whatever lies between. All such moves of a cut are looked up at a time, and
the best one is taken, as long as one helps. What is better comes first in this order: memory that suffices, the fullest
stage, and then what the caller weighs.
"""

from collections.abc import Callable

import numpy as np

from rrfp_jax.planning.cuts.problem import CutProblem, Cuts, Floats

_DIGITS = 12
_MOST_ROUNDS = 400
Weigh = Callable[[Floats, Floats], Floats]
"""From what chunks [cuts, chunks] and stages [cuts, stages] take to a number for each cut; less is better."""


def squares_of_stages(_: Floats, stage_ms: Floats) -> Floats:
    """Little where the fullest stages are few: a way to fewer still."""
    squares: Floats = ((stage_ms / stage_ms.mean(axis=1, keepdims=True)) ** 8).sum(axis=1)
    return squares


def squares_of_chunks(chunk_ms: Floats, _: Floats) -> Floats:
    """Little where chunks are alike."""
    squares: Floats = ((chunk_ms / chunk_ms.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    return squares


def improved(problem: CutProblem, cut: Cuts, weigh: Weigh, *, cap_ms: float = 0.0) -> Cuts:
    """The cut [1, chunks + 1] that moves lead to; below ``cap_ms`` all fullest stages are alike."""
    moves = _moves(cut.shape[1])
    best = [float(key[0]) for key in _keys(problem, cut, weigh, cap_ms)]
    for _ in range(_MOST_ROUNDS):
        found = _best_of(problem, cut + moves, weigh, cap_ms, best)
        if found is None:
            break
        cut, best = found
    return cut


def _best_of(
    problem: CutProblem, candidates: Cuts, weigh: Weigh, cap_ms: float, best: list[float]
) -> tuple[Cuts, list[float]] | None:
    """The best of the cuts, if it is better than what there is."""
    candidates = candidates[(candidates[:, 1:] > candidates[:, :-1]).all(axis=1)]
    if not len(candidates):
        return None
    keys = _keys(problem, candidates, weigh, cap_ms)
    first = int(np.lexsort(keys[::-1])[0])
    found = [float(key[first]) for key in keys]
    return (candidates[first : first + 1], found) if found < best else None


def _moves(num_bounds: int) -> Cuts:
    """All ranges of inner bounds, one up or one down."""
    places = np.arange(num_bounds)
    ranges = [
        (places >= first) & (places <= last)
        for first in range(1, num_bounds - 1)
        for last in range(first, num_bounds - 1)
    ]
    up = np.array(ranges, dtype=np.int64).reshape(-1, num_bounds)
    return np.concatenate([up, -up])


def _keys(problem: CutProblem, cuts: Cuts, weigh: Weigh, cap_ms: float) -> list[Floats]:
    """The order of what is better, the first thing first; rounded, so that what is alike counts as alike."""
    chunk_ms = problem.chunk_ms(cuts)
    stage_ms = problem.stage_ms(chunk_ms)
    finite = np.isfinite(stage_ms).all(axis=1)
    weights = np.full(len(cuts), np.inf)
    weights[finite] = weigh(chunk_ms[finite], stage_ms[finite])
    return [
        problem.excess(cuts).round(_DIGITS),
        np.maximum(stage_ms.max(axis=1), cap_ms).round(9),
        weights.round(_DIGITS),
    ]
