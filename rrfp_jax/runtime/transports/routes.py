"""Which rank sends which part of an array to which rank, from how it lies at the sending and the receiving unit.

Rules:
- Every element reaches every rank that needs it exactly once, however many of that rank's devices need it.
- A rank that holds an element itself takes its own copy, and nothing travels.
- Otherwise the ranks that hold it share the work: the j-th of n ranks that need it gets it from the holder at
  ``j * num_holders // n``.

Both sides compute the same routes from the same shardings, so a message need not say what it carries.

What travels are *boxes*: the index ranges of an array that a device holds, or that a message carries. A box has one
``(start, stop)`` per dimension; that of a scalar is empty. Boxes of one sharding are equal or disjoint, and together
they cover the array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index as ``jax.sharding.Sharding.devices_indices_map`` gives it."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    """The elements that are in both boxes; None where there are none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...] | None:
    """Where ``inner`` lies in an array that holds ``outer``; None where it is all of it."""
    if inner == outer:
        return None
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How an array lies over a unit: the box and the rank of each device, in the unit's order."""

    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]

    def ranks_by_box(self) -> dict[Box, tuple[int, ...]]:
        """Which ranks hold each distinct box, each rank once."""
        holders: dict[Box, dict[int, None]] = {}
        for box, rank in zip(self.boxes, self.ranks, strict=True):
            holders.setdefault(box, {})[rank] = None
        return {box: tuple(ranks) for box, ranks in holders.items()}

    def index_at(self, rank: int, box: Box) -> int:
        """Which of a rank's own devices holds ``box``, counted among its devices of the unit."""
        own = [held for held, owner in zip(self.boxes, self.ranks, strict=True) if owner == rank]
        return own.index(box)


class Piece(NamedTuple):
    """A part of an array that one rank hands to another, or to itself."""

    box: Box
    source: Box
    """The box at the sender that it is cut from."""
    target: Box
    """The box at the receiver that it becomes a part of."""
    sender: int
    receiver: int


class LeafPiece(NamedTuple):
    """A piece of one of the arrays of a message."""

    leaf: int
    piece: Piece


def route(source: Spread, target: Spread) -> list[Piece]:
    """The pieces of one array, by receiver."""
    holders = source.ranks_by_box()
    needed = target.ranks_by_box()
    pieces = []
    for tile, holding in holders.items():
        common = {box: both for box in needed if (both := intersection(tile, box)) is not None}
        receivers = tuple(dict.fromkeys(rank for box in common for rank in needed[box]))
        for box, both in common.items():
            for receiver in needed[box]:
                sender = sender_for(holding, receivers, receiver)
                pieces.append(Piece(both, tile, box, sender, receiver))
    return pieces


def route_message(
    leaves: Sequence[tuple[Spread, Spread]], source_ranks: Sequence[int], target_ranks: Sequence[int]
) -> Mapping[tuple[int, int], tuple[LeafPiece, ...]]:
    """The pieces of a message of several arrays, by (sender, receiver), in an order that both sides know.

    A receiver to whom no element travels, since all arrays are empty, gets an empty part from the rank that sends it
    control messages: so every message arrives.
    """
    parts: dict[tuple[int, int], list[LeafPiece]] = {}
    for leaf, spreads in enumerate(leaves):
        for piece in route(*spreads):
            parts.setdefault((piece.sender, piece.receiver), []).append(LeafPiece(leaf, piece))
    reached = {receiver for _, receiver in parts}
    for receiver in target_ranks:
        if receiver not in reached:
            parts[sender_for(source_ranks, target_ranks, receiver), receiver] = []
    return {pair: tuple(pieces) for pair, pieces in parts.items()}


def sender_for(senders: Sequence[int], receivers: Sequence[int], receiver: int) -> int:
    """Who sends to ``receiver`` what all senders hold: itself if it is one of them, else an even share to each."""
    if receiver in senders:
        return receiver
    return senders[receivers.index(receiver) * len(senders) // len(receivers)]
