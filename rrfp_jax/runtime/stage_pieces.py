"""R of a stage whose replicas add up their gradients by messages.

The task that completes a chunk's gradients also cuts them into pieces (:mod:`rrfp_jax.programs.pieces`), so that these
leave while the stage goes on with other tasks. From then on the chunk has no accumulators: U joins the sums of all
pieces to new ones, which its update clears. A piece that this replica adds up itself stays here until R.

The compute thread alone calls all of this, but for :meth:`PieceExchange.cut` of a chunk of which a step has no
microbatch: no task completes its gradients, which are zeros.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.core.plan import pieces_of_chunks
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.programs.pieces import GradientPiece
from rrfp_jax.programs.shapes import pick
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.programs.updates import PieceUpdates
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.runtime.stage_memory import CUT, JOIN, MemoryMeter
from rrfp_jax.schedules import PipelineGraph

Posts = list[tuple[Message, Any]]


@dataclass
class _Exchange:
    """The pieces of one chunk in a step."""

    left: int
    """How many tasks are left that add to the gradients."""
    pieces: dict[int, tuple[int, ...]]
    """The pieces that each chunk adds up that takes part: this one, its copies, and those that share layers with it."""
    own: dict[int, GradientPiece] | None = None
    """The pieces that this replica adds up itself; None until the gradients are cut."""
    is_counted: bool = False
    """Whether the meter has counted the cut."""
    sums: dict[int, GradientPiece] = field(default_factory=dict)
    """The pieces that it has added up."""


class PieceExchange:
    """The pieces of one stage's chunks.

    Args:
        programs, states: of the stage's chunks, by number among all replicas.
        graph: of all replicas.
        copies: tells how the numbers of chunks belong to replicas.
        mailbox: has the pieces and sums that have arrived.
        meter: counts the pieces that lie here.
    """

    def __init__(
        self,
        programs: Mapping[int, CompiledChunk],
        states: Mapping[int, ChunkState],
        *,
        graph: PipelineGraph,
        copies: Replication,
        mailbox: Mailbox,
        meter: MemoryMeter,
    ) -> None:
        self._states, self._copies, self._programs = states, copies, programs
        self._mailbox, self._meter = mailbox, meter
        self._updates: dict[int, PieceUpdates] = {}
        for chunk, compiled in programs.items():
            if graph.trains(chunk):
                assert isinstance(compiled.updates, PieceUpdates)
                self._updates[chunk] = compiled.updates
        self._lock = threading.Lock()
        self._steps: dict[int, dict[int, _Exchange]] = {}

    def begin(self, step: int, graph: PipelineGraph) -> None:
        """Takes a step with this graph, which lacks the pairs that the step lacks."""
        self._steps[step] = {
            chunk: _Exchange(
                left=len(graph.microbatches(chunk)),
                pieces=pieces_of_chunks(filter(graph.trains, graph.sharing(chunk)), self._copies.num_replicas),
            )
            for chunk in self._updates
        }

    def finish(self, step: int) -> None:
        del self._steps[step]

    def added(self, step: int, chunk: int) -> Posts:
        """Counts a task that adds to the gradients of a chunk; the last one has them cut. Returns what to post."""
        exchange = self._steps[step][chunk]
        exchange.left -= 1
        return [] if exchange.left else self.cut(step, chunk)

    def cut(self, step: int, chunk: int) -> Posts:
        """Cuts the gradients of a chunk into pieces, unless they are; returns those that others add up."""
        with self._lock:
            exchange, held, updates = self._steps[step][chunk], self._states[chunk], self._updates[chunk]
            if exchange.own is not None:
                return []
            pieces = updates.cut(held.accumulators)
            exchange.own = {number: pieces[number] for number in exchange.pieces[chunk]}
            held.accumulators = None  # The device frees them once they are cut.
        return [
            (Message(MessageKind.PIECE, chunk, other, number), _part_for(updates, base, pieces[number]))
            for other, numbers in exchange.pieces.items()
            if other != chunk
            for base in [self._copies.base(other)]
            for number in numbers
        ]

    def count_cut(self, step: int, chunk: int) -> None:
        """Counts the memory of a chunk's cut, if there was one; called behind the count of the task that made it, since
        its own bytes are free by then."""
        exchange = self._steps[step].get(chunk)
        if exchange is not None and exchange.own is not None and not exchange.is_counted:
            exchange.is_counted = True
            self._count(CUT, chunk, self._own_bytes(exchange, chunk) - self._programs[chunk].sizes.accumulators_bytes)

    def reduce(self, step: int, chunk: int) -> tuple[list[Any], Posts]:
        """Adds up the pieces of a chunk that this replica adds up; returns their squared norms, and what to post."""
        posts = self.cut(step, chunk)
        exchange, held, updates = self._steps[step][chunk], self._states[chunk], self._updates[chunk]
        assert exchange.own is not None
        state = (held.optimizer_state,) if held.optimizer_state else ()
        norms = []
        for number in exchange.pieces[chunk]:
            terms = {
                (self._copies.replica(source), self._copies.base(source)): exchange.own.pop(number)
                if source == chunk
                else self._mailbox.take(step, Message(MessageKind.PIECE, source, chunk, number))
                for source in exchange.pieces
            }
            exchange.sums[number], norm = updates.add(terms, *state)
            norms.append(norm)
            posts += [
                (Message(MessageKind.SUM, chunk, copy, number), exchange.sums[number])
                for copy in self._copies_of(chunk, exchange)
            ]
        return norms, posts

    def _copies_of(self, chunk: int, exchange: _Exchange) -> list[int]:
        """Returns the copies of a chunk in other replicas that take part."""
        base = self._copies.base(chunk)
        return [other for other in exchange.pieces if other != chunk and self._copies.base(other) == base]

    def join(self, step: int, chunk: int) -> None:
        """Makes a chunk's accumulators of the sums of all its pieces."""
        exchange, held = self._steps[step][chunk], self._states[chunk]
        pieces = dict(exchange.sums)
        for copy in self._copies_of(chunk, exchange):
            for number in exchange.pieces[copy]:
                pieces[number] = self._mailbox.take(step, Message(MessageKind.SUM, copy, chunk, number))
        held.accumulators = self._updates[chunk].join([pieces[number] for number in sorted(pieces)])
        exchange.sums.clear()
        self._count(JOIN, chunk, self._programs[chunk].sizes.accumulators_bytes - self._own_bytes(exchange, chunk))

    def _own_bytes(self, exchange: _Exchange, chunk: int) -> int:
        return len(exchange.pieces[chunk]) * self._updates[chunk].piece_bytes.piece

    def _count(self, program: str, chunk: int, taken: int) -> None:
        self._meter.count(self._programs[chunk].sizes.temporaries.get(program, 0), taken, self._mailbox.held_bytes)


def _part_for(updates: PieceUpdates, base: int, piece: GradientPiece) -> Any:
    """Returns the part of a chunk's piece that its copies get, or a chunk that shares parameters with it."""
    names = updates.shared_with.get(base)
    return piece if names is None else pick(piece.shared, names)
