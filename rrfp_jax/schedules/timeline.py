"""The record of a run, for the simulator and the runtime: which task ran when, and why a stage was idle.

Definitions (times in seconds on one clock, whose zero is arbitrary)
--------------------------------------------------------------------
makespan
    First start to last end of a step's tasks with a microbatch (F, B, I, W), over all stages.
cost
    The longest span of a stage, from its first start to its last end; a parallelogram has no bubble by this measure
    (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 5).
bubble fraction
    ``(cost - mean work of a stage) / cost``.
stage bubble
    ``1 - work of the stage / makespan``.
in flight
    A stage holds a microbatch from the start of its first F there to the end of its last B or W there.

R and U run once per step, after the pipeline has drained, and count in none of these. Neither do operations on an
engine beside the stage (:mod:`rrfp_jax.schedules.operations`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from rrfp_jax.schedules.operations import COMPUTE
from rrfp_jax.schedules.tasks import Task, TaskKind


class IdleReason(StrEnum):
    """Reasons why a stage ran nothing."""

    FILL = "fill"
    """It has not run any task of this step yet: no input has reached it."""
    INPUT = "input"
    """Every task that is left waits for an input or for its own predecessor."""
    WINDOW = "window"
    """Forwards are ready, but the window, the footprint or the bound of read-ahead admits none."""
    ORDER = "order"
    """Tasks are ready, but a strict table names another one next."""
    HOLD = "hold"
    """Tasks are ready, but foresight waits for one that its table names before them."""
    AGREEMENT = "agreement"
    """Tasks are ready on this process, but the processes that the stage spans have not agreed on one yet."""
    DRAIN = "drain"
    """Its own microbatches are done; the other stages are still busy, or the step's agreement is under way."""
    ENGINE = "engine"
    """It could go on if an engine beside it were done: a copy is under way, or the memory that one frees."""
    HOST = "host"
    """A task was chosen; the host was still handing it to the device."""
    PIECE = "piece"
    """It ran a piece of other work, such as it has for idle times."""


class Span(NamedTuple):
    """A task's run on a stage."""

    step: int
    stage: int
    task: Task
    start_s: float
    end_s: float
    lane: str = COMPUTE
    """The engine that the task kept busy, by default the stage's own."""

    @property
    def is_beside(self) -> bool:
        """Whether the task ran on an engine beside the stage's own."""
        return self.lane != COMPUTE


class Wait(NamedTuple):
    """A stage's idle time, with its reason."""

    step: int
    stage: int
    start_s: float
    end_s: float
    reason: IdleReason


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over the record of one step: of constant size, and mergeable with those of other stages."""

    num_stages: int
    """Number of stages of the whole run; the sums may be over fewer."""
    start_s: float = inf
    """First start of a task with a microbatch."""
    end_s: float = -inf
    """Last end of a task with a microbatch."""
    cost_s: float = 0.0
    """The longest span of a stage, from its own first start to its own last end."""
    work_s: float = 0.0
    idle_s: dict[IdleReason, float] = field(default_factory=dict)
    looking_ahead: int = 0
    """Number of stages whose foresight was at work."""

    def makespan_s(self) -> float:
        return max(0.0, self.end_s - self.start_s)

    def bubble_fraction(self) -> float:
        return (self.cost_s - self.work_s / self.num_stages) / self.cost_s if self.cost_s else 0.0

    def merged(self, *others: "StepSums", later_s: float = 0.0) -> "StepSums":
        """Returns the sums of these stages and others, whose clock shows ``later_s`` less."""
        idle_s = {**self.idle_s}
        for other in others:
            for reason, seconds in other.idle_s.items():
                idle_s[reason] = idle_s.get(reason, 0.0) + seconds
        return StepSums(
            num_stages=self.num_stages,
            start_s=min([self.start_s, *(other.start_s + later_s for other in others)]),
            end_s=max([self.end_s, *(other.end_s + later_s for other in others)]),
            cost_s=max([self.cost_s, *(other.cost_s for other in others)]),
            work_s=sum([self.work_s, *(other.work_s for other in others)]),
            idle_s=idle_s,
            looking_ahead=sum([self.looking_ahead, *(other.looking_ahead for other in others)]),
        )


@dataclass
class Timeline:
    """The spans and waits of one or more steps, in the order of recording."""

    num_stages: int
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def steps(self) -> list[int]:
        return sorted({span.step for span in self.spans})

    def of_step(self, step: int) -> "Timeline":
        return self._where(lambda one: one.step == step)

    def of_stage(self, stage: int) -> "Timeline":
        """Returns the record of one stage, in the same stage numbering."""
        return self._where(lambda one: one.stage == stage)

    def last_steps(self, number: int) -> "Timeline":
        """Returns the record of the last ``number`` steps."""
        wanted = frozenset(self.steps()[-number:])
        return self._where(lambda one: one.step in wanted)

    def _where(self, keeps: Callable[[Span | Wait], bool]) -> "Timeline":
        return Timeline(self.num_stages, list(filter(keeps, self.spans)), list(filter(keeps, self.waits)))

    def shifted(self, later_s: float, later_steps: int) -> "Timeline":
        """Returns the same record, later by ``later_s`` and with step numbers larger by ``later_steps``."""
        return Timeline(
            self.num_stages,
            [
                s._replace(step=s.step + later_steps, start_s=s.start_s + later_s, end_s=s.end_s + later_s)
                for s in self.spans
            ],
            [
                w._replace(step=w.step + later_steps, start_s=w.start_s + later_s, end_s=w.end_s + later_s)
                for w in self.waits
            ],
        )

    def by_step(self) -> list["Timeline"]:
        """Returns the record of each step, ascending, in one pass."""
        records = {step: Timeline(self.num_stages) for step in self.steps()}
        for span in self.spans:
            records[span.step].spans.append(span)
        for wait in self.waits:
            if wait.step in records:
                records[wait.step].waits.append(wait)
        return list(records.values())

    def by_period(self) -> list["Timeline"]:
        """Returns the record of the time from each step's end on a stage to the end of the next step there, ascending.

        These are the records of :meth:`by_step`, but where steps overlap: there a period has tasks of the step that is
        under way besides.
        """
        ends: list[dict[int, float]] = [{} for _ in range(self.num_stages)]
        for step, stage, _, _, end_s, _ in self.spans:
            ends[stage][step] = max(end_s, ends[stage].get(step, end_s))
        records = {step: Timeline(self.num_stages) for step in self.steps()}
        sorted_ends = [sorted(of_stage.items()) for of_stage in ends]
        times = [[end_s for _, end_s in of_stage] for of_stage in sorted_ends]
        recorded: list[Span | Wait] = [*self.spans, *self.waits]
        for one in recorded:
            place = bisect_left(times[one.stage], one.end_s)
            step = one.step if place == len(times[one.stage]) else min(one.step, sorted_ends[one.stage][place][0])
            if step in records:
                kept: list[Any] = records[step].spans if isinstance(one, Span) else records[step].waits
                kept.append(one)
        return list(records.values())

    def extend(self, other: "Timeline") -> None:
        self.spans.extend(other.spans)
        self.waits.extend(other.waits)

    def sums(self) -> StepSums:
        """Returns the sums over this record of one step."""
        idle_s: dict[IdleReason, float] = {}
        for wait in self.waits:
            idle_s[wait.reason] = idle_s.get(wait.reason, 0.0) + wait.end_s - wait.start_s
        starts, ends, work_s = [inf] * self.num_stages, [-inf] * self.num_stages, [0.0] * self.num_stages
        for _, stage, task, start_s, end_s, lane in self.spans:
            if task.microbatch >= 0 and lane == COMPUTE:
                starts[stage] = min(starts[stage], start_s)
                ends[stage] = max(ends[stage], end_s)
                work_s[stage] += end_s - start_s
        return StepSums(
            num_stages=self.num_stages,
            start_s=min(starts, default=inf),
            end_s=max(ends, default=-inf),
            cost_s=max((end - start for start, end in zip(starts, ends, strict=True) if start < inf), default=0.0),
            work_s=sum(work_s),
            idle_s=idle_s,
        )

    def makespan_s(self) -> float:
        """Returns the time from the first start to the last end; 0 where nothing ran."""
        return self.sums().makespan_s()

    def work_s(self) -> list[float]:
        return [sum((span.end_s - span.start_s for span in spans), 0.0) for spans in self._per_stage()]

    def bubble_fraction(self) -> float:
        return self.sums().bubble_fraction()

    def stage_bubbles(self) -> list[float]:
        makespan = self.makespan_s()
        return [1 - work / makespan if makespan else 0.0 for work in self.work_s()]

    def order(self) -> list[list[Task]]:
        """Returns the tasks with a microbatch that each stage ran, by start."""
        return [[s.task for s in sorted(spans, key=lambda s: s.start_s)] for spans in self._per_stage()]

    def peak_in_flight(self) -> list[int]:
        """Returns the most microbatches that each stage held at once, over all steps recorded."""
        peaks = []
        for spans in self._per_stage():
            first: dict[tuple[int, int], float] = {}
            last: dict[tuple[int, int], float] = {}
            for span in spans:
                key = (span.step, span.task.microbatch)
                if span.task.kind is TaskKind.F:
                    first[key] = min(first.get(key, span.start_s), span.start_s)
                last[key] = max(last.get(key, span.end_s), span.end_s)
            # At the same time ends sort before starts: a microbatch that leaves makes way for the one that comes.
            changes = sorted([(last[key], -1) for key in first] + [(start, 1) for start in first.values()])
            peaks.append(max(accumulate((change for _, change in changes), initial=0)))
        return peaks

    def idle_s_by_reason(self) -> list[dict[IdleReason, float]]:
        """Returns the seconds that each stage was idle, by reason."""
        totals: list[dict[IdleReason, float]] = [defaultdict(float) for _ in range(self.num_stages)]
        for wait in self.waits:
            totals[wait.stage][wait.reason] += wait.end_s - wait.start_s
        return [dict(total) for total in totals]

    def as_plain(self, *, later_s: float = 0.0) -> list[list[list[int | float | str]]]:
        """Returns spans and waits as plain lists, ``later_s`` later: for a process whose clock shows that much more."""
        return [
            [
                [
                    s.step,
                    s.stage,
                    str(s.task),
                    s.start_s + later_s,
                    s.end_s + later_s,
                    *([s.lane] if s.is_beside else []),
                ]
                for s in self.spans
            ],
            [[w.step, w.stage, w.start_s + later_s, w.end_s + later_s, str(w.reason)] for w in self.waits],
        ]

    @classmethod
    def from_plain(cls, num_stages: int, plain: Iterable[Iterable[Iterable[Any]]]) -> "Timeline":
        """Reads the record that :meth:`as_plain` wrote. Raises ValueError on anything else."""
        spans, waits = plain
        return cls(
            num_stages,
            [
                Span(step, stage, Task.parse(task), start_s, end_s, *lane)
                for step, stage, task, start_s, end_s, *lane in spans
            ],
            [Wait(step, stage, start_s, end_s, IdleReason(reason)) for step, stage, start_s, end_s, reason in waits],
        )

    def beside(self) -> list[Span]:
        """Returns the spans of engines beside compute, which count in none of the definitions above."""
        return [s for s in self.spans if s.is_beside]

    def _per_stage(self) -> list[list[Span]]:
        per_stage: list[list[Span]] = [[] for _ in range(self.num_stages)]
        for span in self.spans:
            if span.task.microbatch >= 0 and span.lane == COMPUTE:
                per_stage[span.stage].append(span)
        return per_stage
