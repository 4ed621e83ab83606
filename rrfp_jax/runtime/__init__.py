"""The asyncio runtime: stage actors that drive compiled programs as their inputs arrive (RRFP paper, section 4).

The names load on first use, so that the launcher and the network, which live in this room too, load no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineClosed, PipelineRuntime, StepOutcome
    from rrfp_jax.runtime.executor import Batch, StageExecutor
    from rrfp_jax.runtime.report import NoProgress, PeerLost, RunFailed, StageState, TaskFailed, WaitForReport
    from rrfp_jax.runtime.step_result import StepMetrics, StepResult
    from rrfp_jax.runtime.transports import Deliver, Transport

_MODULE_OF_NAME = {
    "Batch": "executor",
    "Deliver": "transports",
    "NoProgress": "report",
    "PeerLost": "report",
    "PipelineClosed": "driver",
    "PipelineRuntime": "driver",
    "RunFailed": "report",
    "StageExecutor": "executor",
    "StageState": "report",
    "StepMetrics": "step_result",
    "StepOutcome": "driver",
    "StepResult": "step_result",
    "TaskFailed": "report",
    "Transport": "transports",
    "WaitForReport": "report",
}

__all__ = [
    "Batch",
    "Deliver",
    "NoProgress",
    "PeerLost",
    "PipelineClosed",
    "PipelineRuntime",
    "RunFailed",
    "StageExecutor",
    "StageState",
    "StepMetrics",
    "StepOutcome",
    "StepResult",
    "TaskFailed",
    "Transport",
    "WaitForReport",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'rrfp_jax.runtime' has no attribute {name!r}")
    return getattr(import_module(f"rrfp_jax.runtime.{_MODULE_OF_NAME[name]}"), name)
