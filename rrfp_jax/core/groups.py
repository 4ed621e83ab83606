"""Agreement within a group: how the processes that one stage spans come to run the same tasks in the same order.

Each process of such a stage has an arbiter of its own and receives the stage's messages on its own, so the ready tasks
differ between them for moments. A task is a collective of the group, so all must enter the same one: with arbiters that
do not agree the processes wait for each other forever. The members of a group are numbered from 0, and all are made of
the same graph, consumption, window and rules.

Leader and intersection
-----------------------
One member chooses, from the tasks that are ready on all of them.

Followers send the leader a note of every start of a step and of every message as they come. For the leader a message
has arrived once it has arrived on all members, and it starts no task of a step that has not started on all; so its
ready set is the intersection of the members' ready sets. It alone uses the state of hint and window. It numbers the
tasks that it dispatches and sends each choice to the followers, which start tasks in the order of their numbers. A
choice costs one hop.

In a large group members lie in a tree, the leader at its root. A member notes a start or a message to its parent once
it and all its children have it, each child speaking for all below; a choice goes from parent to children. So the leader
hears of each message from its children alone, and a choice costs as many hops as the tree is deep. The tree changes the
ways of the notes only, not their content.

*The ends of a follower's tasks need no notes.* Tasks of the stage itself are prerequisites too, and a follower may be
behind with them. Let the leader dispatch task n, and let D be those of the tasks 0..n-1 that had finished on the leader
then or were due, all of them. Whatever task n waits for on its own stage is in D, and the messages that it waits for
have arrived on all members. A follower starts 0..n-1 before it, and they end; once all have, it has finished at least
D, so task n is ready there too. It is also admissible: the leader's bound of memory admitted n with D finished. The
same tasks have taken memory by then, and where more have ended, memory is free before its turn: so no sum that the rule
of :mod:`rrfp_jax.core.memory` asks for is above the leader's, and no microbatch that holds a slot has lost it to a
younger one. So by induction every follower starts every task, in the leader's order. That holds too where tasks are
collectives, which end nowhere before all members have started them: the first task that has not ended everywhere comes
after tasks that have, so every member starts it.

*Engines beside compute* (:mod:`rrfp_jax.core.dispatch`) copy, each member its own shards. A copy is no collective and
ends on each member by itself, but it may take memory. So the leader chooses copies as well and numbers them with all
other tasks. A follower starts one in its turn, beside what its compute lane runs, once its engine is free, which it is
when 0..n-1 have ended. A copy counts real ends alone, so its D has no due task. Members whose engines chose for
themselves would deadlock under a hint: where the leader starts F in the last free slot while its engine is busy, the
free engine of a follower brings another activation back into that slot, which only a task behind F frees again
(``tests/checking/test_explore_operations.py`` has the run).

A certain choice (:mod:`rrfp_jax.core.dispatch`) the leader makes while the task before it runs, which is due from its
start; D is everything before n then. A member counts its own tasks alike, and may have each choice wait on its device
behind the one before, whether it was certain or made as the leader's task was about to end: the leader has told it, so
it does not change.

*Pairs.* The note of a task names its partner too, which has the next number; members start both as one program. No
choice is certain early then, so a member that has room for the pair has ended all tasks before it, or has the last
program due: so it has at least D behind it, and both are ready and admissible there.

Each member hears of its own device alone that a task is about to end (:class:`DecideNow`). The leader's choice may come
early by that, a follower's start of it too, each by itself: a follower whose task has become due starts choice n behind
it where n is ready and admissible with that task counted as finished, and otherwise as above, after its end. Where the
leader decided early and a follower does not, n waits there until D has finished. On every member n is behind 0..n-1 in
the device's order, in which collectives meet.

And the leader has something to choose while any task is left: once all messages sent have arrived on all members, its
state is that of a stage that is one process, for which :mod:`rrfp_jax.core.memory` has the argument. A leader that
looked at itself alone would be safe too, since a task that is ready on it becomes ready on the others; but then members
would wait within collectives while they could run something else.

Propose and retry
-----------------
The protocol of the RRFP paper (section 4.2, appendix D): equal candidates run, others wait.

The members of a group go through numbered rounds. In each round every member that may take a task proposes its best
candidate, once, to all others: the task that its own ready set, window and hint give, with the hint's next state, or
nothing. A round with all proposals is over. If they are equal and name a task, every member starts it and takes over
the hint's state; otherwise nothing runs and no state changes. All members see the same proposals, so they agree on each
round's outcome, on the sequence of tasks and on the hint's state.

A member opens a round if its candidate differs from the one that it had when the last round failed (from nothing, if
the last round did not fail). The others answer as soon as they may take a task.

*No deadlock.* Assume that nothing happens any more: no message and no note is under way, no task runs, and a task is
left. Then no round is open: a round that one member opened is answered by all, as none runs a task. All members have
run the same tasks, all have ended, and all messages have arrived on each; so their candidates are equal. Each is the
one that it proposed when the last round failed, or else it would open a round. So these proposals were equal too, and
as the round failed they named no task: no member has a candidate. But a stage with a task left whose messages have all
arrived has one (:mod:`rrfp_jax.core.memory`). Collectives, which end only where all members have started them, change
nothing: all members start the task of a round that did not fail.

The rounds of a step come to an end: each gives a task, or follows a change of some member's candidate since the last
one failed, and candidates change only when a message arrives or a task ends or becomes due.

A member whose running task is due proposes already; the others answer once their own task is due or has ended. Until
the round is over, that member starts nothing else, and its candidate stays ready and admissible: a due task that ends
takes with it the place that it had given.

Its weakness, which the paper names: with B1 and F4 ready on one member and F4 on another, nothing runs until B1 is
ready there as well, although F4 could. A leader finds F4.

It takes no engines beside compute: a copy that a member starts once it has proposed may take the memory that its
candidate counted on.
"""

from collections.abc import Hashable
from dataclasses import replace
from enum import StrEnum
from typing import Generic, TypeVar

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.dispatch import NOTHING, Engines
from rrfp_jax.core.events import (
    Event,
    GroupHeard,
    InputArrived,
    Instruction,
    MemberReceived,
    MemberStarted,
    RunPair,
    StepStarted,
    TaskChosen,
    TaskProposed,
    TellGroup,
)
from rrfp_jax.core.explain import IllegalTransition, illegal_transition
from rrfp_jax.core.foresight import Estimates
from rrfp_jax.core.stage_setup import StageSetup, StepPlan
from rrfp_jax.layout import children, parent
from rrfp_jax.schedules import PipelineGraph, Task, bits
from rrfp_jax.schedules.timeline import IdleReason

LEADER = 0
"""The member that leads a group."""
GROUP_DEGREE = 8
"""How many children a member of the tree has at most: in groups of up to nine each member is next to the leader."""
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)
_Candidate = tuple[Task, int] | None
"""A task and the hint's state after it."""


class GroupProtocol(StrEnum):
    """How the members of a group agree."""

    LEADER = "leader"
    """One member chooses from the tasks that are ready on all."""
    PROPOSE = "propose"
    """All members propose, and a task that all propose runs."""
    OFF = "off"
    """No agreement: each member chooses for itself. It shows why agreement is needed."""


class GroupMember(StageArbiter, Generic[_Key, _Value]):
    """The arbiter of one process among those that a stage spans; used as any other arbiter.

    A subclass takes in notes in ``_hear`` and starts tasks in ``_dispatch``.

    Args:
        setup: the same for all members.
        member: its number in the group, which has ``num_members``.
        degree: the degree of the tree in which a leader's members lie.
    """

    def __init__(self, setup: StageSetup, member: int, num_members: int, degree: int = GROUP_DEGREE) -> None:
        self.member, self.num_members = member, num_members
        self.parent = parent(member, degree)
        self.children = tuple(children(member, num_members, degree))
        self.others = tuple(other for other in range(num_members) if other != member)
        self._everyone = sum(1 << below for below in (member, *self.children))
        """This member and its children, as bits."""
        self._kept: dict[int, dict[_Key, _Value]] = {}
        super().__init__(setup)

    def copy(self) -> "GroupMember[_Key, _Value]":
        twin = super().copy()
        assert isinstance(twin, GroupMember)
        twin._kept = {step: kept.copy() for step, kept in self._kept.items()}
        return twin

    def fresh(self, after: int | None, estimates: Estimates | None = None) -> "GroupMember[_Key, _Value]":
        twin = super().fresh(after, estimates)
        assert isinstance(twin, GroupMember)
        twin._kept = {}
        return twin

    def key(self) -> Hashable:
        kept = frozenset((step, key, value) for step, kept in self._kept.items() for key, value in kept.items())
        return (super().key(), kept)

    def idle_reason(self) -> IdleReason | None:
        reason = super().idle_reason()
        if reason in (IdleReason.WINDOW, IdleReason.ORDER) and self._choose()[0] is not None:
            return IdleReason.AGREEMENT
        return reason

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        if not isinstance(event, GroupHeard):
            return super()._take(event, out)
        return not self._is_over(event.step) and self._hear(event)

    def _hear(self, event: GroupHeard) -> bool:
        """Take in a note of the present step or a later one. Returns whether the stage may have something to do."""
        raise NotImplementedError

    def _end_step(self, out: list[Instruction]) -> None:
        assert self.step is not None
        self._kept.pop(self.step, None)
        super()._end_step(out)

    def _is_current(self, step: int) -> bool:
        return step == self.step and self.is_active

    def _is_over(self, step: int) -> bool:
        return self.step is not None and (step < self.step or (step == self.step and not self.is_active))

    def _knows(self, event: InputArrived) -> bool:
        """Returns whether this event of the present step or a later one has been taken in before."""
        if self._is_current(event.step):
            return self._ranked.plan.arrivals.get(event.message) in self._arrived
        return any(early.message == event.message for early in self._early.get(event.step, ()))


class _TreeMember(GroupMember[int | MemberReceived | MemberStarted, int | TaskChosen]):
    """A member that keeps, for each start and message, which of this member and its children have it, as bits."""

    def _all_below_have(self, step: int, note: MemberReceived | MemberStarted, member: int) -> bool:
        """Note that a member has something, a child for all below it. Returns whether by that all have it."""
        kept = self._kept.setdefault(step, {})
        if isinstance(note, MemberStarted):
            for other in kept:
                if isinstance(other, MemberStarted) and other != note:
                    raise IllegalTransition(
                        f"stage {self.stage}: step {step} started on member {member} {_batch(note)}, "
                        f"elsewhere {_batch(other)}: the members must be given the same batch"
                    )
        before = kept.get(note, 0)
        assert isinstance(before, int)
        kept[note] = having = before | 1 << member
        return having == self._everyone != before

    def _start_beside(self, engines: Engines, node: int, out: list[Instruction]) -> None:
        super()._start_beside(engines, node, out)
        self._num_started += 1

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
    """The member that chooses for its group."""

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
        assert self.step is not None
        # No task starts before the step has started on all members.
        start = MemberStarted(self._ranked.absent, self._weights, self.evaluates, self._ranked.owners)
        if self._num_started or self._kept[self.step].get(start) == self._everyone:
            super()._dispatch(out)

    def _start(self, node: int, position: int, out: list[Instruction]) -> None:
        if not self._mode.joins:
            self._tell(node, out)
        super()._start(node, position, out)

    def _start_joined(self, node: int, position: int, out: list[Instruction]) -> None:
        number, before = self._num_started, len(out)
        super()._start_joined(node, position, out)
        run = out[before]  # The partner is known only now, and the note names both.
        self._tell(node, out, number, run.task.second if isinstance(run, RunPair) else None)

    def _start_beside(self, engines: Engines, node: int, out: list[Instruction]) -> None:
        self._tell(node, out)
        super()._start_beside(engines, node, out)

    def _tell(self, node: int, out: list[Instruction], number: int | None = None, partner: Task | None = None) -> None:
        """Tell the followers the number of a task that starts (None: the next one), and its partner."""
        assert self.step is not None
        number = self._num_started if number is None else number
        note = TaskChosen(number, self._ranked.plan.tasks[node], self._hint_state, partner)
        out += [TellGroup(self.step, child, note) for child in self.children]


class FollowingMember(_TreeMember):
    """A member that starts the leader's choices. Keeps the choices that it has not started, by number.

    In a large group it also passes notes between the leader and its own children.
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
        """Take a note of a child that has something, or a choice of the leader, and pass it on."""
        if isinstance(event.note, MemberReceived | MemberStarted) and event.member in self.children:
            self._pass_up(event.step, event.note, event.member, out)
            return False
        is_new = False
        if isinstance(event.note, TaskChosen):
            is_started = self._is_current(event.step) and event.note.number < self._num_started
            is_new = not is_started and event.note.number not in self._kept.get(event.step, {})
        may_start = self._hear(event)
        if is_new:
            out += [TellGroup(event.step, child, event.note) for child in self.children]
        return may_start

    def _pass_up(self, step: int, note: MemberReceived | MemberStarted, member: int, out: list[Instruction]) -> None:
        assert self.parent is not None
        if not self.children or self._all_below_have(step, note, member):
            out.append(TellGroup(step, self.parent, note))

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
        kept, plan = self._kept.get(self.step, {}), self._ranked.plan
        while True:
            note = kept.get(self._num_started)
            node = plan.index.get(note.task) if isinstance(note, TaskChosen) else None
            is_beside = node is not None and plan.lanes[node] < 0
            if not is_beside and len(self._running) >= self._capacity and not self._counts_on(out):
                return
            if not isinstance(note, TaskChosen) or not self._can_start(note, node):
                return
            assert node is not None
            del kept[note.number]
            self._hint_state = note.hint_state
            if is_beside:
                self._start_beside(self._engines, node, out)  # type: ignore[arg-type]
            else:
                before = len(out)
                self._start(node, self._ranked.position[node], out)
                if note.partner is not None:
                    self._start_partner(node, self._ranked.position[plan.index[note.partner]], before, out)

    def _can_start(self, note: TaskChosen, node: int | None) -> bool:
        if node is None or self._waiting[node] < 0:
            what = f"the leader chose {note.task} as number {note.number}, which cannot be started here"
            raise illegal_transition(self, what, note.task)
        lane, position, footprint = self._ranked.plan.lanes[node], self._ranked.position[node], self._footprint
        if self._waiting[node]:
            return False
        if lane < 0:
            is_free = self._engines.running[-1 - lane] == NOTHING  # type: ignore[union-attr]
            return is_free and self._admits_beside(position)
        if note.partner is not None and not self._may_join(node, self._ranked.plan.index[note.partner]):
            return False
        takes = lane == 0 if footprint is None else not footprint.is_free(position)
        return not takes or self._admits(position)

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
    return MemberStarted(event.absent, event.weights, event.evaluates, event.owners)


def _batch(start: MemberStarted) -> str:
    pairs = [(chunk, m) for chunk, mask in start.absent for m in bits(mask)]
    kind = "to evaluate, " if start.evaluates else ""
    weights = f" and with weights {start.weights}" if start.weights else ""
    return f"{kind}without {pairs}{weights}" + (f", of owners {start.owners}" if start.owners else "")


class ProposingMember(GroupMember[tuple[int, int], TaskProposed]):
    """A member that starts the tasks that all propose. Keeps the proposals of open rounds, by round and member."""

    def _begin(self, ranked: StepPlan) -> None:
        super()._begin(ranked)
        self._round = 0
        self._refused: _Candidate = None

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
        """Propose, if it is time. Returns whether this member has proposed in the present round."""
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

    def _candidate(self) -> _Candidate:
        position, state = self._choose()
        return None if position is None else (self._ranked.plan.tasks[self._ranked.at[position]], state)

    def _settle(self, proposals: list[TaskProposed | None], out: list[Instruction]) -> None:
        """Run the task on which a round has agreed, or remember the refused candidate."""
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


def group_arbiter(
    protocol: GroupProtocol | str,
    setup: StageSetup,
    member: int = LEADER,
    num_members: int = 1,
    *,
    degree: int = GROUP_DEGREE,
) -> StageArbiter:
    """Returns the arbiter of one of a stage's ``num_members`` processes; a plain one if it is the only one.

    ``degree``: the degree of the tree through which notes between a leader and its group travel. In a group only
    a leader has foresight: it alone hears announcements, makes them, holds and is woken.

    Raises ValueError if there is no such member or protocol, and for a group that proposes and has operations beside
    compute, or pairs.
    """
    if not 0 <= member < num_members:
        raise ValueError(f"member {member} of a group of {num_members}: members are numbered from 0 to one less")
    try:
        protocol = GroupProtocol(protocol)
    except ValueError:
        raise ValueError(
            f"group protocol {str(protocol)!r} is unknown: choose one of {', '.join(GroupProtocol)}"
        ) from None
    if num_members > 1 and (protocol is not GroupProtocol.LEADER or member != LEADER):
        setup = replace(setup, foresight=None)
    if num_members > 1 and protocol is GroupProtocol.PROPOSE:
        if setup.pairs:
            raise ValueError(
                f"members that propose agree on single tasks: for pairs take group_protocol {GroupProtocol.LEADER}"
            )
        setup = replace(setup, certain_ahead=False)
    check_engines(setup.graph, setup.stage, num_members, protocol)
    if num_members == 1 or protocol is GroupProtocol.OFF:
        return StageArbiter(setup)
    if protocol is GroupProtocol.PROPOSE:
        return ProposingMember(setup, member, num_members, degree)
    return (LeadingMember if member == LEADER else FollowingMember)(setup, member, num_members, degree)


def check_engines(graph: PipelineGraph, stage: int, num_members: int, protocol: GroupProtocol | str) -> None:
    """Raise ValueError where a stage of several processes has engines beside compute and no leader who chooses for
    these too."""
    beside = [op.letter for op in graph.ops if op.is_beside]
    if num_members > 1 and beside and protocol != GroupProtocol.LEADER:
        raise ValueError(
            f"operation {beside[0]} runs beside compute on stage {stage}, which spans {num_members} processes: let "
            f"their leader choose (group_protocol {GroupProtocol.LEADER}), or give the operation the lane compute"
        )
