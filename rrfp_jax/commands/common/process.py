"""A command's part in a run, alone or as one of several processes: its devices and memory. JAX loads only then."""

import ctypes
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.errors import end_with, ending_at_once
from rrfp_jax.hardware import TPU, installed_accelerators
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.cluster import join, membership_from
from rrfp_jax.runtime.jax_environment import check_plugin, use_xla_flags

if TYPE_CHECKING:
    from rrfp_jax.cluster.config import Selection
    from rrfp_jax.runtime import RunFailed
    from rrfp_jax.runtime.process import Process

_UNWINDING_S = 10.0
"""How long a process that has given up may take to write its report and end."""


def enter(
    *,
    num_stages: int,
    data: int | Sequence[int] = 1,
    tensor: int = 1,
    mesh: Sequence[Mapping[str, int]] = (),
    configuration: Mapping[str, Any],
    cluster: ClusterConfig,
    platform: str | None,
    devices: int | Sequence[int] | None = None,
    pinned: bool = False,
    xla_flags: Sequence[str] = (),
    sums_by_messages: bool = False,
) -> "Process":
    """Find out which process this is, meet the others, and start JAX: before anything else uses it.

    Args:
        data: the replicas of all stages, or of each.
        mesh: all axes over the devices of each stage, innermost first; empty: ``tensor`` alone.
        configuration: values that must be the same in all processes.
        platform: ``cpu`` for virtual devices, else the devices that JAX finds.
        devices: how many each process takes, of which stages share fewer, or all of the run in the order in which
            stages take them; None: one for each that the layout asks of it.
        pinned: as for :func:`use_cpu`.
        sums_by_messages: whether replicas add up gradients by messages.
        xla_flags: for XLA, where the environment does not say otherwise; see :mod:`rrfp_jax.runtime.jax_environment`.

    Raises ValueError where layout, processes and devices do not fit, JAX sees CPU devices only on a host with more, or
    XLA does not know a flag, and StartFailed where the processes do not come together.
    """
    check_plugin(platform)
    if use_xla_flags(xla_flags, os.environ):
        from rrfp_jax.private.jax_names import backends_are_initialized

        if backends_are_initialized():
            raise ValueError("xla_flags come too late, as JAX has started already: set XLA_FLAGS before it does")
    if platform == "cpu":
        keep_freed_blocks()
    with ending_at_once():
        from rrfp_jax.runtime.process import Process
        from rrfp_jax.runtime.start_jax import allow_promotions, pin_threads

    allow_promotions()
    membership = membership_from(os.environ)
    num_ranks = 1 if membership is None else membership.num_ranks
    number, order = (devices, ()) if devices is None or isinstance(devices, int) else (None, tuple(devices))
    layout = Layout(
        num_stages=num_stages,
        data=data if isinstance(data, int) else max(data),
        replicas=() if isinstance(data, int) else tuple(data),
        tensor=tensor,
        mesh=mesh,
        num_ranks=num_ranks,
        by_replica=sums_by_messages,
        order=order,
    )
    if membership is None:
        process = Process(layout, num_devices=number)
        if platform == "cpu":
            use_cpu(process.num_devices, pinned=pinned)
        elif pinned:
            pin_threads(process.num_devices)
        start_alone(platform)
        process.use_devices(process.devices)
        return process
    # Chips of several TPU hosts are joined by their own runtime, which JAX then describes on every host.
    has_tpus = platform != "cpu" and TPU in installed_accelerators()
    together = layout.needs_collectives(sums_by_messages=sums_by_messages) or has_tpus
    process = Process(
        layout,
        join(membership, configuration, cluster, together=together),
        num_devices=number,
        transport=cast("Selection", cluster.transport),
        patience_s=max(cluster.start_deadline_s, cluster.progress_deadline_s),
        on_failure=_end_soon,
    )
    process.connect()
    process.start_jax(platform, pinned=pinned)
    return process


def start_alone(platform: str | None) -> None:
    """Start JAX in the only process of a run; raise ValueError as :func:`check_plugin`, or where a plugin fails."""
    check_plugin(platform)
    if platform != "cpu":
        from rrfp_jax.runtime.start_jax import explaining_plugins, require_accelerator, taking_part_of_memory

        with explaining_plugins(), taking_part_of_memory(1, os.environ):
            require_accelerator()


def _end_soon(failure: "RunFailed") -> None:
    """The main thread ends with the failure where it next waits for the run; if it waits for something else, end it."""
    timer = threading.Timer(_UNWINDING_S, end_with, (failure,))
    timer.daemon = True
    timer.start()


def use_cpu(num_devices: int, *, pinned: bool = False) -> None:
    """Run on this many virtual CPU devices.

    ``pinned`` fixes the size of XLA's thread pools too, see :func:`rrfp_jax.runtime.start_jax.pin_threads`.
    """
    from rrfp_jax.runtime.start_jax import pin_threads, use_virtual_devices

    if pinned:
        pin_threads(num_devices)
    use_virtual_devices(num_devices)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES, _HUGE_BYTES = 1 << 20, 1 << 30
_NEVER = 2**31 - 1


def return_large_blocks() -> None:
    """Have the C library map blocks of a megabyte or more, and unmap them when they are freed.

    By itself glibc moves that bound up as large blocks are freed, and keeps freed blocks in a heap of each
    thread: a model that goes through layer by layer then leaves hundreds of megabytes behind. Does nothing elsewhere.
    """
    _set({_M_MMAP_THRESHOLD: _LARGE_BYTES})


def keep_freed_blocks() -> None:
    """Have the C library keep freed blocks, because each step on CPUs allocates the blocks of the step before.

    By itself glibc unmaps large blocks as they are freed, or keeps them, as its moving bounds have it, which differ
    from run to run. Each page of a new mapping costs a fault: a task of a large head then takes up to half as long
    again. All threads share the kept blocks, because one thread frees the blocks of another. Does nothing where the
    environment says how memory is allocated, and elsewhere."""
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        _set({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _HUGE_BYTES, _M_TRIM_THRESHOLD: _NEVER})


def _set(options: dict[int, int]) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without mallopt
            for name, value in options.items():
                ctypes.CDLL(None).mallopt(name, value)
