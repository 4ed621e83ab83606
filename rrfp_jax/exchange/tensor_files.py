"""The safetensors files of a folder: what is in them, and one tensor at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.exchange.transforms import Shape
from rrfp_jax.record_files import parse_json, read_record

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Those that are read, by their names in files."""
_COMPARED_ROWS = 1024
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    path: Path
    name: str
    shape: Shape
    dtype: str
    """As NumPy calls it; of those that are not read, the file's own word."""

    def read(self) -> np.ndarray:
        """Its elements, copied; the file is open for that long only. Raises ValueError where it cannot be read."""
        with _opened(self.path) as file:
            return file.get_tensor(self.name)

    def equals(self, other: "StoredTensor") -> bool:
        """Whether a matrix holds the same numbers as another of its shape and dtype, read some rows at a time."""
        with _opened(self.path) as here, _opened(other.path) as there:
            first, second = here.get_slice(self.name), there.get_slice(other.name)
            starts = range(0, self.shape[0], _COMPARED_ROWS)
            rows = (slice(start, min(start + _COMPARED_ROWS, self.shape[0])) for start in starts)
            return all(first[some].tobytes() == second[some].tobytes() for some in rows)


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
        return tensors_of(folder / SINGLE)
    by_file = _index(folder / INDEX)
    shards = sorted(set(by_file.values()))
    if (folder / SINGLE).is_file() and SINGLE not in shards:
        there = [shard for shard in shards if (folder / shard).is_file()]
        if there:
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE} and {there[0]} of {INDEX}: remove the one that is not "
                "meant"
            )
        return tensors_of(folder / SINGLE)
    found = {shard: tensors_of(folder / shard) for shard in shards}
    for name, shard in by_file.items():
        if name not in found[shard]:
            raise ValueError(f"{folder / shard} lacks {name}, which {INDEX} says it holds: copy the folder again")
    unnamed = [(shard, name) for shard, own in found.items() for name in own if name not in by_file]
    if unnamed:
        shard, name = unnamed[0]
        raise ValueError(f"{folder / shard} holds {name}, of which {INDEX} says nothing there: copy the folder again")
    return {name: found[shard][name] for name, shard in by_file.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds an object; raises ValueError in one sentence where it cannot be read as one."""
    try:
        content = parse_json(read_record(path)[0])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give the folder of a model") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON: copy the folder again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object: copy the folder again")
    return content


def _index(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise ValueError(f"{path} has no weight_map from names to files: copy the folder again")
    for shard in names.values():
        if Path(shard).name != shard:
            raise ValueError(f"{path} names {shard!r}, which is no file of the folder: copy the folder again")
    return names


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; raises ValueError where it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy all shards of the model")
    with _opened(path) as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = file.get_slice(name)
            dtype = stored.get_dtype()
            found[name] = StoredTensor(path, name, tuple(stored.get_shape()), DTYPES.get(dtype, dtype))
        return found


def check_fetched(path: Path) -> None:
    """Raise ValueError if a file is only the pointer that Git has in place of a large file."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return  # the code that reads it says so
    if is_pointer:
        raise ValueError(f"{path} is a pointer of Git LFS and not the file: fetch it with git lfs pull, or download it")


def _opened(path: Path) -> Any:
    """The file, mapped into memory until it is closed."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        check_fetched(path)
        problem = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{path} is no whole safetensors file ({problem}): copy it again") from None
