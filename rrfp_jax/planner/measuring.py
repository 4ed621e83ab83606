"""Runs a small cut of a run's model in the real runtime, and returns the times of its tasks and the bytes of its
chunks.

The chunks are dealt out to the stages in turn, one stage for each process: alone all are on one stage, so that nothing
runs beside a task; under ``rrfp launch`` the processes work at the same time, as in training, and the
messages between them tell the times of links.

The times may also be those of a training run's own last steps, as it has left them in its directory. A single process
measures links by copies between two of its devices.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import make_data_set
from rrfp_jax.core import FUSED, SPLIT, InputArrived, MessageKind, Ordering
from rrfp_jax.costs import LinkCosts
from rrfp_jax.costs.fitting import ChunkParts, ChunkTimes, fit_links
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.observe.chrome_trace import read_trace
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planner.model_layers import ModelLayers, model_layers
from rrfp_jax.planner.small_cut import MANY, SmallCut, cut_of_run, larger_chunk, small_cut
from rrfp_jax.programs.compiled import ChunkSizes
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Timeline
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_directory import TRACE

NUM_MICROBATCHES = 4
_WARM_UP = 2
"""Steps that do not count: the first ones fill caches and allocate."""
_TENSORS = (MessageKind.ACTIVATION, MessageKind.GRADIENT)
_Arrival = tuple[int, str, int, int, int, float]
"""Step, kind, source and target chunk and microbatch of a message, and when it arrived."""
_KINDS = {TaskKind.F: "F", TaskKind.I: "I", TaskKind.W: "W", TaskKind.B: "B"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements for one setting of microbatch size, tensor degree and remat."""

    times: list[ChunkTimes] = field(default_factory=list)
    parts: list[ChunkParts] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    """Milliseconds from the end of each task to the start of the next one that was chosen at once."""
    messages: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and milliseconds of tensors between stages."""
    control_ms: float | None = None
    """Milliseconds of a message without tensors."""


def measure(
    config: TrainConfig, setting: StageSetting, process: Process, *, repeats: int, progress: CompileProgress
) -> Measured:
    """Runs ``repeats`` steps with split and with whole backwards; with no repeats it compiles only, for the bytes.

    All processes call it alike; the first one gets the measurements of all. Raises ValueError where model, data and
    setting do not fit."""
    small = _small_config(config, setting)
    layers = layers_here(small, setting)
    many = larger_chunk(small, layers, process, num_microbatches=NUM_MICROBATCHES) if repeats else MANY
    cut = small_cut(small, process.layout.num_stages, many=many)
    data = make_data_set(small, force=True)
    found = Measured(control_ms=_control_ms(process))
    base: Pipeline | None = None
    for backward in (SPLIT, FUSED):
        ordering = Ordering(hint="bf", window=NUM_MICROBATCHES, backward=backward)
        base = pipeline = (
            _pipeline(small, cut, setting, process, ordering=ordering, log_steps=max(1, repeats))
            if base is None
            else base.reordered(ordering)
        )
        with pipeline:
            state = pipeline.init(jax.random.key(small.run.seed))
            reads = pipeline.reads(NUM_MICROBATCHES)
            pipeline.prepare(data.batch(0, reads), buckets=data.buckets, progress=progress)
            found.parts.extend(chunk_parts(cut, _all_sizes(process, pipeline.chunk_sizes)))
            own = Timeline(pipeline.layout.num_units)
            for step in range(repeats + _WARM_UP if repeats else 0):
                state, metrics = pipeline.step(state, data.batch(step, reads))
                timeline = metrics.result().timeline
                if step >= _WARM_UP:
                    own.extend(timeline)
            _note(found, cut, pipeline, process, own)
    return found


def layers_here(config: TrainConfig, setting: StageSetting) -> ModelLayers:
    """Returns the layers of a model run in this way on the devices that are here."""
    return model_layers(config, **setting._asdict())


def _small_config(config: TrainConfig, setting: StageSetting) -> TrainConfig:
    data = replace(
        config.data, batch_size=setting.microbatch_size * NUM_MICROBATCHES, num_microbatches=NUM_MICROBATCHES
    )
    changed: dict[str, Any] = {"data": data}
    return replace(config, **changed)


def _pipeline(
    config: TrainConfig, cut: SmallCut, setting: StageSetting, process: Process, *, ordering: Ordering, log_steps: int
) -> Pipeline:
    num_stages = process.layout.num_stages
    return Pipeline(
        cut.chunks,
        placement=Placement(tuple(chunk % num_stages for chunk in range(len(cut.chunks)))),
        edges=cut.edges,
        process=process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        ordering=ordering,
        updates=UpdateRules(clip_norm=config.optimizer.clip_norm),
        remat=setting.remat,
        seed=config.run.seed,
        options=RuntimeOptions(log_steps=log_steps, progress_deadline_s=config.cluster.progress_deadline_s),
    )


def _note(found: Measured, cut: SmallCut, pipeline: Pipeline, process: Process, own: Timeline) -> None:
    """Brings the records of all processes to the first one, and notes there the measurements in them."""
    whole = process.whole_timeline(own)
    arrivals = process.gather("arrivals", _arrivals_at(process, pipeline.runtime), to_all=False)
    if process.rank or not whole.spans:
        return
    found.times.extend(chunk_times(whole, cut.layers))
    found.host_ms.extend(host_ms(whole))
    outputs = {chunk: each.outputs for chunk, each in enumerate(found.parts[: len(cut.layers)])}
    told = [arrival for each in arrivals.values() for arrival in each]
    found.messages.extend(_messages(whole, told, outputs, pipeline.placement))


def _arrivals_at(process: Process, runtime: PipelineRuntime) -> list[_Arrival]:
    """Returns the arrivals in the steps whose events are still kept, on the clock of rank 0, for the units that this
    rank leads."""
    later_s = 0.0 if process.peers is None else process.peers.clocks.offset_s
    return [
        (event.step, *event.message, event.time_s + later_s)
        for unit, log in runtime.logs().items()
        if process.layout.ranks_of(unit)[0] == process.rank
        for segment in log.segments
        for event, _ in segment.entries
        if isinstance(event, InputArrived) and event.message.kind in _TENSORS
    ]


def chunk_times(timeline: Timeline, layers: Sequence[tuple[str, ...]]) -> list[ChunkTimes]:
    """Returns the times of each chunk's tasks, from a record of some steps; ``layers`` are the types of each
    chunk's."""
    runs_ms: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    once_ms: dict[tuple[int, int], float] = defaultdict(float)
    for span in timeline.spans:
        milliseconds = (span.end_s - span.start_s) * 1e3
        if span.task.kind in _KINDS:
            runs_ms[span.task.chunk][_KINDS[span.task.kind]].append(milliseconds)
        elif span.task.kind in (TaskKind.R, TaskKind.U):
            once_ms[span.step, span.task.chunk] += milliseconds
    for (_, chunk), milliseconds in once_ms.items():
        runs_ms[chunk]["U"].append(milliseconds)
    return [
        ChunkTimes(layers=types, runs_ms=dict(runs_ms[chunk]), returns_gradient=chunk > 0)
        for chunk, types in enumerate(layers)
        if chunk in runs_ms
    ]


def host_ms(timeline: Timeline) -> list[float]:
    """Returns the milliseconds from the end of each task to the start of the next, where that was chosen at once."""
    ends = {(span.stage, span.end_s) for span in timeline.spans if not span.is_beside}
    return [
        (wait.end_s - wait.start_s) * 1e3
        for wait in timeline.waits
        if wait.reason is IdleReason.HOST and (wait.stage, wait.start_s) in ends
    ]


def _messages(
    timeline: Timeline, arrivals: Iterable[_Arrival], outputs: Mapping[int, int], placement: Placement
) -> list[tuple[float, float]]:
    """Returns the median time of a message of each size between two stages, from a task's end to the arrival."""
    ends_s: dict[tuple[int, str, int, int], float] = {}
    for span in timeline.spans:
        kind = MessageKind.ACTIVATION if span.task.kind is TaskKind.F else MessageKind.GRADIENT
        if span.task.kind in (TaskKind.F, TaskKind.I, TaskKind.B):
            ends_s[span.step, kind, span.task.chunk, span.task.microbatch] = span.end_s
    seen: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for step, sent, source, target, microbatch, time_s in arrivals:
        stages = placement.stage_of_chunk[source], placement.stage_of_chunk[target]
        end_s = ends_s.get((step, sent, source, microbatch))
        if end_s is not None and stages[0] != stages[1]:
            num_bytes = outputs[source if sent == MessageKind.ACTIVATION else target]
            seen[*stages, num_bytes].append(1e3 * max(0.0, time_s - end_s))
    return [(num_bytes, median(times_ms)) for (*_, num_bytes), times_ms in seen.items()]


def _control_ms(process: Process) -> float | None:
    """Returns half a round trip, as the slowest process has it."""
    trip_s = None if process.peers is None else process.peers.clocks.round_trip_s
    told = [each for each in process.gather("round trips", trip_s).values() if each is not None]
    return max(told) * 1e3 / 2 if told else None


def _all_sizes(process: Process, own: Mapping[int, ChunkSizes]) -> dict[int, Any]:
    """Returns the sizes of every chunk, as plain data."""
    told = process.gather("chunk sizes", [[chunk, plain_sizes(sizes)] for chunk, sizes in own.items()])
    return dict(sorted((chunk, sizes) for each in told.values() for chunk, sizes in each))


def plain_sizes(sizes: ChunkSizes) -> dict[str, Any]:
    """Returns the fields of :class:`ChunkParts` that are bytes."""
    fixed = (
        sizes.params_bytes,
        sizes.accumulators_bytes,
        sizes.optimizer_bytes,
        sizes.derived_bytes,
        sizes.zeros_bytes,
    )
    temporaries: dict[str, int] = {}
    for name, size in sizes.temporaries.items():
        program = name.partition(" ")[0]
        temporaries[program] = max(size, temporaries.get(program, 0))
    return {
        "fixed": sum(fixed),
        "gradient": sizes.accumulators_bytes,
        "stash": sizes.stash_bytes + sizes.kept_bytes,
        "kept_inputs": sizes.kept_inputs_bytes,
        "owed": sizes.owed.total,
        "outputs": sizes.outputs_bytes,
        "temporaries": temporaries,
    }


def chunk_parts(cut: SmallCut, sizes: Mapping[int, Any]) -> list[ChunkParts]:
    """Returns the bytes of each chunk of the cut, from :func:`plain_sizes` by its number."""
    return [ChunkParts(layer=cut.layers[chunk][0], count=len(cut.layers[chunk]), **row) for chunk, row in sizes.items()]


def with_times_of(run: str, config: TrainConfig, measured: Measured) -> Measured:
    """Returns the measurements with the times of a run in place of their own.

    Raises ValueError where the run left no trace, or one of other chunks than its configuration says.
    """
    path = Path(run) / TRACE
    timeline = read_trace(path)
    chunks = sorted({span.task.chunk for span in timeline.spans})
    share = config.pipeline.replicas
    layers = cut_of_run(config, len(chunks) // share)
    if chunks != list(range(len(layers) * share)):
        raise ValueError(f"{path} has tasks of chunks {chunks}, and the run's configuration cuts {len(layers)}")
    return replace(measured, times=_times(timeline, layers, share), host_ms=host_ms(timeline))


def _times(timeline: Timeline, layers: tuple[tuple[str, ...], ...], num_replicas: int) -> list[ChunkTimes]:
    """Returns the times of every chunk of every replica."""
    times = chunk_times(timeline, layers * num_replicas)
    return [replace(each, returns_gradient=number % len(layers) > 0) for number, each in enumerate(times)]


_REPEATS = 20


def device_links(sizes: Iterable[int]) -> LinkCosts:
    """Measures copies of arrays of these bytes between the first two devices; with one device links take no time."""
    devices = jax.local_devices()
    if len(devices) < 2:
        return LinkCosts()
    return fit_links((num_bytes, _copy_ms(num_bytes, *devices[:2])) for num_bytes in sorted({1, *sizes}))


def _copy_ms(num_bytes: int, source: jax.Device, target: jax.Device) -> float:
    array = jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8), source))
    times_ms = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    return median(times_ms)
