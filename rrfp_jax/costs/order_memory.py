"""The memory that the stages of an order will need, from the bytes of their chunks.

How many microbatches reach a stage
-----------------------------------
Let chunk p feed chunk c and get a gradient back from it. Until c has run the B or I of a microbatch, p cannot run its
own, so that p's stage holds the microbatch all the while that it waits at c for its F, and on to that B or I. The
window of p's stage, or its footprint, bounds how many microbatches there are of these. Where the backward of c is one
task, c holds no others. Where it is split, c also holds those between I and W, as many as its own stage may hold. A
chunk without predecessors has nothing waiting.

Where p is all that feeds c and feeds no other chunk, a microbatch that waits at c, or lies there between F and B or I,
is an activation of p that p's stage holds, and of no other chunk's. So where a footprint bounds the activations of p's
stage, it bounds those at all the chunks that the stage feeds in this way together; those that they hold between I and
W, the footprint of their own stage bounds together. A window, in whole microbatches, bounds those at each chunk alone.

For the same reason an activation of c that lies between F and B has one of p's beside it, and so on: where chunks of
one stage feed each other in this way, through others, a footprint has no room for the last of them alone. Between I and
W that does not hold.

This says nothing where p and c pass no gradient, where bytes are bounded in place of microbatches, and where operations
move the activations of stages or make them again: all microbatches may then be at c. A step's first activations may
come while the step before still ends here; of that one nothing is held any more.

Rows that stages keep to
------------------------
The bytes of microbatches on a stage that keeps to a row come from an exact walk over the row.

Chunks differ in size, and so the largest ones need not be at their peaks together. Each activation takes its stash, and
room for the gradient that may wait for it, from the start of its F to the end of its B or I; and its residuals for W
from there to the end of its W. While an I runs both may be there in part, of which the larger counts: the program's
results take the place of its inputs.

Beside these, inputs wait for their F. A microbatch that waits at chunk c, or lies there between F and backward, lies
between F and backward at the chunk p before as well, since the gradient comes back through c. The row of p's stage says
how many microbatches that can be at a time, and the own row how many of these are past their F at each of its places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.core import Order
from rrfp_jax.core.memory import memory_changes, memory_unit
from rrfp_jax.costs.forecast import ChunkBytes, Reach, StageForecast, forecast_stage, moved_activations
from rrfp_jax.schedules import PipelineGraph, ScheduleTable, Task, TaskKind


def forecast_memory(order: Order, sizes: Mapping[int, ChunkBytes], num_microbatches: int) -> list[StageForecast]:
    """The predicted peak of every stage; ``num_microbatches`` is a replica's share."""
    none = (None,) * len(order.windows)
    unit = memory_unit(order.graph)
    footprints = none if order.footprints is None else tuple(-(-limit // unit) for limit in order.footprints)
    capacities = order.capacities or none
    return [
        forecast_stage(
            [_with_remaking(sizes[c]) if _is_remade(order.graph, c) else sizes[c] for c in chunks],
            order.windows[stage],
            num_microbatches,
            reaches=reaches(order, stage),
            paths=paths(order.graph, chunks),
            footprint=_of_row(order, stage) if footprints[stage] is None else footprints[stage],
            in_row=_bytes_of_row(order, stage, sizes),
            capacity=capacities[stage],
            moved=moved_activations(order.graph, chunks, _row_kept(order, stage)),
        )
        for stage, chunks in enumerate(order.placement.chunks_of_stage)
    ]


def forecast_evaluation(order: Order, sizes: Mapping[int, ChunkBytes]) -> list[StageForecast]:
    """The predicted peak of every stage in steps that evaluate: nothing is held for a backward, and read-ahead bounds
    the activations that wait.

    Args:
        order: that of evaluation (:meth:`rrfp_jax.core.Order.evaluating`).
        sizes: of its forwards.
    """
    waiting = max((limit for _, limit in order.read_ahead), default=0)
    return [
        forecast_stage([replace(sizes[c], stash=0, owed=0, output_grads=0) for c in chunks], waiting, waiting)
        for chunks in order.placement.chunks_of_stage
    ]


def check_evaluation_fits(forecasts: Sequence[StageForecast], limits: Sequence[int | None]) -> None:
    """Raise ValueError where an evaluation is predicted to need more than a stage's limit."""
    for stage, (forecast, limit) in enumerate(zip(forecasts, limits, strict=True)):
        if limit is not None and forecast.peak > limit:
            raise ValueError(
                f"stage {stage} is predicted to need {format_bytes(forecast.peak)} in evaluations, and has "
                f"{format_bytes(limit)}: make the microbatches of evaluation sets smaller"
            )


def reaches(order: Order, stage: int) -> tuple[Reach, ...]:
    """How many activations may be at the chunks of a stage at a time, waiting for their F or held; chunks that one
    footprint bounds are taken together."""
    chunks = order.placement.chunks_of_stage[stage]
    places: dict[tuple[int | None, int | None], list[int]] = {}
    for place, chunk in enumerate(chunks):
        feeder = _only_feeder(order, chunk)
        places.setdefault((feeder, chunk if feeder is None else None), []).append(place)
    return tuple(
        Reach(chunks=tuple(together), number=max(_reached(order, chunks[place]) for place in together))
        for together in places.values()
    )


def paths(graph: PipelineGraph, chunks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """A stage's chunks by their places: each activation that it holds of one has another beside it, of the same
    microbatch, of the chunk before it in the same path."""
    found: dict[int, tuple[int, ...]] = {}
    """By the chunk that ends them."""
    for place, chunk in enumerate(chunks):
        before = found.pop(_held_beside(graph, chunk, chunks), ())
        found[chunk] = (*before, place)
    return tuple(found.values())


def _held_beside(graph: PipelineGraph, chunk: int, chunks: Sequence[int]) -> int:
    """The nearest of some chunks that holds every microbatch that this one does; -1 where none is known to."""
    if graph.ops or chunk in graph.split:
        return -1
    while len(sources := graph.required_predecessors(chunk)) == 1:
        if not sources == graph.predecessors(chunk) == graph.gradient_predecessors(chunk):
            break
        (chunk,) = sources
        if chunk in chunks:
            return chunk
    return -1


def _only_feeder(order: Order, chunk: int) -> int | None:
    """Returns the stage whose footprint bounds the activations at a chunk together with those at others; None: no
    stage."""
    graph, sources = order.graph, order.graph.predecessors(chunk)
    if order.footprints is None or not _is_bounded(order, chunk) or len(sources) != 1:
        return None
    (source,) = sources
    return order.placement.stage_of_chunk[source] if len(graph.successors(source)) == 1 else None


def _is_bounded(order: Order, chunk: int) -> bool:
    """Returns whether the stages that feed a chunk hold the activations that are there."""
    graph = order.graph
    returns = set(graph.predecessors(chunk)) <= set(graph.gradient_predecessors(chunk))
    return returns and not graph.ops and order.capacities is None


def _reached(order: Order, chunk: int) -> int:
    """How many microbatches may be at a chunk at a time, as far as those that feed it bound them."""
    if not _is_bounded(order, chunk):
        return order.graph.num_microbatches
    sources = order.graph.predecessors(chunk)
    own = _held(order, chunk) if not sources or chunk in order.graph.split else 0
    return own + max((_held(order, source) for source in sources), default=0)


def _held(order: Order, chunk: int) -> int:
    """Microbatches of which the stage of a chunk may hold the chunk's activation."""
    stage = order.placement.stage_of_chunk[chunk]
    if order.footprints is None:
        return order.windows[stage]
    return -(-order.footprints[stage] // memory_unit(order.graph))


def _is_remade(graph: PipelineGraph, chunk: int) -> bool:
    return bool(graph.ops) and graph.operations.remakes_stash(chunk)


def _with_remaking(sizes: ChunkBytes) -> ChunkBytes:
    """The sizes of a chunk whose stash is made again: inputs stay, and gradients may wait, for every microbatch; and
    a forward may make a stash that is dropped."""
    waiting = sizes.inputs + sizes.output_grads
    return replace(sizes, inputs=waiting, temporaries=sizes.temporaries + sizes.stash)


def _bytes_of_row(order: Order, stage: int, sizes: Mapping[int, ChunkBytes]) -> int | None:
    """Returns the bytes of microbatches in the row that a stage keeps to; None where it keeps to none."""
    if order.table is None or order.graph.ops or _row_kept(order, stage) is None:
        return None
    return bytes_in_row(order.table, stage, sizes)


def _of_row(order: Order, stage: int) -> int | None:
    """Activations that a stage of several chunks holds in the row that it keeps to: it has passed on, or not yet got,
    some chunks of most microbatches in flight."""
    row = None if order.graph.ops else _row_kept(order, stage)
    if row is None or len(order.placement.chunks_of_stage[stage]) == 1:
        return None
    return max(accumulate(memory_changes(row, order.graph)), default=0)


def _row_kept(order: Order, stage: int) -> Sequence[Task] | None:
    """The row that a stage computes in this very order."""
    is_kept = order.table is not None and order.consumptions[stage].is_strict
    return order.table.orders[stage] if is_kept and order.table is not None else None


def bytes_in_row(table: ScheduleTable, stage: int, sizes: Mapping[int, ChunkBytes]) -> int:
    """The most that microbatches take, in flight or waiting, at any place of the stage's row; for tables without
    operations."""
    graph, chunks = table.graph, table.placement.chunks_of_stage[stage]
    coming = {chunk: _most_coming(table, chunk) for chunk in chunks}
    left = {chunk: len(graph.microbatches(chunk)) for chunk in chunks}
    held, between = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)

    def taken() -> int:
        return sum(
            (sizes[c].stash + sizes[c].output_grads) * between[c]
            + sizes[c].owed * (held[c] - between[c])
            + sizes[c].inputs * max(0, min(left[c], coming[c] - between[c]))
            for c in chunks
        )

    most = taken()
    for kind, chunk, _ in table.orders[stage]:
        if kind is TaskKind.F:
            left[chunk] -= 1
            held[chunk] += graph.has_backward(chunk)
            between[chunk] += graph.has_backward(chunk)
        most = max(most, taken())
        between[chunk] -= kind is graph.input_gradient_kind(chunk)
        held[chunk] -= kind is not TaskKind.F and kind is graph.accumulating_kind(chunk)
        most = max(most, taken())
    return most


def _most_coming(table: ScheduleTable, chunk: int) -> int:
    """Microbatches that may wait at a chunk, or lie there between F and backward."""
    graph, sources = table.graph, table.graph.predecessors(chunk)
    if not set(sources) <= set(graph.gradient_predecessors(chunk)):
        return len(graph.microbatches(chunk))
    rows, stage_of = table.orders, table.placement.stage_of_chunk
    return max((max(_between(graph, source, rows[stage_of[source]]), default=0) for source in sources), default=0)


def _between(graph: PipelineGraph, chunk: int, row: Sequence[Task]) -> Iterator[int]:
    """How many microbatches of a chunk are between F and backward, along the row."""
    number = 0
    for task in row:
        if task.chunk == chunk:
            number += task.kind is TaskKind.F
            yield number
            number -= task.kind is graph.input_gradient_kind(chunk)
