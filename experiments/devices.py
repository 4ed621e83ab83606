"""Choose the devices of a command, before JAX starts its backends."""

import jax


def use_cpu(num_devices: int) -> None:
    """Run on this many virtual CPU devices.

    A program then runs within the thread that launches it: each stage has a compute thread of its own, and the hop to
    another one would only add to every task.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
