"""What can happen to a launcher; everything reaches its main thread through one queue."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnded:
    """A rank of this node has ended."""

    rank: int
    code: int
    at_s: float
    """``time.monotonic``."""


@dataclass(frozen=True)
class RankEndedElsewhere:
    """Another node's launcher tells of the end of a rank."""

    rank: int
    code: int


@dataclass(frozen=True)
class ServiceEnded:
    """The coordination service ended before the ranks."""

    code: int


@dataclass(frozen=True)
class Signalled:
    """Somebody sent the launcher a signal."""

    number: int


Event = RankEnded | RankEndedElsewhere | ServiceEnded | Signalled
