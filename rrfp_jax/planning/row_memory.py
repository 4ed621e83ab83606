"""What microbatches take on a stage that keeps to a row: an exact walk over the row, in bytes.

Chunks differ in size, and so the largest ones need not be at their peaks together. Each activation takes its stash, and
room for the gradient that may wait for it, from the start of its F to the end of its B or I; and what it owes from
there to the end of its W. While an I runs both may be there in part, of which the larger counts: what the program makes
of one takes the place of the other.

Beside these, inputs wait for their F. A microbatch that waits at chunk c, or lies there between F and backward, lies
between F and backward at the chunk p before as well, since the gradient comes back through c. The row of p's stage says
how many microbatches that can be at a time, and the own row how many of these are past their F at each of its places.
"""

from collections.abc import Iterator, Mapping, Sequence

from rrfp_jax.planning.forecast import ChunkBytes
from rrfp_jax.schedules import PipelineGraph, ScheduleTable, Task, TaskKind


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
