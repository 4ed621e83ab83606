"""Checks of this host alone: cores, memory, accelerators, shared memory, open files, and the folders of a run."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.cluster.config import ClusterConfig
from rrfp_jax.cluster.host import ranks_served
from rrfp_jax.commands.diagnosis import Finding, ok, problem, warning
from rrfp_jax.hardware import CPU, find_hardware, too_old
from rrfp_jax.observe.output_files import check_folder
from rrfp_jax.runtime.compile_cache import AUTO, VARIABLE, cache_path

_GIB = 1 << 30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_SHARED = _GIB
"""Containers have 64 MiB unless they are told otherwise, which is too little for NCCL."""
_MORE_SHARED = (
    "give the container more (docker run --shm-size=8g; Kubernetes: an emptyDir with medium Memory there), or "
    "mount -o remount,size=8G {}"
)
_FEW_RANKS = 16
_FILES = 4096
_PROBE = b"\0" * (1 << 20)


def check_cores(root: Path = Path("/")) -> Finding:
    """Compare the cores that this process may use with the processor time that its control groups allow."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    figures = {"usable": usable, "of_host": os.cpu_count(), "quota": quota}
    text = f"{usable} of {os.cpu_count()} cores"
    if quota is None or quota >= usable:
        return ok(text, **figures)
    remedy = "raise the container's limit of cores, or start it on as many cores as it may use (--cpuset-cpus)"
    return warning(f"{text}, but time for {quota:.3g} only", remedy, **figures)


def check_memory(root: Path = Path("/")) -> Finding:
    """Find the memory that is free on the host, and the limit of this process."""
    memory, limit = psutil.virtual_memory(), memory_limit(root)
    figures = {"total_bytes": memory.total, "available_bytes": memory.available, "limit_bytes": limit}
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} are free"
    text += "" if limit is None else f", this container may use {format_bytes(limit)}"
    if min(memory.available, limit or memory.available) < _LITTLE_MEMORY:
        return warning(text, "end other programs, or give the container more memory", **figures)
    return ok(text, **figures)


def check_hardware() -> Finding:
    """Find GPUs and TPUs, whether the installed JAX supports them or not."""
    found = find_hardware()
    figures = {"calls_for": found.accelerator, "driver": found.driver}
    if found.is_too_old:
        return problem(f"{found.why} is {too_old()}", "update the driver, or take platform cpu", **figures)
    if found.accelerator == CPU and shutil.which("nvidia-smi") is not None:
        remedy = "where there is a GPU, look after its driver: dmesg, or start the host anew"
        return warning(found.why, remedy, **figures)
    return ok(found.why, **figures)


def check_shared_memory(path: Path = Path("/dev/shm"), *, has_gpu: bool) -> Finding:
    """Check the size of shared memory, through which NCCL connects the processes of a host."""
    found = problem if has_gpu else warning
    try:
        size = os.statvfs(path)
    except OSError as error:
        return found(f"{path}: {error.strerror}", _MORE_SHARED.format(path))
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    text = f"{path} has {format_bytes(free)} of {format_bytes(total)} free"
    if free >= _LITTLE_SHARED:
        return ok(text, total_bytes=total, free_bytes=free)
    remedy = _MORE_SHARED.format(path) if total < _LITTLE_SHARED else "remove what ended programs have left there"
    text += ", too little for NCCL among the processes of a host"
    return found(text, remedy, total_bytes=total, free_bytes=free)


def check_open_files() -> Finding:
    """Check the limit on open files, which every process raises as far as it may."""
    infinite = resource.RLIM_INFINITY
    soft, hard = (None if number == infinite else number for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    ranks = ranks_served(1 << 20 if hard is None else hard, ClusterConfig().array_connections)
    text = "{}, at most {}".format(*("no limit" if number is None else number for number in (soft, hard)))
    remedy = f"set 'ulimit -n {_FILES}' or more before the start (as root, or in /etc/security/limits.conf)"
    if ranks < 2:
        text = f"{text}, too few for a rank that talks to others"
        return problem(text, remedy, soft=soft, hard=hard, ranks=ranks)
    text = f"{text}, enough for {ranks} ranks that all talk to each other"
    if ranks < _FEW_RANKS:
        return warning(text, remedy, soft=soft, hard=hard, ranks=ranks)
    return ok(text, soft=soft, hard=hard, ranks=ranks)


def check_run_directory(path: Path) -> Finding:
    """Check that the run directory can be written, and leave nothing there."""
    try:
        free = _free_bytes(path, "run directory")
    except (OSError, ValueError) as error:
        text = str(error).removesuffix(", so name another folder")
        return problem(text, "name another one (--run-dir), or make it writable")
    text = f"{path} can be written, {format_bytes(free)} are free"
    if free < _GIB:
        remedy = "remove what is not needed, or name another one"
        return warning(f"{text}, little for checkpoints", remedy, free_bytes=free)
    return ok(text, free_bytes=free, path=str(path.absolute()))


def check_compile_cache(environ: Mapping[str, str]) -> Finding:
    """Check that the cache of compiled programs can be written. Without a cache every start compiles again."""
    again = "programs would be compiled at every start"
    try:
        path = cache_path(environ.get(VARIABLE) or AUTO, environ.get("JAX_COMPILATION_CACHE_DIR"), environ)
        if path is None:
            return ok(f"nothing is kept here, {again}", path=None)
        free = _free_bytes(path, "compile cache")
    except (OSError, ValueError) as error:
        remedy = f"name a folder that can be written: {VARIABLE}=/absolute/path, or run.compile_cache"
        return warning(f"{error}; {again}", remedy)
    return ok(f"{path}, {format_bytes(free)} are free", path=str(path), free_bytes=free)


def _free_bytes(path: Path, what: str) -> int:
    """Returns the free bytes at a path after a trial write; raises ValueError or OSError where nothing can be written.

    The trial is made in the nearest folder that exists, because the path itself may be made by the run only.
    """
    check_folder(path, what)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())  # a full or remote disk may refuse the bytes only now
    except OSError as error:
        raise ValueError(f"{what} {path}: nothing can be written into {nearest} ({error.strerror})") from error
    return shutil.disk_usage(nearest).free


# -- control groups, version 1 and 2 ---------------------------------------------------------------------------------


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's control groups allow, the least of all; None without a limit."""
    found = [
        int(text) for text in _group_files(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()
    ]
    return min((limit for limit in found if limit < 1 << 60), default=None)  # version 1 writes a huge number for none


def core_quota(root: Path = Path("/")) -> float | None:
    """Returns the number of cores whose time this process's control groups allow; None without a limit."""
    old_period = next(_group_files(root, "cpu", "", "cpu.cfs_period_us"), "100000")
    quotas = (text.partition(" ") for text in _group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"))
    return min((int(q) / int(period or old_period) for q, _, period in quotas if q.isdigit()), default=None)


def _group_files(root: Path, controller: str, new_name: str, old_name: str) -> Iterator[str]:
    """Yields the text of a file in the folders of this process's group and of all groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and controller not in controllers.split(","):
            continue
        # A line without controllers is that of version 2, whose groups lie in one tree.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (old_name if controllers else new_name)
            if folder.is_relative_to(mount) and file.is_file():
                yield file.read_text().strip()
