"""The names of the schedules, and what each is.

Adding a schedule is one small function of a stage in a module of ``rrfp_jax.schedules.published``::

    @schedule("my-schedule", shape=ONE_EACH, source="where it is published")
    def my_schedule(s: Stage) -> Order:
        return rounds(F.ahead(s.p - 1 - s.i), B)
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rrfp_jax.schedules.description import Description, table_of
from rrfp_jax.schedules.language.stage import Stage
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.shapes import ANY, Shape
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import linear


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """One schedule and what a user should know before asking for it."""

    name: str
    describe: Description
    source: str = "yours"
    shape: Shape = ANY
    """How chunks go to stages."""
    split_backward: bool = False
    """Whether the backward runs as I and W."""
    weights_fill: bool = False
    """Whether W stand where a stage would idle, so that as a hint they rank behind all F and I."""
    has_groups: bool = False
    """Whether a ``group_size`` may be asked for."""
    any_graph: bool = False
    """Whether it orders the chunks of any graph on any placement; the others make a placement and a chain."""
    constraints: str = "none"
    chunk_parts: Callable[[int], tuple[int, ...]] | None = None
    """Where the chunks are not meant to be equal: their relative sizes for a number of stages."""

    @property
    def placement(self) -> str:
        """How chunks go to stages, in words."""
        return self.shape.words

    @property
    def chunks_per_stage(self) -> int:
        """Without the user's word."""
        return self.shape.chunks_per_stage

    @property
    def fixed_chunks(self) -> bool:
        """Whether ``chunks_per_stage`` is the only number possible."""
        return self.shape.fixed_chunks

    def stages(self, request: ScheduleRequest) -> tuple[Stage, ...]:
        """What its description is called with."""
        p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage(self.name, request)
        if request.graph is None:
            placement, graph = self.shape.placement(p, v), self.shape.graph(p, v, m)
        else:
            placement, graph = request.placement or linear(request.graph.num_chunks), request.graph
        graph = replace(graph, split=frozenset(range(graph.num_chunks)) if self.split_backward else frozenset())
        return tuple(Stage(i, placement, graph, request) for i in range(p))


D = TypeVar("D", bound=Description)
_ENTRIES: dict[str, ScheduleEntry] = {}


def schedule(name: str, **facts: Any) -> Callable[[D], D]:
    """Register a description under a name; ``facts`` are the other fields of its entry."""

    def register(describe: D) -> D:
        assert name not in _ENTRIES, f"schedule {name!r} is registered twice"
        _ENTRIES[name] = ScheduleEntry(name=name, describe=describe, **facts)
        return describe

    return register


def schedule_names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_ENTRIES))


def schedule_entry(name: str) -> ScheduleEntry:
    """The entry of a schedule; raises ValueError with the names there are."""
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no schedule {name!r}: {meant}the schedules are {', '.join(schedule_names())}")
    return _ENTRIES[name]


def chunks_per_stage(name: str, request: ScheduleRequest) -> int:
    """The number that a request means for a schedule; raises ValueError if the schedule cannot have it."""
    entry = schedule_entry(name)
    asked = request.chunks_per_stage
    if asked is None or (entry.any_graph and request.placement is not None):
        return entry.chunks_per_stage
    if entry.fixed_chunks and asked != entry.chunks_per_stage:
        raise ValueError(
            f"schedule {name!r} has {entry.chunks_per_stage} chunks per stage, not {asked}: "
            f"give chunks_per_stage={entry.chunks_per_stage}"
        )
    return asked


def build_schedule(name: str, request: ScheduleRequest) -> ScheduleTable:
    """The validated table of a schedule; raises ValueError with the remedy where the sizes do not fit it."""
    entry = schedule_entry(name)
    chunks_per_stage(name, request)
    if request.group_size is not None and not entry.has_groups:
        grouped = ", ".join(each.name for each in _ENTRIES.values() if each.has_groups)
        raise ValueError(f"schedule {name!r} has no groups of microbatches: leave group_size out, or take {grouped}")
    if request.graph is not None and not entry.any_graph:
        raise ValueError(
            f"schedule {name!r} makes a chain of chunks and its own placement: leave graph and placement out, or take "
            f"{', '.join(schedules_of_any_graph())}"
        )
    table = table_of(name, entry.describe, entry.stages(request))
    hint = table.hint and replace(table.hint, weights_fill=entry.weights_fill)
    return replace(table, weights_fill=entry.weights_fill, hint=hint)


def schedules_of_any_graph() -> tuple[str, ...]:
    """The names of those that order the chunks of any graph on any placement, sorted."""
    return tuple(name for name in schedule_names() if _ENTRIES[name].any_graph)
