"""The named tables of a cut: every schedule of the registry that has its placement, in the variants that memory allows.

Those that take profiled times get the cut's own, those that take a limit of memory or windows the largest that the room
has. A fused table also orders a split backward, each I with its W right behind it: it sends gradients on sooner, and is
never slower; such an order has no name of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from rrfp_jax.planning.costs import CutModel
from rrfp_jax.planning.orders.problem import Problem
from rrfp_jax.schedules import Task, TaskKind, chain
from rrfp_jax.schedules.registry import KNOWN, ScheduleEntry, build_schedule, schedule_names
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable


def named_tables(
    cut: CutModel, problem: Problem, *, fused_too: bool = True
) -> Iterator[tuple[ScheduleTable, ScheduleRequest]]:
    """All of them with what they are built from, quick or not, whether they fit the room or not.

    ``fused_too``: also those with a whole backward for a cut with a split one.
    """
    for name in schedule_names():
        entry = KNOWN[name]
        plain = _request(cut, entry)
        if plain is None or (cut.split and f"{name}-split" in KNOWN):
            continue
        if cut.split and not fused_too and not entry.split_backward:
            continue
        seen: list[ScheduleTable] = []
        for request in _variants(name, entry, plain, problem):
            try:
                table = built_table(name, request)
            except ValueError:  # these sizes do not suit it
                continue
            if (cut.split or not table.graph.split) and table not in seen:
                seen.append(table)
                yield table, request


@lru_cache(maxsize=256)  # another cut on the same placement has the same tables, but for those made from times
def built_table(name: str, request: ScheduleRequest) -> ScheduleTable:
    """A named table, made once for equal requests; raises ValueError where these sizes do not suit it."""
    return build_schedule(name, request)


def _request(cut: CutModel, entry: ScheduleEntry) -> ScheduleRequest | None:
    """None where the schedule does not order a chain on this placement."""
    placement, m = cut.placement, cut.num_microbatches
    per_stage = placement.num_chunks // placement.num_stages
    plain = ScheduleRequest(num_stages=placement.num_stages, num_microbatches=m)
    if entry.from_times:
        times_ms = cut.durations_ms[0].mean(axis=1).sum(axis=0) / placement.num_stages
        forward_ms, input_gradient_ms, weight_gradient_ms = (float(ms) + cut.costs.task_ms for ms in times_ms)
        durations_ms = forward_ms, input_gradient_ms, weight_gradient_ms
        plain = replace(plain, durations_ms=durations_ms, comm_ms=cut.links.latency_ms)
    graph = chain(placement.num_chunks, m)
    if entry.any_graph:
        return replace(plain, graph=graph, placement=placement)
    if entry.shape.fixed_chunks and per_stage != entry.shape.chunks_per_stage:
        return None
    try:
        suits = (
            entry.shape.placement(placement.num_stages, per_stage) == placement
            and entry.shape.graph(placement.num_stages, per_stage, m) == graph
        )
    except ValueError:
        return None
    return replace(plain, chunks_per_stage=per_stage) if suits else None


def _variants(name: str, entry: ScheduleEntry, plain: ScheduleRequest, problem: Problem) -> Iterator[ScheduleRequest]:
    """The request itself and others that may be quicker or hold less."""
    yield plain
    p, m = plain.num_stages, plain.num_microbatches
    if entry.has_groups:
        yield from (replace(plain, group_size=size) for size in range(-(-p // 2), p + 1) if m % size == 0)
    held = microbatches_that_fit(problem)
    if name == "zb-auto":
        for limit in sorted({min(held), max(held), p, (min(held) + max(held)) // 2}):
            if limit >= 1 and limit != 2 * p:
                yield replace(plain, memory_limit=float(limit))
    if name == "eager-1f1b" and min(held) >= 1:
        windows = tuple(min(held[: stage + 1]) for stage in range(p))
        yield replace(plain, window=windows)
        yield replace(plain, window=tuple(max(1, min(windows[0], windows[stage]) - stage) for stage in range(p)))


def microbatches_that_fit(problem: Problem) -> list[int]:
    """On each stage, with all their chunks; at most all of them."""
    m = problem.num_microbatches
    sums = [sum(problem.weights[c * m] for c in chunks) for chunks in problem.placement.chunks_of_stage]
    return [
        m if room == inf or not each else min(m, int(room // each))
        for room, each in zip(problem.room, sums, strict=True)
    ]


def split_orders(orders: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """The orders with I and W in the place of B."""
    parts = (TaskKind.I, TaskKind.W)
    return [
        [
            part
            for task in order
            for part in ([task._replace(kind=k) for k in parts] if task.kind is TaskKind.B else [task])
        ]
        for order in orders
    ]
