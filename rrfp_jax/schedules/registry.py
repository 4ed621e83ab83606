"""The names of the schedules, and how each is built.

Adding a schedule is one small function in a module of its own::

    @schedule("my-schedule", placement="one chunk per stage", source="where it is published")
    def my_schedule(request: ScheduleRequest) -> ScheduleTable:
        ...

and that module's name among the imports of ``rrfp_jax.schedules``.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import PipelineGraph, Placement, linear


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """What a table is built for. Raises ValueError on numbers that no schedule accepts."""

    num_stages: int
    num_microbatches: int
    chunks_per_stage: int | None = None
    """None: the schedule's own choice (its ``chunks_per_stage`` entry)."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the stage's next one; only for schedules with such groups. None: the
    schedule's own choice."""
    window: int | tuple[int, ...] | None = None
    """In-flight microbatches, at most or per stage; read by eager 1F1B."""
    durations_ms: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Profiled F, I and W of one stage (all its chunks), in milliseconds; read by schedules made from such times."""
    comm_ms: float = 0.0
    """Profiled time from one stage to the next, in milliseconds; read likewise."""
    memory_limit: float | None = None
    """Activations that a stage may hold, in those of one microbatch; read by the automatic schedule (None: 2 p)."""
    input_gradient_frees: float = 0.0
    """The part of a microbatch's activations that I frees already; W frees the rest. Read by the automatic schedule."""
    graph: PipelineGraph | None = None
    """Which chunks feed which, for the schedules of any graph, for example encoders and a decoder. None: a chain. How
    the backward is cut is the schedule's choice."""
    placement: Placement | None = None
    """Which stage owns which chunk of that graph. None: one chunk per stage."""

    def __post_init__(self) -> None:
        counts = {"num_stages": self.num_stages, "num_microbatches": self.num_microbatches}
        choices = {"chunks_per_stage": self.chunks_per_stage, "group_size": self.group_size}
        for name, count in (counts | choices).items():
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}: give at least 1")
        windows = (self.window,) if isinstance(self.window, int) else self.window or ()
        if any(window < 1 for window in windows):
            raise ValueError(f"window {self.window} holds no microbatch on some stage: give at least 1 per stage")
        if isinstance(self.window, tuple) and len(self.window) != self.num_stages:
            raise ValueError(f"{len(self.window)} windows for {self.num_stages} stages: give one, or one per stage")
        if min(self.durations_ms) < 0 or self.comm_ms < 0:
            raise ValueError(f"durations_ms {self.durations_ms} and comm_ms {self.comm_ms} must not be negative")
        if not 0 <= self.input_gradient_frees <= 1:
            raise ValueError(f"input_gradient_frees is {self.input_gradient_frees}: give a part between 0 and 1")
        if self.graph is None and self.placement is not None:
            raise ValueError("a placement is for the chunks of a graph: give the graph too")
        if self.graph is not None:
            _check_graph(self, self.graph, self.placement or linear(self.graph.num_chunks))


def _check_graph(request: ScheduleRequest, graph: PipelineGraph, placement: Placement) -> None:
    if graph.num_chunks != placement.num_chunks:
        raise ValueError(
            f"the graph has {graph.num_chunks} chunks, the placement {placement.num_chunks}: give each chunk a stage"
        )
    if placement.num_stages != request.num_stages:
        raise ValueError(
            f"the chunks lie on {placement.num_stages} stages, not on {request.num_stages}: give both the same number"
        )
    if graph.num_microbatches != request.num_microbatches:
        raise ValueError(f"the graph has {graph.num_microbatches} microbatches, not {request.num_microbatches}")


Generator = Callable[[ScheduleRequest], ScheduleTable]


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """One schedule and what a user should know before asking for it."""

    name: str
    build: Generator
    placement: str
    """How chunks go to stages, in words."""
    source: str
    split_backward: bool = False
    """Whether the backward runs as I and W."""
    chunks_per_stage: int = 1
    """Without the user's word."""
    fixed_chunks: bool = True
    """Whether ``chunks_per_stage`` is the only number possible."""
    has_groups: bool = False
    """Whether a ``group_size`` may be asked for."""
    any_graph: bool = False
    """Whether it orders the chunks of any graph on any placement; the others make a placement and a chain."""
    constraints: str = "none"
    chunk_parts: Callable[[int], tuple[int, ...]] | None = None
    """Where the chunks are not meant to be equal: their relative sizes for a number of stages."""


_ENTRIES: dict[str, ScheduleEntry] = {}


def schedule(name: str, **facts: Any) -> Callable[[Generator], Generator]:
    """Register a function ``(request) -> table`` under a name; ``facts`` are the other fields of its entry."""

    def register(build: Generator) -> Generator:
        assert name not in _ENTRIES, f"schedule {name!r} is registered twice"
        _ENTRIES[name] = ScheduleEntry(name=name, build=build, **facts)
        return build

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
    return entry.build(request).validate()


def schedules_of_any_graph() -> tuple[str, ...]:
    """The names of those that order the chunks of any graph on any placement, sorted."""
    return tuple(name for name in schedule_names() if _ENTRIES[name].any_graph)
