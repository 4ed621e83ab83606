"""Schedules: orders of tasks per stage, as tables that are run strictly, used as hints, or simulated."""

# Its import registers the schedules.
from rrfp_jax.schedules import published as published
from rrfp_jax.schedules.csv_form import from_csv as from_csv
from rrfp_jax.schedules.csv_form import read_csv as read_csv
from rrfp_jax.schedules.csv_form import to_csv as to_csv
from rrfp_jax.schedules.csv_form import write_csv as write_csv
from rrfp_jax.schedules.registry import ScheduleEntry as ScheduleEntry
from rrfp_jax.schedules.registry import build_schedule as build_schedule
from rrfp_jax.schedules.registry import schedule as schedule
from rrfp_jax.schedules.registry import schedule_entry as schedule_entry
from rrfp_jax.schedules.registry import schedule_names as schedule_names
from rrfp_jax.schedules.request import ScheduleRequest as ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable as ScheduleTable
from rrfp_jax.schedules.table import with_operations as with_operations
