"""R and U of one chunk on its own unit, compiled."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.stages import Compiled

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.compiling import compile_program
from rrfp_jax.programs.initial import optimizer_specs, parts_of, pick
from rrfp_jax.programs.mesh_reduce import mesh_reduce_function
from rrfp_jax.programs.shapes import param_specs
from rrfp_jax.programs.shardings import UnitShardings, shardings_of, unit_shardings
from rrfp_jax.programs.specs import Specs, accumulator_spec, spec_of
from rrfp_jax.programs.update import reduce_function, tie_of, update_function


class UnitUpdates:
    """The sum of shared gradients with the norm, and the optimizer update, of one chunk that trains.

    Args:
        sharing: the chunks that this one shares parameters with, ascending and with itself.
        reduces, updates: False where the chunk's replicas do it together.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        sharing: Sequence[int],
        *,
        optimizer: optax.GradientTransformation,
        shardings: UnitShardings,
        reduces: bool,
        updates: bool,
    ) -> None:
        self._index, self._chunks, self._optimizer, self._shardings = index, tuple(chunks), optimizer, shardings
        self._params = spec_of(param_specs(chunks[index]))
        self._sharing, self._tie = tuple(sharing), tie_of(chunks, index, sharing)
        self.parts = parts_of(chunks[index], self._params) if updates else ()
        """Layer names, grouped as the entries of the optimizer state are; empty if the replicas update together."""
        self.state_specs = tuple(
            optimizer_specs(pick(self._params, part), part, optimizer, shardings) for part in self.parts
        )
        """The optimizer state, as specs with shardings, one entry per part."""
        self._reduce = self._compile_reduce() if reduces else None
        self._updates = tuple(map(self._compile_update, self.parts, self.state_specs))
        self.compiled: dict[str, Compiled] = {"reduce": self._reduce} if self._reduce is not None else {}
        """The compiled programs by name."""
        for part, program in zip(self.parts, self._updates, strict=True):
            self.compiled[f"update {', '.join(part)}"] = program

    def reduce(self, accumulators: Any, shared: tuple[Any, ...]) -> tuple[Any, Any]:
        """(accumulators, squared norm); ``shared`` has the shared parts of all that share, or is empty."""
        if self._reduce is None:
            raise ValueError(
                f"chunk {self._index} has replicas, which reduce together: call ReplicaPrograms.all_reduce"
            )
        if not self._tie.others:
            return accumulators, self._reduce(accumulators, ())[1]
        others = tuple([part for chunk, part in zip(self._sharing, shared, strict=True) if chunk != self._index])
        sums, squared_norm = self._reduce(accumulators, others)
        return {**accumulators, **sums}, squared_norm

    def update(
        self, params: Params, optimizer_state: tuple[Any, ...], accumulators: Any, scale: float, apply: bool
    ) -> tuple[Params, tuple[Any, ...], Any]:
        """(params, optimizer_state, zeroed accumulators)."""
        if not self._updates:
            raise ValueError(
                f"the replicas of chunk {self._index} share its optimizer state: call ReplicaPrograms.update"
            )
        factor, go = np.float32(scale), np.bool_(apply)
        new_params: Params = {}
        new_accumulators: Params = {}
        new_states = []
        for part, update, state in zip(self.parts, self._updates, optimizer_state, strict=True):
            some, new_state, cleared = update(pick(params, part), state, pick(accumulators, part), factor, go)
            new_params |= some
            new_accumulators |= cleared
            new_states.append(new_state)
        return new_params, tuple(new_states), new_accumulators

    def _compile_reduce(self) -> Compiled:
        """The sums of shared layers and the norm; the other accumulators do not pass through."""
        tie, mesh, at_params = self._tie, self._shardings.mesh, self._shardings.params
        names = [tuple(sorted(self._chunks[other].shared)) for other in tie.others]
        others = [unit_shardings(self._chunks, other, self._shardings.boundary) for other in tie.others]
        function = reduce_function(tie)
        if mesh is not None:
            partitions = tuple(map(pick, (other.partition for other in others), names))
            function = mesh_reduce_function(tie, mesh, self._shardings.partition, partitions)

        def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
            layers, squared_norm = function(accumulators, others)
            return pick(layers, tie.names), squared_norm

        specs = [pick(spec_of(param_specs(self._chunks[o])), some) for o, some in zip(tie.others, names, strict=True)]
        return compile_program(
            "reduce",
            reduce,
            accumulator_spec(self._params),
            tuple(map(accumulator_spec, specs)),
            in_shardings=(at_params, tuple(map(pick, (other.params for other in others), names))),
            out_shardings=(pick(at_params, tie.names), self._shardings.boundary),
        )

    def _compile_update(self, part: tuple[str, ...], state: Specs) -> Compiled:
        """One part's update; equal for all holders of a shared layer, so that their copies stay equal bit for bit."""
        params, scalar = pick(self._params, part), self._shardings.boundary
        at_params, at_state = pick(self._shardings.params, part), shardings_of(state)
        return compile_program(
            "update",
            update_function(self._optimizer),
            *(params, spec_of(state), accumulator_spec(params)),
            jax.ShapeDtypeStruct((), np.float32),
            jax.ShapeDtypeStruct((), np.bool_),
            in_shardings=(at_params, at_state, at_params, scalar, scalar),
            out_shardings=(at_params, at_state, at_params),
            donate=(0, 1, 2),
        )
