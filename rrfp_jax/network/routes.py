"""Which address of this host others can reach: the one on the way to the place where the run meets.

A host's own name often leads to loopback (Debian writes ``127.0.1.1 NAME`` into ``/etc/hosts``). Whoever listened there
would wait for other hosts in vain, so that is refused in a sentence, unless the user has said what to listen on.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rrfp_jax.network.membership import INTERFACE

_PAUSE_S = 0.5


class Unreachable(ValueError):
    """The head's name is unknown, out of reach, or leads where no other host gets to; the text says what to give."""


def address_of(host: str, port: int) -> str:
    """The address that a name leads to on this host. Raises Unreachable where it is unknown."""
    with _in_reach(host, port):
        return addresses_of(host)[0]


def addresses_of(host: str) -> list[str]:
    """The addresses that a name leads to on this host. Raises OSError where it has none, or can be no name."""
    return list(dict.fromkeys(str(place[4][0]) for place in _look_up(host, None, socket.SOCK_STREAM)))


def own_address(host: str, port: int) -> str:
    """This host's own address on the way to the head; nothing is sent.

    Raises Unreachable, also for a name that leads to loopback: a head of several hosts is never there.
    """
    refuse_misleading_name(host, port)
    with _in_reach(host, port):
        kind, _, _, _, place = _look_up(host, port, socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])


def is_misleading(host: str, port: int) -> bool:
    """Whether this is a name of this host that leads to loopback, and not loopback's own name or address."""
    return not _is_loopback(host) and _is_loopback(address_of(host, port))


def refuse_misleading_name(host: str, port: int) -> None:
    """Raises Unreachable."""
    if is_misleading(host, port):
        raise Unreachable(
            f"the name '{host}' leads to {address_of(host, port)} on this host, which no other host can reach: set "
            f"{INTERFACE} (or --interface) to this host's address or interface in the network of the run, such as ib0"
        )


def await_name(host: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Return once a name is known: a scheduler may publish it moments after the first hosts have started.

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
