"""The addresses of this host, by network interface."""

import socket

import psutil

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def own_addresses() -> dict[str, list[str]]:
    """The addresses of every interface that is up; those for one link only are left out."""
    states = psutil.net_if_stats()
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [each.address for each in addresses if each.family in _FAMILIES and "%" not in each.address]
        if usable and name in states and states[name].isup:
            found[name] = usable
    return found


def interface_of(address: str) -> str | None:
    """The interface that has an address; None if none has."""
    return next((name for name, addresses in own_addresses().items() if address in addresses), None)
