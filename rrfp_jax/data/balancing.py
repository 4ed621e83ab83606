"""The assignment of a step's samples to microbatches, so that the most expensive microbatch costs least.

A stage's time per microbatch follows the costs of the samples in it, and the dearest microbatch of all replicas decides
when a step ends. A step's samples stay the same; only who shares a microbatch changes, and with it the order of
additions. Costs come in as numbers.

1. Longest processing time first (Graham 1969): the dearest sample goes to the cheapest group that has room for it.
2. Improvement: while it lowers the dearest group's cost, one of its samples moves to another group, or changes places
   with one there.
3. The result is compared with the samples cut in order, improved in the same way where step 1 came to a dead end.
   So it is never worse than in order, and exists whenever that cut does.

Ties are broken by number: the same costs give the same groups everywhere.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import fsum

import numpy as np
from numpy.typing import NDArray

Groups = list[list[int]]
"""The numbers of each group's members, ascending."""
_Fits = Callable[[Sequence[int]], bool]
"""Whether these samples, given by their numbers, have room in one group together."""

_MOST_CHANGES_PER_SAMPLE = 8


def samples_in_order(num_samples: int, num_groups: int) -> Groups:
    """Consecutive samples share a group; groups are equal in number, the first ones by one larger where they differ."""
    size, rest = divmod(num_samples, num_groups)
    stops = list(accumulate(size + (group < rest) for group in range(num_groups)))
    return [list(range(start, stop)) for start, stop in zip([0, *stops], stops, strict=False)]


def balanced(costs: Sequence[float], num_groups: int, *, fits: _Fits = lambda _: True) -> Groups:
    """Put samples of these ``costs`` into ``num_groups`` groups, none of them empty.

    Args:
        fits: limits of a group. The samples cut in order must fit.

    Raises ValueError for fewer samples than groups, or a cost that is not a positive number.
    """
    if not 1 <= num_groups <= len(costs):
        raise ValueError(f"{len(costs)} samples do not fill {num_groups} groups: give at least 1 and at most one each")
    values = np.asarray(costs, np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"the costs of samples are {values.min()} to {values.max()}: give positive numbers")
    plain = samples_in_order(len(costs), num_groups)
    longest_first = _longest_first(values, num_groups, fits)
    if longest_first is not None:
        better = _improved(longest_first, values, fits)
        if _dearest(better, values) <= _dearest(plain, values):
            return better
    return _improved(plain, values, fits)


def spread_by_cost(costs: Sequence[float]) -> list[int]:
    """An order of microbatches in which equal ranges cost about the same, however many replicas share them.

    Halves are balanced first, then the halves of each, and so on by the prime factors of the number of microbatches;
    so the order does not depend on how many replicas a run has.
    """
    order = list(range(len(costs)))
    num_parts = next((part for part in range(2, len(order) + 1) if len(order) % part == 0), 1)
    if num_parts in {1, len(order)}:
        return order
    size = len(order) // num_parts
    parts = balanced(costs, num_parts, fits=lambda members: len(members) <= size)
    return [part[index] for part in parts for index in spread_by_cost([costs[member] for member in part])]


def _total(group: Sequence[int], costs: NDArray[np.float64]) -> float:
    # Rounded once, so the same on every processor, whatever it adds at a time.
    return fsum(costs[group].tolist())


def _dearest(groups: Groups, costs: NDArray[np.float64]) -> float:
    return max(_total(group, costs) for group in groups)


def _longest_first(costs: NDArray[np.float64], num_groups: int, fits: _Fits) -> Groups | None:
    groups: Groups = [[] for _ in range(num_groups)]
    totals = [0.0] * num_groups
    for sample in np.argsort(-costs, kind="stable").tolist():
        for group in sorted(range(num_groups), key=lambda group: (totals[group], group)):
            members = sorted([*groups[group], sample])
            if fits(members):
                groups[group] = members
                totals[group] += float(costs[sample])
                break
        else:
            return None
    return groups


def _improved(groups: Groups, costs: NDArray[np.float64], fits: _Fits) -> Groups:
    """Change one pair of groups after the other, as long as the dearest group becomes cheaper."""
    groups = [list(group) for group in groups]
    for _ in range(_MOST_CHANGES_PER_SAMPLE * len(costs)):
        totals = np.array([_total(group, costs) for group in groups])
        change = _best_change(groups, costs, totals, int(np.argmax(totals)), fits)
        if change is None:
            break
        for number, members in change.items():
            groups[number] = members
    return groups


def _best_change(
    groups: Groups, costs: NDArray[np.float64], totals: NDArray[np.float64], dearest: int, fits: _Fits
) -> dict[int, list[int]] | None:
    """The move out of the dearest group, or swap, after which the dearer of the two groups costs least.

    The groups concerned by their numbers, as they are then; None where nothing helps.
    """
    own = groups[dearest]
    others: list[tuple[int, int | None]] = [
        (number, None) for number in range(len(groups)) if number != dearest and len(own) > 1
    ]
    others += [(number, member) for number, group in enumerate(groups) if number != dearest for member in group]
    if not others:
        return None
    target_totals = totals[[number for number, _ in others]]
    taken_back = np.array([0.0 if member is None else costs[member] for _, member in others])
    given = costs[own][:, None] - taken_back[None, :]
    after = np.maximum(totals[dearest] - given, target_totals + given)
    # Less than rounding is no improvement: it could go back and forth.
    helpful = np.flatnonzero(after.ravel() < totals[dearest] * (1 - 1e-12))
    for index in helpful[np.argsort(after.ravel()[helpful], kind="stable")].tolist():
        sample = own[index // len(others)]
        number, member = others[index % len(others)]
        back = [] if member is None else [member]
        left = sorted([one for one in own if one != sample] + back)
        gained = sorted([one for one in groups[number] if one != member] + [sample])
        if fits(left) and fits(gained):
            return {dearest: left, number: gained}
    return None
