"""Takes the state of a chunk apart into layers, and puts it together again.

A layer's optimizer state is the state that the optimizer would have for a model of this layer alone. As every optimizer
here acts leaf by leaf, that is well defined, and so the state of any chunk follows from those of its layers: an array
of the chunk's state belongs to the layers whose own states have an array at the same path. Moments are found in one
layer; counts are found in all of them, are equal in all, and are kept with each.

``optax.tree_utils.tree_map_params`` finds the same arrays (the tests compare the two), but it shows the optimizer
placeholders instead of parameters, and masks and labels that go by a layer's name or an array's shape fail on these.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from rrfp_jax.checkpoint._arrays import (
    OPTIMIZER,
    PARAMS,
    ArrayName,
    is_random_key,
    layer_of_replica,
    leaf_name,
    named_leaves,
    sharded_zeros,
    shown_name,
)
from rrfp_jax.programs.chunk import Chunk, param_specs, trained_specs
from rrfp_jax.programs.optimizers import of_whole_layers
from rrfp_jax.programs.shapes import Specs, spec_text
from rrfp_jax.programs.stage_devices import shards_of
from rrfp_jax.programs.state import ChunkState, state_parts

# For every array of a part's optimizer state, the names that keep it: one for each layer that it belongs to.
_PartPlan = tuple[tuple[ArrayName, ...], ...]
_REMEDY = "a checkpoint keeps optimizer state by layer, so it must look alike for one layer and for several"


class ChunkLayers:
    """Takes the state of one chunk apart by layer, and puts it together.

    Args:
        chunk: the chunk.
        optimizer: the optimizer that the chunk's update runs.
        trains: False for a chunk none of whose layers train; it has no optimizer state.
        num_shares: into how many shares of whole arrays the state is cut, of which the states at hand may lack some.
        replica: the replica of which these are the layers, where each has its own.

    Raises ValueError for an optimizer whose state for several layers is not made of its states for each of them.
    """

    def __init__(
        self,
        chunk: Chunk,
        optimizer: optax.GradientTransformation,
        *,
        trains: bool = True,
        num_shares: int = 1,
        replica: int = 0,
    ) -> None:
        specs = param_specs(chunk)
        self._named = {layer: layer_of_replica(layer, replica) for layer in specs}
        self.names = tuple(self._named.values())
        """The chunk's layers, frozen ones included, and its parts of layers."""
        optimizer = of_whole_layers(optimizer)
        parts = state_parts(chunk, trained_specs(chunk), optimizer, num_shares) if trains else ()
        self._plans = tuple(_plan_part(optimizer, part.pick(specs), self._named) for part in parts)

    def split(self, state: ChunkState) -> dict[ArrayName, Any]:
        """Returns every array (or spec) of parameters and optimizer state by name; nothing is copied."""
        leaves = {
            (named, PARAMS, *name): leaf
            for layer, named in self._named.items()
            for name, leaf in named_leaves(state.params[layer]).items()
        }
        for plan, part in zip(self._plans, state.optimizer_state, strict=True):
            for names, leaf in zip(() if part is None else plan, jax.tree.leaves(part), strict=True):
                leaves |= dict.fromkeys(names, leaf)
        return leaves

    def join(self, leaves: Mapping[ArrayName, Any], target: ChunkState) -> ChunkState:
        """Returns the state with the structure of ``target`` that :meth:`split` takes apart into ``leaves``.

        ``target`` has arrays or specs with shardings; accumulators become zeros. A spec in ``leaves`` stays one. Raises
        ValueError if layers disagree on an array that they have in common, such as the number of updates.
        """
        params = {}
        for layer, named in self._named.items():
            names = [(named, PARAMS, *name) for name in named_leaves(target.params[layer])]
            params[layer] = jax.tree.unflatten(
                jax.tree.structure(target.params[layer]), [leaves[name] for name in names]
            )
        taken: set[int] = set()

        def own_leaf(names: tuple[ArrayName, ...]) -> Any:
            leaf = _common_leaf(names, leaves)
            if id(leaf) in taken and isinstance(leaf, jax.Array):
                return leaf.copy()  # Two shares of a layer have it, and the update of each consumes its own.
            taken.add(id(leaf))
            return leaf

        optimizer_state = tuple(
            None if part is None else jax.tree.unflatten(jax.tree.structure(part), map(own_leaf, plan))
            for plan, part in zip(self._plans, target.optimizer_state, strict=True)
        )
        return ChunkState(params, optimizer_state, jax.tree.map(sharded_zeros, target.accumulators))


def _plan_part(
    optimizer: optax.GradientTransformation, params: Mapping[str, Specs], named: Mapping[str, str]
) -> _PartPlan:
    """Returns the names of every array of the optimizer's state for these layers, found by paths that are the same in
    the state for one layer alone. ``named`` has the name of each layer in these."""

    def state_by_path(params: dict[str, Specs]) -> dict[tuple[Any, ...], Any]:
        return dict(jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, params)))

    layers = {name: state_by_path({name: layer}) for name, layer in params.items()}
    whole = state_by_path(dict(params))
    plan = []
    for path, leaf in whole.items():
        own = {layer: state[path] for layer, state in layers.items() if path in state}
        for layer, alone in own.items():
            if (alone.shape, alone.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"the optimizer's state {jax.tree_util.keystr(path)} is {spec_text(alone)} for {layer} and "
                    f"{spec_text(leaf)} for {len(layers)} layers: {_REMEDY}"
                )
        if not own:
            raise ValueError(
                f"the optimizer's state {jax.tree_util.keystr(path)} belongs to no single layer: {_REMEDY}"
            )
        plan.append(tuple((named[layer], OPTIMIZER, *leaf_name(path)) for layer in own))
    missing = {path for alone in layers.values() for path in alone} - whole.keys()
    if missing:
        raise ValueError(
            f"the optimizer's state for one layer has {jax.tree_util.keystr(min(missing, key=str))}, its state for "
            f"{', '.join(params)} has not: {_REMEDY}"
        )
    return tuple(plan)


def _common_leaf(names: tuple[ArrayName, ...], leaves: Mapping[ArrayName, Any]) -> Any:
    """Returns the array that several layers keep, or a spec if none has one; raises ValueError if they differ."""
    known = [name for name in names if not isinstance(leaves[name], jax.ShapeDtypeStruct)] or names[:1]
    contents = []
    for name in known if len(known) > 1 else ():
        data = jax.random.key_data(leaves[name]) if is_random_key(leaves[name]) else leaves[name]
        contents.append([np.asarray(shard.data).tobytes() for shard in shards_of(data)])
    for name, content in zip(known, contents, strict=False):
        if content != contents[0]:
            raise ValueError(
                f"the layers of the checkpoint do not belong together: {shown_name(known[0])} and {shown_name(name)} "
                "differ"
            )
    return leaves[known[0]]
