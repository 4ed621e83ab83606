"""Reads and writes the safetensors files of a folder, one tensor at a time.

The safetensors library writes whole files from memory. Its format (a header of names, shapes and offsets, then the
elements) lets :class:`ShardWriter` begin a file with its header, since all sizes are known before. Shards are planned
here, too: ``huggingface_hub`` puts a tensor that is larger than a shard in front of the shard that is being filled, so
that tensors could no longer be written in their order.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from rrfp_jax.hf._tensor_names import TensorShape
from rrfp_jax.record_files import parse_json, read_record

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""NumPy's names of the dtypes that are read and written, by their names in files."""
_FILE_DTYPES = {numpy: name for name, numpy in HUB_DTYPES.items()}
_COMPARED_ROWS = 1024
_POINTER = b"version https://git-lfs.github.com/spec/"
_ALIGNMENT_BYTES = 8
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_FP4 = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
"""The numbers of four bits."""
_MX_BIAS = 127


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    path: Path
    name: str
    shape: TensorShape
    dtype: str
    """NumPy's name for the dtype, or the file's own word for a dtype that is not read."""

    def read(self) -> np.ndarray:
        """Returns a copy of the elements; the file is open for that long only. Raises ValueError if it is damaged."""
        with _opened(self.path) as file:
            return file.get_tensor(self.name)

    def equals(self, other: "StoredTensor") -> bool:
        """Returns whether a matrix has the bits of another of its shape and dtype, reading some rows at a time."""
        with _opened(self.path) as here, _opened(other.path) as there:
            first, second = here.get_slice(self.name), there.get_slice(other.name)
            starts = range(0, self.shape[0], _COMPARED_ROWS)
            rows = (slice(start, min(start + _COMPARED_ROWS, self.shape[0])) for start in starts)
            return all(first[some].tobytes() == second[some].tobytes() for some in rows)


@dataclass(frozen=True)
class _PackedTensor(StoredTensor):
    """Matrices ``[number, in, out]`` in MXFP4: blocks of 32 numbers ``in`` have four bits each, and one exponent.

    ``path`` and ``name`` are those of the blocks, uint8 ``[number, out, in / 32, 16]``; see :func:`unpacked`.
    """

    blocks: StoredTensor
    exponents: StoredTensor

    def read(self) -> np.ndarray:
        import ml_dtypes

        blocks, exponents = self.blocks.read(), self.exponents.read()
        read = np.empty(self.shape, ml_dtypes.bfloat16)
        for number, (pairs, powers) in enumerate(zip(blocks, exponents, strict=True)):
            # the lower half of a byte comes first
            halves = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*powers.shape, -1)
            values = np.ldexp(_FP4[halves], powers[..., None].astype(np.int32) - _MX_BIAS)
            read[number] = values.reshape(len(values), -1).T
        return read


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with one in bfloat16, which holds MXFP4 exactly, for each pair of blocks and exponents.

    Raises ValueError if one of a pair is missing, or if they do not belong together.
    """
    found = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith(_BLOCKS):
            continue
        whole, exponents = name.removesuffix(_BLOCKS), found.pop(name.removesuffix(_BLOCKS) + _EXPONENTS, None)
        shape = blocks.shape
        if exponents is None or len(shape) != 4 or (*exponents.shape, 16) != shape:
            raise ValueError(f"{blocks.path}: {name} has no {_EXPONENTS[1:]} for each of its blocks: copy it again")
        for each in (blocks, exponents):
            if each.dtype != "U8":
                raise ValueError(f"{each.path}: {each.name} is {each.dtype}, and MXFP4 is U8: copy it again")
        del found[name]
        shape = (shape[0], 32 * shape[2], shape[1])
        found[whole] = _PackedTensor(blocks.path, whole, shape, "bfloat16", blocks, exponents)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file holds; raises ValueError, in one sentence, if it holds none."""
    try:
        content = parse_json(read_record(path)[0])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give the folder of a model") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON: copy the folder again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object: copy the folder again")
    return content


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of the model in ``folder`` by name; only the headers of its files are read.

    With an index its names count, and its tensors must be where it says; copies elsewhere are stale. A whole file
    beside an index whose shards are gone counts alone, as ``transformers`` takes it.

    Raises ValueError, in one sentence, if there are no such files, if one is missing, damaged or without the tensors
    that the index says it has, or if there are two sets of weights.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: give the folder of a safetensors model")
        return read_headers(folder / SINGLE)
    by_file = _read_index(folder / INDEX)
    shards = sorted(set(by_file.values()))
    if (folder / SINGLE).is_file() and SINGLE not in shards:
        there = [shard for shard in shards if (folder / shard).is_file()]
        if there:
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE} and {there[0]} of {INDEX}: remove the one that is not "
                "meant"
            )
        return read_headers(folder / SINGLE)
    found = {shard: read_headers(folder / shard) for shard in shards}
    for name, shard in by_file.items():
        if name not in found[shard]:
            raise ValueError(f"{folder / shard} lacks {name}, which {INDEX} says it holds: copy the folder again")
    unnamed = [(shard, name) for shard, own in found.items() for name in own if name not in by_file]
    if unnamed:
        shard, name = unnamed[0]
        raise ValueError(f"{folder / shard} holds {name}, of which {INDEX} says nothing there: copy the folder again")
    return {name: found[shard][name] for name, shard in by_file.items()}


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name; raises ValueError if the file is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy all shards of the model")
    with _opened(path) as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = file.get_slice(name)
            dtype = stored.get_dtype()
            found[name] = StoredTensor(path, name, tuple(stored.get_shape()), HUB_DTYPES.get(dtype, dtype))
        return found


def check_fetched(path: Path) -> None:
    """Raises ValueError if a file is only the pointer that Git has in place of a large file."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return  # the code that reads it says so
    if is_pointer:
        raise ValueError(f"{path} is a pointer of Git LFS and not the file: fetch it with git lfs pull, or download it")


class PlannedTensor(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: TensorShape
    dtype: str
    """NumPy's name for the dtype."""

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "float32" else 2)


class ShardWriter:
    """Writes tensors in the order in which they were planned.

    Args:
        folder: the folder that gets the files.
        tensors: the tensors in order.
        shard_bytes: the largest size of a file; a tensor that is larger gets a file of its own.
        single: the name of the file if there is only one.
    """

    def __init__(
        self, folder: Path, tensors: Iterable[PlannedTensor], shard_bytes: int, *, single: str = SINGLE
    ) -> None:
        shards: list[list[PlannedTensor]] = [[]]
        held = 0
        for planned in tensors:
            if shards[-1] and held + planned.num_bytes > shard_bytes:
                shards.append([])
                held = 0
            shards[-1].append(planned)
            held += planned.num_bytes
        count = len(shards)
        numbered = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = [single] if count == 1 else numbered
        self._folder = folder
        self._shards = dict(zip(names, shards, strict=True))
        self._rest = self._places()

    @contextmanager
    def open(self) -> Iterator["ShardWriter"]:
        """Lets tensors be written within the block, at whose end all must have been."""
        try:
            yield self
            left = next(self._rest, None)
            assert left is None, f"{left} was planned and not written"
        finally:
            self._rest.close()

    def write(self, name: str, elements: np.ndarray) -> None:
        """Writes the next tensor."""
        planned, file = next(self._rest)
        assert (name, elements.shape, elements.dtype.name) == planned, f"{name} was written in place of {planned}"
        file.write(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)

    def write_index(self) -> None:
        """Writes which tensor is in which file, if there are several."""
        if len(self._shards) == 1:
            return
        places = {planned.name: name for name, shard in self._shards.items() for planned in shard}
        total = sum(planned.num_bytes for shard in self._shards.values() for planned in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _places(self) -> Generator[tuple[PlannedTensor, IO[bytes]], None, None]:
        """Yields every planned tensor with the open file that takes it; a file opens when its first tensor is due."""
        for name, shard in self._shards.items():
            with (self._folder / name).open("wb") as file:
                file.write(_header(shard))
                for planned in shard:
                    yield planned, file


def _header(shard: Iterable[PlannedTensor]) -> bytes:
    """Returns the head of a file with these tensors: its own length, then names, dtypes, shapes and offsets."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for planned in shard:
        end = start + planned.num_bytes
        header[planned.name] = {
            "dtype": _FILE_DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _read_index(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise ValueError(f"{path} has no weight_map from names to files: copy the folder again")
    for shard in names.values():
        if Path(shard).name != shard:  # an index must not lead out of its folder
            raise ValueError(f"{path} names {shard!r}, which is no file of the folder: copy the folder again")
    return names


def _opened(path: Path) -> Any:
    """Returns the file, mapped into memory until it is closed."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        check_fetched(path)
        problem = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{path} is no whole safetensors file ({problem}): copy it again") from None
