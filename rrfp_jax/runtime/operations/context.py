"""The context in which a stage runs an operation (:mod:`rrfp_jax.schedules.operations`).

``Op.run`` is called with an :class:`OperationContext` on the thread of its lane: the stage's compute thread, or a
thread that the engine has to itself. It launches its work and returns the arrays that are complete when that is done,
or None. A method ``check(devices)`` of it, if there is one, is called before anything is compiled, with the devices
that it will run on, and raises ValueError where it cannot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.core.groups import check_engines
from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Op, PipelineGraph, Task


@dataclass(kw_only=True)
class OperationContext:
    """One task of an operation, and the state of its chunk at that moment."""

    step: int
    task: Task
    state: ChunkState
    """Parameters, optimizer state and accumulators of the chunk."""
    stashes: dict[tuple[int, int], Any]
    """By chunk and microbatch, the arrays kept for the backward."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that operations keep for the chunk from task to task and from step to step."""
    programs: MicrobatchPrograms | None = None
    """The compiled programs of the microbatch; None for a task that runs once per step."""
    owns_inputs: bool = False
    """Whether the array that the chunk's predecessor sent is held by the stash alone, if it is a part of that."""
    forward: Callable[[], tuple[Any, Any]] | None = None
    """Runs the chunk's forward once more on the inputs that were kept, and returns its output, by which it can be
    waited for, and the stash; None where they were not (:attr:`rrfp_jax.schedules.Op.keeps_inputs`)."""

    @property
    def stash(self) -> Any:
        """The tree of arrays that the chunk keeps of the microbatch for its backward; None before it is there, and
        once the backward has it."""
        return self.stashes.get((self.task.chunk, self.task.microbatch))

    @stash.setter
    def stash(self, stash: Any) -> None:
        self.stashes[self.task.chunk, self.task.microbatch] = stash


def operations_of(graph: PipelineGraph) -> Mapping[str, Op]:
    """Returns the operations of a graph by their letters. Raises ValueError for one that cannot run for real."""
    for op in graph.ops:
        if op.run is None:
            raise ValueError(f"operation {op.letter!r} has no function to run: give it one, or only simulate")
    return {op.letter: op for op in graph.ops}


def check_operations(graph: PipelineGraph, process: Process) -> None:
    """Raises ValueError where an operation cannot run, here or on the units that this process hosts."""
    operations = operations_of(graph)
    for unit in process.units:
        check_engines(graph, process.layout.stage_of(unit), len(process.layout.ranks_of(unit)))
        for op in operations.values():
            check = getattr(op.run, "check", None)
            if check is not None:
                check(process.devices_of(unit))
