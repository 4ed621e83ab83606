"""XLA times kernels on a GPU while it compiles for it, so nothing else is compiled for that GPU meanwhile."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.runtime import model as hosted
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear

NUM_CHUNKS, WIDTH = 4, 3


def chunk(index: int) -> Chunk:
    """Squares what it gets; the first reads the batch, the last one sums."""

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        x = (leaves["x"] if inputs is None else inputs) * params[f"scale_{index}"]
        return (jnp.sum(x), jnp.float32(x.size)) if index == NUM_CHUNKS - 1 else x * x

    return Chunk(
        name=f"chunk {index}",
        init=lambda key: {f"scale_{index}": jnp.ones(WIDTH)},
        apply=apply,
        leaves=("x",) if index == 0 else (),
    )


class Watched(CompiledChunk):
    """Tells the devices for which chunks are compiled at the same time."""

    lock, now = threading.Lock(), []  # type: ignore[var-annotated]
    together: list[list[set[Any]]] = []  # noqa: RUF012

    def __init__(self, *args: Any, sharding: Any, **options: Any) -> None:
        with self.lock:
            self.now.append(sharding.device_set)
            self.together.append(list(self.now))
        time.sleep(0.2)  # long enough for others to begin
        super().__init__(*args, sharding=sharding, **options)
        with self.lock:
            self.now.remove(sharding.device_set)


@pytest.mark.parametrize("times_kernels", [True, False])
def test_a_gpu_has_one_compilation_at_a_time(monkeypatch: pytest.MonkeyPatch, times_kernels: bool) -> None:
    monkeypatch.setattr(hosted, "times_kernels", lambda device: times_kernels)
    monkeypatch.setattr(hosted, "CompiledChunk", Watched)
    monkeypatch.setattr(Watched, "together", [])
    first, second = jax.devices()[:2]
    process = Process(Layout(num_stages=NUM_CHUNKS), devices=[first, second, first, second])
    chunks, batch = [chunk(index) for index in range(NUM_CHUNKS)], {"x": np.ones((2, 1, WIDTH), np.float32)}
    with Pipeline(chunks, placement=linear(NUM_CHUNKS), optimizer=optax.sgd(0.1), process=process) as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline.prepare(batch)
    assert max(map(len, Watched.together)) > 1, "chunks of different devices are compiled at the same time"
    shared = [devices for devices in Watched.together if len(set.union(*devices)) < len(devices)]
    assert not times_kernels or not shared
