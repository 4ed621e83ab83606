"""Workloads of images and text in the real runtime, on emulated stages, beside the simulator's forecasts.

Three workloads, each with its samples balanced over microbatches and as they come, meet six orders within the same
memory: none holds more microbatches on a stage than there are stages. All are run in turn, several times; figures are
medians. The forecast takes the same durations and missing tasks, and the dispatch overhead that the run itself shows.

``python -m experiments.bench --only multimodal`` prints a table for each workload. The figures must show two things:
every measured time is within 3% of its forecast, and tables with foresight are never slower than strict consumption
within their memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

from rich.console import Console

from experiments.emulate import EMULATED_STEP
from experiments.workload_options import DEFAULT_PAIR, on_graph
from experiments.workloads import WORKLOADS, Drawn, Workload
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import GraphOptions, ModelGraph
from rrfp_jax.core import Order
from rrfp_jax.models.presets import model_pair
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Costs, Machine, simulate
from rrfp_jax.testing import dispatch_overhead_ms, emulate

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS, REPEATS = 4, 16, 4, 3
MEAN_FORWARD_MS = 6.0
ORDERS: dict[str, dict[str, Any]] = {
    "1f1b strict": {"schedule": "1f1b", "consume": "strict"},
    "zb-h1 strict": {"schedule": "zb-h1", "consume": "strict"},
    "bf": {"hint": "bf", "window": NUM_STAGES},
    "bfw": {"hint": "bfw", "window": NUM_STAGES},
    "1f1b-split": {"schedule": "1f1b-split"},
    "zb-h1": {"schedule": "zb-h1"},
}
"""Words of the six orders; the last two have foresight."""
WITHIN_MEMORY = {"1f1b-split": "1f1b strict", "zb-h1": "zb-h1 strict"}
"""Names of the tables with foresight, and of the strict table that has the same memory on every stage."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean makespans in milliseconds of one order on one workload, each the median of the repeats."""

    workload: str
    is_balanced: bool
    order: str
    real_ms: float
    forecast_ms: float
    ideal_ms: float
    """Forecast for a host that takes no time."""

    @property
    def deviation(self) -> float:
        """Excess of the measured time over the forecast, as a fraction of the forecast."""
        return self.real_ms / self.forecast_ms - 1


def bench_multimodal(console: Console | None = None) -> list[Measured]:
    """Prints and returns all figures."""
    console = console or make_console()
    results: list[Measured] = []
    for name in WORKLOADS:
        cases = {is_balanced: _draw(name, is_balanced) for is_balanced in (True, False)}
        measured = _in_turn(name, cases)
        _show(console, name, cases, measured)
        results += measured
    for line in in_words(results):
        console.print(line, soft_wrap=True)
    return results


def _draw(name: str, is_balanced: bool) -> tuple[Drawn, ModelGraph]:
    workload = Workload(
        name=name,
        pair=model_pair(DEFAULT_PAIR),
        num_steps=NUM_STEPS,
        num_microbatches=NUM_MICROBATCHES,
        is_balanced=is_balanced,
        mean_forward_ms=MEAN_FORWARD_MS,
    )
    return on_graph(workload, GraphOptions(), num_stages=NUM_STAGES)


def _in_turn(name: str, cases: dict[bool, tuple[Drawn, ModelGraph]]) -> list[Measured]:
    runs: dict[tuple[bool, str], list[tuple[float, ...]]] = {one: [] for one in product(cases, ORDERS)}
    for _ in range(REPEATS):
        for (is_balanced, label), times in runs.items():
            times.append(_run(ORDERS[label], *cases[is_balanced]))
    results = []
    for (is_balanced, label), times in runs.items():
        real_ms, forecast_ms, ideal_ms = map(median, zip(*times, strict=True))
        results.append(
            Measured(
                workload=name,
                is_balanced=is_balanced,
                order=label,
                real_ms=real_ms,
                forecast_ms=forecast_ms,
                ideal_ms=ideal_ms,
            )
        )
    return results


def _run(words: dict[str, Any], drawn: Drawn, model: ModelGraph) -> tuple[float, ...]:
    """Returns mean makespans in milliseconds: real, forecast, and forecast without the host's time."""
    order: Order = OrderingOptions(**words).resolve(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, placement=model.placement, graph=model.graph
    )
    durations_ms, absent = drawn.durations.durations_ms, drawn.durations.absent
    emulation = emulate(order.arbiters(EMULATED_STEP), durations_ms, NUM_STEPS, absent=absent)
    overhead_ms = max(0.0, dispatch_overhead_ms(emulation.timeline, durations_ms))
    simulated = [
        simulate(
            order.arbiters(EMULATED_STEP),
            Costs(durations_ms=durations_ms),
            machine=Machine(dispatch_overhead_ms=host_ms),
            num_steps=NUM_STEPS,
            absent=absent,
        )
        for host_ms in (overhead_ms, 0.0)
    ]
    return tuple(map(_makespan_ms, (emulation.timeline, *(one.timeline for one in simulated))))


def _makespan_ms(timeline: Timeline) -> float:
    return fmean(step.makespan_s() for step in timeline.by_step()) * 1e3


def _show(
    console: Console, name: str, cases: dict[bool, tuple[Drawn, ModelGraph]], measured: Sequence[Measured]
) -> None:
    headings = ("samples", "order", "real ms", "forecast ms", "difference", "of strict 1f1b", "ideal")
    title = f"{name}, {NUM_STAGES} stages x {NUM_MICROBATCHES} microbatches; ideal: simulated, with a host without cost"
    table = make_table(title, *headings, numeric=True)
    for is_balanced in cases:
        rows = [one for one in measured if one.is_balanced is is_balanced]
        for one in rows:
            table.add_row(
                "balanced" if is_balanced else "as they come",
                one.order,
                f"{one.real_ms:.1f}",
                f"{one.forecast_ms:.1f}",
                f"{one.deviation:+.1%}",
                f"{one.real_ms / rows[0].real_ms:.3f}",
                f"{one.ideal_ms / rows[0].ideal_ms:.3f}",
            )
    console.print(table)
    for is_balanced, (drawn, _) in cases.items():
        spread = drawn.spread
        console.print(
            f"{'balanced' if is_balanced else 'as they come'}: work varies by {spread.encoder_cv:.0%} in the encoder "
            f"and {spread.decoder_cv:.0%} in the decoder, {spread.without_images:.1%} of microbatches have no images",
            soft_wrap=True,
        )


def in_words(results: Sequence[Measured]) -> list[str]:
    """Returns the findings of the figures, one sentence each."""
    by_case = {(one.workload, one.is_balanced, one.order): one for one in results}
    farthest = max(results, key=lambda one: abs(one.deviation))
    against = {
        (one.workload, one.is_balanced, one.order): one.real_ms
        / by_case[one.workload, one.is_balanced, WITHIN_MEMORY[one.order]].real_ms
        for one in results
        if one.order in WITHIN_MEMORY
    }
    slowest = max(against, key=against.__getitem__)
    gains = [one.real_ms / by_case[one.workload, False, one.order].real_ms for one in results if one.is_balanced]
    return [
        f"farthest from its forecast: {farthest.order} on {farthest.workload}, {farthest.deviation:+.1%}",
        f"with foresight beside strict within its memory: {min(against.values()):.3f} to {max(against.values()):.3f} "
        f"of the time, the most for {slowest[2]} on {slowest[0]}",
        f"balanced beside as they come: {min(gains):.3f} to {max(gains):.3f} of the time",
    ]
