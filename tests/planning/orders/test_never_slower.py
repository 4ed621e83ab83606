"""What is found is never slower than any named table that fits; both timed by the ideal execution of tables."""

import numpy as np
import pytest

from rrfp_jax.planning.costs import CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.planning.orders import activation_weights, search_orders
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, Task, TaskKind, build_schedule, chain, schedule_names
from rrfp_jax.schedules.registry import KNOWN
from rrfp_jax.schedules.slots import execute
from tests.planning.orders.cuts import PLACEMENTS


def setting(seed: int, most_stages: int) -> tuple[CutModel, list[int]]:
    """A random cut, and room."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2, most_stages + 1))
    name = list(PLACEMENTS)[int(rng.integers(len(PLACEMENTS)))]
    placement = PLACEMENTS[name](p)
    m = p * int(rng.integers(1, 4)) + int(rng.integers(2)) * int(rng.integers(p))
    types = {}
    for chunk in range(placement.num_chunks):
        forward_ms, input_ms, weight_ms = rng.choice([1.0, 1.0, 1.5, 2.5], 3) * rng.choice([1.0, 1.0, 2.0])
        held = int(rng.integers(5, 11))
        types[f"layer {chunk}"] = LayerCosts(
            forward_ms=forward_ms,
            input_gradient_ms=input_ms,
            weight_gradient_ms=weight_ms,
            stash_bytes=held,
            owed_bytes=int(rng.integers(held + 1)),
        )
    links = LinkCosts(latency_ms=float(rng.choice([0.0, 0.2, 1.0])))
    costs = ModelCosts(layers=tuple(types), types=types, links=links)
    counts = (1,) * placement.num_chunks
    split = bool(rng.random() < 0.75)
    cut = CutModel(costs=costs, counts=counts, placement=placement, num_microbatches=m, split=split)
    weights = activation_weights(cut)
    share = rng.uniform(0.5, 2.5) * p
    return cut, [round(share * sum(weights[c] for c in chunks)) for chunks in placement.chunks_of_stage]


def plain_named_tables(cut: CutModel) -> list[ScheduleTable]:
    """Those of the cut's placement and backward, as one gets them by their names."""
    p, m, found = cut.placement.num_stages, cut.num_microbatches, []
    for name in schedule_names():
        chunks = KNOWN[name].shape.chunks_per_stage if KNOWN[name].shape.fixed_chunks else cut.placement.num_chunks // p
        try:
            table = build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m, chunks_per_stage=chunks))
        except ValueError:
            continue
        if table.placement == cut.placement and table.graph == chain(len(cut.counts), m, split=cut.split):
            found.append(table)
    return found


def makespan_ms(cut: CutModel, table: ScheduleTable) -> float:
    times = cut.durations_ms[0]

    def length(task: Task) -> float:
        forward_ms, input_ms, weight_ms = times[task.chunk, task.microbatch]
        of_kind = {TaskKind.F: forward_ms, TaskKind.I: input_ms, TaskKind.W: weight_ms}
        return float(of_kind.get(task.kind, input_ms + weight_ms))

    return execute(table, length, hop=cut.links.latency_ms).makespan


def fits(cut: CutModel, table: ScheduleTable, room: list[int]) -> bool:
    weights = activation_weights(cut)
    for order, limit in zip(table.orders, room, strict=True):
        held = 0.0
        for task in order:
            takes, frees = table.graph.memory_effect(task)
            held += takes * weights[task.chunk]
            if held > limit:
                return False
            held -= frees * weights[task.chunk]
    return True


def check(seed: int, most_stages: int, effort: int) -> int:
    """How many named tables there were to beat."""
    cut, room = setting(seed, most_stages)
    found = search_orders(cut, room, effort=effort)
    fitting = [table for table in plain_named_tables(cut) if fits(cut, table, room)]
    for order in found[:1]:
        order.table.validate()
        assert fits(cut, order.table, room)
        assert order.makespan_ms == pytest.approx(makespan_ms(cut, order.table))
        assert order.makespan_ms >= order.bound_ms
    for table in fitting:
        assert found[0].makespan_ms <= makespan_ms(cut, table) + 1e-6, table.name
    return len(fitting)


def test_some_settings() -> None:
    assert sum(check(seed, most_stages=3, effort=1_500) for seed in range(5)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_settings(first: int) -> None:
    assert sum(check(seed, most_stages=8, effort=20_000) for seed in range(first, first + 20)) >= 10
