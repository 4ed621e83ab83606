"""A running pipeline's table planned anew: recorded by all processes, planned by the first, taken over by all at once.

Between two steps, where :func:`rrfp_jax.planning.replanning.is_due` says so and no step is under way anywhere, the
processes bring what they have recorded of the last steps to the first one: when their tasks ran, and when messages
arrived. It plans, and brings everybody the rows of the better table, if there is one; nobody starts the next step
before it has them. So all stages change their tables between the same two steps, and a message of the next step that
comes early meets an arbiter that keeps it. What is computed does not change.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from rrfp_jax.arbitration import InputArrived, MessageKind, Order
from rrfp_jax.planning.replanning import MAX_STEPS, Plan, Recording, is_due, replanned, rows_of, with_rows
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.prepared import Prepared
from rrfp_jax.runtime.process import Process
from rrfp_jax.simulation import Links, recorded
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.timeline import Timeline

_LOG = logging.getLogger(__name__)
_TENSORS = (MessageKind.ACTIVATION, MessageKind.GRADIENT)
Arrival = tuple[int, str, int, int, int, float]
"""Step, kind, source and target chunk and microbatch of a message, and when it arrived."""


class Adapting:
    """Records the steps of one process and takes part in planning; all processes call it alike."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._timelines: deque[Timeline] = deque(maxlen=MAX_STEPS)
        self._is_begun = False
        self._first_step: int | None = None
        self._num_steps = 0
        self.num_planned = 0
        """How often another table has been taken."""

    def record(self, timeline: Timeline) -> None:
        """A step has ended; the first one of a run, in which everything is new, is not typical of it."""
        if self._is_begun:
            self._timelines.append(timeline)
        self._is_begun = True

    def is_due(self, step: int) -> bool:
        """Whether to plan before this step; asked before each, and told so once."""
        if self._first_step is None:
            self._first_step = step
        is_new = step - self._first_step > self._num_steps
        self._num_steps = step - self._first_step
        return is_new and is_due(self._num_steps)

    def plan(self, running: Prepared) -> Prepared:
        """The same with a better table in force, if one was found; no step must be under way."""
        process, order = self._process, running.order
        if not process.rank:
            _LOG.info("after %d steps: looking for a table that suits them better", self._num_steps)
        own = Timeline(order.placement.num_stages)
        for timeline in self._timelines:
            own.extend(timeline)
        arrivals = process.gather("arrivals", arrivals_at(process, running.runtime), to_all=False)
        whole = process.whole_timeline(own)
        plan = None if process.rank else _plan(order, whole, [one for told in arrivals.values() for one in told])
        told = process.gather("table", None if plan is None else _as_plain(plan), to_all=False)[0]
        self._timelines.clear()
        if told is None:
            return running
        planned = with_rows(order, [[Task.parse(task) for task in row] for row in told["rows"]])
        running.runtime.follow(running.make_arbiters(planned))
        self.num_planned += 1
        _LOG.info(
            "after %d steps the table is planned anew, as %s executes the former one: %.1f%% shorter steps expected",
            self._num_steps,
            told["execution"],
            100 * told["gain"],
        )
        return replace(running, order=planned)


def arrivals_at(process: Process, runtime: PipelineRuntime) -> list[Arrival]:
    """Of the steps whose events are still kept, on the clock of rank 0, for the units that this rank leads."""
    later_s = 0.0 if process.peers is None else process.peers.clocks.offset_s
    return [
        (event.step, *event.message, event.time_s + later_s)
        for unit, log in runtime.logs().items()
        if process.layout.ranks_of(unit)[0] == process.rank
        for segment in log.segments
        for event, _ in segment.entries
        if isinstance(event, InputArrived) and event.message.kind in _TENSORS
    ]


def _plan(order: Order, timeline: Timeline, arrivals: Iterable[Arrival]) -> Plan | None:
    """On rank 0; None where the present table stays."""
    links = Links(extra_ms=latencies_ms(timeline, arrivals, order.graph, order.placement))
    try:
        durations_ms = recorded(timeline, order.graph, per_task=True)
    except ValueError as error:
        _LOG.info("the table stays: one is planned only from steps in which every chunk runs every microbatch")
        _LOG.debug("why no table is planned: %s", error)
        return None
    plan = replanned(order, Recording(durations_ms=durations_ms, links=links))
    return plan if plan.execution is not None else None


def latencies_ms(
    timeline: Timeline, arrivals: Iterable[Arrival], graph: PipelineGraph, placement: Placement
) -> dict[tuple[int, int], float]:
    """How long tensors take between stages, by (sending, receiving) one: the median from a task's end to the arrival
    of what it sent."""
    ends_s = {(span.step, span.task): span.end_s for span in timeline.spans}
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step, kind, source, target, microbatch, time_s in arrivals:
        sent_by = TaskKind.F if kind == MessageKind.ACTIVATION else graph.input_gradient_kind(source)
        end_s = ends_s.get((step, Task(sent_by, source, microbatch)))
        if end_s is not None:
            stages = placement.stage_of_chunk[source], placement.stage_of_chunk[target]
            found[stages].append(1e3 * max(0.0, time_s - end_s))
    return {stages: median(times_ms) for stages, times_ms in found.items()}


def _as_plain(plan: Plan) -> dict[str, Any]:
    rows = [[str(task) for task in row] for row in rows_of(plan.order)]
    return {"rows": rows, "execution": plan.execution, "gain": plan.gain}
