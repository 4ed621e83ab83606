"""Tasks, pipeline graphs and placements; and schedules: orders of tasks per stage, as tables.

A table is run strictly, used as a hint, or simulated.
"""

# Their import registers the schedules.
from rrfp_jax.schedules import _zb_auto as _zb_auto
from rrfp_jax.schedules import published as published
from rrfp_jax.schedules._csv_form import from_csv as from_csv
from rrfp_jax.schedules._csv_form import read_csv as read_csv
from rrfp_jax.schedules._csv_form import to_csv as to_csv
from rrfp_jax.schedules._csv_form import write_csv as write_csv
from rrfp_jax.schedules.graph import KEYS as KEYS
from rrfp_jax.schedules.graph import STREAM as STREAM
from rrfp_jax.schedules.graph import Absences as Absences
from rrfp_jax.schedules.graph import Edge as Edge
from rrfp_jax.schedules.graph import PipelineGraph as PipelineGraph
from rrfp_jax.schedules.graph import absences as absences
from rrfp_jax.schedules.graph import bits as bits
from rrfp_jax.schedules.graph import chain as chain
from rrfp_jax.schedules.graph import lanes_beside as lanes_beside
from rrfp_jax.schedules.graph import opposite_chains as opposite_chains
from rrfp_jax.schedules.graph import sliced_chain as sliced_chain
from rrfp_jax.schedules.graph import vocabulary_sharded as vocabulary_sharded
from rrfp_jax.schedules.operations import COMPUTE as COMPUTE
from rrfp_jax.schedules.operations import UNRECORDED as UNRECORDED
from rrfp_jax.schedules.operations import Op as Op
from rrfp_jax.schedules.operations import Per as Per
from rrfp_jax.schedules.registry import ScheduleEntry as ScheduleEntry
from rrfp_jax.schedules.registry import build_schedule as build_schedule
from rrfp_jax.schedules.registry import schedule as schedule
from rrfp_jax.schedules.registry import schedule_entry as schedule_entry
from rrfp_jax.schedules.registry import schedule_names as schedule_names
from rrfp_jax.schedules.request import ScheduleRequest as ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable as ScheduleTable
from rrfp_jax.schedules.table import with_operations as with_operations
from rrfp_jax.schedules.tasks import BUILT_IN as BUILT_IN
from rrfp_jax.schedules.tasks import BUILT_IN_KINDS as BUILT_IN_KINDS
from rrfp_jax.schedules.tasks import NO_MICROBATCH as NO_MICROBATCH
from rrfp_jax.schedules.tasks import Pair as Pair
from rrfp_jax.schedules.tasks import Placement as Placement
from rrfp_jax.schedules.tasks import Task as Task
from rrfp_jax.schedules.tasks import TaskKind as TaskKind
from rrfp_jax.schedules.tasks import bidirectional as bidirectional
from rrfp_jax.schedules.tasks import linear as linear
from rrfp_jax.schedules.tasks import looped as looped
from rrfp_jax.schedules.tasks import v_shaped as v_shaped
from rrfp_jax.schedules.tasks import waves as waves
