"""Runs the real runtime on emulated stages for some steps, in one process or in several, and keeps its records.

Also tells how much time the runtime added to the given durations.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from statistics import fmean

import numpy as np

from rrfp_jax.core import Message, MessageKind, StageArbiter
from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.runtime import PipelineRuntime
from rrfp_jax.runtime.event_log import EventLog, write_log
from rrfp_jax.runtime.mailbox import SendArray
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.stage_threads import StageExecutor
from rrfp_jax.runtime.steps import StepOutcome
from rrfp_jax.runtime.transports import ArrayEdge
from rrfp_jax.schedules import Absences, lanes_beside
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline
from rrfp_jax.simulation.costs import DURATION_SLOTS, InjectedSleeps, of_tasks
from rrfp_jax.testing.accelerator import AcceleratedStage, EmulatedAccelerator
from rrfp_jax.testing.emulated_stage import DEFAULT_ACTIVATION_BYTES, EmulatedStage, activation_spec, duration_of
from rrfp_jax.waiting import result_of


@dataclass(frozen=True)
class Emulation:
    """Records of an emulated run: on rank 0 of all stages, elsewhere of the stages hosted there."""

    timeline: Timeline
    step_ms: list[float]
    """Milliseconds between the ends of steps; the first counts from its submission."""
    logs: Mapping[int, EventLog]
    """Event logs of the stages hosted here, with their last steps."""
    cpu_s: float
    """Processor time of all processes, user and system, from the end of the first step to that of the last."""
    peak_transport_bytes: int
    """Most bytes of messages under way that this process's transport held."""
    looking_ahead: int = 0
    """Stages whose foresight was at work in the last step; elsewhere than on rank 0 of those hosted there."""
    on_device: Timeline | None = None
    """With emulated accelerators, the spans in their own time; ``timeline`` has the host's view of them."""


def emulate(
    arbiters: Sequence[StageArbiter],
    durations_ms: np.ndarray,
    num_steps: int,
    *,
    process: Process | None = None,
    activation_bytes: int = DEFAULT_ACTIVATION_BYTES,
    launch_ms: float | None = None,
    just_in_time: bool = False,
    progress_deadline_s: float = 60.0,
    log_steps: int = 2,
    events: Path | None = None,
    link_delays_ms: Mapping[tuple[int, int], float] | None = None,
    absent: Sequence[Absences] = (),
    owners: StepOwners | None = None,
    sleeps: InjectedSleeps | None = None,
    piece_ms: float = 0.0,
) -> Emulation:
    """Runs ``num_steps`` steps, one after another, on stages that sleep, or on emulated accelerators.

    Args:
        arbiters: one per stage hosted here, in order, fresh; without R and U tasks.
        durations_ms: [steps, chunks, microbatches, 3]; see :class:`EmulatedStage`.
        process: this process's part in a run of several; None: all stages are here, and share its devices.
        activation_bytes: the size of an array between chunks.
        launch_ms: the host's time to hand a task over; every stage has an :class:`EmulatedAccelerator`. None: tasks run
            on the thread that launches them, as small programs do on a CPU.
        just_in_time: choose a stage's next task when the running one may end within the host's latency.
        log_steps: how many steps of the event logs are kept.
        events: the file for the event logs, written however the run ends; of several processes each writes its own,
            with the rank in the name.
        link_delays_ms: how much later than it came a tensor is handed over, by (sending unit, receiving unit).
        absent: the pairs that each step lacks beyond those of the graph, beginning again after the last; empty: none.
        owners: the owners of the microbatches in all steps; None: the blocks of replicas. Units that are lost are not
            started.
        sleeps: the RRFP paper's sleeps within tasks, as in a simulation.
        piece_ms: the time of each of the pieces of other work that idle stages run, without ``launch_ms``; 0: none.

    Raises RunFailed, with the wait-for report, if no task finishes within the deadline or another process is lost, and
    ValueError for owners that do not fit the pipeline, or that several processes cannot have.
    """
    placement = arbiters[0].placement
    if process is None:
        process = Process.alone(placement.num_stages)
    if owners is not None and owners.lost:
        if process.layout.num_ranks > 1:
            raise ValueError("an emulation in several processes starts all units: emulate losses in one process")
        arbiters = [arbiter for arbiter in arbiters if arbiter.stage not in owners.lost]
    graph = arbiters[0].graph_of(evaluates=False, owners=owners)
    layout = process.layout
    axes = [layout.axes_of_stage[layout.stage_of(unit)] for unit in range(layout.num_units)]
    grids = [StageDevices([process.devices_of(unit)], axes[unit]) for unit in range(layout.num_units)]
    shardings = [grid.unit_sharding(0) for grid in grids]
    activation = activation_spec(activation_bytes)

    accelerated: list[AcceleratedStage] = []
    emulated_stages: dict[int, EmulatedStage] = {}

    def make_stage(stage: int, send_array: SendArray) -> StageExecutor:
        emulated = EmulatedStage(
            graph,
            placement,
            stage,
            durations_ms=durations_ms if launch_ms is None else np.zeros_like(durations_ms),
            sleeps=sleeps if launch_ms is None else None,
            send_array=send_array,
            device=process.own_device(stage),
            activation=activation,
            num_devices=process.layout.unit_size,
            hands_ahead=launch_ms is not None and process.layout.num_ranks == 1,
        )
        emulated_stages[stage] = emulated
        if launch_ms is None:
            return emulated
        accelerator = EmulatedAccelerator(launch_ms=launch_ms)
        lasts_ms = duration_of(durations_ms, sleeps, graph.ops)
        accelerated.append(
            AcceleratedStage(emulated, accelerator, lasts_ms, stage=stage, lanes_beside=lanes_beside(graph))
        )
        return accelerated[-1]

    def edge(message: Message, _: int) -> ArrayEdge:
        stage_of = placement.stage_of_chunk
        return ArrayEdge(
            spec=activation,
            source=shardings[stage_of[message.source]],
            target=shardings[stage_of[message.target]],
        )

    def delay_s(message: Message) -> float:
        if link_delays_ms is None or message.kind not in (MessageKind.ACTIVATION, MessageKind.GRADIENT):
            return 0.0
        ends = placement.stage_of_chunk[message.source], placement.stage_of_chunk[message.target]
        return link_delays_ms.get(ends, 0.0) * 1e-3

    runtime = process.start(
        arbiters,
        make_stage,
        RuntimeOptions(
            progress_deadline_s=progress_deadline_s,
            log_steps=log_steps,
            other_owners=owners is not None,
            pieces=(lambda stage: repeat(partial(emulated_stages[stage].run_piece, piece_ms))) if piece_ms else None,
        ),
        edge=edge,
        just_in_time=just_in_time,
        delay_s=delay_s if link_delays_ms else None,
    )
    try:
        emulation = _run(
            runtime, process, num_steps, absent, owners, delay=max(arbiter.setup.delay for arbiter in arbiters)
        )
    finally:
        if events is not None:
            write_log(runtime.event_log(), _own_file(events, process))
        runtime.close()
    if launch_ms is None:
        return emulation
    on_device = Timeline(process.layout.num_units, [span for stage in accelerated for span in stage.spans])
    return replace(emulation, on_device=process.whole_timeline(on_device))


def idle_shares(on_device: Timeline) -> list[float]:
    """Returns for every stage the share of its own time that its device was idle, from the first start of a step's
    tasks to the last end: the mean over the steps, without the first of several, which warms up."""
    shares = []
    for stage in range(on_device.num_stages):
        steps = on_device.of_stage(stage).by_step()
        sums = [step.sums() for step in steps]
        shares.append(fmean(1 - own.work_s / own.cost_s for own in sums[1:] or sums))
    return shares


def dispatch_overhead_ms(timeline: Timeline, durations_ms: np.ndarray) -> float:
    """Returns the mean milliseconds that the host adds to a task.

    They have two parts: how long the host takes from the end of a task to the start of the next, where the next was
    ready at once; and how much longer tasks ran than the durations say (sleeps overshoot, calls cost time). A
    simulation of the same run takes the sum as its dispatch overhead. ``durations_ms`` is [steps, chunks, microbatches,
    3].
    """
    nominal_ms = of_tasks(durations_ms)
    excess_ms = []
    for step, _, task, start_s, end_s, _ in (span for span in timeline.spans if span.task.kind in DURATION_SLOTS):
        asked_ms = nominal_ms[task.kind][step % len(durations_ms)][task.chunk][task.microbatch]
        excess_ms.append((end_s - start_s) * 1e3 - asked_ms)
    return fmean(excess_ms) + fmean(_gaps_ms(timeline) or [0.0])


def _run(
    runtime: PipelineRuntime,
    process: Process,
    num_steps: int,
    absent: Sequence[Absences],
    owners: StepOwners | None,
    *,
    delay: int,
) -> Emulation:
    # As in training, each step is enqueued while the one before it runs.
    timeline, step_ms, looking_ahead = Timeline(process.layout.num_units), [], 0
    last_s = time.perf_counter()
    cpu_s = 0.0

    def submit(step: int) -> Future[StepOutcome]:
        return runtime.submit(step, StepBatch(), absent[step % len(absent)] if absent else (), owners=owners)

    ahead = 2 + delay
    enqueued = deque(map(submit, range(min(ahead, num_steps))))
    for step in range(num_steps):
        outcome = result_of(enqueued.popleft())
        if step + ahead < num_steps:
            enqueued.append(submit(step + ahead))
        timeline.extend(outcome.timeline)
        looking_ahead = outcome.sums.looking_ahead
        step_ms.append((outcome.ended_s - last_s) * 1e3)
        last_s = outcome.ended_s
        if not step:
            cpu_s = -time.process_time()
    cpu_s += time.process_time()
    timeline = process.whole_timeline(timeline)
    everybody = process.gather("processor time", cpu_s)
    return Emulation(
        timeline, step_ms, runtime.logs(), sum(everybody.values()), process.peak_transport_bytes, looking_ahead
    )


def _own_file(events: Path, process: Process) -> Path:
    if process.layout.num_ranks == 1:
        return events
    name, dot, suffixes = events.name.partition(".")
    return events.with_name(f"{name}-rank{process.rank}{dot}{suffixes}")


def _gaps_ms(timeline: Timeline) -> list[float]:
    """Returns the gaps between two tasks of a stage that the host alone made."""
    host = {(w.stage, w.start_s, w.end_s) for w in timeline.waits if w.reason is IdleReason.HOST}
    per_stage: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        per_stage[span.stage].append(span)
    return [
        (later.start_s - earlier.end_s) * 1e3
        for stage, spans in per_stage.items()
        for earlier, later in pairwise(spans)
        if (stage, earlier.end_s, later.start_s) in host
    ]
