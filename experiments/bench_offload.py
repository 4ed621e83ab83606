"""Cost of offload: 1F1B with half its memory beside the whole, on emulated stages and on a small model.

Emulated, 8 stages and 32 microbatches, F 10 ms and backward 20 ms: four activations on each device in place of up to
eight, with copies whose round trip takes a part of one forward and backward. Then a language model of four chunks,
whose copies are real ones of this host's memory; its peaks are those that the run measures. Both sides run in turn;
medians are printed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from experiments.emulate import EMULATED_STEP
from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime import StepResult
from rrfp_jax.runtime.operations import device_slots, offload
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, linear
from rrfp_jax.simulation.result import bottleneck, run_metrics
from rrfp_jax.testing import Emulation, emulate

REPEATS, STEPS = 5, 2
TASKS_MS = (10.0, 10.0, 10.0)
ROUND_TRIPS = (0.0, 0.5, 1.0, 2.0)
"""Round trips of a copy, in parts of one forward and backward. 0 is the whole memory, without offload."""
MODEL = LanguageModelConfig(vocab_size=256, hidden=128, num_layers=4, num_heads=4, num_kv_heads=4, mlp_dim=512)


def bench_offload(console: Console) -> None:
    """Prints both tables."""
    for consume in ("strict", "ready"):
        _emulated(console, consume)
    _trained(console)


def _emulated(console: Console, consume: str) -> None:
    plain = build_schedule("1f1b", ScheduleRequest(num_stages=8, num_microbatches=32))
    makespans_ms: dict[float, list[float]] = {part: [] for part in ROUND_TRIPS}
    runs: dict[float, Emulation] = {}
    for _ in range(REPEATS):
        for part, measured in makespans_ms.items():
            runs[part] = _run(plain, part, consume)
            measured += [step.makespan_s() * 1e3 for step in runs[part].timeline.by_step()]
    table = _table(f"1f1b {consume}, 8 x 32, emulated: medians of makespans in ms", "round trip", "ms", "of the whole")
    whole_ms = median(makespans_ms[0.0])
    for part, measured in makespans_ms.items():
        name = "the whole, 8 slots" if not part else f"{part:g} (F + B), 4 slots"
        table.add_row(name, f"{median(measured):.1f}", f"{median(measured) / whole_ms - 1:+.2%}")
    console.print(table)
    for part, run in runs.items():
        metrics = run_metrics(run.timeline, run.step_ms)
        gain = 1 - whole_ms / median(makespans_ms[part])
        told = bottleneck(metrics.engine_busy, metrics.stage_bubbles, metrics.waited_for_engines, gain=gain)
        if told is not None:
            console.print(f"{part:g}: {told}")


def _run(plain: ScheduleTable, part: float, consume: str) -> Emulation:
    """Emulates a table. Its copies are chosen for a round trip of one F and B, and then take ``part`` of that."""
    schedule, window = plain, None
    if part:
        schedule, window = offload(plain, 4), device_slots(plain, 4)
        ops = tuple(replace(op, ms=part * sum(TASKS_MS) / 2) for op in schedule.graph.ops)
        schedule = replace(schedule, graph=replace(schedule.graph, ops=ops))
    order = Ordering(schedule=schedule, consume=consume, window=window).resolve(plain.placement, plain.graph)
    durations_ms = np.broadcast_to(np.array(TASKS_MS), (1, 8, 32, 3)).copy()
    return emulate(order.arbiters(EMULATED_STEP), durations_ms, STEPS)


def _trained(console: Console) -> None:
    chunks, num_microbatches = language_model(MODEL).split(4), 16
    plain = build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=num_microbatches))
    base = Pipeline(chunks, placement=linear(4), optimizer=optax.adamw(1e-3))
    orders = {"the whole": Ordering(schedule=plain, consume="strict")}
    for slots in (3, 2):
        moved = offload(plain, slots, copy_ms=0.05)
        window = device_slots(plain, slots)
        orders[f"offload, {slots} slots"] = Ordering(schedule=moved, consume="strict", window=window)
    table = _table(
        "1f1b strict, 4 x 16, a small model", "order", "step ms", "of the whole", "peaks", "on host", "forecast"
    )
    pipelines = {name: base.reordered(order) for name, order in orders.items()}
    steps = {name: _stepper(pipeline, num_microbatches) for name, pipeline in pipelines.items()}
    results: dict[str, list[StepResult]] = {name: [] for name in orders}
    for _ in range(REPEATS * STEPS + 1):
        for name, step in steps.items():
            results[name].append(step())
    whole_ms = _median_ms(results["the whole"])
    for name, of_order in results.items():
        ms, forecast = _median_ms(of_order), pipelines[name].forecast
        last = of_order[-1]
        sizes = (last.peak_memory_bytes, last.peak_host_bytes, [each.peak for each in forecast])
        table.add_row(name, f"{ms:.1f}", f"{ms / whole_ms - 1:+.1%}", *(_sizes(of_stages) for of_stages in sizes))
    console.print(table)
    for pipeline in pipelines.values():
        pipeline.close()


def _stepper(pipeline: Pipeline, num_microbatches: int) -> Callable[[], StepResult]:
    state = pipeline.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (num_microbatches, 4, 129)).astype(np.int32)
    weights = np.ones((num_microbatches, 4, 128), np.float32)
    batch = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}

    def step() -> StepResult:
        nonlocal state
        state, metrics = pipeline.step(state, batch)
        return metrics.result()

    return step


def _median_ms(results: Sequence[StepResult]) -> float:
    """Returns the median makespan without the first step, in milliseconds."""
    return median(result.timeline.makespan_s() * 1e3 for result in results[1:])


def _sizes(of_stages: Sequence[int]) -> str:
    return ", ".join(map(format_bytes, of_stages))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    return table
