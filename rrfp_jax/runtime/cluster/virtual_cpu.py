"""Virtual CPU devices, for a process that is alone and for one of several; before JAX starts its backends."""

import os

import jax

from rrfp_jax.runtime.cluster.settings import PINNED_THREADS


def use_virtual_devices(num_devices: int) -> None:
    """Run on this many virtual CPU devices.

    A program then runs within the thread that launches it: each stage has a compute thread of its own, and the hop to
    another one would only add to every task.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def pin_threads(num_devices: int) -> None:
    """Fix the size of XLA's thread pools, unless the environment does so already.

    Sums then do not depend on the number of devices. It is read when the first device is made.
    """
    os.environ.setdefault("NPROC", str(max(PINNED_THREADS, num_devices)))
