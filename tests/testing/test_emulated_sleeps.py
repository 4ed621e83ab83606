"""The RRFP paper's sleeps in the real runtime are those of the simulator: the same draws, the same moving average."""

import numpy as np
import pytest

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Order
from rrfp_jax.schedules.timeline import Span
from rrfp_jax.simulation import PAPER_LEVELS, Costs, constant, for_steps, paper, simulate
from rrfp_jax.testing import emulate
from rrfp_jax.testing.emulated_stage import duration_of


def one_stage() -> tuple[Order, Costs, list[Span]]:
    """One stage, so that the order is the table's, and with it the moving average, which F and B move differently."""
    order = OrderingOptions(schedule="1f1b", consume="strict").resolve(num_stages=1, num_microbatches=6)
    durations_ms = for_steps(constant((2.0, 3.0, 3.0), order.graph), 2)
    sleeps = paper(PAPER_LEVELS["J3"], durations_ms.shape, np.random.default_rng(5))
    costs = Costs(durations_ms=durations_ms, sleeps=sleeps)
    spans = simulate(order.arbiters(EMULATED_STEP), costs, num_steps=2).timeline.spans
    assert sum(span.end_s - span.start_s > 7e-3 for span in spans) > 3, "some were injected"
    return order, costs, spans


def test_an_emulated_stage_is_told_what_the_simulator_takes() -> None:
    _, costs, spans = one_stage()
    duration_ms = duration_of(costs.durations_ms, costs.sleeps)
    told_ms = [duration_ms(span.step, span.task) for span in spans]
    assert told_ms == pytest.approx([(span.end_s - span.start_s) * 1e3 for span in spans], abs=1e-9)


@pytest.mark.parametrize("launch_ms", [None, 0.0])
def test_tasks_last_so_long(launch_ms: float | None) -> None:
    order, costs, spans = one_stage()
    found = emulate(order.arbiters(EMULATED_STEP), costs.durations_ms, 2, sleeps=costs.sleeps, launch_ms=launch_ms)
    seen = found.timeline if found.on_device is None else found.on_device
    lasted_s = {(span.step, span.task): span.end_s - span.start_s for span in seen.spans}
    for span in spans:
        # on the host they end when they should on average, so that one may end early by what others are late
        slack_s = 5e-4 if found.on_device is None else 1e-6
        assert lasted_s[span.step, span.task] >= span.end_s - span.start_s - slack_s
