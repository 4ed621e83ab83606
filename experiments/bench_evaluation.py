"""Time of an evaluation, beside its forwards alone in virtual time with a host that takes none.

The steps of an evaluation (:class:`rrfp_jax.training.evaluation.Evaluator`) run through the real runtime, on stages
whose tasks sleep, and beside it the simulator runs the same forwards. The settings are gone through in turn, several
times, so that a slow moment of the machine hits all of them alike; medians are printed.

::

    python -m experiments.bench_evaluation
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import chain, linear, looped
from rrfp_jax.simulation import Costs, constant, lognormal, simulate

SETTINGS = ((4, 1, 8, 0.0), (4, 1, 8, 0.5), (4, 2, 8, 0.0))
"""Stages, chunks on each, microbatches of a batch, and the spread (sigma) of durations."""
FORWARD_MS = 20.0
NUM_BATCHES, NUM_ROUNDS, NUM_STEPS = 16, 3, 3
RULES = StepRules(updates=False, agreement=Agreement.LOSS)


class Measured(NamedTuple):
    """Milliseconds of one step of an evaluation, and how many batches it has."""

    batches: int
    ideal_ms: float
    real_ms: float


def setting(
    num_stages: int, per_stage: int, num_microbatches: int, sigma: float
) -> tuple[int, float, Callable[[], list[float]]]:
    """Returns the batches of a step, its ideal time, and a function that returns the ms of each step but the first."""
    from rrfp_jax.runtime.process import Process
    from rrfp_jax.testing import emulate
    from rrfp_jax.training.evaluation import batches_per_step

    num_chunks = num_stages * per_stage
    batches = batches_per_step(NUM_BATCHES, num_chunks=num_chunks, num_microbatches=num_microbatches)
    placement = looped(num_stages, per_stage) if per_stage > 1 else linear(num_stages)
    order = Ordering().resolve(placement, chain(num_chunks, num_microbatches)).evaluating(batches)
    durations = constant((FORWARD_MS, 0.0, 0.0), order.graph)
    if sigma:
        durations = lognormal(durations, sigma, np.random.default_rng(0))
    ideal = simulate(order.arbiters(RULES), Costs(durations_ms=durations)).step_ms[-1]

    def run() -> list[float]:
        process = Process.alone(num_stages)
        return emulate(order.arbiters(RULES), durations, NUM_STEPS, process=process).step_ms[1:]

    return batches, ideal, run


def bench_evaluation() -> dict[tuple[int, int, int, float], Measured]:
    """Measures every setting in turn, on at least as many CPU devices as stages, and prints the medians."""
    made = {each: setting(*each) for each in SETTINGS}
    times: dict[tuple[int, int, int, float], list[float]] = {each: [] for each in SETTINGS}
    for _ in range(NUM_ROUNDS):
        for each, (_, _, run) in made.items():
            times[each] += run()
    heads = ("stages", "chunks", "microbatches", "sigma", "batches", "ideal ms", "real ms", "ratio")
    table = make_table(f"evaluation steps, F {FORWARD_MS:g} ms", *heads, numeric=True)
    found = {}
    for each, (batches, ideal, _) in made.items():
        found[each] = Measured(batches, ideal, median(times[each]))
        cells = (*map(str, each), str(batches), f"{ideal:.0f}", f"{found[each].real_ms:.0f}")
        table.add_row(*cells, f"{found[each].real_ms / ideal:.3f}")
    make_console().print(table)
    return found


if __name__ == "__main__":
    from rrfp_jax.commands.common.process import use_cpu

    use_cpu(max(num_stages for num_stages, *_ in SETTINGS))
    bench_evaluation()
