"""Recompute: a chunk's forward runs once more before its backward, as a task of its own that can fill a gap.

::

    table = build_schedule("1f1b", ScheduleRequest(num_stages=8, num_microbatches=32))
    ordering = Ordering(schedule=recomputed(table, 0.9))

With ``remat="full"`` a backward computes everything again within itself, while the stage before waits for it. Here F
keeps only its inputs, and ``C`` makes the rest of the stash while the gradient is still on its way: the same work,
off the path along which the gradient travels. Until its backward runs, such a stash takes memory; how many do at a
time the lead decides.

In deterministic mode all bits are those of a run without: one program runs F and C. Otherwise F has a program of its
own, that makes nothing for the stash; its output may be rounded in another way.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules import COMPUTE, Op, PipelineGraph, ScheduleTable, TaskKind, with_operations

if TYPE_CHECKING:
    from rrfp_jax.programs.batches import Bucket
    from rrfp_jax.programs.chunk import Chunk
    from rrfp_jax.programs.remat import Remat
    from rrfp_jax.runtime.operations.context import OperationContext

_LETTER = "C"
_Pair = tuple[int, int]
"""A chunk and a microbatch."""


@typed
def recompute(
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    chunks: Collection[int] | None = None,
    pairs: Iterable[_Pair] | None = None,
) -> Op:
    """Returns the operation that makes stashes again, for the ``ops`` of an :class:`rrfp_jax.core.Ordering` whose hint
    ranks ready tasks: it queues with backwards, and is issued once their gradients are here.

    Args:
        part: the part of the bytes that a chunk keeps of a microbatch which is made again; the rest are the inputs of F
            (:func:`part_made` computes it). A smaller part is safe: F then counts as keeping more than it does.
        lead: how many tasks ahead of its backward it stands in a table.
        ms: how long it takes, for simulation.
        chunks, pairs: the chunks and the (chunk, microbatch) pairs that have it; None: all. They must have a backward.
    """
    return Op(
        _LETTER,
        after=("F",),
        before=("B",),
        holds=part,
        lead=lead,
        ms=ms,
        chunks=None if chunks is None else frozenset(chunks),
        pairs=None if pairs is None else frozenset(pairs),
        remakes_stash=True,
        run=_remake,
    )


@typed
def recomputed(
    table: ScheduleTable,
    part: float = 1.0,
    *,
    lead: int = 0,
    ms: float = 0.0,
    pairs: Iterable[_Pair] | None = None,
) -> ScheduleTable:
    """Returns the table with :func:`recompute`, by default for all pairs whose backward comes more than ``lead`` tasks
    behind their forward: the others would only take longer.

    Raises ValueError where there is no such pair.
    """
    chosen = frozenset(_pairs_that_wait(table, lead) if pairs is None else pairs)
    if not chosen:
        raise ValueError(
            f"no backward of schedule {table.name!r} comes more than {lead} tasks behind its forward: recompute would "
            "save nothing; give a smaller lead, or leave it out"
        )
    return with_operations(table, [recompute(part, lead=lead, ms=ms, pairs=chosen)])


def part_made(
    chunks: "Iterable[Chunk]", graph: PipelineGraph, bucket: "Bucket", *, remat: "Remat | Iterable[Remat]" = "none"
) -> float:
    """Returns the part of the bytes that the chunks keep of a microbatch which :func:`recompute` makes again.

    It is computed from the shapes of a microbatch's leaves, and nothing is compiled: the smallest part of any chunk
    with a backward, rounded down to whole percent.
    """
    import jax  # Here, since schedules are also simulated without JAX.

    from rrfp_jax.programs.chunk_plan import plan_chunk
    from rrfp_jax.programs.remat import remat_of_chunks
    from rrfp_jax.programs.shapes import derive_shapes
    from rrfp_jax.programs.specs import num_bytes

    own = tuple(chunks)
    policies = remat_of_chunks(remat if isinstance(remat, str) or callable(remat) else tuple(remat), len(own))
    shapes = derive_shapes(own, graph, bucket)
    parts = []
    for index, policy in enumerate(policies):
        if graph.has_backward(index):
            stash = plan_chunk(index, own, graph, shapes, remat=policy).residuals.specs
            total = num_bytes(jax.tree.leaves(stash))
            parts.append(max(0, total - num_bytes(shapes[index].inputs)) / max(1, total))
    return int(100 * min(parts)) / 100


def _remake(context: "OperationContext") -> Any:
    """Runs the forward once more, and keeps the stash that it makes; returns its output, to wait for."""
    assert context.forward is not None
    output, context.stash = context.forward()
    return output


def _pairs_that_wait(table: ScheduleTable, lead: int) -> set[_Pair]:
    graph, found = table.graph, set[_Pair]()
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
