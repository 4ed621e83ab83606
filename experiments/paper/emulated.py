"""Emulate a scene in the real runtime, and simulate it with the same draws.

Asynchronous tensors arrive later than they were sent, while their sender goes on. A blocking sender is emulated by a
task that lasts until its tensor has arrived. The simulation is given the host's time for a task that the run itself
shows, or that another run has shown.
"""

from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np

from experiments.emulate import EMULATED_STEP
from experiments.paper.scene import Method, Scene
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Costs, InjectedSleeps, Links, Machine, both_directions, simulate
from rrfp_jax.simulation.costs import Durations

WARM_UP = 1
"""Number of steps before those that count, in which averages are learnt."""


class Emulated(NamedTuple):
    """Mean makespans, emulated and simulated, and the host's time per task."""

    real_ms: float
    forecast_ms: float
    host_ms: float


def emulated(scene: Scene, method: Method, *, host_ms: float | None = None) -> Emulated:
    """Runs a method once, and forecasts it.

    ``host_ms``: the host's time per task; None: the time that the run shows, which needs a run without injected sleeps.
    """
    from rrfp_jax.testing import dispatch_overhead_ms, emulate

    use_devices(scene.stages)
    order = method.order(scene)
    costs = _with_warm_up(scene.costs(order))
    delays_ms: dict[tuple[int, int], float] = {}
    if method.communication == "blocking":
        costs = replace(costs, durations_ms=until_arrived(costs.durations_ms, scene.comm_ms))
    else:
        delays_ms = both_directions({(s, s + 1): scene.comm_ms for s in range(scene.stages - 1)}, scene.stages)
    num_steps = WARM_UP + scene.steps
    run = emulate(
        order.arbiters(EMULATED_STEP), costs.durations_ms, num_steps, link_delays_ms=delays_ms, sleeps=costs.sleeps
    )
    if host_ms is None:
        host_ms = max(0.0, dispatch_overhead_ms(run.timeline, costs.durations_ms))
    machine = Machine(links=Links(extra_ms=delays_ms), dispatch_overhead_ms=host_ms)
    forecast = simulate(order.arbiters(EMULATED_STEP), costs, machine=machine, num_steps=num_steps)
    return Emulated(_makespan_ms(run.timeline), _makespan_ms(forecast.timeline), round(host_ms, 6))


@cache
def use_devices(num_stages: int) -> None:
    """Makes a virtual device for each stage, with thread pools of a fixed size. Call it before anything uses JAX."""
    from rrfp_jax.commands.common.process import use_cpu

    use_cpu(num_stages, pinned=True)


def until_arrived(durations_ms: Durations, comm_ms: float) -> Durations:
    """Returns durations with which tasks last until their tensors have arrived. The ends of the chain send none."""
    lasting = durations_ms.copy()
    lasting[:, :-1, :, 0] += comm_ms
    lasting[:, 1:, :, 1] += comm_ms
    return lasting


def _with_warm_up(costs: Costs) -> Costs:
    def longer(rows: Durations) -> Durations:
        return np.concatenate([rows[:WARM_UP], rows])

    sleeps = costs.sleeps and InjectedSleeps(base_ms=costs.sleeps.base_ms, factors=longer(costs.sleeps.factors))
    return replace(costs, durations_ms=longer(costs.durations_ms), sleeps=sleeps)


def _makespan_ms(timeline: Timeline) -> float:
    """Returns the mean makespan of the steps that count, in milliseconds."""
    makespans_s = [timeline.of_step(step).makespan_s() for step in timeline.steps() if step >= WARM_UP]
    return round(fmean(makespans_s) * 1e3, 6)
