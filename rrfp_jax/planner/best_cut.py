"""The best cut of a model: the one whose fullest stage has the least work, in the memory that there is.

* One chunk per stage: a dynamic programme, exact.
* Few ways to cut: all of them are looked up.
* Otherwise transfers of layers between chunks improve a good start. Where a lower bound does not prove that nothing is
  better, an integer program searches on (:mod:`rrfp_jax.planner.integer_cut`), exact unless it reaches its last node
  first; then the best cut so far stays. Transfers alone are 2% worse in one of five random models of several chunks per
  stage, up to 6%.

Among cuts of the same largest work the step of 1F1B is to be short, where there is one chunk per stage and the backward
is one task; without that choice the step was up to 0.75% longer than with a neighbouring cut. Then chunks are to be
alike, since pipelines of several chunks per stage fill and drain in step; among those the first chunks are to be small,
since their activations are held longest. Nodes are counted and no time is measured, so the same costs give the same cut
on every machine.

:func:`even_cut` is the cut that one makes without costs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np

from rrfp_jax.costs import CutModel, ModelCosts
from rrfp_jax.planner.cut_problem import Cuts, Floats, LayerCutProblem, MemoryBudget
from rrfp_jax.readable import format_bytes
from rrfp_jax.schedules import Placement

_FEW = 5_000
"""Number of cuts up to which all are looked up."""
_MOST_NODES = 100
_LARGE = 200
"""Runs times chunks from which on an integer program takes too long."""
_MOST_ROUNDS = 400
_SAME, _SLACK = 1 + 1e-9, 1 + 1e-12
"""Factors between numbers that count as equal: of whole cuts, and of the same sum in another order."""


def best_cut(
    costs: ModelCosts,
    placement: Placement,
    num_microbatches: int,
    *,
    split: bool = True,
    memory: MemoryBudget | None = None,
    replicas: int | tuple[int, ...] = 1,
    others: Sequence[ModelCosts] = (),
) -> CutModel:
    """Returns the cut whose fullest stage has the least work, layers and tasks together.

    Args:
        costs: of the layers, in order.
        placement: which stage has which chunk.
        split: whether the backward runs as two tasks.
        memory: memory that every stage has to keep to; None: there is enough.
        replicas: of the whole pipeline; passed on.
        others: the same layers run in other ways, all with stages, of which each stage takes the quickest that fits.
            For one chunk per stage.

    Raises ValueError, with the remedy, for more chunks than layers, and where no cut fits.
    """
    problem = LayerCutProblem(
        costs=costs, placement=placement, num_microbatches=num_microbatches, split=split, memory=memory,
        replicas=replicas,
    )  # fmt: skip
    if others:
        return _mixed([problem, *(replace(problem, costs=each) for each in others)])
    if placement.num_chunks == placement.num_stages:
        bounds = _one_chunk_per_stage(problem)
    elif comb(costs.num_layers - 1, placement.num_chunks - 1) <= _FEW:
        bounds = _looked_up(problem)
    else:
        bounds = _searched(problem)
    return problem.model(np.diff(bounds[0]).tolist())


def cut_inside(cut: CutModel, memory: MemoryBudget | None = None) -> CutModel | None:
    """Returns the best cut of the same layers, in the same place, that may end between attention and MLP.

    Layers that it does not cut stay whole. None where it cuts none, or where none fits the memory.
    """
    halved = cut.costs.in_halves()
    if halved.layers == cut.costs.layers or cut.own_costs:
        return None
    try:
        found = best_cut(
            halved, cut.placement, cut.num_microbatches, split=cut.split, memory=memory, replicas=cut.replicas
        )
    except ValueError:
        return None
    bounds, at = {stop for _, stop in found.bounds}, 0
    starts, taken = list[int](), set[int]()  # of all units of the new cut, counted in halves
    for layer, name in enumerate(cut.costs.layers):
        is_whole = halved.layers[at] == name
        starts.append(at)
        if not is_whole and at + 1 in bounds:
            starts.append(at + 1)
            taken.add(layer)
        at += 1 if is_whole else 2
    if not taken:
        return None
    counts = tuple(sum(first <= start < stop for start in starts) for first, stop in found.bounds)
    return replace(cut, costs=cut.costs.in_halves(taken), counts=counts)


# -- one chunk per stage -----------------------------------------------------------------------------------------------


def _one_chunk_per_stage(problem: LayerCutProblem) -> Cuts:
    needed = _shares_needed(problem)
    # Which stage has the layers before and behind a stage is not known where they differ.
    others = () if problem.split or len(problem.work_ms) > 1 else (_step_ms_by_stage(problem),)
    found = _most_even(np.where(needed <= 1.0, problem.work_of_chunks_ms, np.inf), *others)
    if found is not None:
        return found
    # Nothing fits: the cut that needs least beyond its limits tells the user how much is lacking.
    nearest = _least_sum(np.where(needed <= _smallest_largest(needed) * _SAME, needed, np.inf))
    assert nearest is not None  # a problem has some cut
    raise _nothing_fits(problem, nearest)


def _mixed(problems: list[LayerCutProblem]) -> CutModel:
    """Returns the best cut where each stage may run its layers as any of these problems does."""
    first = problems[0]
    needed = np.stack([_shares_needed(problem) for problem in problems])
    work_ms = np.stack([problem.work_of_chunks_ms for problem in problems])
    work_ms = np.where(needed <= 1.0, work_ms, np.inf)
    bounds = _most_even(work_ms.min(axis=0))
    if bounds is None:
        leanest = min(problems, key=lambda problem: _smallest_largest(_shares_needed(problem)))
        return leanest.model(np.diff(_one_chunk_per_stage(leanest)[0]).tolist())  # raises
    chunks = np.arange(first.placement.num_chunks)
    ways = work_ms[:, chunks, bounds[0, :-1], bounds[0, 1:]].argmin(axis=0)
    stages = tuple(problems[ways[c]].costs.stages[stage] for c, stage in enumerate(first.placement.stage_of_chunk))
    return replace(first, costs=replace(first.costs, stages=stages)).model(np.diff(bounds[0]).tolist())


def _shares_needed(problem: LayerCutProblem) -> Floats:
    """Returns the shares of their stages' limits that chunks need [chunks, first, behind last], infinite where no chunk
    can be; without limits 0."""
    placement, possible = problem.placement, np.where(np.isfinite(problem.work_ms[0]), 0.0, np.inf)
    needed = np.repeat(possible[None], placement.num_chunks, axis=0)
    if problem.memory is not None and problem.has_limits:
        for chunk, stage in enumerate(placement.stage_of_chunk):
            sizes = problem.bytes_of_chunks[problem.kinds[stage]]
            held = max(number for (number,) in problem.memory.allocations(placement, stage, problem.num_microbatches))
            (((reached,),),) = problem.memory.waiting(placement, stage, problem.num_microbatches)
            lasting = sizes.fixed + reached * sizes.inputs[:, None] + sizes.peak
            needed[chunk] += (lasting + held * sizes.more) / problem.limits[stage]
    return needed


def _step_ms_by_stage(problem: LayerCutProblem) -> Floats:
    """Returns milliseconds that a step of strict 1F1B takes at least [stages, first layer, behind the last], as one
    stage with the layers before and behind it tells. The longest of a cut is exact with many microbatches.

    A microbatch passes the stages before a stage on its way there and back, and the stage works through all of them. It
    waits for the stages behind it where these take longer than the forwards that it runs ahead, and in the end longer
    than the backwards that are left; with few microbatches both waits are one.
    """
    forward_ms, both_ms = (
        np.pad(each[0].cumsum(), (1, 0)) for each in (problem.layer_forward_ms, problem.layer_work_ms)
    )
    stages, microbatches, task_ms = problem.placement.num_stages, problem.num_microbatches, problem.costs.task_ms
    own_ms = both_ms[None, :] - both_ms[:, None] + 2 * task_ms
    own_forward_ms = forward_ms[None, :] - forward_ms[:, None] + task_ms
    found = np.empty((stages, *own_ms.shape))
    for stage in range(stages):
        behind = stages - 1 - stage
        passed_ms = both_ms[:, None] + 2 * stage * task_ms
        awaited_ms = both_ms[-1] - both_ms[None, :] + 2 * behind * task_ms
        ahead = min(behind, microbatches - 1)
        waits_ms = [np.maximum(0.0, awaited_ms - ahead * each) for each in (own_forward_ms, own_ms - own_forward_ms)]
        together_ms = sum(waits_ms) if microbatches > behind + 1 else np.maximum(*waits_ms)
        found[stage] = passed_ms + microbatches * own_ms + together_ms
    return found


def _smallest_largest(costs: Floats) -> float:
    """Returns the least that the dearest chunk can cost; ``costs[chunk, first, stop]`` is infinite for no chunk."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = -np.inf
    for of_chunk in costs:
        best = np.maximum(best[:, None], of_chunk).min(axis=0)
    return float(best[-1])


def _least_sum(costs: Floats) -> Cuts | None:
    """Returns the cut [1, chunks + 1] whose chunks cost least together, of equal ones that with the smallest first
    chunks; None where there is no cut."""
    chunks, size, _ = costs.shape
    rest = np.full((chunks + 1, size), np.inf)
    rest[chunks, size - 1] = 0.0
    for chunk in reversed(range(chunks)):
        rest[chunk] = (costs[chunk] + rest[chunk + 1]).min(axis=1)
    if not np.isfinite(rest[0, 0]):
        return None
    bounds = [0]
    for chunk in range(chunks):
        onwards = costs[chunk, bounds[-1]] + rest[chunk + 1]
        bounds.append(int(np.flatnonzero(onwards <= rest[chunk, bounds[-1]] * _SLACK)[0]))
    return np.array([bounds])


def _most_even(costs: Floats, *others: Floats) -> Cuts | None:
    """Returns the cut whose dearest chunk costs least, of those one whose dearest costs least by ``others`` in turn,
    and of those the one with the least sum of squares; None where there is no cut."""
    for each in (costs, *others):
        cap = _smallest_largest(np.where(np.isfinite(costs), each, np.inf)) * _SLACK
        if not np.isfinite(cap):
            return None
        costs = np.where(each <= cap, costs, np.inf)
    return _least_sum(costs**2)


# -- several chunks per stage ------------------------------------------------------------------------------------------


def _looked_up(problem: LayerCutProblem) -> Cuts:
    layers, chunks = problem.costs.num_layers, problem.placement.num_chunks
    inner = np.array(list(combinations(range(1, layers), chunks - 1)), dtype=np.int64).reshape(-1, chunks - 1)
    cuts = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
    chunk_ms, excess = problem.chunk_ms(cuts), problem.excess(cuts)
    largest_ms = np.where(excess <= 1.0, problem.stage_ms(chunk_ms).max(axis=1), np.inf)
    if not np.isfinite(largest_ms).any():
        possible = np.isfinite(chunk_ms).all(axis=1)
        raise _nothing_fits(problem, cuts[possible][np.argmin(excess[possible])][None])
    best = largest_ms <= largest_ms.min() * _SAME
    first = int(np.argmin(_unevenness(chunk_ms[best], 2).round(12)))
    found: Cuts = cuts[best][first : first + 1]
    return found


def _searched(problem: LayerCutProblem) -> Cuts:
    start = _most_even(problem.work_of_chunks_ms)
    assert start is not None  # a problem has some cut
    cut = _improved(problem, start)
    fits, largest_ms = problem.excess(cut)[0] <= 1.0, float(problem.stage_ms(problem.chunk_ms(cut)).max())
    bound_ms = _lower_bound_ms(problem, largest_ms)
    is_best = fits and largest_ms <= bound_ms * _SAME
    if not is_best and len(problem.runs) * problem.placement.num_chunks <= _LARGE:
        from rrfp_jax.planner.integer_cut import solve  # loads scipy, which takes long

        better, _ = solve(
            problem, below_ms=largest_ms if fits else np.inf, at_least_ms=bound_ms, most_nodes=_MOST_NODES
        )
        if better is not None and problem.excess(better)[0] <= 1.0:
            cut = better
    if problem.excess(cut)[0] > 1.0:
        raise _nothing_fits(problem, cut)
    return _improved(problem, cut, cap_ms=float(problem.stage_ms(problem.chunk_ms(cut)).max()))


def _improved(problem: LayerCutProblem, cut: Cuts, *, cap_ms: float = 0.0) -> Cuts:
    """Returns the cut [1, chunks + 1] to which transfers of a layer from one chunk to another lead.

    A transfer moves all bounds between two chunks by one. The best of all transfers is taken as long as one helps:
    memory that suffices comes first, then the fullest stage, then alike stages. With ``cap_ms`` all fullest stages
    below it count as equal, and alike chunks come last."""
    places = np.arange(cut.shape[1])
    inner = range(1, len(places) - 1)
    ranges = [(places >= first) & (places <= last) for first in inner for last in range(first, len(places) - 1)]
    up = np.array(ranges, dtype=np.int64).reshape(-1, len(places))
    moves = np.concatenate([up, -up])

    def keys(cuts: Cuts) -> list[Floats]:
        chunk_ms = problem.chunk_ms(cuts)
        stage_ms = problem.stage_ms(chunk_ms)
        finite = np.isfinite(stage_ms).all(axis=1)
        uneven = np.full(len(cuts), np.inf)
        # A high power of the stages' work points to fewer of the fullest stages, which a plain maximum does not see.
        uneven[finite] = _unevenness(chunk_ms[finite], 2) if cap_ms else _unevenness(stage_ms[finite], 8)
        return [problem.excess(cuts).round(12), np.maximum(stage_ms.max(axis=1), cap_ms).round(9), uneven.round(12)]

    best = [float(key[0]) for key in keys(cut)]
    for _ in range(_MOST_ROUNDS):
        moved = cut + moves
        moved = moved[(moved[:, 1:] > moved[:, :-1]).all(axis=1)]
        if not len(moved):
            break
        found = keys(moved)
        first = int(np.lexsort(found[::-1])[0])
        if [float(key[first]) for key in found] >= best:
            break
        cut, best = moved[first : first + 1], [float(key[first]) for key in found]
    return cut


def _unevenness(times_ms: Floats, power: int) -> Floats:
    """Returns the sum of powers over the last axis, in parts of the mean; least where all are alike."""
    sums: Floats = ((times_ms / times_ms.mean(axis=1, keepdims=True)) ** power).sum(axis=1)
    return sums


def _lower_bound_ms(problem: LayerCutProblem, largest_ms: float) -> float:
    """Returns milliseconds that the fullest stage of no cut stays below, at most ``largest_ms``.

    The first and the last layer lie on known stages. All others are dealt to stages freely, at least one to each chunk:
    in whole layers where they are alike, else in parts of layers, each as long as the quickest kind of stage takes
    relative to the first.
    """
    work_ms, placement, kinds = problem.layer_work_ms, problem.placement, list(problem.kinds)
    chunks = np.array([len(own) for own in placement.chunks_of_stage])
    overhead_ms = chunks * problem.overhead_ms
    inner = work_ms[:, 1:-1]
    are_alike = bool(inner.size) and bool((inner.round(9).min(axis=1) == inner.round(9).max(axis=1)).all())
    are_alike = are_alike and float(inner.round(9).min()) > 0
    ends_ms = np.zeros(placement.num_stages)
    for layer in {0, work_ms.shape[1] - 1}:
        stage = placement.stage_of_chunk[0 if layer == 0 else -1]
        ends_ms[stage] += work_ms[kinds[stage], layer]
        chunks[stage] -= 1
    shortest_ms = inner.min(axis=1, initial=np.inf)[kinds] if inner.size else np.zeros(placement.num_stages)
    least_ms = np.maximum(0, chunks) * shortest_ms
    worth = np.ones(len(work_ms))  # work of the first kind that a millisecond of each kind does at most
    if len(work_ms) > 1 and inner.size:
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.nan_to_num(inner[0] / inner, nan=0.0, posinf=1e30).max(axis=1)

    def may_suffice(limit_ms: float) -> bool:
        free_ms = limit_ms * _SLACK - overhead_ms - ends_ms
        if (free_ms < least_ms / _SAME).any():
            return False
        if are_alike:
            return bool(np.floor(free_ms / shortest_ms + 1e-9).sum() >= inner.shape[1])
        return bool((free_ms * worth[kinds]).sum() >= inner[0].sum() / _SAME)

    low_ms, high_ms = 0.0, largest_ms
    for _ in range(50):
        middle_ms = (low_ms + high_ms) / 2
        low_ms, high_ms = (low_ms, middle_ms) if may_suffice(middle_ms) else (middle_ms, high_ms)
    return low_ms


def _nothing_fits(problem: LayerCutProblem, nearest: Cuts) -> ValueError:
    """Returns the refusal that tells the nearest miss."""
    stage = int(np.argmax(problem.stage_bytes(nearest)[0] / problem.limits))
    needed, limit = int(problem.stage_bytes(nearest)[0, stage]), int(problem.limits[stage])
    return ValueError(
        f"no cut of {problem.costs.num_layers} layers into {problem.placement.num_chunks} chunks was found that fits: "
        f"at best stage {stage} needs {format_bytes(needed)} of {format_bytes(limit)}: hold fewer activations, or give "
        "more memory or stages"
    )


# -- the even cut ------------------------------------------------------------------------------------------------------


def even_cut(
    costs: ModelCosts,
    placement: Placement,
    num_microbatches: int,
    *,
    split: bool = True,
    replicas: int | tuple[int, ...] = 1,
) -> CutModel:
    """Returns the cut with equally many layers in each chunk; the first ones get one more where they do not divide.

    A type that occurs once in the model and stands at an end of it, or of a part of it, such as embedding, projector
    and head, does not count as a layer and goes with its neighbour. It is a chunk of its own where layers are fewer
    than chunks. Parts that share no chunk get chunks by their layers. Raises ValueError for more chunks than layers.
    """
    problem = LayerCutProblem(
        costs=costs, placement=placement, num_microbatches=num_microbatches, split=split, replicas=replicas
    )
    parts = _parts(costs)
    bodies, most = [max(1, body) for _, body, _ in parts], [sum(part) for part in parts]
    shares = [1] * len(parts)
    for _ in range(placement.num_chunks - len(parts)):
        unfilled = [part for part in range(len(parts)) if shares[part] < most[part]]
        shares[max(unfilled, key=lambda part: (bodies[part] / shares[part], -part))] += 1
    counts = [count for part, chunks in zip(parts, shares, strict=True) for count in _dealt(*part, chunks)]
    return problem.model(counts)


def _parts(costs: ModelCosts) -> list[tuple[int, int, int]]:
    """Returns for each part: layers that occur once at its beginning, its body, layers that occur once at its end."""
    occurrences, found, start = Counter(costs.layers), [], 0
    for stop in sorted({*(end + 1 for end in costs.ends), costs.num_layers}):
        names = costs.layers[start:stop]
        many = [place for place, name in enumerate(names) if occurrences[name] > 1]
        before, behind = (many[0], len(names) - 1 - many[-1]) if many else (0, 0)
        found.append((before, len(names) - before - behind, behind))
        start = stop
    return found


def _dealt(before: int, body: int, behind: int, chunks: int) -> list[int]:
    """Returns the number of layers in each chunk of a part."""
    lacking = max(0, chunks - body)
    alone_behind = min(behind, lacking - lacking // 2) if before else min(behind, lacking)
    alone_before = min(before, lacking - alone_behind)
    alone_behind = min(behind, lacking - alone_before)
    chunks -= alone_before + alone_behind
    share, larger = divmod(body, chunks)
    counts = [share + (chunk < larger) for chunk in range(chunks)]
    if alone_before < before:
        counts[0] += before - alone_before
    if alone_behind < behind:
        counts[-1] += behind - alone_behind
    return [1] * alone_before + counts + [1] * alone_behind
