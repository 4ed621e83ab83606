"""What is known of a schedule, and how a description is registered.

::

    @schedule("my-schedule", shape=ONE_EACH, source="where it is published")
    def my_schedule(s: Stage) -> Order:
        return rounds(F.ahead(s.p - 1 - s.i), B)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rrfp_jax.schedules.description import Description, located, table_of
from rrfp_jax.schedules.language.stage import Stage, WholeBackward
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.shapes import ANY, Shape
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Op, linear


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """One schedule and what a user should know before asking for it."""

    name: str
    describe: Description
    source: str = "yours"
    shape: Shape = ANY
    """How chunks go to stages."""
    split_backward: bool | None = None
    """Whether the backward runs as I and W; None: where the description names one of them."""
    weights_fill: bool = False
    """Whether W stand where a stage would idle, so that as a hint they rank behind all F and I."""
    from_times: bool = False
    """Whether it is made from the profiled times that are asked for with it; others are the same for all times."""
    has_groups: bool = False
    """Whether a ``group_size`` may be asked for."""
    any_graph: bool = False
    """Whether it orders the chunks of any graph on any placement; the others make a placement and a chain."""
    ops: tuple[Op, ...] | Callable[[Stage], Iterable[Op]] = ()
    """Operations that the pipeline has with this schedule; or a function that gives them for its sizes, called with the
    first stage."""
    constraints: str = "none"
    chunk_parts: Callable[[int], tuple[int, ...]] | None = None
    """Where the chunks are not meant to be equal: their relative sizes for a number of stages."""

    def chunks_for(self, request: ScheduleRequest) -> int:
        """The chunks per stage that a request means; raises ValueError if the schedule cannot have them."""
        asked, own = request.chunks_per_stage, self.shape.chunks_per_stage
        if asked is None or (self.any_graph and request.placement is not None):
            return own
        if self.shape.fixed_chunks and asked != own:
            raise ValueError(
                f"schedule {self.name!r} has {own} chunks per stage, not {asked}: give chunks_per_stage={own}"
            )
        return asked

    def stages(self, request: ScheduleRequest, *, split: bool = False) -> list[Stage]:
        """What its description is called with."""
        p, m, v = request.num_stages, request.num_microbatches, self.chunks_for(request)
        if request.graph is None:
            placement = located(self.name, None, lambda: self.shape.placement(p, v))
            graph = located(self.name, None, lambda: self.shape.graph(p, v, m))
        else:
            placement, graph = request.placement or linear(request.graph.num_chunks), request.graph
        split_chunks = frozenset(range(graph.num_chunks)) if split else frozenset()
        graph = replace(graph, split=split_chunks)
        own = self.ops
        if callable(own):
            own = _checked(self.name, located(self.name, 0, partial(own, Stage(0, placement, graph, request))))
        graph = replace(graph, ops=(*graph.ops, *own))
        return [Stage(i, placement, graph, request) for i in range(p)]

    def table(self, request: ScheduleRequest) -> ScheduleTable:
        """The validated table; raises ValueError with the remedy where the sizes do not fit it."""
        try:
            stages = self.stages(request, split=bool(self.split_backward))
            table = table_of(self.name, self.describe, stages)
        except ValueError as error:
            if self.split_backward is not None or not isinstance(error.__cause__, WholeBackward):
                raise
            table = table_of(self.name, self.describe, self.stages(request, split=True))
        hint = table.hint and replace(table.hint, weights_fill=self.weights_fill)
        return table.as_hint(weights_fill=self.weights_fill, hint=hint)


D = TypeVar("D", bound=Description)
KNOWN: dict[str, ScheduleEntry] = {}
"""All schedules that have a name everywhere."""
_collecting = [KNOWN]


def schedule(name: str, **facts: Any) -> Callable[[D], D]:
    """Register a description; ``facts`` are the other fields of its entry. Without a shape it takes any graph."""

    def register(describe: D) -> D:
        if name in _collecting[-1]:
            raise ValueError(f"schedule {name!r} is registered twice: give one of them another name")
        if not isinstance(facts.get("shape", ANY), Shape):
            raise ValueError(
                f"schedule {name!r} has the shape {facts['shape']!r}: give one of rrfp_jax.schedules.shapes"
            )
        if not callable(facts.get("ops", ())):
            _checked(name, facts.get("ops", ()))
        entry = ScheduleEntry(name=name, describe=describe, **{"any_graph": "shape" not in facts} | facts)
        _collecting[-1][name] = entry
        return describe

    return register


def _checked(name: str, ops: Iterable[Any]) -> tuple[Op, ...]:
    found = tuple(ops)
    wrong = next((op for op in found if not isinstance(op, Op)), None)
    if wrong is not None:
        raise ValueError(f"schedule {name!r} has {wrong!r} among its operations: give Op(...)")
    return found


@contextmanager
def registering() -> Iterator[dict[str, ScheduleEntry]]:
    """What is registered meanwhile, which is known nowhere else."""
    _collecting.append({})
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()
