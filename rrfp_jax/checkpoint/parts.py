"""Who writes which layers, and the writing: layers of the same processes are saved together, as one part of a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jax

from rrfp_jax.checkpoint.arrays import HostArray, Name
from rrfp_jax.checkpoint.files import sum_tree
from rrfp_jax.checkpoint.orbax_writing import PartFiles
from rrfp_jax.checkpoint.record import PartRecord
from rrfp_jax.planning.layout import Layout


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
    return tuple(
        Part(name=_file_name(layers[0]), layers=tuple(layers), ranks=ranks) for ranks, layers in groups.items()
    )


def _file_name(layer: str) -> str:
    name = quote(layer, safe=" ")
    return name if name.strip(".") else name.replace(".", "%2E")  # "." and ".." are other folders


class PartWriter:
    """Writes the parts that this process takes part in.

    Args:
        rank: this process.
        parts: all parts of a step, the same on all ranks.
        processes: ``jax.process_index()`` of every rank.
    """

    def __init__(self, rank: int, parts: Sequence[Part], processes: Sequence[int]) -> None:
        self._rank = rank
        self._files = {
            part: PartFiles([processes[r] for r in part.ranks], is_first=rank == part.ranks[0])
            for part in parts
            if rank in part.ranks
        }

    def write(self, folder: Path, arrays: Mapping[Name, HostArray]) -> None:
        """Write this process's share of every part into a folder of its own below ``folder``.

        Raises whatever Orbax, TensorStore or the file system raise.
        """
        for part, files in self._files.items():
            files.write(folder / part.name, _of(part, arrays))

    def finish(self, folder: Path, arrays: Mapping[Name, HostArray]) -> dict[str, str]:
        """Put together the parts whose first process this is, once all processes have written their shares.

        Returns the checksums of the parts' records.
        """
        written = {}
        for part, files in self._files.items():
            if self._rank == part.ranks[0]:
                files.merge(folder / part.name)
                record = PartRecord(
                    layers=part.layers,
                    arrays={name: (array.dtype.name, array.shape) for name, array in _of(part, arrays).items()},
                    files=sum_tree(folder / part.name),
                )
                written[part.name] = record.write(folder / f"{part.name}.json")
        return written

    def close(self) -> None:
        """Free the threads."""
        for files in self._files.values():
            files.close()


def _of(part: Part, arrays: Mapping[Name, HostArray]) -> dict[Name, HostArray]:
    own = set(part.layers)
    return {name: array for name, array in arrays.items() if name[0] in own}
