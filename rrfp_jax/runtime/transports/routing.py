"""The units and ranks at both ends of each edge, worked out once per edge and looked up from then on."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.transports.edges import ArrayEdge, EdgePlan, sender_for
from rrfp_jax.schedules import Placement

EdgeOf = Callable[[Message, int], ArrayEdge | None]
"""Returns the arrays that a message of a bucket carries, or None for plain data. Depends on kind, source and target
only, and may be called on any thread."""

_BETWEEN_UNITS = (MessageKind.REPORT, MessageKind.VERDICT)
_BY_BUCKET = (MessageKind.ACTIVATION, MessageKind.GRADIENT)


class Route(NamedTuple):
    """The way of the messages between two chunks, or two units."""

    plan: EdgePlan | None
    """None: they carry plain data."""
    target_unit: int
    receivers: tuple[int, ...]
    """The ranks to which this rank sends plain data."""
    is_to_here: bool
    """Whether this rank has devices of the target."""


class RoutingTable:
    """The routes of all messages, seen from one rank; usable on any thread.

    Args:
        num_buckets: number of shapes that the messages of an edge may have.
        prepare: called with each new plan, before it is used.
    """

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        rank: int,
        edge: EdgeOf,
        *,
        prepare: Callable[[EdgePlan], None],
        num_buckets: int = 1,
    ) -> None:
        self._layout, self._placement, self._rank, self._edge = layout, placement, rank, edge
        self._prepare, self._num_buckets = prepare, num_buckets
        self._known: dict[tuple[MessageKind, int, int, int], Route] = {}
        self._plans: dict[tuple[MessageKind, int, int, ArrayEdge], EdgePlan] = {}

    def of(self, message: Message, bucket: int = 0) -> Route:
        """Returns the route of a message. Raises ValueError if the edge does not fit its units."""
        kind, source, target, _ = message
        which = kind, source, target, bucket
        route = self._known.get(which)
        if route is None:
            route = self._known[which] = self._make(message, bucket)
        return route

    def prepare(self, message: Message) -> None:
        """Works out the routes of such messages in every bucket."""
        for bucket in range(self._num_buckets if message.kind in _BY_BUCKET else 1):
            self.of(message, bucket)

    def expected(self, message: Message, bucket: int = 0) -> Route:
        """Returns the route of a message that has come. Raises MalformedMessage if it is not for a unit of this
        rank."""
        route = self._known.get((*message[:3], bucket))
        if route is None:
            numbered = self._layout.num_units if message.kind in _BETWEEN_UNITS else self._placement.num_chunks
            is_known = max(message.source, message.target) < numbered and bucket < self._num_buckets
            route = self.of(message, bucket) if is_known else None
        if route is None or not route.is_to_here:
            raise MalformedMessage(f"the message '{message}' of bucket {bucket} is not for rank {self._rank}")
        return route

    def plan_from(self, message: Message, bucket: int, sender: int) -> EdgePlan:
        """Returns the plan of a message that has come. Raises MalformedMessage if ``sender`` has no part in it."""
        plan = self.expected(message, bucket).plan
        if plan is None or sender not in plan.incoming:
            raise MalformedMessage(f"rank {sender} sends no part of the message '{message}' of bucket {bucket}")
        return plan

    def _make(self, message: Message, bucket: int) -> Route:
        source, target = _units_of(self._placement, message)
        sources, targets = self._layout.ranks_of(source), self._layout.ranks_of(target)
        receivers = tuple(rank for rank in targets if sender_for(sources, targets, rank) == self._rank)
        plan, edge = None, self._edge(message, bucket)
        if edge is not None:
            which = (*message[:3], edge)
            plan = self._plans.get(which)  # of another bucket, in which the same arrays travel
            if plan is None:
                plan = self._plans[which] = EdgePlan(edge, self._layout, source, target, self._rank)
                if source == target and not plan.is_in_process:
                    raise ValueError(
                        f"unit {source} spans processes and hands chunk {message.source}'s output to its own chunk "
                        f"{message.target} in another sharding: give both the same"
                    )
                self._prepare(plan)
        return Route(plan, target, receivers, self._rank in targets)


def partners(layout: Layout, placement: Placement, rank: int, messages: Iterable[Message]) -> set[int]:
    """Returns the ranks with which ``rank`` exchanges such messages. The relation is symmetric."""
    found: set[int] = set()
    for message in messages:
        ends = [layout.ranks_of(unit) for unit in _units_of(placement, message)]
        found |= {other for here, there in (ends, ends[::-1]) if rank in here for other in there}
    return found - {rank}


def _units_of(placement: Placement, message: Message) -> tuple[int, int]:
    """Returns the sending and the receiving unit."""
    if message.kind in _BETWEEN_UNITS:
        return message.source, message.target
    return placement.stage_of_chunk[message.source], placement.stage_of_chunk[message.target]
