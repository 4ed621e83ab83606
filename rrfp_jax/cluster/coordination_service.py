"""JAX's coordination service in a process of its own, until standard input closes; run as a module.

``python -m rrfp_jax.cluster.coordination_service HOST PORT NUM_RANKS`` prints ``ready PORT`` once it listens
(port 0: any that is free). The run key is in its environment, as in a rank's. The death of the process that hosts the
service aborts all ranks within a tenth of a second, so no rank must host it. JAX offers the service under no public
name; jaxlib alone holds it, and loads without JAX itself.
"""

import os
import socket
import sys
from contextlib import closing

from rrfp_jax.cluster.config import HEARTBEAT_TIMEOUT_S
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.exit_codes import DONE, START_FAILED

_REMEDY = "end the run or program that has it, or give another port"
_SHUTDOWN_TIMEOUT_S = 5
"""Seconds for all ranks to disconnect at the end. It is short, since some may have died."""


def serve(argv: list[str]) -> int:
    """Serves until standard input closes. Returns the exit code."""
    host, port, num_ranks = argv[0], int(argv[1]), int(argv[2])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the service tells of each connection otherwise
    from rrfp_jax.cluster.certificates import service_credentials
    from rrfp_jax.private.jaxlib_names import get_distributed_runtime_service

    try:
        reserved = _reserve(host, port)
        credentials = service_credentials(RunKey.from_environment())
    except ValueError as error:
        print(error, file=sys.stderr)
        return START_FAILED
    except OSError as error:
        where = f"{host}, port {port}: {error.strerror}; {_REMEDY}"
        print(f"the coordination service cannot listen on {where}", file=sys.stderr)
        return START_FAILED
    with closing(reserved):
        port = reserved.getsockname()[1]
        service = get_distributed_runtime_service(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            num_ranks,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            **credentials,
        )
    print(f"ready {port}", flush=True)
    sys.stdin.read()
    service.shutdown()
    return DONE


def _reserve(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen: it keeps the port until the service has taken it.

    gRPC shares ports (SO_REUSEPORT), so by itself it would silently share one that another service listens on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        if port:
            probe.listen(0)  # fails where somebody listens already
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return reserved


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
