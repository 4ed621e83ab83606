"""The pipeline that a composition asks for, with the programs that are compiled already for others of its setup."""

from typing import Any

from rrfp_jax.core import Ordering
from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.runtime import operations
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleRequest, ScheduleTable, build_schedule, linear, looped
from rrfp_jax.schedules.graph import chain
from rrfp_jax.schedules.registry import schedule_entry
from rrfp_jax.schedules.tasks import bidirectional, v_shaped, waves
from tests.environment import NUM_VIRTUAL_DEVICES
from tests.fuzz.composition import (
    BIDIRECTIONAL,
    GRAPH,
    LINEAR,
    LOOPED,
    OF_ANY_GRAPH,
    READY,
    TWO_VS,
    TWO_WAYS,
    WAVE,
    Composition,
    V,
)
from tests.fuzz.models import model_of
from tests.fuzz.plain import optimizer_of

_MOST_BASES = 3
"""Number of setups that keep their compiled programs."""
_bases: dict[Composition, Pipeline] = {}


def placement_of(composition: Composition) -> Placement:
    """Returns the placement, which says which stage owns which chunk."""
    stages, number = composition.stages, composition.num_chunks
    made = {
        LINEAR: lambda: linear(stages),
        LOOPED: lambda: looped(stages, 2),
        V: lambda: v_shaped(stages),
        WAVE: lambda: waves(stages, 2),
        BIDIRECTIONAL: lambda: bidirectional(stages),
        TWO_VS: lambda: schedule_entry("bitpipe").shape.placement(stages, 4),
        GRAPH: lambda: Placement(tuple(c * stages // number for c in range(number))),
    }
    return made[composition.placement]()


def forget() -> None:
    """Drop the compiled programs of all setups."""
    _bases.clear()


def pipeline_of(composition: Composition) -> Pipeline:
    """Returns a pipeline for this composition, with the programs that are compiled for its setup already."""
    setup, ordering = composition.setup, ordering_of(composition)
    if setup not in _bases:
        while len(_bases) >= _MOST_BASES:
            del _bases[next(iter(_bases))]
        _bases[setup] = _first_of(setup, ordering)
    options = RuntimeOptions(dispatch_ahead=composition.dispatch, progress_deadline_s=60)
    return _bases[setup].reordered(ordering, options=options)


def _first_of(setup: Composition, ordering: Ordering) -> Pipeline:
    model = model_of(setup)
    layout = Layout(num_stages=setup.stages, data=setup.data, mesh=dict(setup.mesh) or ())
    return Pipeline(
        mirrored(model.chunks) if setup.placement in TWO_WAYS else model.chunks,
        optimizer=optimizer_of(setup),
        placement=placement_of(setup),
        edges=model.edges,
        process=Process(layout, num_devices=min(layout.num_devices, NUM_VIRTUAL_DEVICES)),
        ordering=ordering,
        updates=UpdateRules(
            clip_norm=setup.clip,
            skip_nonfinite=setup.skip_nonfinite,
            deterministic=setup.deterministic,
            shard_optimizer=setup.shard_optimizer,
        ),
        remat=setup.remat,
        seed=setup.seed,
    )


def ordering_of(composition: Composition) -> Ordering:
    """Returns the order of tasks that a composition asks for."""
    table = _table(composition) if composition.schedule else None
    follows = table is not None and not composition.hint
    ops: tuple[Any, ...] = ()
    if composition.operation:
        if table is None:
            ops = (operations.recompute(0.5),)
        elif composition.operation == "recompute":
            table = operations.recomputed(table, 0.5)
        elif composition.operation == "offload":
            slots = max(2, int(max(table.peak_activations())) - 1)
            table = operations.offload(table, slots, copy_ms=0.01, consume=composition.consume)
    guided = follows and composition.consume == READY
    return Ordering(
        schedule=table,
        consume=composition.consume,
        hint=composition.hint or None,
        window=composition.window,
        backward=composition.backward or None,
        foresight=False if guided and not composition.foresight else None,
        footprint=False if guided and not composition.footprint else None,
        read_ahead=composition.read_ahead or None,
        ops=ops,
    )


def _table(composition: Composition) -> ScheduleTable:
    sizes: dict[str, Any] = {"num_stages": composition.stages, "num_microbatches": composition.microbatches}
    is_own = composition.placement == LINEAR or composition.schedule not in OF_ANY_GRAPH
    if not is_own:
        model, placement = model_of(composition.setup), placement_of(composition)
        edges = model.edges
        if edges is None:
            sizes["graph"] = chain(placement.num_chunks, composition.microbatches)
        else:
            sizes["graph"] = PipelineGraph(len(model.chunks), composition.microbatches, edges)
        sizes["placement"] = placement
    elif composition.placement == WAVE:
        sizes["chunks_per_stage"] = 4
    if composition.schedule == "gis":
        sizes["group_size"] = composition.stages
    return build_schedule(composition.schedule, ScheduleRequest(**sizes))
