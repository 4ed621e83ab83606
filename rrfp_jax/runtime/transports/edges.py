"""Edges: what arrays travel between two chunks, how they lie at both ends, and what this rank has to do about it.

All is worked out once per edge, before the first message: a message costs a few dictionary look-ups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rrfp_jax.layout import Layout
from rrfp_jax.runtime.transports.routes import (
    Box,
    LeafPiece,
    Spread,
    box_of,
    route_message,
    shape_of,
    slices_within,
)

INLINE_BYTES, MAX_INLINE_BYTES = 1 << 10, 1 << 16
"""How large a piece may be that travels in a message's header, and all of a message's together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """What travels from one chunk to another.

    Shardings are one for all leaves, or a pytree of the structure of ``spec``. Their devices are those of the unit at
    that end, in the order of ``Layout.devices_of``. Where the ends are in different processes which are not joined by
    ``jax.distributed``, give any sharding of the right shape: only its index map is read.
    """

    spec: Any
    """A pytree of arrays' shapes and dtypes (``jax.ShapeDtypeStruct``)."""
    source: Any
    """How the sending program leaves them."""
    target: Any
    """How the receiving program wants them."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
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


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One piece of a message, as this rank cuts it out or pastes it in."""

    leaf: int
    shape: tuple[int, ...]
    dtype: np.dtype
    num_bytes: int
    device: int
    """Which of this rank's devices of the unit holds it: the position among them."""
    within: tuple[slice, ...] | None
    """Where it lies in the shard of that device; None: it is the whole shard."""
    in_array: tuple[slice, ...] | None
    """Where it lies in the whole array; None: it is all of it."""
    shard: Box
    """The box of the shard."""
    is_replicated: bool
    """Whether every device of the sending unit holds the whole array."""
    is_inline: bool = False
    """Whether it travels in the message's header, as small pieces do."""


class EdgePlan:
    """What this rank sends and receives over an edge.

    Raises ValueError where shardings do not fit the spec or the units.
    """

    def __init__(self, edge: Edge, layout: Layout, source_unit: int, target_unit: int, rank: int) -> None:
        specs, treedef = jax.tree.flatten(edge.spec)
        self.treedef: Any = treedef
        self.edge, self.rank = edge, rank
        self.source_unit, self.target_unit = source_unit, target_unit
        self.source_ranks, self.target_ranks = layout.ranks_of(source_unit), layout.ranks_of(target_unit)
        sources, targets = _per_leaf(edge.source, specs, edge.spec), _per_leaf(edge.target, specs, edge.spec)
        self.leaves = tuple(
            Leaf(
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
        routes = route_message(
            [(leaf.source, leaf.target) for leaf in self.leaves], self.source_ranks, self.target_ranks
        )
        self.outgoing: Mapping[int, tuple[Slot, ...]] = {
            receiver: _inlined([self._slot(each, each.piece.source, is_outgoing=True) for each in pieces])
            for (sender, receiver), pieces in routes.items()
            if sender == rank
        }
        """By receiving rank, what to cut out of this rank's shards."""
        self.incoming: Mapping[int, tuple[Slot, ...]] = {
            sender: _inlined([self._slot(each, each.piece.target, is_outgoing=False) for each in pieces])
            for (sender, receiver), pieces in routes.items()
            if receiver == rank
        }
        """By sending rank, what to paste into this rank's shards."""
        self._checked: list[Any] = [None] * len(self.leaves)
        """The sharding of each array that was last found to lie as planned."""

    def flatten(self, payload: Any) -> list[Any]:
        """The arrays of a payload (NumPy's hold all of it). Raises ValueError where they are not what the edge says.

        Shardings are looked at when they change only.
        """
        if self.is_single and hasattr(payload, "dtype"):
            leaves = [payload]
        else:
            structure: Any
            leaves, structure = jax.tree.flatten(payload)
            if structure != self.treedef:
                raise ValueError(f"a payload has the structure {structure}, its edge {self.treedef}: send what it says")
        for i, leaf in enumerate(leaves):
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

    @cached_property
    def is_plain(self) -> bool:
        """Whether one part brings every array as a whole, as programs take it."""
        leaves = list(range(len(self.leaves)))
        return (
            all(leaf.is_whole_on_host for leaf in self.leaves)
            and len(self.incoming) == 1
            and all([slot.leaf for slot in slots] == leaves for slots in self.incoming.values())
            and all(slot.in_array is None for slots in self.incoming.values() for slot in slots)
        )

    @cached_property
    def is_single(self) -> bool:
        """Whether the payload is one array, not a container of some."""
        return self.treedef == jax.tree.structure(0)

    @cached_property
    def is_local(self) -> bool:
        """Whether both units lie wholly on this rank."""
        return self.source_ranks == self.target_ranks == (self.rank,)

    @cached_property
    def stays(self) -> bool:
        """Whether the arrays are already where and how they are wanted."""
        return self.source_unit == self.target_unit and all(leaf.source == leaf.target for leaf in self.leaves)

    @cached_property
    def is_source_on_host(self) -> bool:
        """Whether the devices at the source share the host's memory."""
        return all(is_on_host(leaf.source_sharding) for leaf in self.leaves)

    @cached_property
    def outgoing_bytes(self) -> Mapping[int, int]:
        """What this rank's part of a message to each receiving rank has."""
        return {receiver: num_bytes_of(slots) for receiver, slots in self.outgoing.items()}

    @cached_property
    def incoming_bytes(self) -> int:
        """What a message brings to this rank."""
        return sum(num_bytes_of(slots) for slots in self.incoming.values())

    @cached_property
    def on_host(self) -> bool:
        """Whether the devices at the target share the host's memory."""
        return all(is_on_host(leaf.target_sharding) for leaf in self.leaves)

    def _slot(self, piece: LeafPiece, shard: Box, *, is_outgoing: bool) -> Slot:
        leaf, box = self.leaves[piece.leaf], piece.piece.box
        spread, shape = leaf.source if is_outgoing else leaf.target, shape_of(box)
        return Slot(
            leaf=piece.leaf,
            shape=shape,
            dtype=leaf.dtype,
            num_bytes=int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize,
            device=spread.index_at(self.rank, shard),
            within=slices_within(box, shard),
            in_array=slices_within(box, tuple((0, size) for size in leaf.shape)),
            shard=shard,
            is_replicated=leaf.source_sharding.is_fully_replicated,
        )


def is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether the devices of a sharding work in the host's own memory."""
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def local_devices(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[jax.Device]:
    """This process's devices of a sharding, in its order."""
    return list(sharding.addressable_devices_indices_map(shape))


def _inlined(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Small pieces go into the header while there is room; both sides decide alike."""
    decided, room_bytes = [], MAX_INLINE_BYTES
    for slot in slots:
        is_inline = slot.num_bytes <= min(INLINE_BYTES, room_bytes)
        room_bytes -= slot.num_bytes if is_inline else 0
        decided.append(replace(slot, is_inline=is_inline))
    return tuple(decided)


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
