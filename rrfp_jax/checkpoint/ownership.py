"""Who writes which layers: those of the same processes are saved together, as one part of a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import jax

from rrfp_jax.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The processes that write a layer; all of them take part in saving it."""

    ranks: tuple[int, ...]
    """Ascending."""
    device: jax.Device
    """Of several copies of an array, the one that this device has a share of is written."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Layers that are saved together; named after its first layer."""

    name: str
    """As a file name."""
    layers: tuple[str, ...]
    ranks: tuple[int, ...]


def layer_owners(
    layers_of_chunk: Sequence[Iterable[str]],
    stage_of_chunk: Sequence[int],
    layout: Layout,
    devices: Sequence[jax.Device],
    *,
    shard_optimizer: bool = False,
) -> dict[str, Owner]:
    """The owner of every layer, in the model's order, known without looking at any array.

    A layer belongs to the lowest chunk that holds it, and there to the first replica, or to all of them where they
    share out the optimizer state.

    Args:
        layers_of_chunk: of every chunk of one replica, the names of its layers.
        stage_of_chunk: of every chunk of one replica.
        devices: by global number, as ``layout`` deals them out.
    """
    owners: dict[str, Owner] = {}
    for layers, stage in zip(layers_of_chunk, stage_of_chunk, strict=True):
        unit = layout.unit(stage, 0)
        owner = Owner(
            ranks=layout.ranks_of_stage(stage) if shard_optimizer else layout.ranks_of(unit),
            device=devices[layout.devices_of(unit)[0]],
        )
        owners |= {layer: owner for layer in layers if layer not in owners}
    return owners


def parts_of_step(owners: Mapping[str, Owner]) -> tuple[Part, ...]:
    """The parts in which a step is saved: the layers of the same processes together, the same on all ranks."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for layer, owner in owners.items():
        groups.setdefault(owner.ranks, []).append(layer)
    return tuple(Part(name=part_name(layers[0]), layers=tuple(layers), ranks=ranks) for ranks, layers in groups.items())


def part_name(layer: str) -> str:
    """The file name of a part whose first layer this is."""
    name = quote(layer, safe=" ")
    return name if name.strip(".") else name.replace(".", "%2E")  # "." and ".." are other folders
