"""R of a stage's replicas: by messages, or by one launch for all of them where a process hosts several.

**By messages** (:class:`PieceExchange`). The task that completes a chunk's gradients also cuts them into pieces
(:mod:`rrfp_jax.programs.pieces`), so that these leave while the stage goes on with other tasks. From then on the chunk
has no accumulators: U joins the sums of all pieces to new ones, which its update clears. A piece that this replica adds
up itself stays here until R. In a deterministic run a replica that runs several blocks of microbatches, as after a
loss, has accumulators for each (:func:`rrfp_jax.core.plan.blocks_of`), so that sums keep their bits. The compute thread
alone calls all of this, but for :meth:`PieceExchange.cut` of a chunk of which a step has no microbatch: no task
completes its gradients, which are zeros.

Where replicas share the optimizer state too, U also sends shares of the parameters, and those of others take their
places as the step ends. After a loss the recovery sends and takes shares, while no step is under way.

**By one launch** (:class:`StageReplicas`), which with a sharded optimizer state U is too. A program over several
replicas' devices is launched once per process, although each replica has a compute thread of its own. So the threads
meet at a barrier: the last one to arrive launches for all, and every one leaves with its own results. All of them
arrive, and in the same order, because a step ends in lockstep (see :class:`rrfp_jax.core.StepRules`). If one cannot,
since a task of its failed, the barrier is broken, and all leave with that error.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import jax
import numpy as np

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.core.plan import blocks_of, pieces_of_chunks, shares_of
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.agreement import Verdict
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.programs.pieces import GradientPiece
from rrfp_jax.programs.shapes import num_bytes, pick
from rrfp_jax.programs.shardings import HOST_MEMORY
from rrfp_jax.programs.state import ChunkState, share_of
from rrfp_jax.programs.updates import PieceUpdates, SparseUpdates, StageUpdates
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.runtime.stage_memory import CUT, JOIN, MemoryMeter
from rrfp_jax.schedules import PipelineGraph

Posts = list[tuple[Message, Any]]


# -- by messages ------------------------------------------------------------------------------------------------------


@dataclass
class _Exchange:
    """The pieces of one chunk in a step."""

    left: int
    """How many tasks are left that add to the gradients, of all passes."""
    pieces: dict[int, tuple[int, ...]]
    """The pieces that each chunk adds up that takes part: this one, its copies, and those that share layers with it."""
    blocks: dict[int, tuple[int, ...]]
    """The blocks of which each of these chunks makes a sum."""
    block: int
    """The block whose accumulators are those of the chunk's state."""
    accumulators: dict[int, Any] = field(default_factory=dict)
    """The accumulators of other blocks."""
    own: dict[tuple[int, int], GradientPiece] | None = None
    """By block and number, the pieces that this replica adds up itself; None until the gradients are cut."""
    is_counted: bool = False
    """Whether the meter has counted the cut."""
    sums: dict[int, GradientPiece] = field(default_factory=dict)
    """The pieces that it has added up."""
    step: int = 0
    """The number of the step among those that train."""
    before: Any = None
    """The elements that a step averages, as they were when it began."""


class PieceExchange:
    """The pieces of one stage's chunks.

    Args:
        programs, states: of the stage's chunks, by number among all replicas.
        graph: of all replicas.
        copies: tells how the numbers of chunks belong to replicas.
        mailbox: has the pieces and sums that have arrived.
        meter: counts the pieces that lie here.
        ordered: whether each block of microbatches is added up by itself.
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
        ordered: bool,
    ) -> None:
        self._ordered = ordered
        self._states, self._copies, self._programs = states, copies, programs
        self._mailbox, self._meter = mailbox, meter
        self._updates: dict[int, PieceUpdates] = {}
        for chunk, compiled in programs.items():
            if graph.updates(chunk):
                assert isinstance(compiled.updates, PieceUpdates)
                self._updates[chunk] = compiled.updates
        self._lock = threading.Lock()
        self._steps: dict[int, dict[int, _Exchange]] = {}
        for chunk in self._updates:  # After a loss more of the optimizer state may lie here than the programs say.
            more = num_bytes(_on_devices(states[chunk].optimizer_state)) - programs[chunk].sizes.optimizer_bytes
            meter.count(0, max(0, more), 0)

    def begin(self, step: int, graph: PipelineGraph, trained: int) -> None:
        """Takes a step with this graph, which lacks the pairs that the step lacks, and its number among those that
        train."""
        self._steps[step] = {chunk: replace(self._exchange(chunk, graph), step=trained) for chunk in self._updates}

    def _exchange(self, chunk: int, graph: PipelineGraph) -> _Exchange:
        pieces = pieces_of_chunks(filter(graph.updates, graph.sharing(chunk)), self._copies.num_replicas)
        blocks = {each: blocks_of(graph, each, ordered=self._ordered) for each in pieces}
        own = blocks.get(chunk) or (self._copies.replica(chunk),)  # A step that evaluates has no gradients.
        return _Exchange(left=len(graph.accumulations(chunk)), pieces=pieces, blocks=blocks, block=own[0])

    def finish(self, step: int) -> None:
        del self._steps[step]

    def turn_to(self, step: int, chunk: int, microbatch: int) -> None:
        """Makes the accumulators of a microbatch's block those of the chunk's state."""
        exchange = self._steps[step][chunk]
        if len(exchange.blocks[chunk]) < 2 or (block := self._copies.owner(microbatch)) == exchange.block:
            return
        held, found = self._states[chunk], exchange.accumulators.pop(block, None)
        if found is None:
            found = self._programs[chunk].zeros()
            self._count("", chunk, self._programs[chunk].sizes.accumulators_bytes)
        exchange.accumulators[exchange.block], exchange.block, held.accumulators = held.accumulators, block, found

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
            exchange.own, sums = {}, exchange.accumulators
            sums[exchange.block], held.accumulators = held.accumulators, None  # The device frees what is cut.
            posts: Posts = []
            for place, block in enumerate(exchange.blocks[chunk]):
                pieces = updates.cut(sums.pop(block) if block in sums else self._programs[chunk].zeros())
                if place:  # Memory is kept for one cut at a time.
                    jax.block_until_ready(pieces)
                exchange.own |= {(block, number): pieces[number] for number in exchange.pieces[chunk]}
                for other, numbers in exchange.pieces.items():
                    base, first = self._copies.base(other), place * self._copies.num_replicas
                    posts += [
                        (
                            Message(MessageKind.PIECE, chunk, other, first + number),
                            _part_for(updates, base, pieces[number]),
                        )
                        for number in numbers
                        if other != chunk
                    ]
            sums.clear()
        return posts

    def count_cut(self, step: int, chunk: int) -> None:
        """Counts the memory of a chunk's cut, if there was one; called behind the count of the task that made it, since
        its own bytes are free by then."""
        exchange = self._steps[step].get(chunk)
        if exchange is not None and exchange.own is not None and not exchange.is_counted:
            exchange.is_counted = True
            num_sums = len(exchange.blocks[chunk])
            freed = max(num_sums, 1) * self._programs[chunk].sizes.accumulators_bytes
            self._count(CUT, chunk, num_sums * self._own_bytes(exchange, chunk) - freed)

    def reduce(self, step: int, chunk: int) -> tuple[list[Any], Posts]:
        """Adds up the pieces of a chunk that this replica adds up; returns their squared norms, and what to post."""
        posts = self.cut(step, chunk)
        exchange, held, updates = self._steps[step][chunk], self._states[chunk], self._updates[chunk]
        assert exchange.own is not None
        state = (held.optimizer_state,) if held.optimizer_state else ()
        norms = []
        for number in exchange.pieces[chunk]:
            terms = {
                (block, self._copies.base(source)): exchange.own.pop((block, number))
                if source == chunk
                else self._mailbox.take(step, Message(MessageKind.PIECE, source, chunk, first + number))
                for source, blocks in exchange.blocks.items()
                for first, block in zip(count(step=self._copies.num_replicas), blocks, strict=False)
            }
            exchange.sums[number], norm = updates.add(terms, *state)
            norms.append(norm)
            posts += [
                (Message(MessageKind.SUM, chunk, copy, number), exchange.sums[number])
                for copy in self._copies_of(chunk, exchange)
            ]
        self._count("", chunk, (1 - len(exchange.blocks[chunk])) * self._own_bytes(exchange, chunk))
        return norms, posts

    def _copies_of(self, chunk: int, exchange: _Exchange) -> list[int]:
        """Returns the copies of a chunk in other replicas that take part."""
        base = self._copies.base(chunk)
        return [other for other in exchange.pieces if other != chunk and self._copies.base(other) == base]

    def join(self, step: int, chunk: int) -> None:
        """Makes a chunk's accumulators of the sums of all its pieces."""
        exchange, held = self._steps[step][chunk], self._states[chunk]
        held.accumulators = self._updates[chunk].join(self._take_sums(step, chunk))
        self._count(JOIN, chunk, self._programs[chunk].sizes.accumulators_bytes - self._own_bytes(exchange, chunk))

    def _take_sums(self, step: int, chunk: int) -> list[GradientPiece]:
        """Returns the sums of all pieces, in order."""
        exchange = self._steps[step][chunk]
        pieces, exchange.sums = exchange.sums, {}
        for copy in self._copies_of(chunk, exchange):
            for number in exchange.pieces[copy]:
                pieces[number] = self._mailbox.take(step, Message(MessageKind.SUM, copy, chunk, number))
        return [pieces[number] for number in sorted(pieces)]

    def share_posts(self, graph: PipelineGraph, chunk: int) -> Posts:
        """Returns the shares of a chunk's parameters that others get from here, behind its update."""
        posts: Posts = []
        for share, (first, lacking) in shares_of(graph, chunk).items():
            if first == chunk and lacking:
                value = self._updates[chunk].copy_share(self._states[chunk].params, share)
                posts += [(Message(MessageKind.SHARE, chunk, other, share), value) for other in lacking]
        return posts

    def awaits_shares(self, graph: PipelineGraph, chunk: int) -> bool:
        """Returns whether a chunk's update lacks parameters that others update."""
        return any(chunk in lacking for _, lacking in shares_of(graph, chunk).values())

    def take_shares(self, step: int, graph: PipelineGraph) -> None:
        """Puts the shares that have come into the places of a step's old parameters."""
        for chunk, held in self._states.items():
            for share, (first, lacking) in shares_of(graph, chunk).items():
                if chunk in lacking:
                    values = self._mailbox.take(step, Message(MessageKind.SHARE, first, chunk, share))
                    held.params = self._updates[chunk].with_share(held.params, share, values)

    @property
    def held_shares(self) -> frozenset[int]:
        """The shares of which every chunk has the optimizer state here."""
        lacking = {
            part.share
            for chunk, updates in self._updates.items()
            for part, state in zip(updates.parts, self._states[chunk].optimizer_state, strict=True)
            if state is None
        }
        return frozenset(range(self._copies.num_replicas)) - lacking

    def share_frames(self, share: int, *, has_state: bool) -> list[Any]:
        """Returns the bytes of a share's parameters, and of its optimizer state where they are to ``has_state``."""
        arrays = jax.tree.leaves([self._share(chunk, share, has_state=has_state) for chunk in self._updates])
        # Viewed as bytes, since the buffer protocol has no formats for ml_dtypes' types.
        return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]

    def _share(self, chunk: int, share: int, *, has_state: bool) -> tuple[Any, Any]:
        """Returns a share's parameters and its optimizer state, of which entries that are not here are specs."""
        held, updates = self._states[chunk], self._updates[chunk]
        entries = zip(updates.parts, held.optimizer_state, updates.all_state_specs, strict=True)
        states = [spec if state is None else state for part, state, spec in entries if part.share == share]
        return share_of(updates.parts, share, held.params), states if has_state else []

    def put_share(self, share: int, frames: Iterable[Any], *, has_state: bool) -> None:
        """Takes what :meth:`share_frames` returned in another replica."""
        rest = iter(frames)

        def received(like: Any) -> jax.Array:
            return jax.device_put(np.frombuffer(next(rest), like.dtype).reshape(like.shape), like.sharding)

        for chunk, updates in self._updates.items():
            held = self._states[chunk]
            params, states = jax.tree.map(received, self._share(chunk, share, has_state=has_state))
            held.params, held.derived = updates.with_share(held.params, share, params), None
            if has_state:
                self._meter.count(0, num_bytes(_on_devices(states)), 0)
                entries, come = zip(updates.parts, held.optimizer_state, strict=True), iter(states)
                held.optimizer_state = tuple(next(come) if part.share == share else state for part, state in entries)

    def drop_share(self, share: int) -> None:
        """Frees the optimizer state of a share."""
        for chunk, updates in self._updates.items():
            held = self._states[chunk]
            entries = tuple(zip(updates.parts, held.optimizer_state, strict=True))
            freed = _on_devices([state for part, state in entries if part.share == share])
            self._meter.count(0, -num_bytes(freed), 0)
            held.optimizer_state = tuple(None if part.share == share else state for part, state in entries)

    def _own_bytes(self, exchange: _Exchange, chunk: int) -> int:
        return len(exchange.pieces[chunk]) * self._updates[chunk].piece_bytes.piece

    def _count(self, program: str, chunk: int, taken: int) -> None:
        self._meter.count(self._programs[chunk].sizes.temporaries.get(program, 0), taken, self._mailbox.held_bytes)


class SparseExchange(PieceExchange):
    """The pieces of one stage's chunks whose replicas average a share of their parameters, and update themselves from
    their own gradients (:class:`rrfp_jax.core.replicas.SparseAveraging`).

    Pieces have elements of the parameters as the step began, since U, which changes them, waits for R. They are cut
    where others cut gradients, so that messages and their order are the same. Accumulators stay as they are.
    """

    def cut(self, step: int, chunk: int) -> Posts:
        with self._lock:
            exchange, held, updates = self._steps[step][chunk], self._states[chunk], self._sparse_updates(chunk)
            if exchange.own is not None:
                return []
            pieces, exchange.before = updates.choose(held.params, exchange.step)
            exchange.own = {(exchange.block, number): pieces[number] for number in exchange.pieces[chunk]}
            return [
                (Message(MessageKind.PIECE, chunk, copy, number), pieces[number])
                for copy in self._copies_of(chunk, exchange)
                for number in exchange.pieces[copy]
            ]

    def count_cut(self, step: int, chunk: int) -> None:
        exchange = self._steps[step].get(chunk)
        if exchange is not None and exchange.own is not None and not exchange.is_counted:
            exchange.is_counted = True
            chosen = self._sparse_updates(chunk).chosen_bytes
            self._count(CUT, chunk, self._own_bytes(exchange, chunk) + chosen)

    def reduce(self, step: int, chunk: int) -> tuple[list[Any], Posts]:
        _, posts = super().reduce(step, chunk)
        held = self._states[chunk]
        _, norm = self._updates[chunk].reduce(held.accumulators, (), held.optimizer_state)
        return [norm], posts

    def join(self, step: int, chunk: int) -> None:
        """Adds the averages that are due to a chunk's parameters."""
        exchange, held, updates = self._steps[step][chunk], self._states[chunk], self._sparse_updates(chunk)
        sums, before, exchange.before = self._take_sums(step, chunk), exchange.before, None
        held.params, held.optimizer_state = updates.mix(held.params, held.optimizer_state, sums, before, exchange.step)
        self._count(JOIN, chunk, -self._own_bytes(exchange, chunk) - updates.chosen_bytes)

    def _sparse_updates(self, chunk: int) -> SparseUpdates:
        updates = self._updates[chunk]
        assert isinstance(updates, SparseUpdates)
        return updates


def _on_devices(states: Any) -> list[Any]:
    """Returns the arrays of optimizer states but for those in host memory."""
    return [leaf for leaf in jax.tree.leaves(states) if leaf.sharding.memory_kind != HOST_MEMORY]


def _part_for(updates: PieceUpdates, base: int, piece: GradientPiece) -> Any:
    """Returns the part of a chunk's piece that its copies get, or a chunk that shares parameters with it."""
    names = updates.shared_with.get(base)
    return piece if names is None else pick(piece.shared, names)


# -- by one launch ----------------------------------------------------------------------------------------------------


class StageReplicas:
    """The replicas of one stage of which this process hosts devices.

    Args:
        updates: by base number, R and U of the stage's chunks.
        states: by base number, the optimizer states that the replicas share; updated in place.
        local: the replicas, ascending.
    """

    def __init__(self, updates: Mapping[int, StageUpdates], states: dict[int, Any], local: tuple[int, ...]) -> None:
        self._updates, self._states = updates, states
        self._num_local = len(local)
        self._gradients: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[dict[int, Any], Future[Mapping[int, Any]]]] = {}
        """Arguments by replica, and the results, of launches for which not all have come."""
        self._error: BaseException | None = None

    def shares_optimizer(self, base: int) -> bool:
        """Returns whether ``update`` is to be called for a chunk."""
        return self._updates[base].shards_optimizer

    def reduce(
        self, step: int, base: int, replica: int, accumulators: Any, shared: tuple[Any, ...], *, optimizer_state: Any
    ) -> tuple[Any, Any]:
        """Runs R of a chunk; returns the accumulators from now on, and the squared norm of the sums (float32 scalar).

        ``optimizer_state`` is the replica's own, if the replicas do not share one.
        """

        def launch(arrived: Mapping[int, tuple[Any, Any, Any]]) -> Mapping[int, tuple[Any, Any]]:
            sums = {r: own for r, (own, _, _) in arrived.items()}
            tied = {r: layers for r, (_, layers, _) in arrived.items()} if shared else None
            own_states = {r: state for r, (_, _, state) in arrived.items()}
            state = self._states[base] if self.shares_optimizer(base) else own_states
            reduced = self._updates[base].reduce(sums, tied, state)
            self._gradients[base] = reduced.gradients
            return {r: (each, reduced.squared_norm) for r, each in reduced.accumulators.items()}

        result: tuple[Any, Any] = self.meet((step, "R", base), replica, (accumulators, shared, optimizer_state), launch)
        return result

    def update(self, step: int, base: int, replica: int, params: Any, verdict: Verdict) -> Any:
        """Runs U of a chunk with a shared optimizer state; returns the new parameters on this replica."""

        def launch(arrived: Mapping[int, Any]) -> Mapping[int, Any]:
            gradients, state = self._gradients.pop(base), self._states[base]
            updated, self._states[base] = self._updates[base].update(
                arrived, gradients, state, verdict.scale, verdict.apply
            )
            return updated

        return self.meet((step, "U", base), replica, params, launch)

    def meet(
        self, key: Hashable, replica: int, argument: Any, launch: Callable[[dict[int, Any]], Mapping[int, Any]]
    ) -> Any:
        """Blocks until all have come; the last thread launches for all of them. Returns the replica's result.

        An error of ``launch`` is raised for everyone, and breaks the barrier; so is the error of :meth:`abort`.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            arrived, results = self._open.setdefault(key, ({}, Future()))
            arrived[replica] = argument
            is_last = len(arrived) == self._num_local
            if is_last:
                del self._open[key]
        if not is_last:
            return results.result()[replica]
        # Without the lock: a launch may take long, and others may meet for another launch meanwhile.
        try:
            results.set_result(launch(dict(sorted(arrived.items()))))
        except BaseException as error:
            results.set_exception(error)
            self.abort(error)
            raise
        return results.result()[replica]

    def abort(self, error: BaseException) -> None:
        """Ends all waits for a replica of which a task has failed, now and later, with the error."""
        with self._lock:
            self._error = self._error or error
            broken, self._open = list(self._open.values()), {}
        for _, results in broken:
            results.set_exception(error)
