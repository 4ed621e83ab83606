"""Streams of passes, and rounds in which several streams take turns.

A stream is all passes of a kind on a stage, numbered from 0: by microbatch on each chunk, or as :meth:`Stream.over`
lists them. In :func:`rounds`, round r runs pass r of every stream, from left to right. ``ahead(n)`` runs a stream n
rounds earlier, ``behind(n)`` later, ``every(k)`` one pass in k rounds; ``only`` leaves some out. The rounds before
round 0 are the warm-up: ``rounds(F.ahead(3), B)`` is 1F1B with three warm-up forwards. Where a stream has
several passes in a round, forwards go by ascending chunk and all else by descending chunk, as a microbatch meets them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from operator import index, itemgetter
from typing import Any

from rrfp_jax.schedules.language._order import OrderRow, TaskOrder
from rrfp_jax.schedules.language.stage import Mistake, Stage, is_number
from rrfp_jax.schedules.operations import Op
from rrfp_jax.schedules.tasks import Task, TaskKind

_Shift = int | Callable[[int], int]
"""A number of rounds, or a function that returns it for a chunk."""


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
        return self._shifted(-1, rounds)

    def behind(self, rounds: _Shift) -> "Stream":
        """Returns the stream this many rounds later; a function gives the rounds of each chunk."""
        return self._shifted(1, rounds)

    def _shifted(self, sign: int, rounds: Any) -> "Stream":
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

    def by_round(self, stage: Stage) -> list[tuple[int, int, int]]:
        """Returns (round, chunk, microbatch) of all its passes; those of one round in the order in which they run."""
        if self.passes is None:
            numbered = [(c, m, m) for c in self.own_chunks(stage) for m in range(stage.m)]
        else:
            numbered = [(c, m, number) for number, (c, m) in enumerate(self.passes)]
        if self.wanted is not None:
            kind = TaskKind(self.kind)
            numbered = [one for one in numbered if self.wanted(Task(kind, *one[:2]))]
        # Once per chunk: a shift may be a function that walks the whole graph.
        shift = {c: self._shift_of(c) for c in {c: None for c, _, _ in numbered}}
        found = [(self.period * number + shift[c], c, m) for c, m, number in numbered]
        if not found:
            raise Mistake(f"the stream {self} holds no pass: let .over list some, and .only leave some")
        wrong = next((m for _, _, m in found if not 0 <= m < stage.m), None)
        if wrong is not None:
            raise Mistake(f"the stream {self} lists microbatch {wrong} of {stage.m}: use 0..{stage.m - 1}")
        return found

    def _shift_of(self, chunk: int) -> int:
        return sum(sign * (n(chunk) if callable(n) else n) for sign, n in self.shifts)


def rounds(*streams: Stream) -> TaskOrder:
    """Returns the order in which round r runs pass r of every stream, shifted as it says, from left to right."""
    for stream in streams:
        if not isinstance(stream, Stream):
            raise Mistake(f"rounds take streams, such as F.ahead(2), not {stream!r}: add phases to rounds with +")

    def write(row: OrderRow) -> None:
        passes = [(when, stream.kind, c, m) for stream in streams for when, c, m in stream.by_round(row.stage)]
        passes.sort(key=itemgetter(0))  # a stable sort keeps the streams of a round, and their passes, in order
        for _, kind, chunk, microbatch in passes:
            row.put(kind, chunk, microbatch)

    return TaskOrder(write)


class OwedWeights(TaskOrder):
    """The oldest W whose I has run without it, if there is one; ``owed.rest`` is all of them."""

    def __init__(self, most: int | None) -> None:
        self.most = most

    @property
    def rest(self) -> TaskOrder:
        """All W whose I has run without them, the oldest first."""
        return OwedWeights(None)

    def write(self, row: OrderRow) -> None:
        for task in list(row.owed)[: self.most]:
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
