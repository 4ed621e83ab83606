"""The best cut of a model of two rows of equal layers, such as an encoder and a decoder; memory is left aside.

Where the second row begins is one of few *joints*: a bound between two chunks, or a chunk that holds some of both.
Given a joint, only how many layers of each row a stage gets decides its work, wherever in its chunks they are. So a
time can be kept to if, stage after stage, at most so many layers of the second row beside so many of the first come to
all layers there are; that is looked up for all joints at a time, and the smallest such time is found by halving.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rrfp_jax.planning.cuts.problem import CutProblem, Cuts, Floats

_NEAR, _ROUNDING = 1e-8, 1e-9


@dataclass(frozen=True)
class _Joint:
    """How many layers of each chunk are given, and which chunks may have more of which row."""

    fixed: tuple[float, ...]
    """Work of single layers, by chunk."""
    singles: tuple[int, ...]
    first: tuple[int | None, ...]
    """The least number of layers of the first row, by chunk; None: none at all."""
    second: tuple[int | None, ...]


def best_of_two_runs(problem: CutProblem, *, below_ms: float, at_least_ms: float) -> tuple[Cuts | None, bool]:
    """The best cut [1, chunks + 1] between two times, and whether there is none better, memory left aside.

    None: there is no such cut, or the model is no two rows.
    """
    joints = _joints(problem)
    if not joints:
        return None, False
    rows, low_ms, high_ms = _Rows(problem, joints), at_least_ms, below_ms
    kept = np.flatnonzero(rows.most(high_ms, np.arange(len(joints)))[-1][:, -1] >= rows.sizes[1])
    middle_ms = low_ms * (1 + _NEAR)  # often what cannot be beaten can be had
    while len(kept) and high_ms - low_ms > _NEAR * high_ms:
        fitting = kept[rows.most(middle_ms, kept)[-1][:, -1] >= rows.sizes[1]]
        if len(fitting):
            kept, high_ms = fitting, middle_ms
        else:
            low_ms = middle_ms
        middle_ms = (low_ms + high_ms) / 2
    return (rows.cut(int(kept[0]), high_ms) if len(kept) else None), True


def _joints(problem: CutProblem) -> list[_Joint]:
    """All of them; none where the model is no two rows."""
    long = [run for run in problem.runs if run[1] - run[0] > 1]
    if len(long) != 2:
        return []
    (start, stop), (again, over) = long
    layers, chunks, work = problem.costs.num_layers, problem.placement.num_chunks, problem.layer_work_ms
    ends = {end for end in problem.costs.ends if end < layers - 1}
    beside = [max(end + 1 - stop, again - end - 1) for end in ends] or [again - stop - 1]
    if start > 1 or layers - over > 1 or len(ends) > 1 or max(beside) > 1 or not ends <= {*range(stop - 1, again)}:
        return []  # single layers could be chunks of their own in other ways
    places: list[int | None] = [end + 1 for end in ends]
    places = places or [None, *range(stop, again + 1)]  # None: within a chunk
    found = []
    for number in range(1, chunks + 1):  # of chunks with layers of the first row
        for cut_at in places:
            begins = number - 1 if cut_at is None else number
            if begins == chunks:
                continue
            fixed, singles = [0.0] * chunks, [0] * chunks
            for layer in (*range(start), *range(stop, again), *range(over, layers)):
                is_left = cut_at is not None and layer < cut_at
                chunk = 0 if layer < start else chunks - 1 if layer >= over else number - 1 if is_left else begins
                fixed[chunk] += work[layer]
                singles[chunk] += 1
            least = [int(singles[chunk] == 0 or (cut_at is None and chunk == begins)) for chunk in range(chunks)]
            first = tuple(least[chunk] if chunk < number else None for chunk in range(chunks))
            second = tuple(least[chunk] if chunk >= begins else None for chunk in range(chunks))
            if sum(each or 0 for each in first) <= stop - start and sum(each or 0 for each in second) <= over - again:
                found.append(_Joint(fixed=tuple(fixed), singles=tuple(singles), first=first, second=second))
    return found


class _Rows:
    """The joints as arrays over [joints, stages]."""

    def __init__(self, problem: CutProblem, joints: list[_Joint]) -> None:
        self.problem, self.joints = problem, joints
        long = [run for run in problem.runs if run[1] - run[0] > 1]
        self.sizes = tuple(stop - start for start, stop in long)
        self.work = tuple(float(problem.layer_work_ms[start]) for start, _ in long)
        stage_of, stages = problem.stage_of, problem.placement.num_stages
        self.factors = np.array(problem.stage_factors or (1.0,) * stages)
        self.fixed = np.array([joint.fixed for joint in joints]) @ stage_of
        self.overhead = problem.overhead_ms * stage_of.sum(axis=0)
        self.least, self.has = [], []
        for lists in ([joint.first for joint in joints], [joint.second for joint in joints]):
            self.least.append(np.array([[each or 0 for each in one] for one in lists]) @ stage_of)
            self.has.append(np.array([[each is not None for each in one] for one in lists], float) @ stage_of > 0)

    def most(self, limit_ms: float, which: np.ndarray) -> list[Floats]:
        """After each stage, [joints, layers of the first row] the most layers of the second that stages so far take."""
        best = np.full((len(which), self.sizes[0] + 1), -np.inf)
        best[:, 0] = 0.0
        found = [best]
        for stage in range(len(self.factors)):
            added = np.full_like(best, -np.inf)
            for number in range(self.sizes[0] + 1):
                second = self.second(limit_ms, which, stage, number)
                if not np.isfinite(second).any():
                    if number >= self.least[0][which, stage].max():
                        break
                    continue
                np.maximum(
                    added[:, number:], best[:, : self.sizes[0] + 1 - number] + second[:, None], out=added[:, number:]
                )
            best = added
            found.append(best)
        return found

    def second(self, limit_ms: float, which: np.ndarray, stage: int, number: int) -> Floats:
        """How many layers of the second row a stage takes at most beside so many of the first; -inf: it cannot."""
        room = (limit_ms - self.overhead[stage]) / self.factors[stage] - self.fixed[which, stage]
        room = room - number * self.work[0] + _ROUNDING
        takes = np.where(self.has[1][which, stage], np.floor(room / max(self.work[1], _ROUNDING)), 0.0)
        takes = np.minimum(takes, self.sizes[1])
        fits = (room >= 0) & (takes >= self.least[1][which, stage]) & (number >= self.least[0][which, stage])
        return np.where(fits & (self.has[0][which, stage] | (number == 0)), takes, -np.inf)

    def cut(self, joint: int, limit_ms: float) -> Cuts:
        """A cut that keeps to the time."""
        which = np.array([joint])
        best, left, dealt = self.most(limit_ms, which), self.sizes[0], list[tuple[int, int]]()
        for stage in reversed(range(len(self.factors))):
            for number in range(left + 1):
                second = self.second(limit_ms, which, stage, number)[0]
                if np.isfinite(second) and best[stage][0, left - number] + second == best[stage + 1][0, left]:
                    dealt.append((number, int(second)))
                    left -= number
                    break
        dealt.reverse()
        surplus, counts = sum(second for _, second in dealt) - self.sizes[1], list(self.joints[joint].singles)
        for stage, (first, second) in enumerate(dealt):
            spared = min(surplus, second - int(self.least[1][joint, stage]))
            surplus -= spared
            for number, least in ((first, self.joints[joint].first), (second - spared, self.joints[joint].second)):
                own = self.problem.placement.chunks_of_stage[stage]
                _deal(counts, number, [chunk for chunk in own if least[chunk] is not None], least)
        return np.array([[0, *accumulate(counts)]])


def _deal(counts: list[int], number: int, chunks: list[int], least: tuple[int | None, ...]) -> None:
    """So many layers to these chunks, first what each must have, then to the smallest one after the other."""
    for chunk in chunks:
        counts[chunk] += least[chunk] or 0
        number -= least[chunk] or 0
    for _ in range(number):
        counts[min(chunks, key=lambda chunk: counts[chunk])] += 1
