"""A small model with two encoders, and batches whose microbatches differ: in length, in images, in sounds.

Chunks: an image encoder, a sound encoder, a decoder that merges both and holds the embedding, a layer, and the loss.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import Edge

WIDTH, VOCABULARY = 8, 11
LENGTHS, NUM_IMAGES = (3, 5, 6), (0, 1, 2, 4)
EDGES = (Edge(0, 2, is_optional=True), Edge(1, 2, is_optional=True), Edge(2, 3), Edge(3, 4))


def dense(name: str, num_inputs: int = WIDTH) -> Any:
    def init(key: jax.Array) -> dict[str, Any]:
        return {name: {"kernel": 0.5 * jax.random.normal(key, (num_inputs, WIDTH)), "bias": jnp.zeros(WIDTH)}}

    return init


def apply_dense(layer: Any, value: Any) -> Any:
    return jnp.tanh(value @ layer["kernel"] + layer["bias"])


def encoder(name: str, leaf: str) -> Chunk:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return apply_dense(params[name], leaves[leaf])

    return Chunk(name=name, init=dense(name), apply=apply, leaves=(leaf,))


def merge(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    """Features take the place of the embeddings that an index names."""
    hidden = params["embedding"]["table"][leaves["tokens"]]
    for features, index in zip(inputs, ("image_index", "sound_index"), strict=True):
        if features is not None:
            places = leaves[index]
            hidden = jnp.where(places[:, None] >= 0, features[places], hidden)
    return apply_dense(params["merge"], hidden)


def init_merge(key: jax.Array) -> dict[str, Any]:
    table = jax.random.normal(key, (VOCABULARY, WIDTH))
    return {"embedding": {"table": table}, **dense("merge")(key)}


def layer(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    return inputs + apply_dense(params["layer"], inputs)


def loss(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    errors = jnp.sum((apply_dense(params["head"], inputs) - leaves["targets"]) ** 2)
    return errors, jnp.float32(inputs.shape[0])


CHUNKS = [
    encoder("image", "images"),
    encoder("sound", "sounds"),
    Chunk(
        name="merge",
        init=init_merge,
        apply=merge,
        leaves=("tokens", "image_index", "sound_index"),
        optional_leaves=frozenset({"image_index", "sound_index"}),
    ),
    Chunk(name="layer", init=dense("layer"), apply=layer),
    Chunk(name="head", init=dense("head"), apply=loss, leaves=("targets",)),
]


def make_microbatch(
    rng: np.random.Generator, length: int, num_images: int, *, has_sound: bool
) -> dict[str, np.ndarray]:
    microbatch = {
        "tokens": rng.integers(0, VOCABULARY, length).astype(np.int32),
        "targets": rng.normal(size=(length, WIDTH)).astype(np.float32),
    }
    if num_images:
        microbatch["images"] = rng.normal(size=(num_images, WIDTH)).astype(np.float32)
        microbatch["image_index"] = np.where(np.arange(length) < min(num_images, length - 1), np.arange(length), -1)
    if has_sound:
        microbatch["sounds"] = rng.normal(size=(2, WIDTH)).astype(np.float32)
        microbatch["sound_index"] = np.where(np.arange(length) == length - 1, 1, -1)
    return {name: leaf.astype(np.int32) if name.endswith("index") else leaf for name, leaf in microbatch.items()}


def as_batch(microbatches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, list[np.ndarray | None]]:
    """Leaves with an entry for each microbatch."""
    names = {name for microbatch in microbatches for name in microbatch}
    return {name: [microbatch.get(name) for microbatch in microbatches] for name in sorted(names)}


def make_steps(num_steps: int, num_microbatches: int, seed: int = 0) -> list[list[dict[str, np.ndarray]]]:
    """Microbatches of every step: the second step has no image and no sound at all, the third none in its second half,
    which is that of another replica."""
    rng = np.random.default_rng(seed)

    def draw(step: int, microbatch: int) -> dict[str, np.ndarray]:
        length, num_images, has_sound = int(rng.choice(LENGTHS)), int(rng.choice(NUM_IMAGES)), bool(rng.integers(2))
        is_text = step % 20 == 1 or (step % 20 == 2 and 2 * microbatch >= num_microbatches)
        return make_microbatch(rng, length, 0 if is_text else num_images, has_sound=has_sound and not is_text)

    return [[draw(step, microbatch) for microbatch in range(num_microbatches)] for step in range(num_steps)]


def all_buckets() -> list[dict[str, np.ndarray]]:
    """A microbatch of every shape."""
    rng = np.random.default_rng(0)
    return [
        make_microbatch(rng, length, num_images, has_sound=has_sound)
        for length in LENGTHS
        for num_images in NUM_IMAGES
        for has_sound in (False, True)
    ]


def train_plainly(
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    steps: Sequence[Sequence[Mapping[str, Any]]],
    *,
    clip_norm: float | None = None,
    frozen: Collection[str] = (),
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and the final parameters of the unpipelined model."""
    if clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    params, still = (
        {name: layer for name, layer in params.items() if (name in frozen) == is_frozen} for is_frozen in (False, True)
    )

    def loss_of(params: Any, microbatch: Mapping[str, Any]) -> Any:
        params = params | jax.tree.map(jnp.asarray, still)
        features = [
            apply_dense(params[name], microbatch[leaf]) if leaf in microbatch else None
            for name, leaf in (("image", "images"), ("sound", "sounds"))
        ]
        hidden = merge(params, tuple(features), microbatch, key=None)
        return loss(params, layer(params, hidden, {}, key=None), microbatch, key=None)

    gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    @jax.jit
    def update(params: Any, state: Any, grads: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda grad: grad / weight, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    params = jax.tree.map(np.array, dict(params))
    state, losses, norms = optimizer.init(params), [], []
    for microbatches in steps:
        total = weight = 0.0
        grads = jax.tree.map(np.zeros_like, params)
        for microbatch in microbatches:
            (summed, own), grad = gradient(params, microbatch)
            total, weight = total + float(summed), weight + float(own)
            grads = jax.tree.map(np.add, grads, grad)
        params, state, norm = update(params, state, grads, weight)
        losses.append(total / weight)
        norms.append(float(norm))
    return losses, norms, params | still
