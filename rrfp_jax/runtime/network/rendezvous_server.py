"""Where the ranks of a run meet before ``jax.distributed`` starts; hosted by the launcher or a supervisor.

``jax.distributed.initialize`` aborts the process when a rank is missing. So all ranks come here first: within a
deadline either everyone learns everyone's address, or everyone learns who is missing and which settings differ. The
server stays afterwards: supervisors of other hosts tell it how their ranks ended, and learn how others did.
"""

import logging
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq

from rrfp_jax.runtime.network.gate import Gate
from rrfp_jax.runtime.network.keys import RunKey
from rrfp_jax.runtime.network.plain import MAX_HEADER_BYTES, MalformedMessage, pack, unpack
from rrfp_jax.runtime.network.roll_call import Hello, Member, RollCall, parse_exit
from rrfp_jax.runtime.network.sockets import LOOPBACK, QuietLog, bind, connection_events, new_socket, serve_as, watch
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
SERVER_ROLE, MEMBER_ROLE = "rendezvous", "member"
MAX_ANSWER_BYTES = 64 << 20
"""An answer names all members of the run."""
_LINGER_MS = 1000
_STOP_TIMEOUT_S = 5.0
_POLL_MS = 250


class RendezvousFailed(RuntimeError):
    """The ranks did not come together; the text says who is missing and what differs."""


class RendezvousServer:
    """Collects the hellos of ``num_ranks`` ranks in a thread of its own; use it as a context manager, or close it.

    Args:
        deadline_s: from now, for all ranks to come.
        interface, port: where to listen; by default on loopback, on a free port.
        on_exit: called on the server's thread with the rank and exit code of each process that is reported to end.
    """

    def __init__(
        self,
        num_ranks: int,
        key: RunKey,
        *,
        deadline_s: float = 60.0,
        interface: str = LOOPBACK,
        port: int | None = None,
        on_exit: Callable[[int, int], None] | None = None,
    ) -> None:
        if num_ranks < 1 or deadline_s <= 0:
            raise ValueError(f"num_ranks {num_ranks} and deadline_s {deadline_s} must be positive")
        self._roll = RollCall(num_ranks)
        self._deadline_s, self._ends_s = deadline_s, time.monotonic() + deadline_s
        self._on_exit = on_exit
        self._context = zmq.Context()
        self._gate = Gate(self._context, {key.pair(MEMBER_ROLE).public: MEMBER_ROLE})
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._monitor = watch(self._socket)
        self._wake_read, self._wake_write = sockets.socketpair()
        try:
            self._socket.maxmsgsize = MAX_HEADER_BYTES
            serve_as(self._socket, key.pair(SERVER_ROLE))
            self.address = bind(self._socket, interface, port)
        except ValueError:
            self._free()
            raise
        self._routes: dict[bytes, int] = {}
        self._supervisors: set[bytes] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._decided = threading.Event()
        self._strangers = QuietLog(_LOG)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="rrfp-rendezvous", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> tuple[Member, ...]:
        """The members, ascending by rank, once all have come.

        Raises:
            RendezvousFailed: where they did not.
            TimeoutError: after ``timeout_s`` without a verdict.
        """
        if not wait_for(self._decided, timeout_s):
            raise TimeoutError(f"the rendezvous has no verdict after {timeout_s} s")
        if self._roll.members is None:
            raise RendezvousFailed(self._roll.failure)
        return self._roll.members

    def exited(self, rank: int, code: int) -> None:
        """A process that this host's supervisor started has ended."""
        parse_exit({"rank": rank, "code": code}, self._roll.num_ranks)
        self._command(lambda: self._note_exit(rank, code))

    def exits(self) -> dict[int, int]:
        """The exit codes known so far, by rank."""
        return dict(self._roll.exits)

    def close(self) -> None:
        """End the thread and free the port; ranks that still wait are told that the launcher has ended."""
        if self._thread.is_alive():
            self._command(self._stop)
            self._thread.join(_STOP_TIMEOUT_S)

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(OSError):  # the thread has ended
            self._wake_write.send(b"\0")

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._gate.socket, self._socket, self._monitor):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        try:
            while self._running:
                poller.poll(_POLL_MS)
                self._gate.answer()
                self._obey()
                self._receive()
                for event in connection_events(self._monitor):
                    if event.failed:
                        self._strangers.warn("a connection to the rendezvous was dropped: %s", event.failed)
                if time.monotonic() > self._ends_s:
                    self._roll.expire(self._deadline_s)
                self._announce()
        except Exception as error:
            _LOG.exception("the rendezvous failed")
            self._roll.failure = self._roll.failure or f"the rendezvous itself failed: {error!r}"
        finally:
            self._roll.give_up("the launcher has ended the run")
            self._announce()
            self._free()

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096, sockets.MSG_DONTWAIT)
        while self._commands:
            self._commands.popleft()()

    def _receive(self) -> None:
        while True:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"{len(frames)} frames instead of one")
                self._handle(route, unpack(frames[0]))
            except MalformedMessage as error:
                self._strangers.warn("a message to the rendezvous was dropped: %s", error)

    def _handle(self, route: bytes, said: Any) -> None:
        match said:
            case {"kind": "hello", "hello": data}:
                self._greet(route, Hello.from_dict(data))
            case {"kind": "supervise"}:
                self._supervisors.add(route)
                for rank, code in self._roll.exits.items():
                    self._reply(route, {"kind": "exited", "rank": rank, "code": code})
            case {"kind": "exited"}:
                self._note_exit(*parse_exit(said, self._roll.num_ranks))
                self._reply(route, {"kind": "noted"})
            case _:
                raise MalformedMessage(f"{said!r:.80} is nothing that the rendezvous answers")

    def _greet(self, route: bytes, hello: Hello) -> None:
        was_decided = self._roll.is_decided
        if refusal := self._roll.admit(hello):
            _LOG.warning("refused: %s", refusal)
            self._reply(route, {"kind": "failed", "text": refusal})
            return
        self._routes[route] = hello.member.rank
        if was_decided:
            self._reply(route, self._verdict())
        else:
            self._reply(route, {"kind": "waiting", "remaining_s": max(0.0, self._ends_s - time.monotonic())})

    def _announce(self) -> None:
        if self._roll.is_decided and not self._decided.is_set():
            for route in self._routes:
                self._reply(route, self._verdict())
            self._decided.set()

    def _verdict(self) -> dict[str, Any]:
        if self._roll.members is None:
            return {"kind": "failed", "text": self._roll.failure}
        return {"kind": "complete", "members": [member.as_dict() for member in self._roll.members]}

    def _note_exit(self, rank: int, code: int) -> None:
        if rank in self._roll.exits:
            return
        self._roll.exited(rank, code)
        for supervisor in self._supervisors:
            self._reply(supervisor, {"kind": "exited", "rank": rank, "code": code})
        if self._on_exit is not None:
            self._on_exit(rank, code)

    def _reply(self, route: bytes, said: dict[str, Any]) -> None:
        with suppress(zmq.ZMQError):  # it has gone meanwhile
            self._socket.send_multipart([route, pack(said, MAX_ANSWER_BYTES)], zmq.NOBLOCK)

    def _stop(self) -> None:
        self._running = False

    def _free(self) -> None:
        self._monitor.close()
        self._socket.close(linger=_LINGER_MS)
        self._gate.close()
        self._wake_read.close()
        self._wake_write.close()
        self._context.term()
