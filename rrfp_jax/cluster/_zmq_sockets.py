"""ZeroMQ sockets whose peers prove their roles: their settings, whom they admit, and the events of connections."""

import os
import socket as sockets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rrfp_jax.cluster.config import WILDCARDS
from rrfp_jax.cluster.host import unproven_allowed
from rrfp_jax.cluster.keys import KeyPair
from rrfp_jax.cluster.wire import QuietLog

ZmqContext = zmq.Context[zmq.Socket[bytes]]
ZmqSocket = zmq.Socket[bytes]

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
WATCHED_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED
_HANDSHAKE_MS = 10_000
"""Time within which a process that has connected must prove itself."""
_ADMISSION = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ asks about connections."""
_NUM_FRAMES, _VERSION = 7, b"1.0"


def rank_role(rank: int) -> str:
    return f"rank {rank}"


def new_socket(context: ZmqContext, kind: int) -> ZmqSocket:
    """Makes a socket without ZeroMQ's own limits on queues: messages in flight are counted in bytes elsewhere."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.handshake_ivl = _HANDSHAKE_MS
    return socket


def bind_socket(socket: ZmqSocket, pair: KeyPair, interface: str, port: int | None = None) -> str:
    """Listens on an interface as a CURVE server, by default on a free port. Returns the address to connect to.

    The socket's context needs a :class:`Gate`.

    Args:
        pair: the keys that this process proves.
        interface: an address of this host or the name of a network interface (``eth0``).

    Raises:
        ValueError: for a wildcard, which is no address that peers could connect to, or where binding fails.
    """
    if interface in WILDCARDS:
        raise ValueError(f"the interface is '{interface}': name one that peers can reach, by its address or as 'eth0'")
    socket.curve_server = 1
    socket.curve_publickey, socket.curve_secretkey = pair
    if ":" in interface:
        socket.ipv6 = 1
        interface = f"[{interface.strip('[]')}]"
    try:
        socket.bind(f"tcp://{interface}:{'*' if port is None else port}")
    except zmq.ZMQError as error:
        where = f"interface '{interface}'" + ("" if port is None else f", port {port}")
        # The remedies differ, and a taken port is what a user meets after a run that has not ended yet.
        is_taken = error.errno == zmq.EADDRINUSE
        remedy = (
            "end the run or program that has it, or give another port" if is_taken else "give an interface of this host"
        )
        raise ValueError(f"cannot listen on {where}: {error.strerror}; {remedy}") from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def connect_socket(socket: ZmqSocket, address: str, pair: KeyPair, server_key: bytes) -> None:
    """Connects to an address that :func:`bind_socket` returned, where only the holder of ``server_key`` is accepted.

    A name is looked up by IPv4 alone, since ZeroMQ tries one kind of address only.
    """
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.curve_serverkey = server_key
    if "[" in address:
        socket.ipv6 = 1
    socket.connect(address)


def monitor_of(socket: ZmqSocket, events: int = WATCHED_EVENTS) -> ZmqSocket:
    """Begins to report events of a socket's connections. Another thread may read the returned socket."""
    monitor = socket.get_monitor_socket(events)
    monitor.linger = 0
    return monitor


def connection_events(monitor: ZmqSocket) -> Iterator[dict[str, Any]]:
    """Yields the events that wait on a monitor: ``event``, ``value``, and ``endpoint``, the address as bytes."""
    while monitor.poll(0):
        yield dict(recv_monitor_message(monitor, zmq.NOBLOCK))


class Gate:
    """Admits the holders of known keys, by ZeroMQ's authentication protocol (RFC 27).

    ZeroMQ asks the gate about every connection to a CURVE server of its context, after the client has proved that it
    holds the secret half of the key it shows. Without a gate any key would do, so the gate is opened first, and its
    socket is closed last.

    Args:
        context: the context whose connections are judged.
        roles: the role of each admitted public key. ZeroMQ attaches it to every message as its ``User-Id``: the proven
            sender. (A routing identity proves nothing: clients choose it, and the gate is not told.)
        log: told of connections that are refused.
    """

    def __init__(self, context: ZmqContext, roles: Mapping[bytes, str], log: QuietLog | None = None) -> None:
        self._log = log
        self._roles = {key: role.encode() for key, role in roles.items()}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ADMISSION)

    def answer(self) -> None:
        """Judges the connections that wait; called when ``socket`` is readable."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            separator = frames.index(b"")
            route, request = frames[: separator + 1], frames[separator + 1 :]
            is_curve = len(request) == _NUM_FRAMES and request[0] == _VERSION and request[5] == b"CURVE"
            role = self._roles.get(z85.encode(request[6])) if is_curve else None
            if role is None and self._log is not None:
                where = request[3].decode(errors="replace") if len(request) > 3 else "somewhere"
                self._log.warn("a connection from %s was refused: its key is not of this run", where)
            status = [b"400", b"not of this run", b""] if role is None else [b"200", b"OK", role]
            self.socket.send_multipart([*route, _VERSION, request[1], *status, b""], zmq.NOBLOCK)


_Ends = tuple[str, int, int]
"""Host and port of the other end, and the port here. They differ for every connection, while descriptors come again."""


class UnprovenConnections:
    """Bounds the connections of listening ZeroMQ sockets whose other ends have proven nothing: the oldest is ended.

    ZeroMQ accepts every connection, and drops one that has not proven itself after the handshake's deadline. Until then
    each holds a descriptor, so a stranger could use up all descriptors of the process, and leave none for files and
    other connections. ZeroMQ tells the descriptor of a connection as it comes and as it goes, and the descriptor over
    which a message came. To end a connection, this class shuts it down, which ZeroMQ takes for the other end's doing.
    Any thread may call it.

    Args:
        num_ranks: the number of ranks of the run: so many may have to prove themselves at once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._most = unproven_allowed(num_ranks)
        self._lock = threading.Lock()
        self._present: dict[tuple[bytes, int], _Ends] = {}
        """The ends of present connections, by listener and descriptor: a listener may report that its connection has
        gone only after another listener has accepted one with the same descriptor."""
        self._since: dict[_Ends, int] = {}
        """The descriptors of connections that have proven nothing, the oldest first."""
        self._proven: set[_Ends] = set()
        """The ends that have proven themselves, perhaps before this object was told that they came."""
        # A second descriptor of a connection keeps others from getting its number meanwhile. It is reserved from the
        # start, since there may be no other left.
        self._idle = os.open(os.devnull, os.O_RDONLY)
        self._second = os.dup(self._idle)

    def heed(self, event: Mapping[str, Any]) -> str | None:
        """Adds a connection that a listener has accepted, or removes one that is closed, by its monitor's event.

        Returns the host of a connection that has come, or None if it is gone already.
        """
        descriptor, listener = int(event["value"]), event["endpoint"]
        with self._lock:
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if (gone := self._present.pop((listener, descriptor), None)) is not None:
                    self._since.pop(gone, None)
                    self._proven.discard(gone)
                return None
            ends = self._ends(descriptor)
            if ends is None or ends[2] != int(listener.rpartition(b":")[2]):  # closed, and another has its number
                return None
            self._present[listener, descriptor] = ends
            if ends not in self._proven:
                self._since[ends] = descriptor
                if len(self._since) > self._most:
                    oldest = next(iter(self._since))
                    self._ends(self._since.pop(oldest), to_shut=oldest)
            return ends[0]

    def has_proven(self, descriptor: int) -> None:
        """Marks a connection over which a message has come, so that its other end has the run's key."""
        with self._lock:
            ends = self._ends(descriptor)
            if ends is not None:
                self._since.pop(ends, None)
                self._proven.add(ends)

    def _ends(self, descriptor: int, *, to_shut: _Ends | None = None) -> _Ends | None:
        """Returns the ends of a connection, which is shut down if they are ``to_shut``; None if it does not exist."""
        with suppress(OSError):
            os.dup2(descriptor, self._second, inheritable=False)
            connection = sockets.socket(fileno=self._second)
            try:
                if connection.family not in (sockets.AF_INET, sockets.AF_INET6):
                    return None
                host, number, *_ = connection.getpeername()
                ends = (host, number, connection.getsockname()[1])
                if ends == to_shut:
                    connection.shutdown(sockets.SHUT_RDWR)
                return ends
            finally:
                connection.detach()
                os.dup2(self._idle, self._second, inheritable=False)
        return None

    def close(self) -> None:
        with self._lock:
            os.close(self._second)
            os.close(self._idle)
