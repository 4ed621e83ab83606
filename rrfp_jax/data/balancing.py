"""The assignment of a step's samples to microbatches, so that the most expensive one costs least, and their order.

A stage's time per microbatch follows the costs of the samples in it, and the dearest microbatch of all replicas decides
when a step ends. A step's samples stay the same; only who shares a microbatch changes, and with it the order of
additions. Costs come in as numbers.

1. Longest processing time first (Graham 1969): the dearest sample goes to the cheapest group that has room for it.
2. Improvement: while it lowers the dearest group's cost, one of its samples moves to another group, or changes places
   with one there.
3. The result is compared with the samples cut in order, improved in the same way where step 1 came to a dead end.
   So it is never worse than in order, and exists whenever that cut does.

Ties are broken by number: the same costs give the same groups everywhere.

:class:`MicrobatchOrders` chooses the order in which a step's microbatches come. A pipeline fills and drains with its
first and last microbatches, so short ones belong there: the order *hill* has these at both ends and the longest in the
middle. It is improved along rows, the tasks of each stage in the order of a simulated step. While stages keep to rows,
a step's end is a longest path, and one walk over the tasks gives it for many orders of microbatches at once: an array
operation per task. Stages need not keep to rows, so in the end the simulator judges: the order found is taken only
where its simulated step is shorter than that of the order as it comes.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import Agreement, Order, StepRules
from rrfp_jax.schedules import Absences, Task, bits
from rrfp_jax.schedules.table import all_needed
from rrfp_jax.simulation import Costs, simulate
from rrfp_jax.simulation.costs import DURATION_SLOTS, Durations

Groups = list[list[int]]
"""The numbers of each group's members, ascending."""
_Fits = Callable[[Sequence[int]], bool]
"""Whether these samples, given by their numbers, have room in one group together."""
_Numbers = NDArray[np.int64]

_MOST_CHANGES_PER_SAMPLE = 8
_SHORTEST = 0.4
"""The smallest of uneven shares."""


def samples_in_order(num_samples: int, num_groups: int) -> Groups:
    """Consecutive samples share a group; groups are equal in number, the first ones by one larger where they differ."""
    size, rest = divmod(num_samples, num_groups)
    stops = list(accumulate(size + (group < rest) for group in range(num_groups)))
    return [list(range(start, stop)) for start, stop in zip([0, *stops], stops, strict=False)]


def balanced(
    costs: Sequence[float],
    num_groups: int,
    *,
    fits: _Fits = lambda _: True,
    shares: Sequence[float] | None = None,
) -> Groups:
    """Put samples of these ``costs`` into ``num_groups`` groups, none of them empty.

    Args:
        fits: limits of a group. The samples cut in order must fit.
        shares: for each group a positive number, by which its cost is divided where groups are compared; None: alike.

    Raises ValueError for fewer samples than groups, or a cost that is not a positive number.
    """
    if not 1 <= num_groups <= len(costs):
        raise ValueError(f"{len(costs)} samples do not fill {num_groups} groups: give at least 1 and at most one each")
    values = np.asarray(costs, np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"the costs of samples are {values.min()} to {values.max()}: give positive numbers")
    parts = np.ones(num_groups) if shares is None else np.asarray(shares, np.float64)
    plain = samples_in_order(len(costs), num_groups)
    longest_first = _longest_first(values, parts, fits)
    if longest_first is not None:
        better = _improved(longest_first, values, parts, fits)
        if _dearest(better, values, parts) <= _dearest(plain, values, parts):
            return better
    return _improved(plain, values, parts, fits)


def uneven_shares(num_stages: int, num_microbatches: int) -> list[float]:
    """Returns the shares of the microbatches of a step that fills and drains with short ones.

    As many as there are stages are shorter than the others, for both ends, down to 0.4. They shorten the fill and the
    drain by more than the others lengthen what lies between.
    """
    per_end = min(num_stages // 2, num_microbatches // 4)
    rising = [_SHORTEST + (1 - _SHORTEST) * place / per_end for place in range(per_end) for _ in range(2)]
    return rising + [1.0] * (num_microbatches - len(rising))


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


def hill(costs: Sequence[float]) -> list[int]:
    """Returns the numbers of microbatches, the shortest at both ends and the longest in the middle."""
    rising = np.argsort(costs, kind="stable").tolist()
    return [*rising[::2], *rising[1::2][::-1]]


def _total(group: Sequence[int], costs: NDArray[np.float64]) -> float:
    # Rounded once, so the same on every processor, whatever it adds at a time.
    return fsum(costs[group].tolist())


def _dearest(groups: Groups, costs: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    return max(_total(group, costs) / share for group, share in zip(groups, shares.tolist(), strict=True))


def _longest_first(costs: NDArray[np.float64], shares: NDArray[np.float64], fits: _Fits) -> Groups | None:
    groups: Groups = [[] for _ in shares]
    totals = [0.0] * len(groups)
    for number, sample in enumerate(np.argsort(-costs, kind="stable").tolist()):
        cost, empty = float(costs[sample]), [group for group, members in enumerate(groups) if not members]
        # The last samples go to groups that have none yet.
        open_groups = empty if len(costs) - number <= len(empty) else range(len(groups))
        for group in sorted(open_groups, key=lambda group: ((totals[group] + cost) / float(shares[group]), group)):
            members = sorted([*groups[group], sample])
            if fits(members):
                groups[group] = members
                totals[group] += cost
                break
        else:
            return None
    return groups


def _improved(groups: Groups, costs: NDArray[np.float64], shares: NDArray[np.float64], fits: _Fits) -> Groups:
    """Change one pair of groups after the other, as long as the dearest group becomes cheaper."""
    groups = [list(group) for group in groups]
    for _ in range(_MOST_CHANGES_PER_SAMPLE * len(costs)):
        totals = np.array([_total(group, costs) for group in groups])
        change = _best_change(groups, costs, totals, shares, fits)
        if change is None:
            break
        for number, members in change.items():
            groups[number] = members
    return groups


def _best_change(
    groups: Groups, costs: NDArray[np.float64], totals: NDArray[np.float64], shares: NDArray[np.float64], fits: _Fits
) -> dict[int, list[int]] | None:
    """The move out of the dearest group, or swap, after which the dearer of the two groups costs least.

    The groups concerned by their numbers, as they are then; None where nothing helps.
    """
    dearest = int(np.argmax(totals / shares))
    own = groups[dearest]
    others: list[tuple[int, int | None]] = [
        (number, None) for number in range(len(groups)) if number != dearest and len(own) > 1
    ]
    others += [(number, member) for number, group in enumerate(groups) if number != dearest for member in group]
    if not others:
        return None
    targets = [number for number, _ in others]
    taken_back = np.array([0.0 if member is None else costs[member] for _, member in others])
    given = costs[own][:, None] - taken_back[None, :]
    after = np.maximum((totals[dearest] - given) / shares[dearest], (totals[targets] + given) / shares[targets])
    # Less than rounding is no improvement: it could go back and forth.
    helpful = np.flatnonzero(after.ravel() < totals[dearest] / shares[dearest] * (1 - 1e-12))
    for index in helpful[np.argsort(after.ravel()[helpful], kind="stable")].tolist():
        sample = own[index // len(others)]
        number, member = others[index % len(others)]
        back = [] if member is None else [member]
        left = sorted([one for one in own if one != sample] + back)
        gained = sorted([one for one in groups[number] if one != member] + [sample])
        if fits(left) and fits(gained):
            return {dearest: left, number: gained}
    return None


# -- the order of microbatches -----------------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
_RULES = StepRules(updates=False, agreement=Agreement.NONE)
_LONGER = 1 + 1e-9
"""A step that is shorter by less than this factor may be so by rounding."""
_SIMULATED = 8
"""Walks in whose time a step is simulated, about."""


class ChosenOrder(NamedTuple):
    """An order of a step's microbatches."""

    order: tuple[int, ...]
    """The numbers of the microbatches in the order in which they come."""
    predicted_ms: float
    """The step's predicted makespan."""


class MicrobatchOrders:
    """Chooses the order in which each step's microbatches come, on a pipeline without replicas, or one of them.

    ``order`` is that of the tasks. The same costs give the same order, with any number of rounds but 0. Not for several
    threads at a time.
    """

    def __init__(self, order: Order) -> None:
        self._order, self._needed = order, all_needed(order.graph)
        self._mean_rows: list[_Walked] | None = None
        """Rows of a step in which all microbatches cost the same."""
        self._has_refused = False
        self.trusts_costs = True
        """Whether costs count. An order by costs that say nothing would be longer than the one as it comes."""

    @property
    def walks_per_round(self) -> int:
        """Walks over the tasks in whose time one round is done."""
        return self._order.graph.num_microbatches + 3 * _SIMULATED

    @property
    def num_tasks(self) -> int:
        """Tasks of a walk."""
        return len(self._needed)

    def choose(self, costs: Durations, absent: Absences = (), *, rounds: int = 4) -> ChosenOrder | None:
        """Returns the order with the shortest predicted step; None where all orders are alike, or costs say nothing.

        Costs that are zero, negative or not finite say nothing, which is told once.

        Args:
            costs: durations in any unit, such as milliseconds, [chunks, microbatches, 3].
            absent: pairs that the step lacks, by the numbers of the microbatches as they come.
            rounds: the number of searches; after each the simulator judges. 0: the hill, where it is shorter along the
                rows of a step whose microbatches all cost the same.
        """
        graph = self._order.graph
        exists = np.array([[True] * graph.num_microbatches] * graph.num_chunks)
        for chunk, mask in absent:
            exists[chunk, list(bits(mask))] = False
        costs = np.where(exists[..., None], costs, 0.0)
        totals = costs.sum(axis=2)
        if not (np.isfinite(costs).all() and (costs >= 0).all() and (totals[exists] > 0).all()):
            if not self._has_refused:
                _LOG.warning("microbatches keep their order: their predicted costs are not all positive numbers")
            self._has_refused = True
            return None
        if not self.trusts_costs or (np.ptp(costs, axis=1) <= costs.max() * (_LONGER - 1)).all():
            return None
        mean = np.broadcast_to(costs.mean(axis=1, keepdims=True), costs.shape)
        # Which microbatch is the first to be dear matters little to rows of equal costs, so the hill has those of one
        # step.
        if rounds or self._mean_rows is None:
            self._mean_rows = self._rows(mean)
        as_it_comes = np.arange(graph.num_microbatches)
        start = np.array(hill([fsum(of_chunks) for of_chunks in totals.T.tolist()]))
        if not rounds:
            lengths = _ends(self._mean_rows, costs, np.stack([as_it_comes, start]))
            better = int(lengths[1] * _LONGER < lengths[0])
            return ChosenOrder(tuple((as_it_comes, start)[better].tolist()), float(lengths[better]))
        best, least = as_it_comes, self._simulated_ms(costs, absent, as_it_comes)
        from_ms = self._simulated_ms(costs, absent, start)
        for number in range(rounds):
            # Stages keep to the rows of this very order only as long as it is the order. Halfway between its costs and
            # equal ones, rows suit the orders near it too.
            rows = self._rows((mean + costs[:, start]) / 2) if number else self._mean_rows
            found = _improved_along(rows, costs, start, first=number)
            found_ms = self._simulated_ms(costs, absent, found)
            if found_ms * _LONGER < from_ms:
                start, from_ms = found, found_ms
        if from_ms * _LONGER < least:
            best, least = start, from_ms
        return ChosenOrder(tuple(best.tolist()), least)

    def _simulated_ms(self, costs: Durations, absent: Absences, numbers: _Numbers) -> float:
        arbiters, moved = self._order.arbiters(_RULES), in_places(absent, numbers)
        simulated = simulate(arbiters, Costs(durations_ms=costs[None, :, numbers]), absent=(moved,) if moved else ())
        return simulated.timeline.makespan_s() * 1e3

    def _rows(self, costs: Durations) -> "list[_Walked]":
        """Returns the tasks of a simulated step as they ended, without absent pairs: those cost nothing."""
        last: dict[tuple[int, str], int] = {}
        number: dict[Task, int] = {}
        rows = list[_Walked]()
        for span in simulate(self._order.arbiters(_RULES), Costs(durations_ms=costs[None])).timeline.spans:
            task, lane = span.task, (span.stage, span.lane)
            if task.microbatch < 0:
                continue
            waits = [number[needed] for needed in self._needed[task]]
            if lane in last:
                waits.append(last[lane])
            last[lane] = number[task] = len(rows)
            slots = DURATION_SLOTS.get(task.kind, ())
            rows.append(_Walked(task.chunk, task.microbatch, slots, (span.end_s - span.start_s) * 1e3, waits))
        return rows


class _Walked(NamedTuple):
    """A task of the rows."""

    chunk: int
    place: int
    slots: tuple[int, ...]
    ms: float
    """The duration of an operation, which has no slots."""
    waits: list[int]
    """Numbers of the tasks that must have ended before."""


def in_places(absent: Absences, order: Sequence[int] | _Numbers) -> Absences:
    """Returns absent pairs, given by the numbers of microbatches, by their places in an order."""
    place = {int(number): place for place, number in enumerate(order)}
    return tuple((chunk, sum(1 << place[number] for number in bits(mask))) for chunk, mask in absent)


def _ends(rows: Sequence[_Walked], costs: Durations, orders: _Numbers) -> NDArray[np.float64]:
    """Returns when a step ends in which stages keep to these rows, for each of the orders [orders, microbatches]."""
    in_place = np.ascontiguousarray(orders.T)
    lengths: dict[tuple[int, tuple[int, ...]], NDArray[np.float64]] = {}
    ends = np.empty((len(rows), len(orders)))
    for number, (chunk, place, slots, ms, waits) in enumerate(rows):
        if slots and (chunk, slots) not in lengths:
            lengths[chunk, slots] = costs[chunk][:, slots].sum(axis=-1)
        length = lengths[chunk, slots][in_place[place]] if slots else ms
        start: Any = ends[waits[0]] if waits else 0.0
        for wait in waits[1:]:
            start = np.maximum(start, ends[wait])
        ends[number] = start + length
    return ends.max(axis=0, initial=0.0)


def _improved_along(rows: Sequence[_Walked], costs: Durations, order: _Numbers, *, first: int) -> _Numbers:
    """Returns an order that is no longer along the rows: every microbatch in turn, the dearest first, is put into each
    other place, or exchanged with the one there.

    ``first`` tells rounds apart: each begins with another microbatch, and so finds another order.
    """
    least, places = _ends(rows, costs, order[None])[0], np.arange(len(order))
    dearest_first = np.argsort([-fsum(of_chunks) for of_chunks in costs.sum(axis=2).T.tolist()], kind="stable")
    for number in np.roll(dearest_first, -5 * first):
        place = int(np.flatnonzero(order == number)[0])
        rest = np.delete(order, place)
        inserted = np.stack([np.insert(rest, other, number) for other in places])
        exchanged = np.tile(order, (len(order), 1))
        exchanged[places, place] = order
        exchanged[places, places] = number
        candidates = np.concatenate([inserted, exchanged])
        ends = _ends(rows, costs, candidates)
        shortest = int(np.argmin(ends))
        if ends[shortest] * _LONGER < least:
            order, least = candidates[shortest], ends[shortest]
    return order
