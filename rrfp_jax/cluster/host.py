"""This host as others see it: the address that they can reach, and how many files and connections a process may open.

The address is the one on the way to the place where the run meets. A host's own name often leads to loopback (Debian
writes ``127.0.1.1 NAME`` into ``/etc/hosts``). A process that listened there would wait for other hosts in vain, so
such a name is refused in a sentence, unless the user has named the interface to listen on.
"""

import ipaddress
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rrfp_jax.cluster.config import ARRAY_CONNECTIONS, INTERFACE, LaunchSettings

_PAUSE_S = 0.5
_MOST_FILES = 1 << 20
"""Limit on open files that is assumed where the system knows none."""
_SPARE_FILES = 64
"""Files that the run's program opens beside: devices, data, logs, checkpoints."""
_UNPROVEN = 256
"""Largest number of open connections that have proven nothing, if descriptors are plenty."""
FILES_OF_NETWORK = 30
"""Number of files for sockets and threads before anything is connected."""
FILES_FOR_MESSAGES = 4
"""Number of files for every rank with which messages are exchanged: two each for heartbeats and messages."""


class Unreachable(ValueError):
    """The head's name is unknown, out of reach, or leads to loopback; the text says what to give instead."""


def address_of(host: str, port: int, *, may_mislead: bool = True) -> str:
    """Returns the address that a name leads to on this host.

    Raises Unreachable where it is unknown, and unless it ``may_mislead`` where it leads to loopback.
    """
    with _in_reach(host, port):
        address = addresses_of(host)[0]
    if not may_mislead and _is_loopback(address) and not _is_loopback(host):
        raise Unreachable(
            f"the name '{host}' leads to {address} on this host, which no other host can reach: set "
            f"{INTERFACE} (or --interface) to this host's address or interface in the network of the run, such as ib0"
        )
    return address


def addresses_of(host: str) -> list[str]:
    """Returns the addresses that a name leads to on this host. Raises OSError where it has none, or can be no name."""
    return list(dict.fromkeys(str(place[4][0]) for place in _look_up(host, None, socket.SOCK_STREAM)))


def own_address(host: str, port: int) -> str:
    """Returns this host's own address on the way to the head; nothing is sent.

    Raises Unreachable, also for a name that leads to loopback: a head of several hosts is never there.
    """
    address_of(host, port, may_mislead=False)
    with _in_reach(host, port):
        # To connect a datagram socket asks the routing table alone: its own address is the one on the way there.
        kind, _, _, _, place = _look_up(host, port, socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])


def listens_on(settings: LaunchSettings) -> str | None:
    """Returns the interface that a launcher's node listens on where it is not loopback.

    Raises:
        ValueError: where the head's name is unknown, out of reach, or leads to loopback while others shall come.
    """
    if settings.interface is not None or settings.head is None:
        return settings.interface
    host, port = settings.head.host, settings.head.port
    if settings.node_rank > 0:
        return own_address(host, port)
    return address_of(host, port, may_mislead=not settings.shares_key)


def is_misleading(host: str, port: int) -> bool:
    """Returns whether this is a name of this host that leads to loopback, and not loopback's own name or address."""
    return not _is_loopback(host) and _is_loopback(address_of(host, port))


def await_name(host: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Blocks until a name is known: a scheduler may publish it moments after the first hosts have started.

    Raises Unreachable where that takes longer than ``timeout_s``.
    """
    until_s, has_said = time.monotonic() + timeout_s, False
    while True:
        try:
            addresses_of(host)
            return
        except OSError as error:
            if time.monotonic() > until_s:
                raise Unreachable(
                    f"the head's name '{host}' is still unknown after {timeout_s:g} s: {error}"
                ) from error
        if not has_said:
            say(f"waiting until the head's name '{host}' is known")
            has_said = True
        time.sleep(_PAUSE_S)


def _look_up(host: str, port: int | None, kind: int) -> list[Any]:
    try:
        host.encode("idna")
    except UnicodeError:  # a label is empty or too long, for which Python raises no OSError
        raise socket.gaierror(socket.EAI_NONAME, "this cannot be a name") from None
    return socket.getaddrinfo(host, port, type=kind)


@contextmanager
def _in_reach(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreachable(
            f"the head {host}:{port} is unknown or out of reach ({error}): give another, or the interface"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("localhost.")


# -- open files ------------------------------------------------------------------------------------------------------


def raise_descriptor_limit() -> int:
    """Allows this process and its children as many open files as the system lets them have. Returns the limit."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_FILES
    # The soft limit is often 1024, for the sake of programs that use select().
    most = _MOST_FILES if highest == resource.RLIM_INFINITY else highest
    if limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, highest))
    return max(limit, most)


def require_descriptors(num_more: int, what: str) -> None:
    """Raises the limit on open files, and makes sure that ``num_more`` fit beside those that are open.

    Raises:
        ValueError: where they do not; says what to set.
    """
    limit, needed = raise_descriptor_limit(), _num_open() + num_more + _SPARE_FILES
    if limit < needed:
        raise ValueError(
            f"this process may have {limit} files open and needs {needed} for {what}: set 'ulimit -n {needed}' or more "
            "on every host"
        )


def unproven_allowed(num_ranks: int) -> int:
    """Returns how many connections of one kind may be open whose other ends have proven nothing.

    The number is at most an eighth of the descriptors that are left: there are three kinds, ZeroMQ's and those for
    arrays and for messages, and a connection that comes while one is being closed must find a descriptor, too.
    """
    left = raise_descriptor_limit() - _num_open()
    return min(max(_UNPROVEN, 4 * num_ranks), max(1, left // 8))


def ranks_served(limit: int) -> int:
    """Returns how many ranks a run may have with so many open files in each, if all exchange messages and arrays."""
    beside = _num_open() + FILES_OF_NETWORK + _SPARE_FILES
    return max(0, 1 + (limit - beside) // (FILES_FOR_MESSAGES + 1 + ARRAY_CONNECTIONS))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # another system than Linux
        return 0
