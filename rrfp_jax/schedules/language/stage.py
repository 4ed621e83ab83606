"""What a description sees: one stage of one pipeline, frozen."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import Any

from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.slots import SlotLengths, per_stage
from rrfp_jax.tasks import Per, PipelineGraph, Placement, Task, TaskKind


class Mistake(ValueError):
    """What is wrong in a description, without its name and the stage, which are added where it is called."""

    def __init__(self, what: str, stage: int = 0) -> None:
        super().__init__(what)
        self.stage = stage


class WholeBackward(Mistake):
    """I or W of a backward that is one task."""


class Described:
    """What a description gives for a stage."""

    def remedy(self, missing: Sequence[Task]) -> str:
        """What helps where it leaves these out."""
        raise NotImplementedError

    def check(self, stage: "Stage", first: Any) -> None:
        """Raise :class:`Mistake` for what this stage was given; ``first`` is what the first one was."""

    def orders(self, stages: Sequence["Stage"], made: Sequence[Any]) -> list[list[Task]]:
        """The orders of all stages, from what each was given; raises :class:`Mistake`. :class:`Order` has them one by
        one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, in the letters of the papers."""

    i: int
    """Its number, from 0."""
    placement: Placement
    graph: PipelineGraph
    asked: ScheduleRequest
    """What else the table is made for: ``durations_ms`` of a whole stage, ``comm_ms``, ``memory_limit``, ``window``,
    ``group_size``."""

    @property
    def p(self) -> int:
        """Stages."""
        return self.placement.num_stages

    @property
    def m(self) -> int:
        """Microbatches."""
        return self.graph.num_microbatches

    @property
    def chunks(self) -> tuple[int, ...]:
        """Its own chunks, ascending."""
        return self.placement.chunks_of_stage[self.i]

    def hops(self, chunk: int) -> int:
        """How many times the longest way from this chunk to the loss goes from one stage to another."""
        return self._hops[chunk]

    @cached_property
    def depth(self) -> int:
        """The most hops of any chunk with a backward."""
        return max(hops for c, hops in enumerate(self._hops) if self.graph.has_backward(c) or hops == 0)

    @property
    def lengths(self) -> Callable[[Task], float]:
        """How long each task lasts by the profiled times, which the chunks of a stage share."""
        return per_stage(self, SlotLengths(*self.asked.durations_ms))

    @cached_property
    def _hops(self) -> tuple[int, ...]:
        return hops_to_loss(self.placement, self.graph)

    def check_own(self, chunk: int) -> None:
        """Raise :class:`Mistake` unless the chunk is one of the stage's."""
        if chunk not in self.chunks:
            near = min(self.chunks, key=lambda own: abs(own - chunk))
            raise Mistake(f"chunk {chunk} is none of this stage's chunks {list(self.chunks)}: did you mean {near}?")

    def parts(self, kind: str, chunk: int) -> tuple[str, ...]:
        """The kinds of tasks that a pass of this kind is: none where the chunk has no such task, and I and W for B
        where the backward is split. Raises :class:`Mistake` for a kind that no microbatch has."""
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


def hops_to_loss(placement: Placement, graph: PipelineGraph) -> tuple[int, ...]:
    """For every chunk the longest way to a chunk that nobody reads, in hops from one stage to another."""
    hops = [0] * graph.num_chunks
    for chunk in reversed(range(graph.num_chunks)):
        here = placement.stage_of_chunk[chunk]
        ways = (hops[s] + (placement.stage_of_chunk[s] != here) for s in graph.successors(chunk))
        hops[chunk] = max(ways, default=0)
    return tuple(hops)


def is_number(given: Any) -> bool:
    """Whether it is one, and finite."""
    return isinstance(given, Real) and isfinite(given)


def check_number(what: str, given: Any) -> None:
    """Raise :class:`Mistake` for anything but a number of 0 or more."""
    if not (is_number(given) and given >= 0):
        raise Mistake(f"{what} is {given!r}: give a number, 0 or more")
