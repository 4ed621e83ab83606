"""How the ranks of a run would reach each other: interfaces, names, the head and its ports."""

import errno
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from rrfp_jax.commands.diagnosis.addresses import interface_of, own_addresses
from rrfp_jax.commands.diagnosis.finding import Finding, ok, problem, warning
from rrfp_jax.launch.launch_settings import LaunchSettings
from rrfp_jax.network.config import GRPC_PROXIES, INTERFACE, LOOPBACK, Address
from rrfp_jax.network.host import addresses_of, is_misleading

_CONNECT_S = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT)
"""Of a host without IPv6."""


def check_interfaces(head: Address | None, interface: str | None) -> Finding:
    """The interfaces of this host, and which one ranks would listen on."""
    addresses = own_addresses()
    text = ", ".join(f"{name} {' '.join(each)}" for name, each in addresses.items()) or "none is up"
    figures = {"interfaces": addresses}
    if interface is not None and interface not in addresses and interface_of(interface) is None:
        return problem(
            f"{interface} is no interface of this host that is up, and no address of it: {text}",
            f"give another one (--interface, or {INTERFACE})",
            **figures,
        )
    if interface_of(LOOPBACK) is None:
        return problem(f"{text}; {LOOPBACK} is missing", "bring loopback up: ip link set lo up", **figures)
    if interface is None and head is None:
        return ok(f"{text}; ranks of one host listen on {LOOPBACK}", **figures, listens_on=LOOPBACK)
    if interface is None and head is not None:
        try:
            listens_on = _listens_on(head)
        except (OSError, ValueError):  # the head's own finding says more
            return ok(f"{text}; none leads to {head}", **figures)
    else:
        listens_on = str(interface)
    name = interface_of(listens_on)
    where = listens_on if name in (None, listens_on) else f"{listens_on} ({name})"
    return ok(f"{text}; ranks listen on {where}", **figures, listens_on=listens_on)


def check_host_name() -> Finding:
    """Whether this host's own name leads to it."""
    name = socket.gethostname()
    try:
        addresses = addresses_of(name)
    except OSError as error:
        return warning(
            f"{name} does not resolve ({error.strerror})",
            "write it into /etc/hosts or the name server, or name this host by its address in --head",
            name=name,
        )
    return ok(f"{name} is {' '.join(addresses)}", name=name, addresses=addresses)


def check_proxies(environ: Mapping[str, str]) -> Finding:
    """Report the variables that send programs to a proxy; ranks reach each other without a proxy."""
    names = sorted(name for name in environ if name in GRPC_PROXIES or name.lower() in _PROXIES)
    text = f"{', '.join(names)}: for trackers and downloads; ranks reach each other without" if names else "none is set"
    return ok(text, variables=names)


def check_head(head: Address, interface: str | None) -> Finding:
    """Whether the head's name resolves, to a host that this one can reach, and by which interface."""
    try:
        addresses = addresses_of(head.host)
    except OSError as error:
        return problem(
            f"{head.host} does not resolve ({error.strerror})",
            "write it into /etc/hosts or the name server, or give node 0's address",
        )
    here = is_here(head)
    figures = {"addresses": addresses, "is_here": here}
    if is_misleading(head.host, head.port) and not (here and interface is not None):
        return problem(
            f"{head.host} is {addresses[0]} here, which leads to no other host",
            "give node 0's address in the network that the hosts share or mend /etc/hosts; on node 0 itself "
            f"{INTERFACE} or --interface will do",
            **figures,
        )
    try:
        own = interface or _listens_on(head)
    except ValueError as error:
        return problem(str(error), "give an address that this host has a route to", **figures)
    if ip_address(addresses[0]).is_loopback and interface is None:
        return warning(f"{head.host} is {addresses[0]}: for this host alone", "give node 0's address", **figures)
    by = own if interface_of(own) in (None, own) else f"{own} ({interface_of(own)})"
    if here:
        return ok(f"{head.host} is this host, {by}", **figures)
    return _reached(head, f"{head.host} is {addresses[0]}, reached from {by}", figures)


def _reached(head: Address, text: str, figures: dict[str, Any]) -> Finding:
    """What comes back from the head's port on another host."""
    try:
        socket.create_connection((head.host, head.port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return ok(f"{text}; nothing listens yet at port {head.port}", **figures)
    except OSError:
        return warning(
            f"{text}, but does not answer",
            f"let the hosts reach ports {head.port} and {head.port + 1} of node 0 through firewalls",
            **figures,
        )
    return ok(f"{text}; something listens at port {head.port}", **figures)


def check_ports(head: Address | None, port: int, *, is_asked: bool) -> Finding:
    """Whether the two ports of a head are free here; ``is_asked`` says that a run is to take just these."""
    if head is not None and not is_here(head):
        return ok(f"{head.port} and {head.port + 1} are used on the head's host")
    taken = {number: why for number in (port, port + 1) if (why := _why_taken(number)) is not None}
    if not taken:
        return ok(f"{port} and {port + 1} are free", ports=[port, port + 1])
    told = ", ".join(f"{number}: {why}" for number, why in taken.items())
    tell = problem if is_asked else warning
    return tell(
        f"port {told}",
        "end the run or program that has it, or give a head another port (--head HOST:PORT); a run on one host takes "
        "free ones",
        ports=[port, port + 1],
        taken=sorted(taken),
    )


def is_here(head: Address) -> bool:
    """Whether this host is the head's."""
    try:
        return any(interface_of(address) for address in addresses_of(head.host))
    except OSError:
        return False


def given_interface(option: str | None, environ: Mapping[str, str]) -> str | None:
    """What the user says that ranks listen on."""
    return option or environ.get(INTERFACE) or None


def _listens_on(head: Address) -> str:
    """As a launcher decides; raises ValueError where the head is out of reach."""
    node = 0 if is_here(head) else 1
    settings = LaunchSettings(command=("-",), num_processes=1, num_nodes=2, node_rank=node, head=head)
    return settings.listens_on() or LOOPBACK


def _why_taken(port: int) -> str | None:
    """Whatever the address: who listens on one of this host's has the port on all, of IPv4 or of IPv6."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
                probe.listen()
        except OSError as error:
            if error.errno not in _NO_SUCH_FAMILY:
                return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return None
