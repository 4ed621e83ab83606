"""Run the real runtime on emulated stages for some steps, and keep what it recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from rrfp_jax.arbitration import StageArbiter
from rrfp_jax.runtime import PipelineRuntime, start_in_process
from rrfp_jax.runtime.event_log import EventLog
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.testing.emulated import EmulatedStage
from rrfp_jax.timeline import Timeline


@dataclass(frozen=True)
class Emulation:
    """What an emulated run leaves."""

    timeline: Timeline
    step_ms: list[float]
    """Intervals between the ends of steps; the first counts from its submission."""
    logs: Mapping[int, EventLog]
    """Each stage's event log of its last steps."""


def emulate(
    arbiters: Sequence[StageArbiter],
    durations_ms: np.ndarray,
    num_steps: int,
    *,
    progress_deadline_s: float = 60.0,
    log_steps: int = 2,
) -> Emulation:
    """Run ``num_steps`` steps, one after another, on stages that sleep.

    Args:
        arbiters: one per stage, in order, fresh; without R and U tasks.
        durations_ms: [steps, chunks, microbatches, 3]; see :class:`EmulatedStage`.

        log_steps: how many steps of the event logs are kept.

    Raises RunFailed, with the wait-for report, if no task finishes within the deadline.
    """
    num_stages = len(arbiters)
    known = jax.local_devices()
    devices = [known[stage % len(known)] for stage in range(num_stages)]
    graph, placement = arbiters[0].graph, arbiters[0].placement

    def make_stage(stage: int, ship: Ship) -> EmulatedStage:
        return EmulatedStage(graph, placement, stage, durations_ms=durations_ms, ship=ship, device=devices[stage])

    runtime = start_in_process(
        arbiters,
        make_stage,
        [jax.sharding.SingleDeviceSharding(device) for device in devices],
        progress_deadline_s=progress_deadline_s,
        log_steps=log_steps,
    )
    try:
        return _run(runtime, num_stages, num_steps)
    finally:
        runtime.close()


def _run(runtime: PipelineRuntime, num_stages: int, num_steps: int) -> Emulation:
    timeline, step_ms = Timeline(num_stages), []
    last_s = runtime.clock()
    for step in range(num_steps):
        outcome = runtime.submit(step, {}).result()
        timeline.extend(outcome.timeline)
        step_ms.append((outcome.ended_s - last_s) * 1e3)
        last_s = outcome.ended_s
    return Emulation(timeline, step_ms, runtime.logs())
