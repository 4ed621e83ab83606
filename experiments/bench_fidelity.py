"""Agreement of simulated step times with those of the real runtime on emulated stages.

Twenty seeded settings (4 stages, 16 microbatches): every hint, tables kept strictly, tables with footprint and
foresight, and tables as mere hints; log-normal jitter of sigma 0 to 1; windows of 4 to 16 where no table bounds the
memory. Both sides take the same durations; the simulator also takes the dispatch overhead that the emulated run itself
shows (see :func:`rrfp_jax.testing.dispatch_overhead_ms`).
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Order
from rrfp_jax.simulation import Costs, Machine, for_steps, lognormal, simulate
from rrfp_jax.testing import dispatch_overhead_ms, emulate

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS, NUM_SETTINGS = 4, 16, 10, 20
ORDERS: tuple[dict[str, Any], ...] = (
    {"hint": "bf"},
    {"hint": "bfw"},
    {"hint": "fb"},
    {"hint": "b-priority"},
    {"hint": "f-priority"},
    {"schedule": "1f1b", "footprint": False, "foresight": False},
    {"schedule": "1f1b", "consume": "strict"},
    {"schedule": "zb-h1", "consume": "strict"},
    {"schedule": "zb-h2"},
    {"hint": "bf-deep", "chunks_per_stage": 2},
)


@dataclass(frozen=True)
class Fidelity:
    """Mean milliseconds per makespan of one setting, emulated and simulated."""

    label: str
    sigma: float
    window: int
    overhead_ms: float
    emulated_ms: float
    simulated_ms: float

    @property
    def ratio(self) -> float:
        return self.emulated_ms / self.simulated_ms


def bench_fidelity(console: Console | None = None) -> list[Fidelity]:
    """Prints and returns the fidelity of every setting."""
    console = console or make_console()
    table = Table(title="emulated against simulated, mean makespan of 10 steps", title_justify="left")
    for heading in ("order", "sigma", "window", "overhead ms", "emulated ms", "simulated ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "order" else "right")
    results = [compare(seed) for seed in range(NUM_SETTINGS)]
    for r in results:
        figures = (f"{r.overhead_ms:.3f}", f"{r.emulated_ms:.1f}", f"{r.simulated_ms:.1f}", f"{r.ratio:.4f}")
        table.add_row(r.label, f"{r.sigma:.2f}", str(r.window), *figures)
    console.print(table)
    worst = max(results, key=lambda r: abs(r.ratio - 1))
    console.print(f"worst: {worst.label} at sigma {worst.sigma:.2f}, ratio {worst.ratio:.4f}")
    return results


def setting(seed: int) -> tuple[Order, float, NDArray[np.float64]]:
    """Returns an order, the sigma of its noise, and durations in ms, shape (steps, chunks, microbatches, 3)."""
    rng = np.random.default_rng(seed)
    words = dict(ORDERS[seed % len(ORDERS)])
    chunks_per_stage = words.pop("chunks_per_stage", None)
    sigma, window = float(rng.uniform(0, 1)), int(rng.integers(4, 17))
    if "schedule" not in words or words.get("footprint") is False:
        words["window"] = window
    order = OrderingOptions(**words).resolve(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, chunks_per_stage=chunks_per_stage
    )
    work_ms = np.full((NUM_STEPS, order.graph.num_chunks, NUM_MICROBATCHES, 3), 10.0 / (chunks_per_stage or 1))
    return order, sigma, lognormal(work_ms, sigma, rng)


def compare(seed: int) -> Fidelity:
    """Runs one setting on both sides and returns both times."""
    order, sigma, durations_ms = setting(seed)
    emulation = emulate(order.arbiters(EMULATED_STEP), durations_ms, NUM_STEPS)
    overhead_ms = dispatch_overhead_ms(emulation.timeline, durations_ms)
    simulation = simulate(
        order.arbiters(EMULATED_STEP),
        Costs(durations_ms=for_steps(durations_ms, NUM_STEPS)),
        machine=Machine(dispatch_overhead_ms=overhead_ms),
        num_steps=NUM_STEPS,
    )
    emulated_ms, simulated_ms = (
        fmean(run.timeline.of_step(step).makespan_s() * 1e3 for step in range(NUM_STEPS))
        for run in (emulation, simulation)
    )
    return Fidelity(order.label, sigma, max(order.windows), overhead_ms, emulated_ms, simulated_ms)
