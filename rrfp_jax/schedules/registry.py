"""The names of the schedules, and how a table is built by its name."""

import difflib

from rrfp_jax.field_rules import typed
from rrfp_jax.schedules.description import Description
from rrfp_jax.schedules.entry import KNOWN, ScheduleEntry
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.schedules.user_file import entry_in_file, is_in_file, is_rule


def schedule_names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(KNOWN))


def is_schedule(name: str) -> bool:
    """Whether this is the name of a schedule, or says ``FILE.py:NAME`` of something that is no rule."""
    return name in KNOWN or (is_in_file(name) and not is_rule(name))


def schedule_entry(name: str | Description) -> ScheduleEntry:
    """The entry of a schedule, by its name, as ``FILE.py:NAME``, or by the function that describes it.

    Raises ValueError with the names there are.
    """
    if callable(name):
        known = (entry for entry in KNOWN.values() if entry.describe is name)
        return next(known, ScheduleEntry(name=getattr(name, "__name__", "mine"), describe=name, any_graph=True))
    if is_in_file(name):
        return entry_in_file(name)
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no schedule {name!r}: {meant}the schedules are {', '.join(schedule_names())}; "
            "one of your own is FILE.py:NAME"
        )
    return KNOWN[name]


def chunks_per_stage(name: str, request: ScheduleRequest) -> int:
    """The number that a request means for a schedule; raises ValueError if the schedule cannot have it."""
    return schedule_entry(name).chunks_for(request)


@typed
def build_schedule(name: str | Description, request: ScheduleRequest) -> ScheduleTable:
    """The validated table of a schedule, as :func:`schedule_entry` finds it.

    Raises ValueError with the remedy where the sizes do not fit it.
    """
    entry = schedule_entry(name)
    entry.chunks_for(request)
    if request.group_size is not None and not entry.has_groups:
        grouped = ", ".join(each.name for each in KNOWN.values() if each.has_groups)
        raise ValueError(
            f"schedule {entry.name!r} has no groups of microbatches: leave group_size out, or take {grouped}"
        )
    if request.graph is not None and not entry.any_graph:
        raise ValueError(
            f"schedule {entry.name!r} makes a chain of chunks and its own placement: leave graph and placement out, or "
            f"take {', '.join(schedules_of_any_graph())}"
        )
    return entry.table(request)


def schedules_of_any_graph() -> tuple[str, ...]:
    """The names of those that order the chunks of any graph on any placement, sorted."""
    return tuple(name for name in schedule_names() if KNOWN[name].any_graph)
