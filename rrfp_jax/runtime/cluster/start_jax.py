"""Start JAX as one of several processes."""

import os
from collections.abc import Sequence

import jax

from rrfp_jax.runtime.cluster.devices import check_devices, visible_devices
from rrfp_jax.runtime.cluster.jax_client import connect_client, use_gloo
from rrfp_jax.runtime.cluster.membership import Membership
from rrfp_jax.runtime.cluster.virtual_cpu import pin_threads, use_virtual_devices

_CPU, _TPU = "cpu", "tpu"


def start_jax(
    membership: Membership,
    hosts: Sequence[str],
    *,
    platform: str | None,
    num_local: int,
    listen_on: str,
    timeout_s: float,
    pinned: bool,
) -> tuple[jax.Device, ...]:
    """See :meth:`rrfp_jax.runtime.cluster.Cluster.initialize_jax`; ``listen_on`` is this host's address."""
    rank, num_ranks = membership.rank, membership.num_ranks
    if pinned:
        pin_threads(num_local)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if platform == _CPU:
        use_virtual_devices(num_local)
    elif platform != _TPU and (visible := visible_devices(rank, hosts, num_local, os.environ)) is not None:
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    use_gloo(listen_on)
    connect_client(membership.coordinator, rank, num_ranks, timeout_s=timeout_s)
    check_devices(rank, jax.process_index(), [d.process_index for d in jax.devices()], num_ranks, num_local)
    return tuple(jax.local_devices()[:num_local])
