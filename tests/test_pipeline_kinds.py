"""Chunks of one kind share their programs: 32 chunks compile what 4 do, and train the bits that chunks alone train."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import ApplyLayers, Chunk, InitLayers
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear, looped
from tests.pipelines import make_pipeline

CONFIG = LanguageModelConfig(vocab_size=32, hidden=8, num_layers=4, num_heads=2, mlp_dim=16, init_std=0.1)
WIDTH = 4

START = """
import json, time
import jax

jax.devices()
from tests.test_pipeline_kinds import start

start(4, hidden=16)
told = {}
for num_chunks in (4, 32):
    before = time.process_time()
    start(num_chunks, hidden=96)
    told[num_chunks] = time.process_time() - before
print(json.dumps(told))
"""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often XLA is asked to compile, or the cache to load, within the block."""
    counts: Counter[str] = Counter()
    is_open = True

    def count(event: str, _: float, **__: Any) -> None:
        counts[event] += is_open

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counts
    is_open = False


def num_compiled(counts: Counter[str]) -> int:
    return counts["/jax/core/compile/backend_compile_duration"]


def make_batch(num_microbatches: int = 3) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(0), (num_microbatches, 2, 8)
    return {
        "tokens": rng.integers(0, 32, shape, dtype=np.int32),
        "targets": rng.integers(0, 32, shape, dtype=np.int32),
        "weights": np.ones(shape, np.float32),
    }


def start(num_chunks: int, **changes: int) -> int:
    """Start a model with a layer in each chunk, all in one place; how many programs were compiled or loaded."""
    chunks = language_model(replace(CONFIG, num_layers=num_chunks, **changes)).split(num_chunks)
    with counting() as counts:
        pipeline = make_pipeline(chunks, placement=looped(1, num_chunks), optimizer=optax.adamw(0.01), clip_norm=1.0)
        with pipeline:
            pipeline.init(jax.random.key(0))
            pipeline.prepare(make_batch())
    return num_compiled(counts)


@pytest.mark.slow
def test_thirty_two_chunks_compile_what_four_do() -> None:
    start(4)  # zeros and the like are compiled once in a process
    few = start(4)
    assert start(32) == few
    # init of embedding, layer, norm and head; of first, middle and last: init of the optimizer, forward, backward,
    # reduce, update
    assert few <= 4 + 3 * 5


@pytest.mark.slow
def test_the_processor_time_of_a_start_hardly_grows_with_equal_chunks() -> None:
    told = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "RRFP_COMPILE_CACHE": "none", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    seconds = json.loads(told.stdout)
    print(seconds)
    assert seconds["32"] <= 1.5 * seconds["4"]


def trained(chunks: Sequence[Chunk], **options: Any) -> tuple[list[float], Any, int]:
    """Losses of two steps, the parameters after them, and how many programs that took."""
    with counting() as counts:
        pipeline = make_pipeline(
            chunks, **({"optimizer": optax.adamw(0.01), "placement": linear(len(chunks)), "clip_norm": 1.0} | options)
        )
        with pipeline:
            state, losses = pipeline.init(jax.random.key(3)), []
            for _ in range(2):
                state, metrics = pipeline.step(state, make_batch(4))
                losses.append(metrics.result().loss)
            return losses, jax.tree.map(np.asarray, pipeline.params(state)), num_compiled(counts)


def alone(chunk: Chunk) -> Chunk:
    """The chunk as a kind of its own."""
    init, apply, own = chunk.init, chunk.apply, object()
    assert isinstance(init, InitLayers)  # whose layers know their own numbers, so that all begin with the same values

    def init_alone(key: Any, *, numbers: Any) -> Any:
        return init.function(key, numbers=numbers) if own else {}

    def apply_alone(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        assert own
        return apply(params, inputs, leaves, key=key)

    return replace(chunk, init=InitLayers(init_alone, init.names, init.numbers), apply=apply_alone)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_shared_programs_train_the_bits_of_programs_for_each_chunk(split: bool) -> None:
    chunks = language_model(CONFIG).split(4)
    options: dict[str, Any] = {"backward": "split"} if split else {}
    one = Process(Layout(num_stages=4), devices=jax.devices()[:1] * 4)
    trained(chunks, process=one, **options)  # zeros and the like are compiled once in a process
    losses, params, shared = trained(chunks, process=one, **options)
    expected_losses, expected, apart = trained([alone(chunk) for chunk in chunks], process=one, **options)
    assert losses == expected_losses
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert shared < apart


def random_layer(layer: int, num_layers: int) -> Chunk:
    """A layer with dropout, whose number comes in as data."""

    def init(key: jax.Array, *, numbers: Any) -> Any:
        return {"layer": jax.random.normal(jax.random.fold_in(key, numbers["layer"]), (WIDTH, WIDTH))}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any, numbers: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(key, numbers["layer"]), 0.5, (2, WIDTH))
        x = inputs if inputs is not None else jnp.ones((2, WIDTH)) * leaves["weights"][:, :1]
        y = jnp.tanh(x @ params["layer"]) * kept
        return (jnp.sum(y**2), jnp.float32(1)) if is_last else y

    is_last, numbers = layer == num_layers - 1, {"layer": np.uint32(layer)}
    names = {"layer": f"layers.{layer}"}
    return Chunk(
        name=f"layer {layer}",
        init=InitLayers(init, names, numbers),
        apply=ApplyLayers(apply, names, numbers),
        leaves=() if layer else ("weights",),
        uses_key=True,
    )


def test_thirty_two_random_layers_compile_what_four_do() -> None:
    counts = []
    for num_layers in (4, 4, 32):
        placement = looped(1, num_layers)
        *_, compiled = trained([random_layer(layer, num_layers) for layer in range(num_layers)], placement=placement)
        counts.append(compiled)
    assert counts[1] == counts[2]
    # of first, middle and last: init, forward, backward, reduce, update; and of all, as their shapes are the same,
    # one init of the optimizer
    assert counts[1] <= 3 * 5 + 1


def constant_layer(layer: int, num_layers: int) -> Chunk:
    """The same with its number as a constant of its program."""
    chunk = random_layer(layer, num_layers)
    init: Any = chunk.init
    return replace(
        chunk,
        init=InitLayers(lambda key, *, numbers: init.function(key, numbers=init.numbers), init.names),
        apply=lambda params, inputs, leaves, *, key: chunk.apply(params, inputs, leaves, key=key) if layer >= 0 else 0,
    )


def test_layer_numbers_come_in_as_data() -> None:
    one = Process(Layout(num_stages=5), devices=jax.devices()[:1] * 5)
    losses, params, shared = trained([random_layer(layer, 5) for layer in range(5)], process=one)
    expected_losses, expected, apart = trained([constant_layer(layer, 5) for layer in range(5)], process=one)
    assert losses == expected_losses
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert not np.array_equal(params["layers.1"], params["layers.2"])
    assert apart - shared >= 2 * 3  # init, forward and backward of two of the three layers in the middle
