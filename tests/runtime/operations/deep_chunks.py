"""A model whose chunks keep much more of a microbatch than their input; trained on batches made here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline

ROWS, WIDTH, HIDDEN, NUM_MICROBATCHES = 16, 8, 64, 6


def make_chunks(number: int) -> list[Chunk]:
    return [_block(index, number) for index in range(number)]


def _block(index: int, number: int) -> Chunk:
    name = f"blocks.{index}"

    def init(key: jax.Array) -> dict[str, Any]:
        up, down = jax.random.split(jax.random.fold_in(key, index))
        return {
            name: {
                "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
                "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
            }
        }

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        hidden = inputs if index else leaves["x"]
        own = params[name]
        output = hidden + jax.nn.gelu(jnp.sin(hidden @ own["up"])) @ own["down"]
        if index < number - 1:
            return output
        return jnp.sum((output - leaves["y"]) ** 2), jnp.float32(output.shape[0])

    ends = (("x",) if index == 0 else ()) + (("y",) if index == number - 1 else ())
    return Chunk(name=name, init=init, apply=apply, leaves=ends)


def make_batch() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(NUM_MICROBATCHES, ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def pipeline(number: int = 3, **options: Any) -> Any:
    options = {"placement": linear(number), "clip_norm": 1.0, "deterministic": True} | options
    return make_pipeline(make_chunks(number), optimizer=optax.adam(1e-2), **options)


def train(pipeline: Any, num_steps: int = 3) -> tuple[list[float], Any, Any]:
    """Losses, final parameters, and the last step's result."""
    batch = make_batch()
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        results = []
        for _ in range(num_steps):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        return [r.loss for r in results], jax.tree.map(np.array, pipeline.params(state)), results[-1]


def assert_same_bits(one: tuple[list[float], Any, Any], other: tuple[list[float], Any, Any]) -> None:
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])
