"""The best cut of a model: the smallest largest work of a stage, in the memory that there is.

* One chunk per stage: a dynamic programme, exact.
* Few ways to cut: all of them are looked up.
* Else moves of layers between chunks improve a good start, until the numbers of layers prove that nothing is better
  (:mod:`rrfp_jax.planning.cuts.proof`). Where they do not, a model of two rows of layers has its best cut looked up
  (:mod:`rrfp_jax.planning.cuts.two_runs`); for others, and for memory, an integer program searches on
  (:mod:`rrfp_jax.planning.cuts.program`). It is exact unless its search comes to its last node first; then what was
  found so far stays.

Among cuts of the same largest work the step of 1F1B is to be short, where there is one chunk per stage and the backward
is one task (:mod:`rrfp_jax.planning.cuts.fill_and_drain`). Then chunks are to be alike (the least sum of squares:
pipelines of several chunks per stage fill and drain in step), and among those the first chunks small, whose activations
are held longest. Everything is
counted, nothing timed: the same costs give the same cut everywhere.
"""

from itertools import combinations
from math import comb

import numpy as np

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.planning.costs import CutModel, ModelCosts
from rrfp_jax.planning.cuts.dealing import least_sum, most_even, smallest_largest
from rrfp_jax.planning.cuts.fill_and_drain import step_ms_by_stage
from rrfp_jax.planning.cuts.moving import improved, squares_of_chunks, squares_of_stages
from rrfp_jax.planning.cuts.problem import CutProblem, Cuts, Floats
from rrfp_jax.planning.cuts.proof import may_stay_below
from rrfp_jax.planning.cuts.room import Room
from rrfp_jax.planning.cuts.two_runs import best_of_two_runs
from rrfp_jax.schedules import Placement

_FEW = 5_000
"""So many cuts are quickly looked up."""
_MOST_NODES = 100
_LARGE = 200
"""Runs times chunks from which on an integer program takes too long."""
_SAME, _LESS = 1 + 1e-9, 1e-7


def best_cut(
    costs: ModelCosts,
    placement: Placement,
    num_microbatches: int,
    *,
    split: bool = True,
    stage_factors: tuple[float, ...] = (),
    room: Room | None = None,
    replicas: int = 1,
) -> CutModel:
    """The cut whose fullest stage has least to do for an average microbatch, its chunks' layers and tasks together.

    Args:
        costs: of the layers, in order.
        placement: which stage has which chunk.
        split: whether the backward runs as two tasks.
        stage_factors: how many times as long each stage takes; empty: all alike.
        room: memory that every stage has to keep to; None: there is enough.
        replicas: of the whole pipeline; passed on.

    Raises ValueError, with the remedy, for more chunks than layers, and where no cut fits.
    """
    problem = CutProblem(
        costs=costs,
        placement=placement,
        num_microbatches=num_microbatches,
        split=split,
        stage_factors=stage_factors,
        room=room,
    )
    bounds = _of_chunks(problem) if placement.num_chunks == placement.num_stages else _of_stages(problem)
    return CutModel(
        costs=costs,
        counts=tuple(np.diff(bounds[0]).tolist()),
        placement=placement,
        num_microbatches=num_microbatches,
        split=split,
        stage_factors=stage_factors,
        replicas=replicas,
    )


def _of_chunks(problem: CutProblem) -> Cuts:
    """One chunk on each stage: chunks are stages."""
    chunk_ms, needed = _tables(problem)
    is_told = not problem.split and len({*problem.stage_factors}) < 2
    others = (step_ms_by_stage(problem),) if is_told else ()
    found = most_even(np.where(needed <= 1.0, chunk_ms, np.inf), *others)
    if found is not None:
        return found
    least = smallest_largest(needed) * _SAME
    nearest = least_sum(np.where(needed <= least, needed, np.inf))
    assert nearest is not None  # a problem has some cut
    raise _no_room(problem, nearest)


def _tables(problem: CutProblem) -> tuple[Floats, Floats]:
    """What a chunk takes, and which share of its stage's limit it needs [chunks, first layer, behind the last]."""
    chunk_ms = problem.work_ms * problem.chunk_factors[:, None, None] + problem.overhead_ms
    possible = np.where(np.isfinite(problem.work_ms), 0.0, np.inf)
    if not problem.has_limits:
        return chunk_ms, np.broadcast_to(possible, chunk_ms.shape)
    assert problem.room is not None
    sizes, placement = problem.bytes_of_chunks, problem.placement
    needed = np.empty_like(chunk_ms)
    for chunk, stage in enumerate(placement.stage_of_chunk):
        held = max(number for (number,) in problem.room.allocations(placement, stage, problem.num_microbatches))
        (((reached,),),) = problem.room.waiting(placement, stage, problem.num_microbatches)
        lasting = sizes.fixed + reached * sizes.inputs[:, None] + sizes.peak
        needed[chunk] = (lasting + held * sizes.more) / problem.limits[stage] + possible
    return chunk_ms, needed


def _of_stages(problem: CutProblem) -> Cuts:
    """Several chunks on a stage."""
    inner, chunks = problem.costs.num_layers - 1, problem.placement.num_chunks
    if comb(inner, chunks - 1) <= _FEW:
        return _of_all(problem)
    start = most_even(problem.work_ms * problem.chunk_factors[:, None, None] + problem.overhead_ms)
    assert start is not None
    cut = _searched(problem, improved(problem, start, squares_of_stages))
    if problem.excess(cut)[0] > 1.0:
        raise _no_room(problem, cut)
    return improved(problem, cut, squares_of_chunks, cap_ms=_largest_ms(problem, cut))


def _searched(problem: CutProblem, cut: Cuts) -> Cuts:
    """The cut, or a better one that a search finds."""
    fits, largest_ms = problem.excess(cut)[0] <= 1.0, _largest_ms(problem, cut)
    if fits:
        if not may_stay_below(problem, largest_ms):
            return cut
        below_ms = largest_ms * (1 - _LESS)
        better, is_proven = best_of_two_runs(problem, below_ms=below_ms, at_least_ms=_at_least_ms(problem, largest_ms))
        if is_proven and (better is None or problem.excess(better)[0] <= 1.0):
            return cut if better is None else better
    if len(problem.runs) * problem.placement.num_chunks > _LARGE:
        return cut
    from rrfp_jax.planning.cuts.program import solve  # loads scipy, which takes long

    better, _ = solve(
        problem,
        below_ms=largest_ms if fits else np.inf,
        at_least_ms=_at_least_ms(problem, largest_ms),
        most_nodes=_MOST_NODES,
    )
    return better if better is not None and problem.excess(better)[0] <= 1.0 else cut


def _of_all(problem: CutProblem) -> Cuts:
    layers, chunks = problem.costs.num_layers, problem.placement.num_chunks
    inner = np.array(list(combinations(range(1, layers), chunks - 1)), dtype=np.int64).reshape(-1, chunks - 1)
    cuts = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
    chunk_ms, excess = problem.chunk_ms(cuts), problem.excess(cuts)
    largest_ms = np.where(excess <= 1.0, problem.stage_ms(chunk_ms).max(axis=1), np.inf)
    if not np.isfinite(largest_ms).any():
        possible = np.isfinite(chunk_ms).all(axis=1)
        raise _no_room(problem, cuts[possible][np.argmin(excess[possible])][None])
    best = largest_ms <= largest_ms.min() * _SAME
    squares = squares_of_chunks(chunk_ms[best], chunk_ms[best]).round(12)
    first = int(np.argmin(squares))
    found: Cuts = cuts[best][first : first + 1]
    return found


def _largest_ms(problem: CutProblem, cut: Cuts) -> float:
    return float(problem.stage_ms(problem.chunk_ms(cut)).max())


def _at_least_ms(problem: CutProblem, largest_ms: float) -> float:
    """Close to the largest time below which the numbers of layers prove that no cut stays."""
    low, high = 0.0, largest_ms
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if may_stay_below(problem, middle) else (middle, high)
    return low


def _no_room(problem: CutProblem, nearest: Cuts) -> ValueError:
    """The nearest miss, in words."""
    stage = int(np.argmax(problem.stage_bytes(nearest)[0] / problem.limits))
    needed, limit = int(problem.stage_bytes(nearest)[0, stage]), int(problem.limits[stage])
    return ValueError(
        f"no cut of {problem.costs.num_layers} layers into {problem.placement.num_chunks} chunks was found that fits: "
        f"at best stage {stage} needs {format_bytes(needed)} of {format_bytes(limit)}: hold fewer activations, or give "
        "more memory or stages"
    )
