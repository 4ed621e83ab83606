"""The head's start, and how soon a request to stop ends it."""

import errno
import io
import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

from rrfp_jax.cluster import RendezvousServer, RunKey, _head, child_processes, launcher
from rrfp_jax.cluster.child_processes import Guardian, LauncherEvents, Output
from rrfp_jax.cluster.config import Address, LaunchSettings
from rrfp_jax.cluster.coordination_service import reserve_port
from rrfp_jax.cluster.host import Unreachable
from rrfp_jax.cluster.launcher import launch
from rrfp_jax.exit_codes import INTERRUPTED, PREEMPTED, START_FAILED, TASK_FAILED


@pytest.mark.parametrize("port_is_given", [False, True])
def test_a_port_is_kept_for_the_coordination_service_and_for_nobody_else(*, port_is_given: bool):
    given = 0
    if port_is_given:
        with socket.create_server(("127.0.0.1", 0)) as server:
            given = server.getsockname()[1]
    with reserve_port("127.0.0.1", given) as kept:
        port = kept.getsockname()[1]
        assert given in (0, port)
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: Address already in use; end"
        ):
            reserve_port("127.0.0.1", port)
        with socket.socket() as asking:
            assert asking.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
        with socket.socket() as service:  # as gRPC binds
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.bind(("127.0.0.1", port))
            service.listen()
            for _ in range(8):
                socket.create_connection(("127.0.0.1", port), timeout=5.0).close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, PREEMPTED)])
def test_a_launcher_that_is_told_to_stop_while_it_waits_for_the_head_says_by_whom(number: int, code: int):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        head = Address(host="127.0.0.1", port=silent.getsockname()[1])
        settings = LaunchSettings(command=("m",), num_processes=1, num_nodes=2, node_rank=1, head=head)
        output = Output(io.BytesIO(), told := io.BytesIO(), prefix="auto")
        asking = threading.Timer(0.3, os.kill, (os.getpid(), number))
        asking.start()
        assert launch(settings, os.environ, output, shared=RunKey.generate()) == code
        asking.join()
    assert b"[launcher] error: told to stop before the run had begun\n" in told.getvalue()


def test_a_heads_name_that_is_gone_after_it_was_reached_ends_the_attempt_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    def is_gone(_: LaunchSettings) -> None:
        raise Unreachable("the head node0 is unknown")

    monkeypatch.setattr(_head, "listens_on", is_gone)
    key, told = RunKey.generate(), io.BytesIO()
    with RendezvousServer(2, key) as server:
        head = Address.parse(server.address.removeprefix("tcp://"))
        settings = LaunchSettings(command=("m",), num_processes=1, num_nodes=2, node_rank=1, head=head)
        code = launch(settings, os.environ, Output(io.BytesIO(), told, prefix="auto"), shared=key)
    assert code == START_FAILED
    assert b"[launcher] error: the head node0 is unknown\n" in told.getvalue()


def test_a_guardian_that_is_stopped_keeps_no_launcher_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child_processes, "_GUARDIAN_S", 0.2)
    guardian = Guardian()
    os.kill(guardian._process.pid, signal.SIGSTOP)
    guardian.close()


@pytest.mark.parametrize(("lasted_s", "paused_s"), [(0.0, 1.0), (0.7, 0.3), (9.0, 0.0)])
def test_only_a_run_that_fails_at_once_is_not_started_again_at_once(
    lasted_s: float, paused_s: float, monkeypatch: pytest.MonkeyPatch
):
    now_s, paused = 100.0, 0.0

    def fail(_: launcher._Attempt) -> int:
        nonlocal now_s
        now_s += lasted_s
        return TASK_FAILED

    def pause(_: LauncherEvents, timeout_s: float) -> None:
        nonlocal now_s, paused
        now_s, paused = now_s + timeout_s, paused + timeout_s

    monkeypatch.setattr(launcher._Attempt, "run", fail)
    monkeypatch.setattr(LauncherEvents, "next", pause)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now_s))
    settings = LaunchSettings(command=("m",), num_processes=1, max_restarts=1)
    assert launch(settings, os.environ, Output(io.BytesIO(), io.BytesIO(), prefix="auto")) == TASK_FAILED
    assert paused == pytest.approx(paused_s)
