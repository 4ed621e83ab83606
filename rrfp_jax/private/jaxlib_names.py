"""Private names of jaxlib, as in 0.10.2 to 0.12; loads no JAX."""

from rrfp_jax.private import Private, naming

JAXLIB_NAMES = {
    "get_distributed_runtime_service": Private(
        "a coordination service in a process of its own, since its death aborts all ranks",
        "a name in jax.distributed that starts the service alone",
    ),
    "get_distributed_runtime_client": Private(
        "a rank that connects to a service elsewhere, waits for nobody at its end and leaves SIGTERM alone",
        "options of jax.distributed.initialize that start no service and no preemption watch",
    ),
    "make_gloo_tcp_collectives": Private(
        "collectives on CPU that listen on the interface of the run",
        "an option of JAX beside jax_cpu_collectives_implementation that names gloo's interface",
    ),
    "DeviceAssignment": Private(
        "a key of the compilation cache that is the same for all devices of a kind",
        "an option of JAX that leaves the devices out of that key",
    ),
}

with naming("jaxlib", JAXLIB_NAMES):
    from jaxlib._jax import (
        DeviceAssignment,
        get_distributed_runtime_client,
        get_distributed_runtime_service,
        make_gloo_tcp_collectives,
    )

__all__ = [
    "JAXLIB_NAMES",
    "DeviceAssignment",
    "get_distributed_runtime_client",
    "get_distributed_runtime_service",
    "make_gloo_tcp_collectives",
]
