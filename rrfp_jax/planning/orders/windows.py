"""Windows of chunks: how many microbatches each may hold, so that a stage's chunks share its room.

A chunk that holds a microbatch for long needs more of them under way than one that holds it briefly: at one microbatch
per period as many as periods pass from its F to its end (Little's law).
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from rrfp_jax.planning.orders.problem import Problem

_HALVINGS = 24


@dataclass(frozen=True, kw_only=True)
class Share:
    """How windows follow from the time for which a chunk holds a microbatch at least."""

    more: float
    """Microbatches beside these."""
    power: float
    """Of the time: 1 is in proportion, 0 would be alike."""

    def __str__(self) -> str:
        return f"{self.more:g}+time^{self.power:g}"


def windows(problem: Problem, share: Share | None) -> tuple[int, ...]:
    """By chunk; none where nothing is shared out. Each is at least 1, whether it fits or not."""
    if share is None:
        return ()
    m = problem.num_microbatches
    found = [m] * problem.num_chunks
    spans = (_spans(problem) / problem.period) ** share.power
    for stage, chunks in enumerate(problem.placement.chunks_of_stage):
        weights = [problem.weights[chunk * m] for chunk in chunks]
        room = problem.room[stage]
        if room == inf or not any(weights):
            continue

        def at(scale: float, chunks: tuple[int, ...] = chunks) -> list[int]:
            return [max(1, min(m, int(scale * spans[chunk] + share.more + 0.5))) for chunk in chunks]

        low, high = 0.0, 2.0 * m
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = sum(n * weight for n, weight in zip(at(middle), weights, strict=True)) <= room
            low, high = (middle, high) if fits else (low, middle)
        for chunk, number in zip(chunks, at(low), strict=True):
            found[chunk] = number
    return tuple(found)


def _spans(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """By chunk: from its F to its end when nothing holds a microbatch up, on average."""
    head, duration = problem.heads, np.array(problem.durations, np.float64)
    by_kind = (head + duration).reshape(-1, problem.num_chunks, problem.num_microbatches)
    spans: np.ndarray[tuple[int], np.dtype[np.float64]] = (by_kind[-1] - head.reshape(by_kind.shape)[0]).mean(axis=1)
    return spans
