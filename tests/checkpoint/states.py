"""Models of a few toy layers, cut anywhere, with states that are known element by element."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding, SingleDeviceSharding

from rrfp_jax.checkpoint import Checkpoints, ChunkLayers, Owner
from rrfp_jax.checkpoint._arrays import ArrayName
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import pick
from rrfp_jax.programs.state import ChunkState, layer_groups

LAYERS = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "final_norm", "head")
Pieces = list[tuple[ChunkLayers, ChunkState]]


def params_of(layer: str) -> Any:
    """Nested trees, a bare array, several dtypes, and an array without elements."""
    if layer == "final_norm":
        return jnp.ones(6)
    if layer == "layers.1":
        return {"mlp": {"up": jnp.ones((6, 8), jnp.bfloat16), "bias": jnp.ones(8), "none": jnp.ones((0, 4))}}
    if layer.startswith("layers."):
        return {"mlp": {"up": jnp.ones((6, 8)), "bias": jnp.ones(8)}, "scales": [jnp.ones(6), jnp.ones(())]}
    return {"table": jnp.ones((16, 6))}


def chunk_of(layers: Sequence[str], shared: frozenset[str] = frozenset()) -> Chunk:
    return Chunk(
        name=" ".join(layers),
        init=lambda key: {layer: params_of(layer) for layer in layers},
        apply=lambda params, inputs, leaves, *, key: inputs,
        shared=shared & frozenset(layers),
    )


def cut_at(*places: int) -> list[tuple[str, ...]]:
    bounds = [0, *places, len(LAYERS)]
    return [LAYERS[first:last] for first, last in pairwise(bounds)]


def pieces_of(
    cut: Sequence[Sequence[str]],
    optimizer: optax.GradientTransformation,
    shardings: Sequence[Sharding] | None = None,
    shared: frozenset[str] = frozenset(),
) -> Pieces:
    """Untrained states of the chunks of a cut, on devices of their own unless shardings are given."""
    shardings = shardings or [SingleDeviceSharding(device) for device in jax.devices()]
    pieces = []
    for layers, sharding in zip(cut, shardings, strict=False):
        chunk = chunk_of(layers, shared)
        params = jax.device_put(chunk.init(jax.random.key(0)), sharding)
        state = tuple(
            jax.device_put(optimizer.init(pick(params, part)), sharding) for part in layer_groups(chunk, params)
        )
        pieces.append((ChunkLayers(chunk, optimizer), ChunkState(params, state, jax.tree.map(jnp.zeros_like, params))))
    return pieces


def trained(pieces: Pieces, step: int = 1) -> Pieces:
    """The states with other numbers in every array, which depend on its name and the step only."""
    return [(layers, layers.join(_numbers(layers.split(state), step), state)) for layers, state in pieces]


def _numbers(leaves: dict[ArrayName, Any], step: int) -> dict[ArrayName, jax.Array]:
    return {name: jax.device_put(_number(name, leaf, step), leaf.sharding) for name, leaf in leaves.items()}


def _number(name: ArrayName, leaf: jax.Array, step: int) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(step), leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return np.full(leaf.shape, step, leaf.dtype)
    # What layers have in common is equal in all of them.
    own = name[1:] if name[1] == "optimizer" else name
    return np.random.default_rng([step, *"/".join(own).encode()]).standard_normal(leaf.shape).astype(leaf.dtype)


def bits(pieces: Pieces) -> dict[ArrayName, bytes]:
    """All elements of all states by name."""

    def data(leaf: jax.Array) -> bytes:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return {name: data(leaf) for layers, state in pieces for name, leaf in layers.split(state).items()}


def owners_of(pieces: Pieces) -> dict[str, Owner]:
    """One process owns everything, and of several copies the first one counts."""
    owners: dict[str, Owner] = {}
    for layers, state in pieces:
        for name, leaf in layers.split(state).items():
            device = min(leaf.sharding.device_set, key=lambda d: d.id)
            owners.setdefault(name[0], Owner(ranks=(0,), device=device))
    return owners


def opened(directory: Path, pieces: Pieces, **options: Any) -> Checkpoints:
    return Checkpoints(directory, owners_of(pieces), **options)


def save(checkpoints: Checkpoints, step: int, pieces: Pieces) -> str | None:
    """Save and wait; why the step was not committed."""
    checkpoints.save(step, trained(pieces, step), {"step": step})
    saved = checkpoints.wait()
    assert saved is not None
    assert saved.step == step
    return saved.failure


def restored(checkpoints: Checkpoints, pieces: Pieces, step: int | None = None) -> Pieces:
    """The state of a step, by default the newest, in the shardings of ``pieces``."""
    found = checkpoints.newest() if step is None else checkpoints.find(step)
    assert found is not None
    assert found.host == {"step": found.step}
    states = checkpoints.restore(found, pieces)
    return [(layers, state) for (layers, _), state in zip(pieces, states, strict=True)]


def newest_step(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.newest()
    return None if found is None else found.step
