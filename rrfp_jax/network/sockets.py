"""Sockets with the settings that all of ours share, and the events that ZeroMQ reports about their connections."""

import logging
import time
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from rrfp_jax.network.keys import KeyPair
from rrfp_jax.network.unproven import Unproven

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

LOOPBACK = "127.0.0.1"
_HANDSHAKE_MS = 10_000
"""Time within which a process that has connected must prove itself."""
WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})

_OUTCOMES = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED_EVENTS = _OUTCOMES | _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED


def rank_role(rank: int) -> str:
    """The role under which a rank proves its key."""
    return f"rank {rank}"


def new_socket(context: Context, kind: int) -> Socket:
    """A socket without ZeroMQ's own limits on queues: what is in flight is counted in bytes elsewhere."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.handshake_ivl = _HANDSHAKE_MS
    return socket


def serve_as(socket: Socket, pair: KeyPair) -> None:
    """Make a socket a CURVE server; its context needs a :class:`Gate`."""
    socket.curve_server = 1
    socket.curve_publickey, socket.curve_secretkey = pair


def connect_as(socket: Socket, pair: KeyPair, server_key: bytes) -> None:
    """Make the next connections of a socket prove ``pair`` and accept only the holder of ``server_key``."""
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.curve_serverkey = server_key


def bind(socket: Socket, interface: str, port: int | None = None) -> str:
    """Listen on an interface, by default on a free port, and return the address to connect to.

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
        is_taken = error.errno == zmq.EADDRINUSE
        remedy = (
            "end the run or program that has it, or give another port" if is_taken else "give an interface of this host"
        )
        raise ValueError(f"cannot listen on {where}: {error.strerror}; {remedy}") from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def connect(socket: Socket, address: str) -> None:
    """Connect to what :func:`bind` returned. Names go by IPv4, since ZeroMQ tries one kind of address only."""
    if "[" in address:
        socket.ipv6 = 1
    socket.connect(address)


class ConnectionEvent(NamedTuple):
    """What happened to a connection of a socket; ``address`` is the peer's where this side connected.

    ``failed`` says why a handshake failed; where it was ``interrupted``, ZeroMQ tries again.
    """

    address: str
    succeeded: bool = False
    disconnected: bool = False
    unreachable: bool = False
    failed: str | None = None
    interrupted: bool = False


def descriptor(socket: Socket) -> int:
    """The file descriptor that wakes when the state of the socket may have changed."""
    number = socket.fd
    assert isinstance(number, int)
    return number


def watch(socket: Socket) -> Socket:
    """Begin to report a socket's connections; the returned socket may be read by another thread."""
    monitor = socket.get_monitor_socket(WATCHED_EVENTS)
    monitor.linger = 0
    return monitor


def watch_listener(socket: Socket) -> Socket:
    """Begin to report the connections that a socket accepts and those that end; the returned socket may be read by
    another thread."""
    monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    monitor.linger = 0
    return monitor


def heed_listener(monitor: Socket, unproven: Unproven) -> None:
    """Tell ``unproven`` of the events that wait on a listener's monitor."""
    while monitor.poll(0):
        message = recv_monitor_message(monitor, zmq.NOBLOCK)
        if message["event"] == zmq.EVENT_ACCEPTED:
            unproven.came(int(message["value"]), message["endpoint"])
        else:
            unproven.went(int(message["value"]), message["endpoint"])


def connection_events(monitor: Socket) -> list[ConnectionEvent]:
    """The events that wait on a monitor."""
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
    """Warnings that a stranger could cause at will: one in ``interval_s`` is written, the others are counted."""

    def __init__(self, logger: logging.Logger, interval_s: float = 5.0) -> None:
        self._logger, self._interval_s = logger, interval_s
        self._next_s = 0.0
        self._num_silent = 0

    def warn(self, text: str, *values: Any) -> None:
        now = time.monotonic()
        if now < self._next_s:
            self._num_silent += 1
            return
        more = f" ({self._num_silent} more since the last line)" if self._num_silent else ""
        self._next_s, self._num_silent = now + self._interval_s, 0
        self._logger.warning(text + more, *values)
