"""The operations of one graph: on which chunks they are, what they wait for, and what they do to memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import lcm
from typing import TYPE_CHECKING

from rrfp_jax.tasks.kinds import NO_MICROBATCH, Task, TaskKind
from rrfp_jax.tasks.operations import COMPUTE, Op, Per, in_order

if TYPE_CHECKING:
    from rrfp_jax.tasks.graph import PipelineGraph

_FINEST = 1000
"""Memory is counted in parts of an activation not finer than this."""
_ONCE = ("R", "U")


class GraphOperations:
    """What a graph with operations asks about them. Raises ValueError where one does not fit the graph."""

    def __init__(self, graph: "PipelineGraph") -> None:
        self.graph = graph
        self.by_letter = {op.letter: op for op in graph.ops}
        if len(self.by_letter) < len(graph.ops):
            letters = [op.letter for op in graph.ops]
            twice = next(letter for letter in letters if letters.count(letter) > 1)
            raise ValueError(f"two operations have the letter {twice!r}: give each its own")
        self._check_places()
        self.unit = lcm(*(_part(part).denominator for op in graph.ops for part in (op.holds, op.frees)))
        """How many units of memory one activation is."""
        self._waits: dict[Task, list[Task]] = {}
        for task, anchor in (wait for op in graph.ops for wait in sorted(op.waits)):
            self._waits.setdefault(task, []).append(anchor)
        self._of_chunk = cache(self._on_chunk)
        self._order = cache(self._kinds)
        self._takes = cache(self._forward_takes)
        for chunk in range(graph.num_chunks):
            self._order(chunk)
            self._check_memory(chunk)

    def _check_places(self) -> None:
        num_chunks = self.graph.num_chunks
        for op in self.graph.ops:
            strays = [c for c in op.chunks or () if not 0 <= c < num_chunks]
            if strays:
                raise ValueError(f"operation {op.letter!r} is on chunk {strays[0]}: there are {num_chunks} chunks")
            if not any(op.is_on(chunk, num_chunks) for chunk in range(num_chunks)):
                raise ValueError(f"operation {op.letter!r} is on no chunk: give it at least one")
            for chunk, m in op.pairs or ():
                if not (0 <= chunk < num_chunks and 0 <= m < self.graph.num_microbatches):
                    raise ValueError(f"operation {op.letter!r}: the graph has no chunk {chunk} with microbatch {m}")

    def _check_memory(self, chunk: int) -> None:
        for m in self.graph.microbatches(chunk):
            if any(op.moves_memory for op in self._existing(chunk, m)) and not self.graph.has_backward(chunk):
                raise ValueError(f"chunk {chunk} keeps nothing, since it has no backward: no operation may move it")
            if self._takes(chunk, m) < 0:
                raise ValueError(
                    f"operations on chunk {chunk} take more memory than it keeps of a microbatch: let them hold at "
                    "most 1 more than they free"
                )

    def _on_chunk(self, chunk: int) -> tuple[Op, ...]:
        """The operations per microbatch, with ``after`` and ``before`` in the kinds that this chunk has."""
        graph = self.graph
        first, last = graph.input_gradient_kind(chunk), graph.accumulating_kind(chunk)

        def fitted(kind: str, backward: TaskKind) -> str:
            return backward if kind == TaskKind.B or (kind in "IW" and first is last) else kind

        return tuple(
            replace(
                op,
                after=tuple(fitted(kind, last) for kind in op.after),
                before=tuple(fitted(kind, first) for kind in op.before),
            )
            for op in graph.ops
            if op.per is Per.MICROBATCH and op.is_on(chunk, graph.num_chunks)
        )

    def _kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        try:
            return tuple(map(TaskKind, in_order(self.graph.built_in_kinds(chunk), self._of_chunk(chunk))))
        except ValueError as error:
            raise ValueError(f"chunk {chunk}: {error}") from None

    def _existing(self, chunk: int, microbatch: int) -> list[Op]:
        return [op for op in self._of_chunk(chunk) if op.exists(chunk, microbatch)]

    def kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        """All kinds of tasks that microbatches have on a chunk, in an order in which they can run."""
        return self._order(chunk)

    def has(self, kind: TaskKind, chunk: int, microbatch: int) -> bool:
        """Whether a pair of the graph has a task of one of its chunk's kinds."""
        op = self.by_letter.get(kind)
        return op is None or op.exists(chunk, microbatch)

    def remakes_stash(self, chunk: int) -> bool:
        """Whether an operation makes what backwards of a chunk need, so that their F keeps only what it read."""
        return any(op.remakes_stash and op.is_on(chunk, self.graph.num_chunks) for op in self.graph.ops)

    def lane(self, kind: TaskKind) -> str:
        op = self.by_letter.get(kind)
        return COMPUTE if op is None else op.lane

    def once(self, chunks: Iterable[int]) -> Iterator[Task]:
        """The tasks of operations that run once per chunk or step, on some chunks."""
        for chunk in chunks:
            for op in self.graph.ops:
                if op.per is not Per.MICROBATCH and op.is_on(chunk, self.graph.num_chunks):
                    yield Task(TaskKind(op.letter), chunk)

    # -- dependencies ------------------------------------------------------------------------------------------------

    def before(self, task: Task) -> Iterator[Task]:
        """The tasks of operations that a task waits for, itself an operation's or not; on its own chunk."""
        kind, chunk, m = task
        if m >= 0:
            yield from (
                Task(TaskKind(op.letter), chunk, m)
                for op in self._existing(chunk, m)
                if kind in op.before and op.letter != kind
            )
        for op in self.graph.ops:
            if op.per is Per.MICROBATCH or not op.is_on(chunk, self.graph.num_chunks) or op.letter == kind:
                continue
            if kind in _fitted(op.before, self.graph.input_gradient_kind(chunk)):
                yield Task(TaskKind(op.letter), chunk)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """What an operation's task waits for."""
        kind, chunk, m = task
        op = self.by_letter[kind]
        if op.per is Per.MICROBATCH:
            own = next(o for o in self._of_chunk(chunk) if o.letter == kind)
            after = (Task(TaskKind(k), chunk, m) for k in own.after if self.has(TaskKind(k), chunk, m))
            return (*after, *self.before(task), *self._anchors(task))
        found: list[Task] = list(self._anchors(task))
        for letter in _fitted(op.after, self.graph.accumulating_kind(chunk)):
            found += self._all_of(TaskKind(letter), chunk)
        return (*found, *self.before(task))

    def _anchors(self, task: Task) -> Iterator[Task]:
        """What it waits for besides, as far as it is there."""
        for anchor in self._waits.get(task, ()):
            kind, chunk, m = anchor
            if m < 0 or (self.graph.exists(chunk, m) and self.has(kind, chunk, m)):
                yield anchor

    def _all_of(self, kind: TaskKind, chunk: int) -> list[Task]:
        op = self.by_letter.get(kind)
        if kind in _ONCE or (op is not None and op.per is not Per.MICROBATCH):
            return [Task(kind, chunk, NO_MICROBATCH)]
        if kind not in self.kinds(chunk):
            raise ValueError(f"an operation names {kind!r}, which chunk {chunk} does not have")
        return [Task(kind, chunk, m) for m in self.graph.microbatches(chunk) if self.has(kind, chunk, m)]

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def moves_memory(self) -> bool:
        """Whether some operation takes or frees memory."""
        return any(op.moves_memory for op in self.graph.ops)

    def effect(self, task: Task) -> tuple[int, int]:
        """What a task of a chunk with a backward takes as it starts and frees as it ends, in :attr:`unit` parts."""
        kind, chunk, m = task
        op = self.by_letter.get(kind)
        if op is not None:
            return int(_part(op.holds) * self.unit), int(_part(op.frees) * self.unit)
        if kind is TaskKind.F:
            return self._takes(chunk, m), 0
        return 0, self.unit if kind is self.graph.accumulating_kind(chunk) else 0

    def _forward_takes(self, chunk: int, microbatch: int) -> int:
        moved = sum((_part(op.holds) - _part(op.frees) for op in self._existing(chunk, microbatch)), Fraction(0))
        return int((1 - moved) * self.unit)


def _fitted(kinds: tuple[str, ...], backward: TaskKind) -> tuple[str, ...]:
    return tuple(backward if kind == TaskKind.B else kind for kind in kinds)


def _part(value: float) -> Fraction:
    return Fraction(value).limit_denominator(_FINEST)
