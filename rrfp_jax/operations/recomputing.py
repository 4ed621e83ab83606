"""Recompute: a chunk's forward runs once more before its backward, as a task of its own that can fill a gap.

::

    table = build_schedule("1f1b", ScheduleRequest(num_stages=8, num_microbatches=32))
    ordering = Ordering(schedule=recomputed(table, 0.9))

With ``remat="full"`` a backward computes everything again within itself, while the stage before waits for it. Here F
keeps only what it read, and ``C`` makes what the backward needs while the gradient is still on its way: the same work,
off the path along which the gradient travels. Until its backward runs, such a stash takes memory; how many do at a
time the lead decides.

In deterministic mode all bits are those of a run without: one program runs F and C. Otherwise F has a program of its
own, that makes nothing for the stash; its output may be rounded in another way.
"""

from collections.abc import Collection, Iterable
from typing import Any

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules import COMPUTE, Op, ScheduleTable, TaskKind, with_operations

LETTER = "C"
Pair = tuple[int, int]
"""A chunk and a microbatch."""


@typed
def recompute(
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    chunks: Collection[int] | None = None,
    pairs: Iterable[Pair] | None = None,
) -> Op:
    """The operation that makes stashes again, for the ``ops`` of an :class:`rrfp_jax.core.Ordering` whose hint
    ranks what is ready: it queues with backwards, and is issued once their gradients are here.

    Args:
        part: of what a chunk keeps of a microbatch, how much is made again; the rest is what F read
            (:func:`part_made` tells it). Smaller is safe: what F keeps is then counted as more than it is.
        lead: how many tasks ahead of its backward it stands in a table.
        ms: how long it takes, for simulation.
        chunks, pairs: which (chunk, microbatch) pairs have it; None: all. They must have a backward.
    """
    return Op(
        LETTER,
        after=("F",),
        before=("B",),
        holds=part,
        lead=lead,
        ms=ms,
        chunks=None if chunks is None else frozenset(chunks),
        pairs=None if pairs is None else frozenset(pairs),
        remakes_stash=True,
        run=remake,
    )


@typed
def recomputed(
    table: ScheduleTable,
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    pairs: Iterable[Pair] | None = None,
) -> ScheduleTable:
    """The table with :func:`recompute`, by default for all pairs whose backward comes more than ``lead`` tasks behind
    their forward: the others would only take longer.

    Raises ValueError where there is no such pair.
    """
    chosen = frozenset(_pairs_that_wait(table, lead) if pairs is None else pairs)
    if not chosen:
        raise ValueError(
            f"no backward of schedule {table.name!r} comes more than {lead} tasks behind its forward: recompute would "
            "save nothing; give a smaller lead, or leave it out"
        )
    return with_operations(table, [recompute(part, lead=lead, ms=ms, pairs=chosen)])


def remake(context: Any) -> Any:
    """Run the forward once more, and keep what it leaves for the backward."""
    output, context.stash = context.forward()
    return output


def _pairs_that_wait(table: ScheduleTable, lead: int) -> set[Pair]:
    graph, found = table.graph, set[Pair]()
    for rows in (table, table.hint):
        for order in () if rows is None else rows.orders:
            computed = [task for task in order if graph.lane(task.kind) == COMPUTE]
            forwards = {(t.chunk, t.microbatch): place for place, t in enumerate(computed) if t.kind is TaskKind.F}
            for place, (kind, *pair) in enumerate(computed):
                chunk, microbatch = pair
                is_backward = graph.has_backward(chunk) and kind is graph.input_gradient_kind(chunk)
                if is_backward and place - forwards[chunk, microbatch] > lead + 1:
                    found.add((chunk, microbatch))
    return found
