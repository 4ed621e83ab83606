"""Writing tensors into safetensors files one after another, in the shards that were planned before.

The library writes whole files from memory; the format (a header of names, shapes and places, then the elements) lets
one begin with the header, as all sizes are known.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from rrfp_jax.exchange.tensor_files import DTYPES, INDEX, SINGLE
from rrfp_jax.exchange.transforms import Shape

_FILE_DTYPES = {numpy: name for name, numpy in DTYPES.items()}
_ALIGNMENT = 8


class Planned(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: Shape
    dtype: str
    """As NumPy calls it."""

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "float32" else 2)


class ShardWriter:
    """Writes tensors in the order in which they were planned.

    Args:
        folder: where the files are made.
        tensors: in order.
        shard_bytes: how large a file may be; a tensor that is larger has one of its own.
        single: the name of the file where there is one only.
    """

    def __init__(self, folder: Path, tensors: Iterable[Planned], shard_bytes: int, *, single: str = SINGLE) -> None:
        self._folder, self._shards = folder, shards_of(tensors, shard_bytes)
        count = len(self._shards)
        numbered = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        self.names = [single] if count == 1 else numbered
        """The files, in order."""
        self._rest = self._places()

    @contextmanager
    def open(self) -> Iterator["ShardWriter"]:
        """Within the block tensors can be written; where it ends all must have been."""
        try:
            yield self
            left = next(self._rest, None)
            assert left is None, f"{left} was planned and not written"
        finally:
            self._rest.close()

    def write(self, name: str, elements: np.ndarray) -> None:
        """Write the next tensor."""
        planned, file = next(self._rest)
        assert (name, elements.shape, elements.dtype.name) == planned, f"{name} was written in place of {planned}"
        file.write(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)

    def write_index(self) -> None:
        """Write which tensor is in which file, where there are several."""
        if len(self._shards) == 1:
            return
        places = {planned.name: name for name, shard in zip(self.names, self._shards, strict=True) for planned in shard}
        total = sum(planned.num_bytes for shard in self._shards for planned in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _places(self) -> Generator[tuple[Planned, IO[bytes]], None, None]:
        for name, shard in zip(self.names, self._shards, strict=True):
            with (self._folder / name).open("wb") as file:
                file.write(header_of(shard))
                for planned in shard:
                    yield planned, file


def shards_of(tensors: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Tensors in their order, as many to a file as fit; one that is larger than a file has one of its own."""
    shards: list[list[Planned]] = [[]]
    held = 0
    for planned in tensors:
        if shards[-1] and held + planned.num_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(planned)
        held += planned.num_bytes
    return shards


def header_of(shard: Iterable[Planned]) -> bytes:
    """What stands at the head of a file with these tensors, its own length first."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for planned in shard:
        end = at + planned.num_bytes
        header[planned.name] = {
            "dtype": _FILE_DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
