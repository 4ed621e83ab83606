"""Successive halving: many candidates on few draws of the noise, few on many."""

from collections.abc import Callable

from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge

ROUNDS = ((4, 8), (16, 4))
"""Draws, and how many candidates are left behind them; these are judged on all."""


def contest(candidates: list[Candidate], judge: Judge, *, should_stop: Callable[[], bool]) -> list[Candidate]:
    """All, the best first; those that lost early stand behind those that lost late.

    Where there is no time to judge all, those that were not are left out, but for the first.
    """
    lost: list[Candidate] = []
    left = candidates
    for num_draws, number in ROUNDS:
        placed = _sorted(left, judge, num_draws, should_stop)
        left, lost = placed[:number], placed[number:] + lost
    return _sorted(left, judge, judge.num_draws, should_stop) + lost


def _sorted(
    candidates: list[Candidate], judge: Judge, num_draws: int, should_stop: Callable[[], bool]
) -> list[Candidate]:
    values: dict[int, float] = {}
    for place, one in enumerate(candidates):
        if place and should_stop():
            break
        values[id(one)] = judge.value(one, num_draws)
    return sorted(candidates[: len(values)], key=lambda each: values[id(each)])
