"""What no cut can beat, from the numbers of layers alone: where they stand is left aside.

Layers of at most two kinds of work, beside the first and the last one whose stages are known, are dealt to stages
freely, each stage having at least as many as it has chunks. If even so no stage can stay below a time, no cut can.
"""

import numpy as np

from rrfp_jax.planning.cuts.problem import CutProblem, Floats

_LESS, _ROUNDING = 1e-8, 1e-9


def may_stay_below(problem: CutProblem, limit_ms: float) -> bool:
    """Whether a cut may exist whose stages all take less; False proves that there is none."""
    room_ms, work_ms = _room_ms(problem, limit_ms), problem.layer_work_ms[1:-1]
    if room_ms.min() < 0:
        return False
    kinds, numbers = np.unique(work_ms.round(9), return_counts=True)
    if len(kinds) > 2 or not len(kinds) or kinds[0] <= 0:
        return bool(room_ms.sum() >= work_ms.sum())
    if len(kinds) == 1:
        return bool(_whole(room_ms / kinds[0]).sum() >= numbers[0])
    return _most_of_second(room_ms, kinds, int(numbers[0])) >= int(numbers[1])


def _room_ms(problem: CutProblem, limit_ms: float) -> Floats:
    """What each stage has left, in its own time, beside the first and the last layer."""
    stage_of, stages = problem.placement.stage_of_chunk, problem.placement.num_stages
    factors = np.array(problem.stage_factors or (1.0,) * stages)
    chunks = np.array([len(own) for own in problem.placement.chunks_of_stage])
    room_ms: Floats = (limit_ms * (1 - _LESS) - chunks * problem.overhead_ms) / factors
    room_ms[stage_of[0]] -= problem.layer_work_ms[0]
    if problem.costs.num_layers > 1:
        room_ms[stage_of[-1]] -= problem.layer_work_ms[-1]
    chunks[stage_of[0]] -= 1
    chunks[stage_of[-1]] -= 1
    least = problem.layer_work_ms[1:-1].min(initial=np.inf)
    lacking = np.maximum(0, chunks) * least if np.isfinite(least) else np.zeros(stages)
    room_ms[room_ms < lacking * (1 - 1e-9)] = -1.0
    return room_ms


def _most_of_second(room_ms: Floats, kinds: Floats, number: int) -> float:
    """How many layers of the second kind fit at most beside ``number`` of the first kind."""
    best = np.full(number + 1, -np.inf)
    best[0] = 0.0
    for room in room_ms:
        added = np.full(number + 1, -np.inf)
        for first in range(min(number, int(_whole(room / kinds[0]))) + 1):
            second = _whole((room - first * kinds[0]) / kinds[1])
            np.maximum(added[first:], best[: number + 1 - first] + second, out=added[first:])
        best = added
    return float(best[number])


def _whole(numbers: Floats) -> Floats:
    """The integers below, but for rounding."""
    integers: Floats = np.floor(numbers + _ROUNDING)
    return integers
