"""Load programs that were compiled before: JAX's persistent compilation cache, for every process of a run.

JAX's own cache writes the entries of process 0 only, because writers could collide on some file systems. Here they
cannot (:mod:`rrfp_jax.runtime.cache_directory`), so every process writes. Three private functions of JAX are replaced
for it, since it has no public ones:

``compilation_cache.get_file_cache``
    gives our directory in place of JAX's.
``compiler._cache_write``
    leaves out the processes other than 0; ours does not.
``compilation_cache.get_cache_key``
    names the entry. JAX's key holds the program, the versions of JAX and XLA, flags, the options of the compiler, and
    the kind and number of devices. Ours adds what the compiler of TPUs reads (``LIBTPU_INIT_ARGS``) and the host's CPU,
    since a home directory may serve hosts that do not know each other's instructions, and leaves out *which* of the
    devices of one kind are meant, since a loaded program is told that anew. So equal programs on other devices, and on
    other ranks, share an entry.

Programs that several processes run together on GPUs are not cached: their processes measure kernels together while they
compile, and one that had found its program here would leave the others waiting.

Programs for devices that are not here are not cached: there is nothing that could load them.

Programs over several CPU devices are not cached either. XLA keeps the collectives of a program in one order on all
devices by a resource that they share, and a program that is loaded has a resource for each of them instead
(``CreateResourceFromProto`` in XLA's thunk_proto_serdes.cc). Its devices then begin collectives that do not depend on
each other in different orders, and wait for each other for ever; XLA ends the process after 40 s.
"""

import copy
import hashlib
import os
import platform
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rrfp_jax.private.jax_names import CacheInterface, compilation_cache, compiler
from rrfp_jax.private.jaxlib_names import DeviceAssignment
from rrfp_jax.runtime.cache_directory import AUTO, VARIABLE, CacheDirectory, cache_path
from rrfp_jax.runtime.xla_flags import LIBTPU

DEFAULT_BYTES = 4 * 2**30
_NEVER = "not cached"
_HOST_LINES = ("model name", "flags", "Features", "CPU part")
_jax_key = compilation_cache.get_cache_key


class CompileCache(CacheInterface):
    """Compiled programs by key, as JAX asks for them; from any thread."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._directory = CacheDirectory(path, max_bytes)
        self._lock = threading.Lock()
        self.num_hits = self.num_misses = 0

    def get(self, key: str) -> bytes | None:
        value = None if key == _NEVER else self._directory.get(key)
        with self._lock:
            self.num_hits += value is not None
            self.num_misses += value is None
        return value

    def put(self, key: str, value: bytes) -> None:
        if key != _NEVER:
            self._directory.put(key, value)

    def describe(self) -> str:
        """What it has done so far in this process, in one line."""
        total, problem = self.num_hits + self.num_misses, self._directory.problem
        told = f"{total} programs in all: {self.num_hits} loaded from {self._path}, {self.num_misses} compiled"
        return told if problem is None else f"{told}; they cannot be kept: {problem}"


def use_compile_cache(where: str = AUTO, max_bytes: int = DEFAULT_BYTES) -> CompileCache | None:
    """Keep what this process compiles from now on, and load what any process has kept; None where nothing is kept.

    Args:
        where: ``auto``, ``none``, or a directory; the environment variable ``RRFP_COMPILE_CACHE`` goes before it.
        max_bytes: about how much the directory may hold; what was not used for longest goes first.

    ``auto`` is the directory that JAX has been given (``JAX_COMPILATION_CACHE_DIR``), else ``rrfp/programs`` in the
    user's cache directory. One that JAX has been given beyond this host's file system is left to JAX.

    Raises ValueError for a directory that does not name one.
    """
    of_jax = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    path = cache_path(os.environ.get(VARIABLE) or where, of_jax, os.environ)
    if path is None:
        return None
    programs = CompileCache(path, max_bytes)
    ours = {
        (compilation_cache, "get_file_cache"): lambda _: (programs, str(path)),
        (compilation_cache, "get_cache_key"): _key,
        (compiler, "_cache_write"): _write,
    }
    for (module, name), function in ours.items():
        setattr(module, name, function)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # they would grow without bounds
    compilation_cache.reset_cache()
    return programs


def host_digest() -> str:
    """What machine code for this host may depend on beyond JAX's key: its CPU, and the threads that it is cut for."""
    return _host_digest(os.environ.get("NPROC", ""))


@cache
def _host_digest(num_threads: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.split(":")[0].strip() in _HOST_LINES})
    parts = (platform.machine(), *told, str(os.cpu_count()), num_threads)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _key(module: Any, devices: np.ndarray, options: Any, backend: Any, *rest: Any) -> str:
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
    of_tpus = os.environ.get(LIBTPU, "") if backend.platform == "tpu" else ""
    told = f"-{hashlib.sha256(of_tpus.encode()).hexdigest()[:8]}" if of_tpus else ""
    return f"{_jax_key(module, devices, options, backend, *rest)}-{host_digest()}{told}"


def _write(key: str, seconds: float, name: str, backend: Any, executable: Any, *host_callbacks: Any) -> None:
    """As JAX's own, from every process."""
    if any(host_callbacks):  # they are this process's own
        return
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except RuntimeError as error:  # the backend cannot write this one down
        warnings.warn(f"{name} cannot be cached: {error}", stacklevel=2)
