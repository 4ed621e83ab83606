"""Schedules: orders of tasks per stage, as tables that are run strictly, used as hints, or simulated."""

# Their import registers the schedules.
from rrfp_jax.schedules import building_block as building_block
from rrfp_jax.schedules import chimera as chimera
from rrfp_jax.schedules import dual_pipe_v as dual_pipe_v
from rrfp_jax.schedules import gis as gis
from rrfp_jax.schedules import hanayo as hanayo
from rrfp_jax.schedules import linear as linear
from rrfp_jax.schedules import looped as looped
from rrfp_jax.schedules import split_1f1b as split_1f1b
from rrfp_jax.schedules import zb_auto as zb_auto
from rrfp_jax.schedules import zero_bubble as zero_bubble
from rrfp_jax.schedules.csv_form import from_csv as from_csv
from rrfp_jax.schedules.csv_form import read_csv as read_csv
from rrfp_jax.schedules.csv_form import to_csv as to_csv
from rrfp_jax.schedules.csv_form import write_csv as write_csv
from rrfp_jax.schedules.registry import ScheduleEntry as ScheduleEntry
from rrfp_jax.schedules.registry import ScheduleRequest as ScheduleRequest
from rrfp_jax.schedules.registry import build_schedule as build_schedule
from rrfp_jax.schedules.registry import schedule as schedule
from rrfp_jax.schedules.registry import schedule_entry as schedule_entry
from rrfp_jax.schedules.registry import schedule_names as schedule_names
from rrfp_jax.schedules.table import ScheduleTable as ScheduleTable
