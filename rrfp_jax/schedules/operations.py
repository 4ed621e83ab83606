"""Operations of one's own: work that a schedule orders beside F, B, I, W, R and U.

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

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Any

from rrfp_jax.field_rules import check_types, is_whole
from rrfp_jax.schedules.tasks import BUILT_IN, Task

COMPUTE = "compute"
"""The lane on which all built-in tasks run."""
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
        self._check_values(where)
        if self.remakes_stash and not {"B", "I"}.intersection(self.before):
            raise ValueError(f"{where} makes what the backward needs: let it come before B")
        if self.per is not Per.MICROBATCH and (self.holds or self.frees or self.pairs is not None):
            raise ValueError(f"{where} runs once per {self.per}: memory and pairs are for operations per microbatch")

    def _check_values(self, where: str) -> None:
        for name in ("holds", "frees", "ms"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{where}: {name} is {getattr(self, name)}, give 0 or more")
        if not is_whole(self.lead) or self.lead < 0:
            raise ValueError(f"{where}: lead is {self.lead}, give a whole number of tasks, 0 or more")
        if not (self.run is None or callable(self.run)):
            raise ValueError(f"{where}: run is {self.run!r}, give a function of its context, or None")

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


def order_with_operations(letters: Sequence[str], ops: Sequence[Op]) -> tuple[str, ...]:
    """Returns ``letters``, which are in an order in which they can run, with operations per microbatch put among them.

    An operation that comes before a kind stands right before it, any other right behind the last kind that it comes
    after. Raises ValueError where operations wait for each other, or for a kind that the chunk does not have.
    """
    order = list(letters)
    left = list(ops)
    while left:
        placed = next((op for op in left if _place(op, order) is not None), None)
        if placed is None:
            raise ValueError(_why_unplaced(left, order))
        order.insert(_place(placed, order) or 0, placed.letter)
        left.remove(placed)
    return tuple(order)


def _place(op: Op, order: Sequence[str]) -> int | None:
    """Returns the operation's place in the order; None while a kind that it names has no place yet."""
    if not {*op.after, *op.before} <= {*order}:
        return None
    earliest = 1 + max((order.index(kind) for kind in op.after), default=-1)
    latest = min((order.index(kind) for kind in op.before), default=len(order))
    if earliest > latest:
        raise ValueError(
            f"operation {op.letter!r} comes after {', '.join(op.after)} and before "
            f"{', '.join(op.before)}, which run the other way round: exchange them"
        )
    return latest if op.before else earliest


def _why_unplaced(ops: Sequence[Op], order: Sequence[str]) -> str:
    letters = {op.letter for op in ops}
    for op in ops:
        for kind in (*op.after, *op.before):
            if kind not in order and kind not in letters:
                return (
                    f"operation {op.letter!r} names {kind!r}, which its chunk does not have: "
                    f"name some of {', '.join(order)}"
                )
    return (
        f"operations {', '.join(sorted(letters))} wait for each other: let one of them come after built-in kinds alone"
    )
