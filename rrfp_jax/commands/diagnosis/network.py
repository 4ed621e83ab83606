"""Checks of the ways between ranks: interfaces, names, the head and its ports."""

import errno
import socket
from ipaddress import ip_address
from typing import Any

import psutil

from rrfp_jax.cluster.config import INTERFACE, LOOPBACK, Address
from rrfp_jax.cluster.host import addresses_of, is_misleading
from rrfp_jax.cluster.launch_settings import LaunchSettings
from rrfp_jax.commands.diagnosis import Finding, ok, problem, warning

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_CONNECT_S = 3.0
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT)
_MEND_NAME = "write it into /etc/hosts or the name server, or "


def own_addresses() -> dict[str, list[str]]:
    """Returns the addresses of every interface that is up, without those for one link only."""
    states = psutil.net_if_stats()
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [each.address for each in addresses if each.family in _FAMILIES and "%" not in each.address]
        if usable and name in states and states[name].isup:
            found[name] = usable
    return found


def check_interfaces(head: Address | None, interface: str | None) -> Finding:
    """Report the interfaces of this host, and the one on which ranks would listen."""
    addresses = own_addresses()
    text = ", ".join(f"{name} {' '.join(each)}" for name, each in addresses.items()) or "none is up"
    if interface is not None and interface not in addresses and _interface_of(interface) is None:
        return problem(
            f"{interface} is no interface of this host that is up, and no address of it: {text}",
            f"give another one (--interface, or {INTERFACE})",
            interfaces=addresses,
        )
    if _interface_of(LOOPBACK) is None:
        return problem(f"{text}; {LOOPBACK} is missing", "bring loopback up: ip link set lo up", interfaces=addresses)
    if interface is None and head is None:
        return ok(f"{text}; ranks of one host listen on {LOOPBACK}", interfaces=addresses, listens_on=LOOPBACK)
    try:
        listens_on = interface or _listens_on(head)
    except (OSError, ValueError):  # the finding of the head says more
        return ok(f"{text}; none leads to {head}", interfaces=addresses)
    return ok(f"{text}; ranks listen on {_with_name(listens_on)}", interfaces=addresses, listens_on=listens_on)


def check_host_name() -> Finding:
    """Check that this host's own name leads to it."""
    name = socket.gethostname()
    try:
        addresses = addresses_of(name)
    except OSError as error:
        remedy = f"{_MEND_NAME}name this host by its address in --head"
        return warning(f"{name} does not resolve ({error.strerror})", remedy, name=name)
    return ok(f"{name} is {' '.join(addresses)}", name=name, addresses=addresses)


def check_head(head: Address, interface: str | None) -> Finding:
    """Check that the head's name resolves to a host that this one can reach, and find the interface to it."""
    try:
        addresses = addresses_of(head.host)
    except OSError as error:
        return problem(f"{head.host} does not resolve ({error.strerror})", f"{_MEND_NAME}give node 0's address")
    is_own = is_here(head)
    figures = {"addresses": addresses, "is_here": is_own}
    if is_misleading(head.host, head.port) and not (is_own and interface is not None):
        # Debian writes a host's own name into /etc/hosts with a loopback address, so each host takes itself for node 0.
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
    if is_own:
        return ok(f"{head.host} is this host, {_with_name(own)}", **figures)
    return _answer_of(head, f"{head.host} is {addresses[0]}, reached from {_with_name(own)}", figures)


def _answer_of(head: Address, text: str, figures: dict[str, Any]) -> Finding:
    """Try the head's port on another host; ``text`` and ``figures`` are the finding so far."""
    try:
        socket.create_connection((head.host, head.port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return ok(f"{text}; nothing listens yet at port {head.port}", **figures)
    except OSError:
        remedy = f"let the hosts reach ports {head.port} and {head.port + 1} of node 0 through firewalls"
        return warning(f"{text}, but does not answer", remedy, **figures)
    return ok(f"{text}; something listens at port {head.port}", **figures)


def check_ports(head: Address | None, port: int, *, is_requested: bool) -> Finding:
    """Check that the two ports of a head are free here; ``is_requested``: a run is to take exactly these."""
    if head is not None and not is_here(head):
        return ok(f"{head.port} and {head.port + 1} are used on the head's host")
    ports = [port, port + 1]
    taken = {number: why for number in ports if (why := _why_taken(number)) is not None}
    if not taken:
        return ok(f"{port} and {port + 1} are free", ports=ports)
    text = "port " + ", ".join(f"{number}: {why}" for number, why in taken.items())
    remedy = "end the run or program that has it, or give a head another port (--head HOST:PORT); a run on one host "
    remedy += "takes free ones"
    found = problem if is_requested else warning
    return found(text, remedy, ports=ports, taken=sorted(taken))


def is_here(head: Address) -> bool:
    """Returns whether this host is the head's."""
    try:
        return any(_interface_of(address) for address in addresses_of(head.host))
    except OSError:
        return False


def _interface_of(address: str) -> str | None:
    return next((name for name, addresses in own_addresses().items() if address in addresses), None)


def _with_name(address: str) -> str:
    """Returns an address with the name of its interface; an interface alone stays as it is."""
    name = _interface_of(address)
    return address if name in (None, address) else f"{address} ({name})"


def _listens_on(head: Address | None) -> str:
    """Returns the address that a launcher would listen on; raises ValueError where the head is out of reach."""
    node = 0 if head is not None and is_here(head) else 1
    settings = LaunchSettings(command=("-",), num_processes=1, num_nodes=2, node_rank=node, head=head)
    return settings.listens_on() or LOOPBACK


def _why_taken(port: int) -> str | None:
    """Returns the reason why a port cannot be bound, None if it is free.

    A bind to all addresses fails where another program listens on any one of them, by IPv4 or by IPv6.
    """
    for family in _FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
                probe.listen()
        except OSError as error:
            if error.errno not in _NO_IPV6:
                return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return None
