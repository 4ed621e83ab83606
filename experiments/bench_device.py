"""Measure the cost of a pipeline on one device, beside a plain jitted loop that trains the same model there.

::

    python -m experiments.bench_device                 # a CPU device, cpu/debug
    python -m experiments.bench_device --accelerator   # a larger model there

The loop launches one program per microbatch, which adds the gradients of the whole model to accumulators, and one for
clipping and update. The pipeline has four stages on the same device, a table or a hint for their order. Both train on
the same batches, a step of each in turn; medians are printed, and how long the device had nothing to run in between.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import start_alone, use_cpu
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.core import Ordering
from rrfp_jax.layout import Layout
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear
from rrfp_jax.schedules.timeline import Timeline

NUM_STAGES, CLIP_NORM, LEARNING_RATE = 4, 1.0, 1e-3
_DEBUG = Path(__file__).parents[1] / "tpu_gpu_configs/cpu/debug.yaml"
_ORDERS = {"pipeline, bf": Ordering(hint="bf", window=4), "pipeline, bfw": Ordering(hint="bfw", window=4)}
_LARGE = LanguageModelConfig(
    vocab_size=32_000, hidden=2048, num_layers=8, num_heads=16, mlp_dim=5632, compute_dtype="bfloat16"
)
"""Its kernels take several times as long as their launches, as those of models do that need a pipeline."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    if not arguments.accelerator:
        use_cpu(1)
    else:
        with checking_input():
            start_alone(None)
        if jax.default_backend() == "cpu":
            raise BadInput("JAX finds no accelerator here: leave --accelerator out, or install JAX for yours")
    bench_device(make_console(), arguments.steps)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_device", __doc__)
    parser.add_argument("--accelerator", action="store_true", help="the first GPU or TPU instead of a CPU device")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of each that count")
    return parser


def bench_device(console: Console, num_steps: int = 10) -> None:
    """Prints step times on JAX's first device, and how long it was idle between tasks."""
    device = jax.local_devices()[0]
    config, shape = _setting(device)
    batch = _batch(config.vocab_size, *shape)
    pipelines = {name: _pipeline(config, order, device) for name, order in _ORDERS.items()}
    states = {name: pipeline.init(jax.random.key(0)) for name, pipeline in pipelines.items()}
    first, *_ = pipelines
    params = jax.tree.map(jnp.copy, pipelines[first].params(states[first]))
    runs: dict[str, Callable[[], Timeline | None]] = {}
    runs["one jitted program per microbatch"] = _plain(config, params, batch)
    runs |= {name: _steps(pipeline, states[name], batch) for name, pipeline in pipelines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    idle: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(num_steps + 2):  # two for warming up
        for name, run in runs.items():
            started_s = time.perf_counter()
            timeline = run()
            if step >= 2:
                seconds[name].append(time.perf_counter() - started_s)
                idle[name] += [idle_share(timeline)] if timeline else []
    _show(console, f"{device.device_kind}, {shape[0]} microbatches of {shape[1]} x {shape[2]} tokens", seconds, idle)
    for pipeline in pipelines.values():
        pipeline.close()


def idle_share(timeline: Timeline) -> float:
    """Returns the fraction of the makespan in which the device that all stages share ran no task."""
    spans = sorted((span.start_s, span.end_s) for span in timeline.spans)
    busy_s, free_s = 0.0, spans[0][0]
    for start_s, end_s in spans:
        busy_s += max(0.0, end_s - max(start_s, free_s))
        free_s = max(free_s, end_s)
    return 1 - busy_s / (free_s - spans[0][0])


def _setting(device: jax.Device) -> tuple[LanguageModelConfig, tuple[int, int, int]]:
    """Returns the model and a batch's sizes: microbatches, rows of each, and tokens of each row."""
    if device.platform != "cpu":
        return _LARGE, (16, 2, 2048)
    debug = load_train_config(str(_DEBUG), {})
    data = debug.data
    return debug.model, (data.num_microbatches, data.microbatch_size, 128)


def _batch(vocab_size: int, num_microbatches: int, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(vocab_size, size=(num_microbatches, rows, length + 1), dtype=np.int32)
    weights = np.ones((num_microbatches, rows, length), np.float32)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


def _plain(config: LanguageModelConfig, params: Any, batch: Mapping[str, np.ndarray]) -> Callable[[], None]:
    (chunk,) = language_model(config).split(num_chunks=1)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE))
    state = {"params": params, "optimizer": optimizer.init(params), "sums": jax.tree.map(jnp.zeros_like, params)}

    def loss_of(params: Any, leaves: Any) -> tuple[Any, Any]:
        return chunk.apply(params, None, leaves, key=None)

    def accumulate(sums: Any, params: Any, leaves: Any) -> tuple[Any, Any, Any]:
        (loss, weight), grads = jax.value_and_grad(loss_of, has_aux=True)(params, leaves)
        return jax.tree.map(jnp.add, sums, grads), loss, weight

    def update(params: Any, optimizer_state: Any, sums: Any, weight: Any) -> tuple[Any, Any, Any]:
        grads = jax.tree.map(lambda total: total / weight, sums)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, jax.tree.map(jnp.zeros_like, sums)

    accumulate_once, update_once = jax.jit(accumulate, donate_argnums=0), jax.jit(update, donate_argnums=(0, 1, 2))

    def step() -> None:
        sums, told = state["sums"], []
        for microbatch in range(len(batch["tokens"])):
            leaves = {name: leaf[microbatch] for name, leaf in batch.items()}
            sums, *loss_and_weight = accumulate_once(sums, state["params"], leaves)
            told.append(loss_and_weight)
        weight = np.float32(sum(float(weight) for _, weight in told))
        changed = update_once(state["params"], state["optimizer"], sums, weight)
        state.update(zip(("params", "optimizer", "sums"), jax.block_until_ready(changed), strict=True))

    return step


def _pipeline(config: LanguageModelConfig, ordering: Ordering, device: jax.Device) -> Pipeline:
    return Pipeline(
        language_model(config).split(num_chunks=NUM_STAGES),
        placement=linear(NUM_STAGES),
        process=Process(Layout(num_stages=NUM_STAGES), devices=[device] * NUM_STAGES),
        optimizer=optax.adamw(LEARNING_RATE),
        ordering=ordering,
        updates=UpdateRules(clip_norm=CLIP_NORM),
    )


def _steps(pipeline: Pipeline, state: Any, batch: Mapping[str, np.ndarray]) -> Callable[[], Timeline]:
    states = [state]

    def step() -> Timeline:
        state, metrics = pipeline.step(states.pop(), batch)
        states.append(state)
        return metrics.result().timeline

    return step


def _show(console: Console, title: str, seconds: Mapping[str, list[float]], idle: Mapping[str, list[float]]) -> None:
    table = Table(title=f"{NUM_STAGES} stages on one device ({title}): medians of steps in turn", title_justify="left")
    for heading in ("", "ms per step", "ratio", "device idle"):
        table.add_column(heading, justify="right" if heading else "left")
    plain_s = median(next(iter(seconds.values())))
    for name, values in seconds.items():
        share = f"{median(idle[name]):.1%}" if idle[name] else ""
        table.add_row(name, f"{median(values) * 1e3:.1f}", f"{median(values) / plain_s:.3f}", share)
    console.print(table)


if __name__ == "__main__":
    run_command(main)
