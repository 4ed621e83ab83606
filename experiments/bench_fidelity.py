"""Agreement of simulated step times with those of the real runtime on emulated stages.

Twenty seeded settings (4 stages, 16 microbatches): every hint, tables kept strictly, tables with footprint and
foresight, and tables as mere hints; log-normal jitter of sigma 0 to 1; windows of 4 to 16 where no table bounds the
memory. Both sides take the same durations; the simulator also takes the dispatch overhead that the emulated run itself
shows (see :func:`rrfp_jax.testing.dispatch_overhead_ms`).

Then pipelines that have lost units, whose microbatches the living replicas of their stages run, with BF: F takes 40 ms
and B 80 ms, with jitter of sigma 0.1, for where all are equal, the simulator breaks every tie in the same way. Links
and host cost nothing there.
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
from rrfp_jax.core.rebalancing import adopted_owners
from rrfp_jax.core.replicas import StepOwners, block_owners
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

LOSSES = (
    *((4, 2, 8, lost) for lost in ((), (5,), (5, 2))),
    *((8, 4, 16, lost) for lost in ((), (9,), (9, 18), (1, 9))),
)
"""Stages, replicas, microbatches of each replica, and the units that are lost: none, one, one of each of two stages,
and two of one stage."""


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
    table = Table(title="emulated against simulated after losses, mean makespan of 3 steps", title_justify="left")
    for heading in ("stages x replicas x microbatches", "lost units", "emulated ms", "simulated ms", "ratio"):
        table.add_column(heading, justify="right")
    for num_stages, num_replicas, share, lost in LOSSES:
        emulated_ms, simulated_ms = compare_after_losses(num_stages, num_replicas, share, lost)
        cells = (f"{num_stages} x {num_replicas} x {share}", ", ".join(map(str, lost)) or "none")
        table.add_row(*cells, f"{emulated_ms:.1f}", f"{simulated_ms:.1f}", f"{emulated_ms / simulated_ms:.4f}")
    console.print(table)
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


def compare_after_losses(
    num_stages: int,
    num_replicas: int,
    share: int,
    lost: tuple[int, ...],
    *,
    task_ms: float = 40.0,
    sigma: float = 0.1,
) -> tuple[float, float]:
    """Returns the mean milliseconds per makespan without these units, emulated and simulated."""
    order = OrderingOptions(hint="bf").resolve(num_stages=num_stages, num_microbatches=share, num_replicas=num_replicas)
    blocks = block_owners(num_stages, num_replicas * share, num_replicas)
    living = [unit for unit in range(num_stages * num_replicas) if unit not in lost]
    owners = StepOwners(adopted_owners(blocks, living), lost) if lost else None
    num_steps = 4  # of which the first warms up
    even_ms = np.full((num_steps, order.graph.num_chunks, order.graph.num_microbatches, 3), task_ms)
    durations_ms = lognormal(even_ms, sigma, np.random.default_rng(0))
    emulation = emulate(order.arbiters(EMULATED_STEP), durations_ms, num_steps, owners=owners)
    costs = Costs(durations_ms=durations_ms)
    simulation = simulate(order.arbiters(EMULATED_STEP), costs, num_steps=num_steps, owners=[owners])
    emulated_ms, simulated_ms = (
        fmean(run.timeline.of_step(step).makespan_s() * 1e3 for step in range(1, num_steps))
        for run in (emulation, simulation)
    )
    return emulated_ms, simulated_ms
