"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.runtime.driver import PipelineClosed as PipelineClosed
from rrfp_jax.runtime.driver import PipelineRuntime as PipelineRuntime
from rrfp_jax.runtime.failure import NoProgress as NoProgress
from rrfp_jax.runtime.failure import PeerLost as PeerLost
from rrfp_jax.runtime.failure import RunFailed as RunFailed
from rrfp_jax.runtime.failure import StageState as StageState
from rrfp_jax.runtime.failure import TaskFailed as TaskFailed
from rrfp_jax.runtime.failure import WaitForReport as WaitForReport
from rrfp_jax.runtime.stage_threads import StageExecutor as StageExecutor
from rrfp_jax.runtime.steps import StepMetrics as StepMetrics
from rrfp_jax.runtime.steps import StepOutcome as StepOutcome
from rrfp_jax.runtime.steps import StepResult as StepResult
from rrfp_jax.runtime.transports import Deliver as Deliver
