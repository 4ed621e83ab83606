"""How the processes of a run find and watch each other; the same on all ranks."""

from dataclasses import dataclass

from rrfp_jax.field_rules import AT_LEAST_1, SECONDS, check_fields

HEARTBEAT_TIMEOUT_S = 24 * 3600
"""After how long JAX's coordination service gives up a silent rank, and then aborts all others without a report: long
after :class:`ClusterConfig`'s ``silence_deadline_s``, so that the ranks notice first and end by themselves."""
GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "GRPC_ADDRESS_HTTP_PROXY")
"""The variables by which gRPC chooses a proxy, and JAX's coordination client with it; other spellings are not read."""
MAX_ARRAY_CONNECTIONS = 16
PINNED_THREADS = 8
"""The size of XLA's CPU thread pool in every process. The same number everywhere gives the same bits in all layouts,
since XLA cuts long sums by it."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes of a run, where there are several."""

    silence_deadline_s: float = 60.0
    """Within how long another process that is silent counts as lost; a closed connection is noticed at once."""
    start_deadline_s: float = 300.0
    """How long all processes may take to come together, and then the slowest of them to compile."""
    interface: str | None = None
    """Address or name (``eth0``) of the network interface that the processes listen on; null: what reaches the place
    where the run meets, which is loopback on one machine."""
    encrypt_arrays: bool = True
    """Whether large arrays are encrypted; false is faster, for networks that are trusted. They are then authenticated
    by their head only, and accelerators may send theirs by transfer servers."""
    array_connections: int = 2
    """Over how many connections the arrays between two processes travel. On as many cores they are encrypted, and by as
    many threads copied from devices, and to them."""
    processes_per_device: int = 1
    """Processes of a host that share an accelerator; each takes an equal part of its memory."""
    detect: bool = False
    """Ask JAX (SLURM, Kubernetes, Open MPI) for this process's rank and the number of ranks."""

    def __post_init__(self) -> None:
        check_fields(self, SECONDS, "silence_deadline_s", "start_deadline_s")
        check_fields(self, AT_LEAST_1, "processes_per_device")
        if self.silence_deadline_s > (limit := HEARTBEAT_TIMEOUT_S / 24):
            raise ValueError(
                f"silence_deadline_s is {self.silence_deadline_s:g}: give at most {limit:g}, since JAX's own watch, "
                "which ends processes without a report, must come later"
            )
        if not 1 <= self.array_connections <= MAX_ARRAY_CONNECTIONS:
            raise ValueError(
                f"array_connections is {self.array_connections}: give 1 to {MAX_ARRAY_CONNECTIONS}, 2 if in doubt"
            )
        if self.interface is not None and not self.interface.strip():
            raise ValueError("interface is empty: give an address or a name as eth0, or leave it out")
