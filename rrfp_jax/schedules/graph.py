"""The graph of a pipeline: which chunks feed which, and which tasks of a step wait for which others."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, reduce
from itertools import combinations
from math import inf, lcm
from operator import itemgetter, or_
from typing import NamedTuple

from rrfp_jax.field_rules import AT_LEAST_1, COUNTABLE, check_fields, check_types, is_whole
from rrfp_jax.readable import shown
from rrfp_jax.schedules.operations import COMPUTE, FINEST, GraphOperations, Op
from rrfp_jax.schedules.tasks import Placement, Task, TaskKind, looped

_MOST_PAIRS = 1 << 20
"""Largest number of pairs of a chunk and a microbatch in one step. A pair takes about a kilobyte and 50 microseconds to
plan."""
_MOST_SLICES = 256
"""Largest number of slices of a sequence, each of which has an edge from every earlier one."""

Absences = tuple[tuple[int, int], ...]
"""(chunk, microbatch) pairs that do not exist, as (chunk, mask) by ascending chunk; bit ``m`` of a mask, which is never
0, stands for microbatch ``m``."""


def absences(pairs: Iterable[tuple[int, int]]) -> Absences:
    """Returns (chunk, microbatch) pairs in their compact form. Raises ValueError for a negative number."""
    masks: dict[int, int] = {}
    for chunk, microbatch in pairs:
        if chunk < 0 or microbatch < 0:
            raise ValueError(f"absent pair (chunk {chunk}, microbatch {microbatch}) names no pair: count from 0")
        masks[chunk] = masks.get(chunk, 0) | 1 << microbatch
    return tuple(sorted(masks.items()))


def bits(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


STREAM, KEYS = "stream", "keys"
"""The parts of a slice's output: the input of the next chunk, and the keys and values that later slices attend to."""


class Edge(NamedTuple):
    """The output of chunk ``source`` is an input of chunk ``target``; a gradient may flow back."""

    source: int
    target: int
    carries_gradient: bool = True
    is_optional: bool = False
    """Whether ``target`` also runs microbatches that skip ``source``, for example those without images."""
    part: str | None = None
    """The part of the output that travels, where the output is a dictionary of parts; None: the whole output."""


class _Topology(NamedTuple):
    """Neighbours of each chunk, ascending, and whether it has a backward."""

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    required: tuple[tuple[int, ...], ...]
    """Predecessors of which a microbatch must have at least one."""
    optional: tuple[tuple[int, ...], ...]
    """Predecessors that a microbatch may skip although it runs on the chunk."""
    gradients_to: tuple[tuple[int, ...], ...]
    """Predecessors to which the chunk returns a gradient."""
    gradients_from: tuple[tuple[int, ...], ...]
    """Successors that return a gradient to the chunk."""
    parts: dict[tuple[int, int], str]
    """By source and target, the part of the output that travels, where that is not the whole output."""
    has_backward: tuple[bool, ...]


@dataclass(frozen=True)
class PipelineGraph:
    """Which chunks feed which, for how many microbatches, and how the backward is cut.

    A chain by default (:func:`chain`). ``absent`` holds the (chunk, microbatch) pairs that do not exist, for example
    those of microbatches without images in the image encoder (:func:`absences` makes it from pairs). ``split`` holds
    the chunks whose backward runs as I and W. ``shared`` holds groups of chunks that hold copies of the same parameters
    (tied embeddings). ``frozen`` holds the chunks whose parameters never change. ``ops`` holds the operations that the
    pipeline has beside the built-in tasks (:mod:`rrfp_jax.schedules.operations`). ``losses`` holds the chunks that give
    a loss although others read their output; a chunk that nobody reads gives one in any case. ``passes`` holds groups
    of chunks on one stage that are passes of one set of parameters, such as the slices of a sequence: the first chunk
    of a group holds these, and runs R and U once all have added their gradients. ``weights`` says how many activations
    each chunk keeps of a microbatch, where that is not one each.

    Of ``num_replicas`` replicas, chunks ``b * num_replicas`` and on are the copies of one chunk; a microbatch runs on
    one of them and is absent from the others (:mod:`rrfp_jax.core.replicas`). ``lost`` holds chunks that take no part:
    they run no microbatch, sum up and update nothing. ``holders`` has, for every ``b`` and each block of as many
    consecutive microbatches as a replica has, the replica that runs the block; it is empty where each runs its own, and
    where a block is shared out.
    """

    num_chunks: int
    num_microbatches: int
    edges: tuple[Edge, ...]
    absent: Absences = ()
    split: frozenset[int] = field(default=frozenset())
    shared: tuple[tuple[int, ...], ...] = ()
    frozen: frozenset[int] = field(default=frozenset())
    ops: tuple[Op, ...] = ()
    num_replicas: int = 1
    lost: frozenset[int] = field(default=frozenset())
    holders: tuple[tuple[int, ...], ...] = ()
    losses: frozenset[int] = field(default=frozenset())
    passes: tuple[tuple[int, ...], ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, *(name for name in self.__dataclass_fields__ if name not in ("absent", "shared", "holders")))
        check_fields(self, COUNTABLE, "num_chunks", "num_microbatches")
        check_fields(self, AT_LEAST_1, "num_replicas")
        if self.num_chunks < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"num_chunks ({self.num_chunks}) and num_microbatches ({self.num_microbatches}) must both be at least 1"
            )
        if self.num_chunks % self.num_replicas or self.num_microbatches % self.num_replicas:
            raise ValueError(
                f"{shown(self.num_chunks)} chunks and {shown(self.num_microbatches)} microbatches cannot be those of "
                f"{self.num_replicas} replicas: give multiples of their number"
            )
        # Refuse before anything is made for each pair. A replica's chunks have the pairs of its own microbatches alone.
        num_pairs = self.num_chunks * self.num_microbatches - sum(mask.bit_count() for mask in self._masks.values())
        if num_pairs > _MOST_PAIRS:
            raise ValueError(
                f"{shown(self.num_chunks)} chunks of {shown(self.num_microbatches)} microbatches are more than the "
                f"{_MOST_PAIRS} pairs that a step may have: give fewer of either"
            )
        self._check_edges()
        self._check_passes()
        self._check_pairs(self.absent)
        for chunk in self.lost:
            if self.present(chunk):
                raise ValueError(f"chunk {chunk} is lost, and microbatch {next(bits(self.present(chunk)))} runs on it")
        if self.ops:
            self.operations.check()

    def _check_edges(self) -> None:
        seen: set[tuple[int, int]] = set()
        in_parts: dict[int, bool] = {}
        for source, target, *flags, part in (Edge(*edge) for edge in self.edges):
            if not all(isinstance(flag, bool) for flag in flags):
                raise ValueError(f"edge {source!r} -> {target!r} has {flags}: give True or False")
            if not (part is None or isinstance(part, str)):
                raise ValueError(
                    f"edge {source!r} -> {target!r} has the part {part!r}: give the name of a part, or None"
                )
            if not (is_whole(source) and is_whole(target)):
                raise ValueError(f"edge {source!r} -> {target!r} does not name chunks: give their numbers")
            if not (0 <= source < target < self.num_chunks):
                raise ValueError(
                    f"edge {source} -> {target} does not go forward among {self.num_chunks} chunks: "
                    "number the chunks so that every edge leads to a larger one"
                )
            if (source, target) in seen:
                raise ValueError(f"edge {source} -> {target} is given twice")
            seen.add((source, target))
            if in_parts.setdefault(source, part is not None) != (part is not None) or (
                part is None and source in self.losses
            ):
                raise ValueError(
                    f"edge {source} -> {target} takes {'all' if part is None else f'part {part!r}'} of an output that "
                    f"has parts, or has none: name a part on every edge from chunk {source}, or on no edge"
                )
        for chunk in (
            *self.split,
            *self.frozen,
            *self.lost,
            *self.losses,
            *(c for some in (self.shared, self.passes) for group in some for c in group),
        ):
            if not 0 <= chunk < self.num_chunks:
                raise ValueError(f"chunk {chunk} is not one of the {self.num_chunks} chunks")

    def _check_passes(self) -> None:
        named = [c for group in self.passes for c in group]
        if len(set(named)) < len(named) or any(list(group) != sorted(group) for group in self.passes):
            raise ValueError(f"passes are {self.passes}: give ascending chunks, each in one group")
        for group in self.passes:
            if len({(self.has_backward(c), c in self.frozen, c in self.split) for c in group}) > 1:
                raise ValueError(
                    f"chunks {group} are passes of the same parameters, but not all of them train, or split their "
                    "backward: treat all alike, or give each parameters of its own"
                )
        if self.weights and len(self.weights) != self.num_chunks:
            raise ValueError(f"{len(self.weights)} weights are given for {self.num_chunks} chunks: give one for each")
        if not all(0 < weight < inf for weight in self.weights):
            raise ValueError(f"a weight is {min(self.weights)}: give positive numbers of activations")

    def _check_pairs(self, absent: Absences) -> None:
        """Raises ValueError where absent pairs do not exist, or leave a neighbouring chunk without input or reader."""
        touched: set[int] = set()
        for chunk, mask in absent:
            if not (0 <= chunk < self.num_chunks and mask > 0 and mask.bit_length() <= self.num_microbatches):
                raise ValueError(
                    f"absent pair (chunk {chunk}, microbatch {mask.bit_length() - 1}) names no pair of this graph"
                )
            touched.update((chunk, *self.successors(chunk), *self.predecessors(chunk)))
        self._check_feeding(sorted(touched))

    def _check_feeding(self, chunks: Iterable[int]) -> None:
        """Raises ValueError where a pair of these chunks lacks an input or a reader that its chunk needs."""
        for chunk in chunks:
            present, required, readers = self.present(chunk), self.required_predecessors(chunk), self.successors(chunk)
            hungry = present & ~reduce(or_, map(self.present, required), 0) if required else 0
            if hungry:
                raise ValueError(
                    f"microbatch {next(bits(hungry))} skips chunk {required[0]}, and chunk {chunk} is left without any "
                    "input: skip that one too, keep one of its predecessors, or make the edge optional"
                )
            unread = present & ~reduce(or_, map(self.present, readers), 0) if readers else 0
            if unread:
                raise ValueError(
                    f"nobody reads the output of chunk {chunk} for microbatch {next(bits(unread))}: skip it there too"
                )

    @cached_property
    def operations(self) -> GraphOperations:
        """The operations with everything that they wait for and move."""
        return GraphOperations(self)

    @cached_property
    def _masks(self) -> dict[int, int]:
        return dict(self.absent)

    @cached_property
    def _present(self) -> tuple[int, ...]:
        every, masks = (1 << self.num_microbatches) - 1, self._masks
        return tuple(every & ~masks.get(chunk, 0) for chunk in range(self.num_chunks))

    @cached_property
    def _ranges(self) -> tuple[range, ...]:
        return tuple(
            range((own & -own).bit_length() - 1, own.bit_length()) if own else range(0) for own in self._present
        )

    @cached_property
    def _topology(self) -> _Topology:
        # Worked out once per graph, on first use: dependencies() reads it for every task.
        chunks = range(self.num_chunks)
        edges = [Edge(*edge) for edge in sorted(self.edges)]
        before: list[list[int]] = [[] for _ in chunks]
        after: list[list[int]] = [[] for _ in chunks]
        for source, target, *_ in edges:
            before[target].append(source)
            after[source].append(target)
        optional = {(e.source, e.target) for e in edges if e.is_optional}
        carrying = {(e.source, e.target) for e in edges if e.carries_gradient}
        # A chunk has a backward if a gradient reaches it, because it computes a loss or a successor returns one, and if
        # somebody wants that gradient: the chunk itself, which trains, or a chunk before it that does. Ascending for
        # the wishes, since a chunk passes its predecessors' wish on; descending for the gradients, which come from
        # behind. Edges lead to larger chunks, so one pass each is enough. The copies of a chunk are all alike, also
        # those that no microbatch leads to, so this asks for chunks of one replica.
        copies, bases = self.num_replicas, range(self.num_chunks // self.num_replicas)
        ways = {(e.source // copies, e.target // copies) for e in edges}
        returning = {(source // copies, target // copies) for source, target in carrying}
        wants = [c * copies not in self.frozen for c in bases]
        for p, c in sorted(returning, key=itemgetter(1)):
            wants[c] |= wants[p]
        giving = {*bases}.difference(p for p, _ in ways).union(c // copies for c in self.losses)
        has = [wants[c] and c in giving for c in bases]
        for c, s in sorted(returning, reverse=True):
            has[c] |= wants[c] and has[s]
        carrying = {(a, b) for a, b in carrying if has[a // copies] and has[b // copies]}
        return _Topology(
            before=tuple(map(tuple, before)),
            after=tuple(map(tuple, after)),
            required=tuple(tuple(p for p in before[c] if (p, c) not in optional) for c in chunks),
            optional=tuple(tuple(p for p in before[c] if (p, c) in optional) for c in chunks),
            gradients_to=tuple(tuple(p for p in before[c] if (p, c) in carrying) for c in chunks),
            gradients_from=tuple(tuple(s for s in after[c] if (c, s) in carrying) for c in chunks),
            parts={(e.source, e.target): e.part for e in edges if e.part is not None},
            has_backward=tuple(has[c // copies] for c in chunks),
        )

    @cached_property
    def _sharing(self) -> dict[int, tuple[int, ...]]:
        groups: dict[int, tuple[int, ...]] = {}
        for group in self.shared:
            together = tuple(sorted({self.holder(chunk) for chunk in group}))
            for chunk in together:
                known = groups.get(chunk)
                groups[chunk] = together if known is None else tuple(sorted({*known, *together}))
        return groups

    def predecessors(self, chunk: int) -> tuple[int, ...]:
        """Returns the chunks whose output ``chunk`` reads, ascending."""
        return self._topology.before[chunk]

    def successors(self, chunk: int) -> tuple[int, ...]:
        """Returns the chunks that read the output of ``chunk``, ascending."""
        return self._topology.after[chunk]

    def part(self, source: int, target: int) -> str | None:
        """Returns the part of the output of ``source`` that ``target`` reads; None: the whole output."""
        return self._topology.parts.get((source, target))

    def gives_loss(self, chunk: int) -> bool:
        return chunk in self.losses or not self._topology.after[chunk]

    def required_predecessors(self, chunk: int) -> tuple[int, ...]:
        """Returns the predecessors of which a microbatch must have at least one, ascending."""
        return self._topology.required[chunk]

    def optional_predecessors(self, chunk: int) -> tuple[int, ...]:
        """Returns the predecessors that a microbatch may skip although it runs on ``chunk``, ascending."""
        return self._topology.optional[chunk]

    def gradient_successors(self, chunk: int) -> tuple[int, ...]:
        """Returns the successors that return a gradient to ``chunk``, ascending."""
        return self._topology.gradients_from[chunk]

    def gradient_predecessors(self, chunk: int) -> tuple[int, ...]:
        """Returns the predecessors to which ``chunk`` returns a gradient, ascending."""
        return self._topology.gradients_to[chunk]

    def range_of(self, chunk: int) -> range:
        """Returns the microbatches from the first to the last that exist for ``chunk``, absent ones between them
        included; in a graph of :meth:`skipping` those of the graph that it was made from."""
        return self._ranges[chunk]

    def exists(self, chunk: int, microbatch: int) -> bool:
        return microbatch >= 0 and self._present[chunk] >> microbatch & 1 == 1

    def present(self, chunk: int) -> int:
        """Returns the microbatches that exist for ``chunk``, as the bits of a mask."""
        return self._present[chunk]

    @property
    def is_full(self) -> bool:
        """Whether every chunk runs every microbatch."""
        return not self.absent

    def of_each_base(self, chunks: Iterable[int], microbatch: int) -> tuple[int | None, ...]:
        """Returns, of copies of several chunks, the one copy of each chunk that runs a microbatch; None: none does.

        ``chunks`` ascend. Without replicas each is its own only copy.
        """
        found: dict[int, int | None] = {}
        for chunk in chunks:
            base = chunk // self.num_replicas
            if self._present[chunk] >> microbatch & 1:
                found[base] = chunk
            else:
                found.setdefault(base)
        return tuple(found.values())

    def has_backward(self, chunk: int) -> bool:
        """Whether gradients pass through the chunk. One that needs none or gets none, such as a frozen encoder, has F
        tasks only."""
        return self._topology.has_backward[chunk]

    def reads_ahead(self, chunk: int) -> bool:
        """Whether the chunk runs F alone, for chunks that read its output: only their pace holds it back."""
        return not self._topology.has_backward[chunk] and bool(self.successors(chunk))

    def trains(self, chunk: int) -> bool:
        """Whether the chunk adds to gradients of the parameters that it runs with."""
        return self._topology.has_backward[chunk] and chunk not in self.frozen and chunk not in self.lost

    def updates(self, chunk: int) -> bool:
        """Whether the chunk trains and holds its parameters, so that it has R and U."""
        return self.trains(chunk) and self.holder(chunk) == chunk

    @cached_property
    def _passes(self) -> dict[int, tuple[int, ...]]:
        return {chunk: group for group in self.passes for chunk in group}

    def passes_of(self, chunk: int) -> tuple[int, ...]:
        """Returns the chunks that run with the parameters of ``chunk``, itself among them, ascending."""
        return self._passes.get(chunk, (chunk,))

    def holder(self, chunk: int) -> int:
        """Returns the chunk that holds the parameters with which ``chunk`` runs."""
        return self._passes[chunk][0] if self.passes and chunk in self._passes else chunk

    def are_passes(self, one: int, other: int) -> bool:
        """Whether two chunks run with one set of parameters, on one stage."""
        return bool(self.passes) and self.holder(one) == self.holder(other)

    def accumulations(self, chunk: int) -> list[Task]:
        """Returns the tasks that add to the gradients of a chunk that holds parameters, in the order in which a
        deterministic run adds them up: by microbatch, and of each the last pass first, as its backward comes first."""
        passes = [(c, self.accumulating_kind(c)) for c in reversed(self.passes_of(chunk))]
        if len(passes) == 1:
            return [Task(kind, c, m) for c, kind in passes for m in self.microbatches(c)]
        return [
            Task(kind, c, m) for m in range(self.num_microbatches) for c, kind in passes if self._present[c] >> m & 1
        ]

    def microbatches(self, chunk: int) -> tuple[int, ...]:
        """Returns the microbatches that exist for ``chunk``, ascending."""
        present, own = self._present[chunk], self._ranges[chunk]
        return tuple(own) if present.bit_count() == len(own) else tuple(bits(present))

    def passes_per_microbatch(self, chunks: Sequence[int]) -> int:
        """Returns the largest number of these chunks that one microbatch passes through, at least 1."""
        passed: list[int] = []  # the microbatches that pass through one more chunk, two more, and so on
        for chunk in chunks:
            again = self._present[chunk]
            for place, known in enumerate(passed):
                passed[place], again = known | again, known & again
            passed.append(again)
        return max(1, sum(map(bool, passed)))

    def kept_per_microbatch(self, chunks: Sequence[int]) -> int:
        """Returns the most that these chunks keep of one microbatch, in units of memory."""
        if not self.weights:
            return self.memory_unit * self.passes_per_microbatch(chunks)
        present = [(self._present[chunk], self.kept_units(chunk)) for chunk in chunks]
        kept = (sum(w for mask, w in present if mask >> m & 1) for m in range(self.num_microbatches))
        return max(1, *kept)

    @cached_property
    def _weights(self) -> tuple[Fraction, ...]:
        return tuple(Fraction(weight).limit_denominator(FINEST) for weight in self.weights)

    @cached_property
    def memory_unit(self) -> int:
        """How many units of memory one activation is: 1, or more where chunks keep, or operations move, parts of
        one."""
        parts = lcm(*(weight.denominator for weight in self._weights))
        return parts * self.operations.unit if self.ops else parts

    def kept_units(self, chunk: int) -> int:
        """Returns what a chunk with a backward keeps of a microbatch, in units of memory."""
        return self.memory_unit if not self.weights else int(self._weights[chunk] * self.memory_unit)

    def input_gradient_kind(self, chunk: int) -> TaskKind:
        """Returns the kind that computes the input gradient of ``chunk``: I if its backward is split, else B."""
        return TaskKind.I if chunk in self.split else TaskKind.B

    def accumulating_kind(self, chunk: int) -> TaskKind:
        """Returns the kind of task that adds to the gradients of ``chunk`` and ends its microbatch.

        It is W if the backward is split, else B. A frozen chunk adds up nothing: there it is the kind that computes the
        input gradient.
        """
        return TaskKind.W if chunk in self.split and chunk not in self.frozen else self.input_gradient_kind(chunk)

    def built_in_kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        """Returns the kinds among F, B, I and W that microbatches have on ``chunk``, in the order in which they run."""
        if not self.has_backward(chunk):
            return (TaskKind.F,)
        last = self.accumulating_kind(chunk)
        return (TaskKind.F, TaskKind.I, TaskKind.W) if last is TaskKind.W else (TaskKind.F, last)

    def kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        """Returns the kinds of tasks that microbatches have on ``chunk``, operations included, in an order in which
        they can run."""
        return self.operations.kinds(chunk) if self.ops else self.built_in_kinds(chunk)

    def lane(self, kind: TaskKind) -> str:
        op = self.operations.by_letter.get(kind) if self.ops else None
        return COMPUTE if op is None else op.lane

    def tasks(self, chunks: Iterable[int] | None = None) -> Iterator[Task]:
        """Yields the tasks with a microbatch (F, B, I, W and operations) of these chunks, or of all."""
        for chunk in range(self.num_chunks) if chunks is None else chunks:
            kinds = self.kinds(chunk)
            for microbatch in self.microbatches(chunk):
                for kind in kinds:
                    if not self.ops or self.operations.has(kind, chunk, microbatch):
                        yield Task(kind, chunk, microbatch)

    def num_tasks(self, chunks: Iterable[int] | None = None) -> int:
        """Returns the number of :meth:`tasks` of these chunks, or of all."""
        if self.ops:
            return sum(1 for _ in self.tasks(chunks))
        counted = range(self.num_chunks) if chunks is None else chunks
        return sum(self.present(c).bit_count() * len(self.built_in_kinds(c)) for c in counted)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """Returns the tasks that must finish before ``task`` may start, operations included.

        For R and U these are the tasks with a microbatch alone; see the rules in :mod:`rrfp_jax.schedules.tasks`.
        """
        kind, chunk, m = task
        if self.ops and kind in self.operations.by_letter:
            return self.operations.dependencies(task)
        needed: tuple[Task, ...]
        if kind is TaskKind.F:
            needed = tuple(Task(TaskKind.F, p, m) for p in self.predecessors(chunk) if self.exists(p, m))
        elif kind is TaskKind.W:
            needed = (Task(TaskKind.I, chunk, m),)
        elif kind in (TaskKind.B, TaskKind.I):
            gradients = (s for s in self.gradient_successors(chunk) if self.exists(s, m))
            needed = (Task(TaskKind.F, chunk, m), *(Task(self.input_gradient_kind(s), s, m) for s in gradients))
        else:
            sharing = (chunk,) if kind is TaskKind.U else self.sharing(chunk)
            needed = tuple(task for c in sharing if self.trains(c) for task in self.accumulations(c))
        return (*needed, *self.operations.before(task)) if self.ops else needed

    def memory_effect(self, task: Task) -> tuple[float, float]:
        """Returns the memory that a task takes as it starts and frees as it ends.

        The unit is an activation: all that a chunk with a backward keeps of a microbatch, from F to B or W.
        """
        takes, frees = self.memory_units(task)
        return takes / self.memory_unit, frees / self.memory_unit

    def memory_units(self, task: Task) -> tuple[int, int]:
        """Returns what :meth:`memory_effect` does, in units of memory."""
        if task.microbatch < 0 or not self.has_backward(task.chunk):
            return 0, 0
        kept = self.kept_units(task.chunk)
        if self.ops:
            takes, frees = self.operations.effect(task)
            part = kept // self.operations.unit
            return takes * part, frees * part
        return kept * (task.kind is TaskKind.F), kept * (task.kind is self.accumulating_kind(task.chunk))

    def sharing(self, chunk: int) -> tuple[int, ...]:
        """Returns ``chunk`` and the chunks that hold copies of some of its parameters, ascending."""
        return self._sharing.get(chunk, (chunk,))

    def evaluating(self, num_batches: int = 1) -> "PipelineGraph":
        """Returns the graph of a step that evaluates this many batches: F alone, since no gradient flows back.

        The microbatches of a replica's block stay consecutive: those of the first batch, then of the second, and so on.
        Each batch lacks the pairs that this graph lacks. Operations are left out.
        """
        share = self.num_microbatches // self.num_replicas
        every = (1 << share) - 1
        absent = []
        for chunk, mask in self.absent:
            repeated = 0
            for block in range(self.num_replicas):
                part = mask >> block * share & every
                for number in range(num_batches) if part else ():
                    repeated |= part << (block * num_batches + number) * share
            absent.append((chunk, repeated))
        return PipelineGraph(
            self.num_chunks,
            self.num_microbatches * num_batches,
            tuple(edge._replace(carries_gradient=False) for edge in self.edges),
            absent=tuple(absent),
            shared=self.shared,
            frozen=frozenset(range(self.num_chunks)),
            num_replicas=self.num_replicas,
            lost=self.lost,
            losses=self.losses,
            passes=self.passes,
        )

    def skipping(self, absent: Absences) -> "PipelineGraph":
        """Returns the same graph without these pairs too.

        Raises ValueError where that leaves a chunk without input or reader.
        """
        if not absent:
            return self
        masks, _ = dict(self._masks), self._ranges  # which the copy keeps
        for chunk, mask in absent:
            masks[chunk] = masks.get(chunk, 0) | mask
        # A copy, not a constructor call: each step may have a graph of its own, and only the new pairs need checking.
        # For 66 chunks the constructor takes five times as long, 0.53 ms, as it works everything out anew.
        twin = copy(self)
        object.__setattr__(twin, "absent", tuple(sorted(masks.items())))
        for derived in ("_masks", "_present", "operations"):
            twin.__dict__.pop(derived, None)
        twin._check_pairs(absent)
        return twin


def lanes_beside(graph: PipelineGraph) -> dict[str, str]:
    """Returns the engine of every operation that does not run on the compute lane, by the operation's letters."""
    return {op.letter: op.lane for op in graph.ops if op.is_beside}


def chain(
    num_chunks: int, num_microbatches: int, *, split: bool = False, shared: tuple[tuple[int, ...], ...] = ()
) -> PipelineGraph:
    """Returns a chain: chunk 0 feeds chunk 1, which feeds chunk 2, and so on. Every microbatch runs everywhere."""
    return PipelineGraph(
        num_chunks,
        num_microbatches,
        tuple(Edge(c, c + 1) for c in range(num_chunks - 1)),
        split=frozenset(range(num_chunks)) if split else frozenset(),
        shared=shared,
    )


def sliced_chain(graph: PipelineGraph, num_slices: int, *, lengths: Sequence[float] = ()) -> PipelineGraph:
    """Returns the graph of a chain in which a microbatch runs through each chunk in slices of its sequences.

    Slice ``q`` of chunk ``c`` is chunk ``c * num_slices + q``; the slices of a chunk are passes of its parameters. Each
    hands :data:`STREAM` to the same slice of the next chunk, and :data:`KEYS` to all later slices of its own chunk. So
    forwards go by ascending and backwards by descending slice, and a slice adds up the gradients of its keys and values
    in a fixed order. ``lengths`` are those of the slices, whose activations are in these proportions; empty: equal.
    Raises ValueError for a graph that is no chain of whole sequences.
    """
    if not 1 <= num_slices <= _MOST_SLICES:
        raise ValueError(f"a sequence has {shown(num_slices)} slices: give 1 to {_MOST_SLICES}")
    if lengths and (len(lengths) != num_slices or min(lengths) <= 0):
        raise ValueError(f"{num_slices} slices have the lengths {tuple(lengths)}: give each slice a length above 0")
    if num_slices == 1:
        return graph
    chunks, slices = range(graph.num_chunks), range(num_slices)
    if any(len(graph.successors(c)) > 1 or len(graph.predecessors(c)) > 1 for c in chunks):
        raise ValueError("slices run through a chain, and this graph forks or joins: run its sequences whole")
    if graph.passes or graph.ops or graph.num_replicas > 1:
        raise ValueError("slices come before passes, operations and replicas: cut the graph of whole sequences")
    shares = [each / sum(lengths) for each in lengths] or [1 / num_slices] * num_slices

    def of(chunks: Iterable[int]) -> tuple[int, ...]:
        return tuple(c * num_slices + q for c in chunks for q in slices)

    stream = [
        edge._replace(source=edge.source * num_slices + q, target=edge.target * num_slices + q, part=STREAM)
        for edge in (Edge(*edge) for edge in graph.edges)
        for q in slices
    ]
    keys = [Edge(*pair, part=KEYS) for c in chunks for pair in combinations(of([c]), 2)]
    read = {edge.source for edge in (*stream, *keys)}
    return PipelineGraph(
        graph.num_chunks * num_slices,
        graph.num_microbatches,
        (*stream, *keys),
        absent=tuple((node, mask) for c, mask in graph.absent for node in of([c])),
        split=frozenset(of(graph.split)),
        shared=tuple(tuple(c * num_slices for c in group) for group in graph.shared),
        frozen=frozenset(of(graph.frozen)),
        losses=frozenset(read).intersection(of(c for c in chunks if graph.gives_loss(c))),
        passes=tuple(of([c]) for c in chunks),
        weights=tuple((graph.weights[c] if graph.weights else 1.0) * share for c in chunks for share in shares),
    )


def opposite_chains(
    num_chunks: int, down_microbatches: Iterable[int], num_microbatches: int, *, split: bool = False
) -> PipelineGraph:
    """Returns two chains of ``num_chunks`` chunks with tied parameters. Each microbatch runs through one of them.

    ``down_microbatches`` run through chunks ``0..num_chunks-1``, the others through the copies, ``num_chunks`` and up.
    """
    down = frozenset(down_microbatches)
    one_way = tuple(Edge(c, c + 1) for c in range(num_chunks - 1))
    return PipelineGraph(
        2 * num_chunks,
        num_microbatches,
        (*one_way, *(Edge(source + num_chunks, target + num_chunks) for source, target, *_ in one_way)),
        absent=absences(
            (c if m not in down else c + num_chunks, m) for c in range(num_chunks) for m in range(num_microbatches)
        ),
        split=frozenset(range(2 * num_chunks)) if split else frozenset(),
        shared=tuple((c, c + num_chunks) for c in range(num_chunks)),
    )


def vocabulary_sharded(
    num_stages: int,
    num_microbatches: int,
    *,
    chunks_per_stage: int = 1,
    barriers: int = 2,
    fan_out: int | None = None,
    is_tied: bool = False,
    shard_keeps: float = 0.01,
) -> tuple[PipelineGraph, Placement]:
    """Returns a decoder whose embedding and head lie on every stage in shards of rows (arXiv 2411.05288), and its
    placement.

    Of p stages, chunk ``s`` embeds the words of its rows on stage s, and sends its part of the sum to chunk ``p``, the
    first of the chain, which has ``chunks_per_stage`` on each stage in turn. The last p + 1 chunks are the heads, which
    hold the logits of their rows, and the loss on the last stage, which joins log-sum-exp and target logit of all
    heads. If ``is_tied``, embedding and head of a stage are passes of the same rows. ``shard_keeps`` says how much an
    embedding, a head or the loss keeps of a microbatch, in activations of a chunk of the chain.

    With two ``barriers`` the heads compute the gradient of the stream once the loss has joined them. With one they send
    it with their sums, for the loss to scale: only the gradients of their rows wait, and nothing waits for these.

    ``fan_out`` says how many stages a stage may send the stream to; None: the last one sends it to all. Chunks without
    parameters, which follow the chain, hand it on, along a chain of stages where it is 1. Each hop waits for the task
    that runs there, both ways, so that more microbatches are under way: 8 stages hold at most 10 with None, 12 with 2
    and 16 with 1. All sends of the last stage together take less time than a microbatch on all but slow links: choose a
    number for these.
    """
    if num_stages < 1:
        raise ValueError(f"a vocabulary is cut into shards for {num_stages} stages: give at least 1")
    if barriers not in (1, 2):
        raise ValueError(f"heads and loss have {barriers} barriers: give 1 or 2")
    if fan_out is not None and fan_out < 1:
        raise ValueError(f"a stage sends the stream to {fan_out} others: give at least 1, or None")
    p, chain_of = num_stages, looped(num_stages, chunks_per_stage)
    first, last = p, p + chain_of.num_chunks - 1
    returns = barriers == 2  # whether heads send gradients of the stream
    body = [*(Edge(e, first) for e in range(p)), *(Edge(c, c + 1) for c in range(first, last))]
    # The stream reaches the last stage first, then the one before it, and so on: stage p-1-n from stage p-1-(n-1)//fan.
    fan = fan_out or p
    relays = [n for n in range(1, p) if n * fan + 1 < p]
    giver = {0: last} | {n: last + 1 + number for number, n in enumerate(relays)}
    heads = last + 1 + len(relays)
    loss = heads + p
    hops = [Edge(giver[(n - 1) // fan], giver[n], returns) for n in relays]
    hops += [Edge(giver[n if n in giver else (n - 1) // fan], heads + p - 1 - n, returns) for n in range(p)]
    joined = [Edge(heads + stage, loss) for stage in range(p)]
    if not returns:
        joined.append(Edge(last, loss))
    graph = PipelineGraph(
        loss + 1,
        num_microbatches,
        (*body, *hops, *joined),
        passes=tuple((s, heads + s) for s in range(p)) if is_tied else (),
        weights=tuple(1.0 if first <= c <= last else shard_keeps for c in range(loss + 1)),
    )
    return graph, Placement((*range(p), *chain_of.stage_of_chunk, *(p - 1 - n for n in relays), *range(p), p - 1))
