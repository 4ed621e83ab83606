"""What the replicas of a stage do together, once per chunk and step: R, and with a sharded optimizer state U.

These programs run on all devices of the stage. Every process that holds some of them launches each once, with the
arrays of all its replicas, and all processes launch them in the same order.

``all_reduce`` consumes the accumulators, except those of shared layers, which other chunks may still be reading.
``update`` consumes the parameters, the gradients and the optimizer state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.grid import StageGrid
from rrfp_jax.programs.initial import parts_of, pick
from rrfp_jax.programs.mesh_reduce import mesh_reduce_function
from rrfp_jax.programs.shapes import param_specs
from rrfp_jax.programs.shardings import (
    param_partition,
    shardings_of,
    shared_out,
    spread,
    state_partition,
)
from rrfp_jax.programs.specs import Specs, accumulator_spec, spec_of
from rrfp_jax.programs.update import tie_of, update_function
from rrfp_jax.tasks import PipelineGraph


class Reduced(NamedTuple):
    """What R leaves."""

    accumulators: dict[int, Any]
    """For every local replica what it holds from now on: the sums, or zeros where the optimizer state is sharded."""
    gradients: Any
    """With a sharded optimizer state, the sums on the whole stage, cut like the state, for ``update``; else None."""
    squared_norm: Any
    """Of the sums; a float32 scalar, the same in all processes."""


class ReplicaPrograms:
    """The compiled programs of one chunk on all replicas of its stage.

    Args:
        index, chunks, graph: the chunk, in the model's own graph, which knows nothing of replicas.
        grid: the devices of the stage.
        ordered: add up replicas in order, so that bits depend on nothing else; see
            :mod:`rrfp_jax.programs.mesh_reduce`.
        shard_optimizer: cut the optimizer state over the replicas (ZeRO-1) and update the parameters here.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        *,
        optimizer: optax.GradientTransformation,
        grid: StageGrid,
        ordered: bool = False,
        shard_optimizer: bool = False,
    ) -> None:
        self.index, self.grid = index, grid
        self._optimizer, self._ordered = optimizer, ordered
        self._chunks, self._params = tuple(chunks), spec_of(param_specs(chunks[index]))
        self._partition = param_partition(chunks, index, grid.tensor)
        self.trains = graph.has_backward(index) and bool(jax.tree.leaves(self._params))
        self.shards_optimizer = shard_optimizer and self.trains
        """Whether ``update`` is to be called here, and the optimizer state lies on the whole stage."""
        self.parts = parts_of(chunks[index], self._params)
        self._shares = shared_out(self._partition, self._params, grid.data) if shard_optimizer else self._partition
        self._sharing = tuple(graph.sharing(index))
        self._tie = tie_of(chunks, index, self._sharing)
        self._partitions_of_others = tuple(
            pick(param_partition(chunks, other, grid.tensor), tuple(sorted(chunks[other].shared)))
            for other in self._tie.others
        )
        self.state_specs = shared_state_specs(chunks, index, optimizer, grid) if self.shards_optimizer else ()
        """The optimizer state on the whole stage, as specs with shardings, one entry per part."""
        self._reduce = self._compile_reduce() if self.trains else None
        self._updates = tuple(map(self._compile_update, self.parts, self.state_specs))
        self.compiled: dict[str, Compiled] = {"reduce": self._reduce} if self._reduce is not None else {}
        """The compiled programs by name."""
        names = (f"update {', '.join(part)}" for part in self.parts)
        self.compiled |= dict(zip(names, self._updates, strict=False))

    def all_reduce(
        self, accumulators: Mapping[int, Any], shared: Mapping[int, tuple[Any, ...]] | None = None
    ) -> Reduced:
        """Sum the gradients of all replicas, and of shared layers over the chunks that hold them.

        ``accumulators`` has those of every local replica, on its unit. ``shared`` has for every local replica what
        ``ChunkPrograms.reduce`` would take: for every chunk of ``graph.sharing(index)``, ascending, its ``shared_part``
        in that replica, on the unit's devices or in NumPy; the entry of this chunk itself is not looked at.
        """
        if self._reduce is None:
            return Reduced(dict(accumulators), None, np.float32(0))
        own = self._tie.names
        joined = self.grid.join(accumulators, self._partition)
        tied = {name: joined.pop(name) for name in own}
        reduced, cleared, squared_norm = self._reduce(joined, tied, self._join_others(shared or {}))
        if self.shards_optimizer:
            return Reduced(self.grid.part(cleared), reduced, squared_norm)
        return Reduced(self.grid.part(reduced), None, squared_norm)

    def update(
        self, params: Mapping[int, Params], gradients: Any, optimizer_state: tuple[Any, ...], scale: float, apply: bool
    ) -> tuple[dict[int, Params], tuple[Any, ...]]:
        """One optimizer step with the gradients ``gradients * scale``, or none if ``apply`` is False.

        ``params`` has those of every local replica, on its unit. Each replica updates its share and gets the others'.
        Returns parameters and optimizer state.
        """
        if not self.shards_optimizer:
            raise ValueError(f"the replicas of chunk {self.index} update each by itself: call ChunkPrograms.update")
        factor, go = np.float32(scale), np.bool_(apply)
        joined = self.grid.join(params, self._partition)
        changed: Params = {}
        new_states = []
        for part, update, state in zip(self.parts, self._updates, optimizer_state, strict=True):
            some, new_state = update(pick(joined, part), state, pick(gradients, part), factor, go)
            changed |= some
            new_states.append(new_state)
        return self.grid.part(changed), tuple(new_states)

    def _join_others(self, shared: Mapping[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        """The shared accumulators of the other chunks, joined over the local replicas."""
        joined = []
        for other, partition in zip(self._tie.others, self._partitions_of_others, strict=True):
            place = self._sharing.index(other)
            parts = {r: self._on_unit(r, shared[r][place], partition) for r in self.grid.local_replicas}
            joined.append(self.grid.join(parts, partition))
        return tuple(joined)

    def _on_unit(self, replica: int, tree: Any, partition: Any) -> Any:
        """The same arrays, on the unit's devices where they are NumPy arrays."""

        def put(leaf: Any, spec: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return leaf
            sharding = self.grid.unit_sharding(replica, spec)
            return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

        return jax.tree.map(put, tree, partition)

    def _place(self, partition: Any) -> Any:
        return jax.tree.map(self.grid.sharding, partition)

    def _compile_reduce(self) -> Compiled:
        tie, names = self._tie, self._tie.names
        function = mesh_reduce_function(
            tie,
            self.grid.mesh,
            self._partition,
            self._partitions_of_others,
            shares=self._shares,
            ordered=self._ordered,
        )

        def reduce(own: Any, tied: Any, others: Any) -> Any:
            accumulators = own | tied
            reduced, squared_norm = function(accumulators, others)
            return reduced, jax.tree.map(jnp.zeros_like, accumulators if self.shards_optimizer else {}), squared_norm

        at_params, at_shares = self._place(self._partition), self._place(self._shares)
        own = tuple(name for name in self._params if name not in names)
        sums = accumulator_spec(self._params)
        others = tuple(
            accumulator_spec(pick(spec_of(param_specs(self._chunks[other])), tuple(partition)))
            for other, partition in zip(tie.others, self._partitions_of_others, strict=True)
        )
        cleared = at_params if self.shards_optimizer else {}
        return compile_program(
            "reduce",
            reduce,
            *(pick(sums, own), pick(sums, names), others),
            in_shardings=(pick(at_params, own), pick(at_params, names), self._place(self._partitions_of_others)),
            out_shardings=(at_shares, cleared, self.grid.sharding()),
            donate=(0,),
        )

    def _compile_update(self, part: tuple[str, ...], state: Specs) -> Compiled:
        """One part's update; equal for all holders of a shared layer, so that their copies stay equal bit for bit."""
        update_all = update_function(self._optimizer)
        at_params, at_shares = self._place(pick(self._partition, part)), self._place(pick(self._shares, part))

        def update(params: Any, state: Any, gradients: Any, scale: Any, apply: Any) -> Any:
            own = jax.lax.with_sharding_constraint(params, at_shares)
            return update_all(own, state, gradients, scale, apply)[:2]

        params, scalar = pick(self._params, part), self.grid.sharding()
        return compile_program(
            "update",
            update,
            *(params, spec_of(state), accumulator_spec(params)),
            jax.ShapeDtypeStruct((), np.float32),
            jax.ShapeDtypeStruct((), np.bool_),
            in_shardings=(at_params, shardings_of(state), at_shares, scalar, scalar),
            out_shardings=(at_params, shardings_of(state)),
            donate=(0, 1),
        )


def shared_state_specs(
    chunks: Sequence[Chunk], index: int, optimizer: optax.GradientTransformation, grid: StageGrid
) -> tuple[Specs, ...]:
    """The optimizer state of chunk ``index`` cut over the replicas of its stage, as specs with shardings.

    One entry per part of the chunk. Only for a chunk that trains; nothing is compiled.
    """
    params = spec_of(param_specs(chunks[index]))
    partition = param_partition(chunks, index, grid.tensor)
    specs = []
    for part in parts_of(chunks[index], params):
        own = pick(params, part)
        state = spec_of(jax.eval_shape(optimizer.init, own))
        cut = shared_out(state_partition(state, own, pick(partition, part)), state, grid.data)
        specs.append(spread(state, jax.tree.map(grid.sharding, cut)))
    return tuple(specs)


def initial_shared_state(
    chunks: Sequence[Chunk],
    index: int,
    optimizer: optax.GradientTransformation,
    grid: StageGrid,
    params: Mapping[int, Params],
) -> tuple[Any, ...]:
    """The optimizer state that ``shared_state_specs`` describes, from the parameters of every local replica.

    All processes of the stage call it, in the same order for the chunks of a stage.
    """
    specs = shared_state_specs(chunks, index, optimizer, grid)
    partition = param_partition(chunks, index, grid.tensor)
    joined = grid.join(params, partition)
    parts = parts_of(chunks[index], joined)
    return tuple(
        jax.jit(optimizer.init, out_shardings=shardings_of(state))(pick(joined, part))
        for part, state in zip(parts, specs, strict=True)
    )
