"""Successive halving: many candidates on few draws of the noise, few on many.

All meet the same draws, so that differences have a small error; whoever is clearly behind then is left behind, too. On
the first draw one way to consume a table that is simulated stands for the others: they hardly differ where tables do.
"""

from collections.abc import Callable

from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge

ROUNDS = ((1, 16), (4, 6), (16, 4), (32, 3))
"""Draws, and how many candidates are left behind them; these are judged on all."""
FEW_DRAWS, MORE_DRAWS = 4, 16
"""On how many those are judged that lost early or late, and changes of the machine."""
_CLEARLY = {FEW_DRAWS: 6.0, MORE_DRAWS: 3.0}
"""How many standard errors over at least so many draws are no chance: one in 200 by Student's distribution."""
Value = Callable[[Candidate], float]


def contest(candidates: list[Candidate], judge: Judge, *, should_stop: Callable[[], bool]) -> list[Candidate]:
    """All, the best first; those that lost early stand behind those that lost late.

    Where there is no time to judge all, those that were not are left out, but for the first.
    """
    lost: list[Candidate] = []
    left = candidates
    for num_draws, number in ROUNDS:
        placed = _sorted(left, _value(left, judge, num_draws), should_stop)
        left = [one for one in placed[:number] if not _is_behind(one, placed[0], judge, num_draws)]
        lost = [one for one in placed if one not in left] + lost
        if len(left) <= 1 or should_stop():
            return left + lost
    return _sorted(left, _value(left, judge, judge.num_draws), should_stop) + lost


def _value(left: list[Candidate], judge: Judge, num_draws: int) -> Value:
    """How each is judged by so many draws."""
    if judge.noise.is_none or num_draws >= FEW_DRAWS:
        return lambda one: judge.value(one, num_draws)
    probes = {_order(one): one for one in left if not one.is_strict}
    return lambda one: judge.value(one if one.is_strict else probes[_order(one)], num_draws)


def _order(one: Candidate) -> tuple[int, int]:
    """The same for all ways to consume a table on a cut."""
    table = one.choice.ordering.schedule
    return id(one.choice.cut), id(one if table is None else table)


def _is_behind(one: Candidate, best: Candidate, judge: Judge, num_draws: int) -> bool:
    """Whether more draws would hardly bring it to the first place."""
    least = FEW_DRAWS if judge.objective.is_mean else MORE_DRAWS
    if judge.noise.is_none or num_draws < least:
        return False
    behind, error = judge.difference(best, one, num_draws)
    return behind > _CLEARLY[FEW_DRAWS if num_draws < MORE_DRAWS else MORE_DRAWS] * error


def _sorted(candidates: list[Candidate], value: Value, should_stop: Callable[[], bool]) -> list[Candidate]:
    values: dict[int, float] = {}
    for place, one in enumerate(candidates):
        if place and should_stop():
            break
        values[id(one)] = value(one)
    return sorted(candidates[: len(values)], key=lambda each: values[id(each)])
