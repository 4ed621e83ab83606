"""The messages for which a process prepares: in runs whose owners may change, to and from all replicas."""

from rrfp_jax.core import Message, MessageKind, Ordering, StepRules
from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.runtime.process import _between_replicas, _messages
from rrfp_jax.schedules import Edge, PipelineGraph, linear


def test_all_ways_of_all_owners_are_among_them_and_no_others() -> None:
    base = PipelineGraph(3, 4, (Edge(0, 2), Edge(1, 2)), frozen=frozenset({0}))
    order = Ordering().resolve(linear(3), base, num_replicas=2)
    stage_of = order.placement.stage_of_chunk
    for unit in range(6):
        arbiter = order.arbiters(StepRules(), members={unit: (0, 1)})[0]
        normal = _messages([arbiter])
        found = {m[:3] for m in _between_replicas(normal, order.graph, order.placement, {unit})}
        every = StepOwners(((0, 0, 1, 1, 0, 1, 0, 1), (0, 1, 0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 0, 1, 1, 0)))
        plan = arbiter.plan_without((), owners=every).plan
        needed = {m[:3] for m in (*plan.arrivals, *(m for sends in plan.sends for m, _ in sends))}
        assert {m[:3] for m in normal} <= needed == found
        between = [Message(*way) for way in found if way[0] in (MessageKind.ACTIVATION, MessageKind.GRADIENT)]
        assert all(unit in (stage_of[m.source], stage_of[m.target]) for m in between)
        assert len(between) == {0: 2, 1: 4, 2: 6}[unit % 3]
