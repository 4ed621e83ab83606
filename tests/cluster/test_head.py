"""The head's start, and how soon a request to stop ends it."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from rrfp_jax.cluster import RendezvousServer, RunKey, _head, child_processes
from rrfp_jax.cluster._head import HeadFailed, _ready_port
from rrfp_jax.cluster.child_processes import Child, Guardian, LauncherEvents, Output
from rrfp_jax.cluster.config import Address, LaunchSettings
from rrfp_jax.cluster.host import Unreachable
from rrfp_jax.cluster.launcher import launch
from rrfp_jax.exit_codes import INTERRUPTED, PREEMPTED, START_FAILED


def test_a_request_to_stop_ends_the_wait_for_the_coordination_service():
    ended: SimpleQueue[int] = SimpleQueue()
    with closing(Guardian()) as guardian, LauncherEvents() as events:
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = Child(sleeper, os.environ, guardian, lambda code, _: ended.put(code), stdin=subprocess.PIPE)
        os.kill(os.getpid(), signal.SIGTERM)
        started_s = time.monotonic()
        with pytest.raises(HeadFailed, match="told to stop before the run had begun"):
            _ready_port(child, events)
        assert time.monotonic() - started_s < 0.5
        child.kill()
        assert ended.get(timeout=5.0) == 128 + signal.SIGKILL
        assert child.join(5.0)
        for pipe in (child.stdout, child.stderr):
            pipe.close()
        child.stdin.close()


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
