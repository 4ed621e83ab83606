"""Leader and intersection: one member of a group chooses, from what is ready on all of them.

Followers tell the leader of every start of a step and every message as they come. For the leader a message has arrived
once it has arrived on all members, and it starts no task of a step that has not started on all; so its ready set is the
intersection of the members' ready sets. It alone uses the state of hint and window. It numbers the tasks that it
dispatches and tells each follower; a follower starts them in the order of their numbers. A choice costs one hop.

Why the ends of a follower's tasks need not be told
---------------------------------------------------
Tasks of the stage itself are prerequisites too, and a follower may be behind with them. Let the leader dispatch task n,
and let D be those of the tasks 0..n-1 that had finished on the leader then or were due (without ``dispatch_ahead``, all
of them). Whatever task n waits for on its own stage is in D, and the messages that it waits for have arrived on all
members. A follower starts 0..n-1 before it, and they end; once all have, it has finished at least D, so task n is ready
there too. It is also admissible: the leader's window admitted n with D finished, and where more tasks have finished,
more slots are free and no microbatch that holds one has lost it to a younger one. So by induction every follower starts
every task, in the leader's order. That holds too where tasks are collectives, which end nowhere before all members have
started them: the first task that has not ended everywhere comes after tasks that have, so every member starts it.

Each member hears of its own device alone that a task is about to end (:class:`DecideNow`). The leader's choice may come
early by that, a follower's start of it too, each by itself: a follower whose task has become due starts choice n behind
it where n is ready and admissible with that task counted as finished, and otherwise as above, after its end. Where the
leader decided early and a follower does not, n waits there until D has finished. On every member n is behind 0..n-1 in
the device's order, in which collectives meet.

And the leader has something to choose while any task is left: once all messages sent have arrived on all members, its
state is that of a stage that is one process, for which :mod:`rrfp_jax.arbitration.window` has the argument. A leader
that looked at itself alone would be safe too, since what is ready on it becomes ready on the others; but then members
would wait within collectives while they could run something else.
"""

from rrfp_jax.arbitration import story
from rrfp_jax.arbitration.events import (
    Event,
    GroupHeard,
    InputArrived,
    Instruction,
    MemberReceived,
    MemberStarted,
    Note,
    StepStarted,
    TaskChosen,
    TellGroup,
)
from rrfp_jax.arbitration.group_member import LEADER, GroupMember
from rrfp_jax.arbitration.story import IllegalTransition
from rrfp_jax.tasks import bits


class LeadingMember(GroupMember[Note, int]):
    """Chooses for its group. Keeps, of each start and message that some members lack, which have it, as bits."""

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        if isinstance(event, InputArrived):
            return self._take_arrival(event, LEADER, out)
        if isinstance(event, GroupHeard) and isinstance(event.note, MemberReceived):
            arrival = InputArrived(event.step, event.time_s, event.note.message)
            return self._take_arrival(arrival, event.member, out)
        if isinstance(event, StepStarted):
            self._everyone_has(event.step, _as_note(event), LEADER)
        return super()._take(event, out)

    def _hear(self, event: GroupHeard) -> bool:
        if not isinstance(event.note, MemberStarted):
            self._refuse(event)
        return self._everyone_has(event.step, event.note, event.member) and self._is_current(event.step)

    def _take_arrival(self, event: InputArrived, member: int, out: list[Instruction]) -> bool:
        """Take a message in for good once all members have it, or if it is illegal."""
        if self._is_over(event.step) or self._knows(event):
            return False
        is_legal = not self._is_current(event.step) or event.message in self._ranked.plan.arrivals
        if is_legal and not self._everyone_has(event.step, _as_note(event), member):
            return False
        return super()._take(event, out)

    def _everyone_has(self, step: int, note: MemberReceived | MemberStarted, member: int) -> bool:
        """Note what a member has; tells whether all have it now."""
        kept = self._kept.setdefault(step, {})
        having = kept.get(note, 0) | 1 << member
        has_all = having == (1 << self.num_members) - 1
        if has_all and isinstance(note, MemberReceived):
            kept.pop(note, None)
            return True
        if isinstance(note, MemberStarted) and not having & having - 1:
            self._check_start(step, note, member)
        kept[note] = having
        return has_all

    def _check_start(self, step: int, note: MemberStarted, member: int) -> None:
        for other in self._kept[step]:
            if isinstance(other, MemberStarted) and other != note:
                raise IllegalTransition(
                    f"stage {self.stage}: step {step} started on member {member} {_batch(note)}, "
                    f"elsewhere {_batch(other)}: the members must be given the same batch"
                )

    def _dispatch(self, out: list[Instruction]) -> None:
        if self._num_started or self._has_started_everywhere():
            super()._dispatch(out)

    def _has_started_everywhere(self) -> bool:
        assert self.step is not None
        start = MemberStarted(self._ranked.absent, self._weights)
        return self._kept[self.step].get(start) == (1 << self.num_members) - 1

    def _start(self, node: int, position: int, out: list[Instruction]) -> None:
        assert self.step is not None
        note = TaskChosen(self._num_started, self._ranked.plan.tasks[node], self._hint_state)
        out += [TellGroup(self.step, other, note) for other in self.others]
        super()._start(node, position, out)

    def validate(self) -> None:
        super().validate()
        everyone = (1 << self.num_members) - 1
        for step, kept in self._kept.items():
            assert not self._is_over(step)
            assert sum(isinstance(note, MemberStarted) for note in kept) <= 1
            for note, having in kept.items():
                assert 0 < having <= everyone
                assert having != everyone or isinstance(note, MemberStarted)


class FollowingMember(GroupMember[int, TaskChosen]):
    """Starts what the leader chose. Keeps the choices that it has not started, by number."""

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        is_new = isinstance(event, InputArrived) and not self._is_over(event.step) and not self._knows(event)
        if isinstance(event, StepStarted) or (isinstance(event, InputArrived) and is_new):
            out.append(TellGroup(event.step, LEADER, _as_note(event)))
        return super()._take(event, out)

    def _hear(self, event: GroupHeard) -> bool:
        note, is_current = event.note, self._is_current(event.step)
        if not isinstance(note, TaskChosen) or event.member != LEADER:
            self._refuse(event)
        if is_current and note.number < self._num_started:
            return False
        if self._kept.setdefault(event.step, {}).setdefault(note.number, note) != note:
            self._refuse(event)
        return is_current

    def _dispatch(self, out: list[Instruction]) -> None:
        assert self.step is not None
        kept = self._kept.get(self.step)
        while kept and len(self._running) < self._capacity:
            note = kept.get(self._num_started)
            if note is None or not self._can_start(note):
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
            assert not self._is_over(step)
            for number, note in kept.items():
                assert number == note.number >= (self._num_started if self._is_current(step) else 0)


def _as_note(event: InputArrived | StepStarted) -> MemberReceived | MemberStarted:
    if isinstance(event, InputArrived):
        return MemberReceived(event.message)
    return MemberStarted(event.absent, event.weights)


def _batch(start: MemberStarted) -> str:
    pairs = [(chunk, m) for chunk, mask in start.absent for m in bits(mask)]
    return f"without {pairs}" + (f" and with weights {start.weights}" if start.weights else "")
