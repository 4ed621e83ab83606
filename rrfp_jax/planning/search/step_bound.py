"""What no order of a cut can beat as an interval between the ends of steps, R and U included."""

from rrfp_jax.costs import CutModel, ModelCosts
from rrfp_jax.planning.search.points import Point
from rrfp_jax.planning.search.strict_times import once_per_step_ms
from rrfp_jax.simulation import lower_bound


def step_bound_ms(cut: CutModel) -> float:
    """The bound of the row's tasks, with what must come before and behind it.

    No stage runs anything of a step before U of the step before has run where the microbatches enter. Behind the last
    task of a stage whose backward is split come all its own R, as its last task may be a W; behind the drain of any
    other come those of the stage where the gradients end.
    """
    host_ms = cut.costs.task_ms
    bound = lower_bound(cut.graph, cut.placement, cut.durations_ms[0], links=cut.links, host_ms=host_ms)
    reduce_ms, update_ms = once_per_step_ms(cut)
    entry = cut.placement.stage_of_chunk[0]
    last_ms = cut.simulated_costs().reduce_ms
    assert isinstance(last_ms, tuple)
    longest = bound.critical_path_ms
    for stage, stage_ms in enumerate(bound.stage_ms):
        longest = max(longest, stage_ms + (reduce_ms[stage] if cut.split else last_ms[0]))
    own_ms = max(work_ms + reduce_ms[stage] + update_ms[stage] for stage, work_ms in enumerate(cut.stage_work_ms))
    return max(own_ms, longest + update_ms[entry])


def quick_bound_ms(point: Point, costs: ModelCosts, *, split: bool) -> float:
    """What no cut can beat either, without making one.

    Let a stage work x_s for each of m microbatches, all stages X together. With one chunk per stage, stage s starts
    once those before it have run a forward, at least the share f of what they work, so a step takes at least
    ``f (x_0 + ... + x_(s-1)) + m x_s``. The largest of these is least where all are equal, and then it is
    ``m X / sum of (1 - f / m)^s``. A whole backward must also come back through them: f is 1. With several chunks at
    least a layer and a message for each stage before come first, half of them on average.
    """
    shape, m, p = point.shape, point.shape.num_microbatches, point.shape.num_stages
    layers = range(costs.num_layers)
    works = [costs.work_ms(layer, split=split) for layer in layers]
    forwards = [costs.of(layer).forward_ms * costs.mean_factor(layer) for layer in layers]
    once_ms = sum(
        costs.of(layer).update_ms + costs.links.sum_ms(costs.of(layer).gradient_bytes, shape.data) for layer in layers
    )
    message_ms = costs.links.latency_ms * (p - 1) / 2
    if costs.factors:  # the first microbatch may be much shorter than others
        return (m * sum(works) + once_ms) / p
    if point.chunks > 1:
        return (m * sum(works) + once_ms) / p + min(forwards) * (p - 1) / 2 + message_ms
    share = min((f / x for f, x in zip(forwards, works, strict=True) if x), default=0.0) if split else 1.0
    left = 1 - share / m
    equal_ms = m * sum(works) / sum(left**stage for stage in range(p))
    return max((m * sum(works) + once_ms) / p, equal_ms)
