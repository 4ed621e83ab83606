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

from rrfp_jax.cluster import RunKey
from tests.multiprocess.launching import PROGRAMS, ROOT, Launched, eventually, launched
from tests.multiprocess.ports import free_port

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
    with launched("--processes", 3, "--start-deadline-s", 4, "--", "member", "--absent", 1) as launcher:
        assert launcher.wait() == 6
        assert not launcher.living()
    assert "missing: rank 1" in launcher.text
    assert "rank 1: had not come to the others: the launcher ended it" in launcher.text


def test_a_rank_killed_at_the_start_ends_those_too_that_have_not_come_yet():
    arguments = ("--processes", 4, "--", "talker", "--meet", "--late", 2, 600)
    with launched(*arguments, "--absent", 1, "--run-s", 600) as launcher:
        launcher.numbers(r'"rank": ([03])', 2)
        time.sleep(0.5)  # on their way to the rendezvous
        pid = launcher.ranks()[1]
        started_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == 137
        assert time.monotonic() - started_s < NOTICED_S + 1.0
        assert not launcher.living()
    assert "rank 1 (code 137, killed by SIGKILL)" in "\n".join(launcher.own_lines())
    assert re.search(r"ranks? [0-9, -]*2\S*: had not come to the others: the launcher ended it", launcher.text)
    cause = "the rendezvous failed: rank 1 ended with code 137 before all ranks had come"
    assert any(line.startswith(cause) for line in launcher.own_lines())


def test_a_dead_coordination_service_is_named_and_no_rank_blamed():
    with launched("--processes", 2, "--", "talker", "--meet", "--needs-service", "--run-s", 600) as launcher:
        launcher.numbers(r"met (\d+)", 2)
        assert eventually(lambda: launcher.running("coordination_service"))
        (service,) = launcher.running("coordination_service")
        started_s = time.monotonic()
        os.kill(service, signal.SIGKILL)
        assert launcher.wait() == 134
        assert time.monotonic() - started_s < NOTICED_S
    said, cause, *_ = news(launcher)
    assert said == "the coordination service ended with code 137, killed by SIGKILL: JAX now aborts all ranks"
    assert re.search(r"the coordination service \(code 137, killed by SIGKILL\), without which", cause)


# -- several nodes, here all on this machine -------------------------------------------------------------------------


def two_nodes(stack: ExitStack, port: int, *arguments: object, one_key: bool = True) -> list[Launched]:
    """Launchers that stand for two hosts, by an address each."""
    first = RunKey.generate()
    keys = [first, first if one_key else RunKey.generate()]
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 2)
    places = [("--node-rank", node, "--interface", f"127.0.0.{node + 1}") for node in range(2)]
    return [
        stack.enter_context(launched(*head, *place, *arguments, **key.environment()))
        for place, key in zip(places, keys, strict=True)
    ]


def news(node: Launched) -> list[str]:
    """What the launcher said but for whom it waited."""
    return [line for line in node.own_lines() if not line.startswith("waiting for")]


def ended_after(node: Launched, since_s: float) -> tuple[int, float]:
    code = node.wait()
    return code, time.monotonic() - since_s


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_that_somebody_else_starts_and_jax_detects():
    port, key = free_port(), RunKey.generate().environment()
    supervised = ("--supervise", "--processes", 2, "--head", f"127.0.0.1:{port}")
    places = {"RRFP_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "RRFP_COORDINATOR": f"127.0.0.1:{port + 1}"}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    with launched(*supervised, **key) as supervisor:
        assert eventually(lambda: all(f"{name}={place}" in supervisor.text for name, place in places.items()))
        assert eventually(lambda: any(line.startswith("waiting for ranks 0-1 (") for line in supervisor.own_lines()))
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


def test_all_launchers_return_the_code_of_the_whole_run():
    """Node 1's ranks end well long before a rank of node 0 fails."""
    with ExitStack() as stack:
        failing = [
            part
            for rank, code, s in [(0, 4, 1.5), (1, 0, 1.5), (2, 0, 0), (3, 0, 0)]
            for part in ("--fail", rank, code, s)
        ]
        nodes = two_nodes(stack, free_port(), "--", "talker", "--meet", *failing)
        assert [node.wait() for node in nodes] == [4, 4]
    for node in nodes:
        assert "rank 0 (code 4, a task failed)" in news(node)[0]
        assert "ranks 1-3: done" in node.text


@pytest.mark.slow
def test_a_launcher_does_not_wait_for_nodes_that_never_came():
    port, key = free_port(), RunKey.generate().environment()
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 1, "--start-deadline-s", 6)
    with launched(*head, "--", "talker", "--meet", **key) as node:
        assert eventually(lambda: any("waiting for rank" in line for line in node.own_lines()))
        assert eventually(lambda: "missing: rank 1" in node.text)
        code, ended_s = ended_after(node, time.monotonic())
    assert code == 6
    assert ended_s < NOTICED_S  # less than the grace time of 75 s
    assert "rank 1: not heard of" in node.text


def test_a_request_to_stop_ends_the_waiting_for_other_nodes():
    port, key = free_port(), RunKey.generate().environment()
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 1)
    with launched(*head, "--", "talker", "--fail", 0, 4, 0, **key) as node:
        assert eventually(lambda: '"rank": 0' in node.text and not node.ranks())
        time.sleep(0.5)
        assert node.process.poll() is None  # node 1 may come, and should learn of this
        started_s = time.monotonic()
        node.signal(signal.SIGTERM)
        code, ended_s = ended_after(node, started_s)
    assert code == 4
    assert ended_s < NOTICED_S


def test_a_node_that_comes_after_the_failure_learns_of_it():
    port, key = free_port(), RunKey.generate().environment()
    head = ("--nodes", 2, "--head", f"127.0.0.1:{port}", "--processes", 1)
    with launched(*head, "--", "talker", "--fail", 0, 4, 0, **key) as first:
        assert eventually(lambda: '"rank": 0' in first.text and not first.ranks())
        with launched(*head, "--node-rank", 1, "--", "talker", "--late", 1, 600, **key) as second:
            assert [second.wait(), first.wait()] == [4, 4]
    assert "rank 0 (code 4, a task failed)" in second.own_lines()[-3]


def test_a_dead_coordination_service_ends_other_nodes_too():
    with ExitStack() as stack:
        nodes = two_nodes(stack, free_port(), "--", "talker", "--meet", "--needs-service", "--run-s", 600)
        for node in nodes:
            node.numbers(r"met (\d+)", 2)
        assert eventually(lambda: nodes[0].running("coordination_service"))
        (service,) = nodes[0].running("coordination_service")
        os.kill(service, signal.SIGKILL)
        assert [node.wait() for node in nodes] == [134, 134]
    assert all("the run failed" in node.text and "coordination service (code 137" in node.text for node in nodes)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_head_whose_port_is_taken(offset: int):
    port, key = free_port(), RunKey.generate().environment()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        with launched("--supervise", "--processes", 2, "--head", f"127.0.0.1:{port}", **key) as supervisor:
            assert supervisor.wait() == 6
    assert f"port {port + offset}: Address already in use" in supervisor.text
    assert "end the run or program that has it, or give another port" in supervisor.text


def test_an_interface_that_is_none_of_this_host():
    with launched("--processes", 1, "--interface", "no0", "--", "talker") as launcher:
        assert launcher.wait() == 6
    (said,) = launcher.own_lines()
    assert said.startswith("error: the rendezvous cannot listen on interface 'no0'")
    assert said.endswith("give an interface of this host")


def test_a_node_with_another_key_is_named_on_both_sides_at_once():
    with ExitStack() as stack:
        nodes = two_nodes(stack, free_port(), "--", "talker", "--meet", one_key=False)
        theirs, own = (
            "tries to join with the key of another run or attempt",
            "it answers, but not to this node's run key",
        )
        assert eventually(lambda: theirs in nodes[0].text and own in nodes[1].text)
        assert nodes[0].text.count("0 s)") + nodes[1].text.count("0 s)") < 3  # long before the deadline of 300 s
        time.sleep(2.0)
        started_s = time.monotonic()
        for node in reversed(nodes):
            node.signal(signal.SIGINT)
        assert ended_after(nodes[1], started_s)[0] == 130
        nodes[0].wait()
    (said,) = (line for line in nodes[0].own_lines() if theirs in line)
    assert said.startswith("a process on 127.0.0.1 ")
    assert sum(own in line for line in nodes[1].own_lines()) < 3  # at growing intervals


@pytest.mark.slow
def test_a_node_with_another_key_fails_at_the_deadline():
    with ExitStack() as stack:
        nodes = two_nodes(stack, free_port(), "--start-deadline-s", 6, "--", "member", one_key=False)
        assert [node.wait() for node in nodes] == [6, 6]
    assert "cannot be joined after 6 s: it answers, but not to this node's run key" in nodes[1].text
    assert "missing: ranks 2-3" in nodes[0].text
