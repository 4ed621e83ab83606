"""A directory of bytes by key that any number of processes share, bounded in size: what was used last stays longest.

Nobody locks. An entry is written to a file of its own and renamed into place, and carries a checksum: a reader finds
it as it was written, or not at all. Two writers of one key write the same. What another process has just removed is a
miss.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "RRFP_COMPILE_CACHE"
"""Environment variable that goes before what a configuration says, with the same values."""
AUTO, NONE = "auto", "none"
_ENTRY, _TEMPORARY = ".program", ".tmp"
_SUM_BYTES = hashlib.sha256().digest_size
_ABANDONED_S = 3600.0
"""After how long a file that nobody has renamed was left by a process that died."""


class _File(NamedTuple):
    used_s: float
    num_bytes: int
    path: Path


class CacheDirectory:
    """Keeps at most about ``max_bytes`` in ``path``, which is made when first needed, for its owner alone.

    What cannot be read is a miss, and what cannot be written is not kept: ``problem`` then says why.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.problem: OSError | None = None
        """What went wrong last when an entry was written."""
        self._unseen_bytes = max_bytes
        """What this process has written since it last looked at the whole directory."""

    def get(self, key: str) -> bytes | None:
        """The entry, which counts as used now; None where there is none, or a damaged one."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        value = data[_SUM_BYTES:]
        if hashlib.sha256(value).digest() != data[:_SUM_BYTES]:
            _remove(path)
            return None
        with suppress(OSError):  # of somebody else, or just removed
            os.utime(path)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, and remove those that were not used for longest where there are too many."""
        if len(value) > self.max_bytes:
            return
        temporary = self.path / f"{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(value).digest() + value)
            os.replace(temporary, self._path(key))
        except OSError as error:
            self.problem = error
            _remove(temporary)
            return
        self._unseen_bytes += len(value)
        if self._unseen_bytes > self.max_bytes // 50:  # others write too, so the sum must be looked up now and then
            self._unseen_bytes = 0
            self._tidy()

    def _path(self, key: str) -> Path:
        return self.path / f"{key}{_ENTRY}"

    def _tidy(self) -> None:
        entries = self._files(_ENTRY)
        excess = sum(entry.num_bytes for entry in entries) - self.max_bytes
        if excess > 0:
            excess += self.max_bytes // 10  # so that it takes a while until it is full again
        for entry in sorted(entries):
            if excess <= 0:
                break
            _remove(entry.path)
            excess -= entry.num_bytes
        for left in self._files(_TEMPORARY):
            if left.used_s < time.time() - _ABANDONED_S:
                _remove(left.path)

    def _files(self, suffix: str) -> list[_File]:
        files = []
        with suppress(OSError), os.scandir(self.path) as found:
            for each in found:
                if each.name.endswith(suffix):
                    with suppress(OSError):  # another process has removed it
                        state = each.stat()
                        files.append(_File(state.st_mtime, state.st_size, Path(each.path)))
        return files


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def cache_path(where: str, of_jax: str | None, environ: Mapping[str, str]) -> Path | None:
    """The directory that ``where`` means, with what JAX has been given; None: nothing is kept here."""
    if where == NONE:
        return None
    if where != AUTO:
        path = Path(where).expanduser()
        if "://" in where or not path.is_absolute():
            raise ValueError(f"compile_cache is {where!r}: give auto, none, or the absolute path of a directory")
        return path
    if of_jax:
        return None if "://" in of_jax else Path(of_jax)
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    return Path(home, "rrfp", "programs") if home and Path(home).is_absolute() else None
