"""Which rank sends which part of an array to which rank, from how it lies at the sending and the receiving unit.

Rules:
- Every element reaches every rank that needs it exactly once, however many of that rank's devices need it.
- A rank that holds an element itself takes its own copy, and nothing travels.
- Otherwise the ranks that hold it share the work: the j-th of n ranks that need it gets it from the holder at
  ``j * num_holders // n``.

Both sides compute the same routes from the same shardings, so a message need not say what it carries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rrfp_jax.runtime.transports.boxes import Box, intersection


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
