"""Operations of one's own: work that a schedule orders beside F, B, I, W, R and U; and the operations of one graph.

An operation belongs to a graph (``PipelineGraph.ops``). Wherever it exists it is a task like any other: validated,
drawn, simulated, ranked, run, and written ``2O5``. Six things define it:

* ``per``: whether every microbatch of a chunk has such a task, or every chunk once per step, or the whole step once.
* ``after`` and ``before``: the kinds of tasks that it comes after and before, of the same chunk and microbatch. B means
  the whole backward where that is split: an operation after B comes after W, one before B before I.
* ``lane``: the engine that it keeps busy. ``compute`` is the stage's own, where one task runs at a time; any other
  name is an engine beside it, for example ``d2h``, that also runs one at a time.
* ``holds`` and ``frees``: memory that it takes as it starts and gives back as it ends, in parts of an activation (all
  that a chunk keeps of a microbatch for its backward). At its backward a chunk has all of it: F takes the part that no
  operation takes later.
* ``lead``: the place where it is issued. An operation that comes before a task stands this many tasks ahead of it in
  the stage's order; any other stands right behind the last task that it comes after. Memory is reserved in this order
  (:mod:`rrfp_jax.core.memory`).
* ``run``: the function that it runs; None for simulation alone. ``ms``: its duration in simulation.

Piper's directives (arXiv 2606.11169) and the actions of ``torch.distributed.pipelining`` name such work without a place
where it is issued, or without memory; an offload that is taken back too soon gains nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from math import inf, lcm
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rrfp_jax.field_rules import check_types, is_whole
from rrfp_jax.schedules.tasks import BUILT_IN, NO_MICROBATCH, Task, TaskKind

if TYPE_CHECKING:
    from rrfp_jax.schedules.graph import PipelineGraph

COMPUTE = "compute"
"""The lane on which all built-in tasks run."""
COPY = "copy"
"""The engine that copies in both directions, one activation at a time."""
COPY_OUT, COPY_BACK = "O", "L"
"""Letters of the copies to the host and back."""
UNRECORDED = MappingProxyType({"recorded": False})
"""Marks a field that no record of a run holds, for nothing that is read from a file may be run."""


class Per(StrEnum):
    """The unit that has one task of an operation: a microbatch, a chunk or a step."""

    MICROBATCH = "microbatch"
    """Every microbatch of every chunk has a task."""
    CHUNK = "chunk"
    """Every chunk has a task, once per step."""
    STEP = "step"
    """The step has one task, on the first of the operation's chunks."""


@dataclass(frozen=True)
class Op:
    """One operation; see the module's description. Raises ValueError, with the remedy, on values without a meaning."""

    letter: str
    """Capital letters; not one of the built-in kinds."""
    _: KW_ONLY
    per: Per = Per.MICROBATCH
    lane: str = COMPUTE
    after: tuple[str, ...] = ()
    """Letters of the kinds that it comes after. An :class:`Op` stands for its letter, and one kind needs no tuple."""
    before: tuple[str, ...] = ()
    """Letters of the kinds that it comes before, given as in ``after``."""
    holds: float = 0.0
    frees: float = 0.0
    lead: int = 1
    ms: float = 0.0
    run: Callable[..., Any] | None = field(default=None, metadata=UNRECORDED)
    keeps_inputs: bool = False
    """Whether the chunk's inputs of the microbatch are kept until this has run, so that its forward can run again."""
    remakes_stash: bool = False
    """Whether it recomputes the residuals of the backward from the inputs; the forward then keeps the inputs alone."""
    keeps_on_host: bool = False
    """Whether the memory that it frees lies on the host, from its start to the end of the operation that takes it
    back."""
    chunks: frozenset[int] | None = None
    """Chunks on which it exists; None: on every chunk."""
    pairs: frozenset[tuple[int, int]] | None = None
    """The (chunk, microbatch) pairs that have such a task; None: all pairs of its chunks."""
    waits: frozenset[tuple[Task, Task]] = frozenset()
    """Anchors: some of its tasks, each with a further task of the same stage that it waits for. For a table's own
    operations, whose rows stand in an order that keeps to them."""

    def __post_init__(self) -> None:
        where = f"operation {self.letter!r}"
        for name in ("after", "before"):
            given = getattr(self, name)
            kinds: Any = given if isinstance(given, tuple | list | set | frozenset) else (given,)
            letters = (k.letter if isinstance(k, Op) else str(k) if isinstance(k, str) else k for k in kinds)
            object.__setattr__(self, name, tuple(letters))
        if str(self.per) not in tuple(Per):
            raise ValueError(f"{where}: per is {self.per!r}, choose one of {', '.join(Per)}")
        object.__setattr__(self, "per", Per(self.per))
        check_types(self, *(name for name in self.__dataclass_fields__ if name not in ("lead", "run", "_")))
        if not (self.letter.isascii() and self.letter.isalpha() and self.letter.isupper()):
            raise ValueError(f"{where}: write its letter as capital letters, for example 'O'")
        if self.letter in BUILT_IN:
            raise ValueError(f"{where} has the letter of a built-in task: take one that is not in {''.join(BUILT_IN)}")
        if not self.lane:
            raise ValueError(f"{where} has no lane: give {COMPUTE}, or the name of an engine beside it")
        if not (self.after or self.before):
            raise ValueError(f"{where} comes after nothing and before nothing: give at least one of them")
        if self.letter in self.after or self.letter in self.before:
            raise ValueError(f"{where} comes after or before itself: name another kind")
        object.__setattr__(self, "keeps_inputs", self.keeps_inputs or self.remakes_stash)
        wrong = next((name for name in ("holds", "frees", "ms") if not 0 <= getattr(self, name) < inf), None)
        if wrong is not None:
            raise ValueError(f"{where}: {wrong} is {getattr(self, wrong)}, give 0 or more")
        if not is_whole(self.lead) or self.lead < 0:
            raise ValueError(f"{where}: lead is {self.lead}, give a whole number of tasks, 0 or more")
        if not (self.run is None or callable(self.run)):
            raise ValueError(f"{where}: run is {self.run!r}, give a function of its context, or None")
        if self.remakes_stash and not {"B", "I"}.intersection(self.before):
            raise ValueError(f"{where} makes what the backward needs: let it come before B")
        if self.per is not Per.MICROBATCH and (self.holds or self.frees or self.pairs is not None):
            raise ValueError(f"{where} runs once per {self.per}: memory and pairs are for operations per microbatch")

    @property
    def is_beside(self) -> bool:
        """Whether it runs on an engine beside compute."""
        return self.lane != COMPUTE

    @property
    def moves_memory(self) -> bool:
        return bool(self.holds or self.frees)

    def is_on(self, chunk: int, num_chunks: int) -> bool:
        """Whether the chunk has such tasks at all."""
        if self.per is Per.STEP:
            return chunk == min(self.chunks or (0,))
        wanted = self.chunks is None or chunk in self.chunks
        return wanted and 0 <= chunk < num_chunks and (self.pairs is None or any(c == chunk for c, _ in self.pairs))

    def exists(self, chunk: int, microbatch: int) -> bool:
        """Whether this pair, which the graph has, has such a task."""
        if self.chunks is not None and chunk not in self.chunks:
            return False
        return self.pairs is None or (chunk, microbatch) in self.pairs


def copy_ops(ms: float, *, lead: int = 1, lanes: tuple[str, str] = (COPY, COPY)) -> tuple[Op, Op]:
    """Returns the operations that move all activations to the host and back, for simulation alone.

    :func:`rrfp_jax.runtime.operations.host_copies` returns those that run."""
    out = Op(COPY_OUT, after=(TaskKind.F,), lane=lanes[0], frees=1.0, ms=ms, keeps_on_host=True)
    return out, Op(COPY_BACK, after=(COPY_OUT,), before=(TaskKind.B,), lane=lanes[1], holds=1.0, lead=lead, ms=ms)


def operations_in(rows: Iterable[Iterable[Task]], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Returns the operations that rows name, on the pairs that they have there. Each of their tasks waits for the one
    before it on the engine of its stage: nothing else would keep it to its turn."""
    own, lanes = [list(row) for row in rows], {op.letter: op.lane for op in ops}
    waits = [
        wait
        for row in own
        for lane in dict.fromkeys(lanes.values())
        for wait in pairwise(task for task in row if lanes.get(task.kind) == lane)
    ]
    found = (
        replace(
            op,
            chunks=None,
            pairs=frozenset((task.chunk, task.microbatch) for row in own for task in row if task.kind == op.letter),
            waits=frozenset((later, earlier) for earlier, later in waits if later.kind == op.letter),
        )
        for op in ops
    )
    return tuple(op for op in found if op.pairs)


def _order_with_operations(letters: Sequence[str], ops: Sequence[Op]) -> tuple[str, ...]:
    """Returns ``letters``, which are in an order in which they can run, with operations per microbatch put among them.

    An operation that comes before a kind stands right before it, any other right behind the last kind that it comes
    after. Raises ValueError where operations wait for each other, or for a kind that the chunk does not have.
    """
    order, left = list(letters), list(ops)
    while left:
        placed = next((op for op in left if {*op.after, *op.before} <= {*order}), None)
        if placed is None:
            known = {op.letter for op in left}
            for op in left:
                stranger = next((kind for kind in (*op.after, *op.before) if kind not in {*order, *known}), None)
                if stranger is not None:
                    raise ValueError(
                        f"operation {op.letter!r} names {stranger!r}, which its chunk does not have: name some of "
                        f"{', '.join(order)}"
                    )
            raise ValueError(
                f"operations {', '.join(sorted(known))} wait for each other: let one of them come after built-in kinds "
                "alone"
            )
        earliest = 1 + max((order.index(kind) for kind in placed.after), default=-1)
        latest = min((order.index(kind) for kind in placed.before), default=len(order))
        if earliest > latest:
            raise ValueError(
                f"operation {placed.letter!r} comes after {', '.join(placed.after)} and before "
                f"{', '.join(placed.before)}, which run the other way round: exchange them"
            )
        order.insert(latest if placed.before else earliest, placed.letter)
        left.remove(placed)
    return tuple(order)


FINEST = 1000
"""Memory is counted in parts of an activation not finer than this."""
_ONCE = ("R", "U")
_MICROBATCHES = "all microbatches"


class GraphOperations:
    """The operations of a graph, resolved for its chunks: the tasks that they wait for, and the memory that they
    move."""

    def __init__(self, graph: "PipelineGraph") -> None:
        self.graph = graph
        self.by_letter = {op.letter: op for op in graph.ops}
        self._parts = {
            op.letter: [Fraction(part).limit_denominator(FINEST) for part in (op.holds, op.frees)] for op in graph.ops
        }
        """The memory that each operation takes and frees, in parts of an activation."""
        self.unit = lcm(*(part.denominator for parts in self._parts.values() for part in parts))
        """The number of units of memory in one activation."""
        self.moves_memory = any(op.moves_memory for op in graph.ops)
        """Whether some operation takes or frees memory."""
        self._waits: dict[Task, list[Task]] = {}
        for task, anchor in (wait for op in graph.ops for wait in sorted(op.waits)):
            self._waits.setdefault(task, []).append(anchor)
        self._on_chunk: list[list[Op]] = []
        """The operations of each chunk, with ``after`` and ``before`` in the kinds that this chunk has."""
        for chunk in range(graph.num_chunks):
            first, last = graph.input_gradient_kind(chunk), graph.accumulating_kind(chunk)

            def fitted(kinds: tuple[str, ...], backward: TaskKind, is_one: bool = first is last) -> tuple[str, ...]:
                return tuple(backward if kind == "B" or (is_one and kind in "IW") else kind for kind in kinds)

            self._on_chunk.append(
                [
                    replace(op, after=fitted(op.after, last), before=fitted(op.before, first))
                    for op in graph.ops
                    if op.is_on(chunk, graph.num_chunks)
                ]
            )
        self._orders: dict[int, tuple[TaskKind, ...]] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def check(self) -> None:
        """Raises ValueError where an operation does not fit the graph."""
        graph, num_chunks = self.graph, self.graph.num_chunks
        if len(self.by_letter) < len(graph.ops):
            letters = [op.letter for op in graph.ops]
            twice = next(letter for letter in letters if letters.count(letter) > 1)
            raise ValueError(f"two operations have the letter {twice!r}: give each its own")
        for op in graph.ops:
            strays = [c for c in op.chunks or () if not 0 <= c < num_chunks]
            if strays:
                raise ValueError(f"operation {op.letter!r} is on chunk {strays[0]}: there are {num_chunks} chunks")
            chunks = [c for c in range(num_chunks) if op.is_on(c, num_chunks)]
            if not chunks:
                raise ValueError(f"operation {op.letter!r} is on no chunk: give it at least one")
            is_around_backward = op.per is Per.MICROBATCH and not {"B", "I", "W"}.isdisjoint((*op.after, *op.before))
            without = [c for c in chunks if is_around_backward and not graph.has_backward(c)]
            if without:
                raise ValueError(
                    f"operation {op.letter!r} goes with the backward of chunk {without[0]}, which has none, as nothing "
                    f"there or before it trains, or no gradient reaches it: leave {without} out of its chunks, or "
                    "build the table for the graph of this model"
                )
            for chunk, m in op.pairs or ():
                if not (0 <= chunk < num_chunks and 0 <= m < graph.num_microbatches):
                    raise ValueError(f"operation {op.letter!r}: the graph has no chunk {chunk} with microbatch {m}")
        for chunk in range(num_chunks):
            self.kinds(chunk)
            self._check_memory(chunk)
            self._check_once(chunk)

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
            forward_takes = self.effect(Task(TaskKind.F, chunk, m))[0]
            if forward_takes < 0:
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
            if forward_takes > self.unit:
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

    def _emptied(self, chunk: int, microbatch: int, existing: Iterable[Op]) -> str | None:
        """Returns a kind of task after which memory is below zero in some order in which the pair's tasks can run."""
        if not any(op.moves_memory for op in existing):
            return None
        kinds = [kind for kind in self.kinds(chunk) if self.has(kind, chunk, microbatch)]
        built_in = self.graph.built_in_kinds(chunk)
        before: dict[TaskKind, set[TaskKind]] = {}
        change: dict[TaskKind, int] = {}
        for kind in kinds:
            task = Task(kind, chunk, microbatch)
            if kind in self.by_letter:
                before[kind] = {needed.kind for needed in self.dependencies(task) if needed[1:] == task[1:]}
            else:
                ops = (needed.kind for needed in self.before(task) if needed.microbatch >= 0)
                before[kind] = {*built_in[: built_in.index(kind)], *ops}
            takes, gives = self.effect(task)
            change[kind] = takes - gives
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
        with_microbatch = {*self.kinds(chunk), *backward}
        known = {*own, *with_microbatch, *(_ONCE if graph.updates(chunk) else ())}
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

    def _existing(self, chunk: int, microbatch: int) -> list[Op]:
        """Returns the operations per microbatch that this pair has."""
        return [op for op in self._on_chunk[chunk] if op.per is Per.MICROBATCH and op.exists(chunk, microbatch)]

    def kinds(self, chunk: int) -> tuple[TaskKind, ...]:
        """Returns all kinds of tasks that microbatches have on a chunk, in an order in which they can run."""
        found = self._orders.get(chunk)
        if found is None:
            per_microbatch = [op for op in self._on_chunk[chunk] if op.per is Per.MICROBATCH]
            try:
                order = _order_with_operations(self.graph.built_in_kinds(chunk), per_microbatch)
            except ValueError as error:
                raise ValueError(f"chunk {chunk}: {error}") from None
            found = self._orders[chunk] = tuple(map(TaskKind, order))
        return found

    def has(self, kind: TaskKind, chunk: int, microbatch: int) -> bool:
        """Whether a pair of the graph has a task of one of its chunk's kinds."""
        op = self.by_letter.get(kind)
        return op is None or op.exists(chunk, microbatch)

    def remakes_stash(self, chunk: int) -> bool:
        """Whether an operation recomputes the residuals of a chunk, so that its F keeps only its inputs."""
        return any(op.remakes_stash for op in self._on_chunk[chunk])

    def once(self, chunks: Iterable[int]) -> Iterator[Task]:
        """Yields the tasks of operations that run once per chunk or step, on these chunks."""
        for chunk in chunks:
            for op in self._on_chunk[chunk]:
                if op.per is not Per.MICROBATCH:
                    yield Task(TaskKind(op.letter), chunk)

    def before(self, task: Task) -> Iterator[Task]:
        """Yields the tasks of operations on the same chunk that must finish before this task, of any kind, starts."""
        kind, chunk, m = task
        ops = [op for op in self._on_chunk[chunk] if kind in op.before and op.letter != kind]
        yield from (
            Task(TaskKind(op.letter), chunk, m)
            for op in ops
            if op.per is Per.MICROBATCH and m >= 0 and op.exists(chunk, m)
        )
        yield from (Task(TaskKind(op.letter), chunk) for op in ops if op.per is not Per.MICROBATCH)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """Returns the tasks that must finish before an operation's task starts."""
        kind, chunk, m = task
        own = next(op for op in self._on_chunk[chunk] if op.letter == kind)
        anchors = [
            anchor
            for anchor in self._waits.get(task, ())
            if anchor.microbatch < 0 or (self.graph.exists(anchor.chunk, anchor.microbatch) and self.has(*anchor))
        ]
        if own.per is Per.MICROBATCH:
            after = (Task(TaskKind(k), chunk, m) for k in own.after if self.has(TaskKind(k), chunk, m))
            return (*after, *self.before(task), *anchors)
        found = anchors
        for letter in map(TaskKind, own.after):
            op = self.by_letter.get(letter)
            if letter in _ONCE or (op is not None and op.per is not Per.MICROBATCH):
                found.append(Task(letter, chunk, NO_MICROBATCH))
            elif letter in self.kinds(chunk):
                present = (i for i in self.graph.microbatches(chunk) if self.has(letter, chunk, i))
                found += [Task(letter, chunk, i) for i in present]
            else:
                raise ValueError(f"an operation names {letter!r}, which chunk {chunk} does not have")
        return (*found, *self.before(task))

    def effect(self, task: Task) -> tuple[int, int]:
        """Returns the memory that a task takes as it starts and frees as it ends, in parts of :attr:`unit`.

        The chunk must have a backward.
        """
        kind, chunk, m = task
        if kind in self._parts:
            holds, frees = self._parts[kind]
            return int(holds * self.unit), int(frees * self.unit)
        if kind is not TaskKind.F:
            return 0, self.unit if kind is self.graph.accumulating_kind(chunk) else 0
        takes = self._taken.get((chunk, m))
        if takes is None:  # all that no operation takes later
            parts = [self._parts[op.letter] for op in self._existing(chunk, m)]
            moved = sum((holds - frees for holds, frees in parts), Fraction(0))
            takes = self._taken[chunk, m] = int((1 - moved) * self.unit)
        return takes, 0
