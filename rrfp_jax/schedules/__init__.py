"""Schedules: orders of tasks per stage, as tables that are run strictly, used as hints, or simulated."""

from rrfp_jax.schedules import (
    building_block,
    chimera,
    dual_pipe_v,
    gpipe,
    hanayo,
    looped,
    one_f_one_b,
    zb_auto,
    zb_v,
    zero_bubble_h,
)
from rrfp_jax.schedules.csv_form import from_csv, read_csv, to_csv, write_csv
from rrfp_jax.schedules.registry import (
    ScheduleEntry,
    ScheduleRequest,
    build_schedule,
    schedule,
    schedule_entry,
    schedule_names,
)
from rrfp_jax.schedules.table import ScheduleTable

GENERATORS = (
    gpipe,
    one_f_one_b,
    looped,
    zero_bubble_h,
    zb_auto,
    zb_v,
    building_block,
    dual_pipe_v,
    chimera,
    hanayo,
)
"""The modules whose import registers the schedules."""

__all__ = [
    "ScheduleEntry",
    "ScheduleRequest",
    "ScheduleTable",
    "build_schedule",
    "from_csv",
    "read_csv",
    "schedule",
    "schedule_entry",
    "schedule_names",
    "to_csv",
    "write_csv",
]
