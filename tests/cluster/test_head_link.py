"""Ranks and the head: whom it declares lost, and who hears of it."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from rrfp_jax.cluster import (
    HeadLink,
    LauncherLink,
    RendezvousServer,
    RunKey,
    RunStatus,
    _head_link,
    _rendezvous_server,
)
from rrfp_jax.cluster._rendezvous_client import Client
from rrfp_jax.cluster.child_processes import Output
from rrfp_jax.cluster.config import LaunchSettings
from rrfp_jax.cluster.launcher import launch
from rrfp_jax.cluster.rendezvous import MemberReport
from rrfp_jax.cluster.wire import pack_plain
from rrfp_jax.core.membership import EpochDeclared, RunCompleted
from rrfp_jax.layout import Layout
from rrfp_jax.records import to_plain
from tests.cluster.mesh import eventually

LAYOUT = Layout(num_stages=2, data=2, num_ranks=4)
"""Ranks 0 and 1 hold stage 0, ranks 2 and 3 stage 1."""


class Member:
    """A rank that has joined, and what it has heard."""

    def __init__(self, server: RendezvousServer, key: RunKey, rank: int) -> None:
        self.heard: list[EpochDeclared | RunCompleted] = []
        self.link = HeadLink(server.address, key, rank, LAYOUT, on_declared=self.heard.append)

    def has_heard(self, epoch: int, living: tuple[int, ...]) -> bool:
        return eventually(lambda: bool(self.heard) and self.heard[-1][:2] == (epoch, living))


@contextmanager
def members(*ranks: int, **options: Any) -> Iterator[tuple[RendezvousServer, RunKey, list[Member]]]:
    key = RunKey.generate()
    with RendezvousServer(4, key, **options) as server, ExitStack() as stack:
        joined = [Member(server, key, rank) for rank in ranks]
        for member in joined:
            stack.enter_context(closing(member.link))
        assert eventually(lambda: server._members.keys() == set(ranks))
        yield server, key, joined


def test_all_hear_of_a_suspicion_the_suspected_rank_too() -> None:
    said: list[str] = []
    with members(0, 1, 2, 3, notice=said.append) as (_, _, joined):
        started_s = time.monotonic()
        joined[2].link.accuse(((1, "silent for 5 s"),))
        assert all(member.has_heard(1, (0, 2, 3)) for member in joined)
        assert time.monotonic() - started_s < 0.9  # told at once, not when it is repeated
        joined[1].link.accuse(((2, "silent for 5 s"),))
        time.sleep(0.1)
        assert all(len(member.heard) == 1 for member in joined)
    assert said == ["rank 1 declared lost: rank 2 suspects rank 1: silent for 5 s"]


def test_all_hear_of_the_ends_of_processes_here_and_on_other_nodes() -> None:
    statuses: list[RunStatus] = []
    with members(0, 1, 2, on_status=statuses.append) as (server, key, joined):
        server.ended(3, 137)
        assert all(member.has_heard(1, (0, 1, 2)) for member in joined)
        got: list[RunStatus] = []
        link = LauncherLink(server.address, key, 1, on_status=got.append, notice=lambda text: None)
        link.takes((1,))
        link.ended(1, 139)
        assert all(member.has_heard(2, (0, 2)) for member in joined)
        assert eventually(lambda: bool(got) and got[-1].lost.keys() == {1, 3})
        assert got[-1].lost == statuses[-1].lost
        assert got[-1].lost[3] == "rank 3 ended with code 137"
        joined[0].link.accuse(((2, "silent"),))
        assert all(member.has_heard(3, ()) for member in joined)  # no replica of stage 1 would be left
        assert eventually(lambda: got[-1].lost.keys() == {0, 1, 2, 3})
        link.close()


def test_an_end_before_the_first_report_counts() -> None:
    key = RunKey.generate()
    with RendezvousServer(4, key) as server:
        server.ended(3, 137)
        member = Member(server, key, 0)
        assert member.has_heard(1, (0, 1, 2))
        member.link.close()


def test_a_rank_that_comes_back_is_told_what_it_has_missed() -> None:
    with members(0, 2) as (server, key, joined):
        joined[0].link.accuse(((1, "stopped"),))
        assert joined[1].has_heard(1, (0, 2, 3))
        late = Member(server, key, 1)
        assert late.has_heard(1, (0, 2, 3))
        late.link.close()


def test_messages_may_be_lost_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_head_link, "_REPEAT_S", 0.1)
    monkeypatch.setattr(_head_link, "_CALM_S", 0.1)
    counts = {"said": 0, "replied": 0}

    def is_kept(what: str, nth: int) -> bool:
        counts[what] += 1
        return counts[what] % nth == 0

    say = Client.say
    monkeypatch.setattr(Client, "say", lambda client, data: is_kept("said", 3) and say(client, data))
    with members(0, 1, 2, 3) as (server, _, joined):
        reply = server._reply
        monkeypatch.setattr(server, "_reply", lambda route, said: is_kept("replied", 2) and reply(route, said))
        joined[0].link.accuse(((3, "silent"),))
        server.ended(1, 137)
        assert all(eventually(lambda m=member: bool(m.heard) and m.heard[-1].epoch == 2) for member in joined)
        assert len({member.heard[-1] for member in joined}) == 1


def test_a_head_that_is_stopped_for_a_moment_is_heard_afterwards() -> None:
    """The head is a process of its own here, so that it can be stopped."""
    key = RunKey.generate()
    code = (
        "import sys\nfrom rrfp_jax.cluster import RendezvousServer, RunKey\n"
        "with RendezvousServer(4, RunKey.from_environment()) as server:\n"
        "    print(server.address, flush=True)\n    sys.stdin.read()\n"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", code],
        env=key.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    heard: list[EpochDeclared | RunCompleted] = []
    with ExitStack() as stack:
        stack.enter_context(head)
        stack.callback(head.kill)
        assert head.stdout is not None
        link = HeadLink(head.stdout.readline().strip(), key, 0, LAYOUT, on_declared=heard.append)
        stack.enter_context(closing(link))
        assert eventually(lambda: link._answered is not None)
        head.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, head.pid, os.WSTOPPED | os.WNOWAIT)
        link.accuse(((3, "silent"),))
        time.sleep(0.5)
        assert not heard
        assert link.silent_s > 0.4
        head.send_signal(signal.SIGCONT)
        assert eventually(lambda: bool(heard))


def test_who_leaves_after_the_end_is_no_loss() -> None:
    with members(0, 1, 2, 3) as (server, _, joined):
        assert joined[1].link.leave(5.0)
        assert all(eventually(lambda m=member: m.heard == [RunCompleted()]) for member in joined)
        server.ended(1, 0)
        server.ended(2, 137)
        assert joined[3].link.leave(5.0)
        time.sleep(0.1)
        assert all(member.heard == [RunCompleted()] for member in joined)


def test_nobody_is_kept_by_a_head_that_is_gone() -> None:
    with members(0) as (server, _, (member,)):
        server.close()
        assert not member.link.leave(0.2)


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        ({"rank": 4}, r"rank 4 of 4 accuses \(\)"),
        ({"accusations": ((7, "silent"),)}, "rank 0 of 4 accuses"),
        ({"num_stages": 3}, "rank 0 tells of a layout that cannot be"),
        ({"epoch": "x"}, "a message to the rendezvous was dropped"),
    ],
    ids=str,
)
def test_malformed_reports_are_dropped_and_named(report: dict[str, Any], fault: str) -> None:
    key, said = RunKey.generate(), list[str]()
    plain = to_plain(MemberReport(rank=0, num_stages=2, data=2, unit_size=1)) | report
    with RendezvousServer(4, key, notice=said.append) as server, closing(Client(server.address, key)) as client:
        assert eventually(lambda: client.hear(time.monotonic() + 0.05) or client.is_connected)
        client.say(pack_plain({"kind": "member", "report": plain}))
        assert eventually(lambda: bool(said))
        assert re.search(fault, said[0])
        assert server._membership is None


@pytest.mark.slow
def test_a_launcher_kills_a_stopped_rank_that_is_lost_and_lets_the_others_go_on() -> None:
    settings = LaunchSettings(command=("tests.cluster.losing_rank",), num_processes=2)
    out, told = io.BytesIO(), io.BytesIO()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert launch(settings, environment, Output(out, told, prefix="auto")) == 0, told.getvalue().decode()
    assert out.getvalue() == b"goes on with (0,)\n"
    lines = told.getvalue().decode().splitlines()
    assert "[launcher] rank 1 declared lost: rank 0 suspects rank 1: silent for 0.5 s" in lines
    assert lines[-1] == "[launcher]   rank 1 was lost, and the others went on: rank 0 suspects rank 1: silent for 0.5 s"


@pytest.mark.parametrize(("strikes", "restarts"), [(0, 1), (1, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_lost_rank_is_started_again_as_often_as_restarts_allow(strikes: int, restarts: int) -> None:
    settings = LaunchSettings(
        command=("tests.cluster.returning_rank", str(strikes)), num_processes=2, max_restarts=restarts, grace_s=5.0
    )
    out, told = io.BytesIO(), io.BytesIO()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = launch(settings, environment, Output(out, told, prefix="always"))
    lines = told.getvalue().decode().splitlines()
    assert f"[launcher] rank 1 is started again (1 of at most {restarts} restarts)" in lines
    if strikes == restarts:
        assert code == 9, lines  # The first rank waits in vain.
        return
    assert code == 0, lines
    assert "[launcher] rank 1 is back" in lines
    expected = [f"[rank {rank}] rank {rank} goes on with (0, 1), dict_keys([1])" for rank in (0, 1)]
    assert sorted(out.getvalue().decode().splitlines()) == expected
    assert not [line for line in lines if "the others went on" in line]


def test_a_new_process_that_fetches_nothing_is_ended_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rendezvous_server, "_FETCH_S", 0.5)
    command = ("tests.cluster.returning_rank", "0", "sleeps")
    settings = LaunchSettings(command=command, num_processes=2, max_restarts=1, grace_s=5.0)
    out, told = io.BytesIO(), io.BytesIO()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert launch(settings, environment, Output(out, told, prefix="auto")) == 0, told.getvalue().decode()
    assert out.getvalue() == b"rank 0 goes on with (0,), dict_keys([])\n"
    lines = told.getvalue().decode().splitlines()
    assert "[launcher] rank 1 has not fetched the state in 0.5 s, and is not waited for" in lines
    assert lines[-1] == "[launcher]   rank 1 was lost, and the others went on: rank 1 ended with code 137"
