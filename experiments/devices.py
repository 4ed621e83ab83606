"""Choose the devices of a command, before JAX starts its backends."""

import os

import jax

_PINNED_THREADS = 8


def use_cpu(num_devices: int, *, pinned: bool = False) -> None:
    """Run on this many virtual CPU devices.

    A program then runs within the thread that launches it: each stage has a compute thread of its own, and the hop to
    another one would only add to every task. ``pinned`` fixes the size of XLA's thread pools, unless the environment
    does so already, so that sums do not depend on the number of devices; it is read when the first device is made.
    """
    if pinned:
        os.environ.setdefault("NPROC", str(max(_PINNED_THREADS, num_devices)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
