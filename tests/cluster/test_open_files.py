"""A limit on open files is raised as far as the system allows; where that is too little, one sentence says so."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, resource, sys
from rrfp_jax.cluster import PeerAddress, PeerNetwork, RunKey
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
network, loop = PeerNetwork(rank=0, num_ranks=500, key=RunKey.generate()), asyncio.new_event_loop()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
try:
    nowhere = "tcp://127.0.0.1:1"
    addresses = {{r: PeerAddress(heartbeats=nowhere, messages=nowhere) for r in range(500)}}
    network.start(loop, addresses, connections={connections}, lost=print)
    print("started", flush=True)
    os._exit(0)
finally:
    network.close()
"""


def run(soft: int, hard: int, connections: str = "None") -> tuple[list[str], str]:
    """The lines that the program prints, and the last of its errors."""
    program = PROGRAM.format(soft=soft, hard=hard, connections=connections)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return done.stdout.splitlines(), errors[-1] if errors else ""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="the system allows fewer files here")
def test_the_limit_is_raised_where_the_system_allows() -> None:
    assert run(256, 4096) == (["4096", "started"], "")


def test_too_low_a_limit_is_a_sentence() -> None:
    said, error = run(48, 48)
    assert said == []
    assert error.startswith("ValueError: this process may have 48 files open and needs ")
    assert error.endswith("or more on every host")
    said, error = run(256, 256)
    assert said == ["256"]
    assert "needs 20" in error  # 499 ranks with two connections for heartbeats and two for messages each
    assert "for connections to 499 of 500 ranks: set 'ulimit -n 20" in error


def test_few_connections_need_few_files() -> None:
    assert run(256, 256, connections="[1, 2, 3]") == (["256", "started"], "")
