"""Which signals a launcher takes for requests, and how spare processes get their places."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from rrfp_jax.cluster.child_processes import Child, Guardian, LauncherEvents
from tests.multiprocess.launching import eventually


@pytest.fixture
def hang_up_again():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_again")
@pytest.mark.parametrize(
    ("before", "event"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, None)], ids=["plain", "nohup"]
)
def test_a_terminal_that_hangs_up_ends_no_run_under_nohup(before: signal.Handlers, event: signal.Signals | None):
    signal.signal(signal.SIGHUP, before)
    with LauncherEvents() as events:
        os.kill(os.getpid(), signal.SIGHUP)
        assert events.next(0.0) == event
        assert (events.stopped_by is None) == (event is None)
    assert signal.getsignal(signal.SIGHUP) == before


@contextmanager
def spare_process(program: str) -> Iterator[tuple[Child, Callable[[], bool], list[int]]]:
    """A spare process that runs a program, the function that gives it a place, and the codes it has ended with."""
    codes: list[int] = []
    with closing(Guardian()) as guardian:
        child = Child(
            [sys.executable, "-c", program],
            dict(os.environ),
            guardian,
            lambda code, at_s: codes.append(-1),
            stdin=subprocess.PIPE,
        )
        yield child, lambda: child.take_place({"PLACE": "12"}, lambda code, at_s: codes.append(code)), codes
        child.discard()


def test_a_spare_process_is_told_its_place() -> None:
    program = "import json, sys; sys.exit(int(json.load(sys.stdin)['PLACE']))"
    with spare_process(program) as (child, take_place, codes):
        assert take_place()
        assert child.join(10.0)
        assert codes == [12]


def test_a_spare_process_that_has_ended_takes_no_place() -> None:
    with spare_process("") as (child, take_place, codes):
        assert child.join(10.0)
        assert not take_place()
        assert codes == [-1]


def test_a_spare_process_that_is_stopped_takes_no_place() -> None:
    with spare_process("import time; time.sleep(600)") as (child, take_place, codes):
        child.kill(signal.SIGSTOP)
        assert eventually(child.is_stopped)
        assert not take_place()
        child.discard()
        assert child.join(0.0)
        assert child.stdin is not None
        assert child.stdin.closed
        assert child.stdout.closed
        assert codes == [-1]
