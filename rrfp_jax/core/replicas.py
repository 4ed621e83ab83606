"""Data parallelism as one larger pipeline: the whole pipeline several times, side by side.

In replica ``r`` of R, chunk ``c`` of a pipeline on S stages is chunk ``c * R + r`` of the larger pipeline, on stage
``r * S + s`` where ``c`` is on stage ``s``. So edges lead to larger chunks whatever replicas they join. A replica owns
a range of consecutive microbatches, so that microbatches keep their numbers over the whole step, and its chunks share
parameters with their counterparts. So every replica of a stage is a stage of its own, with an arbiter, a window and an
order of its own; a chunk's R waits until its gradients are complete in all replicas, by messages as any other task
does; and simulation and checking need to know nothing of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rrfp_jax.schedules import Absences, PipelineGraph, Placement, ScheduleTable, Task, absences


@dataclass(frozen=True, kw_only=True)
class Replication:
    """How chunks of the larger pipeline relate to those of one replica."""

    num_chunks: int
    """The number of chunks of one replica."""
    num_microbatches: int
    """The number of microbatches of one replica."""
    num_replicas: int

    def chunk(self, chunk: int, replica: int) -> int:
        return chunk * self.num_replicas + replica

    def base(self, chunk: int) -> int:
        """Returns the number within its replica of a chunk of the larger pipeline."""
        return chunk // self.num_replicas

    def replica(self, chunk: int) -> int:
        """Returns the replica to which a chunk of the larger pipeline belongs."""
        return chunk % self.num_replicas

    def of_replica(self, chunks: Iterable[int], replica: int) -> list[int]:
        """Returns the chunks among these that belong to a replica."""
        return [chunk for chunk in chunks if self.replica(chunk) == replica]

    def owner(self, microbatch: int) -> int:
        return microbatch // self.num_microbatches

    def pairs(self, pairs: Iterable[tuple[int, int]]) -> Absences:
        """Returns pairs (chunk of one replica, microbatch of the step) as pairs of the larger pipeline."""
        return absences((self.chunk(c, self.owner(m)), m) for c, m in pairs)

    def task(self, task: Task, replica: int) -> Task:
        """Returns a replica's task in the larger pipeline."""
        kind, chunk, m = task
        return Task(kind, self.chunk(chunk, replica), m if m < 0 else replica * self.num_microbatches + m)


def replication(graph: PipelineGraph, num_replicas: int) -> Replication:
    """Returns the replication of a pipeline with this graph; raises ValueError for less than 1 replica."""
    if num_replicas < 1:
        raise ValueError(f"the number of replicas is {num_replicas}: give at least 1")
    return Replication(num_chunks=graph.num_chunks, num_microbatches=graph.num_microbatches, num_replicas=num_replicas)


def microbatches_per_replica(num_microbatches: int, num_replicas: int) -> int:
    """Returns each replica's share of a step's microbatches; raises ValueError where there is no equal one."""
    if num_microbatches % num_replicas:
        raise ValueError(
            f"{num_microbatches} microbatches cannot be dealt out evenly to {num_replicas} data-parallel replicas: "
            f"give a multiple of {num_replicas}"
        )
    return num_microbatches // num_replicas


def replicated_placement(placement: Placement, num_replicas: int) -> Placement:
    num_stages = placement.num_stages
    return Placement(tuple(r * num_stages + s for s in placement.stage_of_chunk for r in range(num_replicas)))


def replicated_graph(graph: PipelineGraph, num_replicas: int) -> PipelineGraph:
    """Returns the graph of all replicas; ``graph`` is that of one, with its own share of the microbatches."""
    if num_replicas == 1:
        return graph
    copies, replicas = replication(graph, num_replicas), range(num_replicas)
    share = graph.num_microbatches
    tied = {chunk for group in graph.shared for chunk in group}
    groups = [*graph.shared, *((c,) for c in range(graph.num_chunks) if c not in tied)]
    return PipelineGraph(
        copies.num_chunks * num_replicas,
        share * num_replicas,
        tuple(
            edge._replace(source=copies.chunk(edge.source, r), target=copies.chunk(edge.target, r))
            for edge in graph.edges
            for r in replicas
        ),
        absent=tuple((copies.chunk(c, r), mask << r * share) for c, mask in graph.absent for r in replicas),
        split=frozenset(copies.chunk(c, r) for r in replicas for c in graph.split),
        frozen=frozenset(copies.chunk(c, r) for r in replicas for c in graph.frozen),
        shared=tuple(tuple(copies.chunk(c, r) for r in replicas for c in group) for group in groups),
        ops=tuple(
            replace(
                op,
                chunks=op.chunks and frozenset(copies.chunk(c, r) for r in replicas for c in op.chunks),
                pairs=op.pairs
                and frozenset((copies.chunk(c, r), r * share + m) for r in replicas for c, m in op.pairs),
                waits=frozenset((copies.task(a, r), copies.task(b, r)) for r in replicas for a, b in op.waits),
            )
            for op in graph.ops
        ),
        owned=tuple((r * share, (r + 1) * share) for _ in range(graph.num_chunks) for r in replicas),
    )


def replicated_table(table: ScheduleTable, num_replicas: int) -> ScheduleTable:
    """Returns the table of all replicas: every one follows the same rows with its own microbatches."""
    if num_replicas == 1:
        return table
    copies = replication(table.graph, num_replicas)
    return ScheduleTable(
        table.name,
        replicated_placement(table.placement, num_replicas),
        replicated_graph(table.graph, num_replicas),
        tuple(
            tuple(None if task is None else copies.task(task, r) for task in row)
            for r in range(num_replicas)
            for row in table.rows
        ),
        weights_fill=table.weights_fill,
    )
