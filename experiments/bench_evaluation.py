"""Time that evaluations add to training: between steps, and beside them where stages would idle.

A small model trains through the real runtime, on stages that sleep before each task: as long for F, I and W, twice as
long for B. One evaluation of several batches comes with every :data:`EVERY` steps. Runs without, with evaluations
between steps, and with evaluations in idle time take turns, so that a slow moment of the machine hits all of them
alike; medians are printed.

::

    python -m experiments.bench_evaluation
"""

import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, Task, TaskKind, build_schedule, linear
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.testing import DelayedStage

SETTINGS = (("1f1b", "strict"), ("1f1b", "ready"), ("zb-h1", "ready"))
"""Schedules, and how stages follow them."""
TASK_S = 0.01
NUM_STAGES, NUM_MICROBATCHES = 4, 8
EVERY, NUM_BATCHES, NUM_EVALUATIONS, NUM_ROUNDS = 16, 4, 2, 3
WAYS = ("without", "between", "idle")


class Measured(NamedTuple):
    """Milliseconds of a step without evaluations, and what each way adds to them, as a part of 1."""

    step_ms: float
    between: float
    idle: float
    used: float
    """The part of all idle time in which the stages evaluated."""


def _sleep_s(step: int, task: Task) -> float:  # noqa: ARG001
    return 0.0 if task.microbatch < 0 else TASK_S * (2 if task.kind is TaskKind.B else 1)


def _batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 32, (NUM_MICROBATCHES, 1, 9)).astype(np.int32)
    weights = np.ones((NUM_MICROBATCHES, 1, 8), np.float32)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


class _Run:
    """A pipeline that trains and evaluates one way."""

    def __init__(self, schedule: str, consume: str, way: str) -> None:
        config = LanguageModelConfig(
            vocab_size=32, hidden=16, num_layers=NUM_STAGES, num_heads=2, num_kv_heads=2, mlp_dim=32
        )
        request = ScheduleRequest(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
        self.way, self.idle_s, self.used_s = way, 0.0, 0.0
        self.pipeline = Pipeline(
            language_model(config).split(NUM_STAGES),
            optimizer=optax.sgd(1e-2),
            placement=linear(NUM_STAGES),
            ordering=Ordering(schedule=build_schedule(schedule, request), consume=consume),
            options=RuntimeOptions(wrap_stage=partial(DelayedStage, delay=_sleep_s)),
        )
        self.state: PipelineState = self.pipeline.init(jax.random.key(0))
        bucket = {name: leaf[0] for name, leaf in _batch(0).items()}
        shapes = EvaluationShapes(buckets=[bucket], in_idle_time=way == "idle")
        self.pipeline.prepare(_batch(0), evaluation=shapes)
        self.train(EVERY, evaluates=False)  # so that the stages know their idle time

    def train(self, num_steps: int, *, evaluates: bool) -> float:
        """Returns the milliseconds of a step, with all that belongs to evaluations."""
        begun_s, found, steps = time.perf_counter(), list[Any](), list[Any]()
        for step in range(num_steps):
            if evaluates and step % EVERY == 0:
                found += [self.pipeline.evaluate(self.state, _batch(number)) for number in range(NUM_BATCHES)]
            self.state, metrics = self.pipeline.step(self.state, _batch(step))
            steps.append(metrics)
        for metrics in found:
            metrics.result()
        for sums in [metrics.result().sums for metrics in steps]:
            self.idle_s += sum(sums.idle_s.values())
            self.used_s += sums.idle_s.get(IdleReason.PIECE, 0.0)
        return 1e3 * (time.perf_counter() - begun_s) / num_steps


def bench_evaluation() -> dict[tuple[str, str], Measured]:
    """Measures every setting, on at least as many CPU devices as stages, and prints the medians."""
    heads = ("order", "step without, ms", "between steps", "in idle time", "idle time used")
    table = make_table(f"{NUM_BATCHES} batches every {EVERY} steps: time that they add", *heads, numeric=True)
    found = {}
    for schedule, consume in SETTINGS:
        runs = [_Run(schedule, consume, way) for way in WAYS]
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(NUM_ROUNDS):
            for run in runs:
                times[run.way].append(run.train(EVERY * NUM_EVALUATIONS, evaluates=run.way != "without"))
        for run in runs:
            run.pipeline.close()
        plain, between, idle = (median(times[way]) for way in WAYS)
        used = runs[-1].used_s / runs[-1].idle_s
        measured = found[schedule, consume] = Measured(plain, between / plain - 1, idle / plain - 1, used)
        parts = (f"{part:.1%}" for part in measured[1:])
        table.add_row(f"{schedule}:{consume}", f"{plain:.0f}", *parts)
    make_console().print(table)
    return found


if __name__ == "__main__":
    from rrfp_jax.commands.common.process import use_cpu

    use_cpu(NUM_STAGES)
    bench_evaluation()
