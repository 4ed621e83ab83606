"""Packing a building block: W into free slots, warm-up and drain as early as memory allows (arXiv 2405.15362).

A block in which all passes are one slot long fills the steady state without collisions, and the time from F to W bounds
the memory: the sooner the passes of a microbatch follow each other, the fewer of them are in flight. The full schedule
follows in five steps (section 3 and appendix of the paper):

1. the block is repeated for every microbatch; each W goes into the first free slot after its I;
2. *reorder* warm-up and drain: a pass moves to the earliest free slot that its inputs allow and that does not raise the
   stage's peak beyond the largest peak of any stage so far;
3. *squeeze*: keep the order, run everything as soon as possible;
4. forget where W are, reorder the drain once more, and give W the free slots anew;
5. squeeze again; what remains is the order.

The steps work on slots, as the construction assumes F = I = W; execution with other times keeps the order.
``_weight(n)`` is the n-th weight gradient of a stage, whichever it is; it may run once n + 1 input gradients have.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import groupby

from rrfp_jax.schedules.language.stage import Mistake, Stage
from rrfp_jax.tasks import Task, TaskKind

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


def _weight(number: int) -> Task:
    return Task(W, -1, number)


def pack(stage: Stage, starts: Sequence[dict[Task, float]]) -> list[list[Task]]:
    """The orders of all stages from the slots of their F and I; ``stage`` is any of them."""
    for i, slots in enumerate(starts):
        if any(task.kind is W for task in slots):
            raise Mistake("packed() gives W their slots itself: let the block hold F and I alone", i)
        for slot, together in groupby(sorted(slots, key=slots.__getitem__), slots.__getitem__):
            first, *others = together
            if others:
                raise Mistake(f"{first} and {others[0]} both start in slot {slot:g}: shift one of them", i)
    grid = _Grid(stage, [{task: int(slot) for task, slot in slots.items()} for slots in starts])
    grid.fill_weights()
    steady_from = max(slot for task, slot in grid.slots[0].items() if task.kind is not W and task.microbatch == 0)
    steady_to = grid.last_begins()
    grid.reorder(lambda slot: slot < steady_from or slot > steady_to)
    grid.squeeze()
    steady_to = grid.last_begins()
    grid.drop_weights()
    grid.reorder(lambda slot: slot > steady_to)
    grid.fill_weights()
    grid.squeeze()
    return [_named(sorted(slots, key=slots.__getitem__)) for slots in grid.slots]


def _named(order: list[Task]) -> list[Task]:
    """The n-th W belongs to the n-th I."""
    inputs = [task for task in order if task.kind is I]
    return [inputs[task.microbatch]._replace(kind=W) if task.kind is W else task for task in order]


class _Grid:
    """Where every task of every stage starts; ``slots[stage][task]`` is its slot.

    Memory counts chunk passes: F adds one, W removes one, at the end of its slot. While no W has a slot, each free slot
    counts as one, if there is an I that waits for its W.
    """

    def __init__(self, stage: Stage, slots: list[dict[Task, int]]) -> None:
        self.graph, self.stage_of, self.slots = stage.graph, stage.placement.stage_of_chunk, slots
        self._input_gradients = [sorted(slot for task, slot in slots.items() if task.kind is I) for slots in slots]

    def last_begins(self) -> int:
        """Where the first stage starts its last microbatch."""
        last = self.graph.num_microbatches - 1
        return min(slot for task, slot in self.slots[0].items() if task.kind is not W and task.microbatch == last)

    def fill_weights(self) -> None:
        """Give every W of a stage the first free slot after its I."""
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

    def drop_weights(self) -> None:
        for stage, slots in enumerate(self.slots):
            self.slots[stage] = {task: slot for task, slot in slots.items() if task.kind is not W}

    def squeeze(self) -> None:
        """Keep every stage's order, and start every task as early as that allows."""
        free = [0] * len(self.slots)
        for stage, task in self._by_slot():
            slot = max(free[stage], self._earliest(stage, task))
            self._put(stage, task, slot)
            free[stage] = slot + 1

    def reorder(self, may_move: Callable[[int], bool]) -> None:
        """Move tasks whose slot may move to the earliest free slot without raising the grid's peak memory."""
        memories = [_Memory({slot: task.kind for task, slot in slots.items()}) for slots in self.slots]
        limit = max(memory.peak() for memory in memories)
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
        """All tasks in the order of their slots now."""
        everything = [(slot, stage, task) for stage, slots in enumerate(self.slots) for task, slot in slots.items()]
        return [(stage, task) for _, stage, task in sorted(everything)]

    def _earliest(self, stage: int, task: Task) -> int:
        """The first slot that the inputs of a task, and the microbatch before, allow, free or not."""
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

    def peak(self) -> int:
        return max(held for held, _ in self.states)

    def move(self, old: int, new: int, limit: int) -> bool:
        """Move the task in slot ``old`` to the earlier slot ``new``, unless that is taken or exceeds the limit."""
        if new in self.kind_at:
            return False
        moved = {new: self.kind_at[old], old: None}
        trial = [self.states[new]]
        for slot in range(new, len(self.states) - 1):
            trial.append(self._step(trial[-1], moved[slot] if slot in moved else self.kind_at.get(slot)))
            if trial[-1][0] > limit:
                return False
            if slot >= old and trial[-1] == self.states[slot + 1]:
                break
        self.states[new : new + len(trial)] = trial
        self.kind_at[new] = self.kind_at.pop(old)
        return True

    def _step(self, state: tuple[int, int], kind: TaskKind | None) -> tuple[int, int]:
        """(held, I that wait for their W) after a slot."""
        held, waiting = state
        if kind is None:
            return (held - 1, waiting - 1) if waiting and not self.weights_placed else state
        if kind is F:
            return held + 1, waiting
        return (held - 1, waiting) if kind is W else (held, waiting + (not self.weights_placed))
