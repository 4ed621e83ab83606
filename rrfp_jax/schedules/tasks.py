"""The vocabulary of all packages: task kinds, tasks, placements and pipeline graphs.

Terms
-----
chunk
    A consecutive part of the model with its own parameters, numbered ``0..C-1`` over the whole model.
stage
    A place that runs one task at a time. A :class:`Placement` says which stage owns which chunk.
task
    One unit of work, ``Task(kind, chunk, microbatch)``; its text form is ``2F5`` (chunk 2, forward, microbatch 5).

Dependencies of one step (RRFP paper, section 3.1, generalised to graphs and to a split backward)
--------------------------------------------------------------------------------------------------
* ``F(c, m)`` waits for ``F(p, m)`` of every predecessor ``p`` of ``c`` that runs microbatch ``m``.
* ``B(c, m)``, or ``I(c, m)`` where the backward is split, waits for ``F(c, m)`` and for the backward of every
  successor that runs ``m`` and returns a gradient to ``c``.
* ``W(c, m)`` waits for ``I(c, m)``.
* ``R(c)`` waits for every ``B`` (or ``W``) of ``c`` and of the chunks that share parameters with it.
* ``U(c)`` waits for ``R(c)`` and for the decision on which the stages agree once per step.

Operations of one's own (:mod:`rrfp_jax.schedules.operations`) are tasks of further kinds, which declare the tasks
before and after them.

A frozen chunk, whose parameters never change, has no W, R and U. It has a backward only where a gradient must pass
through it, to a chunk before it that trains; otherwise it runs F alone.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import ClassVar, NamedTuple

from rrfp_jax.field_rules import MOST, check_types, typed
from rrfp_jax.readable import shown

BUILT_IN = ("F", "B", "I", "W", "R", "U")
"""The letters of the tasks that every pipeline has."""
NO_MICROBATCH = -1
"""The microbatch of tasks that run once per chunk and step (R and U)."""


class TaskKind(str):
    """The kind of a task, in capital letters: those of ``torch.distributed.pipelining``, or an operation's own.

    There is one object for each kind, so that kinds may be compared with ``is``. For operations see
    :mod:`rrfp_jax.schedules.operations`.

    Raises ValueError for anything but capital letters.
    """

    __slots__ = ()
    F: ClassVar["TaskKind"]
    """The forward of a chunk."""
    B: ClassVar["TaskKind"]
    """Full backward: input gradient and weight gradient in one."""
    I: ClassVar["TaskKind"]  # noqa: E741 - the field's letter
    """Input gradient, the first half of a split backward."""
    W: ClassVar["TaskKind"]
    """Weight gradient, the second half of a split backward."""
    R: ClassVar["TaskKind"]
    """Sum of a chunk's gradients over replicas and shared parameters; once per step."""
    U: ClassVar["TaskKind"]
    """Optimizer update of a chunk; once per step."""

    def __new__(cls, letters: str) -> "TaskKind":
        if not isinstance(letters, str):
            raise ValueError(f"{letters!r} is not a kind of task: write capital letters")
        known = _KINDS.get(letters)
        if known is None:
            if not (letters.isascii() and letters.isalpha() and letters.isupper()):
                raise ValueError(f"{letters!r} is not a kind of task: write capital letters")
            known = _KINDS.setdefault(letters, super().__new__(cls, letters))
        return known


_KINDS: dict[str, TaskKind] = {}
TaskKind.F, TaskKind.B, TaskKind.I = TaskKind("F"), TaskKind("B"), TaskKind("I")
TaskKind.W, TaskKind.R, TaskKind.U = TaskKind("W"), TaskKind("R"), TaskKind("U")
BUILT_IN_KINDS = tuple(map(TaskKind, BUILT_IN))
"""The kinds that every pipeline has: F, B, I, W, R and U."""


_TASK_TEXT = re.compile(r"(\d+)([A-Z]+)(\d*)")


class Task(NamedTuple):
    """One unit of work of a stage."""

    kind: TaskKind
    chunk: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{'' if self.microbatch < 0 else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Reads the text form, for example ``2F5`` or ``3U``. Raises ValueError on anything else."""
        match = _TASK_TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a task: write chunk, kind and microbatch, for example '2F5'")
        chunk, letter, microbatch = match.groups()
        kind = TaskKind(letter)
        if kind in BUILT_IN_KINDS and (kind in (TaskKind.R, TaskKind.U)) == bool(microbatch):
            raise ValueError(f"{text!r} is not a task: R and U run once per step, all other kinds name a microbatch")
        return cls(kind, int(chunk), int(microbatch) if microbatch else NO_MICROBATCH)


class Pair(NamedTuple):
    """Two tasks of one stage that run as one program, so that the collectives of each hide behind the other's work."""

    first: Task
    second: Task

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"


_MOST_TOLD = 8


@dataclass(frozen=True)
class Placement:
    """Which stage owns which chunk.

    ``stage_of_chunk[c]`` is the stage of chunk ``c``. Every stage from 0 to the largest one owns at least one chunk.
    """

    stage_of_chunk: tuple[int, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.stage_of_chunk:
            raise ValueError("a placement needs at least one chunk")
        if min(self.stage_of_chunk) < 0:
            raise ValueError(
                f"placement {shown(self.stage_of_chunk)} has a stage below 0: number the stages from 0 without gaps"
            )
        used = set(self.stage_of_chunk)
        gaps = (stage for stage in range(self.num_stages) if stage not in used)
        unused = list(islice(gaps, _MOST_TOLD))  # only a few: the largest number may be any
        if unused:
            raise ValueError(
                f"placement {shown(self.stage_of_chunk)} leaves stages {unused} without a chunk: "
                "number the stages from 0 without gaps"
            )

    @property
    def num_chunks(self) -> int:
        return len(self.stage_of_chunk)

    @cached_property
    def num_stages(self) -> int:
        return max(self.stage_of_chunk) + 1

    @cached_property
    def chunks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each stage, ascending."""
        chunks: list[list[int]] = [[] for _ in range(self.num_stages)]
        for chunk, stage in enumerate(self.stage_of_chunk):
            chunks[stage].append(chunk)
        return tuple(map(tuple, chunks))

    def repeated(self, times: int) -> "Placement":
        """Returns the placement with so many consecutive chunks, such as slices, in the place of each."""
        return Placement(tuple(stage for stage in self.stage_of_chunk for _ in range(times)))


@typed
def linear(num_stages: int) -> Placement:
    """Returns the placement with one chunk per stage, in order."""
    return looped(num_stages, chunks_per_stage=1)


@typed
def looped(num_stages: int, chunks_per_stage: int) -> Placement:
    """Returns the interleaved placement: chunk ``c`` on stage ``c mod num_stages``."""
    _check_sizes(num_stages, "chunks_per_stage", chunks_per_stage)
    return Placement(tuple(range(num_stages)) * chunks_per_stage)


@typed
def v_shaped(num_stages: int) -> Placement:
    """Returns two chunks per stage, down and back up: chunks ``c`` and ``2 * num_stages - 1 - c`` share a stage."""
    return waves(num_stages, num_waves=1)


@typed
def waves(num_stages: int, num_waves: int) -> Placement:
    """Returns ``2 * num_waves`` chunks per stage, zigzag: down the stages, back up, down again (Hanayo, SC'23)."""
    _check_sizes(num_stages, "num_waves", num_waves)
    down = tuple(range(num_stages))
    return Placement((down + down[::-1]) * num_waves)


@typed
def bidirectional(num_stages: int) -> Placement:
    """Returns the placement of two copies of the model in opposite directions (Chimera, SC'21).

    Chunks ``0..num_stages-1`` go down the stages; their copies ``num_stages..2*num_stages-1`` go up.
    """
    return v_shaped(num_stages)


def _check_sizes(num_stages: int, name: str, number: int) -> None:
    if num_stages < 1 or number < 1:
        raise ValueError(f"num_stages ({num_stages}) and {name} ({number}) must both be at least 1")
    if num_stages * number > MOST:
        raise ValueError(f"num_stages ({num_stages}) and {name} ({number}) multiply to more than {MOST:,} chunks")
