"""Which rank a process is, and where the run meets: what a launcher tells the processes that it starts."""

from dataclasses import dataclass, replace

RANK, NUM_RANKS = "RRFP_RANK", "RRFP_NUM_RANKS"
RENDEZVOUS, COORDINATOR = "RRFP_RENDEZVOUS", "RRFP_COORDINATOR"
ATTEMPT, INTERFACE, DETECT, LAUNCHER = "RRFP_ATTEMPT", "RRFP_INTERFACE", "RRFP_DETECT", "RRFP_LAUNCHER"
STARTED = "RRFP_STARTED"
"""When a launcher was started, as text that fits into a file name: the same for all of its ranks and attempts."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's place in a run."""

    rank: int
    num_ranks: int
    rendezvous: str
    """Where all ranks meet, ``tcp://host:port``."""
    coordinator: str
    """JAX's coordination service, ``host:port``."""
    attempt: int = 0
    """How often the launcher has restarted the run."""
    interface: str | None = None
    """This host's network interface, where it is neither the one that the configuration names for all nor what reaches
    the rendezvous."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"{RANK} is {self.rank} and {NUM_RANKS} {self.num_ranks}: ranks count from 0 to {self.num_ranks - 1}"
            )
        if not self.rendezvous.startswith("tcp://") or not _has_port(self.rendezvous):
            raise ValueError(f"{RENDEZVOUS} is '{self.rendezvous}': give tcp://host:port")
        if not _has_port(self.coordinator):
            raise ValueError(f"{COORDINATOR} is '{self.coordinator}': give host:port")
        if self.attempt < 0:
            raise ValueError(f"{ATTEMPT} is {self.attempt}: give 0 or more")

    def environment(self) -> dict[str, str]:
        """What :func:`~rrfp_jax.runtime.detection.membership_from` reads; the run key comes beside it."""
        variables = {
            RANK: str(self.rank),
            NUM_RANKS: str(self.num_ranks),
            RENDEZVOUS: self.rendezvous,
            COORDINATOR: self.coordinator,
            ATTEMPT: str(self.attempt),
        }
        return variables if self.interface is None else variables | {INTERFACE: self.interface}

    def meeting_place(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        host, _, port = self.rendezvous.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)

    def meeting_at(self, host: str) -> "Membership":
        """The same, with this address for the host where the run meets."""
        shown = f"[{host}]" if ":" in host else host
        ports = (address.rpartition(":")[2] for address in (self.rendezvous, self.coordinator))
        rendezvous, coordinator = (f"{shown}:{port}" for port in ports)
        return replace(self, rendezvous=f"tcp://{rendezvous}", coordinator=coordinator)


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host.removeprefix("tcp://")) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
