"""A client of JAX's coordination service that says what it could do there, each thing in a line.

``stranger.py ADDRESS NODE HOW``: HOW is ``ask`` (calls without having joined) or ``join`` (takes the place of a node),
followed by ``-with-KEY`` for certificates of another run key; ``join-and-tell`` also writes what others come to read.
``stranger.py ADDRESS serve`` is a service without any protection, for two nodes, until standard input closes.
"""

import os
import sys

from rrfp_jax.cluster.coordination_service import tls_credentials
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.private.jaxlib_names import get_distributed_runtime_client, get_distributed_runtime_service

_PATIENCE_S = 3


def serve(address: str) -> None:
    service = get_distributed_runtime_service(address, 2, shutdown_timeout=1)
    print("ready", flush=True)
    sys.stdin.read()
    service.shutdown()


def intrude(address: str, node: int, how: str) -> None:
    way, _, key = how.partition("-with-")
    credentials = tls_credentials(RunKey.from_text(key), node) if key else {}
    client = get_distributed_runtime_client(
        address, node, init_timeout=_PATIENCE_S, shutdown_on_destruction=False, **credentials
    )
    if way.startswith("join"):
        client.connect()  # JAX aborts the process where this fails
        print("joined", flush=True)
        if way == "join-and-tell":
            client.key_value_set("secret", "known to holders of the key")
    attempts = (
        lambda: client.blocking_key_value_get("secret", _PATIENCE_S * 1000),
        lambda: client.wait_at_barrier("gate", _PATIENCE_S * 1000),
    )
    for attempt in attempts:
        try:
            print(f"got {attempt()}", flush=True)
        except Exception as error:
            print(f"refused: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1]) if sys.argv[2] == "serve" else intrude(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)
