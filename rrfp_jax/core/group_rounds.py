"""Propose and retry, as the RRFP paper has it (section 4.2, appendix D): equal candidates run, others wait.

The members of a group go through numbered rounds. In each round every member that may take a task proposes its best
candidate, once, to all others: the task that its own ready set, window and hint give, with the hint's next state, or
nothing. A round with all proposals is over. If they are equal and name a task, every member starts it and takes over
the hint's state; otherwise nothing runs and no state changes. All members see the same proposals, so they agree on each
round's outcome, on the sequence of tasks and on the hint's state.

A member opens a round if its candidate differs from the one that it had when the last round failed (from nothing, if
the last round did not fail). The others answer as soon as they may take a task.

Why no deadlock
---------------
Assume that nothing happens any more: no message and no note is under way, no task runs, and a task is left. Then no
round is open: a round that someone opened is answered by all, as none runs a task. All members have run the same tasks,
all have ended, and all messages have arrived on each; so their candidates are equal. Each is the one that it proposed
when the last round failed, or else it would open a round. So these proposals were equal too, and as the round failed
they named no task: no member has a candidate. But a stage with a task left whose messages have all arrived has one
(:mod:`rrfp_jax.core.window`). Collectives, which end only where all members have started them, change nothing:
all members start the task of a round that did not fail.

The rounds of a step come to an end: each gives a task, or follows a change of some member's candidate since the last
one failed, and candidates change only when a message arrives or a task ends or becomes due.

A member whose running task is due proposes already; the others answer once their own task is due or has ended. Until
the round is over, that member starts nothing else, and its candidate stays ready and admissible: a due task that ends
takes with it the place that it had given.

Its weakness, which the paper names: with B1 and F4 ready on one member and F4 on another, nothing runs until B1 is
ready there as well, although F4 could. A leader finds F4.
"""

from rrfp_jax.core.events import GroupHeard, Instruction, TaskProposed, TellGroup
from rrfp_jax.core.group_member import GroupMember
from rrfp_jax.core.step_plan import StepPlan
from rrfp_jax.schedules import Task

Candidate = tuple[Task, int] | None
"""A task and the hint's state after it."""


class ProposingMember(GroupMember[tuple[int, int], TaskProposed]):
    """Starts what all members propose. Keeps the proposals of rounds that are not over, by round and member."""

    def _begin(self, ranked: StepPlan) -> None:
        super()._begin(ranked)
        self._round = 0
        self._refused: Candidate = None

    def key(self) -> tuple[object, ...]:
        return (super().key(), self._round, self._refused) if self.is_active else (super().key(),)

    def _hear(self, event: GroupHeard) -> bool:
        note, is_current = event.note, self._is_current(event.step)
        if not isinstance(note, TaskProposed):
            self._refuse(event)
        if is_current and note.round < self._round:
            return False
        if self._kept.setdefault(event.step, {}).setdefault((note.round, event.member), note) != note:
            self._refuse(event)
        return is_current

    def _dispatch(self, out: list[Instruction]) -> None:
        while self._has_proposed(out):
            kept = self._kept[self.step]  # type: ignore[index]
            proposals = [kept.get((self._round, member)) for member in range(self.num_members)]
            if None in proposals:
                return
            for member in range(self.num_members):
                del kept[self._round, member]
            self._round += 1
            self._settle(proposals, out)

    def _has_proposed(self, out: list[Instruction]) -> bool:
        """Propose, if it is time; tells whether this member has proposed in the present round."""
        assert self.step is not None
        kept = self._kept.get(self.step, {})
        if (self._round, self.member) in kept:
            return True
        if len(self._running) >= self._capacity:
            return False
        candidate = self._candidate()
        if candidate == self._refused and not any((self._round, other) in kept for other in self.others):
            return False
        note = TaskProposed(self._round, *(candidate or (None, 0)))
        self._kept.setdefault(self.step, {})[self._round, self.member] = note
        out += [TellGroup(self.step, other, note) for other in self.others]
        return True

    def _candidate(self) -> Candidate:
        position, state = self._choose()
        return None if position is None else (self._ranked.plan.tasks[self._ranked.at[position]], state)

    def _settle(self, proposals: list[TaskProposed | None], out: list[Instruction]) -> None:
        """Run the task on which a round has agreed, or remember what was refused."""
        own = proposals[self.member]
        assert own is not None
        if own.task is None or any(proposal != own for proposal in proposals):
            self._refused = None if own.task is None else (own.task, own.hint_state)
            return
        self._refused = None
        self._hint_state = own.hint_state
        node = self._ranked.plan.index[own.task]
        self._start(node, self._ranked.position[node], out)

    def validate(self) -> None:
        super().validate()
        for step, kept in self._kept.items():
            assert not self._is_over(step)
            first = self._round if self._is_current(step) else 0
            for (number, member), note in kept.items():
                assert number == note.round
                assert first <= number <= first + 1
                assert member != self.member or (self._is_current(step) and number == first)
