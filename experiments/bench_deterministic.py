"""Cost of accumulating in microbatch order: bf on emulated stages with jitter, ordered against unordered.

Both sides take the same log-normal durations and run in turn. Ordered accumulation (``deterministic: true``) lets a
backward wait for those of earlier microbatches. On a chain of stages microbatches do not overtake each other, so that
the price should be nothing; this measures it.
"""

from dataclasses import replace
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.simulation import lognormal
from rrfp_jax.testing import emulate

NUM_STAGES, NUM_MICROBATCHES, WINDOW, REPEATS = 4, 16, 8, 7
SIGMAS = (0.5, 1.0)


def bench_deterministic(console: Console) -> dict[float, float]:
    """Prints the medians, and returns the ratio of ordered to unordered step times by sigma."""
    console.print(f"accumulation in microbatch order, bf, window {WINDOW}: medians of makespans in ms, taken in turn")
    table = Table()
    for heading in ("sigma", "unordered", "ordered", "ratio"):
        table.add_column(heading, justify="right")
    ratios = {}
    for sigma in SIGMAS:
        unordered_ms, ordered_ms = _medians_ms(sigma)
        ratios[sigma] = ordered_ms / unordered_ms
        table.add_row(f"{sigma:.1f}", f"{unordered_ms:.1f}", f"{ordered_ms:.1f}", f"{ratios[sigma]:.3f}")
    console.print(table)
    return ratios


def _medians_ms(sigma: float) -> tuple[float, float]:
    order = OrderingOptions(hint="bf", window=WINDOW).resolve(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    work_ms = np.full((1, NUM_STAGES, NUM_MICROBATCHES, 3), 10.0)
    measured_ms: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(REPEATS):
        durations_ms = lognormal(work_ms, sigma, np.random.default_rng(seed))
        for ordered, makespans_ms in measured_ms.items():
            arbiters = order.arbiters(replace(EMULATED_STEP, ordered=ordered))
            makespans_ms.append(emulate(arbiters, durations_ms, 1).timeline.makespan_s() * 1e3)
    return median(measured_ms[False]), median(measured_ms[True])
