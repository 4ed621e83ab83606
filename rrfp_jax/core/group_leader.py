"""Leader and intersection: one member of a group chooses, from what is ready on all of them.

Followers tell the leader of every start of a step and every message as they come. For the leader a message has arrived
once it has arrived on all members, and it starts no task of a step that has not started on all; so its ready set is the
intersection of the members' ready sets. It alone uses the state of hint and window. It numbers the tasks that it
dispatches and tells each follower; a follower starts them in the order of their numbers. A choice costs one hop.

In a large group nobody talks to all others: members lie in a tree, the leader at its root. A member tells its parent of
a start or a message once it and all its children have it, each child speaking for all below; a choice goes from parent
to children. So the leader hears of each message from its children alone, and a choice costs as many hops as the tree is
deep. Notes only travel in other ways by that: what the leader knows of its members is what they have, later.

Why the ends of a follower's tasks need not be told
---------------------------------------------------
Tasks of the stage itself are prerequisites too, and a follower may be behind with them. Let the leader dispatch task n,
and let D be those of the tasks 0..n-1 that had finished on the leader then or were due, all
of them. Whatever task n waits for on its own stage is in D, and the messages that it waits for have arrived on all
members. A follower starts 0..n-1 before it, and they end; once all have, it has finished at least D, so task n is ready
there too. It is also admissible: the leader's window admitted n with D finished, and where more tasks have finished,
more slots are free and no microbatch that holds one has lost it to a younger one. So by induction every follower starts
every task, in the leader's order. That holds too where tasks are collectives, which end nowhere before all members have
started them: the first task that has not ended everywhere comes after tasks that have, so every member starts it.

A certain choice (:mod:`rrfp_jax.core.certainty`) the leader makes while the task before it runs, which is due
from its start; D is everything before n then. A member counts its own tasks alike, and may have each choice wait on its
device behind the one before, whether it was certain or made as the leader's task was about to end: the leader has told
it, so it does not change.

Each member hears of its own device alone that a task is about to end (:class:`DecideNow`). The leader's choice may come
early by that, a follower's start of it too, each by itself: a follower whose task has become due starts choice n behind
it where n is ready and admissible with that task counted as finished, and otherwise as above, after its end. Where the
leader decided early and a follower does not, n waits there until D has finished. On every member n is behind 0..n-1 in
the device's order, in which collectives meet.

And the leader has something to choose while any task is left: once all messages sent have arrived on all members, its
state is that of a stage that is one process, for which :mod:`rrfp_jax.core.window` has the argument. A leader
that looked at itself alone would be safe too, since what is ready on it becomes ready on the others; but then members
would wait within collectives while they could run something else.
"""

from functools import cached_property

from rrfp_jax.core import story
from rrfp_jax.core.events import (
    Event,
    GroupHeard,
    InputArrived,
    Instruction,
    MemberReceived,
    MemberStarted,
    StepStarted,
    TaskChosen,
    TellGroup,
)
from rrfp_jax.core.group_member import LEADER, GroupMember
from rrfp_jax.core.story import IllegalTransition
from rrfp_jax.schedules import bits

_Key = int | MemberReceived | MemberStarted
_Value = int | TaskChosen


class _TreeMember(GroupMember[_Key, _Value]):
    """Keeps, of each start and message, which of this member and its children have it, as bits."""

    def _all_below_have(self, step: int, note: MemberReceived | MemberStarted, member: int) -> bool:
        """Note that a member has something, a child for all below it; tells whether all have it now who had not."""
        if isinstance(note, MemberStarted):
            self._check_start(step, note, member)
        kept = self._kept.setdefault(step, {})
        before = kept.get(note, 0)
        assert isinstance(before, int)
        kept[note] = having = before | 1 << member
        return having == self._everyone != before

    @cached_property
    def _everyone(self) -> int:
        """This member and its children, as bits."""
        return sum(1 << member for member in (self.member, *self.children))

    def _check_start(self, step: int, note: MemberStarted, member: int) -> None:
        for other in self._kept.get(step, ()):
            if isinstance(other, MemberStarted) and other != note:
                raise IllegalTransition(
                    f"stage {self.stage}: step {step} started on member {member} {_batch(note)}, "
                    f"elsewhere {_batch(other)}: the members must be given the same batch"
                )

    def validate(self) -> None:
        super().validate()
        for step, kept in self._kept.items():
            assert not self._is_over(step)
            assert sum(isinstance(note, MemberStarted) for note in kept) <= 1
            for note, having in kept.items():
                if not isinstance(note, int):
                    assert isinstance(having, int)
                    assert 0 < having <= self._everyone


class LeadingMember(_TreeMember):
    """Chooses for its group."""

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        if isinstance(event, InputArrived):
            return self._take_arrival(event, LEADER, out)
        if isinstance(event, GroupHeard) and isinstance(event.note, MemberReceived):
            arrival = InputArrived(event.step, event.time_s, event.note.message)
            return self._take_arrival(arrival, event.member, out)
        if isinstance(event, StepStarted):
            self._all_below_have(event.step, _as_note(event), LEADER)
        return super()._take(event, out)

    def _hear(self, event: GroupHeard) -> bool:
        if not isinstance(event.note, MemberStarted):
            self._refuse(event)
        return self._all_below_have(event.step, event.note, event.member) and self._is_current(event.step)

    def _take_arrival(self, event: InputArrived, member: int, out: list[Instruction]) -> bool:
        """Take a message in for good once all members have it, or if it is illegal."""
        if self._is_over(event.step) or self._knows(event):
            return False
        is_legal = not self._is_current(event.step) or event.message in self._ranked.plan.arrivals
        note = _as_note(event)
        if is_legal and not self._all_below_have(event.step, note, member):
            return False
        self._kept.get(event.step, {}).pop(note, None)
        return super()._take(event, out)

    def _dispatch(self, out: list[Instruction]) -> None:
        if self._num_started or self._has_started_everywhere():
            super()._dispatch(out)

    def _has_started_everywhere(self) -> bool:
        assert self.step is not None
        start = MemberStarted(self._ranked.absent, self._weights, self.evaluates)
        return self._kept[self.step].get(start) == self._everyone

    def _start(self, node: int, position: int, out: list[Instruction]) -> None:
        assert self.step is not None
        note = TaskChosen(self._num_started, self._ranked.plan.tasks[node], self._hint_state)
        out += [TellGroup(self.step, child, note) for child in self.children]
        super()._start(node, position, out)


class FollowingMember(_TreeMember):
    """Starts what the leader chose. Keeps the choices that it has not started, by number.

    In a large group it also stands between the leader and its own children.
    """

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        is_over = self._is_over(event.step)
        if isinstance(event, GroupHeard):
            return not is_over and self._hear_in_tree(event, out)
        if isinstance(event, StepStarted) or (
            isinstance(event, InputArrived) and not is_over and not self._knows(event)
        ):
            self._pass_up(event.step, _as_note(event), self.member, out)
        return super()._take(event, out)

    def _hear_in_tree(self, event: GroupHeard, out: list[Instruction]) -> bool:
        """A child has something, or the leader has chosen, which the children are to hear."""
        if isinstance(event.note, MemberReceived | MemberStarted) and event.member in self.children:
            self._pass_up(event.step, event.note, event.member, out)
            return False
        is_new = isinstance(event.note, TaskChosen) and not self._has_heard(event.step, event.note.number)
        may_start = self._hear(event)
        if is_new:
            out += [TellGroup(event.step, child, event.note) for child in self.children]
        return may_start

    def _pass_up(self, step: int, note: MemberReceived | MemberStarted, member: int, out: list[Instruction]) -> None:
        assert self.parent is not None
        if not self.children or self._all_below_have(step, note, member):
            out.append(TellGroup(step, self.parent, note))

    def _has_heard(self, step: int, number: int) -> bool:
        is_started = self._is_current(step) and number < self._num_started
        return is_started or number in self._kept.get(step, {})

    def _hear(self, event: GroupHeard) -> bool:
        note, is_current = event.note, self._is_current(event.step)
        if not isinstance(note, TaskChosen) or event.member != self.parent:
            self._refuse(event)
        if is_current and note.number < self._num_started:
            return False
        if self._kept.setdefault(event.step, {}).setdefault(note.number, note) != note:
            self._refuse(event)
        return is_current

    def _dispatch(self, out: list[Instruction]) -> None:
        assert self.step is not None
        kept = self._kept.get(self.step)
        while (len(self._running) < self._capacity or self._counts_on(out)) and kept:
            note = kept.get(self._num_started)
            if not isinstance(note, TaskChosen) or not self._can_start(note):
                return
            del kept[note.number]
            self._hint_state = note.hint_state
            node = self._ranked.plan.index[note.task]
            self._start(node, self._ranked.position[node], out)

    def _can_start(self, note: TaskChosen) -> bool:
        plan = self._ranked.plan
        node = plan.index.get(note.task)
        if node is None or self._waiting[node] < 0:
            what = f"the leader chose {note.task} as number {note.number}, which cannot be started here"
            raise story.illegal(what, self.stage, self.step, note.task, self.tell(note.task.microbatch))
        is_forward = plan.lanes[node] == 0
        return not self._waiting[node] and (not is_forward or self._admits(self._ranked.position[node]))

    def validate(self) -> None:
        super().validate()
        for step, kept in self._kept.items():
            for number, note in kept.items():
                if isinstance(number, int):
                    assert isinstance(note, TaskChosen)
                    assert number == note.number >= (self._num_started if self._is_current(step) else 0)


def _as_note(event: InputArrived | StepStarted) -> MemberReceived | MemberStarted:
    if isinstance(event, InputArrived):
        return MemberReceived(event.message)
    return MemberStarted(event.absent, event.weights, event.evaluates)


def _batch(start: MemberStarted) -> str:
    pairs = [(chunk, m) for chunk, mask in start.absent for m in bits(mask)]
    kind = "to evaluate, " if start.evaluates else ""
    return f"{kind}without {pairs}" + (f" and with weights {start.weights}" if start.weights else "")
