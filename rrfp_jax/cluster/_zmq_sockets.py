"""ZeroMQ sockets with the settings that all of ours share, and the events of their connections."""

import logging
import time
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from rrfp_jax.cluster.config import WILDCARDS
from rrfp_jax.cluster.keys import KeyPair

ZmqContext = zmq.Context[zmq.Socket[bytes]]
ZmqSocket = zmq.Socket[bytes]

_HANDSHAKE_MS = 10_000
"""Time within which a process that has connected must prove itself."""

_OUTCOMES = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED_EVENTS = _OUTCOMES | _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED


def rank_role(rank: int) -> str:
    """Returns the role under which a rank proves its key."""
    return f"rank {rank}"


def rank_of(role: str) -> int | None:
    """Returns the rank of a role that :func:`rank_role` made; None for any other text."""
    number = role.removeprefix("rank ")
    return int(number) if number.isdecimal() and rank_role(int(number)) == role else None


def new_socket(context: ZmqContext, kind: int) -> ZmqSocket:
    """Makes a socket without ZeroMQ's own limits on queues: messages in flight are counted in bytes elsewhere."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.handshake_ivl = _HANDSHAKE_MS
    return socket


def serve_as(socket: ZmqSocket, pair: KeyPair) -> None:
    """Makes a socket a CURVE server; its context needs a :class:`~rrfp_jax.cluster._admission.Gate`."""
    socket.curve_server = 1
    socket.curve_publickey, socket.curve_secretkey = pair


def connect_as(socket: ZmqSocket, pair: KeyPair, server_key: bytes) -> None:
    """Makes the next connections of a socket prove ``pair`` and accept only the holder of ``server_key``."""
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.curve_serverkey = server_key


def bind_socket(socket: ZmqSocket, interface: str, port: int | None = None) -> str:
    """Listens on an interface, by default on a free port. Returns the address to connect to.

    Args:
        interface: an address of this host or the name of a network interface (``eth0``).

    Raises:
        ValueError: for a wildcard, which is no address that peers could connect to, or where binding fails.
    """
    if interface in WILDCARDS:
        raise ValueError(f"the interface is '{interface}': name one that peers can reach, by its address or as 'eth0'")
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


def connect_socket(socket: ZmqSocket, address: str) -> None:
    """Connects to an address that :func:`bind_socket` returned.

    A name is looked up by IPv4 alone, since ZeroMQ tries one kind of address only.
    """
    if "[" in address:
        socket.ipv6 = 1
    socket.connect(address)


class ConnectionEvent(NamedTuple):
    """An event of a connection; ``address`` is the peer's where this side connected.

    ``failed`` is the reason of a failed handshake; ``interrupted`` says that ZeroMQ tries again.
    """

    address: str
    succeeded: bool = False
    disconnected: bool = False
    unreachable: bool = False
    failed: str | None = None
    interrupted: bool = False


def monitor_of(socket: ZmqSocket, events: int = WATCHED_EVENTS) -> ZmqSocket:
    """Begins to report events of a socket's connections. Another thread may read the returned socket."""
    monitor = socket.get_monitor_socket(events)
    monitor.linger = 0
    return monitor


def connection_events(monitor: ZmqSocket) -> list[ConnectionEvent]:
    """Returns the events that wait on a monitor."""
    events = []
    while monitor.poll(0):
        message = recv_monitor_message(monitor, zmq.NOBLOCK)
        kind = int(message["event"])
        events.append(
            ConnectionEvent(
                address=bytes(message["endpoint"]).decode(),
                succeeded=kind == zmq.EVENT_HANDSHAKE_SUCCEEDED,
                disconnected=kind == zmq.EVENT_DISCONNECTED,
                unreachable=kind == zmq.EVENT_CLOSED,
                failed=_why(kind, int(message["value"])) if kind & _FAILURES else None,
                interrupted=kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
        )
    return events


def _why(kind: int, value: int) -> str:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "its key is not of this run"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"it does not speak the protocol with this run's key (ZeroMQ event {value:#x})"
    return "it went away or was too slow during the handshake"


class QuietLog:
    """Logs warnings that a stranger could cause at will: one per ``interval_s``, and counts the others."""

    def __init__(self, logger: logging.Logger, interval_s: float = 5.0) -> None:
        self._logger, self._interval_s = logger, interval_s
        self._next_s = 0.0
        self._num_silent = 0

    def warn(self, text: str, *values: Any) -> None:
        """Writes the warning, or counts it for the next line."""
        now = time.monotonic()
        if now < self._next_s:
            self._num_silent += 1
            return
        more = f" ({self._num_silent} more since the last line)" if self._num_silent else ""
        self._next_s, self._num_silent = now + self._interval_s, 0
        self._logger.warning(text + more, *values)
