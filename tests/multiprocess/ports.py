"""Ports for runs of several launchers."""

import socket


def free_port() -> int:
    """A port of loopback that is free, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def is_served(port: int) -> bool:
    """Whether somebody listens at a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
