"""Run, and run again: the attempts of a launcher, or the supervision of ranks that somebody else starts."""

import os
import time
from collections.abc import Mapping
from datetime import datetime
from queue import Empty, SimpleQueue

from rrfp_jax.runtime.cluster.attempt import Attempt
from rrfp_jax.runtime.cluster.children import Guardian
from rrfp_jax.runtime.cluster.endings import Ending, Endings
from rrfp_jax.runtime.cluster.events import Event, RankEndedElsewhere, ServiceEnded, Signalled
from rrfp_jax.runtime.cluster.head import HeadFailed, HostedHead
from rrfp_jax.runtime.cluster.membership import COORDINATOR, NUM_RANKS, RENDEZVOUS, STARTED
from rrfp_jax.runtime.cluster.output import Output
from rrfp_jax.runtime.cluster.settings import LaunchSettings, rank_environment
from rrfp_jax.runtime.cluster.signals import STOPPING, SignalInbox
from rrfp_jax.runtime.exit_codes import BAD_INPUT, DONE, INTERRUPTED, SIGNALLED, START_FAILED
from rrfp_jax.runtime.network import RunKey

_PAUSE_S = 1.0
"""Before a restart, so that one that fails at once does not spin."""
_LOOK_S = 0.5
_FAREWELL_S = 2.0
"""How long a failed rendezvous goes on to tell its verdict to ranks that come late."""


def shared_key(settings: LaunchSettings, environ: Mapping[str, str]) -> RunKey | None:
    """The key that other hosts know too; None where nobody else needs it, and each attempt makes its own.

    Raises:
        ValueError: where one is needed and none is given.
    """
    return RunKey.from_environment(environ) if settings.shares_key else None


def launch(
    settings: LaunchSettings, environ: Mapping[str, str], output: Output, *, shared: RunKey | None = None
) -> int:
    """Start this node's ranks, watch them until they have ended, restart them where that may help.

    Must run on the main thread; returns the exit code of the last attempt.
    """
    environment = {
        **rank_environment(environ, settings.threads),
        STARTED: f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}",
    }
    guardian = Guardian()
    try:
        with SignalInbox() as inbox:
            if settings.supervises:
                assert shared is not None
                return _supervise(
                    settings, shared, environment=environment, inbox=inbox, output=output, guardian=guardian
                )
            for number in range(settings.max_restarts + 1):
                attempt = Attempt(
                    settings,
                    number,
                    _key_of(shared, number),
                    environment=environment,
                    inbox=inbox,
                    output=output,
                    guardian=guardian,
                )
                code = attempt.run()
                if number == settings.max_restarts or not _may_restart(code) or _is_stopped(inbox, output, code):
                    break
                output.say(f"restart {number + 1} of at most {settings.max_restarts}")
            return code
    finally:
        guardian.close()


def _key_of(shared: RunKey | None, number: int) -> RunKey:
    """A fresh key for each attempt, so that a process left over from an earlier one cannot take part."""
    if shared is None:
        return RunKey.generate()
    return RunKey(shared.mac_key(f"attempt {number}")) if number else shared


def _may_restart(code: int) -> bool:
    return code not in (DONE, BAD_INPUT, INTERRUPTED)


def _is_stopped(inbox: SignalInbox, output: Output, code: int) -> bool:
    """Whether somebody asked the launcher to stop, also while it waits here to restart."""
    until_s = time.monotonic() + _PAUSE_S
    inbox.queue = SimpleQueue()
    while inbox.stopped_by is None and (left_s := until_s - time.monotonic()) > 0:
        try:
            inbox.queue.get(timeout=left_s)
        except Empty:
            continue
    if inbox.stopped_by is not None:
        output.say(f"not restarted after code {code}, since the launcher was told to stop")
    return inbox.stopped_by is not None


def _supervise(
    settings: LaunchSettings,
    key: RunKey,
    *,
    environment: Mapping[str, str],
    inbox: SignalInbox,
    output: Output,
    guardian: Guardian,
) -> int:
    """Host the head until all ranks are known to have ended, or a signal says that they have."""
    events: SimpleQueue[Event] = SimpleQueue()
    inbox.queue = events
    endings = Endings(range(settings.num_ranks))
    started_s = time.monotonic()
    try:
        head = HostedHead(
            settings,
            key,
            environment=environment,
            guardian=guardian,
            output=output,
            on_exit=lambda rank, code: events.put(RankEndedElsewhere(rank, code)),
            on_service_end=lambda code: events.put(ServiceEnded(code)),
        )
    except HeadFailed as error:
        output.say(f"error: {error}")
        return START_FAILED
    output.say(
        f"give every rank {RENDEZVOUS}={head.rendezvous} {COORDINATOR}={head.coordinator} {NUM_RANKS}="
        f"{settings.num_ranks}, its RRFP_RANK (or RRFP_DETECT=1), and the run key"
    )
    try:
        while endings.missing():
            try:
                event = events.get(timeout=_LOOK_S)
            except Empty:
                if (failure := head.failure()) is not None:
                    output.say(failure)
                    time.sleep(_FAREWELL_S)
                    return START_FAILED
                continue
            match event:
                case Signalled(number) if number in STOPPING:
                    return DONE
                case ServiceEnded(code):
                    output.say(f"the coordination service ended with code {code}: JAX now aborts all ranks")
                    return code if code else SIGNALLED
                case RankEndedElsewhere(rank, code):
                    endings.note(Ending(rank=rank, code=code, at_s=time.monotonic() - started_s))
    finally:
        head.close()
        output.drain(_FAREWELL_S)
    for line in endings.summary():
        output.say(line)
    return endings.code()
