"""Orders: the tasks of a stage, phase by phase, as the published constructions are written.

``a + b`` is a and then b; ``a * n`` is a, n times; ``a.until(F[c])`` is a again and again until all F of chunk c are
there. A phase such as ``F[c]``, a stream, is the next microbatch of that kind on that
chunk, or nothing where none is left. A B of a split backward is I with its W right behind it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, check_number, is_number
from rrfp_jax.schedules.tasks import BUILT_IN, Task, TaskKind
from rrfp_jax.schedules.validation import why_unknown


class OrderRow:
    """The order of a stage as far as it is written."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.limit = stage, stage.m
        """The number of microbatches to write; the stage may have fewer."""
        self.places: dict[Task, int] = {}
        self.owed: dict[Task, None] = {}
        """W whose I stands in the row without them, the oldest first."""
        self._first: dict[tuple[str, int], int] = {}
        """For each kind and chunk a microbatch before which none is left to write."""
        self._kinds: dict[tuple[str, int], tuple[TaskKind, ...]] = {}
        """The kinds of tasks of each kind of pass on each chunk; parts() takes long enough to be asked once."""
        self._is_full = stage.graph.is_full and not stage.graph.ops
        """Whether every microbatch has every task."""

    def put(self, kind: str, chunk: int, microbatch: int) -> None:
        """Appends one pass, if the pipeline has it. Raises :class:`Mistake` where it is in the row already."""
        kinds = self._kinds.get((kind, chunk))
        if kinds is None:
            self.stage.check_own(chunk)
            kinds = self._kinds[kind, chunk] = tuple(map(TaskKind, self.stage.parts(kind, chunk)))
        for part in kinds:
            task, here = Task(part, chunk, microbatch), len(self.places)
            if not self.has(task):
                continue
            if self.places.setdefault(task, here) != here:
                raise Mistake(f"{task} stands at {self.places[task]} and again at {here}: keep one of them")
            if part is TaskKind.W:
                self.owed.pop(task, None)
            elif part is TaskKind.I and TaskKind.W in self.stage.graph.kinds(chunk):
                self.owed[Task(TaskKind.W, chunk, microbatch)] = None

    def has(self, task: Task) -> bool:
        """Whether the pipeline has this task, or would have it with more microbatches."""
        graph = self.stage.graph
        _, chunk, m = task
        if self._is_full:
            return m >= 0
        return m >= graph.num_microbatches or (
            graph.exists(chunk, m) and (not graph.ops or graph.operations.has(task.kind, chunk, m))
        )

    def left(self, kind: str, chunk: int) -> Iterator[int]:
        """Yields the microbatches of this kind and chunk that are not in the row yet."""
        self.stage.check_own(chunk)
        for part in self.stage.parts(kind, chunk)[:1]:
            # Rows grow from the front, so remembering the first gap makes a phase of n passes linear in n.
            first = self._first.get((part, chunk), 0)
            while first < self.limit and not self._is_left(Task(TaskKind(part), chunk, first)):
                first += 1
            self._first[part, chunk] = first
            yield from (m for m in range(first, self.limit) if self._is_left(Task(TaskKind(part), chunk, m)))

    def _is_left(self, task: Task) -> bool:
        return task not in self.places and self.has(task)


class TaskOrder(Described):
    """A phase of a stage: it appends tasks to the row."""

    def __init__(self, write: Callable[[OrderRow], None]) -> None:
        self._write = write

    def write(self, row: OrderRow) -> None:
        """Appends its tasks to the row."""
        self._write(row)

    def __add__(self, other: "TaskOrder") -> "TaskOrder":
        if not isinstance(other, TaskOrder):
            raise Mistake(f"{other!r} is no order: add streams, rounds or slots")
        return _one_after_another(self, other)

    def __mul__(self, times: Any) -> "TaskOrder":
        if not (is_number(times) and times >= 0 and times % 1 == 0):
            raise Mistake(f"an order cannot be repeated {times!r} times: give a whole number, 0 or more")

        def write(row: OrderRow) -> None:
            for _ in range(int(times)):
                before = len(row.places)
                self.write(row)
                if len(row.places) == before:  # no further repetition would add a task either
                    return

        return TaskOrder(write)

    __rmul__ = __mul__

    def until(self, stream: Any) -> "TaskOrder":
        """Repeats the order until all tasks of this kind and chunk are in the row."""
        if not hasattr(stream, "own_chunk"):
            raise Mistake("an order is repeated until a stream is there, such as F[0]: write .until(F[0])")

        def write(row: OrderRow) -> None:
            chunk = stream.own_chunk(row.stage)
            while any(True for _ in row.left(stream.kind, chunk)):
                before = len(row.places)
                self.write(row)
                if len(row.places) == before:
                    raise Mistake(f"what is repeated until {stream} adds nothing: let it contain {stream}")

        return TaskOrder(write)

    def written_for(self, microbatches: int) -> "TaskOrder":
        """Writes the order for at least this many microbatches, and leaves those out that the stage does not have. For
        a construction that needs as many."""
        check_number("written_for", microbatches)

        def write(row: OrderRow) -> None:
            # Tasks beyond the stage's microbatches stand in the row as well, so that the construction counts them; on()
            # leaves them out.
            limit, row.limit = row.limit, max(row.limit, microbatches)
            self.write(row)
            row.limit = limit

        return TaskOrder(write)

    def within(self, limit: float) -> "TaskOrder":
        """Refuses the order where the stage holds more activations than this, each of a chunk from its F to the end of
        its backward."""
        check_number("within", limit)

        def write(row: OrderRow) -> None:
            self.write(row)
            along = zip(row.places.items(), _held_along(row.stage.graph, row.places), strict=True)
            for (task, place), held in along:
                if held > limit:
                    raise Mistake(
                        f"{task} at {place} brings what is held to {held:g} activations, and the limit is {limit:g}: "
                        "warm up with fewer forwards, or raise the limit"
                    )

        return TaskOrder(write)

    def remedy(self, missing: Sequence[Task]) -> str:
        """Returns the phases that would add the missing tasks."""
        kinds = dict.fromkeys(task.kind for task in missing)
        words = (f"{kind}.rest" if kind in BUILT_IN else f'stream("{kind}").rest' for kind in kinds)
        return f"add them, with + {' + '.join(words)}"

    def on(self, stage: Stage) -> list[Task]:
        """Returns the tasks of this order on a stage. Raises :class:`Mistake` for an error in the description."""
        row = OrderRow(stage)
        self.write(row)
        return [task for task in row.places if task.microbatch < stage.m]

    def peak(self, stage: Stage) -> float:
        """Returns the most activations that a stage holds at once."""
        return max(_held_along(stage.graph, self.on(stage)))


def _one_after_another(*orders: TaskOrder) -> TaskOrder:
    def write(row: OrderRow) -> None:
        for order in orders:
            order.write(row)

    return TaskOrder(write)


nothing = _one_after_another()
"""The order without tasks, for a phase that some stages lack."""


def _held_along(graph: PipelineGraph, tasks: Iterable[Task]) -> Iterator[float]:
    """Yields the activations that a stage holds while each task runs: F takes that of its chunk, the end of its
    backward frees it, and operations move parts of it."""
    held = 0.0
    for task in tasks:
        takes, frees = graph.memory_effect(task)
        yield (held := held + takes)
        held -= frees


def given(tasks: Iterable[Task | str] | str) -> TaskOrder:
    """Returns an order that is written out: tasks, or their text, ``0F0 0F1 0B0 0B1``."""
    try:
        parts = tasks.split() if isinstance(tasks, str) else tasks
        listed = [part if isinstance(part, Task) else Task.parse(part) for part in parts]
    except (ValueError, TypeError, AttributeError) as error:
        raise Mistake(f"given takes tasks, such as '0F0 0F1 0B0', not {tasks!r}: {error}") from error

    def write(row: OrderRow) -> None:
        known = set(row.stage.graph.tasks(row.stage.chunks))
        for task in listed:
            row.stage.check_own(task.chunk)
            if task not in known:
                raise Mistake(why_unknown(task, row.stage.graph))
            row.put(*task)

    return TaskOrder(write)
