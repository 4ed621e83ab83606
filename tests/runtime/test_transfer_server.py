"""A process's transfer server: the memory that it takes, and its end where no other process fetches from it."""

import gc
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.runtime import process
from rrfp_jax.runtime.cluster import Cluster
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.transports.transfer import LOCKED_BYTES, ServerProbe, TransferServer
from rrfp_jax.schedules import linear
from tests.cluster.mesh import eventually
from tests.runtime.transport_pairs import ACTIVATION, introduce

_STACKS_BYTES = 300 << 20
"""What the threads of a server reserve for their stacks, and more."""


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionError:  # refused, or reset where the end comes meanwhile
        return False
    return True


def test_a_server_takes_little_memory_and_gives_it_back() -> None:
    """On a GPU all of it is locked, for each process of a host."""
    TransferServer("127.0.0.1").close()  # what is reserved once in a process
    gc.collect()
    before = virtual_bytes()
    server = TransferServer("127.0.0.1")
    taken = virtual_bytes() - before
    assert LOCKED_BYTES <= 400 << 20
    assert LOCKED_BYTES <= taken <= LOCKED_BYTES + _STACKS_BYTES
    server.close()
    server.close()
    assert virtual_bytes() - before < LOCKED_BYTES // 2


def test_arrays_larger_than_all_chunks_under_way_arrive() -> None:
    servers = [TransferServer("127.0.0.1") for _ in range(2)]
    introduce(servers)
    sent = jax.device_put(jnp.arange(20 << 20, dtype=jnp.float32), jax.devices()[0])
    servers[0].offer(0, [sent])
    (came,) = servers[1].pull(0, 0, [jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=sent.sharding)])
    np.testing.assert_array_equal(came, sent)


@pytest.mark.parametrize("why", ["", "no answer within 20 s"], ids=["works", "refused"])
def test_a_server_that_no_partner_fetches_from_is_ended(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probes: list[ServerProbe] = []

    def try_transfers(gather: Any, own: int, others: Any, make_probe: Any) -> dict[tuple[int, int], str]:
        probes.append(make_probe())
        return {(0, 1): why}

    cluster = Mock(
        spec=Cluster,
        comes_back=False,
        rank=0,
        num_ranks=2,
        together=True,
        config=Mock(encrypt_arrays=False),
        network=Mock(rank=0, num_ranks=2),
    )
    monkeypatch.setattr(process, "try_transfers", try_transfers)
    monkeypatch.setattr(process, "why_untried", lambda platform, encrypts: None)
    monkeypatch.setattr(process, "host_of", lambda address: "127.0.0.1")
    layout = Layout(num_stages=2, num_ranks=2)
    run = Process(layout, cluster, devices=jax.devices()[:2])
    with caplog.at_level("INFO"):
        assert run._connect_stages(linear(2), [ACTIVATION]) == (frozenset() if why else {1})
    if why:
        assert eventually(lambda: not listens(probes[0].address))
    else:
        assert listens(probes[0].address)
    assert ("sets aside 192 MiB of locked host memory" in caplog.text) == (not why)
