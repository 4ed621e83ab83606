"""Runs a small cut of a run's model in the real runtime, and returns the times of its tasks and the bytes of its
chunks.

The costs of a layer do not depend on how many the model has. So a few are enough: one chunk for each end of the model,
one of a single inner layer, and one of several, so that types and numbers of layers come apart. The larger chunk has as
many layers as a chunk of the run, where memory suffices for them. Layers of a long chunk take less time, or more, than
those of a short one: caches hold less of it, and the fixed time of a program is shared out to more of them. So the
chunk that is measured is about as long as those that are planned.

The chunks are dealt out to the stages in turn, one stage for each process: alone all are on one stage, so that nothing
runs beside a task; under ``rrfp launch`` the processes work at the same time, as in training, and the messages between
them tell the times of links. The times may also be those of a training run's own last steps, as it has left them in its
directory. A single process measures links by copies between two of its devices.
"""

import math
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import SingleDeviceSharding

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import make_data_set
from rrfp_jax.commands.training.model_parts import context_cut, pixel_scale, training_chunks, vision_language_config
from rrfp_jax.core import FUSED, SPLIT, Agreement, InputArrived, MessageKind, Ordering, StepRules
from rrfp_jax.costs import DeviceCosts, LinkCosts, MachineCosts
from rrfp_jax.costs.fitting import ChunkParts, ChunkTimes, fit_links
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.hardware import memory_limit
from rrfp_jax.models import language_model, vision_language_model
from rrfp_jax.models.cuts import plan_cut
from rrfp_jax.observe.chrome_trace import read_trace
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planner.analytic_costs import ModelLayers, model_layers
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.compiled import ChunkSizes
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.runtime.event_log import EventLog
from rrfp_jax.runtime.operations import HOST
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.stage_memory import ONCE_PER_STEP
from rrfp_jax.schedules import Edge, Placement, TaskKind, chain
from rrfp_jax.schedules.timeline import IdleReason, Timeline
from rrfp_jax.testing import emulate
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_directory import TRACE

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
PATCHES, VISION, PROJECTOR = "patches", "vision", "projector"
_FEW, MANY = 1, 3
"""Layers of the two chunks by whose difference a layer's costs are known; the larger one may have more."""
_MOST = 8
"""More layers tell little more, and take longer to compile."""
_SHARE = 0.5
"""Share of the free memory for the layers of all chunks: the rest is for both ends of the model and temporaries."""
NUM_MICROBATCHES = 4
_WARM_UP = 2
"""Steps that do not count: the first ones fill caches and allocate."""
_TENSORS = (MessageKind.ACTIVATION, MessageKind.GRADIENT)
_Arrival = tuple[int, str, int, int, int, float]
"""Step, kind, source and target chunk and microbatch of a message, and when it arrived."""
_KINDS = {TaskKind.F: "F", TaskKind.I: "I", TaskKind.W: "W", TaskKind.B: "B"}
_REPEATS = 20
_SIDE = (4096, 512)
"""Rows of the matrices by which devices are compared: of accelerators, and of CPUs."""
_LEAST_S, _RUNS = 0.02, 10
_HOST_BYTES = 64 << 20
_LINK_BYTES = (32, 8 << 20)
_TRIPS = (12, 4)
"""Steps with messages of each size, of which the first does not count."""


# -- the small cut -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SmallCut:
    """A model in chunks of layers of one type each."""

    chunks: Sequence[Chunk]
    edges: tuple[Edge, ...] | None
    layers: tuple[tuple[str, ...], ...]
    """The types of each chunk's layers."""


def type_of_kind(kind: str, names: Collection[str]) -> str:
    """Returns the name of a kind of layer among those of a model's types, in which frozen ones have names of their own.

    Raises ValueError where only some layers of the kind are frozen, or those elsewhere: a few layers stand for all.
    """
    found = [name for name in names if name.partition(" ")[0] == kind and ":" not in name]
    if len(found) != 1:
        raise ValueError(
            f"layers of type {kind!r} are of several kinds ({', '.join(found)}): freeze all of them or none"
        )
    return found[0]


def small_cut(config: TrainConfig, num_stages: int, *, many: int = MANY) -> SmallCut:
    """Returns the chunks, at least one for each stage, the larger one of ``many`` layers of the decoder.

    Raises ValueError for a model of which no few layers stand for all.
    """
    _check_alike(config)
    more = max(0, num_stages - 4)
    counts = [0, *(_FEW,) * (1 + more), many, 0]
    inner = [(LAYER,) * count for count in counts[1:-1]]
    model = config.model.with_layers(sum(counts))
    if config.vision is None:
        chunks = language_model(model).split(
            layers_per_chunk=counts, packed=config.has_segments, context=context_cut(config.pipeline)
        )
        layers = ((EMBEDDING,), *inner, (HEAD,))
        return SmallCut(chunks=_frozen(config, chunks), edges=None, layers=layers)
    vision = config.vision
    # Layers that the model has but does not run stay, so that it takes the features of the same layer.
    # Those with a window and those without take the same time: both compute whole rows.
    num_layers = _FEW + MANY + vision.num_layers - vision.num_layers_run
    few = replace(vision, num_layers=num_layers, global_layers=())
    small = replace(config, model=model, vision=few)
    graph = vision_language_model(vision_language_config(small)).split(
        encoder_layers_per_chunk=[0, _FEW, MANY, 0],
        decoder_layers_per_chunk=counts,
        packed=True,
        context=context_cut(config.pipeline),
        pixels=pixel_scale(config),
    )
    seen = ((PATCHES,), (VISION,) * _FEW, (VISION,) * MANY, (PROJECTOR,))
    return SmallCut(
        chunks=_frozen(config, graph.chunks), edges=graph.edges, layers=(*seen, (EMBEDDING,), *inner, (HEAD,))
    )


def _check_alike(config: TrainConfig) -> None:
    if 0 < config.model.num_sparse_layers < config.model.num_layers:
        raise ValueError(
            "some layers have experts and others have none, and no few layers stand for all: profile the model with "
            "experts.every 1 and no dense_layers"
        )
    if len({*map(config.model.float8_products, range(config.model.num_layers))}) > 1:
        raise ValueError(
            "some layers have products in float8 and others have not, and no few layers stand for all: profile the "
            "model with fp8.exclude that is the same in all layers"
        )


def _cut_of_run(config: TrainConfig, num_chunks: int) -> tuple[tuple[str, ...], ...]:
    """Returns the types of the layers of each chunk of a run, which is that of a language model; raises ValueError
    else."""
    if config.vision is not None:
        raise ValueError("the timeline is of a model with an encoder, whose chunks are no chain: profile its programs")
    _check_alike(config)
    cut = config.pipeline.cut
    if any(count % 1 for count in cut.layers or ()):
        raise ValueError("chunks of the timeline end inside layers, and costs are of whole ones: profile its programs")
    plans = plan_cut(
        config.model.num_layers,
        num_chunks=None if cut.layers else num_chunks,
        layers_per_chunk=cut.layers,
        embedding_in=cut.embedding_chunk,
        head_in=cut.head_chunk,
    )
    return tuple((EMBEDDING,) * plan.embedding + (LAYER,) * len(plan.layers) + (HEAD,) * plan.head for plan in plans)


def _frozen(config: TrainConfig, chunks: Sequence[Chunk]) -> list[Chunk]:
    try:
        return training_chunks(config, chunks)
    except ValueError as error:
        what = "freeze names" if config.adapters is None else "freeze, or targets of adapters, name"
        raise ValueError(
            f"{what} single layers, and a profile runs a few layers in place of all: name whole parts or none ({error})"
        ) from None


def larger_chunk(config: TrainConfig, layers: ModelLayers, process: Process, *, num_microbatches: int) -> int:
    """Returns the layers of the larger chunk, for this number of microbatches in flight; the same in all processes."""
    one = layers.types[type_of_kind(LAYER, layers.types)]
    in_flight = one.sizes.stash_bytes + one.sizes.owed_bytes
    each = one.fixed_bytes + num_microbatches * in_flight + one.sizes.more_temporaries_bytes
    least = min(process.gather("layers that fit", int(_free_bytes(process) * _SHARE // each) - 1).values())
    # A chunk of the run has so many layers as the configuration cuts the model, or evenly where that is to be found.
    layout = config.pipeline
    of_run = -(-config.model.num_layers // (layout.num_stages * (layout.chunks_per_stage or 1)))
    if layout.layout is not None and not layout.is_auto:
        of_run = math.ceil(max(layout.cut.layers or ()))
    return max(MANY, min(of_run, _MOST, least))


def _free_bytes(process: Process) -> int:
    """Returns the free bytes of the device, or of the host where devices are cores of it, which the processes of a run
    share."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    free, limit = int(psutil.virtual_memory().available), memory_limit()
    return (free if limit is None else min(free, limit)) // process.layout.num_stages


# -- measurements ------------------------------------------------------------------------------------------------------


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
    config: TrainConfig,
    setting: StageSetting,
    process: Process,
    *,
    repeats: int,
    progress: CompileProgress,
    speeds: Sequence[float] = (),
) -> Measured:
    """Runs ``repeats`` steps with split and with whole backwards; with no repeats it compiles only, for the bytes.

    ``speeds`` are those of the stages' devices; times are told for speed 1, and as they are without any. All processes
    call it alike; the first one gets the measurements of all. Raises ValueError where model, data and
    setting do not fit."""
    number = setting.microbatch_size * NUM_MICROBATCHES
    changed: dict[str, Any] = {"data": replace(config.data, batch_size=number, num_microbatches=NUM_MICROBATCHES)}
    small = replace(config, **changed)
    layers = model_layers(small, **setting._asdict())
    many = larger_chunk(small, layers, process, num_microbatches=NUM_MICROBATCHES) if repeats else MANY
    cut = small_cut(small, process.layout.num_stages, many=many)
    data = make_data_set(small, force=True)
    trip_s = None if process.peers is None else process.peers.clocks.round_trip_s
    trips = [each for each in process.gather("round trips", trip_s).values() if each is not None]
    found = Measured(control_ms=max(trips) * 1e3 / 2 if trips else None)  # as the slowest process has it
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
            own_sizes = [[chunk, plain_sizes(sizes)] for chunk, sizes in pipeline.chunk_sizes.items()]
            every = process.gather("chunk sizes", own_sizes).values()
            found.parts.extend(chunk_parts(cut, dict(sorted((chunk, each) for told in every for chunk, each in told))))
            own = Timeline(pipeline.layout.num_units)
            for step in range(repeats + _WARM_UP if repeats else 0):
                state, metrics = pipeline.step(state, data.batch(step, reads))
                timeline = metrics.result().timeline
                if step >= _WARM_UP:
                    own.extend(timeline)
            _note(found, cut, pipeline, own, speeds)
    return found


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


def _note(found: Measured, cut: SmallCut, pipeline: Pipeline, own: Timeline, speeds: Sequence[float]) -> None:
    """Brings the records of all processes to the first one, and notes there the measurements in them."""
    process = pipeline.process
    whole = process.whole_timeline(own)
    arrivals = _arrivals(process, pipeline.runtime.logs())
    if process.rank or not whole.spans:
        return
    of_chunks = [speeds[stage] for stage in pipeline.placement.stage_of_chunk] if speeds else ()
    found.times.extend(chunk_times(whole, cut.layers, of_chunks))
    found.host_ms.extend(host_ms(whole))
    outputs = {chunk: each.outputs for chunk, each in enumerate(found.parts[: len(cut.layers)])}
    seen: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for (*ends, source, target), milliseconds in _messages_ms(whole, arrivals, pipeline.placement):
        seen[ends[0], ends[1], outputs[min(source, target)]].append(max(0.0, milliseconds))
    found.messages.extend((num_bytes, median(times_ms)) for (*_, num_bytes), times_ms in seen.items())


def chunk_times(
    timeline: Timeline, layers: Sequence[tuple[str, ...]], speeds: Sequence[float] = ()
) -> list[ChunkTimes]:
    """Returns the times of each chunk's tasks, from a record of some steps; ``layers`` are the types of each chunk's.

    With the ``speeds`` of the chunks' devices, they are the times of a device of speed 1."""
    runs_ms: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    once_ms: dict[tuple[int, int], float] = defaultdict(float)
    for span in timeline.spans:
        milliseconds = (span.end_s - span.start_s) * 1e3 * (speeds[span.task.chunk] if speeds else 1.0)
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


def _arrivals(process: Process, logs: Mapping[int, EventLog]) -> list[_Arrival]:
    """Returns the arrivals in the steps whose events are still kept, on the clock of rank 0, which gets those of all
    ranks; others get their own."""
    later_s = 0.0 if process.peers is None else process.peers.clocks.offset_s
    of_own: list[_Arrival] = [
        (event.step, *event.message, event.time_s + later_s)
        for unit, log in logs.items()
        if process.layout.ranks_of(unit)[0] == process.rank
        for segment in log.segments
        for event, _ in segment.entries
        if isinstance(event, InputArrived) and event.message.kind in _TENSORS
    ]
    return [each for told in process.gather("arrivals", of_own, to_all=False).values() for each in told]


def _messages_ms(
    timeline: Timeline, arrivals: Iterable[_Arrival], placement: Placement
) -> Iterator[tuple[tuple[int, int, int, int], float]]:
    """Yields both stages and both chunks of each message between two stages, and its time from the task's end to the
    arrival."""
    ends_s: dict[tuple[int, str, int, int], float] = {}
    for span in timeline.spans:
        kind = MessageKind.ACTIVATION if span.task.kind is TaskKind.F else MessageKind.GRADIENT
        if span.task.kind in (TaskKind.F, TaskKind.I, TaskKind.B):
            ends_s[span.step, kind, span.task.chunk, span.task.microbatch] = span.end_s
    for step, sent, source, target, microbatch, time_s in arrivals:
        first, second = placement.stage_of_chunk[source], placement.stage_of_chunk[target]
        end_s = ends_s.get((step, sent, source, microbatch))
        if end_s is not None and first != second:
            yield (first, second, source, target), 1e3 * (time_s - end_s)


def plain_sizes(sizes: ChunkSizes) -> dict[str, Any]:
    """Returns the fields of :class:`ChunkParts` that are bytes."""
    fixed = (
        sizes.params_bytes,
        sizes.accumulators_bytes,
        sizes.optimizer_bytes,
        sizes.derived_bytes,
        sizes.zeros_bytes,
    )
    temporaries, once = dict[str, int](), 0
    for name, size in sizes.temporaries.items():
        program = name.partition(" ")[0]
        if name.startswith(ONCE_PER_STEP):
            once = max(size, once)
        else:
            temporaries[program] = max(size, temporaries.get(program, 0))
    return {
        "fixed": sum(fixed),
        "gradient": sizes.accumulators_bytes,
        "stash": sizes.stash_bytes + sizes.kept_bytes,
        "kept_inputs": sizes.kept_inputs_bytes,
        "owed": sizes.owed.total,
        "outputs": sizes.outputs_bytes,
        "temporaries": temporaries,
        "step_temporaries": once,
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
    share = config.pipeline.most_replicas
    layers = _cut_of_run(config, len(chunks) // share)
    if chunks != list(range(len(layers) * share)):
        raise ValueError(f"{path} has tasks of chunks {chunks}, and the run's configuration cuts {len(layers)}")
    times = [
        replace(each, returns_gradient=number % len(layers) > 0)
        for number, each in enumerate(chunk_times(timeline, layers * share))
    ]
    return replace(measured, times=times, host_ms=host_ms(timeline))


def device_links(sizes: Iterable[int]) -> LinkCosts:
    """Measures copies of arrays of these bytes between the first two devices; with one device links take no time."""
    devices, medians = jax.local_devices(), []
    if len(devices) < 2:
        return LinkCosts()
    for num_bytes in sorted({1, *sizes}):
        array = jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8), devices[0]))
        times_ms = []
        for _ in range(_REPEATS):
            begun_s = time.perf_counter()
            jax.block_until_ready(jax.device_put(array, devices[1]))
            times_ms.append((time.perf_counter() - begun_s) * 1e3)
        medians.append((num_bytes, median(times_ms)))
    return fit_links(medians)


def measured_host_gb_per_s(device: jax.Device) -> float | None:
    """Measures copies from a device to pinned memory of its host and back; returns the slower rate. None where there is
    no such memory."""
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        return None
    here, there = (SingleDeviceSharding(device, memory_kind=kind) for kind in (device.default_memory().kind, HOST))
    array, least_s = jax.block_until_ready(jax.device_put(np.zeros(_HOST_BYTES, np.uint8), here)), [inf, inf]
    for _ in range(_RUNS):
        for way, target in enumerate((there, here)):
            begun_s = time.perf_counter()
            array = jax.block_until_ready(jax.device_put(array, target))
            least_s[way] = min(least_s[way], time.perf_counter() - begun_s)
    return _HOST_BYTES / max(least_s) / 1e9


# -- the machine -------------------------------------------------------------------------------------------------------


def device_speeds(process: Process, dtype: str) -> tuple[DeviceCosts, ...]:
    """Runs the same program on every device of the run, in all processes at the same time; returns the devices in their
    order, with speeds relative to the first. All processes call it alike and get the same.

    Alone, a process tells the devices of its host.
    """
    own = jax.local_devices()
    if process.cluster is not None:
        numbers = range(process.layout.num_devices)
        own = [process.devices[each] for each in numbers if process.layout.rank_of_device(each) == process.rank]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in own]
    rates = [_products_per_s(device, dtype) for device in own]
    told = process.gather("speeds", [socket.gethostname(), rates, limits])
    first = told[0][1][0]
    return tuple(
        DeviceCosts(
            speed=rate / first, bytes=None if limit is None else int(limit), name=f"{host}:{rank}" + f".{place}" * more
        )
        for rank, (host, rates, limits) in sorted(told.items())
        for more in [len(rates) > 1]
        for place, (rate, limit) in enumerate(zip(rates, limits, strict=True))
    )


def _products_per_s(device: jax.Device, dtype: str) -> float:
    """Returns how often a device multiplies two matrices in a second, in the best of some runs."""
    side = _SIDE[device.platform == "cpu"]
    given = jax.device_put(np.full((side, side), 1 / side, np.float32), device).astype(dtype)  # its own square
    program = jax.jit(lambda matrix, times: jax.lax.fori_loop(0, times, lambda _, each: each @ matrix, matrix))

    def run_s(times: int) -> float:
        begun_s = time.perf_counter()
        jax.block_until_ready(program(given, times))
        return time.perf_counter() - begun_s

    times = 1
    run_s(times)  # compiles
    while run_s(times) < _LEAST_S:
        times *= 2
    # Other programs only make a run longer.
    return times / min(run_s(times) for _ in range(_RUNS))


def tour(number: int) -> list[int]:
    """Returns a way through so many places that goes from each to each other one once, and ends where it began."""
    way = [number - 1]
    for first in reversed(range(number - 1)):
        # To the next place, then every way among the later ones, which ends there, back, and to each of the others.
        way = [first, *way, first, *(place for other in range(first + 2, number) for place in (other, first))]
    return way


def measure_links(process: Process) -> MachineCosts | None:
    """Measures messages between all stages, one on each rank, over the transports of a run; returns the machine, its
    devices taken to be alike. None on all ranks but the first.

    A single microbatch goes through a chain of chunks that uses every link once in each direction, and so does its
    gradient on the way back, while nothing else is under way.
    """
    number = process.layout.num_stages
    placement = Placement(tuple(tour(number)))
    order = Ordering(hint="bf", window=1).resolve(placement, chain(placement.num_chunks, 1))
    found = dict[int, dict[tuple[int, int], float]]()
    for num_bytes, trips in zip(_LINK_BYTES, _TRIPS, strict=True):
        arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL), members=process.members())
        durations_ms = np.zeros((1, placement.num_chunks, 1, 3))
        ran = emulate(arbiters, durations_ms, trips, process=process, activation_bytes=num_bytes, log_steps=trips)
        seen = defaultdict[tuple[int, int], list[float]](list)
        later = [each for each in _arrivals(process, ran.logs) if each[0]]  # the first trip opens connections
        # Where processes share cores, the receiver of a message may hold the sender up before its task is seen to end.
        # So a task counts as long as the shortest one of its kind there.
        least_s: dict[tuple[int, TaskKind], float] = {}
        for span in ran.timeline.spans:
            kind = span.stage, span.task.kind
            least_s[kind] = min(span.end_s - span.start_s, least_s.get(kind, inf))
        spans = [span._replace(end_s=span.start_s + least_s[span.stage, span.task.kind]) for span in ran.timeline.spans]
        for (here, there, *_), milliseconds in _messages_ms(Timeline(number, spans), later, placement):
            seen[here, there].append(milliseconds)
        found[num_bytes] = {pair: median(times_ms) for pair, times_ms in seen.items()}
    hosts = process.gather("hosts", socket.gethostname())
    if process.rank:
        return None
    latency_ms = [[0.0] * number for _ in range(number)]
    gb_per_s: list[list[float | None]] = [[None] * number for _ in range(number)]
    small = found[_LINK_BYTES[0]]
    for here, there in small:
        # By as much as two clocks differ the way there seems too long, and the way back too short.
        ahead_ms = (small[here, there] - small[there, here]) / 2
        seen_ms = [(num_bytes, max(0.0, found[num_bytes][here, there] - ahead_ms)) for num_bytes in _LINK_BYTES]
        link = fit_links(seen_ms)
        latency_ms[here][there], gb_per_s[here][there] = link.latency_ms, link.gb_per_s
    return MachineCosts(
        devices=tuple(DeviceCosts(name=f"{hosts[rank]}:{rank}") for rank in range(number)),
        latency_ms=tuple(map(tuple, latency_ms)),
        gb_per_s=tuple(map(tuple, gb_per_s)),
    )
