"""Connect JAX to a coordination service that no rank hosts.

``jax.distributed.initialize`` always starts the service in process 0, whose death then aborts all others within a tenth
of a second; it also waits for every process at the end, and takes SIGTERM for itself. No public name connects a client
only, hence the use of ``jax._src`` here, which works with JAX 0.10.2 to 0.12.
"""

from typing import Any

from jax._src import distributed, xla_bridge
from jaxlib import _jax

from rrfp_jax.runtime.cluster.config import HEARTBEAT_TIMEOUT_S


def connect_client(coordinator: str, rank: int, num_ranks: int, *, timeout_s: float) -> None:
    """Make this process number ``rank`` of ``num_ranks`` to JAX; returns when all have connected.

    A connection that breaks later ends the process at once with SIGABRT, so the service must outlive the ranks.

    Raises:
        RuntimeError: where JAX has started its backends, or is connected.
    """
    state = distributed.global_state
    if xla_bridge.backends_are_initialized():
        raise RuntimeError("JAX has already chosen its devices: connect before anything asks for them")
    if state.client is not None:
        raise RuntimeError("JAX is already connected to a coordination service")
    client = _jax.get_distributed_runtime_client(
        coordinator,
        rank,
        init_timeout=max(1, round(timeout_s)),
        use_compression=True,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_on_destruction=False,  # else a process that ends waits for all others, which may have died
    )
    client.connect()
    state.client, state.process_id, state.num_processes = client, rank, num_ranks
    state.coordinator_address = coordinator


def use_gloo(host: str) -> None:
    """Let CPU devices of several processes compute together, over sockets that listen on the address ``host``.

    JAX by itself would listen on whatever address the host's name has.
    """

    def make_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=host)
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
