"""The start of JAX on the devices of a process: for itself, or together with other processes.

``jax.distributed.initialize`` always starts the coordination service in process 0, whose death then aborts all others
within a tenth of a second; it also waits for every process at the end, and takes SIGTERM for itself. No public name
connects a client only, so this module uses private ones.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax

from rrfp_jax.cluster.config import GRPC_PROXIES, HEARTBEAT_TIMEOUT_S, PINNED_THREADS
from rrfp_jax.cluster.coordination_service import tls_credentials
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.costs.devices import SHARE_OF_GPU
from rrfp_jax.exit_codes import START_FAILED, print_fatal_message
from rrfp_jax.hardware import smallest_gpu_bytes
from rrfp_jax.private.jax_names import (
    backends_are_initialized,
    global_state,
    make_cpu_client,
    register_backend_factory,
)
from rrfp_jax.private.jaxlib_names import get_distributed_runtime_client, make_gloo_tcp_collectives
from rrfp_jax.runtime.jax_environment import idle_plugin

if TYPE_CHECKING:
    from rrfp_jax.runtime.cluster import Cluster

_CPU, _TPU = "cpu", "tpu"
_MARGIN_S = 10
"""Seconds by which JAX waits longer than this process before it gives up."""
_NOT_STARTED = "Unable to initialize backend"
_REASON = 300
"""Number of characters of JAX's reason in a message."""
_MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables with the share of a GPU's memory that JAX reserves; the second is the former name."""
_CONTEXT_BYTES = 0.8 * 2**30
"""CUDA's context, the code of programs and the handles of libraries of each process that shares a GPU."""
_SMALL_GPU_BYTES = 16 * 2**30
"""Size of a shared GPU if nothing tells it."""


def start_jax_on_rank(
    cluster: "Cluster", platform: str | None, num_local: int, *, listen_on: str, pinned: bool
) -> tuple[jax.Device, ...]:
    """Starts JAX as :meth:`rrfp_jax.runtime.cluster.Cluster.initialize_jax` describes; ``listen_on`` is this host's
    address."""
    rank, num_ranks, config = cluster.rank, cluster.num_ranks, cluster.config
    per_device = config.processes_per_device
    if pinned:
        pin_threads(num_local)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if platform == _CPU:
        use_virtual_devices(num_local)
    elif platform != _TPU and (
        visible := visible_devices(rank, cluster.hosts, num_local, os.environ, per_device=per_device)
    ):
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    if cluster.together:
        use_gloo(listen_on)
        connect_client(cluster.membership.coordinator, rank, num_ranks, cluster.key, timeout_s=config.start_deadline_s)
    if platform != _CPU:
        with taking_part_of_memory(per_device, os.environ):
            require_accelerator()
    if cluster.together:
        check_found_devices(rank, jax.process_index(), [d.process_index for d in jax.devices()], num_ranks, num_local)
    return tuple(jax.local_devices()[:num_local])


def allow_promotions() -> None:
    """Lets JAX promote dtypes and ranks as it does by default, since our models rely on it. Strict settings of the
    environment are for a user's own code."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")


def require_accelerator() -> None:
    """Starts JAX if it has not started. Raises ValueError if it sees CPU devices only on a host with others."""
    if jax.default_backend() != _CPU:
        return
    if (problem := idle_plugin(_environment(), None)) is not None:
        raise ValueError(problem)


@contextmanager
def explaining_plugins() -> Iterator[None]:
    """Wraps JAX's start: if JAX gives up for a plugin that fails, raises ValueError with the remedy."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if reason.startswith(_NOT_STARTED) and (problem := idle_plugin(_environment(), reason[:_REASON])) is not None:
            raise ValueError(problem) from error
        raise


def _environment() -> dict[str, str]:
    """Returns the environment with the platforms that JAX's configuration has now."""
    return os.environ | {"JAX_PLATFORMS": jax.config.jax_platforms or ""}  # type: ignore[attr-defined]


def use_virtual_devices(num_devices: int) -> None:
    """Runs on this many virtual CPU devices.

    A program then runs within the thread that launches it: each stage has a compute thread of its own, and the hop to
    another one would only add to every task.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def pin_threads(num_devices: int) -> None:
    """Fixes the size of XLA's thread pools, unless the environment does so already.

    Sums then do not depend on the number of devices. XLA reads the size when the first device is made.
    """
    os.environ.setdefault("NPROC", str(max(PINNED_THREADS, num_devices)))


@contextmanager
def taking_part_of_memory(per_device: int, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Wraps JAX's start: it takes the share of a GPU's memory that plans count, unless the user has set a share.

    JAX by itself takes 0.75. Each of ``per_device`` processes on one GPU gets an equal part of what their contexts
    leave. Processes that this one starts do not inherit it. Raises ValueError if contexts leave nothing.
    """
    if any(name in environ for name in _MEMORY_FRACTIONS):
        yield
        return
    share = SHARE_OF_GPU
    if per_device > 1:
        total = smallest_gpu_bytes() or _SMALL_GPU_BYTES
        share *= (1 - per_device * _CONTEXT_BYTES / total) / per_device
    if share <= 0:
        raise ValueError(
            f"processes_per_device is {per_device}, and the contexts of so many processes, about 0.8 GiB each, fill a "
            f"GPU of {total / 2**30:.1f} GiB: start fewer, or set {_MEMORY_FRACTIONS[0]}"
        )
    environ[_MEMORY_FRACTIONS[0]] = f"{share:.3f}"
    try:
        yield
    finally:
        del environ[_MEMORY_FRACTIONS[0]]


def visible_devices(
    rank: int, hosts: Sequence[str], num_local: int, environ: Mapping[str, str], *, per_device: int = 1
) -> str | None:
    """Returns the GPUs of a rank as ``0,1``, if several ranks share its host; None if it may see all.

    The ranks of a host divide its GPUs in order of rank, ``per_device`` consecutive ranks having the same ones. If
    ``CUDA_VISIBLE_DEVICES`` or ``ROCR_VISIBLE_DEVICES`` already names exactly ``num_local`` devices, a scheduler has
    divided them before.
    """
    neighbours = _neighbours(rank, hosts)
    if len(neighbours) == 1:
        return None
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ and len([part for part in environ[name].split(",") if part.strip()]) == num_local:
            return None
    first = neighbours.index(rank) // per_device * num_local
    return ",".join(str(device) for device in range(first, first + num_local))


def _neighbours(rank: int, hosts: Sequence[str]) -> list[int]:
    """Returns the ranks on the host of this one, which is one of them."""
    return [other for other, host in enumerate(hosts) if host == hosts[rank]]


@contextmanager
def naming_neighbours(rank: int, hosts: Sequence[str], platform: str | None) -> Iterator[None]:
    """Adds to an error at JAX's start the ranks with which this one was taken to share its host's GPUs."""
    neighbours = [] if platform in (_CPU, _TPU) else _neighbours(rank, hosts)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if len(neighbours) < 2:
            raise
        told = (
            f"{name_ranks(neighbours)} were taken for ranks of one host, {hosts[rank]}, whose GPUs they divide; where "
            "they are not, set CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) of each rank to its own GPUs"
        )
        if not isinstance(error, ValueError):
            error.add_note(told)
            raise
        raise ValueError(f"{error}; {told}") from error


def check_found_devices(rank: int, index: int, processes: Iterable[int], num_ranks: int, num_local: int) -> None:
    """Checks the devices that JAX found, the same way on every rank.

    Args:
        index: the number that JAX gives this process.
        processes: the process of every device of the run.

    Raises:
        ValueError: if a rank has fewer than ``num_local`` devices, or JAX numbers processes differently.
    """
    if index != rank:
        raise ValueError(
            f"this is rank {rank}, but JAX calls it process {index}: number the ranks as JAX does, or set detect "
            "(RRFP_DETECT=1) so that JAX tells them"
        )
    found = Counter(processes)
    short = {r: found[r] for r in range(num_ranks) if found[r] < num_local}
    if short:
        counts = ", ".join(f"rank {r} has {count}" for r, count in short.items())
        raise ValueError(
            f"the layout needs {num_local} devices on each of {num_ranks} ranks ({num_local * num_ranks} in all), but "
            f"{counts}: start more processes, lower the degrees of parallelism, or let stages share devices "
            "(run.devices) or processes one (cluster.processes_per_device)"
        )


def check_same_platform(platforms: Mapping[int, str]) -> None:
    """Raises ValueError, the same on every rank, where ranks (the keys) have devices of different platforms."""
    for rank, platform in platforms.items():
        if platform != platforms[0]:
            raise ValueError(
                f"rank 0 found {platforms[0]} devices and rank {rank} {platform} devices: see rrfp doctor on both "
                "hosts, or take platform cpu"
            )


def connect_client(coordinator: str, rank: int, num_ranks: int, key: RunKey, *, timeout_s: float) -> None:
    """Makes this process number ``rank`` of ``num_ranks`` to JAX; returns when all have connected.

    If JAX can, it proves to the service that it has the run key, and the service to it
    (:mod:`rrfp_jax.cluster.coordination_service`). A connection that breaks later ends the process at once with
    SIGABRT, so the service must outlive the ranks.

    Raises:
        RuntimeError: if JAX has started its backends, or is connected.
    """
    if backends_are_initialized():
        raise RuntimeError("JAX has already chosen its devices: connect before anything asks for them")
    if global_state.client is not None:
        raise RuntimeError("JAX is already connected to a coordination service")
    with _meeting_at(coordinator, rank, timeout_s, os.environ):
        client = get_distributed_runtime_client(
            coordinator,
            rank,
            init_timeout=max(1, round(timeout_s)) + _MARGIN_S,
            use_compression=True,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_on_destruction=False,  # else a process would wait at its end for all others, which may have died
            **tls_credentials(key, rank),
        )
        client.connect()
    global_state.client, global_state.process_id, global_state.num_processes = client, rank, num_ranks
    global_state.coordinator_address = coordinator


@contextmanager
def _meeting_at(coordinator: str, rank: int, timeout_s: float, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hides the variables by which gRPC chooses a proxy, which it reads while it connects, and ends the process with a
    sentence if that takes too long; JAX would abort it a moment later.

    A proxy for the world outside does not lead to the run's own hosts, and gRPC would go on trying without a word. The
    variables come back, since trackers need them.
    """

    def end() -> None:
        print_fatal_message(
            f"error: rank {rank} has not come together with the others at JAX's coordination service, {coordinator}, "
            f"within {timeout_s:g} s, although something answers there: see which ranks are missing, and whether a "
            "filter, a proxy or another program stands between"
        )
        os._exit(START_FAILED)

    hidden = {name: environ.pop(name) for name in GRPC_PROXIES if name in environ}
    guard = threading.Timer(timeout_s, end)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()
        environ.update(hidden)


def use_gloo(host: str) -> None:
    """Lets CPU devices of several processes compute together, over sockets that listen on the address ``host``.

    JAX by itself would listen on any address that the host's name has.
    """
    register_backend_factory(
        "cpu",
        lambda: make_cpu_client(
            collectives=make_gloo_tcp_collectives(distributed_client=global_state.client, hostname=host)
        ),
        priority=0,
        fail_quietly=False,
    )
