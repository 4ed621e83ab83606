"""R and U of one chunk, compiled: on its own unit, or on all replicas of its stage together.

Without data parallelism :class:`UnitUpdates` runs both. With it, R runs on the whole stage (:class:`StageUpdates`); so
does U where the replicas share the optimizer state, and else every replica updates itself. Replicas that add up by
messages run everything on their own units (:class:`PieceUpdates`), also those that average a share of their parameters
instead of adding up gradients (:class:`SparseUpdates`).

The programs of a stage run on all its devices. Every process that holds some of them launches each once, with the
arrays of all its replicas, and all processes launch them in the same order.

A shared layer is updated by a program of its own, which is the same for every chunk that holds a copy: inside a larger
program XLA may round the same formula differently, and the copies would drift apart.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.core.replicas import SparseAveraging
from rrfp_jax.programs.chunk import Chunk, Params, trained_specs
from rrfp_jax.programs.compiling import FlatProgram, shared_program
from rrfp_jax.programs.pieces import (
    GradientPiece,
    PieceBytes,
    PieceLayout,
    elements_of_part,
    part_keys,
    tied_names,
    with_added_part,
)
from rrfp_jax.programs.sameness import ProgramStore
from rrfp_jax.programs.shapes import accumulator_spec, num_bytes, pick, spec_of
from rrfp_jax.programs.shardings import (
    WHOLE,
    axes_of,
    mesh_of,
    param_partition,
    place,
    shardings_of,
    shared_out,
    spread,
)
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.programs.state import Shares, optimizer_specs, overlaid, share_of, state_parts
from rrfp_jax.programs.update_functions import (
    reduce_function,
    scalars_of,
    signed_norm,
    sum_function,
    tie_of,
    update_function,
)
from rrfp_jax.schedules import PipelineGraph


class _Updates:
    """R and U of a chunk on any devices: those of a unit, given by its boundary, or those of a stage."""

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        optimizer: optax.GradientTransformation,
        devices: Sharding | StageDevices,
        *,
        updates_here: bool,
        shares: Shares | None = None,
        store: ProgramStore | None,
    ) -> None:
        self._store = store or ProgramStore()
        self.index, self.optimizer, self._chunk = index, optimizer, chunks[index]
        self.compiled: dict[str, Compiled] = {}
        """The compiled programs by name."""
        self._scalar = devices.sharding() if isinstance(devices, StageDevices) else devices
        self._mesh = mesh_of(self._scalar)
        axes = axes_of(self._mesh)
        self._params = spec_of(trained_specs(chunks[index]))
        """The shapes of layers that train; R and U know no others."""
        self._partition = pick(param_partition(chunks, index, axes), self._params)
        self._tie = tie_of(chunks, index, graph.sharing(index))
        sharing = self._tie.of_others(self._tie.sharing)
        others = [(other, tuple(sorted(chunks[other].tied))) for other in sharing]
        self._specs_of_others = tuple(
            accumulator_spec(pick(spec_of(trained_specs(chunks[other])), names)) for other, names in others
        )
        self._partitions_of_others = tuple(pick(param_partition(chunks, other, axes), names) for other, names in others)
        self.trains = graph.updates(index) and bool(jax.tree.leaves(self._params))
        """Whether the chunk has parameters that change: if not, R and U hand back what they get."""
        does_update = self.trains and updates_here
        num_shares = 1 if shares is None else shares.number
        parts = state_parts(chunks[index], self._params, optimizer, num_shares) if self.trains else ()
        self.parts = parts if does_update else ()
        """The parts of the parameters that U changes here, one for each entry of the optimizer state."""
        every = shares and Shares(num_shares, range(num_shares))
        self.all_state_specs = optimizer_specs(chunks, index, optimizer, devices, every) if does_update else ()
        """The optimizer state of all parts, as specs with shardings."""
        self.state_specs = tuple(
            state if shares is None or part.share in shares.held else None
            for part, state in zip(self.parts, self.all_state_specs, strict=True)
        )
        """The optimizer state that U takes here, as specs with shardings, one entry per part of the parameters; None
        for shares that are not held."""
        self._reduce: FlatProgram | None = None
        self._updates: list[FlatProgram] = []
        self._clears: list[FlatProgram] = []
        """For each part the program that clears its accumulators where its share is not held."""
        self._is_cut = shares is not None
        signed, self._scalars = signed_norm(
            optimizer, [part.pick(self._params) for part in parts], may_lack=self._is_cut
        )
        self._signed = signed or (lambda squared_norm, scalars: squared_norm)

    def _compile(self, name: str, called: str, function: Any, *specs: Any, **options: Any) -> FlatProgram:
        """Traces a function for this chunk, as an optimizer may go by names of layers; compiles equal traces once."""
        program = shared_program(self._store, name, function, *specs, **options)
        self.compiled[called] = program.compiled
        return program

    def _at(self, partition: Any) -> Any:
        return place(partition, self._scalar)

    def _scalars_of(self, states: Sequence[Any] | None) -> Any:
        """Returns the scalars of an optimizer state, or zeros in place of a state or an entry that is not given."""
        zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self._scalars)
        if states is None or not self._scalars:
            return zeros
        if not self._is_cut:
            return [scalars_of(state) for state in states]
        return [
            none if state is None else (scalars_of(state), np.bool_(True))
            for none, state in zip(zeros, states, strict=True)
        ]

    def _compile_updates(self, shares: Any = None) -> None:
        """Compiles U of every part of the parameters; ``shares`` say how gradients and state are cut over replicas.

        Then accumulators do not pass through: R has cleared them.
        """
        update_all = update_function(self.optimizer, self._chunk.sign_rates)
        for part, state in zip(self.parts, self.all_state_specs, strict=True):
            params, at_state = part.pick(self._params), shardings_of(state)
            at_params = at_grads = self._at(part.pick(self._partition))
            update, donate = update_all, [0, 1, 2]
            if shares is not None:
                at_grads, donate = self._at(part.pick(shares)), [0, 1]

                def update(params: Any, *rest: Any, at: Any = at_grads) -> Any:
                    return update_all(jax.lax.with_sharding_constraint(params, at), *rest)[:2]

            program = self._compile(
                "update",
                f"update {part.name}",
                update,
                *(params, spec_of(state), accumulator_spec(params)),
                jax.ShapeDtypeStruct((), np.float32),
                jax.ShapeDtypeStruct((), np.bool_),
                in_shardings=(at_params, at_state, at_grads, self._scalar, self._scalar),
                out_shardings=(at_params, at_state, at_params)[: len(donate)],
                donate=tuple(donate),
            )
            self._updates.append(program)
            if self._is_cut:
                sums = accumulator_spec(params)
                # Zeros that depend on the sums, so that they take the sums' memory.
                clear = partial(jax.tree.map, lambda sums: jnp.where(np.False_, sums, 0))
                at = {"in_shardings": (at_params,), "out_shardings": at_params, "donate": (0,)}
                self._clears.append(self._compile("clear", f"update {part.name}, clear", clear, sums, **at))

    def _run_updates(
        self, params: Params, states: tuple[Any, ...], gradients: Any, scale: float, apply: bool
    ) -> tuple[Params, tuple[Any, ...], Params]:
        """Runs U of every part; returns changed layers, optimizer state, and zeroed accumulators if U makes them."""
        factor, go = np.float32(scale), np.bool_(apply)
        changed: list[Params] = []
        cleared: list[Params] = []
        new_states: list[Any] = []
        for number, (part, update, state) in enumerate(zip(self.parts, self._updates, states, strict=True)):
            if state is None:  # Others update this share.
                new_states.append(None)
                cleared.append(self._clears[number](part.pick(gradients)))
                continue
            some, new_state, *zeros = update(part.pick(params), state, part.pick(gradients), factor, go)
            changed.append(some)
            new_states.append(new_state)
            cleared += zeros
        if self._is_cut:
            return overlaid(params, changed), tuple(new_states), overlaid({}, cleared)
        layers, zeros_of_layers = ({k: v for each in some for k, v in each.items()} for some in (changed, cleared))
        return layers, tuple(new_states), zeros_of_layers


class UnitUpdates(_Updates):
    """The sum of shared gradients with the norm, and the optimizer update, of one chunk on its own unit.

    Args:
        sharding: the unit's boundary.
        stage: the updates that the chunk's replicas make together instead; None: there is only one.
        shares: the shares of the optimizer state that this unit holds, if it is cut; None: it is not.
        store: the programs that are compiled already for other chunks; None: none.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        *,
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        stage: "StageUpdates | None",
        shares: Shares | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        here = stage is None or not stage.shards_optimizer
        super().__init__(index, chunks, graph, optimizer, sharding, updates_here=here, shares=shares, store=store)
        self._replicas_reduce = stage is not None
        if self.trains and stage is None:
            self._compile_reduce()
        self._compile_updates()

    def _compile_reduce(self) -> None:
        """Compiles the sums of shared layers and the norm; the other accumulators do not pass through."""
        function = reduce_function(self._tie, self._mesh, self._partition, self._partitions_of_others)
        names, at_params = self._tie.names, self._at(self._partition)

        def reduce(accumulators: Any, others: tuple[Any, ...], scalars: Any) -> tuple[dict[str, Any], Any]:
            layers, squared_norm = function(accumulators, others)
            return pick(layers, names), self._signed(squared_norm, scalars)

        self._reduce = self._compile(
            "reduce",
            "reduce",
            reduce,
            *(accumulator_spec(self._params), self._specs_of_others, self._scalars),
            in_shardings=(at_params, self._at(self._partitions_of_others), self._scalar),
            out_shardings=(pick(at_params, names), self._scalar),
        )

    def reduce(
        self, accumulators: Any, shared: tuple[Any, ...] = (), optimizer_state: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        """Sums shared gradients; returns the accumulators and their squared norm (float32 scalar). Consumes nothing.

        The norm has a negative sign if the next update from ``optimizer_state`` cannot be finite
        (:mod:`rrfp_jax.programs.update_functions`).

        ``shared`` has, for every chunk of ``graph.sharing(index)`` in ascending order, its shared layers' accumulators;
        the entry of this chunk itself is not looked at. Leave it out where nothing is shared. The norm counts a shared
        layer in its lowest holder only.
        """
        if self._reduce is None:
            if self.trains and self._replicas_reduce:
                raise ValueError(f"chunk {self.index} has replicas, which reduce together: call StageUpdates.reduce")
            return accumulators, np.float32(0)
        scalars = self._scalars_of(optimizer_state)
        sums, squared_norm = self._reduce(accumulators, self._tie.of_others(shared), scalars)
        return {**accumulators, **sums}, squared_norm

    def update(
        self, params: Params, optimizer_state: tuple[Any, ...], accumulators: Any, scale: float, apply: bool
    ) -> tuple[Params, tuple[Any, ...], Any]:
        """Makes one optimizer step with the gradients ``accumulators * scale``, or none if ``apply`` is False.

        Returns parameters, optimizer state and zeroed accumulators; consumes all three, but for frozen layers, which
        it hands back as they are.
        """
        if not self._updates:
            if self.trains:
                raise ValueError(
                    f"the replicas of chunk {self.index} share its optimizer state: call StageUpdates.update"
                )
            return params, optimizer_state, accumulators
        changed, states, cleared = self._run_updates(params, optimizer_state, accumulators, scale, apply)
        return {**params, **changed}, states, cleared


class PieceUpdates(UnitUpdates):
    """R and U of one chunk on its own unit, for replicas that add up their gradients by messages.

    ``cut`` makes pieces of the accumulators, ``add`` adds up one piece, and ``join`` makes accumulators of the sums of
    all pieces, which ``update`` takes. Where the replicas share the optimizer state too, ``update`` changes the shares
    whose state it is given. ``copy_share`` makes a copy of a share's parameters for the others, which put it in the
    place of theirs by ``with_share``.

    Args:
        replica, num_replicas: the replica of this unit, and of how many.
        in_blocks: whether a replica that runs several blocks of microbatches adds up each by itself.
        shares: the shares of the optimizer state that this unit holds; None: it is not cut.
        num_parts: see :class:`.PieceLayout`.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        *,
        optimizer: optax.GradientTransformation,
        sharding: Sharding,
        replica: int,
        num_replicas: int,
        in_blocks: bool = False,
        shares: Shares | None = None,
        num_parts: int | None = None,
        store: ProgramStore | None = None,
    ) -> None:
        self.replica, self._in_blocks = replica, in_blocks
        axes = axes_of(mesh_of(sharding))
        self.layout = PieceLayout(chunks, index, axes, num_replicas, num_parts=num_parts)
        self.shared_with = {other: tied_names(chunks, other, index) for other in graph.sharing(index) if other != index}
        """By chunk of the tie, the shared layers that train and that it has in common with this one."""
        self._names_of_others = tuple(self.shared_with.values())
        super().__init__(
            index, chunks, graph, optimizer=optimizer, sharding=sharding, stage=None, shares=shares, store=store
        )
        with_arrays = {part.share for part in self.parts} if self._is_cut else ()
        self._copies = {share: self._compile_copy(share) for share in with_arrays}
        self.piece_bytes = self._count_bytes() if self.trains else PieceBytes()
        """The memory of pieces on this unit."""

    def _compile_copy(self, share: int) -> FlatProgram:
        """Compiles a copy of a share's parameters: a receiver in this process gets the array that is sent itself."""
        params, at = (share_of(self.parts, share, each) for each in (self._params, self._at(self._partition)))
        copy = partial(jax.tree.map, jnp.copy)
        return self._compile("copy", f"update, copy {share}", copy, params, in_shardings=(at,), out_shardings=at)

    def _compile_reduce(self) -> None:
        sums, layout = accumulator_spec(self._params), self.layout
        at_params, at = self._at(self._partition), layout.at(self._scalar)
        of_layers, of_piece = self._partition, layout.partition
        on_each = partial(jax.shard_map, mesh=self._mesh, check_vma=False) if self._mesh is not None else _as_it_is
        all_pieces = (layout.spec,) * layout.num_pieces
        self._cut = self._compile(
            "cut",
            "cut",
            on_each(layout.cut, in_specs=(of_layers,), out_specs=(of_piece,) * layout.num_pieces),
            sums,
            in_shardings=(at_params,),
            out_shardings=(at,) * layout.num_pieces,
        )
        self._join = self._compile(
            "join",
            "join",
            on_each(layout.join, in_specs=((of_piece,) * layout.num_pieces,), out_specs=of_layers),
            all_pieces,
            in_shardings=((at,) * layout.num_pieces,),
            out_shardings=at_params,
        )
        self._add = self._compile_add("reduce")

    def _compile_add(self, called: str) -> FlatProgram:
        layout, scalar = self.layout, self._scalar
        at = layout.at(scalar)
        add_up = sum_function(self._tie, layout, self.replica, self._mesh, self._names_of_others)

        def add(own: Any, rest: Any, lives: Any, scalars: Any) -> tuple[GradientPiece, Any]:
            total, squared_norm = add_up(own, rest, lives)
            return total, self._signed(squared_norm, scalars)

        def with_tied(piece: GradientPiece) -> Any:
            return piece, tuple(pick(piece.shared, names) for names in self._names_of_others)

        def rest_of(piece: GradientPiece) -> Any:
            return piece.shared, with_tied(piece)[1], (with_tied(piece),) * (layout.num_pieces - 1)

        return self._compile(
            "reduce",
            called,
            add,
            *(layout.spec.own, rest_of(layout.spec)),
            *(jax.ShapeDtypeStruct((layout.num_pieces, len(self._tie.sharing)), np.bool_), self._scalars),
            in_shardings=(at.own, rest_of(at), scalar, scalar),
            out_shardings=(at, scalar),
            donate=(0,),
        )

    def _count_bytes(self) -> PieceBytes:
        spec, num_pieces = spread(self.layout.spec, self.layout.at(self._scalar)), self.layout.num_pieces
        piece, shared = num_bytes(spec), num_bytes(spec.shared)
        tied = sum(num_bytes(pick(spec.shared, names)) for names in self._names_of_others)
        filling = num_pieces * piece - self._bytes_before_cut()
        # Where replicas are lost, each of the rest adds up more pieces, of fewer others.
        others = max(
            -(-num_pieces // living) * ((living - 1) * piece + living * tied) for living in range(1, num_pieces + 1)
        )
        if self._in_blocks:  # It may run all of them, and add up all pieces of layers that others share with it.
            others = num_pieces * ((num_pieces - 1) * piece + num_pieces * tied)
        # At any time no more than all parameters: shares of others that have come, and copies of shares of its own.
        sent = num_bytes(spread(self._params, self._at(self._partition))) if self._is_cut else 0
        return PieceBytes(
            piece=piece,
            lasting=others + filling + sent,
            made={"cut": num_pieces * piece, "join": num_pieces * piece, "reduce": shared},
        )

    def _bytes_before_cut(self) -> int:
        """Returns the bytes of accumulators, whose place the pieces take."""
        return num_bytes(spread(accumulator_spec(self._params), self._at(self._partition)))

    def cut(self, accumulators: Any) -> tuple[GradientPiece, ...]:
        """Returns the accumulators, cut into as many pieces as there are replicas. Consumes nothing."""
        if not self.trains:
            return (GradientPiece((), {}),) * self.layout.num_pieces
        pieces: tuple[GradientPiece, ...] = self._cut(accumulators)
        return pieces

    def add(
        self, terms: Mapping[tuple[int, int], Any], optimizer_state: tuple[Any, ...] | None = None
    ) -> tuple[GradientPiece, Any]:
        """Returns the sum of one piece over the replicas, and its squared norm as :meth:`reduce` returns that of all.

        ``terms`` has, by replica and chunk of ``graph.sharing(index)``, this chunk's pieces, and the parts of the
        layers that others share with it, by name. What is not there is not added. Consumes this replica's own part,
        but for shared layers.
        """
        mine = terms[self.replica, self.index]
        if not self.trains:
            return mine, np.float32(0)
        replicas, zeros = range(self.layout.num_pieces), None
        if len(terms) < len(replicas) * len(self._tie.sharing):
            zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.layout.spec)

        def tied(replica: int) -> Any:
            return tuple(
                terms[replica, other] if zeros is None or (replica, other) in terms else pick(zeros.shared, names)
                for other, names in self.shared_with.items()
            )

        others = tuple((terms.get((r, self.index), zeros), tied(r)) for r in replicas if r != self.replica)
        result: tuple[GradientPiece, Any] = self._add(
            mine.own,
            (mine.shared, tied(self.replica), others),
            np.array([[(replica, chunk) in terms for chunk in self._tie.sharing] for replica in replicas]),
            self._scalars_of(optimizer_state),
        )
        return result

    def join(self, pieces: Sequence[GradientPiece]) -> Any:
        """Returns the accumulators that these pieces make, all of them in order. Consumes nothing."""
        return self._join(tuple(pieces)) if self.trains else {}

    def copy_share(self, params: Params, share: int) -> Any:
        """Returns a copy of a share's parameters, which may be none."""
        return self._copies[share](share_of(self.parts, share, params)) if share in self._copies else ()

    def with_share(self, params: Params, share: int, values: Any) -> Params:
        """Returns the parameters with the values of a share in the place of its own; takes them over."""
        at = share_of(self.parts, share, self._at(self._partition))
        return overlaid(params, jax.tree.map(jax.device_put, values, at))


def _as_it_is(function: Any, **_: Any) -> Any:
    return function


class SparseUpdates(PieceUpdates):
    """R and U of one chunk on its own unit, for replicas that average a share of their parameters by messages.

    ``reduce`` takes the norm of this replica's own gradients, as where there is one replica. ``choose`` cuts one part
    of the parameters into pieces, ``add`` adds up one piece, and ``mix`` changes the parameters by the averages.

    Args:
        sparse: the share, and how late averages are.
    """

    def __init__(self, *args: Any, sparse: SparseAveraging, **options: Any) -> None:
        self._sparse = sparse
        super().__init__(*args, num_parts=sparse.num_parts, **options)

    def _compile_reduce(self) -> None:
        UnitUpdates._compile_reduce(self)
        self._add = self._compile_add("reduce, add")
        layout, num_parts, tau = self.layout, self._sparse.num_parts, self._sparse.tau
        at_params, at = self._at(self._partition), layout.at(self._scalar)
        self._keys = part_keys(self._params, self._sparse.seed)
        which = spec_of(self._keys), jax.ShapeDtypeStruct((), np.uint32)

        def choose(params: Any, which: tuple[jax.Array, jax.Array]) -> Any:
            chosen = elements_of_part(params, *which, num_parts)
            return layout.cut(chosen), chosen

        def mix(params: Any, late: Any, pieces: Any, before: Any, which: tuple[jax.Array, jax.Array]) -> Any:
            keys, part = which

            def difference(total: jax.Array, own: jax.Array) -> jax.Array:
                return total / layout.num_pieces - own

            found = jax.tree.map(difference, layout.join(pieces), before)
            if not tau:
                return with_added_part(params, found, keys, part, num_parts), late
            waiting = {name: layer for of_part in late for name, layer in of_part.items()}
            due = jax.tree.map(lambda each: each[0], waiting)
            added = jax.tree.map(lambda each, new: jnp.concatenate([each[1:], new[None]]), waiting, found)
            # The differences that are due were taken of the part of tau steps ago.
            then = (part + jnp.uint32(-tau % num_parts)) % jnp.uint32(num_parts)
            moved = with_added_part(params, due, keys, then, num_parts)
            return moved, tuple(pick(added, of_part) for of_part in late)

        scalar, late = self._scalar, tuple(state.late for state in self.all_state_specs)
        self._choose = self._compile(
            "cut",
            "cut",
            choose,
            *(self._params, which),
            in_shardings=(at_params, scalar),
            out_shardings=((at,) * layout.num_pieces, scalar),
        )
        self._mix = self._compile(
            "join",
            "join",
            mix,
            *(self._params, spec_of(late), (layout.spec,) * layout.num_pieces, layout.whole_spec, which),
            in_shardings=(at_params, shardings_of(late), (at,) * layout.num_pieces, scalar, scalar),
            out_shardings=(at_params, shardings_of(late)),
            donate=(0, 1),
        )

    def _bytes_before_cut(self) -> int:
        return -self.chosen_bytes  # Accumulators stay, and so do the elements beside their pieces.

    @property
    def chosen_bytes(self) -> int:
        """Bytes of the elements of one part."""
        at = jax.tree.map(lambda _: self._scalar, self.layout.whole_spec)
        return num_bytes(spread(self.layout.whole_spec, at)) if self.trains else 0

    def reduce(
        self, accumulators: Any, shared: tuple[Any, ...] = (), optimizer_state: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        return UnitUpdates.reduce(self, accumulators, shared, optimizer_state)

    def choose(self, params: Params, step: int) -> tuple[tuple[GradientPiece, ...], Any]:
        """Returns the pieces of the part that a step averages, and the elements themselves. Consumes nothing."""
        if not self.trains:
            return (GradientPiece((), {}),) * self.layout.num_pieces, {}
        result: tuple[tuple[GradientPiece, ...], Any] = self._choose(pick(params, self._params), self._part(step))
        return result

    def mix(
        self, params: Params, states: tuple[Any, ...], pieces: Sequence[GradientPiece], before: Any, step: int
    ) -> tuple[Params, tuple[Any, ...]]:
        """Returns parameters and optimizer state with the averages that a step's update adds.

        ``pieces`` are the sums of all pieces of the step, in order, and ``before`` the elements that :meth:`choose`
        returned. Consumes parameters that train, and optimizer state.
        """
        if not self.trains:
            return params, states
        late = tuple(state.late for state in states)
        changed, late = self._mix(pick(params, self._params), late, tuple(pieces), before, self._part(step))
        return {**params, **changed}, tuple(s._replace(late=each) for s, each in zip(states, late, strict=True))

    def _part(self, step: int) -> tuple[Any, Any]:
        return self._keys, np.uint32(step % self._sparse.num_parts)


class Reduced(NamedTuple):
    """The results of R on a stage."""

    accumulators: dict[int, Any]
    """The accumulators of every local replica after R: the sums, or zeros with a sharded optimizer state."""
    gradients: Any
    """The sums on the whole stage, cut like a sharded optimizer state, for ``update``; None without such a state."""
    squared_norm: Any
    """The squared norm of the sums, with the sign that says whether an update can be finite; a float32 scalar, the
    same in all processes."""


class StageUpdates(_Updates):
    """The joint updates of a stage's replicas for one chunk: R, and with a sharded optimizer state U.

    Args:
        index, chunks, graph: the chunk, in the model's own graph, which knows nothing of replicas.
        devices: of the stage.
        ordered: add up replicas in order, so that bits depend on nothing else;
            see :mod:`rrfp_jax.programs.update_functions`.
        shard_optimizer: cut the optimizer state over the replicas (ZeRO-1) and update the parameters here.
        store: the programs that are compiled already for other chunks; None: none.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        *,
        optimizer: optax.GradientTransformation,
        devices: StageDevices,
        ordered: bool = False,
        shard_optimizer: bool = False,
        store: ProgramStore | None = None,
    ) -> None:
        super().__init__(index, chunks, graph, optimizer, devices, updates_here=shard_optimizer, store=store)
        self.devices = devices
        self.shards_optimizer = bool(self.parts)
        """Whether ``update`` is to be called here, and the optimizer state lies on the whole stage."""
        shares = shared_out(self._partition, self._params, devices.data) if shard_optimizer else None
        if self.trains:
            self._compile_reduce(shares, ordered)
        self._compile_updates(shares)

    def _compile_reduce(self, shares: Any, ordered: bool) -> None:
        tie, names = self._tie, self._tie.names
        function = reduce_function(
            tie, self._mesh, self._partition, self._partitions_of_others, shares=shares, ordered=ordered
        )

        def reduce(own: Any, tied: Any, others: Any, scalars: Any) -> Any:
            accumulators = own | tied
            reduced, squared_norm = function(accumulators, others)
            cleared = jax.tree.map(jnp.zeros_like, accumulators if self.shards_optimizer else {})
            return reduced, cleared, self._signed(squared_norm, scalars)

        at_params, sums = self._at(self._partition), accumulator_spec(self._params)
        at_sums, at_cleared = (at_params, {}) if shares is None else (self._at(shares), at_params)
        own = tuple(name for name in self._params if name not in names)
        self._reduce = self._compile(
            "reduce",
            "reduce",
            reduce,
            *(pick(sums, own), pick(sums, names), self._specs_of_others, self._scalars),
            in_shardings=(
                *(pick(at_params, own), pick(at_params, names), self._at(self._partitions_of_others)),
                self._scalar,
            ),
            out_shardings=(at_sums, at_cleared, self._scalar),
            donate=(0,),
        )

    def reduce(
        self,
        accumulators: Mapping[int, Any],
        shared: Mapping[int, tuple[Any, ...]] | None = None,
        optimizer_state: Any = None,
    ) -> Reduced:
        """Sums the gradients of all replicas, and of shared layers over the chunks that hold them.

        ``accumulators`` has those of every local replica, on its unit. ``optimizer_state`` is the one that the replicas
        share, or that of every local replica, for the sign of the norm (:meth:`UnitUpdates.reduce`). ``shared`` has,
        for every local replica, the layers that ``UnitUpdates.reduce`` would take, on the unit's devices or in NumPy.
        Consumes the accumulators, except those of shared layers, which other chunks may still be reading.
        """
        if self._reduce is None:
            return Reduced(dict(accumulators), None, np.float32(0))
        devices = self.devices
        joined = devices.join(accumulators, self._partition)
        tied = {name: joined.pop(name) for name in self._tie.names}
        if isinstance(optimizer_state, Mapping):
            own = {replica: self._scalars_of(state) for replica, state in optimizer_state.items()}
            scalars = devices.join(own, jax.tree.map(lambda _: WHOLE, self._scalars)) if self._scalars else ()
        else:
            scalars = self._scalars_of(optimizer_state)
        others = []
        for place_of_other, partition in enumerate(self._partitions_of_others):
            layers: dict[int, Any] = {}
            for replica in devices.local_replicas:
                own_layers = self._tie.of_others((shared or {})[replica])[place_of_other]
                at = jax.tree.map(partial(devices.unit_sharding, replica), partition)
                layers[replica] = jax.tree.map(_put, own_layers, at)
            others.append(devices.join(layers, partition))
        reduced, cleared, squared_norm = self._reduce(joined, tied, tuple(others), scalars)
        if self.shards_optimizer:
            return Reduced(devices.per_replica(cleared), reduced, squared_norm)
        return Reduced(devices.per_replica(reduced), None, squared_norm)

    def update(
        self, params: Mapping[int, Params], gradients: Any, optimizer_state: tuple[Any, ...], scale: float, apply: bool
    ) -> tuple[dict[int, Params], tuple[Any, ...]]:
        """Makes one optimizer step with the gradients ``gradients * scale``, or none if ``apply`` is False.

        ``params`` has those of every local replica, on its unit. Each replica updates its share and gets the others'.
        Returns parameters and optimizer state; consumes the parameters that train, gradients and optimizer state.
        """
        if not self.shards_optimizer:
            raise ValueError(f"the replicas of chunk {self.index} update each by itself: call UnitUpdates.update")
        joined = self.devices.join({r: pick(own, self._params) for r, own in params.items()}, self._partition)
        changed, states, _ = self._run_updates(joined, optimizer_state, gradients, scale, apply)
        changed_on = self.devices.per_replica(changed)
        return {replica: {**own, **changed_on[replica]} for replica, own in params.items()}, states


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns an array as it is, and a NumPy array put onto the devices of its sharding."""
    if isinstance(leaf, jax.Array):
        return leaf
    return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)
