"""Files that survive a killed process and a power cut: written whole, forced to the disk, known by their checksums."""

import json
import os
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK_BYTES = 1 << 20


class FileSum(NamedTuple):
    """What is remembered of a file."""

    num_bytes: int
    crc32: int


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there as a whole or not at all, whatever happens."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def canonical_json(data: Any) -> bytes:
    """The same bytes for the same data; raises ValueError for what JSON has no form for."""
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"a checkpoint keeps plain data only (numbers, texts, lists, dictionaries): {error}") from None


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_tree(root: Path) -> dict[str, FileSum]:
    """The checksum of every file below a directory, by relative path; everything read is forced to the disk."""
    sums: dict[str, FileSum] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            sums[path.relative_to(root).as_posix()] = sum_file(path, sync=True)
        sync_directory(Path(folder))
    return dict(sorted(sums.items()))


def sum_file(path: Path, *, sync: bool = False) -> FileSum:
    """The checksum of a file, read block by block."""
    crc32 = num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            num_bytes += len(block)
        if sync:
            os.fsync(file.fileno())
    return FileSum(num_bytes, crc32)


def remove_tree(path: Path) -> None:
    """Remove a directory, as far as it goes; who still writes there does not stop it."""
    shutil.rmtree(path, ignore_errors=True)
