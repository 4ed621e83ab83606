"""Orders by start slots: of every task, or of the passes of one microbatch, which repeat.

:func:`slots` sorts tasks by the slot that a function gives each. :func:`block` lists the passes of one microbatch on a
stage with their start slots; the next microbatch follows a fixed number of slots later. Two tasks in one slot are an
error.

Packing a block (``packed()``; arXiv 2405.15362) puts W into free slots, warm-up and drain as early as memory allows.
A block in which all passes are one slot long fills the steady state without collisions, and the time from F to W bounds
the memory: the sooner the passes of a microbatch follow each other, the fewer of them are in flight. The full schedule
follows in five steps (section 3 and appendix of the paper):

1. the block is repeated for every microbatch; each W goes into the first free slot after its I;
2. *reorder* warm-up and drain: a pass moves to the earliest free slot that its inputs allow and that does not raise the
   stage's peak beyond the largest peak of any stage so far;
3. *squeeze*: keep the order, run everything as soon as possible;
4. forget where W are, reorder the drain once more, and give W the free slots anew;
5. squeeze again; the order that remains is the result.

The steps work on slots, as the construction assumes F = I = W; execution with other times keeps the order.
``_weight(n)`` is the n-th weight gradient of a stage, of any chunk; it may run once n + 1 input gradients have.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rrfp_jax.schedules.language.orders import OrderRow, Stream, TaskOrder
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, is_number
from rrfp_jax.schedules.tasks import Task, TaskKind


def _write_by_start(row: OrderRow, starts: Mapping[Task, Any]) -> None:
    taken: dict[float, Task] = {}
    for task, slot in starts.items():
        if not is_number(slot):
            raise Mistake(f"{task} starts at {slot!r}: give the number of a slot")
        if slot in taken:
            raise Mistake(f"{taken[slot]} and {task} both start in slot {slot:g}: shift one of them")
        taken[slot] = task
    for slot in sorted(taken):
        row.put(*taken[slot])


def slots(at: Callable[[Task], float]) -> TaskOrder:
    """Returns the order of all tasks of the stage by the slot that ``at`` gives each."""
    if not callable(at):
        raise Mistake(f"slots take a function of a task, not {at!r}: write block(...).every(n) for a mapping")
    return TaskOrder(
        lambda row: _write_by_start(row, {task: at(task) for task in row.stage.graph.tasks(row.stage.chunks)})
    )


@dataclass(frozen=True)
class RepeatedBlock(TaskOrder):
    """The passes of microbatch m on a stage, ``period * m`` slots after those of microbatch 0."""

    passes: Mapping[Stream, int]
    period: int

    def starts(self, stage: Stage) -> dict[Task, int]:
        """Returns all tasks with the slots in which they start."""
        return {
            Task(TaskKind(part), chunk, m): start + self.period * m
            for stream, start in self.passes.items()
            for chunk in [stream.own_chunk(stage)]
            for part in stage.parts(stream.kind, chunk)
            for m in stage.graph.microbatches(chunk)
        }

    def write(self, row: OrderRow) -> None:
        _write_by_start(row, self.starts(row.stage))

    def packed(self) -> "PackedBlock":
        """Returns the packed order: W in free slots, warm-up and drain as early as the block's memory allows."""
        return PackedBlock(self)


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

    def every(self, slots: Any) -> RepeatedBlock:
        """Repeats the block for every microbatch, each this many slots after the one before."""
        if not isinstance(slots, int) or slots < len(self.passes):
            raise Mistake(f"{len(self.passes)} passes do not fit in {slots!r} slots: repeat them in {len(self.passes)}")
        return RepeatedBlock(self.passes, slots)


F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


@dataclass(frozen=True)
class PackedBlock(Described):
    """A packed block: an order that all stages make together."""

    block: RepeatedBlock

    def orders(self, stages: Sequence[Stage], made: Sequence["PackedBlock"]) -> list[list[Task]]:
        """Returns the orders of all stages, whose blocks are packed together, by the five steps of the paper."""
        starts = [each.block.starts(stage) for each, stage in zip(made, stages, strict=True)]
        for i, slots in enumerate(starts):
            if any(task.kind is W for task in slots):
                raise Mistake("packed() gives W their slots itself: let the block hold F and I alone", i)
            for slot, together in groupby(sorted(slots, key=slots.__getitem__), slots.__getitem__):
                first, *others = together
                if others:
                    raise Mistake(f"{first} and {others[0]} both start in slot {slot:g}: shift one of them", i)
        grid = _Grid(stages[0], starts)
        grid.fill_weights()
        steady_from = max(slot for task, slot in grid.slots[0].items() if task.kind is not W and task.microbatch == 0)
        steady_to = grid.last_begins()
        grid.reorder(lambda slot: slot < steady_from or slot > steady_to)
        grid.squeeze()
        # Squeezing has changed the distances that W filled, so the drain is packed once more without them.
        steady_to = grid.last_begins()
        grid.slots = [{task: slot for task, slot in slots.items() if task.kind is not W} for slots in grid.slots]
        grid.reorder(lambda slot: slot > steady_to)
        grid.fill_weights()
        grid.squeeze()
        orders = []
        for slots in grid.slots:
            order = sorted(slots, key=slots.__getitem__)
            inputs = [task for task in order if task.kind is I]
            # The n-th W is that of the n-th I.
            orders.append([inputs[t.microbatch]._replace(kind=W) if t.kind is W else t for t in order])
        return orders

    def remedy(self, missing: Sequence[Task]) -> str:
        """Returns the passes that the blocks lack, as a remedy."""
        return f"let the block hold {' and '.join(dict.fromkeys(t.kind for t in missing if t.kind != TaskKind.W))} too"


def _weight(number: int) -> Task:
    return Task(W, -1, number)


class _Grid:
    """The slots of all tasks: ``slots[stage][task]`` is the one in which the task starts.

    Memory counts chunk passes: F adds one, W removes one, at the end of its slot. While no W has a slot, each free slot
    counts as one, if there is an I that waits for its W.
    """

    def __init__(self, stage: Stage, slots: list[dict[Task, int]]) -> None:
        self.graph, self.stage_of, self.slots = stage.graph, stage.placement.stage_of_chunk, slots
        self._input_gradients = [sorted(slot for task, slot in slots.items() if task.kind is I) for slots in slots]

    def last_begins(self) -> int:
        """Returns the slot in which the first stage starts its last microbatch."""
        last = self.graph.num_microbatches - 1
        return min(slot for task, slot in self.slots[0].items() if task.kind is not W and task.microbatch == last)

    def fill_weights(self) -> None:
        """Gives every W of a stage the first free slot after its I."""
        for slots, inputs in zip(self.slots, self._input_gradients, strict=True):
            taken = {slot: task.kind for task, slot in slots.items()}
            slot = waiting = given = 0
            while given < len(inputs):
                kind = taken.get(slot)
                if kind is not None:
                    waiting += kind is I
                elif waiting:
                    slots[_weight(given)] = slot
                    given, waiting = given + 1, waiting - 1
                slot += 1

    def squeeze(self) -> None:
        """Keeps every stage's order, and starts every task as early as that allows."""
        free = [0] * len(self.slots)
        for stage, task in self._by_slot():
            slot = max(free[stage], self._earliest(stage, task))
            self._put(stage, task, slot)
            free[stage] = slot + 1

    def reorder(self, may_move: Callable[[int], bool]) -> None:
        """Moves tasks whose slot may move to the earliest free slot that does not raise the grid's peak memory."""
        memories = [_Memory({slot: task.kind for task, slot in slots.items()}) for slots in self.slots]
        limit = max(held for memory in memories for held, _ in memory.states)
        for stage, task in self._by_slot():
            now = self.slots[stage][task]
            if not may_move(now):
                continue
            for slot in range(self._earliest(stage, task), now):
                if memories[stage].move(now, slot, limit):
                    self._put(stage, task, slot)
                    break

    def _put(self, stage: int, task: Task, slot: int) -> None:
        if task.kind is I:
            inputs = self._input_gradients[stage]
            inputs.pop(bisect_left(inputs, self.slots[stage][task]))
            insort(inputs, slot)
        self.slots[stage][task] = slot

    def _by_slot(self) -> list[tuple[int, Task]]:
        """Returns all tasks in the order of their present slots."""
        everything = [(slot, stage, task) for stage, slots in enumerate(self.slots) for task, slot in slots.items()]
        return [(stage, task) for _, stage, task in sorted(everything)]

    def _earliest(self, stage: int, task: Task) -> int:
        """Returns the first slot, free or not, that a task's inputs and the microbatch before it allow."""
        slots, before = self.slots[stage], task._replace(microbatch=task.microbatch - 1)
        after = [slots[before]] if before in slots else []
        if task.kind is W:
            after.append(self._input_gradients[stage][task.microbatch])
        else:
            after += [self.slots[self.stage_of[one.chunk]][one] for one in self.graph.dependencies(task)]
        return max(after, default=-1) + 1


class _Memory:
    """The chunk passes that a stage holds after each slot, kept up to date while tasks move to earlier slots."""

    def __init__(self, kind_at: dict[int, TaskKind]) -> None:
        self.kind_at = kind_at
        self.weights_placed = W in kind_at.values()
        self.states = [(0, 0)]
        for slot in range(max(kind_at) + 1):
            self.states.append(self._step(self.states[-1], kind_at.get(slot)))

    def move(self, old: int, new: int, limit: int) -> bool:
        """Moves the task in slot ``old`` to the earlier slot ``new``, unless that is taken or exceeds the limit."""
        if new in self.kind_at:
            return False
        moved = {new: self.kind_at[old], old: None}
        trial = [self.states[new]]
        for slot in range(new, len(self.states) - 1):
            trial.append(self._step(trial[-1], moved[slot] if slot in moved else self.kind_at.get(slot)))
            if trial[-1][0] > limit:
                return False
            if slot >= old and trial[-1] == self.states[slot + 1]:
                break  # from here on nothing differs
        self.states[new : new + len(trial)] = trial
        self.kind_at[new] = self.kind_at.pop(old)
        return True

    def _step(self, state: tuple[int, int], kind: TaskKind | None) -> tuple[int, int]:
        """Returns the passes held and the number of I that wait for their W, after a slot."""
        held, waiting = state
        if kind is None:
            return (held - 1, waiting - 1) if waiting and not self.weights_placed else state
        if kind is F:
            return held + 1, waiting
        return (held - 1, waiting) if kind is W else (held, waiting + (not self.weights_placed))
