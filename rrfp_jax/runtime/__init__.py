"""The asyncio runtime: stage actors that drive compiled programs as their inputs arrive (RRFP paper, section 4)."""

from rrfp_jax.runtime.driver import PipelineClosed, PipelineRuntime, StepOutcome
from rrfp_jax.runtime.executor import Batch, StageExecutor
from rrfp_jax.runtime.local import start_in_process
from rrfp_jax.runtime.report import NoProgress, RunFailed, StageState, TaskFailed, WaitForReport
from rrfp_jax.runtime.step_result import StepMetrics, StepResult
from rrfp_jax.runtime.transport import Deliver, InProcessTransport, Transport

__all__ = [
    "Batch",
    "Deliver",
    "InProcessTransport",
    "NoProgress",
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
    "start_in_process",
]
