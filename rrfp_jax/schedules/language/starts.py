"""Orders by start slots: of every task, or of the passes of one microbatch, which repeat.

:func:`slots` sorts tasks by the slot that a function gives each. :func:`block` lists the passes of one microbatch on a
stage with their start slots; every so many slots the next microbatch follows. Two tasks in one slot are an error.
``packed()`` squeezes a block in which W have no place yet (:mod:`rrfp_jax.schedules.language.packing`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp_jax.schedules.language.order import Order, Row
from rrfp_jax.schedules.language.packing import pack
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, is_number
from rrfp_jax.schedules.language.streams import Stream
from rrfp_jax.tasks import Task, TaskKind

Starts = dict[Task, float]
"""The slot in which each task starts."""


def _by_start(at: Callable[[Stage], Starts]) -> Order:
    def write(row: Row) -> None:
        taken: dict[float, Task] = {}
        for task, slot in at(row.stage).items():
            if not is_number(slot):
                raise Mistake(f"{task} starts at {slot!r}: give the number of a slot")
            if slot in taken:
                raise Mistake(f"{taken[slot]} and {task} both start in slot {slot:g}: shift one of them")
            taken[slot] = task
        for slot in sorted(taken):
            row.put(*taken[slot])

    return Order(write)


def slots(at: Callable[[Task], float]) -> Order:
    """All tasks of the stage by the slot that ``at`` gives each."""
    if not callable(at):
        raise Mistake(f"slots take a function of a task, not {at!r}: write block(...).every(n) for a mapping")
    return _by_start(lambda stage: {task: at(task) for task in stage.graph.tasks(stage.chunks)})


class Block(Order):
    """The passes of microbatch m on a stage, ``period * m`` slots after those of microbatch 0."""

    def __init__(self, passes: Mapping[Stream, int], period: int) -> None:
        super().__init__(_by_start(self.starts).write)
        self.passes, self.period = passes, period

    def starts(self, stage: Stage) -> Starts:
        """All tasks with their slots."""
        return {
            Task(TaskKind(part), chunk, m): start + self.period * m
            for stream, start in self.passes.items()
            for chunk in [stream.own_chunk(stage)]
            for part in stage.parts(stream.kind, chunk)
            for m in stage.graph.microbatches(chunk)
        }

    def packed(self) -> "Packed":
        """W in free slots, warm-up and drain moved as early as the block's memory allows, nothing between."""
        return Packed(self)


@dataclass(frozen=True)
class block:
    """The passes of microbatch 0 and the slots in which they start, ``block({F[c]: 0, I[c]: 5})``."""

    passes: Mapping[Stream, int]

    def __post_init__(self) -> None:
        given: Any = self.passes
        if not (isinstance(given, Mapping) and all(isinstance(one, Stream) for one in given)):
            raise Mistake(f"a block maps streams to slots, such as {{F[0]: 0, B[0]: 5}}, not {given!r}")
        for stream, slot in given.items():
            if not isinstance(slot, int):
                raise Mistake(f"{stream} of the block starts at {slot!r}: give the number of a slot, a whole one")

    def every(self, slots: Any) -> Block:
        """The next microbatch follows so many slots later."""
        if not isinstance(slots, int) or slots < len(self.passes):
            raise Mistake(f"{len(self.passes)} passes do not fit in {slots!r} slots: repeat them in {len(self.passes)}")
        return Block(self.passes, slots)


@dataclass(frozen=True)
class Packed(Described):
    """A packed block, which only all stages together can give."""

    block: Block

    def orders(self, stages: Sequence[Stage], made: Sequence["Packed"]) -> list[list[Task]]:
        """Their blocks packed together."""
        return pack(stages[0], [each.block.starts(stage) for each, stage in zip(made, stages, strict=True)])

    def remedy(self, missing: Sequence[Task]) -> str:
        """What the blocks lack."""
        return f"let the block hold {' and '.join(dict.fromkeys(t.kind for t in missing if t.kind != TaskKind.W))} too"
