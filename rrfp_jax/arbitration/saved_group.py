"""What the members of a group remember of each other's notes, as plain records beside those of the arbiter itself."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.arbitration.arbiter import StageArbiter
from rrfp_jax.arbitration.events import MemberReceived, MemberStarted, Note, TaskChosen, TaskProposed
from rrfp_jax.arbitration.group import GroupProtocol
from rrfp_jax.arbitration.group_leader import FollowingMember, LeadingMember
from rrfp_jax.arbitration.group_member import LEADER, GroupMember
from rrfp_jax.arbitration.group_rounds import ProposingMember
from rrfp_jax.tasks import Task


@dataclass(frozen=True, kw_only=True)
class SavedMembership:
    """An arbiter's place in its group; a stage that is one process is a group of one."""

    protocol: GroupProtocol
    member: int
    num_members: int


class KeptNote(NamedTuple):
    """A note that a member has not done with."""

    step: int
    note: Note
    members: int
    """As bits: who said it, or who has what it names."""


class Refused(NamedTuple):
    """The candidate of a member when the last round failed."""

    task: Task
    hint_state: int


@dataclass(frozen=True, kw_only=True)
class SavedNotes:
    """What a member of a group keeps between two events."""

    kept: tuple[KeptNote, ...] = ()
    round: int = 0
    """The round of proposals that is open or comes next."""
    refused: Refused | None = None


def save_membership(arbiter: StageArbiter) -> SavedMembership:
    """The place of ``arbiter`` in its group."""
    if not isinstance(arbiter, GroupMember):
        return SavedMembership(protocol=GroupProtocol.OFF, member=LEADER, num_members=1)
    protocol = GroupProtocol.PROPOSE if isinstance(arbiter, ProposingMember) else GroupProtocol.LEADER
    return SavedMembership(protocol=protocol, member=arbiter.member, num_members=arbiter.num_members)


def save_notes(arbiter: StageArbiter) -> SavedNotes:
    """What ``arbiter`` remembers of its group."""
    if not isinstance(arbiter, GroupMember):
        return SavedNotes()
    kept = [_kept_note(step, key, value) for step, kept in arbiter._kept.items() for key, value in kept.items()]
    kept.sort(key=str)
    if not isinstance(arbiter, ProposingMember):
        return SavedNotes(kept=tuple(kept))
    refused = arbiter._refused and Refused(*arbiter._refused)
    return SavedNotes(kept=tuple(kept), round=arbiter._round, refused=refused)


def _kept_note(step: int, key: Any, value: Any) -> KeptNote:
    """Leaders keep notes with the members that have it, followers by number, proposers by round and member."""
    if isinstance(value, int):
        return KeptNote(step, key, value)
    return KeptNote(step, value, 1 << (LEADER if isinstance(key, int) else key[1]))


def put_notes(arbiter: StageArbiter, saved: SavedNotes) -> None:
    """Have ``arbiter`` remember what :func:`save_notes` told; raises ValueError where it cannot."""
    if not isinstance(arbiter, GroupMember):
        if saved != SavedNotes():
            raise ValueError(f"stage {arbiter.stage} has no group, but a state with notes of one")
        return
    arbiter._kept = {}
    for step, note, members in saved.kept:
        arbiter._kept.setdefault(step, {}).update([_kept_entry(arbiter, note, members)])
    if isinstance(arbiter, ProposingMember):
        arbiter._round = saved.round
        arbiter._refused = saved.refused and (saved.refused.task, saved.refused.hint_state)


def _kept_entry(arbiter: GroupMember[Any, Any], note: Note, members: int) -> tuple[Any, Any]:
    if isinstance(arbiter, LeadingMember) and isinstance(note, MemberStarted | MemberReceived):
        return note, members
    if isinstance(arbiter, FollowingMember) and isinstance(note, TaskChosen):
        return note.number, note
    if isinstance(arbiter, ProposingMember) and isinstance(note, TaskProposed):
        return (note.round, members.bit_length() - 1), note
    raise ValueError(f"stage {arbiter.stage}, member {arbiter.member} cannot keep {note}")
