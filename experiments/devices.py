"""Choose the devices of a command, before JAX starts its backends."""

import os

import jax

from rrfp_jax.planning.layout import Layout
from rrfp_jax.runtime.cluster.settings import PINNED_THREADS


def stage_devices(layout: Layout, *, platform: str | None, pinned: bool = False) -> tuple[jax.Device, ...]:
    """The devices of a run of one process: virtual ones on ``cpu``, else the first that JAX finds.

    ``pinned`` as for :func:`use_cpu`. Raises ValueError if they are too few.
    """
    wanted = layout.num_devices
    if platform == "cpu":
        use_cpu(wanted, pinned=pinned)
    elif pinned:
        _pin_threads(wanted)
    found = jax.local_devices()
    if len(found) < wanted:
        raise ValueError(
            f"{len(found)} {found[0].platform} {'device' if len(found) == 1 else 'devices'} for {layout.num_stages} "
            f"stages x data {layout.data} x tensor {layout.tensor}: lower them to {len(found)} in all, or take "
            "platform cpu for virtual devices"
        )
    return tuple(found[:wanted])


def use_cpu(num_devices: int, *, pinned: bool = False) -> None:
    """Run on this many virtual CPU devices.

    A program then runs within the thread that launches it: each stage has a compute thread of its own, and the hop to
    another one would only add to every task. ``pinned`` fixes the size of XLA's thread pools, unless the environment
    does so already, so that sums do not depend on the number of devices; it is read when the first device is made.
    """
    if pinned:
        _pin_threads(num_devices)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _pin_threads(num_devices: int) -> None:
    os.environ.setdefault("NPROC", str(max(PINNED_THREADS, num_devices)))
