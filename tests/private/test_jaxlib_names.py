"""Every private name of jaxlib does what we rely on."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from rrfp_jax.cluster.coordination_service import SECURED, service_security
from rrfp_jax.private import jaxlib_names
from rrfp_jax.private.jaxlib_names import JAXLIB_NAMES
from tests.environment import of_child
from tests.private.canaries import assert_kept

SERVE_AND_CONNECT = """
import socket, sys

from rrfp_jax.cluster.coordination_service import tls_credentials
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.private.jaxlib_names import *

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
key = RunKey.generate()
service = get_distributed_runtime_service(
    address, 1, heartbeat_timeout=3600, shutdown_timeout=5, **tls_credentials(key)
)
print("served", flush=True)
client = get_distributed_runtime_client(
    address, 0, init_timeout=10, use_compression=True, heartbeat_timeout=3600, shutdown_on_destruction=False,
    **tls_credentials(key, 0),
)
client.connect()
client.key_value_set("name", "value")
assert client.blocking_key_value_get("name", 1000) == "value"
client.wait_at_barrier("all", 1000)
print("connected", flush=True)
make_gloo_tcp_collectives(distributed_client=client, hostname="127.0.0.1")
print("gloo", flush=True)
assert "jax" not in sys.modules, "it loads JAX"
client.shutdown()
service.shutdown()
"""


@cache
def said() -> str:
    """By a process of its own, since JAX aborts one whose connection fails."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE_AND_CONNECT],
        capture_output=True,
        text=True,
        timeout=60,
        env=of_child(),
        check=False,
    )
    return done.stdout + done.stderr[-2000:]


def serves() -> None:
    assert "served" in said(), said()
    told = jaxlib_names.get_distributed_runtime_service.__doc__
    assert ("mtls_peer_uri_prefix" in told) == (service_security() == SECURED), told


def connects() -> None:
    assert "connected" in said(), said()
    told = jaxlib_names.get_distributed_runtime_client.__doc__
    assert ("mtls_peer_uri_prefix" in told) == (service_security() == SECURED), told


def makes_gloo() -> None:
    assert "gloo" in said(), said()


def assigns() -> None:
    assignment = jaxlib_names.DeviceAssignment.create(np.arange(6).reshape(2, 3))
    assert (assignment.replica_count(), assignment.computation_count()) == (2, 3)


CHECKS = {
    "get_distributed_runtime_service": serves,
    "get_distributed_runtime_client": connects,
    "make_gloo_tcp_collectives": makes_gloo,
    "DeviceAssignment": assigns,
}


@pytest.mark.parametrize("name", JAXLIB_NAMES)
def test_it_is_as_we_use_it(name: str):
    assert_kept("jaxlib", JAXLIB_NAMES, CHECKS, name)


def test_it_loads_no_jax_and_ends_well():
    assert said().split() == ["served", "connected", "gloo"]
