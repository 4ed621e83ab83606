"""Run, and run again: the attempts of a launcher, or the supervision of ranks that somebody else starts."""

import os
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime

from rrfp_jax.exit_codes import BAD_INPUT, DONE, INTERRUPTED, NOT_FINITE
from rrfp_jax.launch.attempt import Attempt
from rrfp_jax.launch.children import Guardian
from rrfp_jax.launch.head import Launcher
from rrfp_jax.launch.launcher_events import EventQueue
from rrfp_jax.launch.output import Output
from rrfp_jax.launch.settings import LaunchSettings, rank_environment
from rrfp_jax.network import RunKey
from rrfp_jax.network.membership import STARTED

_PAUSE_S = 1.0
"""Before a restart, so that one that fails at once does not spin."""
_LOOK_S = 0.25


def launch(
    settings: LaunchSettings, environ: Mapping[str, str], output: Output, *, shared: RunKey | None = None
) -> int:
    """Start this node's ranks, watch them until they have ended, restart them where that may help.

    Must run on the main thread; returns the exit code of the last attempt. ``shared`` is the key that other hosts know
    too; None where nobody else needs it (``settings.shares_key``), and each attempt makes its own.
    """
    environment = {
        **rank_environment(environ, settings.threads),
        STARTED: f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}",
    }
    with closing(Guardian()) as guardian, EventQueue() as events:
        launcher = Launcher(settings=settings, environment=environment, guardian=guardian, events=events, output=output)
        for number in range(settings.max_restarts + 1):
            code = Attempt(launcher, number, _key_of(shared, number)).run()
            may_restart = code not in (DONE, BAD_INPUT, NOT_FINITE, INTERRUPTED)  # these would end alike again
            if number == settings.max_restarts or not may_restart or _is_stopped(events, output, code):
                break
            output.say(f"restart {number + 1} of at most {settings.max_restarts}")
        return code


def _key_of(shared: RunKey | None, number: int) -> RunKey:
    """A fresh key for each attempt, so that a process left over from an earlier one cannot take part."""
    if shared is None:
        return RunKey.generate()
    return RunKey(shared.mac_key(f"attempt {number}")) if number else shared


def _is_stopped(events: EventQueue, output: Output, code: int) -> bool:
    """Whether somebody asked the launcher to stop, also while it waits here to restart."""
    until_s = time.monotonic() + _PAUSE_S
    while events.stopped_by is None and time.monotonic() < until_s:
        events.next(_LOOK_S)
    if events.stopped_by is not None:
        output.say(f"not restarted after code {code}, since the launcher was told to stop")
    return events.stopped_by is not None
