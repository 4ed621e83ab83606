"""A chunk's parameters, cut over the devices of its unit and made whole again.

All of a stage runs on one thread. What the operations keep for a chunk: ``uses``, how many tasks its parameters are
gathered for; ``cut``, the parts as they lie on the devices, where they are those in force; ``whole``, the shardings of
whole parameters.
"""

from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rrfp_jax.programs.shardings import shardings_of
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.operating import OperationContext


def gather(context: OperationContext) -> Any:
    """Make the chunk's parameters whole, unless they are."""
    kept, state = context.kept, context.state
    kept["uses"] = kept.get("uses", 0) + 1
    if kept["uses"] == 1 and "cut" in kept:
        params = jax.device_put(kept["cut"], kept["whole"])
        assert context.programs is not None
        state.params, state.derived = params, context.programs.prepare(params)
    return state.params


def gather_for_update(context: OperationContext) -> Any:
    """The same, for a task that replaces them."""
    kept, state = context.kept, context.state
    kept["uses"] = kept.get("uses", 0) + 1
    if "cut" in kept:
        state.params = jax.device_put(kept.pop("cut"), kept["whole"])
    return state.params


def drop(context: OperationContext) -> Any:
    """Leave of the chunk's parameters a part on every device, once nobody uses them."""
    kept, state = context.kept, context.state
    kept["uses"] -= 1
    if kept["uses"] == 0:
        if "cut" not in kept:
            kept["whole"] = shardings_of(state.params)
            kept["cut"] = jax.device_put(state.params, _cut(state, context.task.chunk))
        state.params, state.derived = kept["cut"], None
    return state.params


def _cut(state: ChunkState, chunk: int) -> Any:
    """Shardings that cut every array along its first axis that the devices divide; those without any stay whole.

    Raises ValueError where that is none.
    """
    num_cut = 0

    def cut(leaf: jax.Array) -> Any:
        nonlocal num_cut
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and sharding.is_fully_replicated:
            axes = sharding.mesh.axis_names
            num_devices = prod(sharding.mesh.shape.values())
            axis = next((a for a, size in enumerate(leaf.shape) if size % num_devices == 0 and size), None)
            if axis is not None and num_devices > 1:
                num_cut += 1
                return NamedSharding(sharding.mesh, PartitionSpec(*(None,) * axis, axes))  # type: ignore[no-untyped-call]
        return sharding

    shardings = jax.tree.map(cut, state.params)
    if not num_cut and jax.tree.leaves(state.params):
        raise ValueError(
            f"no parameter of chunk {chunk} is whole on several devices, so that none can be cut: give its stage more "
            "devices (layout with tensor of at least 2), or leave gathered out"
        )
    return shardings
