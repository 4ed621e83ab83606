"""The head's start, and how soon a request to stop ends it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from rrfp_jax.launch.children import Child, Guardian
from rrfp_jax.launch.head import HeadFailed, _ready_port
from rrfp_jax.launch.launcher_events import EventQueue


def test_a_request_to_stop_ends_the_wait_for_the_coordination_service():
    ended: SimpleQueue[int] = SimpleQueue()
    with closing(Guardian()) as guardian, EventQueue() as events:
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
        child.close_stdin()
