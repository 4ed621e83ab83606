"""Edges: which arrays travel between two chunks, how they lie at both ends, and which slices each rank sends to which.

Rules of the routes:

- Every element reaches every rank that needs it exactly once, however many of that rank's devices need it.
- A rank that holds an element itself takes its own copy, and nothing travels.
- Otherwise the ranks that hold it share the work: the j-th of n ranks that need it gets it from the holder at
  ``j * num_holders // n``.

Both sides compute the same routes from the same shardings, so a message need not describe its content. All of this is
computed once per edge, before the first message: a message costs a few dictionary look-ups.

Routes are made of *boxes*: the index ranges of an array that a device holds, or that a message carries. A box has one
``(start, stop)`` per dimension; that of a scalar is empty. Boxes of one sharding are equal or disjoint, and together
they cover the array.

:class:`RoutingTable` looks up the edge of a message, and the ranks at its ends.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.schedules import Placement

_INLINE_BYTES, _MAX_INLINE_BYTES = 1 << 10, 1 << 16
"""Largest size of a piece that travels in a message's header, and of all such pieces of a message together."""
IN_PARTS = (MessageKind.PIECE, MessageKind.SUM, MessageKind.SHARE)
"""The kinds of messages that have the number of a part in place of a microbatch."""
_BETWEEN_UNITS = (MessageKind.REPORT, MessageKind.VERDICT)
_BY_BUCKET = (MessageKind.ACTIVATION, MessageKind.GRADIENT)

Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of an index as ``jax.sharding.Sharding.devices_indices_map`` gives it."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...] | None:
    """Returns the place of ``inner`` in an array that holds ``outer``, or None if it is all of it."""
    if inner == outer:
        return None
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How an array lies over a unit: the box and the rank of each device, in the unit's order."""

    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]

    def ranks_by_box(self) -> dict[Box, tuple[int, ...]]:
        """Returns the ranks that hold each distinct box, each rank once."""
        holders: dict[Box, dict[int, None]] = {}
        for box, rank in zip(self.boxes, self.ranks, strict=True):
            holders.setdefault(box, {})[rank] = None
        return {box: tuple(ranks) for box, ranks in holders.items()}


class Piece(NamedTuple):
    """A part of one array of a message that one rank hands to another, or to itself."""

    leaf: int
    """The index of the array in the message."""
    box: Box
    source: Box
    """The box at the sender that it is cut from."""
    target: Box
    """The box at the receiver that it becomes a part of."""
    sender: int
    receiver: int


def route_array(source: Spread, target: Spread, leaf: int = 0) -> list[Piece]:
    """Returns the pieces of one array, by receiver."""
    needed = target.ranks_by_box()
    pieces: list[Piece] = []
    for tile, holding in source.ranks_by_box().items():
        common = {box: both for box in needed if (both := intersection(tile, box)) is not None}
        receivers = tuple(dict.fromkeys(rank for box in common for rank in needed[box]))
        for box, both in common.items():
            pieces += [
                Piece(leaf, both, tile, box, sender_for(holding, receivers, receiver), receiver)
                for receiver in needed[box]
            ]
    return pieces


def route_message(
    leaves: Sequence[tuple[Spread, Spread]], source_ranks: Sequence[int], target_ranks: Sequence[int]
) -> Mapping[tuple[int, int], tuple[Piece, ...]]:
    """Returns the pieces of a message of several arrays, by (sender, receiver), in an order that both sides know."""
    parts: dict[tuple[int, int], list[Piece]] = {}
    for leaf, spreads in enumerate(leaves):
        for piece in route_array(*spreads, leaf):
            parts.setdefault((piece.sender, piece.receiver), []).append(piece)
    # A receiver to which no element travels, since all arrays are empty, gets an empty part, so every message arrives.
    reached = {receiver for _, receiver in parts}
    for receiver in target_ranks:
        if receiver not in reached:
            parts[sender_for(source_ranks, target_ranks, receiver), receiver] = []
    return {pair: tuple(pieces) for pair, pieces in parts.items()}


def sender_for(senders: Sequence[int], receivers: Sequence[int], receiver: int) -> int:
    """Returns the rank that sends to ``receiver`` a value that all senders hold: ``receiver`` itself if it is one of
    them, else each sender has an even share of the receivers."""
    if receiver in senders:
        return receiver
    return senders[receivers.index(receiver) * len(senders) // len(receivers)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayEdge:
    """The arrays that travel from one chunk to another.

    Shardings are one for all leaves, or a pytree of the structure of ``spec``. Their devices are those of the unit at
    that end, in the order of ``Layout.devices_of``. If the ends are in different processes which are not joined by
    ``jax.distributed``, give any sharding of the right shape: only its index map is read.
    """

    spec: Any
    """A pytree of arrays' shapes and dtypes (``jax.ShapeDtypeStruct``)."""
    source: Any
    """The shardings in which the sending program leaves the arrays."""
    target: Any
    """The shardings in which the receiving program takes them."""


@dataclass(frozen=True, kw_only=True)
class EdgeLeaf:
    """One array of an edge."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source_sharding: jax.sharding.Sharding
    target_sharding: jax.sharding.Sharding
    source: Spread
    target: Spread
    is_whole_on_host: bool
    """Whether programs at the target take it as one NumPy array: each of their devices shares the host's memory and
    holds all of it."""

    def device(self, index: int, *, is_source: bool) -> jax.Device:
        """Returns the device at this position among this process's devices of the unit at one end."""
        sharding = self.source_sharding if is_source else self.target_sharding
        return list(sharding.addressable_devices_indices_map(self.shape))[index]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One piece of a message, as this rank cuts it out or pastes it in."""

    leaf: int
    shape: tuple[int, ...]
    dtype: np.dtype
    num_bytes: int
    device: int
    """The device that holds it: its position among this rank's devices of the unit."""
    within: tuple[slice, ...] | None
    """The place in the shard of that device; None: it is the whole shard."""
    in_array: tuple[slice, ...] | None
    """The place in the whole array; None: it is all of it."""
    shard: Box
    """The box of the shard."""
    is_replicated: bool
    """Whether every device of the sending unit holds the whole array."""
    is_inline: bool = False
    """Whether it travels in the message's header, as small pieces do."""


class EdgePlan:
    """All that this rank sends and receives over an edge.

    Raises ValueError if shardings do not fit the spec or the units.
    """

    def __init__(self, edge: ArrayEdge, layout: Layout, source_unit: int, target_unit: int, rank: int) -> None:
        specs, treedef = jax.tree.flatten(edge.spec)
        self.treedef: Any = treedef
        self.edge, self.rank, self.target_unit = edge, rank, target_unit
        source_ranks, target_ranks = layout.ranks_of(source_unit), layout.ranks_of(target_unit)
        sources, targets = _per_leaf(edge.source, specs, edge.spec), _per_leaf(edge.target, specs, edge.spec)
        self.leaves = tuple(
            EdgeLeaf(
                shape=tuple(spec.shape),
                dtype=np.dtype(spec.dtype),
                source_sharding=source,
                target_sharding=target,
                source=_spread(source, spec.shape, layout, source_unit),
                target=_spread(target, spec.shape, layout, target_unit),
                is_whole_on_host=target.is_fully_replicated and is_on_host(target),
            )
            for spec, source, target in zip(specs, sources, targets, strict=True)
        )
        spreads = [(leaf.source, leaf.target) for leaf in self.leaves]
        routes = route_message(spreads, source_ranks, target_ranks)
        self.outgoing: Mapping[int, tuple[Slot, ...]] = {
            receiver: self._slots(pieces, is_source=True)
            for (sender, receiver), pieces in routes.items()
            if sender == rank
        }
        """By receiving rank, the pieces to cut out of this rank's shards."""
        self.incoming: Mapping[int, tuple[Slot, ...]] = {
            sender: self._slots(pieces, is_source=False)
            for (sender, receiver), pieces in routes.items()
            if receiver == rank
        }
        """By sending rank, the pieces to paste into this rank's shards."""
        self.outgoing_bytes = {receiver: num_bytes_of(slots) for receiver, slots in self.outgoing.items()}
        """The size of this rank's part of a message to each receiving rank."""
        self.incoming_bytes = sum(map(num_bytes_of, self.incoming.values()))
        """The size of all parts of a message that come to this rank."""
        self.stays = source_unit == target_unit and all(leaf.source == leaf.target for leaf in self.leaves)
        """Whether the arrays are already where and how the receiving program wants them."""
        self.is_in_process = self.stays or source_ranks == target_ranks == (rank,)
        """Whether no array of it leaves this process."""
        self.is_target_on_host = all(is_on_host(leaf.target_sharding) for leaf in self.leaves)
        """Whether the devices at the target share the host's memory."""
        self.is_plain = (
            all(leaf.is_whole_on_host for leaf in self.leaves)
            and len(self.incoming) == 1
            and all([slot.leaf for slot in slots] == [*range(len(self.leaves))] for slots in self.incoming.values())
            and all(slot.in_array is None for slots in self.incoming.values() for slot in slots)
        )
        """Whether one part brings every array as a whole, as programs take it."""
        self._checked: list[Any] = [None] * len(self.leaves)
        """The sharding of each array that was last found to lie as planned."""

    @cached_property
    def is_source_on_host(self) -> bool:
        """Whether the devices at the source share the host's memory."""
        return all(is_on_host(leaf.source_sharding) for leaf in self.leaves)

    @cached_property
    def is_single(self) -> bool:
        """Whether the payload is one array, not a container of some."""
        return self.treedef == jax.tree.structure(0)

    def flatten(self, payload: Any) -> list[Any]:
        """Returns the arrays of a payload (an array of NumPy holds all of it). Raises ValueError if they are not those
        of the edge."""
        if self.is_single and hasattr(payload, "dtype"):
            leaves = [payload]
        else:
            structure: Any
            leaves, structure = jax.tree.flatten(payload)
            if structure != self.treedef:
                raise ValueError(f"a payload has the structure {structure}, its edge {self.treedef}: send what it says")
        for i, leaf in enumerate(leaves):
            # to compare shardings costs more than all else here, so only one that is new is looked at
            if type(leaf) is np.ndarray or leaf.sharding is not self._checked[i]:
                self._check(i, leaf)
        return leaves

    def _check(self, index: int, array: Any) -> None:
        leaf = self.leaves[index]
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"array {index} of a payload is {array.dtype}{array.shape}, its edge says {leaf.dtype}{leaf.shape}: "
                "give the edge the shapes and dtypes of the program's outputs"
            )
        if isinstance(array, np.ndarray):
            return
        own = [b for b, rank in zip(leaf.source.boxes, leaf.source.ranks, strict=True) if rank == self.rank]
        indices = array.sharding.addressable_devices_indices_map(leaf.shape).values()
        held = [box_of(index or (), leaf.shape) for index in indices]
        # an array that each device holds wholly may lie on some of them only: one is enough to send it
        if held != own and not (array.is_fully_replicated and set(held) == set(own)):
            raise ValueError(
                f"array {index} of a payload lies as {array.sharding}, its edge says {leaf.source_sharding}: "
                "give the edge the sharding of the program's outputs"
            )
        self._checked[index] = array.sharding

    def _slots(self, pieces: Sequence[Piece], *, is_source: bool) -> tuple[Slot, ...]:
        """Returns this rank's view of the pieces; small ones go into the header while there is space in it."""
        slots, left_bytes = [], _MAX_INLINE_BYTES
        for piece in pieces:
            leaf, shape = self.leaves[piece.leaf], shape_of(piece.box)
            spread, shard = (leaf.source, piece.source) if is_source else (leaf.target, piece.target)
            own = [box for box, owner in zip(spread.boxes, spread.ranks, strict=True) if owner == self.rank]
            slot = Slot(
                leaf=piece.leaf,
                shape=shape,
                dtype=leaf.dtype,
                num_bytes=int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize,
                device=own.index(shard),
                within=slices_within(piece.box, shard),
                in_array=slices_within(piece.box, tuple((0, size) for size in leaf.shape)),
                shard=shard,
                is_replicated=leaf.source_sharding.is_fully_replicated,
            )
            # the choice depends on sizes and order alone, so both sides choose alike
            if slot.num_bytes <= min(_INLINE_BYTES, left_bytes):
                left_bytes -= slot.num_bytes
                slot = replace(slot, is_inline=True)
            slots.append(slot)
        return tuple(slots)


def is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Returns whether the devices of a sharding work in the host's own memory."""
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def num_bytes_of(slots: Sequence[Slot]) -> int:
    return sum(slot.num_bytes for slot in slots)


def _per_leaf(shardings: Any, specs: list[Any], spec: Any) -> list[jax.sharding.Sharding]:
    if isinstance(shardings, jax.sharding.Sharding):
        return [shardings] * len(specs)
    structure: Any
    leaves, structure = jax.tree.flatten(shardings)
    if structure != jax.tree.structure(spec):
        raise ValueError(f"shardings have the structure {structure}, the arrays {jax.tree.structure(spec)}: match them")
    return leaves


def _spread(sharding: jax.sharding.Sharding, shape: tuple[int, ...], layout: Layout, unit: int) -> Spread:
    boxes = tuple(box_of(index, shape) for index in sharding.devices_indices_map(tuple(shape)).values())
    devices = layout.devices_of(unit)
    if len(boxes) != len(devices):
        raise ValueError(
            f"a sharding over {len(boxes)} devices is given for unit {unit}, which has {len(devices)}: "
            "give one over the devices of the unit"
        )
    return Spread(boxes=boxes, ranks=tuple(layout.rank_of_device(device) for device in devices))


EdgeOf = Callable[[Message, int], ArrayEdge | None]
"""Returns the arrays that a message of a bucket carries, or None for plain data. Depends on kind, source and target
only, and may be called on any thread. Shares, of which each has other arrays, take their number for a bucket."""


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
    """The routes of all messages, seen from one rank: worked out once per edge, and looked up from then on, on any
    thread.

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
        if (known := self._known.get(which)) is not None:
            return known
        from_unit, to_unit = _units_of(self._placement, message)
        sources, targets = self._layout.ranks_of(from_unit), self._layout.ranks_of(to_unit)
        receivers = tuple(rank for rank in targets if sender_for(sources, targets, rank) == self._rank)
        plan, edge = None, self._edge(message, bucket)
        if edge is not None:
            plan = self._plans.get((*which[:3], edge))  # of another bucket, in which the same arrays travel
            if plan is None:
                plan = self._plans[*which[:3], edge] = EdgePlan(edge, self._layout, from_unit, to_unit, self._rank)
                if from_unit == to_unit and not plan.is_in_process:
                    raise ValueError(
                        f"unit {from_unit} spans processes and hands chunk {source}'s output to its own chunk "
                        f"{target} in another sharding: give both the same"
                    )
                self._prepare(plan)
        route = self._known[which] = Route(plan, to_unit, receivers, self._rank in targets)
        return route

    def prepare(self, messages: Iterable[Message]) -> None:
        """Works out the routes of such messages in every bucket."""
        for message in messages:
            if not all(map(self._layout.ranks_of, _units_of(self._placement, message))):
                continue  # One end is a unit that is absent.
            buckets = range(self._num_buckets) if message.kind in _BY_BUCKET else range(1)
            for bucket in (message.microbatch,) if message.kind is MessageKind.SHARE else buckets:
                self.of(message, bucket)

    def expected(self, message: Message, bucket: int = 0) -> Route:
        """Returns the route of a message that has come. Raises MalformedMessage if it is not for a unit of this
        rank."""
        route = self._known.get((*message[:3], bucket))
        if route is None:
            # Numbers from another process are checked before they make a plan, which takes time and memory.
            numbered = self._layout.num_units if message.kind in _BETWEEN_UNITS else self._placement.num_chunks
            num_buckets = self._layout.data if message.kind is MessageKind.SHARE else self._num_buckets
            is_known = max(message.source, message.target) < numbered and bucket < num_buckets
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


def partners(layout: Layout, placement: Placement, rank: int, messages: Iterable[Message]) -> set[int]:
    """Returns the ranks with which ``rank`` exchanges such messages. The relation is symmetric."""
    found: set[int] = set()
    for message in messages:
        ends = [layout.ranks_of(unit) for unit in _units_of(placement, message)]
        found |= {other for here, there in (ends, ends[::-1]) if rank in here for other in there}
    return found - {rank}


def _units_of(placement: Placement, message: Message) -> tuple[int, int]:
    if message.kind in _BETWEEN_UNITS:
        return message.source, message.target
    return placement.stage_of_chunk[message.source], placement.stage_of_chunk[message.target]
