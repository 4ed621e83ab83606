"""Successive halving: many candidates on few draws of the noise, few on many.

All meet the same draws, so that differences have a small error. A candidate is left behind where enough others are
ahead of it, where it is clearly behind, or, by more draws, where that costs next to nothing on average: it is somewhat
behind, or hardly differs from the best. What keeps to a table takes no simulation, so that the best of these are known
by all draws; enough others ahead on few draws do not count for them. On the first draw one way to consume a table that
is simulated stands for the others: they mostly differ less than tables do.
"""

from collections.abc import Callable

from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.expected_loss import expected_loss, moderated
from rrfp_jax.planning.search.judging import Judge

ROUNDS = ((1, 16), (2, 9), (4, 5), (8, 4), (16, 3), (32, 2))
"""Draws, and how many simulated candidates are left behind them; these are judged on all."""
FEWEST_DRAWS, FEW_DRAWS, MORE_DRAWS = 2, 4, 16
"""By how many draws those are told at least that lost early, and those of the ranking; and how many it takes to tell
what is lost on average, or anything where not the mean counts."""
CLEARLY = 3.0
"""How many standard errors are no chance: one in 200 by Student's distribution over 16 draws."""
_KEPT_TO = 2
"""How many that keep to a table stay in whatever their first draws say."""
_LITTLE = 1e-4
"""Of a step: what may be lost on average by leaving a candidate behind."""
Value = Callable[[Candidate], float]


def contest(candidates: list[Candidate], judge: Judge, *, should_stop: Callable[[], bool]) -> list[Candidate]:
    """All, the best first; those that lost early stand behind those that lost late.

    Where there is no time to judge all, those that were not are left out, but for the first.
    """
    if judge.noise.is_none:
        return _sorted(candidates, _by(judge, 1), should_stop)
    lost: list[Candidate] = []
    left, kept_to = candidates, _best_kept_to(candidates, judge, should_stop)
    for num_draws, number in ((min(draws, judge.num_draws), number) for draws, number in ROUNDS):
        placed = _sorted(left, _value(left, judge, num_draws), should_stop)
        ahead = [one for one in placed if one not in kept_to][:number]
        left = _not_behind([one for one in placed if one in ahead or one in kept_to], judge, num_draws)
        lost = [one for one in placed if one not in left] + lost
        if len(left) <= 1 or should_stop():
            return left + lost
    return _sorted(left, _by(judge, judge.num_draws), should_stop) + lost


def _best_kept_to(candidates: list[Candidate], judge: Judge, should_stop: Callable[[], bool]) -> list[Candidate]:
    """The best of those that keep to a table, by all draws."""
    if should_stop():
        return []
    kept_to = [one for one in candidates if one.is_strict]
    return _sorted(kept_to, _by(judge, judge.num_draws), should_stop)[:_KEPT_TO]


def _value(left: list[Candidate], judge: Judge, num_draws: int) -> Value:
    """How each is judged by so many draws."""
    value = _by(judge, num_draws)
    if num_draws > 1:
        return value
    probes = {_order(one): one for one in left if not one.is_strict}
    return lambda one: value(one if one.is_strict else probes[_order(one)])


def _by(judge: Judge, num_draws: int) -> Value:
    return lambda one: judge.standing(one, num_draws)


def _order(one: Candidate) -> tuple[int, int]:
    """The same for all ways to consume a table on a cut."""
    table = one.choice.ordering.schedule
    return id(one.choice.cut), id(one if table is None else table)


def _not_behind(placed: list[Candidate], judge: Judge, num_draws: int) -> list[Candidate]:
    """Those that more draws may well bring to the first place, with a gain that is worth them."""
    least = FEW_DRAWS if judge.objective.is_mean else MORE_DRAWS
    if num_draws < least or len(placed) < 2:
        return placed
    best, *others = placed
    known = [judge.difference(best, one, num_draws) for one in others]
    errors, little = [error for _, error in known], _LITTLE * judge.standing(best, num_draws)

    def stays(behind: float, error: float) -> bool:
        sure = moderated(error, errors, num_draws)
        return behind <= CLEARLY * sure if num_draws < MORE_DRAWS else expected_loss(behind, sure) > little

    return [best] + [one for one, found in zip(others, known, strict=True) if stays(*found)]


def _sorted(candidates: list[Candidate], value: Value, should_stop: Callable[[], bool]) -> list[Candidate]:
    values: dict[int, float] = {}
    for place, one in enumerate(candidates):
        if place and should_stop():
            break
        values[id(one)] = value(one)
    return sorted(candidates[: len(values)], key=lambda each: values[id(each)])
