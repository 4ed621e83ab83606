"""The cut that one makes without costs: layers dealt out evenly, the embedding with the first chunk, the head with the
last one."""

from collections import Counter

from rrfp_jax.planning.costs import CutModel, ModelCosts
from rrfp_jax.planning.cuts.problem import CutProblem
from rrfp_jax.schedules import Placement


def even_cut(
    costs: ModelCosts,
    placement: Placement,
    num_microbatches: int,
    *,
    split: bool = True,
    stage_factors: tuple[float, ...] = (),
    replicas: int = 1,
) -> CutModel:
    """As many layers to each chunk, the first ones one more where they do not come out even.

    What occurs once in the model and stands at an end of it, or of a part of it, such as embedding, projector and head,
    does not count as a layer and goes with its neighbour; it is a chunk of its own where layers are fewer than chunks.
    Parts that share no chunk get chunks by their layers. Raises ValueError for more chunks than there are layers.
    """
    CutProblem(costs=costs, placement=placement, num_microbatches=num_microbatches, split=split)
    parts = _parts(costs)
    shares = _shares([max(1, body) for _, body, _ in parts], [sum(part) for part in parts], placement.num_chunks)
    counts = tuple(count for part, chunks in zip(parts, shares, strict=True) for count in _dealt(*part, chunks))
    return CutModel(
        costs=costs,
        counts=counts,
        placement=placement,
        num_microbatches=num_microbatches,
        split=split,
        stage_factors=stage_factors,
        replicas=replicas,
    )


def _parts(costs: ModelCosts) -> list[tuple[int, int, int]]:
    """Of each part: layers that occur once at its beginning, its body, layers that occur once at its end."""
    occurrences, found, start = Counter(costs.layers), [], 0
    for stop in sorted({*(end + 1 for end in costs.ends), costs.num_layers}):
        names = costs.layers[start:stop]
        many = [place for place, name in enumerate(names) if occurrences[name] > 1]
        before, behind = (many[0], len(names) - 1 - many[-1]) if many else (0, 0)
        found.append((before, len(names) - before - behind, behind))
        start = stop
    return found


def _shares(bodies: list[int], most: list[int], num_chunks: int) -> list[int]:
    """How many chunks each part gets: one after the other goes to the part with most layers per chunk."""
    shares = [1] * len(bodies)
    for _ in range(num_chunks - len(bodies)):
        open_parts = [part for part in range(len(bodies)) if shares[part] < most[part]]
        shares[max(open_parts, key=lambda part: (bodies[part] / shares[part], -part))] += 1
    return shares


def _dealt(before: int, body: int, behind: int, chunks: int) -> list[int]:
    """The layers of each chunk of a part."""
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
    return _alone(alone_before) + counts + _alone(alone_behind)


def _alone(chunks: int) -> list[int]:
    return [1] * chunks
