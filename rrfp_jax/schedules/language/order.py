"""Orders: what a stage runs, phase by phase, as the published constructions are written.

``a + b`` is a and then b; ``a * n`` is a, n times; ``a.until(F[c])`` is a again and again until all F of chunk c are
there. A phase such as ``F[c]`` (:mod:`rrfp_jax.schedules.language.streams`) is the next microbatch of that kind on that
chunk; where none is left, nothing. Whatever is B of a split backward is I with its W right behind it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, check_number, is_number
from rrfp_jax.schedules.validation import why_unknown
from rrfp_jax.tasks import BUILT_IN, PipelineGraph, Task, TaskKind


class Row:
    """The order of a stage as far as it is written."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.limit = stage, stage.m
        """The microbatches that there are to write, of which the stage may have fewer."""
        self.places: dict[Task, int] = {}
        self.owed: dict[Task, None] = {}
        """W of the I that stand without them, the oldest first."""
        self._first: dict[tuple[str, int], int] = {}
        """Before this microbatch none of the kind and chunk is left."""
        self._kinds: dict[tuple[str, int], tuple[TaskKind, ...]] = {}
        """The kinds of tasks of each pass that was put."""
        self._is_full = stage.graph.is_full and not stage.graph.ops
        """Whether every microbatch has every task."""

    def put(self, kind: str, chunk: int, microbatch: int) -> None:
        """One pass, if there is such a one. Raises :class:`Mistake` where it is there already."""
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
        """The microbatches of this kind and chunk that are not there yet."""
        self.stage.check_own(chunk)
        for part in self.stage.parts(kind, chunk)[:1]:
            first = self._first.get((part, chunk), 0)
            while first < self.limit and not self._is_left(Task(TaskKind(part), chunk, first)):
                first += 1
            self._first[part, chunk] = first
            yield from (m for m in range(first, self.limit) if self._is_left(Task(TaskKind(part), chunk, m)))

    def _is_left(self, task: Task) -> bool:
        return task not in self.places and self.has(task)


class Order(Described):
    """What comes next on a stage."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self._write = write

    def write(self, row: Row) -> None:
        """Put its tasks behind those that are there."""
        self._write(row)

    def __add__(self, other: "Order") -> "Order":
        if not isinstance(other, Order):
            raise Mistake(f"{other!r} is no order: add streams, rounds or slots")
        return _one_after_another(self, other)

    def __mul__(self, times: Any) -> "Order":
        if not (is_number(times) and times >= 0 and times % 1 == 0):
            raise Mistake(f"an order cannot be repeated {times!r} times: give a whole number, 0 or more")

        def write(row: Row) -> None:
            for _ in range(int(times)):
                before = len(row.places)
                self.write(row)
                if len(row.places) == before:  # nor would any further repetition add something
                    return

        return Order(write)

    __rmul__ = __mul__

    def until(self, stream: Any) -> "Order":
        """Again and again until all tasks of this kind and chunk are there."""
        if not hasattr(stream, "own_chunk"):
            raise Mistake("an order is repeated until a stream is there, such as F[0]: write .until(F[0])")

        def write(row: Row) -> None:
            chunk = stream.own_chunk(row.stage)
            while any(True for _ in row.left(stream.kind, chunk)):
                before = len(row.places)
                self.write(row)
                if len(row.places) == before:
                    raise Mistake(f"what is repeated until {stream} adds nothing: let it contain {stream}")

        return Order(write)

    def written_for(self, microbatches: int) -> "Order":
        """For a construction that needs at least so many: it is written for these, and those beyond the stage's are
        left out."""
        check_number("written_for", microbatches)

        def write(row: Row) -> None:
            limit, row.limit = row.limit, max(row.limit, microbatches)
            self.write(row)
            row.limit = limit

        return Order(write)

    def within(self, limit: float) -> "Order":
        """Refused where it holds more activations than this, each of a chunk from its F to the end of its backward."""
        check_number("within", limit)

        def write(row: Row) -> None:
            self.write(row)
            along = zip(row.places.items(), held_along(row.stage.graph, row.places), strict=True)
            for (task, place), held in along:
                if held > limit:
                    raise Mistake(
                        f"{task} at {place} brings what is held to {held:g} activations, and the limit is {limit:g}: "
                        "warm up with fewer forwards, or raise the limit"
                    )

        return Order(write)

    def remedy(self, missing: Sequence[Task]) -> str:
        """The phases that hold them."""
        kinds = dict.fromkeys(task.kind for task in missing)
        words = (f"{kind}.rest" if kind in BUILT_IN else f'stream("{kind}").rest' for kind in kinds)
        return f"add them, with + {' + '.join(words)}"

    def on(self, stage: Stage) -> list[Task]:
        """The tasks of this order on a stage. Raises :class:`Mistake` with what is wrong."""
        row = Row(stage)
        self.write(row)
        return [task for task in row.places if task.microbatch < stage.m]

    def peak(self, stage: Stage) -> float:
        """The most activations that a stage holds at once."""
        return max(held_along(stage.graph, self.on(stage)))


def _one_after_another(*orders: Order) -> Order:
    def write(row: Row) -> None:
        for order in orders:
            order.write(row)

    return Order(write)


nothing = _one_after_another()
"""The order without tasks, for a phase that some stages lack."""


def held_along(graph: PipelineGraph, tasks: Iterable[Task]) -> Iterator[float]:
    """What a stage holds while each task runs, in activations of a chunk: F takes one, the end of its backward frees
    it, and operations move parts of it."""
    held = 0.0
    for task in tasks:
        takes, frees = graph.memory_effect(task)
        yield (held := held + takes)
        held -= frees


def given(tasks: Iterable[Task | str] | str) -> Order:
    """An order written out: tasks, or their text, ``0F0 0F1 0B0 0B1``."""
    try:
        parts = tasks.split() if isinstance(tasks, str) else tasks
        listed = [part if isinstance(part, Task) else Task.parse(part) for part in parts]
    except (ValueError, TypeError, AttributeError) as error:
        raise Mistake(f"given takes tasks, such as '0F0 0F1 0B0', not {tasks!r}: {error}") from error

    def write(row: Row) -> None:
        known = set(row.stage.graph.tasks(row.stage.chunks))
        for task in listed:
            row.stage.check_own(task.chunk)
            if task not in known:
                raise Mistake(why_unknown(task, row.stage.graph))
            row.put(*task)

    return Order(write)
