"""Successive halving: many candidates on few draws of the noise, few on many.

All meet the same draws, so that differences have a small error; whoever is clearly behind then is left behind, too.
"""

from collections.abc import Callable

from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge

ROUNDS = ((1, 24), (4, 8), (16, 4), (32, 3))
"""Draws, and how many candidates are left behind them; these are judged on all."""
FEW_DRAWS, MORE_DRAWS = 4, 16
"""On how many those are judged that lost early or late, and changes of the machine."""
_CLEARLY = 3.0
"""How many standard errors, over no fewer than ``MORE_DRAWS``, are no chance."""


def contest(candidates: list[Candidate], judge: Judge, *, should_stop: Callable[[], bool]) -> list[Candidate]:
    """All, the best first; those that lost early stand behind those that lost late.

    Where there is no time to judge all, those that were not are left out, but for the first.
    """
    lost: list[Candidate] = []
    left = candidates
    for num_draws, number in ROUNDS:
        placed = _sorted(left, judge, num_draws, should_stop)
        left = [one for one in placed[:number] if not _is_behind(one, placed[0], judge, num_draws)]
        lost = [one for one in placed if one not in left] + lost
        if should_stop():
            return left + lost
    return _sorted(left, judge, judge.num_draws, should_stop) + lost


def _is_behind(one: Candidate, best: Candidate, judge: Judge, num_draws: int) -> bool:
    """Whether more draws would hardly bring it to the first place."""
    if judge.noise.is_none or num_draws < MORE_DRAWS:
        return False
    behind, error = judge.difference(best, one, num_draws)
    return behind > _CLEARLY * error


def _sorted(
    candidates: list[Candidate], judge: Judge, num_draws: int, should_stop: Callable[[], bool]
) -> list[Candidate]:
    values: dict[int, float] = {}
    for place, one in enumerate(candidates):
        if place and should_stop():
            break
        values[id(one)] = judge.value(one, num_draws)
    return sorted(candidates[: len(values)], key=lambda each: values[id(each)])
