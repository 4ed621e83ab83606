"""The input of a description, one stage of one pipeline; and the results that it may return."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import Any

from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.operations import Per
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.slots import SlotLengths, per_stage
from rrfp_jax.schedules.tasks import Placement, Task, TaskKind


class Mistake(ValueError):
    """An error in a description. The caller of the description adds the schedule's name and the stage."""

    def __init__(self, what: str, stage: int = 0) -> None:
        super().__init__(what)
        self.stage = stage


class WholeBackward(Mistake):
    """A description names I or W of a chunk whose backward is one task."""


class Described:
    """The result of a description for a stage."""

    def remedy(self, missing: Sequence[Task]) -> str:
        """Returns the remedy for tasks that are left out."""
        raise NotImplementedError

    def check(self, stage: "Stage", first: Any) -> None:
        """Raises :class:`Mistake` where the result of this stage has an error; ``first`` is the first stage's."""

    def orders(self, stages: Sequence["Stage"], made: Sequence[Any]) -> list[list[Task]]:
        """Returns the orders of all stages from their results together. Raises :class:`Mistake`. An :class:`TaskOrder`
        needs no other stage, and has :meth:`TaskOrder.on` instead."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, in the letters of the papers."""

    i: int
    """The stage's number, from 0."""
    placement: Placement
    graph: PipelineGraph
    asked: ScheduleRequest
    """The request: ``durations_ms`` of a whole stage, ``comm_ms``, ``memory_limit``, ``window``, ``group_size``."""

    @property
    def p(self) -> int:
        return self.placement.num_stages

    @property
    def m(self) -> int:
        return self.graph.num_microbatches

    @property
    def chunks(self) -> tuple[int, ...]:
        """The stage's own chunks, ascending."""
        return self.placement.chunks_of_stage[self.i]

    def hops(self, chunk: int) -> int:
        """Returns how often the longest way from this chunk to the loss changes stages."""
        return self._hops[chunk]

    @cached_property
    def depth(self) -> int:
        """The most hops of any chunk with a backward."""
        return max(hops for c, hops in enumerate(self._hops) if self.graph.has_backward(c) or hops == 0)

    @property
    def lengths(self) -> Callable[[Task], float]:
        """The length of each task by the profiled times, which the chunks of a stage share."""
        return per_stage(self, SlotLengths(*self.asked.durations_ms))

    @cached_property
    def _hops(self) -> tuple[int, ...]:
        """For every chunk the longest way to a chunk without successors, in hops from one stage to another."""
        return self._hops_along(self.graph.successors)

    @cached_property
    def hops_back(self) -> tuple[int, ...]:
        """For every chunk the longest way on which it is returned a gradient, in hops from one stage to another."""
        return self._hops_along(self.graph.gradient_successors)

    def _hops_along(self, after: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
        stage_of = self.placement.stage_of_chunk
        hops = [0] * len(stage_of)
        for chunk in reversed(range(len(stage_of))):
            hops[chunk] = max((hops[s] + (stage_of[s] != stage_of[chunk]) for s in after(chunk)), default=0)
        return tuple(hops)

    def check_own(self, chunk: int) -> None:
        """Raises :class:`Mistake` unless the chunk is one of the stage's."""
        if chunk not in self.chunks:
            near = min(self.chunks, key=lambda own: abs(own - chunk))
            raise Mistake(f"chunk {chunk} is none of this stage's chunks {list(self.chunks)}: did you mean {near}?")

    def parts(self, kind: str, chunk: int) -> tuple[str, ...]:
        """Returns the kinds of tasks that make up a pass of this kind.

        They are none where the chunk has no such task, and I and W for B where the backward is split. Raises
        :class:`Mistake` for a kind that no microbatch has.
        """
        graph = self.graph
        if kind == TaskKind.B and chunk in graph.split:
            return graph.built_in_kinds(chunk)[1:]
        if kind in (TaskKind.I, TaskKind.W) and chunk not in graph.split:
            raise WholeBackward(f"{kind}[{chunk}] is not there, the backward is whole: write B, or split_backward=True")
        known = ["F", "B", "I", "W", *(op.letter for op in graph.ops if op.per is Per.MICROBATCH)]
        once = next((op.per for op in graph.ops if op.letter == kind and op.per is not Per.MICROBATCH), None)
        if once is not None:
            raise Mistake(f"{kind} runs once per {once}, when what it comes after is done: leave it out of the order")
        if kind not in known:
            near = difflib.get_close_matches(kind, known, n=1, cutoff=0.1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise Mistake(f"no microbatch has a task of kind {kind!r}: {meant}the kinds are {', '.join(known)}")
        return (kind,) if kind in graph.kinds(chunk) else ()


def is_number(given: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(given, Real) and isfinite(given)


def check_number(what: str, given: Any) -> None:
    """Raises :class:`Mistake` for anything but a number of 0 or more."""
    if not (is_number(given) and given >= 0):
        raise Mistake(f"{what} is {given!r}: give a number, 0 or more")


@dataclass(frozen=True)
class Quickest(Described):
    """The alternative that strict execution ends first with the profiled times; as a hint the first one ranks."""

    alternatives: tuple[Described, ...]


def quickest(*alternatives: Any) -> Quickest:
    """Returns the order among these that takes least time with the profiled times; among equal ones the first."""
    if not alternatives:
        raise Mistake("quickest has nothing to choose from: give it orders")
    wrong = next((one for one in alternatives if not isinstance(one, Described)), None)
    if wrong is not None:
        raise Mistake(f"quickest chooses among orders, not {wrong!r}")
    return Quickest(alternatives)
