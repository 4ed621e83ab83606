"""The operations of one graph: their chunks, the tasks that they wait for, and the memory that they move."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import lcm
from typing import TYPE_CHECKING

from rrfp_jax.schedules.operations import COMPUTE, Op, Per, order_with_operations
from rrfp_jax.schedules.tasks import NO_MICROBATCH, Task, TaskKind

if TYPE_CHECKING:
    from rrfp_jax.schedules.graph import PipelineGraph

_FINEST = 1000
"""Memory is counted in parts of an activation not finer than this."""
_ONCE = ("R", "U")
_MICROBATCHES = "all microbatches"


class GraphOperations:
    """The operations of a graph, resolved for its chunks."""

    def __init__(self, graph: "PipelineGraph") -> None:
        self.graph = graph
        self.by_letter = {op.letter: op for op in graph.ops}
        self.unit = lcm(*(_part(part).denominator for op in graph.ops for part in (op.holds, op.frees)))
        """The number of units of memory in one activation."""
        self._waits: dict[Task, list[Task]] = {}
        for task, anchor in (wait for op in graph.ops for wait in sorted(op.waits)):
            self._waits.setdefault(task, []).append(anchor)
        self._of_chunk = cache(self._on_chunk)
        self._order = cache(self._kinds)
        self._takes = cache(self._forward_takes)

    def check(self) -> None:
        """Raises ValueError where an operation does not fit the graph."""
        if len(self.by_letter) < len(self.graph.ops):
            letters = [op.letter for op in self.graph.ops]
            twice = next(letter for letter in letters if letters.count(letter) > 1)
            raise ValueError(f"two operations have the letter {twice!r}: give each its own")
        self._check_places()
        for chunk in range(self.graph.num_chunks):
            self._order(chunk)
            self._check_memory(chunk)
            self._check_once(chunk)

    def _check_places(self) -> None:
        num_chunks = self.graph.num_chunks
        for op in self.graph.ops:
            strays = [c for c in op.chunks or () if not 0 <= c < num_chunks]
            if strays:
                raise ValueError(f"operation {op.letter!r} is on chunk {strays[0]}: there are {num_chunks} chunks")
            if not any(op.is_on(chunk, num_chunks) for chunk in range(num_chunks)):
                raise ValueError(f"operation {op.letter!r} is on no chunk: give it at least one")
            self._check_backwards(op)
            for chunk, m in op.pairs or ():
                if not (0 <= chunk < num_chunks and 0 <= m < self.graph.num_microbatches):
                    raise ValueError(f"operation {op.letter!r}: the graph has no chunk {chunk} with microbatch {m}")

    def _check_backwards(self, op: Op) -> None:
        """Raises ValueError for an operation around a backward on a chunk that has none."""
        if op.per is not Per.MICROBATCH or not {"B", "I", "W"}.intersection((*op.after, *op.before)):
            return
        chunks = [c for c in range(self.graph.num_chunks) if op.is_on(c, self.graph.num_chunks)]
        without = [c for c in chunks if not self.graph.has_backward(c)]
        if without:
            raise ValueError(
                f"operation {op.letter!r} goes with the backward of chunk {without[0]}, which has none, as nothing "
                f"there or before it trains, or no gradient reaches it: leave {without} out of its chunks, or build "
                "the table for the graph of this model"
            )

    def _check_memory(self, chunk: int) -> None:
        checked = set[tuple[str, ...]]()
        for m in self.graph.microbatches(chunk):
            existing = self._existing(chunk, m)
            letters = tuple(op.letter for op in existing)
            if letters in checked:
                continue  # microbatches with the same operations have the same memory
            checked.add(letters)
            if any(op.moves_memory for op in existing) and not self.graph.has_backward(chunk):
                raise ValueError(f"chunk {chunk} keeps nothing, since it has no backward: no operation may move it")
            if self._takes(chunk, m) < 0:
                raise ValueError(
                    f"operations on chunk {chunk} take more memory than it keeps of a microbatch: let them hold at "
                    "most 1 more than they free"
                )
            emptied = self._emptied(chunk, m, existing)
            if emptied in self.by_letter:
                raise ValueError(
                    f"operation {emptied!r} frees more than chunk {chunk} may hold of a microbatch by then: let it "
                    "come after what takes that, or free less"
                )
            if self._takes(chunk, m) > self.unit:
                freed = next(op.letter for op in existing if op.frees > op.holds)
                raise ValueError(
                    f"operation {freed!r} frees what nothing takes back, and the backward of chunk {chunk} needs all "
                    "of it: let one before B hold as much"
                )
            if emptied is not None:
                late = next(op.letter for op in existing if op.holds > op.frees)
                raise ValueError(
                    f"operation {late!r} may take memory behind the backward of chunk {chunk}, where nothing frees it: "
                    "let it come before B, or free as much as it holds"
                )

    def _emptied(self, chunk: int, microbatch: int, ops: Iterable[Op]) -> str | None:
        """Returns a kind of task after which memory is below zero in some order in which the pair's tasks can run."""
        if not any(op.moves_memory for op in ops):
            return None
        kinds = [kind for kind in self._order(chunk) if self.has(kind, chunk, microbatch)]
        tasks = [Task(kind, chunk, microbatch) for kind in kinds]
        before = {t.kind: {needed.kind for needed in self._needed(t)} for t in tasks}
        change = {t.kind: takes - gives for t in tasks for takes, gives in [self.effect(t)]}
        # The sets of ended tasks are few (at most 2 to the number of kinds), and memory depends on the set alone.
        done, seen = [frozenset[TaskKind]()], set[frozenset[TaskKind]]()
        while done:
            ended = done.pop()
            for kind in kinds:
                after = ended | {kind}
                if kind not in ended and before[kind] <= ended and after not in seen:
                    if sum(change[k] for k in after) < 0:
                        return kind
                    seen.add(after)
                    done.append(after)
        return None

    def _check_once(self, chunk: int) -> None:
        """Raises ValueError unless each operation once per chunk or step comes before or after all microbatches."""
        graph = self.graph
        own = {op.letter: op for op in graph.ops if op.per is not Per.MICROBATCH and op.is_on(chunk, graph.num_chunks)}
        if not own:
            return
        backward = ("B", "I", "W") if graph.has_backward(chunk) else ()
        with_microbatch = {*self._order(chunk), *backward}
        known = {*own, *with_microbatch, *(_ONCE if graph.trains(chunk) else ())}
        follows: dict[str, set[str]] = {letter: set() for letter in (_MICROBATCHES, *known)}
        follows[_MICROBATCHES].add("R")
        follows.setdefault("R", set()).add("U")
        for letter, op in own.items():
            for name in (*op.after, *op.before):
                if name not in known:
                    raise ValueError(
                        f"operation {letter!r} names {name!r}, which chunk {chunk} does not have: "
                        f"name some of {', '.join(sorted(known - {letter}))}"
                    )
            for name in op.after:
                follows[_MICROBATCHES if name in with_microbatch else name].add(letter)
            follows[letter] |= {_MICROBATCHES if name in with_microbatch else name for name in op.before}
        for letter, op in own.items():
            reached, left = set[str](), [letter]
            while left:
                new = follows.get(left.pop(), set()) - reached
                reached |= new
                left += new
            if letter in reached:
                raise ValueError(
                    f"operation {letter!r} runs once per {op.per}, and on chunk {chunk} it would come both after and "
                    "before the tasks of all microbatches, or after and before R or U: leave out one of the two"
                )

    def _on_chunk(self, chunk: int) -> tuple[Op, ...]:
        """Returns the operations per microbatch, with ``after`` and ``before`` in the kinds that this chunk has."""
        graph = self.graph
        return tuple(
            replace(op, after=self._after_kinds(op, chunk), before=self._before_kinds(op, chunk))
            for op in graph.ops
            if op.per is Per.MICROBATCH and op.is_on(chunk, graph.num_chunks)
        )

    def _after_kinds(self, op: Op, chunk: int) -> tuple[str, ...]:
        return self._fitted(op.after, chunk, self.graph.accumulating_kind(chunk))

    def _before_kinds(self, op: Op, chunk: int) -> tuple[str, ...]:
        return self._fitted(op.before, chunk, self.graph.input_gradient_kind(chunk))

    def _fitted(self, letters: tuple[str, ...], chunk: int, backward: TaskKind) -> tuple[str, ...]:
        is_one = self.graph.input_gradient_kind(chunk) is self.graph.accumulating_kind(chunk)
        return tuple(backward if kind == "B" or (is_one and kind in "IW") else kind for kind in letters)

    def _kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        try:
            return tuple(map(TaskKind, order_with_operations(self.graph.built_in_kinds(chunk), self._of_chunk(chunk))))
        except ValueError as error:
            raise ValueError(f"chunk {chunk}: {error}") from None

    def _existing(self, chunk: int, microbatch: int) -> list[Op]:
        return [op for op in self._of_chunk(chunk) if op.exists(chunk, microbatch)]

    def kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        """Returns all kinds of tasks that microbatches have on a chunk, in an order in which they can run."""
        return self._order(chunk)

    def has(self, kind: TaskKind, chunk: int, microbatch: int) -> bool:
        """Whether a pair of the graph has a task of one of its chunk's kinds."""
        op = self.by_letter.get(kind)
        return op is None or op.exists(chunk, microbatch)

    def remakes_stash(self, chunk: int) -> bool:
        """Whether an operation recomputes the residuals of a chunk, so that its F keeps only its inputs."""
        return any(op.remakes_stash and op.is_on(chunk, self.graph.num_chunks) for op in self.graph.ops)

    def lane(self, kind: TaskKind) -> str:
        op = self.by_letter.get(kind)
        return COMPUTE if op is None else op.lane

    def once(self, chunks: Iterable[int]) -> Iterator[Task]:
        """Yields the tasks of operations that run once per chunk or step, on these chunks."""
        for chunk in chunks:
            for op in self.graph.ops:
                if op.per is not Per.MICROBATCH and op.is_on(chunk, self.graph.num_chunks):
                    yield Task(TaskKind(op.letter), chunk)

    # -- dependencies ------------------------------------------------------------------------------------------------

    def before(self, task: Task) -> Iterator[Task]:
        """Yields the tasks of operations on the same chunk that must finish before this task, of any kind, starts."""
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
            if kind in self._before_kinds(op, chunk):
                yield Task(TaskKind(op.letter), chunk)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """Returns the tasks that must finish before an operation's task starts."""
        kind, chunk, m = task
        op = self.by_letter[kind]
        if op.per is Per.MICROBATCH:
            own = next(o for o in self._of_chunk(chunk) if o.letter == kind)
            after = (Task(TaskKind(k), chunk, m) for k in own.after if self.has(TaskKind(k), chunk, m))
            return (*after, *self.before(task), *self._anchors(task))
        found: list[Task] = list(self._anchors(task))
        for letter in self._after_kinds(op, chunk):
            found += self._all_of(TaskKind(letter), chunk)
        return (*found, *self.before(task))

    def _needed(self, task: Task) -> tuple[Task, ...]:
        """Returns the dependencies of a task on its own chunk and microbatch."""
        if task.kind in self.by_letter:
            return tuple(needed for needed in self.dependencies(task) if needed[1:] == task[1:])
        built_in = self.graph.built_in_kinds(task.chunk)
        before = (*(task._replace(kind=kind) for kind in built_in[: built_in.index(task.kind)]), *self.before(task))
        return tuple(needed for needed in before if needed.microbatch >= 0)

    def _anchors(self, task: Task) -> Iterator[Task]:
        """Yields the existing tasks that the operation's ``waits`` name for this one."""
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
        """Returns the memory that a task takes as it starts and frees as it ends, in parts of :attr:`unit`.

        The chunk must have a backward.
        """
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


def _part(value: float) -> Fraction:
    return Fraction(value).limit_denominator(_FINEST)
