"""Data parallelism as one larger pipeline: the whole pipeline several times, side by side.

In replica ``r`` of R, chunk ``c`` of a pipeline on S stages is chunk ``c * R + r`` of the larger pipeline, on stage
``r * S + s`` where ``c`` is on stage ``s``. So edges lead to larger chunks whatever replicas they join. A replica owns
a block of consecutive microbatches, so that microbatches keep their numbers over the whole step, and its chunks share
parameters with their counterparts. So every replica of a stage is a stage of its own, with an arbiter, a window and an
order of its own; a chunk's R waits until its gradients are complete in all replicas, by messages as any other task
does; and simulation and checking need to know nothing of it.

Other owners
------------
A step may have other owners than these blocks: a table says which replica runs each microbatch on each stage. A
microbatch then goes from replica to replica, along edges between all that have one in common. Its loss, its random
keys and its weight follow from its number and the step's, so owners change nothing but the order of sums. Where a
*unit*, one replica of one stage, is lost, it owns nothing and takes no part in sums, reports and updates either.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from rrfp_jax.field_rules import check_types
from rrfp_jax.schedules import Absences, Edge, Pair, PipelineGraph, Placement, ScheduleTable, Task, absences

Owners = tuple[tuple[int, ...], ...]
"""``owners[stage][microbatch]``: the replica that runs a microbatch of the step on a stage."""


class StepOwners(NamedTuple):
    """The owners of a step that has others than the blocks of every replica."""

    owners: Owners
    lost: tuple[int, ...] = ()
    """The units that take no part in the step, ascending; a unit of stage ``s`` of S in replica ``r`` has the number
    ``r * S + s``."""


def block_owners(num_stages: int, num_microbatches: int, num_replicas: int) -> Owners:
    """Returns the normal owners, blocks of consecutive microbatches; ``num_microbatches`` are those of the step.

    Raises ValueError where there are no equal blocks.
    """
    share = microbatches_per_replica(num_microbatches, num_replicas)
    return (tuple(m // share for m in range(num_microbatches)),) * num_stages


class ReduceWay(StrEnum):
    """The way in which the replicas of a stage add up their gradients."""

    AUTO = "auto"
    """The way that fits the run: the collective, for now."""
    MESSAGES = "messages"
    """By messages: each replica adds up pieces, over the same connections as activations, while backwards still run."""
    COLLECTIVE = "collective"
    """By a collective of JAX over the devices of all replicas."""


_LEAST_SHARE = 1e-4
"""Arrays are filled up to a multiple of the number of parts."""


@dataclass(frozen=True, kw_only=True)
class SparseAveraging:
    """Replicas that update themselves from their own gradients, and average a share of their parameters in each step.

    The elements of each array are cut into parts at random, once and for all. Step ``t`` averages part ``t`` modulo
    their number over the replicas, as the elements are when the step begins. Its update, or that of step ``t + tau``,
    adds the average less the replica's own elements of then, before the optimizer; also where the step is left out.
    Whatever ``tau`` is, the averages of a step come in that step. Raises ValueError on values that cannot be meant.
    """

    share: float
    """The share of the elements that each step averages, 0.0001 to 1."""
    tau: int = 0
    """The number of updates by which an average is late."""
    seed: int = 0
    """The number that decides the parts."""

    def __post_init__(self) -> None:
        check_types(self)
        if not _LEAST_SHARE <= self.share <= 1:
            raise ValueError(f"share is {self.share}: give a number from {_LEAST_SHARE} to 1, such as 0.05")
        if self.tau < 0:
            raise ValueError(f"tau is {self.tau}: give 0 or more steps")

    @property
    def num_parts(self) -> int:
        """The number of parts of each array."""
        return math.ceil(1 / self.share - 1e-9)  # A share of 1 / 49 makes 49 parts, whatever its last bit.


def reduce_way(given: Any) -> ReduceWay | SparseAveraging:
    """Returns how replicas work together, given a word or a mapping; raises ValueError for others."""
    if isinstance(given, SparseAveraging):
        return given
    if isinstance(given, Mapping):
        names = [field.name for field in fields(SparseAveraging)]
        if "share" not in given or (unknown := [name for name in given if name not in names]):
            wrong = "lacks share" if "share" not in given else f"has {unknown[0]}"
            raise ValueError(f"reduce {wrong}: give {', '.join(names)}, as in {{share: 0.05, tau: 3}}")
        return SparseAveraging(**given)
    if given not in tuple(ReduceWay):
        raise ValueError(f"reduce is {given!r}: give {', '.join(ReduceWay)}, or a mapping {{share: 0.05, tau: 3}}")
    return ReduceWay(given)


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
    share, known = graph.num_microbatches, dict(graph.absent)
    every, block = (1 << share * num_replicas) - 1, [(1 << share) - 1 << r * share for r in replicas]
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
        absent=tuple(
            (copies.chunk(c, r), every & ~block[r] | known.get(c, 0) << r * share)
            for c in range(graph.num_chunks)
            for r in replicas
        ),
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
        num_replicas=num_replicas,
        losses=frozenset(copies.chunk(c, r) for r in replicas for c in graph.losses),
        passes=tuple(tuple(copies.chunk(c, r) for c in group) for group in graph.passes for r in replicas),
        weights=tuple(weight for weight in graph.weights for _ in replicas),
    )


@lru_cache(maxsize=8)
def with_owners(graph: PipelineGraph, placement: Placement, given: StepOwners) -> PipelineGraph:
    """Returns the graph of a step with other owners.

    Args:
        graph, placement: those of all replicas, as :func:`replicated_graph` and :func:`replicated_placement` give them.
        given: the owners, and the units that are lost.

    Raises ValueError for owners that do not fit the pipeline, where a unit that is lost owns a microbatch, and where
    operations belong to certain microbatches.
    """
    num_replicas, num_stages = graph.num_replicas, placement.num_stages // graph.num_replicas
    _check_owners(given, num_stages, graph.num_microbatches, num_replicas)
    if any(op.pairs or op.waits for op in graph.ops):
        raise ValueError(
            f"operation {graph.ops[0].letter} belongs to certain microbatches of each replica, so owners cannot "
            "change: take a schedule without offload and recompute"
        )
    share, every = graph.num_microbatches // num_replicas, (1 << graph.num_microbatches) - 1
    masks = [[0] * num_replicas for _ in range(num_stages)]
    for stage, owners in enumerate(given.owners):
        for m, replica in enumerate(owners):
            masks[stage][replica] |= 1 << m
    absent, known = [], dict(graph.absent)
    for first in range(0, graph.num_chunks, num_replicas):
        # What some microbatch lacks in its own block it lacks wherever it runs.
        missing = 0
        for replica in range(num_replicas):
            block = (1 << share) - 1 << replica * share
            missing |= known.get(first + replica, 0) & block
        own = masks[placement.stage_of_chunk[first]]
        absent += [(first + r, every & ~own[r] | missing) for r in range(num_replicas) if missing or own[r] != every]
    edges = []
    for edge in dict.fromkeys(
        e._replace(source=e.source // num_replicas, target=e.target // num_replicas) for e in graph.edges
    ):
        ends = [masks[placement.stage_of_chunk[chunk * num_replicas]] for chunk in edge[:2]]
        edges += [
            edge._replace(source=edge.source * num_replicas + a, target=edge.target * num_replicas + b)
            for a, b in product(range(num_replicas), repeat=2)
            if ends[0][a] & ends[1][b]
        ]
    lost = frozenset(chunk for unit in given.lost for chunk in placement.chunks_of_stage[unit])
    whole = all(len(set(row[m : m + share])) == 1 for row in given.owners for m in range(0, len(row), share))
    stages = placement.stage_of_chunk[::num_replicas]  # of replica 0, where units have the stages' own numbers
    holders = tuple(given.owners[stage][::share] for stage in stages) if whole else ()
    return replace(graph, edges=tuple(map(Edge._make, edges)), absent=tuple(absent), lost=lost, holders=holders)


def check_blocks(graph: PipelineGraph) -> None:
    """Raises ValueError for other owners, of which ``graph`` was made, that a deterministic run cannot have."""
    if not graph.holders:
        raise ValueError(
            "deterministic runs that add up by messages make one sum of each replica's block of microbatches, and "
            "these owners share one out: give all microbatches of a block to one replica"
        )


def _check_owners(given: StepOwners, num_stages: int, num_microbatches: int, num_replicas: int) -> None:
    """Raise ValueError for owners that do not fit such a pipeline, or for lost units that own something."""
    owners, lost = given
    if len(owners) != num_stages or any(len(row) != num_microbatches for row in owners):
        raise ValueError(
            f"the owners are of {len(owners)} stages and {len(owners[0]) if owners else 0} microbatches, the pipeline "
            f"has {num_stages} and {num_microbatches}: give one replica for each"
        )
    lost_units = set(lost)
    for unit in lost:
        if not 0 <= unit < num_stages * num_replicas:
            raise ValueError(f"unit {unit} is lost, and there are {num_stages * num_replicas}, counted from 0")
    for stage, row in enumerate(owners):
        for m, replica in enumerate(row):
            if not 0 <= replica < num_replicas:
                raise ValueError(
                    f"microbatch {m} of stage {stage} is owned by replica {replica}, and there are {num_replicas}, "
                    "counted from 0"
                )
            if replica * num_stages + stage in lost_units:
                raise ValueError(
                    f"microbatch {m} of stage {stage} is owned by replica {replica}, which is lost there: give it to "
                    "another one"
                )


def moved_pairs(pairs: Absences, graph: PipelineGraph) -> Absences:
    """Returns the pairs of a step without owners of its own as those of the replicas that own them in ``graph``."""
    masks: dict[int, int] = {}
    for chunk, mask in pairs:
        first = chunk - chunk % graph.num_replicas
        masks[first] = masks.get(first, 0) | mask
    return tuple(
        (copy, own)
        for first, mask in sorted(masks.items())
        for copy in range(first, first + graph.num_replicas)
        if (own := mask & graph.present(copy))
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
        pairs=frozenset(
            Pair(*(copies.task(task, r) for task in pair)) for pair in table.pairs for r in range(num_replicas)
        ),
        weights_fill=table.weights_fill,
    )
