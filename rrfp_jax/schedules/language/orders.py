"""Orders: the tasks of a stage, phase by phase, as the published constructions are written.

``a + b`` is a and then b; ``a * n`` is a, n times; ``a.until(F[c])`` is a again and again until all F of chunk c are
there; ``pair(a)`` is a, whose first two tasks a stage may run as one program. A B of a split backward is I with its W
right behind it.

A *stream*, such as ``F[c]``, is all passes of a kind on a stage, numbered from 0: by microbatch on each chunk, or as
:meth:`Stream.over` lists them. As a phase it is the next microbatch of that kind on that chunk, or nothing where none
is left. In :func:`rounds`, round r runs pass r of every stream, from left to right. ``ahead(n)`` runs a stream n rounds
earlier, ``behind(n)`` later, ``every(k)`` one pass in k rounds; ``only`` leaves some out. The rounds before round 0 are
the warm-up: ``rounds(F.ahead(3), B)`` is 1F1B with three warm-up forwards. Where a stream has several passes in a
round, forwards go by ascending chunk and all else by descending chunk, as a microbatch meets them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import index, itemgetter
from typing import Any

from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, check_number, is_number
from rrfp_jax.schedules.operations import Op
from rrfp_jax.schedules.table import why_unknown
from rrfp_jax.schedules.tasks import BUILT_IN, Pair, Task, TaskKind

_Shift = int | Callable[[int], int]
"""A number of rounds, or a function that returns it for a chunk."""
_new_task = tuple.__new__
"""Makes a task in 0.4 of the time that its constructor takes; a table of 98,304 tasks makes each of them twice."""


class OrderRow:
    """The order of a stage as far as it is written."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.limit = stage, stage.m
        """The number of microbatches to write; the stage may have fewer."""
        self.places: dict[Task, int] = {}
        self.tasks: list[Task] = []
        """The same, in their order."""
        self.pairs: set[Pair] = set()
        """Tasks, each right behind the other, that may run as one program."""
        self._inputs: list[Task] = []
        """W of every I in the row, in the order of the I."""
        self._owed_from = 0
        """No W before this one is owed."""
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
        places = self.places
        for part in kinds:
            task = _new_task(Task, (part, chunk, microbatch))
            if not self.has(task):
                continue
            here = len(places)
            if places.setdefault(task, here) != here:
                raise Mistake(f"{task} stands at {places[task]} and again at {here}: keep one of them")
            self.tasks.append(task)
            if part is TaskKind.I:
                self._inputs.append(_new_task(Task, (TaskKind.W, chunk, microbatch)))

    def has(self, task: Task) -> bool:
        """Whether the pipeline has this task, or would have it with more microbatches."""
        kind, chunk, m = task
        if self._is_full:
            return m >= 0
        graph = self.stage.graph
        return m >= graph.num_microbatches or (
            graph.exists(chunk, m) and (not graph.ops or graph.operations.has(kind, chunk, m))
        )

    def left(self, kind: str, chunk: int) -> Iterator[int]:
        """Yields the microbatches of this kind and chunk that are not in the row yet."""
        self.stage.check_own(chunk)
        for part in map(TaskKind, self.stage.parts(kind, chunk)[:1]):
            # Rows grow from the front, so remembering the first gap makes a phase of n passes linear in n.
            is_first = True
            for m in range(self._first.get((part, chunk), 0), self.limit):
                task = Task(part, chunk, m)
                if task not in self.places and self.has(task):
                    if is_first:
                        self._first[part, chunk], is_first = m, False
                    yield m
            if is_first:
                self._first[part, chunk] = self.limit

    def owed(self) -> list[Task]:
        """Returns the W whose I stands in the row without them, the oldest first."""
        inputs, places = self._inputs, self.places
        while self._owed_from < len(inputs) and inputs[self._owed_from] in places:
            self._owed_from += 1
        waiting = (task for task in inputs[self._owed_from :] if task not in places)
        return [task for task in waiting if TaskKind.W in self.stage.graph.kinds(task.chunk)]


class TaskOrder(Described):
    """A phase of a stage: it appends tasks to the row, by one function after the other."""

    def __init__(self, *writes: Callable[[OrderRow], None]) -> None:
        self._writes = writes

    def write(self, row: OrderRow) -> None:
        for write in self._writes:
            write(row)

    def __add__(self, other: "TaskOrder") -> "TaskOrder":
        if not isinstance(other, TaskOrder):
            raise Mistake(f"{other!r} is no order: add streams, rounds or slots")
        return TaskOrder(self.write, other.write)

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
        if not isinstance(stream, Stream):
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
        return self.with_pairs(stage)[0]

    def with_pairs(self, stage: Stage) -> tuple[list[Task], set[Pair]]:
        """Returns the tasks of this order on a stage, and those that may run as one program. Raises as :meth:`on`."""
        row = OrderRow(stage)
        self.write(row)
        pairs = {pair for pair in row.pairs if max(task.microbatch for task in pair) < stage.m}
        return [task for task in row.tasks if task[2] < stage.m], pairs

    def peak(self, stage: Stage) -> float:
        """Returns the most activations that a stage holds at once."""
        return max(_held_along(stage.graph, self.on(stage)))


def pair(order: TaskOrder) -> TaskOrder:
    """Returns the order whose first two tasks may run as one program: ``pair(F[0] + B[1])``, or the two halves of a
    split backward by itself, ``pair(B[1])``. An order that writes fewer is left alone."""
    if not isinstance(order, TaskOrder):
        raise Mistake(f"{order!r} is no order: join the tasks of one, such as pair(F[0] + B[1])")

    def write(row: OrderRow) -> None:
        start = len(row.tasks)
        order.write(row)
        both = row.tasks[start : start + 2]
        if len(both) == 2:
            row.pairs.add(Pair(*both))

    return TaskOrder(write)


nothing = TaskOrder()
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


# -- streams -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream(TaskOrder):
    """The passes of one kind on a stage, and in which round of several streams each of them runs."""

    kind: str
    chunk: int | None = None
    passes: tuple[tuple[int, int], ...] | None = None
    period: int = 1
    shifts: tuple[tuple[int, _Shift], ...] = ()
    """Rounds by which the stream comes later, each with its sign."""
    wanted: Callable[[Task], bool] | None = None

    def __str__(self) -> str:
        return self.kind if self.chunk is None else f"{self.kind}[{self.chunk}]"

    def __getitem__(self, chunk: int) -> "Stream":
        """Returns the stream on this chunk alone."""
        if type(chunk) is not int:  # True is no chunk either
            raise Mistake(f"{self.kind}[{chunk!r}] is of no chunk: give the number of one")
        return replace(self, chunk=chunk)

    def over(self, passes: Iterable[tuple[int, int]]) -> "Stream":
        """Returns the stream of these (chunk, microbatch) passes, in this order."""
        try:
            return replace(self, passes=tuple((index(chunk), index(microbatch)) for chunk, microbatch in passes))
        except (TypeError, ValueError) as error:
            raise Mistake(f"{self}.over takes pairs of a chunk and a microbatch: {error}") from error

    def ahead(self, rounds: _Shift) -> "Stream":
        """Returns the stream this many rounds earlier; a function gives the rounds of each chunk."""
        return self.behind(rounds, sign=-1)

    def behind(self, rounds: _Shift, *, sign: int = 1) -> "Stream":
        """Returns the stream this many rounds later; a function gives the rounds of each chunk."""
        if not (callable(rounds) or is_number(rounds)):
            raise Mistake(
                f"{self} cannot run {rounds!r} rounds ahead or behind: give a number, or a function of the chunk"
            )
        return replace(self, shifts=(*self.shifts, (sign, rounds)))

    def every(self, rounds: int) -> "Stream":
        """Returns the stream with one pass in this many rounds."""
        if not (is_number(rounds) and rounds >= 1):
            raise Mistake(f"{self} cannot run every {rounds!r} rounds: give a number, at least 1")
        return replace(self, period=rounds)

    def only(self, wanted: Callable[[Task], bool]) -> "Stream":
        """Returns the stream of the passes that ``wanted`` accepts, each in the round that it had before."""
        if not callable(wanted):
            raise Mistake(f"{self}.only takes a function of a task, not {wanted!r}")
        return replace(self, wanted=wanted)

    @property
    def rest(self) -> TaskOrder:
        """All passes that have not been written, chunk after chunk."""

        def write(row: OrderRow) -> None:
            for chunk in self.own_chunks(row.stage):
                for microbatch in row.left(self.kind, chunk):
                    row.put(self.kind, chunk, microbatch)

        return TaskOrder(write)

    def own_chunk(self, stage: Stage) -> int:
        """Returns the chunk of the stream. Raises :class:`Mistake` where there may be several."""
        chunk = stage.chunks[0] if self.chunk is None and len(stage.chunks) == 1 else self.chunk
        if chunk is None:
            raise Mistake(
                f"{self} may be of chunks {list(stage.chunks)}: say which, for example {self}[{stage.chunks[0]}]"
            )
        stage.check_own(chunk)
        return chunk

    def own_chunks(self, stage: Stage) -> tuple[int, ...]:
        """Returns the chunks of the stream, in the order in which a microbatch meets them."""
        if self.chunk is not None:
            stage.check_own(self.chunk)
            return (self.chunk,)
        return stage.chunks if self.kind == TaskKind.F else stage.chunks[::-1]

    def write(self, row: OrderRow) -> None:
        """Appends the pass of the next microbatch, if one is left."""
        chunk = self.own_chunk(row.stage)
        for microbatch in islice(row.left(self.kind, chunk), 1):
            row.put(self.kind, chunk, microbatch)

    def by_round(self, stage: Stage) -> list[tuple[int, str, int, int]]:
        """Returns (round, kind, chunk, microbatch) of all its passes; those of one round in the order in which they
        run."""
        if self.passes is None:
            numbered = [(c, m, m) for c in self.own_chunks(stage) for m in range(stage.m)]
        else:
            numbered = [(c, m, number) for number, (c, m) in enumerate(self.passes)]
        if self.wanted is not None:
            kind = TaskKind(self.kind)
            numbered = [one for one in numbered if self.wanted(Task(kind, *one[:2]))]
        # Once per chunk: a shift may be a function that walks the whole graph.
        chunks = dict.fromkeys(c for c, _, _ in numbered)
        shift = {c: sum(sign * (n(c) if callable(n) else n) for sign, n in self.shifts) for c in chunks}
        found = [(self.period * number + shift[c], self.kind, c, m) for c, m, number in numbered]
        if not found:
            raise Mistake(f"the stream {self} holds no pass: let .over list some, and .only leave some")
        wrong = next((m for *_, m in found if not 0 <= m < stage.m), None)
        if wrong is not None:
            raise Mistake(f"the stream {self} lists microbatch {wrong} of {stage.m}: use 0..{stage.m - 1}")
        return found


def rounds(*streams: Stream) -> TaskOrder:
    """Returns the order in which round r runs pass r of every stream, shifted as it says, from left to right."""
    for stream in streams:
        if not isinstance(stream, Stream):
            raise Mistake(f"rounds take streams, such as F.ahead(2), not {stream!r}: add phases to rounds with +")

    def write(row: OrderRow) -> None:
        passes = [one for stream in streams for one in stream.by_round(row.stage)]
        passes.sort(key=itemgetter(0))  # a stable sort keeps the streams of a round, and their passes, in order
        put = row.put
        for _, kind, chunk, microbatch in passes:
            put(kind, chunk, microbatch)

    return TaskOrder(write)


@dataclass(frozen=True)
class OwedWeights(TaskOrder):
    """The oldest W whose I has run without it, if there is one; ``owed.rest`` is all of them."""

    most: int | None

    @property
    def rest(self) -> TaskOrder:
        """All W whose I has run without them, the oldest first."""
        return OwedWeights(None)

    def write(self, row: OrderRow) -> None:
        for task in row.owed()[: self.most]:
            row.put(*task)


def stream(kind: str | Op) -> Stream:
    """Returns the passes of an operation (or of any kind by its letters), to be put where they are issued."""
    letters = kind.letter if isinstance(kind, Op) else kind
    if not isinstance(letters, str):
        raise Mistake(f"a stream is of an operation or of a kind by its letters, not of {letters!r}")
    return Stream(letters)


F, B, W = Stream(TaskKind.F), Stream(TaskKind.B), Stream(TaskKind.W)
I = Stream(TaskKind.I)  # noqa: E741 - the field's letter
owed = OwedWeights(1)
