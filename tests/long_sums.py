"""A model whose weight gradients sum over 8,192 rows, where CPU thread pools show; trained in this or another process.

``python -m tests.long_sums NUM_DEVICES HINT`` prints a digest of losses and parameters after ten steps.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

NUM_ROWS, WIDTH, NUM_MICROBATCHES, NUM_STAGES = 8192, 16, 4, 3


def make_chunks() -> list[Any]:
    import jax
    import jax.numpy as jnp

    from rrfp_jax.programs.chunk import Chunk

    def layer(index: int) -> Chunk:
        name = f"layers.{index}"

        def init(key: jax.Array) -> dict[str, Any]:
            kernel = jax.random.normal(jax.random.fold_in(key, index), (WIDTH, WIDTH)) / WIDTH**0.5
            return {name: {"kernel": kernel, "bias": jnp.zeros(WIDTH)}}

        def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
            hidden = inputs if index else leaves["x"]
            output = jnp.tanh(hidden @ params[name]["kernel"] + params[name]["bias"])
            if index < NUM_STAGES - 1:
                return output
            return jnp.sum((output - leaves["y"]) ** 2), jnp.float32(NUM_ROWS)

        leaves = {0: ("x",), NUM_STAGES - 1: ("y",)}.get(index, ())
        return Chunk(name=name, init=init, apply=apply, leaves=leaves)

    return [layer(index) for index in range(NUM_STAGES)]


def make_batch() -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_MICROBATCHES, NUM_ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def train(
    pipeline: Any, num_steps: int, on_result: Callable[[Any], object] = lambda result: None
) -> tuple[list[float], dict[str, Any]]:
    """Losses and final parameters of ``num_steps`` steps."""
    import jax
    import numpy as np

    batch = make_batch()
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        results = []
        for _ in range(num_steps):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        for metrics in results:
            on_result(metrics.result())
        return [m.result().loss for m in results], jax.tree.map(np.array, pipeline.params(state))


def make_pipeline(**options: Any) -> Any:
    import optax

    from rrfp_jax.schedules import linear
    from tests import pipelines

    options = {"placement": linear(NUM_STAGES), "clip_norm": 1.0} | options
    return pipelines.make_pipeline(make_chunks(), optimizer=optax.adam(1e-2), **options)


def digest(losses: list[float], params: Any) -> str:
    import jax
    import numpy as np

    content = hashlib.sha256(np.array(losses).tobytes())
    for leaf in jax.tree.leaves(params):
        content.update(np.asarray(leaf).tobytes())
    return content.hexdigest()


def main(num_devices: int, hint: str) -> None:
    from rrfp_jax.commands.common.process import use_cpu

    use_cpu(num_devices, pinned=True)
    print(digest(*train(make_pipeline(hint=hint, deterministic=True), 10)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
