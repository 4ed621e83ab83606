"""Agreement within a group: how the processes that one stage spans come to run the same tasks in the same order.

Each process of such a stage has an arbiter of its own and receives the stage's messages on its own, so what is ready
differs between them for moments. A task is a collective of the group, so all must enter the same one: with arbiters
that do not agree the processes wait for each other forever. The members of a group are numbered from 0, and all are
made of the same graph, consumption, window and rules.
"""

from dataclasses import replace
from enum import StrEnum

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.group_leader import FollowingMember, LeadingMember
from rrfp_jax.core.group_member import GROUP_DEGREE, LEADER
from rrfp_jax.core.group_rounds import ProposingMember
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.schedules import PipelineGraph


class GroupProtocol(StrEnum):
    """How the members of a group agree."""

    LEADER = "leader"
    """One chooses from what is ready on all (:mod:`rrfp_jax.core.group_leader`)."""
    PROPOSE = "propose"
    """All propose, and what all propose runs (:mod:`rrfp_jax.core.group_rounds`)."""
    OFF = "off"
    """Not at all: each chooses for itself. It shows what agreement is for."""


def group_arbiter(
    protocol: GroupProtocol | str,
    setup: StageSetup,
    member: int = LEADER,
    num_members: int = 1,
    *,
    degree: int = GROUP_DEGREE,
) -> StageArbiter:
    """The arbiter of one of a stage's ``num_members`` processes; a plain one if it is the only one.

    ``degree`` is that of the tree through which a leader hears from its group and tells it.

    Of a group only a leader has foresight: it alone hears announcements, makes them, holds and is woken.

    Raises ValueError if there is no such member or protocol, and for a group with operations beside compute.
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
        setup = replace(setup, certain_ahead=False)
    check_engines(setup.graph, setup.stage, num_members)
    if num_members == 1 or protocol is GroupProtocol.OFF:
        return StageArbiter(setup)
    return _member_class(protocol, member)(setup, member, num_members, degree)


def check_engines(graph: PipelineGraph, stage: int, num_members: int) -> None:
    """Raise ValueError where a stage of several processes has engines beside compute: a group agrees on one sequence of
    tasks, so that collectives meet, and those are not in it."""
    beside = [op.letter for op in graph.ops if op.is_beside]
    if num_members > 1 and beside:
        raise ValueError(
            f"operation {beside[0]} runs beside compute, and stage {stage} spans {num_members} processes, which "
            "agree on one sequence of tasks: give the stage one process, or the operation the lane compute"
        )


def _member_class(
    protocol: GroupProtocol, member: int
) -> type[LeadingMember] | type[FollowingMember] | type[ProposingMember]:
    if protocol is GroupProtocol.PROPOSE:
        return ProposingMember
    return LeadingMember if member == LEADER else FollowingMember
