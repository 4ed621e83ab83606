"""The cache of compiled programs: JAX's persistent compilation cache, for every process of a run, in our directory.

JAX's own cache writes the entries of process 0 only. Here every process writes, by three functions in place of JAX's
(:func:`rrfp_jax.private.jax_names.replace_compile_cache`).

JAX's key of an entry holds the program, the versions of JAX and XLA, flags, the options of the compiler, and the kind
and number of devices. Ours adds the variable that the compiler of TPUs reads (``LIBTPU_INIT_ARGS``) and the host's CPU,
since a home directory may serve hosts that do not know each other's instructions. It leaves out *which* of the devices
of one kind are meant, since a loaded program is given its devices anew. So equal programs on other devices, and on
other ranks, share an entry.

Three kinds of program are not cached:

- Programs that several processes run together on GPUs: their processes measure kernels together while they compile, and
  one that had found its program here would leave the others waiting.
- Programs for devices that are not here: there is nothing that could load them.
- Programs over several CPU devices. XLA keeps the collectives of a program in one order on all devices by a resource
  that they share, and a program that is loaded has a resource for each of them instead (``CreateResourceFromProto`` in
  XLA's thunk_proto_serdes.cc). Its devices then begin collectives that do not depend on each other in different orders,
  and wait for each other for ever; XLA ends the process after 40 s.

Any number of processes share the directory, and nobody locks. An entry is written to a file of its own and renamed into
place, and carries a checksum: a reader finds it as it was written, or not at all. Two writers of one key write the same
bytes. An entry that another process has just removed is a miss.

This module loads JAX only when it is used, so that ``rrfp doctor`` can check the directory without it.
"""

import copy
import hashlib
import os
import platform
import secrets
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.runtime.jax_environment import LIBTPU

VARIABLE = "RRFP_COMPILE_CACHE"
"""Environment variable that overrides the configuration, with the same values."""
AUTO, NONE = "auto", "none"
DEFAULT_BYTES = 4 * 2**30
_NEVER = "not cached"
_HOST_LINES = ("model name", "flags", "Features", "CPU part")
_ENTRY, _TEMPORARY = ".program", ".tmp"
_SUM_BYTES = hashlib.sha256().digest_size
_ABANDONED_S = 3600.0
"""Age at which a file that nobody has renamed counts as left by a process that died."""


class CompileCache:
    """Compiled programs by key, as JAX asks for them (its ``CacheInterface``); usable on any thread.

    Keeps at most about ``max_bytes`` in ``path``, which is made when first needed, for its owner alone. The entries
    that were used last stay longest. An entry that cannot be read is a miss, and one that cannot be written is not
    kept: ``problem`` then has the error.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes  # JAX names the path in its log
        self._lock = threading.Lock()
        self.num_hits = self.num_misses = 0
        self.problem: OSError | None = None
        """The last error when an entry was written."""
        self._unseen_bytes = max_bytes
        """Bytes that this process has written since it last looked at the whole directory."""

    def get(self, key: str) -> bytes | None:
        """Returns a program, which counts as used now; None if it is not kept, or damaged."""
        path, value = self._path / f"{key}{_ENTRY}", None
        with suppress(OSError):
            data = path.read_bytes()
            if hashlib.sha256(data[_SUM_BYTES:]).digest() == data[:_SUM_BYTES]:
                value = data[_SUM_BYTES:]
                os.utime(path)  # which fails for a file of somebody else, or one just removed
            else:
                path.unlink()
        with self._lock:
            self.num_hits += value is not None
            self.num_misses += value is None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program, and removes those that were not used for longest if there are too many."""
        if key == _NEVER or len(value) > self._max_bytes:
            return
        temporary = self._path / f"{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(value).digest() + value)
            os.replace(temporary, self._path / f"{key}{_ENTRY}")
        except OSError as error:
            self.problem = error
            with suppress(OSError):
                temporary.unlink()
            return
        self._unseen_bytes += len(value)
        if self._unseen_bytes > self._max_bytes // 50:  # others write too, so the sum must be looked up now and then
            self._unseen_bytes = 0
            self._tidy()

    def _tidy(self) -> None:
        files: list[tuple[float, int, Path]] = []
        """Time of last use, size and path of each file."""
        with suppress(OSError), os.scandir(self._path) as found:
            for each in found:
                with suppress(OSError):  # another process has removed it
                    state = each.stat()
                    files.append((state.st_mtime, state.st_size, Path(each.path)))
        entries = sorted(file for file in files if file[2].suffix == _ENTRY)
        excess = sum(num_bytes for _, num_bytes, _ in entries) - self._max_bytes
        if excess > 0:
            excess += self._max_bytes // 10  # so that it takes a while until it is full again
        abandoned_s = time.time() - _ABANDONED_S
        removed = [path for used_s, _, path in files if path.suffix == _TEMPORARY and used_s < abandoned_s]
        for _, num_bytes, path in entries:
            if excess <= 0:
                break
            removed.append(path)
            excess -= num_bytes
        for path in removed:
            with suppress(OSError):
                path.unlink()

    def describe(self) -> str:
        """Returns one line about all that it has done so far in this process."""
        total = self.num_hits + self.num_misses
        told = f"{total} programs in all: {self.num_hits} loaded from {self._path}, {self.num_misses} compiled"
        return told if self.problem is None else f"{told}; they cannot be kept: {self.problem}"


def cache_path(where: str, of_jax: str | None, environ: Mapping[str, str]) -> Path | None:
    """Returns the directory that ``where`` means, given JAX's own setting; None if nothing is kept here."""
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


def use_compile_cache(where: str = AUTO, max_bytes: int = DEFAULT_BYTES) -> CompileCache | None:
    """Keeps all programs that this process compiles from now on, and loads those that any process has kept.

    Args:
        where: ``auto``, ``none``, or a directory; the environment variable ``RRFP_COMPILE_CACHE`` goes before it.
        max_bytes: approximate size of the directory; programs that were not used for longest go first.

    ``auto`` is the directory that JAX has been given (``JAX_COMPILATION_CACHE_DIR``), else ``rrfp/programs`` in the
    user's cache directory. One that JAX has been given beyond this host's file system is left to JAX.

    Returns the cache, or None if nothing is kept. Raises ValueError for a directory that does not name one.
    """
    import jax

    from rrfp_jax.private.jax_names import replace_compile_cache

    path = cache_path(os.environ.get(VARIABLE) or where, jax.config.jax_compilation_cache_dir, os.environ)  # type: ignore[attr-defined]
    if path is None:
        return None
    programs = CompileCache(path, max_bytes)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # they would grow without bounds
    replace_compile_cache(programs, str(path), _key, _write)
    return programs


@cache
def host_digest(num_threads: str) -> str:
    """Returns a digest of the facts that machine code may depend on beyond JAX's key: the host's CPU, and the number of
    threads that it is cut for (the variable ``NPROC``)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.split(":")[0].strip() in _HOST_LINES})
    parts = (platform.machine(), *told, str(os.cpu_count()), num_threads)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _key(module: Any, devices: np.ndarray, options: Any, backend: Any, *rest: Any) -> str:
    import jax

    from rrfp_jax.private.jax_names import own_cache_key
    from rrfp_jax.private.jaxlib_names import DeviceAssignment

    num_processes = len({device.process_index for device in devices.flat})
    if backend.platform != "cpu" and devices.flat[0] not in jax.devices():
        return _NEVER
    if (backend.platform == "gpu" and num_processes > 1) or (backend.platform == "cpu" and devices.size > 1):
        return _NEVER
    if options.device_assignment is not None:
        options, assigned = copy.deepcopy(options), options.device_assignment
        shape = (assigned.replica_count(), assigned.computation_count())
        anywhere = np.arange(shape[0] * shape[1]).reshape(shape)
        options.device_assignment = DeviceAssignment.create(anywhere)
    host = host_digest(os.environ.get("NPROC", ""))
    of_tpus = os.environ.get(LIBTPU, "") if backend.platform == "tpu" else ""
    told = f"-{hashlib.sha256(of_tpus.encode()).hexdigest()[:8]}" if of_tpus else ""
    return f"{own_cache_key(module, devices, options, backend, *rest)}-{host}{told}"


def _write(key: str, seconds: float, name: str, backend: Any, executable: Any, *host_callbacks: Any) -> None:
    from rrfp_jax.private.jax_names import compilation_cache

    if any(host_callbacks):  # they are this process's own
        return
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except RuntimeError as error:  # the backend cannot write this one down
        warnings.warn(f"{name} cannot be cached: {error}", stacklevel=2)
