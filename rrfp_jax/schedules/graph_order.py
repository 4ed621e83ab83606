"""Orders for any graph of chunks on any placement: encoders and decoders, alone on their stages or sharing them.

Every task gets a *moment*, a number, and a stage runs its tasks by their moments. Let ``d(c)`` be the longest way from
chunk c to the loss, in hops between stages (0 where chunks on one stage follow each other), ``D`` the longest of all
that have a backward, and k how far the warm-up reaches: 1 in 1F1B and ZB-H1, 2 in ZB-H2. Then, for microbatch m,

* ``F(c, m)`` is at ``2 m - (2 k - 1) d(c) + 1/2``;
* its backward B, or I where it is split, at ``2 m + d(c) + 1``;
* W, where it is filled in late, at ``2 m + 2 k (D - d(c)) + d(c) + 5/4``; otherwise it follows its I at once.

So a stage with one chunk runs ``k d(c)`` warm-up forwards, then forward and backward in turn: on a chain of p stages
``d(c) = p - 1 - c``, which gives the published tables. A chunk holds a microbatch from F to its B (or W), at most
``k d(c) + 1`` of them at once, or ``k D + 1`` with late W.

No order can deadlock, whatever the graph: where chunk p feeds chunk c on another stage, ``d(p) > d(c)``, so that
``F(p, m)`` is before ``F(c, m)``, and the backward of c before that of p; F of a chunk is before its backward, and I
before W. On one stage the moments may be equal, and then forwards go by ascending and backwards by descending chunk. So
all dependencies lead forward in one order of all tasks, and every stage follows that order. It holds as well for any
part of the tasks: what a step lacks is skipped. A chunk that runs F alone has forwards in these places only.
"""

from collections.abc import Callable
from dataclasses import replace

from rrfp_jax.schedules.registry import ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind, chain, linear

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


def hops_to_loss(placement: Placement, graph: PipelineGraph) -> tuple[int, ...]:
    """For every chunk the longest way to a chunk that nobody reads, in hops from one stage to another."""
    hops = [0] * graph.num_chunks
    for chunk in reversed(range(graph.num_chunks)):
        here = placement.stage_of_chunk[chunk]
        ways = (hops[s] + (placement.stage_of_chunk[s] != here) for s in graph.successors(chunk))
        hops[chunk] = max(ways, default=0)
    return tuple(hops)


def requested_pipeline(request: ScheduleRequest, *, split: bool) -> tuple[Placement, PipelineGraph]:
    """The placement and graph of a request: its own, or a chain with one chunk per stage."""
    graph = request.graph or chain(request.num_stages, request.num_microbatches)
    placement = request.placement or linear(request.num_stages)
    return placement, replace(graph, split=frozenset(range(graph.num_chunks)) if split else frozenset())


def one_after_the_other(name: str, request: ScheduleRequest) -> ScheduleTable:
    """All forwards of a stage, then all its backwards."""
    placement, graph = requested_pipeline(request, split=False)
    hops = hops_to_loss(placement, graph)

    def moment(task: Task) -> tuple[float, ...]:
        return (task.kind is not F, *_moment(task, hops, reach=1, late=0))

    return _by_moment(name, placement, graph, moment)


def in_turn(name: str, request: ScheduleRequest, *, reach: int, split: bool) -> ScheduleTable:
    """``reach`` warm-up forwards per hop, then forward and backward in turn; with ``split`` W is filled in late."""
    placement, graph = requested_pipeline(request, split=split)
    hops = hops_to_loss(placement, graph)
    late = reach * max(depth for chunk, depth in enumerate(hops) if graph.has_backward(chunk) or depth == 0)
    return _by_moment(name, placement, graph, lambda task: _moment(task, hops, reach=reach, late=late))


def _moment(task: Task, hops: tuple[int, ...], *, reach: int, late: int) -> tuple[float, ...]:
    """The task's moment, and which chunk goes first among equal ones."""
    kind, chunk, microbatch = task
    depth = hops[chunk]
    if kind is F:
        return (2 * microbatch - (2 * reach - 1) * depth + 0.5, chunk)
    if kind is W:
        return (2 * (microbatch + late - reach * depth) + depth + 1.25, -chunk)
    return (2 * microbatch + depth + 1.0, -chunk)


def _by_moment(
    name: str, placement: Placement, graph: PipelineGraph, moment: Callable[[Task], tuple[float, ...]]
) -> ScheduleTable:
    orders = [sorted(graph.tasks(chunks), key=moment) for chunks in placement.chunks_of_stage]
    return ScheduleTable.from_orders(name, placement, graph, orders)
