"""The head of a run: its rendezvous and its coordination service, hosted here or reached from another node."""

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle

from rrfp_jax.cluster import LauncherLink, RendezvousServer, RunKey
from rrfp_jax.cluster.child_processes import ASKING, Child, Guardian, LauncherEvents, Output
from rrfp_jax.cluster.child_script import python_module
from rrfp_jax.cluster.config import LOOPBACK, Address, LaunchSettings
from rrfp_jax.cluster.coordination_service import SERVICE_SECURITY, reserve_port, service_security
from rrfp_jax.cluster.host import listens_on

_STOP_TIMEOUT_S = 5.0
_MOMENT_S = 0.02
_LAST_CALL_S = 20.0
"""Seconds for which a restart waits for nodes that are not there, where it may do without them."""

TOLD_TO_STOP = "told to stop before the run had begun"


class HeadFailed(RuntimeError):
    """The rendezvous could not be started or reached, or the coordination service has no port."""


@dataclass(frozen=True, kw_only=True)
class LauncherParts:
    """The parts of a launcher that serve all of its attempts."""

    settings: LaunchSettings
    key_of: Callable[[int], RunKey]
    """Returns the run key of an attempt."""
    environment: Mapping[str, str]
    """Environment of every rank, without its place in the run and the key."""
    guardian: Guardian
    events: LauncherEvents
    output: Output
    spares: dict[int, Child] = field(default_factory=dict)
    """Spare processes, each for one place among this node's ranks. Ones that have ended stay until they are needed."""


@dataclass(frozen=True, kw_only=True)
class RunHead:
    """The place where a run meets, as one launcher uses it."""

    rendezvous: str
    coordinator: str
    interface: str | None
    """Interface that this node's ranks listen on; None: loopback."""
    key: RunKey
    board: RendezvousServer | LauncherLink
    """Takes the reports of how ranks end, and tells how those of other nodes did."""
    service: "Service | None" = None
    """JAX's coordination service, on the node that hosts the head."""

    def close(self) -> None:
        """Frees sockets and processes, after the ranks have ended: JAX aborts ranks that lose the service."""
        self.board.close()
        if self.service is not None:
            self.service.close()


class Service:
    """JAX's coordination service, a process that runs from :meth:`start` on; its port is kept from the beginning.

    Raises ValueError where the port (0: any that is free) is taken. ``ended`` is called as ``on_end`` of a child.
    """

    def __init__(
        self, launcher: LauncherParts, key: RunKey, host: str, port: int, ended: Callable[[int, float], None]
    ) -> None:
        self._launcher, self._key, self._ended = launcher, key, ended
        self._reserved = reserve_port(host, port)
        self._address = Address(host=host, port=self._reserved.getsockname()[1])
        self.address = str(self._address)
        self._child: Child | None = None

    def start(self, num_ranks: int) -> None:
        """Starts the process, unless it was started before; on the main thread."""
        if self._child is not None:
            return
        address = self._address
        module = "rrfp_jax.cluster.coordination_service"
        self._child = Child(
            python_module(module, address.host, str(address.port), str(num_ranks)),
            {**self._launcher.environment, **self._key.environment()},
            self._launcher.guardian,
            self._ended,
            holds=ASKING,  # SLURM sends them to all processes of a step, and ranks that save need this one
            stdin=subprocess.PIPE,
        )
        self._launcher.output.follow("coordination", self._child.stdout, self._child.stderr, is_main=False)

    def close(self) -> None:
        """Ends the process and frees the port."""
        if self._child is not None:
            assert self._child.stdin is not None
            with suppress(BrokenPipeError):
                self._child.stdin.close()
            if not self._child.join(_STOP_TIMEOUT_S):
                self._child.kill()
                self._child.join(_STOP_TIMEOUT_S)
        self._reserved.close()


def host_head(launcher: LauncherParts, attempt: int) -> RunHead:
    """Starts the head on this node. Raises HeadFailed."""
    settings, place, key = launcher.settings, launcher.settings.head, launcher.key_of(attempt)
    interface = _interface(settings)
    # The rendezvous first: its address tells on which one of this host's the service listens too.
    try:
        server = RendezvousServer(
            settings.num_ranks,
            key,
            deadline_s=settings.start_deadline_s,
            node_counts=settings.node_counts,
            roll_s=min(_LAST_CALL_S, settings.start_deadline_s) if attempt else settings.start_deadline_s,
            interface=interface or LOOPBACK,
            port=None if place is None else place.port,
            on_status=launcher.events.put,
            notice=launcher.output.say,
            expected={SERVICE_SECURITY: service_security()},
        )
    except ValueError as error:
        raise HeadFailed(f"the rendezvous {error}") from error
    host = server.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        service = Service(launcher, key, host, 0 if place is None else place.port + 1, server.service_ended)
    except ValueError as error:
        server.close()
        raise HeadFailed(str(error)) from error
    return RunHead(
        rendezvous=server.address,
        coordinator=service.address,
        interface=interface,
        key=key,
        board=server,
        service=service,
    )


def join_head(launcher: LauncherParts, attempt: int) -> tuple[RunHead, int]:
    """Reaches the head on node 0. Returns it with the number of the attempt that it serves.

    Another attempt than this one is found only by a launcher that was itself started again, which begins at 0. Raises
    HeadFailed where the head does not answer before the deadline, or not to this key.
    """
    settings, place, events = launcher.settings, launcher.settings.head, launcher.events
    assert place is not None
    until_s, where = time.monotonic() + settings.start_deadline_s, f"tcp://{place}"
    numbers = (attempt,) if attempt else tuple(range(settings.max_restarts + 1))
    link: LauncherLink | None = None
    try:
        for number in cycle(numbers):
            key = launcher.key_of(number)
            link = LauncherLink(
                where,
                key,
                settings.node_rank,
                is_sure=not settings.max_restarts,
                on_status=events.put,
                notice=launcher.output.say,
            )
            # Accepted means that the head has answered to this attempt's key, so it is not that of an earlier attempt,
            # which may still be there after a restart.
            while not link.is_accepted and not (len(numbers) > 1 and link.is_refused):
                if events.stopped_by is not None:
                    raise HeadFailed(TOLD_TO_STOP)
                if time.monotonic() > until_s:
                    late = f"cannot be joined after {settings.start_deadline_s:g} s: {link.why_not()}"
                    raise HeadFailed(f"the head at {where} {late}")
                time.sleep(_MOMENT_S)
            if link.is_accepted:
                break
            link.close()
        interface, coordinator = _interface(settings), str(Address(host=place.host, port=place.port + 1))
    except HeadFailed:
        if link is not None:
            link.close()
        raise
    assert link is not None
    return RunHead(rendezvous=where, coordinator=coordinator, interface=interface, key=key, board=link), number


def _interface(settings: LaunchSettings) -> str | None:
    # Looked up for each attempt: before a restart, names may lead elsewhere, or nowhere.
    try:
        return listens_on(settings)
    except ValueError as error:
        raise HeadFailed(str(error)) from error
