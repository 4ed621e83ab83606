"""What a scheduler says of a launcher's place, and how its variables are read, by names that errors can show. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

PORT = "RRFP_PORT"
DEFAULT_PORT = 8476
_LAST_PORT = (1 << 16) - 2
"""The coordination service takes the next one."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a scheduler says; None: it does not say."""

    scheduler: str
    variables: tuple[str, ...]
    """Those that were read."""
    num_nodes: int | None = None
    node_rank: int | None = None
    head_host: str | None = None
    head_port: int = DEFAULT_PORT
    num_processes: int | None = None
    """On each node."""

    def __post_init__(self) -> None:
        if self.num_nodes is not None and self.node_rank is not None and self.node_rank >= self.num_nodes:
            names = " and ".join(self.variables)
            raise ValueError(f"{names} say node {self.node_rank} of {self.num_nodes}: nodes count from 0")


class Reader:
    """A mapping that remembers which of its variables were there when they were asked for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.names: list[str] = []

    def text(self, *names: str) -> str | None:
        """The first of these that is set."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                self.names.append(name)
                return value
        return None

    def number(self, *names: str) -> int | None:
        text = self.text(*names)
        if text is None or (text.isascii() and text.isdecimal()):
            return None if text is None else int(text)
        raise ValueError(f"{self.names[-1]} is '{text}': a number is needed; give the launcher's options instead")

    def port(self, *names: str) -> int:
        port = self.number(*names, PORT)
        if port is not None and not 0 < port <= _LAST_PORT:
            raise ValueError(f"{self.names[-1]} is {port}: give a port from 1 to {_LAST_PORT}")
        return DEFAULT_PORT if port is None else port

    def agreed(self, *names: str) -> int | None:
        """What all of these say that are set."""
        said = {name: number for name in names if (number := self.number(name)) is not None}
        if len(set(said.values())) > 1:
            raise ValueError(f"{_listed(said)} contradict each other: unset what is wrong")
        return next(iter(said.values()), None)

    def needed(self, value: str | int | None, *names: str) -> None:
        if value is None:
            raise ValueError(f"{' and '.join(self.names)} set, but not {' or '.join(names)}: set it, or give options")


def _listed(said: Mapping[str, int]) -> str:
    return " and ".join(f"{name}={number}" for name, number in said.items())
