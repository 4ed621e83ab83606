"""The RRFP paper's sleeps in the real runtime are those of the simulator: the same draws, the same moving average."""

import numpy as np
import pytest

from rrfp_jax.commands.common.ordering import parse_ordering
from rrfp_jax.commands.emulate import EMULATED_STEP
from rrfp_jax.simulation import PAPER_LEVELS, Costs, constant, for_steps, paper, simulate
from rrfp_jax.testing import emulate


@pytest.mark.parametrize("launch_ms", [None, 0.0])
def test_the_same_sleeps_as_simulated(launch_ms: float | None) -> None:
    """One stage, so that the order is the table's, and with it the moving average, which F and B move differently."""
    order = parse_ordering(schedule="1f1b", consume="strict").resolve(num_stages=1, num_microbatches=6)
    durations_ms = for_steps(constant((2.0, 3.0, 3.0), order.graph), 2)
    sleeps = paper(PAPER_LEVELS["J3"], durations_ms.shape, np.random.default_rng(5))
    costs = Costs(durations_ms=durations_ms, sleeps=sleeps)
    asked = simulate(order.arbiters(EMULATED_STEP), costs, num_steps=2).timeline
    found = emulate(order.arbiters(EMULATED_STEP), durations_ms, 2, sleeps=sleeps, launch_ms=launch_ms)
    seen = found.timeline if found.on_device is None else found.on_device
    lasted = {(span.step, span.task): span.end_s - span.start_s for span in seen.spans}
    slept = [span for span in asked.spans if span.end_s - span.start_s > 7e-3]
    assert len(slept) > 3, "some were injected"
    for span in asked.spans:
        assert lasted[span.step, span.task] >= span.end_s - span.start_s - 1e-6
    most_s = sum(span.end_s - span.start_s for span in asked.spans) + 0.02 * len(asked.spans)
    assert sum(lasted.values()) < most_s, "none that was not asked for"
