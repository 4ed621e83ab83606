"""What the members of a group have in common, whichever way they agree: an arbiter that hears notes and keeps some."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.estimates import Estimates
from rrfp_jax.core.events import Event, GroupHeard, InputArrived, Instruction
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.tree import children, parent

LEADER = 0
"""The member that leads a group."""
GROUP_DEGREE = 8
"""How many members the leader, and who passes notes on for it, exchanges them with: in groups of up to nine each member
is next to the leader."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Hashable)


class GroupMember(StageArbiter, Generic[Key, Value]):
    """The arbiter of one process among those that a stage spans; used as any other arbiter.

    A subclass says in ``_hear`` what a note does, and in ``_dispatch`` what runs.

    Args:
        setup: the same for all members.
        member: its number in the group, which has ``num_members``.
        degree: of the tree in which a leader's members lie.
    """

    def __init__(self, setup: StageSetup, member: int, num_members: int, degree: int = GROUP_DEGREE) -> None:
        self.member, self.num_members = member, num_members
        self.parent = parent(member, degree)
        self.children = tuple(children(member, num_members, degree))
        self.others = tuple(other for other in range(num_members) if other != member)
        self._kept: dict[int, dict[Key, Value]] = {}
        super().__init__(setup)

    def copy(self) -> "GroupMember[Key, Value]":
        twin = super().copy()
        assert isinstance(twin, GroupMember)
        twin._kept = {step: kept.copy() for step, kept in self._kept.items()}
        return twin

    def fresh(self, after: int | None, estimates: Estimates | None = None) -> "GroupMember[Key, Value]":
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
        """Take in a note of the present step or a later one; tells whether the stage may have something to do."""
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
        """Whether this event of the present step or a later one has been taken in before."""
        if self._is_current(event.step):
            return self._ranked.plan.arrivals.get(event.message) in self._arrived
        return any(early.message == event.message for early in self._early.get(event.step, ()))
