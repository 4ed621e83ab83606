"""The order of all replicas and the memory that it needs, from the sizes of all chunks.

The processes tell each other what their chunks hold and what their devices have, so that all of them come to the same
windows, and all refuse what does not fit.
"""

from collections.abc import Mapping
from dataclasses import astuple, replace
from zlib import crc32

from rrfp_jax.core import STRICT, Order, Ordering
from rrfp_jax.costs.forecast import ChunkBytes, StageForecast, check_stages_fit, window_of_bytes
from rrfp_jax.costs.order_memory import check_evaluation_fits, forecast_evaluation, forecast_memory
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.runtime.evaluating import EvaluationShapes
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms
from rrfp_jax.runtime.memory_meter import chunk_bytes, device_limits
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import PipelineGraph


def fitting_order(
    model: HostedModel,
    graph: PipelineGraph,
    programs: HostedPrograms,
    buckets: Buckets,
    *,
    ordering: Ordering,
    options: RuntimeOptions,
    evaluation: EvaluationShapes | None,
    evaluated: Buckets | None,
) -> tuple[Order, list[StageForecast]]:
    """The order of all replicas, and the predicted memory of every unit.

    Args:
        graph: of one replica, with its share of the microbatches.
        evaluation: the shapes of steps that evaluate, and ``evaluated`` their buckets; None: no step does.

    Raises ValueError where some unit is predicted to need more than it has.
    """
    process = model.process
    layout = process.layout
    sizes, devices = _gather_sizes(process, programs, buckets, evaluated)
    order, forecast = forecast_order(model, graph, sizes, buckets, ordering)
    limit = options.memory_limit_bytes
    limits = [devices[unit] if limit is None else limit for unit in range(layout.num_units)]
    check_stages_fit(forecast, limits, is_strict=ordering.consume == STRICT)
    if evaluation is not None:
        needed = forecast_evaluation(order.evaluating(evaluation.batches), _evaluation_sizes(process, programs))
        check_evaluation_fits(needed, limits)
    return order, forecast


def forecast_order(
    model: HostedModel,
    graph: PipelineGraph,
    sizes: Mapping[int, ChunkBytes],
    buckets: Buckets,
    ordering: Ordering,
) -> tuple[Order, list[StageForecast]]:
    """The order of all replicas, and the predicted memory of every unit, from the sizes of all chunks of all replicas.

    Raises ValueError where the order does not fit the model.
    """
    layout = model.process.layout
    order = _in_microbatches(ordering, model, sizes, graph).resolve(model.placement, graph, num_replicas=layout.data)
    if ordering.window_bytes is not None and len(buckets) > 1 and _bounds_bytes(ordering, graph):
        order = replace(order, capacities=(ordering.window_bytes,) * layout.num_units)
    return order, forecast_memory(order, sizes, graph.num_microbatches)


def _gather_sizes(
    process: Process, programs: HostedPrograms, buckets: Buckets, evaluated: Buckets | None
) -> tuple[dict[int, ChunkBytes], dict[int, int | None]]:
    """The sizes of every chunk of all replicas, and the memory of every unit's device: all judge alike what fits.

    Raises ValueError, in every process, where one was given other buckets, by whose numbers messages go.
    """
    limits = device_limits([process.own_device(unit) for unit in process.units])
    told = [
        [[chunk, *astuple(chunk_bytes(each.sizes))] for chunk, each in programs.chunks.items()],
        [*zip(process.units, limits, strict=True)],
        crc32(repr((buckets.key, evaluated and evaluated.key)).encode()),
    ]
    gathered = process.gather("sizes", told)
    other = next((rank for rank, (*_, numbered) in gathered.items() if numbered != gathered[0][-1]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} was given other buckets than rank 0, or in another order: give all processes the same"
        )
    sizes: dict[int, ChunkBytes] = {}
    devices: dict[int, int | None] = {}
    for chunks, units, _ in gathered.values():
        sizes |= {chunk: ChunkBytes.from_tuple(row) for chunk, *row in chunks}
        devices |= dict(units)
    return sizes, devices


def _evaluation_sizes(process: Process, programs: HostedPrograms) -> dict[int, ChunkBytes]:
    """What evaluations need of every chunk of all replicas."""
    told = [[chunk, *astuple(chunk_bytes(sizes))] for chunk, sizes in programs.sizes_of_evaluation.items()]
    gathered = process.gather("sizes of evaluations", told)
    return {chunk: ChunkBytes.from_tuple(row) for rows in gathered.values() for chunk, *row in rows}


def _in_microbatches(
    ordering: Ordering, model: HostedModel, sizes: Mapping[int, ChunkBytes], graph: PipelineGraph
) -> Ordering:
    """The ordering with a window in bytes turned into one in microbatches for each stage.

    Raises ValueError where these are too few for the schedule's footprint.
    """
    num_bytes = ordering.window_bytes
    if num_bytes is None:
        return ordering
    windows = []
    for stage, chunks in enumerate(model.placement.chunks_of_stage):
        passed = [sizes[c] for c in chunks]
        if _bounds_activations(ordering, graph):  # the window counts activations of any chunk
            passed = [max(passed, key=lambda chunk: chunk.per_microbatch)] * graph.passes_per_microbatch(chunks)
        windows.append(window_of_bytes(num_bytes, passed, stage, graph.num_microbatches))
    in_microbatches = replace(ordering, window=tuple(windows))
    try:
        in_microbatches.fitted(model.placement, graph)
    except ValueError as error:
        held = ",".join(map(str, windows))
        raise ValueError(f"window {ordering.window} has room for {held} microbatches: {error}") from None
    return in_microbatches


def _bounds_activations(ordering: Ordering, graph: PipelineGraph) -> bool:
    """Returns whether the window bounds activations, each of one chunk, and not microbatches in flight."""
    return ordering.has_footprint or (bool(graph.ops) and graph.operations.moves_memory)


def _bounds_bytes(ordering: Ordering, graph: PipelineGraph) -> bool:
    """Returns whether microbatches of several sizes may be admitted by the bytes that each of them takes."""
    return ordering.consume != STRICT and not _bounds_activations(ordering, graph)
