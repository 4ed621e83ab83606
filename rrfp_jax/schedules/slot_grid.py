"""A grid of unit slots, stages by time, on which the passes of a V-shaped schedule are moved about.

The passes of a microbatch on a stage are numbered in the order in which they run: forward of the chunk on the way down,
forward of the chunk on the way back, and their input gradients in reverse. ``Pass(WEIGHT, n)`` is the n-th weight
gradient of the stage; it may run once n + 1 input gradients have.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

F_DOWN, F_BACK, I_BACK, I_DOWN, WEIGHT = range(5)


class Pass(NamedTuple):
    """One slot's content."""

    kind: int
    number: int
    """The microbatch; for W, its number on the stage."""


class SlotGrid:
    """Where every pass of every stage starts; ``slots[stage][pass]`` is its slot.

    Memory counts chunk passes: F adds one, W removes one, at the end of its slot. While no W has a slot, each free slot
    counts as one, if there is an I that waits for its W.
    """

    def __init__(self, num_stages: int, num_microbatches: int, slots: list[dict[Pass, int]]) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.slots = slots
        self._input_gradients = [sorted(slots[one] for one in slots if one.kind in (I_BACK, I_DOWN)) for slots in slots]

    def fill_weights(self) -> None:
        """Give every W of a stage the first free slot after its I."""
        for slots in self.slots:
            taken = {slot: one.kind for one, slot in slots.items()}
            slot = waiting = given = 0
            while given < 2 * self.num_microbatches:
                kind = taken.get(slot)
                if kind is not None:
                    waiting += kind in (I_BACK, I_DOWN)
                elif waiting:
                    slots[Pass(WEIGHT, given)] = slot
                    given, waiting = given + 1, waiting - 1
                slot += 1

    def drop_weights(self) -> None:
        for slots in self.slots:
            for number in range(2 * self.num_microbatches):
                del slots[Pass(WEIGHT, number)]

    def order(self, stage: int) -> list[Pass]:
        """The passes of a stage by slot."""
        return sorted(self.slots[stage], key=self.slots[stage].__getitem__)

    def squeeze(self) -> None:
        """Keep every stage's order, and start every pass as early as that allows."""
        free = [0] * self.num_stages
        for stage, one in self._by_slot():
            slot = max(free[stage], self._earliest(stage, one))
            self._put(stage, one, slot)
            free[stage] = slot + 1

    def reorder(self, may_move: Callable[[int], bool]) -> None:
        """Move passes whose slot may move to the earliest free slot without raising the grid's peak memory."""
        memories = [_Memory({slot: one.kind for one, slot in slots.items()}) for slots in self.slots]
        limit = max(memory.peak() for memory in memories)
        for stage, one in self._by_slot():
            now = self.slots[stage][one]
            if not may_move(now):
                continue
            for slot in range(self._earliest(stage, one), now):
                if memories[stage].move(now, slot, limit):
                    self._put(stage, one, slot)
                    break

    def _put(self, stage: int, one: Pass, slot: int) -> None:
        if one.kind in (I_BACK, I_DOWN):
            inputs = self._input_gradients[stage]
            inputs.pop(bisect_left(inputs, self.slots[stage][one]))
            insort(inputs, slot)
        self.slots[stage][one] = slot

    def _by_slot(self) -> list[tuple[int, Pass]]:
        """All passes in the order of their slots now."""
        everything = [(slot, stage, one) for stage, slots in enumerate(self.slots) for one, slot in slots.items()]
        return [(stage, one) for _, stage, one in sorted(everything)]

    def _earliest(self, stage: int, one: Pass) -> int:
        """The first slot that the inputs of a pass allow, free or not."""
        slots, (kind, number) = self.slots[stage], one
        after = [slots[Pass(kind, number - 1)]] if number > 0 else []
        if kind == WEIGHT:
            after.append(self._input_gradients[stage][number])
        else:
            if kind > F_DOWN:
                after.append(slots[Pass(kind - 1, number)])
            neighbour = stage - 1 if kind in (F_DOWN, I_BACK) else stage + 1
            if 0 <= neighbour < self.num_stages:
                after.append(self.slots[neighbour][one])
        return max(after, default=-1) + 1


class _Memory:
    """The chunk passes that a stage holds after each slot, kept up to date while passes move to earlier slots."""

    def __init__(self, kind_at: dict[int, int]) -> None:
        self.kind_at = kind_at
        self.weights_placed = WEIGHT in kind_at.values()
        self.states = [(0, 0)]
        for slot in range(max(kind_at) + 1):
            self.states.append(self._step(self.states[-1], kind_at.get(slot)))

    def peak(self) -> int:
        return max(held for held, _ in self.states)

    def move(self, old: int, new: int, limit: int) -> bool:
        """Move the pass in slot ``old`` to the earlier slot ``new``, unless that is taken or exceeds the limit."""
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

    def _step(self, state: tuple[int, int], kind: int | None) -> tuple[int, int]:
        """(held, I that wait for their W) after a slot."""
        held, waiting = state
        if kind is None:
            return (held - 1, waiting - 1) if waiting and not self.weights_placed else state
        if kind in (F_DOWN, F_BACK):
            return held + 1, waiting
        return (held - 1, waiting) if kind == WEIGHT else (held, waiting + (not self.weights_placed))
