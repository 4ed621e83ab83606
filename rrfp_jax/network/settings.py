"""How the ranks talk to each other, where they listen, and what they have sent: the records around the network."""

from dataclasses import dataclass

from rrfp_jax.network.cluster_config import MAX_ARRAY_CONNECTIONS
from rrfp_jax.network.sockets import LOOPBACK


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """How the ranks talk to each other; the same on all."""

    interface: str = LOOPBACK
    """Address or name (``eth0``) of the network interface to listen on."""
    silence_deadline_s: float = 60.0
    """Within how long a peer counts as lost that is silent, or whose event loop stands still."""
    high_water_bytes: int = 256 << 20
    """How much may be unconfirmed per peer before further messages wait at the sender, and how much is kept for topics
    that nobody has subscribed to yet."""
    encrypt_arrays: bool = True
    """False leaves all but small arrays as they are on the connections for a pipeline's arrays and messages: faster,
    but who controls the network can read them, and alter them."""
    array_connections: int = 2
    """Over how many connections the arrays between two ranks travel; each takes two threads of either rank. So many
    more copy arrays from devices, and as many to them."""

    def __post_init__(self) -> None:
        if self.silence_deadline_s <= 0 or self.high_water_bytes <= 0:
            raise ValueError(
                f"silence_deadline_s is {self.silence_deadline_s} and high_water_bytes {self.high_water_bytes}: "
                "both must be positive"
            )
        if not 1 <= self.array_connections <= MAX_ARRAY_CONNECTIONS:
            raise ValueError(f"array_connections is {self.array_connections}: give 1 to {MAX_ARRAY_CONNECTIONS}")


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Where a rank listens (``tcp://...``), to be told to all others by the rendezvous."""

    heartbeats: str
    messages: str

    def as_dict(self) -> dict[str, str]:
        """The address as plain data; ``PeerAddress(**data)`` is the way back."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a :class:`PeerNetwork` has sent and still holds."""

    num_sent: int
    num_received: int
    num_dropped: int
    """Malformed messages, and messages to ranks that are gone."""
    unconfirmed_bytes: int
    """Sent, but not confirmed yet."""
    waiting_bytes: int
    """Behind the high-water mark."""
    peak_bytes: int
    """The most that was held for any one peer, unconfirmed and waiting together."""


def host_of(address: PeerAddress) -> str:
    """The host, or the interface's address, where a rank listens."""
    return address.messages.removeprefix("tcp://").rpartition(":")[0]
