"""A rank of 2 stages in 2 replicas that trains a small model, one of which is struck dead in the middle.

``survivor FOLDER STEPS VICTIM STEP DELAY_S [VICTIM STEP] [deterministic]``: a time after rank VICTIM has begun STEP it
kills itself; -1: none does. With a second victim there is one stage of 4 replicas, which share the optimizer state.
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from rrfp_jax import Pipeline, linear
from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.process import enter
from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.runtime.options import UpdateRules

NUM_MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 16, 64
MODEL = LanguageModelConfig(vocab_size=VOCABULARY, hidden=32, num_layers=2, num_heads=4, mlp_dim=64)


def make_pipeline(num_stages: int = 2, **more: Any) -> Pipeline:
    return Pipeline(
        language_model(MODEL).split(num_chunks=num_stages),
        placement=linear(num_stages),
        ordering=Ordering(hint="bf", window=NUM_MICROBATCHES),
        optimizer=optax.adamw(1e-3, eps=1e-6),
        **more,
    )


def make_batch(step: int) -> dict[str, np.ndarray]:
    rows = np.random.default_rng(step).integers(0, VOCABULARY, (NUM_MICROBATCHES, ROWS, LENGTH + 1), np.int32)
    weights = np.ones((NUM_MICROBATCHES, ROWS, LENGTH), np.float32)
    return {"tokens": rows[..., :-1], "targets": rows[..., 1:], "weights": weights}


def train(pipeline: Pipeline, num_steps: int, before: Any = lambda step: None) -> tuple[list[float], Any]:
    """Returns the losses, and the parameters that lie here by chunk."""
    state, losses = pipeline.init(jax.random.key(0)), []
    for step in range(num_steps):
        before(step)
        state, metrics = pipeline.step(state, make_batch(step))
        losses.append(metrics.result().loss)
    return losses, {chunk: jax.tree.map(np.asarray, held.params) for chunk, held in pipeline.chunk_states(state)}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    is_deterministic = sys.argv[-1] == "deterministic"
    sys.argv = [*filter("deterministic".__ne__, sys.argv)]
    folder, num_steps, numbers = Path(sys.argv[1]), int(sys.argv[2]), [*map(int, sys.argv[3:5] + sys.argv[6:8])]
    strikes, num_stages = {*zip(numbers[::2], numbers[1::2], strict=True)}, 2 if len(numbers) == 2 else 1
    process = enter(
        num_stages=num_stages,
        data=4 // num_stages,
        configuration={},
        cluster=ClusterConfig(),
        platform="cpu",
        sums_by_messages=True,
    )
    assert process.device_kinds == ["cpu"] * 4
    compiled: list[int] = []

    def count(name: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in name:
            compiled[-1:] = [sum(compiled) + 1]

    jax.monitoring.register_event_duration_secs_listener(count)

    def begin(step: int) -> None:
        mark()
        if step == 2:
            print(f"ready {process.rank}", flush=True)
        if (process.rank, step) in strikes:
            threading.Timer(float(sys.argv[5]), os.kill, [os.getpid(), signal.SIGKILL]).start()

    def mark() -> None:
        marks.append((time.perf_counter(), sum(compiled)))

    marks: list[tuple[float, int]] = []
    rules = UpdateRules(reduce="messages", shard_optimizer=num_stages == 1, deterministic=is_deterministic)
    pipeline = make_pipeline(num_stages, process=process, updates=rules)
    losses, params = train(pipeline, num_steps, begin)
    mark()
    (folder / f"rank{process.rank}").write_bytes(pickle.dumps((losses, params, marks)))
    process.finish()


if __name__ == "__main__":
    main()
