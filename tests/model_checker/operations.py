"""What a graph's operations demand, derived from their records alone.

Which tasks they are, what waits for what because of them, on which lanes they run, what they do to memory, and the
order in which memory is reserved where no table gives one. It follows the words of
:mod:`rrfp_jax.schedules.operations` and of :mod:`rrfp_jax.core.memory`, and none of their code.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from math import lcm

from rrfp_jax.schedules import COMPUTE, Op, Per, PipelineGraph, Task, TaskKind


class Operations:
    """The operations of one graph, as the judge sees them; a graph without any has built-in tasks alone."""

    def __init__(self, graph: PipelineGraph) -> None:
        self.graph, self.bare = graph, replace(graph, ops=()) if graph.ops else graph
        self.by_kind = {TaskKind(op.letter): op for op in graph.ops}
        self._weights = [Fraction(w).limit_denominator(1000) for w in graph.weights or (1,) * graph.num_chunks]
        self.unit = lcm(*(w.denominator for w in self._weights)) * (graph.operations.unit if graph.ops else 1)
        """How many units one activation is, in which footprints are given."""
        self._pairs: dict[tuple[int, int], list[Task]] = {}
        self._effects: dict[Task, tuple[int, int]] = {}

    def lane(self, task: Task) -> str:
        op = self.by_kind.get(task.kind)
        return COMPUTE if op is None else op.lane

    # -- what there is, and what waits for what ----------------------------------------------------------------------

    @cached_property
    def once(self) -> list[Task]:
        """The tasks of operations that run once per chunk or step, chunk by chunk."""
        graph = self.graph
        return [
            Task(TaskKind(op.letter), c)
            for c in range(graph.num_chunks)
            for op in graph.ops
            if (op.per is Per.CHUNK and (op.chunks is None or c in op.chunks))
            or (op.per is Per.STEP and c == min(op.chunks or (0,)))
        ]

    @cached_property
    def needs(self) -> dict[Task, set[Task]]:
        """What each task waits for because of operations; R and U among it, whether the step has them or not."""
        found: dict[Task, set[Task]] = defaultdict(set)
        for task in (*self._per_microbatch(), *self.once):
            op = self.by_kind[task.kind]
            for letter in op.after:
                found[task] |= self._named(letter, task, self.graph.accumulating_kind(task.chunk))
            for letter in op.before:
                for later in self._named(letter, task, self.graph.input_gradient_kind(task.chunk)):
                    found[later].add(task)
            found[task] |= {anchor for waiting, anchor in op.waits if waiting == task}
        return found

    def _per_microbatch(self) -> list[Task]:
        graph = self.graph
        return [task for c in range(graph.num_chunks) for m in graph.microbatches(c) for task in self._at(c, m)]

    def _at(self, chunk: int, microbatch: int) -> list[Task]:
        if (chunk, microbatch) not in self._pairs:
            self._pairs[chunk, microbatch] = self._find_at(chunk, microbatch)
        return self._pairs[chunk, microbatch]

    def _find_at(self, chunk: int, microbatch: int) -> list[Task]:
        """The operations of one pair of the graph."""
        return [
            Task(TaskKind(op.letter), chunk, microbatch)
            for op in self.graph.ops
            if op.per is Per.MICROBATCH
            and (op.chunks is None or chunk in op.chunks)
            and (op.pairs is None or (chunk, microbatch) in op.pairs)
        ]

    def _named(self, letter: str, by: Task, backward: TaskKind) -> set[Task]:
        """The tasks that a letter means to an operation's task: of its microbatch, or of all if it has none; B is the
        whole backward, and so are I and W where that is one task."""
        chunk, graph = by.chunk, self.graph
        is_one = graph.input_gradient_kind(chunk) is graph.accumulating_kind(chunk)
        kind = backward if letter == "B" or (is_one and letter in "IW") else TaskKind(letter)
        if kind in (TaskKind.R, TaskKind.U):
            return {Task(kind, chunk)}
        if kind in self.by_kind and self.by_kind[kind].per is not Per.MICROBATCH:
            return {task for task in self.once if task.kind is kind and task.chunk == chunk}
        microbatches = graph.microbatches(chunk) if by.microbatch < 0 else (by.microbatch,)
        return {Task(kind, chunk, m) for m in microbatches if kind not in self.by_kind or self._has(kind, chunk, m)}

    def _has(self, kind: TaskKind, chunk: int, microbatch: int) -> bool:
        return Task(kind, chunk, microbatch) in self._at(chunk, microbatch)

    def taken_back_for(self, task: Task) -> list[Task]:
        """The operations that take memory for a built-in task, which come right before it."""
        return [t for t in self.needs.get(task, ()) if self._op(t).holds]

    def _op(self, task: Task) -> Op:
        return self.by_kind[task.kind]

    # -- memory ------------------------------------------------------------------------------------------------------

    def effect(self, task: Task) -> tuple[int, int]:
        """What a task takes as it starts and frees as it ends, in units."""
        if task not in self._effects:
            self._effects[task] = self._effect(task)
        return self._effects[task]

    def _effect(self, task: Task) -> tuple[int, int]:
        kind, chunk, m = task
        if m < 0 or not self.graph.has_backward(chunk):
            return 0, 0
        if kind in self.by_kind:
            return self._units(self._op(task).holds, chunk), self._units(self._op(task).frees, chunk)
        if kind is TaskKind.F:
            ops = list(map(self._op, self._at(chunk, m)))
            later = sum(self._units(op.holds, chunk) - self._units(op.frees, chunk) for op in ops)
            return self._units(1, chunk) - later, 0
        return 0, self._units(1, chunk) if kind is self.graph.accumulating_kind(chunk) else 0

    def _units(self, part: float, chunk: int) -> int:
        return int(Fraction(part).limit_denominator(1000) * self._weights[chunk] * self.unit)

    def canonical_row(self, chunks: Sequence[int], sequence: Sequence[int] = ()) -> list[Task]:
        """Microbatch by microbatch, forth through a stage's chunks and back: the order in which memory is reserved
        where no table has one."""
        row: list[Task] = []
        for m in sequence or range(self.graph.num_microbatches):
            here = [c for c in chunks if self.graph.exists(c, m)]
            tasks = {c: [task for task in self.graph.tasks([c]) if task.microbatch == m] for c in here}
            forth = {c: self._forth(c, m, tasks[c]) for c in here}
            for c in here:
                row += forth[c]
            for c in reversed(here):
                row += [task for task in tasks[c] if task not in forth[c]]
        return row

    def _forth(self, chunk: int, microbatch: int, tasks: list[Task]) -> list[Task]:
        """What a microbatch has on a chunk before its backward: not what takes memory back for that, nor what waits for
        such an operation."""
        if not self.graph.has_backward(chunk):
            return tasks
        start = tasks.index(Task(self.graph.input_gradient_kind(chunk), chunk, microbatch))
        back = set(tasks[start:])
        while more := {task for task in tasks[:start] if task not in back and self._goes_with(task, back)}:
            back |= more
        return [task for task in tasks if task not in back]

    def _goes_with(self, task: Task, back: set[Task]) -> bool:
        """Whether a task belongs to the way back with these: it takes memory for one of them, or waits for one."""
        is_for_them = task.kind in self.by_kind and any(task in self.needs.get(other, ()) for other in back)
        waits = not back.isdisjoint((*self.bare_dependencies(task), *self.needs.get(task, ())))
        return waits or (is_for_them and self.effect(task)[0] > 0)

    def bare_dependencies(self, task: Task) -> Iterable[Task]:
        """What a built-in task with a microbatch waits for in a graph without operations."""
        return () if task.kind in self.by_kind else self.bare.dependencies(task)
