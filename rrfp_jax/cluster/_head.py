"""The head of a run: its rendezvous and its coordination service, hosted here or reached from another node."""

import select
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rrfp_jax.cluster import LauncherLink, RendezvousServer, RunKey
from rrfp_jax.cluster.child_processes import ASKING, Child, Guardian, LauncherEvents, Output
from rrfp_jax.cluster.child_script import python_module
from rrfp_jax.cluster.config import LOOPBACK, Address, LaunchSettings
from rrfp_jax.cluster.coordination_service import SERVICE_SECURITY, service_security
from rrfp_jax.cluster.host import listens_on

_SERVICE = "coordination"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_MOMENT_S = 0.02


class HeadFailed(RuntimeError):
    """The rendezvous or the coordination service could not be started or reached."""


@dataclass(frozen=True, kw_only=True)
class LauncherParts:
    """The parts of a launcher that serve all of its attempts."""

    settings: LaunchSettings
    environment: Mapping[str, str]
    """Environment of every rank, without its place in the run and the key."""
    guardian: Guardian
    events: LauncherEvents
    output: Output


@dataclass(frozen=True, kw_only=True)
class RunHead:
    """The place where a run meets, as one launcher uses it."""

    rendezvous: str
    coordinator: str
    interface: str | None
    """Interface that this node's ranks listen on; None: loopback."""
    board: RendezvousServer | LauncherLink
    """Takes the reports of how ranks end, and tells how those of other nodes did."""
    service: Child | None = None

    def close(self) -> None:
        """Frees sockets and processes, after the ranks have ended: JAX aborts ranks that lose the service."""
        self.board.close()
        if self.service is not None:
            assert self.service.stdin is not None
            with suppress(BrokenPipeError):
                self.service.stdin.close()
            if not self.service.join(_STOP_TIMEOUT_S):
                self.service.kill()
                self.service.join(_STOP_TIMEOUT_S)


def host_head(launcher: LauncherParts, key: RunKey) -> RunHead:
    """Starts the head on this node. Raises HeadFailed."""
    settings, place = launcher.settings, launcher.settings.head
    interface = _interface(settings)
    # The rendezvous first: its address tells on which one of this host's the service listens too.
    try:
        server = RendezvousServer(
            settings.num_ranks,
            key,
            deadline_s=settings.start_deadline_s,
            interface=interface or LOOPBACK,
            port=None if place is None else place.port,
            on_status=launcher.events.put,
            notice=launcher.output.say,
            expected={SERVICE_SECURITY: service_security()},
        )
    except ValueError as error:
        raise HeadFailed(f"the rendezvous {error}") from error
    host = server.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    port = 0 if place is None else place.port + 1
    module = "rrfp_jax.cluster.coordination_service"
    service = Child(
        python_module(module, host, str(port), str(settings.num_ranks)),
        {**launcher.environment, **key.environment()},
        launcher.guardian,
        server.service_ended,
        holds=ASKING,  # SLURM sends them to all processes of a step, and ranks that save need this one
        stdin=subprocess.PIPE,
    )
    try:
        port = _ready_port(service, launcher.events)
    except HeadFailed:
        service.kill()
        RunHead(rendezvous="", coordinator="", interface=None, board=server, service=service).close()
        raise
    launcher.output.follow(_SERVICE, service.stdout, service.stderr, is_main=False)
    coordinator = str(Address(host=host, port=port))
    return RunHead(
        rendezvous=server.address, coordinator=coordinator, interface=interface, board=server, service=service
    )


def join_head(launcher: LauncherParts, key: RunKey, attempt: int) -> RunHead:
    """Reaches the head on node 0: after a restart, that of the attempt before may still be there.

    Raises HeadFailed where it does not answer before the deadline, or not to this key.
    """
    settings, place, events = launcher.settings, launcher.settings.head, launcher.events
    assert place is not None
    ranks, say = tuple(settings.local_ranks()), launcher.output.say
    link = LauncherLink(f"tcp://{place}", key, ranks, attempt=attempt, on_status=events.put, notice=say)
    try:
        # Accepted means that the head has answered to this attempt's key, so it is not that of an earlier attempt.
        if not _until(lambda: link.is_accepted, settings.start_deadline_s, events):
            late = f"cannot be joined after {settings.start_deadline_s:g} s: {link.why_not()}"
            raise HeadFailed(f"the head at tcp://{place} {late}")
        interface = _interface(settings)
    except HeadFailed:
        link.close()
        raise
    coordinator = str(Address(host=place.host, port=place.port + 1))
    return RunHead(rendezvous=f"tcp://{place}", coordinator=coordinator, interface=interface, board=link)


def _interface(settings: LaunchSettings) -> str | None:
    # Looked up for each attempt: before a restart, names may lead elsewhere, or nowhere.
    try:
        return listens_on(settings)
    except ValueError as error:
        raise HeadFailed(str(error)) from error


def _ready_port(service: Child, events: LauncherEvents) -> int:
    poll = select.poll()
    poll.register(service.stdout, select.POLLIN)
    # Polled, not read: a read would keep this thread from noticing a request to stop.
    is_ready = _until(lambda: bool(poll.poll(0)), _READY_TIMEOUT_S, events)
    words = service.stdout.readline().split() if is_ready else []
    if len(words) == 2 and words[0] == b"ready":
        return int(words[1])
    service.kill()
    text = service.stderr.read().decode(errors="replace").strip()
    raise HeadFailed(text or f"the coordination service was not ready after {_READY_TIMEOUT_S:g} s")


def _until(condition: Callable[[], bool], timeout_s: float, events: LauncherEvents) -> bool:
    """Returns whether the condition holds in time. Raises HeadFailed where somebody asks the launcher to stop."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if events.stopped_by is not None:
            raise HeadFailed("told to stop before the run had begun")
        if time.monotonic() > until_s:
            return False
        time.sleep(_MOMENT_S)
    return True
