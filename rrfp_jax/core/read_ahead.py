"""How far a chunk without a backward may run ahead of those that read it, and why this bound can never deadlock.

A chunk that runs F only, such as a frozen encoder, keeps nothing for itself, so neither window nor footprint restrains
it where it has a stage of its own; but what it produced lies in its readers' inboxes until they take it.

Rule
----
Such a chunk *holds* a microbatch from the start of its F to the ends of the F of all its successors that run this
microbatch. At most ``limit`` are held, and an F is admitted by the rule of :mod:`rrfp_jax.core.reserve`. A
successor on another stage says so as its F ends (:attr:`rrfp_jax.core.events.MessageKind.TAKEN`); on the same
stage it is known. The chunk's step ends once all has been taken, so that the bound holds across steps too. The bound
comes beside the stage's window, which counts the same F as any other.

Why it cannot deadlock
----------------------
Take the order of all tasks in the argument of the restraint that holds besides, of which the first unfinished task T
can run as far as that one goes, and let T be an F of such a chunk. What stands before T has finished; so what has been
taken by then is known here, or word of it is on its way and will come.

* *Window*: by microbatch, in topological order within. All smaller microbatches have been taken when T's comes: the
  chunk's turns are start and letting go, one microbatch after the other, which a limit of 1 suffices for.
* *Footprint*: the table's order. What runs F only takes no memory, so within it each such F may come as late as
  possible, right before the first task that needs it, and everything else stays where it is; the stages' memory is as
  before. The chunk's turns follow from this order (:func:`turns_of_table`). Where several successors read a chunk, a
  microbatch may wait for one of them while others start: the limit must be at least what the turns need.

Either way T finds everything before its turn done and is admitted. Word of what was taken only comes later than what it
tells of, and nothing waits for it but such chunks and the end of their step.

Strict consumption has no such bound: how far ahead a chunk runs is what its table says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.core.events import Message
from rrfp_jax.core.plan import StagePlan
from rrfp_jax.core.reserve import Reserve, peak, turns
from rrfp_jax.schedules import PipelineGraph, Task, TaskKind


@dataclass(frozen=True, kw_only=True)
class AheadBound:
    """How many microbatches one chunk without a backward may have produced that not all its readers have taken."""

    chunk: int
    limit: int
    turns: tuple[int, ...] = ()
    """The chunk's microbatches in the order in which they start and are let go, each named twice; empty: one after the
    other, by number."""

    def needed(self, graph: PipelineGraph) -> int:
        """The least limit with which the turns can come one after the other."""
        return peak(turns(graph.range_of(self.chunk), self.turns))

    def check(self, graph: PipelineGraph) -> None:
        """Raise ValueError where this is no bound of this graph."""
        if not graph.reads_ahead(self.chunk):
            raise ValueError(f"chunk {self.chunk} has a backward, or nobody reads it: it needs no bound of read-ahead")
        needed = self.needed(graph)
        if self.limit < needed:
            raise ValueError(
                f"read_ahead is {self.limit} for chunk {self.chunk}, of which {needed} "
                f"{'microbatch is' if needed == 1 else 'microbatches are'} waited for at once: give at least {needed}"
            )


class ReadAhead:
    """The bounded chunks of one stage, numbered from 0, during one step."""

    __slots__ = ("_lets_go", "number", "reserves")

    def __init__(self, bounds: Sequence[AheadBound], plan: StagePlan, graph: PipelineGraph) -> None:
        self.number = {bound.chunk: number for number, bound in enumerate(bounds)}
        self.reserves = tuple(
            Reserve(bound.limit, plan.holds[bound.chunk], graph.range_of(bound.chunk).start, bound.turns)
            for bound in bounds
        )
        self._lets_go = plan.lets_go

    def copy(self) -> "ReadAhead":
        twin = object.__new__(type(self))
        twin.number, twin._lets_go = self.number, self._lets_go
        twin.reserves = tuple(reserve.copy() for reserve in self.reserves)
        return twin

    def admits(self, task: Task) -> bool:
        """Whether a task may start as far as read-ahead goes; bounded chunks have nothing but F."""
        number = self.number.get(task.chunk)
        return number is None or self.reserves[number].admits(task.microbatch)

    def start(self, task: Task) -> None:
        """An F starts."""
        number = self.number.get(task.chunk)
        if number is not None:
            self.reserves[number].start_forward(task.microbatch)

    def finish(self, node: int, microbatch: int) -> None:
        """A task of this stage has ended, or counts as if it had."""
        for chunk in self._lets_go.get(node, ()):
            self._let_go(chunk, microbatch)

    def hear(self, message: Message) -> None:
        """A reader elsewhere says that it has taken something."""
        self._let_go(message.target, message.microbatch)

    def _let_go(self, chunk: int, microbatch: int) -> None:
        number = self.number.get(chunk)
        if number is not None:
            self.reserves[number].finish(microbatch)


def turns_of_table(graph: PipelineGraph, tasks: Iterable[Task]) -> dict[int, tuple[int, ...]]:
    """The turns of each chunk that reads ahead, if what runs F only comes as late as possible in an order of all tasks.

    Empty where they come one after the other, by number.
    """
    found: dict[int, list[int]] = {c: [] for c in range(graph.num_chunks) if graph.reads_ahead(c)}
    started: set[tuple[int, int]] = set()
    readers_left = {
        (c, m): sum(graph.exists(s, m) for s in graph.successors(c)) for c in found for m in graph.microbatches(c)
    }

    def run(chunk: int, m: int) -> None:
        before = [p for p in graph.predecessors(chunk) if p in found and graph.exists(p, m)]
        for p in before:
            if (p, m) not in started:
                run(p, m)
        if chunk in found:
            started.add((chunk, m))
            found[chunk].append(m)
        for p in before:
            readers_left[p, m] -= 1
            if not readers_left[p, m]:
                found[p].append(m)

    for kind, chunk, microbatch in tasks:
        if kind is TaskKind.F and chunk not in found:
            run(chunk, microbatch)
    return {chunk: _named(order, graph.range_of(chunk)) for chunk, order in found.items()}


def _named(order: list[int], microbatches: range) -> tuple[int, ...]:
    """An order with what its graph lacks behind, or nothing if it goes by number."""
    absent = sorted(set(microbatches).difference(order))
    by_number = [m for m in microbatches if m not in absent for _ in range(2)]
    return () if order == by_number else (*order, *(m for m in absent for _ in range(2)))
