"""Readiness-driven pipeline-parallel training for JAX: schedules rank the tasks that are ready.

The public names load on first use, so that importing a pure room (``rrfp_jax.schedules``, ``rrfp_jax.simulation``)
loads no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_jax.arbitration import Ordering
    from rrfp_jax.pipeline import Pipeline, PipelineState
    from rrfp_jax.planning.layout import Layout
    from rrfp_jax.programs.chunk import Chunk
    from rrfp_jax.programs.model_graph import mirrored
    from rrfp_jax.runtime import NoProgress, PeerLost, RunFailed, StepMetrics, StepResult, TaskFailed
    from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
    from rrfp_jax.runtime.process import Process
    from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, schedule_names
    from rrfp_jax.tasks import Edge, Placement, Task, TaskKind, linear, looped
    from rrfp_jax.timeline import Timeline

_ROOM_OF_NAME = {
    "Chunk": "rrfp_jax.programs.chunk",
    "Edge": "rrfp_jax.tasks",
    "Layout": "rrfp_jax.planning.layout",
    "NoProgress": "rrfp_jax.runtime",
    "Ordering": "rrfp_jax.arbitration",
    "PeerLost": "rrfp_jax.runtime",
    "Pipeline": "rrfp_jax.pipeline",
    "PipelineState": "rrfp_jax.pipeline",
    "Placement": "rrfp_jax.tasks",
    "Process": "rrfp_jax.runtime.process",
    "RunFailed": "rrfp_jax.runtime",
    "RuntimeOptions": "rrfp_jax.runtime.options",
    "ScheduleRequest": "rrfp_jax.schedules",
    "ScheduleTable": "rrfp_jax.schedules",
    "StepMetrics": "rrfp_jax.runtime",
    "StepResult": "rrfp_jax.runtime",
    "Task": "rrfp_jax.tasks",
    "TaskFailed": "rrfp_jax.runtime",
    "TaskKind": "rrfp_jax.tasks",
    "Timeline": "rrfp_jax.timeline",
    "UpdateRules": "rrfp_jax.runtime.options",
    "build_schedule": "rrfp_jax.schedules",
    "linear": "rrfp_jax.tasks",
    "looped": "rrfp_jax.tasks",
    "mirrored": "rrfp_jax.programs.model_graph",
    "schedule_names": "rrfp_jax.schedules",
}

__all__ = [
    "Chunk",
    "Edge",
    "Layout",
    "NoProgress",
    "Ordering",
    "PeerLost",
    "Pipeline",
    "PipelineState",
    "Placement",
    "Process",
    "RunFailed",
    "RuntimeOptions",
    "ScheduleRequest",
    "ScheduleTable",
    "StepMetrics",
    "StepResult",
    "Task",
    "TaskFailed",
    "TaskKind",
    "Timeline",
    "UpdateRules",
    "build_schedule",
    "linear",
    "looped",
    "mirrored",
    "schedule_names",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF_NAME:
        raise AttributeError(f"module 'rrfp_jax' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF_NAME[name]), name)
