"""What this host lets a process have: cores, memory, shared memory, open files."""

import os
import resource
import shutil
from pathlib import Path

import psutil

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.diagnosis.cgroups import core_quota, memory_limit
from rrfp_jax.commands.diagnosis.finding import Finding, ok, problem, warning
from rrfp_jax.hardware import CPU, find_hardware, too_old
from rrfp_jax.network.config import ClusterConfig
from rrfp_jax.network.host import ranks_served

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


def check_cores(root: Path = Path("/")) -> Finding:
    """Cores that this process may use, and the time on them."""
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    figures = {"usable": may_use, "of_host": os.cpu_count(), "quota": core_quota(root)}
    text = f"{may_use} of {os.cpu_count()} cores"
    if figures["quota"] is not None and figures["quota"] < may_use:
        return warning(
            f"{text}, but time for {figures['quota']:.3g} only",
            "raise the container's limit of cores, or start it on as many cores as it may use (--cpuset-cpus)",
            **figures,
        )
    return ok(text, **figures)


def check_memory(root: Path = Path("/")) -> Finding:
    """Memory of the host, and how much of it this process may use."""
    memory, limit = psutil.virtual_memory(), memory_limit(root)
    usable = memory.available if limit is None else min(memory.available, limit)
    figures = {"total_bytes": memory.total, "available_bytes": memory.available, "limit_bytes": limit}
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} are free"
    if limit is not None:
        text += f", this container may use {format_bytes(limit)}"
    if usable < _LITTLE_MEMORY:
        return warning(text, "end other programs, or give the container more memory", **figures)
    return ok(text, **figures)


def check_hardware() -> Finding:
    """GPUs and TPUs, whether JAX is made for them or not."""
    found = find_hardware()
    figures = {"calls_for": found.accelerator, "driver": found.driver}
    if found.is_too_old:
        return problem(f"{found.why} is {too_old()}", "update the driver, or take platform cpu", **figures)
    if found.accelerator == CPU and shutil.which("nvidia-smi") is not None:
        return warning(
            found.why, "where there is a GPU, look after its driver: dmesg, or start the host anew", **figures
        )
    return ok(found.why, **figures)


def check_shared_memory(path: Path = Path("/dev/shm"), *, has_gpu: bool) -> Finding:
    """Shared memory, by which NCCL joins the processes of a host."""
    tell = problem if has_gpu else warning
    try:
        size = os.statvfs(path)
    except OSError as error:
        return tell(f"{path}: {error.strerror}", _MORE_SHARED.format(path))
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    figures = {"total_bytes": total, "free_bytes": free}
    text = f"{path} has {format_bytes(free)} of {format_bytes(total)} free"
    if free >= _LITTLE_SHARED:
        return ok(text, **figures)
    remedy = _MORE_SHARED.format(path) if total < _LITTLE_SHARED else "remove what ended programs have left there"
    return tell(f"{text}, too little for NCCL among the processes of a host", remedy, **figures)


def check_open_files() -> Finding:
    """The limit on open files, which every process raises as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    limit = 1 << 20 if hard == infinite else hard
    ranks = ranks_served(limit, ClusterConfig().array_connections)
    figures = {"soft": None if soft == infinite else soft, "hard": None if hard == infinite else hard, "ranks": ranks}
    words = ["no limit" if number == infinite else str(number) for number in (soft, hard)]
    text = f"{words[0]}, at most {words[1]}"
    remedy = f"set 'ulimit -n {_FILES}' or more before the start (as root, or in /etc/security/limits.conf)"
    if ranks < 2:
        return problem(f"{text}, too few for a rank that talks to others", remedy, **figures)
    served = f"enough for {ranks} ranks that all talk to each other"
    if ranks < _FEW_RANKS:
        return warning(f"{text}, {served}", remedy, **figures)
    return ok(f"{text}, {served}", **figures)
