"""Where a run meets: the rendezvous and the coordination service, hosted here or reached from another node."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from select import select
from typing import Protocol

import zmq

from rrfp_jax.runtime.cluster.children import Child, Guardian
from rrfp_jax.runtime.cluster.output import Output
from rrfp_jax.runtime.cluster.settings import Address, LaunchSettings
from rrfp_jax.runtime.network import ExitWatch, RendezvousFailed, RendezvousServer, RunKey, report_exit
from rrfp_jax.runtime.network.rendezvous_server import MEMBER_ROLE, SERVER_ROLE
from rrfp_jax.runtime.network.sockets import LOOPBACK, connect_as, connection_events, new_socket, watch

SERVICE = "coordination"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_TRY_S = 1.0
_REPORT_TIMEOUT_S = 5.0


class HeadFailed(RuntimeError):
    """The rendezvous or the coordination service could not be started or reached."""


class Head(Protocol):
    """What a launcher needs of the place where its run meets."""

    rendezvous: str
    coordinator: str

    def ended(self, rank: int, code: int) -> None:
        """Tell everyone how a rank of this node has ended; may take seconds, on the thread that calls."""

    def close(self) -> None:
        """Free sockets and processes; after the ranks have ended, since JAX aborts ranks that lose the service."""


class HostedHead:
    """On this node.

    Args:
        on_exit: told of the exits of other nodes' ranks.
        on_service_end: told the exit code of a coordination service that ended too early.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        key: RunKey,
        *,
        environment: Mapping[str, str],
        guardian: Guardian,
        output: Output,
        on_exit: Callable[[int, int], None],
        on_service_end: Callable[[int], None],
    ) -> None:
        self._on_service_end = on_service_end
        self._is_closing = False
        head = settings.head
        try:
            self._server = RendezvousServer(
                settings.num_ranks,
                key,
                deadline_s=settings.start_deadline_s,
                interface=settings.listens_on() or LOOPBACK,
                port=None if head is None else head.port,
                on_exit=on_exit,
            )
        except ValueError as error:
            raise HeadFailed(f"the rendezvous {error}") from error
        self.rendezvous = self._server.address
        host = self.rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        port = 0 if head is None else head.next_port().port
        command = [
            *(sys.executable, "-m", "rrfp_jax.runtime.cluster.coordination_process"),
            *(host, str(port), str(settings.num_ranks)),
        ]
        self._service = Child(
            command, environment, guardian, lambda code, _: self._service_ended(code), stdin=subprocess.PIPE
        )
        try:
            self.coordinator = str(Address(host=host, port=self._ready_port()))
        except HeadFailed:
            self.close()
            raise
        output.follow(SERVICE, self._service.stdout, self._service.stderr, is_main=False)

    def ended(self, rank: int, code: int) -> None:
        self._server.exited(rank, code)

    def failure(self) -> str | None:
        """The verdict of the rendezvous, where that is a failure."""
        try:
            self._server.wait(0)
        except RendezvousFailed as failed:
            return str(failed)
        except TimeoutError:
            pass
        return None

    def close(self) -> None:
        self._is_closing = True
        self._server.close()
        self._service.close_stdin()
        if not self._service.join(_STOP_TIMEOUT_S):
            self._service.kill()
            self._service.join(_STOP_TIMEOUT_S)

    def _ready_port(self) -> int:
        ready, _, _ = select([self._service.stdout], [], [], _READY_TIMEOUT_S)
        words = self._service.stdout.readline().split() if ready else []
        if len(words) == 2 and words[0] == b"ready":
            return int(words[1])
        self._service.kill()
        text = self._service.stderr.read().decode(errors="replace").strip()
        raise HeadFailed(text or f"the coordination service was not ready after {_READY_TIMEOUT_S:g} s")

    def _service_ended(self, code: int) -> None:
        if not self._is_closing:
            self._on_service_end(code)


class RemoteHead:
    """On node 0, seen from another.

    Raises:
        HeadFailed: where it does not answer before the deadline, or not to this key.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        key: RunKey,
        *,
        on_exit: Callable[[int, int], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        assert settings.head is not None
        self.rendezvous = f"tcp://{settings.head}"
        self.coordinator = str(settings.head.next_port())
        self._key = key
        _await_rendezvous(self.rendezvous, key, settings.start_deadline_s, is_stopped)
        self._watch = ExitWatch(self.rendezvous, key, on_exit)

    def ended(self, rank: int, code: int) -> None:
        with suppress(RendezvousFailed):  # node 0 has ended, and so will everything
            report_exit(self.rendezvous, rank, code, self._key, deadline_s=_REPORT_TIMEOUT_S)

    def close(self) -> None:
        self._watch.close()


def _await_rendezvous(address: str, key: RunKey, deadline_s: float, is_stopped: Callable[[], bool]) -> None:
    """Until the rendezvous accepts the key: after a restart, that of the attempt before may still be there."""
    until_s = time.monotonic() + deadline_s
    failure = "it does not answer"
    with zmq.Context() as context:
        while time.monotonic() < until_s and not is_stopped():
            with new_socket(context, zmq.DEALER) as socket, watch(socket) as monitor:
                connect_as(socket, key.pair(MEMBER_ROLE), key.pair(SERVER_ROLE).public)
                socket.connect(address)
                again_s = min(time.monotonic() + _TRY_S, until_s)
                while (left_s := again_s - time.monotonic()) > 0:
                    monitor.poll(round(left_s * 1000) + 1)
                    for event in connection_events(monitor):
                        if event.succeeded:
                            return
                        if event.failed:
                            failure = "it answers, but not to this node's run key: give the same to all nodes"
    if is_stopped():
        raise HeadFailed(f"told to stop before the head at {address} was there")
    raise HeadFailed(f"the head at {address} cannot be joined after {deadline_s:g} s: {failure}")
