"""Ranks with JAX: computing together, and ending without JAX's own watch aborting anybody."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rrfp_jax.exit_codes import START_FAILED
from tests.environment import of_child
from tests.multiprocess.launching import ROOT, Launched, eventually, launched


def pids(launcher: Launched, num_ranks: int) -> list[int]:
    """The process ids of all ranks, once they have computed together."""
    return launcher.numbers(r'"pid": (\d+)', num_ranks)


def test_ranks_compute_together_and_none_waits_for_another_at_the_end():
    with launched("--processes", 2, "--", "summing", "--last-lingers-s", 3) as launcher:
        pids(launcher, 2)
        assert eventually(lambda: list(launcher.ranks()) == [1], 2.5)
        assert launcher.wait() == 0
    rows = [json.loads(line[line.index("{") :]) for line in launcher.lines if '"sum"' in line]
    assert [row["sum"] for row in rows] == [6.0, 6.0]
    assert sorted(row["rank"] for row in rows) == [0, 1]
    assert json.loads(launcher.stdout[-1])["rank"] == 0


def test_a_proxy_for_the_world_outside_is_not_asked_for_the_way_to_the_ranks():
    """It is the trackers', so it stays in the environment; the coordination service is reached without."""
    nobody = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"), "http://127.0.0.1:9")
    grpc = {"grpc_proxy": "127.0.0.1:9", "GRPC_ADDRESS_HTTP_PROXY": "127.0.0.1:9"}
    enabled = {"GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "0.0.0.0/0", "no_proxy": "*"}
    with launched("--processes", 2, "--", "summing", **nobody, **grpc, **enabled) as launcher:
        assert launcher.wait() == 0, launcher.text
    rows = [json.loads(line[line.index("{") :]) for line in launcher.lines if '"sum"' in line]
    assert [row["sum"] for row in rows] == [6.0, 6.0]
    for row in rows:
        assert {name: row["proxies"][name] for name in (*nobody, *grpc)} == {**nobody, **grpc}


def test_a_coordination_service_that_does_not_speak_is_not_waited_for_beyond_the_deadline():
    """Its port is open, as behind a filter that answers for others: JAX by itself aborts with a native stack."""
    code = """
import sys
from rrfp_jax.cluster import RunKey
from rrfp_jax.runtime.start_jax import connect_client
connect_client(sys.argv[1], 0, 2, RunKey.generate(), timeout_s=1.5)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", code, where], cwd=ROOT, env=of_child(), capture_output=True, text=True, check=False
        )
    assert done.returncode == START_FAILED, done.stderr
    assert f"rank 0 has not come together with the others at JAX's coordination service, {where}, within" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_by_us_before_jax_aborts(victim: int):
    with launched("--processes", 3, "--", "summing", "--wait-s", 600) as launcher:
        pids(launcher, 3)
        pid = launcher.ranks()[victim]
        started_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 137
        assert time.monotonic() - started_s < 2.0
        assert not launcher.living()
    assert "code 5, lost another rank" in launcher.text
    assert "SIGABRT" not in launcher.text


@pytest.mark.slow
def test_a_rank_that_dies_while_others_wait_for_it_inside_jax():
    with launched("--processes", 3, "--", "summing", "--die-before-devices", 2) as launcher:
        assert launcher.wait() == 134
    assert "ranks 0-1: code 5, lost another rank" in launcher.text


@pytest.mark.slow
def test_a_rank_with_too_few_devices_is_named():
    with launched("--processes", 2, "--", "summing", "--devices-of-last", 1) as launcher:
        assert launcher.wait() == 2
    assert "needs 2 devices on each of 2 ranks (4 in all), but rank 1 has 1" in launcher.text


@pytest.mark.slow
def test_the_death_of_the_coordination_service_is_told_apart():
    with launched("--processes", 2, "--", "summing", "--wait-s", 600) as launcher:
        pids(launcher, 2)
        (service,) = launcher.running("coordination_service")
        os.kill(service, signal.SIGKILL)
        assert launcher.wait() == 134
        assert not launcher.living()
    assert "the coordination service ended with code 137, killed by SIGKILL: JAX now aborts all ranks" in launcher.text
    assert "error: rank" not in launcher.text  # nobody takes another for the cause
