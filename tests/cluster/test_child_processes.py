"""Which signals a launcher takes for requests."""

import os
import signal

import pytest

from rrfp_jax.cluster.child_processes import LauncherEvents


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
