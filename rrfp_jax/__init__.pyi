"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.arbitration import Ordering as Ordering
from rrfp_jax.pipeline import Pipeline as Pipeline
from rrfp_jax.pipeline import PipelineState as PipelineState
from rrfp_jax.planning.layout import Layout as Layout
from rrfp_jax.programs.chunk import Chunk as Chunk
from rrfp_jax.programs.model_graph import mirrored as mirrored
from rrfp_jax.runtime import NoProgress as NoProgress
from rrfp_jax.runtime import PeerLost as PeerLost
from rrfp_jax.runtime import RunFailed as RunFailed
from rrfp_jax.runtime import StepMetrics as StepMetrics
from rrfp_jax.runtime import StepResult as StepResult
from rrfp_jax.runtime import TaskFailed as TaskFailed
from rrfp_jax.runtime.options import RuntimeOptions as RuntimeOptions
from rrfp_jax.runtime.options import UpdateRules as UpdateRules
from rrfp_jax.runtime.process import Process as Process
from rrfp_jax.schedules import ScheduleRequest as ScheduleRequest
from rrfp_jax.schedules import ScheduleTable as ScheduleTable
from rrfp_jax.schedules import build_schedule as build_schedule
from rrfp_jax.schedules import schedule_names as schedule_names
from rrfp_jax.tasks import Edge as Edge
from rrfp_jax.tasks import Placement as Placement
from rrfp_jax.tasks import Task as Task
from rrfp_jax.tasks import TaskKind as TaskKind
from rrfp_jax.tasks import linear as linear
from rrfp_jax.tasks import looped as looped
from rrfp_jax.timeline import Timeline as Timeline
