"""Ranks that have met and watch each other: whatever happens to one, all end soon, and somebody says why."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from rrfp_jax.runtime.network import RunKey
from tests.multiprocess.launching import PROGRAMS, ROOT, Launched, eventually, launched

NOTICED_S = 2.0
"""Within which a closed connection is noticed, and all processes have ended."""


def kill(launcher: Launched, rank: int, number: int, num_ranks: int) -> tuple[int, float]:
    """Signal a rank once all have connected: the launcher's exit code and the seconds until it had ended."""
    pid = launcher.ready(num_ranks)[rank]
    started_s = time.monotonic()
    os.kill(pid, number)
    return launcher.wait(), time.monotonic() - started_s


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run_at_once(rank: int):
    with launched("--processes", 3, "--", "member") as launcher:
        code, ended_s = kill(launcher, rank, signal.SIGKILL, 3)
        assert code == 137
        assert ended_s < NOTICED_S
        assert not launcher.living()
    for other in {0, 1, 2} - {rank}:
        said = next(line for line in launcher.lines if f"error: rank {other} lost" in line)
        assert f"rank {rank} (closed" in said
    summary = "\n".join(launcher.own_lines())
    assert f"rank {rank} (code 137, killed by SIGKILL)" in summary
    assert "code 5, lost another rank" in summary


def test_a_stopped_rank_ends_the_run_within_the_deadline():
    with launched("--processes", 3, "--", "member", "--silence-deadline-s", 2) as launcher:
        code, ended_s = kill(launcher, 1, signal.SIGSTOP, 3)
        assert code == 5
        assert 1.2 < ended_s < 6.0  # the deadline, and less than the grace time of 75 s
        assert not launcher.living()
    assert re.search(r"rank 1 \(silent for [12]\.", launcher.text)
    assert "  rank 1: stood still (SIGSTOP): the launcher ended it" in launcher.text


def test_a_collective_that_breaks_as_a_rank_dies_is_the_loss_of_that_rank():
    with launched("--processes", 3, "--", "member", "--dies", 1) as launcher:
        assert launcher.wait() == 137
    assert "ranks 0, 2: code 5, lost another rank" in launcher.text
    assert "Traceback" not in launcher.text


@pytest.mark.parametrize("when", ["soon", "late"])
def test_who_takes_over_is_told_instead(when: str):
    with launched("--processes", 2, "--", "member", "--take-over", when) as launcher:
        code, _ = kill(launcher, 1, signal.SIGKILL, 2)
        assert code == 137
    assert "rank 0: code 3, no progress" in launcher.text


def test_a_rank_with_another_configuration():
    with launched("--processes", 3, "--", "member", "--other-configuration", 1) as launcher:
        assert launcher.wait() == 6
    assert "optimizer.learning_rate is 0.1 on ranks 0, 2, 0.2 on rank 1" in launcher.text
    assert not any("Traceback" in line for line in launcher.lines)


def test_a_rank_that_never_comes():
    arguments = ("--start-deadline-s", 2, "--grace-s", 0.5, "--", "member", "--absent", 1)
    with launched("--processes", 3, *arguments) as launcher:
        assert launcher.wait() == 6
        assert not launcher.living()
    assert "missing: rank 1" in launcher.text
    assert "rank 1: did not end by itself" in launcher.text


# -- several nodes, here all on this machine -------------------------------------------------------------------------


def free_port() -> int:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def two_nodes(stack: ExitStack, port: int, *arguments: object) -> list[Launched]:
    key = RunKey.generate().environment()
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 2)
    return [stack.enter_context(launched(*head, "--node-rank", node, *arguments, **key)) for node in range(2)]


def test_two_nodes_end_together_and_free_their_ports():
    port = free_port()
    with ExitStack() as stack:
        nodes = two_nodes(stack, port, "--", "member")
        assert all(list(node.ready(2)) for node in nodes)
        started_s = time.monotonic()
        os.kill(nodes[1].ready(2)[3], signal.SIGKILL)
        assert [node.wait() for node in nodes] == [137, 137]
        assert time.monotonic() - started_s < NOTICED_S + 2.0
        assert not any(node.living() for node in nodes)
    assert "rank 3 (code 137, killed by SIGKILL)" in "\n".join(nodes[0].own_lines())
    with ExitStack() as stack:
        nodes = two_nodes(stack, port, "--", "member", "--run-s", 0.3)
        assert [node.wait() for node in nodes] == [0, 0]


@pytest.mark.slow
def test_two_nodes_start_again_together_on_the_same_ports():
    with ExitStack() as stack:
        nodes = two_nodes(stack, free_port(), "--max-restarts", 1, "--", "member")
        victims = nodes[0].ready(2)
        os.kill(victims[0], signal.SIGKILL)
        for node in nodes:
            assert eventually(lambda node=node: "restart 1 of at most 1" in node.text)  # type: ignore[misc]
            node.numbers(r"ready (\d+)", 4)
        os.kill(nodes[1].ready(4)[2], signal.SIGKILL)
        assert [node.wait() for node in nodes] == [137, 137]


@pytest.mark.slow
def test_a_node_whose_launcher_is_killed_ends_the_run():
    with ExitStack() as stack:
        nodes = two_nodes(stack, free_port(), "--grace-s", 3, "--", "member")
        assert all(list(node.ready(2)) for node in nodes)
        nodes[1].signal(signal.SIGKILL)
        assert nodes[0].wait() == 5
        assert eventually(lambda: not nodes[1].living(), 5.0)
    assert "ranks 2-3: not heard of" in nodes[0].text


def test_ranks_that_somebody_else_starts_and_jax_detects():
    port, key = free_port(), RunKey.generate().environment()
    supervised = ("--supervise", "--processes", 2, "--head", f"127.0.0.1:{port}")
    places = {"RRFP_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "RRFP_COORDINATOR": f"127.0.0.1:{port + 1}"}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    with launched(*supervised, **key) as supervisor:
        assert eventually(lambda: all(f"{name}={place}" in supervisor.text for name, place in places.items()))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "member", "--run-s", "0.2"],
                cwd=PROGRAMS,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RRFP_DETECT": "1", "SLURM_PROCID": str(rank)}
                | (places | slurm | key),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=30)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert all(text.startswith("ready") for text in said)
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0
        assert not supervisor.living()


@pytest.mark.parametrize("offset", [0, 1])
def test_a_head_whose_port_is_taken(offset: int):
    port, key = free_port(), RunKey.generate().environment()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        with launched("--supervise", "--processes", 2, "--head", f"127.0.0.1:{port}", **key) as supervisor:
            assert supervisor.wait() == 6
    assert f"port {port + offset}: Address already in use" in supervisor.text


def test_an_interface_that_is_none_of_this_host():
    with launched("--processes", 1, "--interface", "no0", "--", "talker") as launcher:
        assert launcher.wait() == 6
    (said,) = launcher.own_lines()
    assert said.startswith("error: the rendezvous cannot listen on interface 'no0'")
    assert said.endswith("give an interface of this host")


@pytest.mark.slow
def test_a_node_with_another_key_is_told_so():
    port = free_port()
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 1, "--start-deadline-s", 4)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                launched(*head, "--node-rank", node, "--grace-s", 1, "--", "member", **RunKey.generate().environment())
            )
            for node in range(2)
        ]
        assert [node.wait() for node in nodes] == [6, 6]
    assert "cannot be joined after 4 s: it answers, but not to this node's run key" in nodes[1].text
    assert "missing: rank 1" in nodes[0].text
