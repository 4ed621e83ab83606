"""Kinds of tasks, and a task: one unit of work of a stage."""

import re
from typing import ClassVar, NamedTuple

BUILT_IN = ("F", "B", "I", "W", "R", "U")
"""The letters of the tasks that every pipeline has."""
NO_MICROBATCH = -1
"""The microbatch of tasks that run once per chunk and step (R and U)."""


class TaskKind(str):
    """The kind of a task, in capital letters: those of ``torch.distributed.pipelining``, or an operation's own.

    There is one object for each kind, so that kinds may be compared with ``is``. For operations see
    :mod:`rrfp_jax.tasks.operations`.

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
