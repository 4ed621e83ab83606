"""Settings of a run's processes and their launchers: how they find and watch each other, and where each is. Pure.

Reading these loads no ZeroMQ.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, SECONDS, FieldRule, check_fields

HEARTBEAT_TIMEOUT_S = 24 * 3600
"""Silence after which JAX's coordination service gives up a rank, and then aborts all others without a report. It is
much longer than :class:`ClusterConfig`'s ``silence_deadline_s``, so the ranks notice first and end by themselves."""
GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "GRPC_ADDRESS_HTTP_PROXY")
"""The variables by which gRPC chooses a proxy, and JAX's coordination client with it; other spellings are not read."""
LOOPBACK = "127.0.0.1"
WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})
ARRAY_CONNECTIONS = 2
"""Number of connections over which the arrays between two processes travel, each with two threads in either. As many
cores encrypt them, and as many threads copy them from devices and to devices."""
PINNED_THREADS = 8
"""The size of XLA's CPU thread pool in every process. The same number everywhere gives the same bits in all layouts,
since XLA cuts long sums by it."""
OWN_COMMANDS = "rrfp_jax.commands.main"
"""The module of all commands of this package."""
BINDINGS = ("cores", "none")
PREFIXES = ("auto", "always", "never")
Selection = Literal["auto", "sockets", "transfer"]
"""The way of arrays between processes. ``sockets`` work on every backend, and their connections prove who speaks.
``transfer`` saves large arrays the way through the host's memory; small parts go through sockets anyway. ``auto`` tries
between each two neighbours whether transfer works, if devices have memory of their own, and takes sockets on others,
which are faster there."""
TRANSPORTS = get_args(Selection)
_TRANSPORT = FieldRule("auto, sockets or transfer", lambda value: value in TRANSPORTS)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes of a run, where there are several; the same on all of them."""

    silence_deadline_s: float = 60.0
    """Seconds of silence, or of standstill of its event loop, after which another process counts as lost; a closed
    connection is noticed at once. A fifteenth of it, but at least 4, is enough where this process waits for the other
    in vain, which takes no new connection either."""
    start_deadline_s: float = 300.0
    """Seconds that all processes may take to come together, and then the slowest of them to compile."""
    interface: str | None = None
    """Address or name (``eth0``) of the network interface that the processes listen on. None: the one that reaches the
    place where the run meets, which is loopback on one machine."""
    encrypt_arrays: bool = True
    """Whether large arrays are encrypted; false is faster, for networks that are trusted. They are then authenticated
    by their head only, so that anybody who controls the network can read and alter them, and accelerators may send
    theirs by transfer servers."""
    processes_per_device: int = 1
    """Number of processes of a host that share an accelerator; each takes an equal part of its memory."""
    transport: str = "auto"
    """How tensors travel between processes: through host memory (``sockets``), by JAX's transfer server, not encrypted
    (``transfer``), or by the better of them (``auto``). Auto takes transfer on accelerators, where arrays need not be
    encrypted, between processes where an exchange at the start shows that it works."""
    progress_deadline_s: float = 600.0
    """Seconds in which some task must finish, or the run is given up with a report."""

    def __post_init__(self) -> None:
        check_fields(self, SECONDS, "silence_deadline_s", "start_deadline_s", "progress_deadline_s")
        check_fields(self, _TRANSPORT, "transport")
        check_fields(self, AT_LEAST_1, "processes_per_device")
        if self.silence_deadline_s > (limit := HEARTBEAT_TIMEOUT_S / 24):
            raise ValueError(
                f"silence_deadline_s is {self.silence_deadline_s:g}: give at most {limit:g}, since JAX's own watch, "
                "which ends processes without a report, must come later"
            )
        if self.interface is not None and not self.interface.strip():
            raise ValueError("interface is empty: give an address or a name as eth0, or leave it out")


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Addresses (``tcp://...``) on which a rank listens, which the rendezvous tells to all others."""

    heartbeats: str
    messages: str


def host_of(address: PeerAddress) -> str:
    """Returns the host, or the address of the interface, where a rank listens."""
    return address.messages.removeprefix("tcp://").rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Address:
    """A host's name or IP address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads ``host:port`` or ``[::1]:port``."""
        host, _, port = text.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < (1 << 16) - 1:
            raise ValueError(f"'{text}' is no address: give HOST:PORT, with a port from 1 to 65534")
        return cls(host=host.strip("[]"), port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """One launcher's part of a run: on one machine, or on node ``node_rank`` of ``num_nodes``."""

    command: tuple[str, ...]
    """The module that every rank runs, and its arguments; empty for a supervisor that starts none."""
    num_processes: int
    """Number of ranks on each node; of a supervisor, of all ranks."""
    num_nodes: int = 1
    fewer_nodes: tuple[int, ...] = ()
    """Smaller numbers of nodes with which the run goes on too while not all are there, descending."""
    node_rank: int = 0
    """Number of this node; rendezvous and coordination service are on node 0."""
    present: tuple[int, ...] | None = None
    """Numbers of the nodes that take part in an attempt, ascending; None: all."""
    head: Address | None = None
    """Address on which node 0's launcher hosts the rendezvous and, one port further, the coordination service; None:
    on loopback, on free ports."""
    interface: str | None = None
    """Interface that this node listens on; None: loopback, or with a head the one on the way to it."""
    max_restarts: int = 0
    grace_s: float = 75.0
    """Seconds for the others to end by themselves after the first rank failed, or, of other nodes, after this node's
    ranks have ended."""
    start_deadline_s: float = 300.0
    """Seconds for all ranks to come together."""
    prefix: str = "auto"
    """See :class:`~rrfp_jax.cluster.child_processes.Output`."""
    threads: int | None = None
    """The size of XLA's CPU thread pool in each process; None: ``NPROC`` where it is set, else 8."""
    bind: str = "cores"
    """Whether each rank keeps to its share of this node's cores, see
    :func:`~rrfp_jax.cluster.child_processes.rank_cores`."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_processes", "num_nodes", "threads")
        check_fields(self, SECONDS, "grace_s", "start_deadline_s")
        check_fields(self, NOT_NEGATIVE, "max_restarts")
        counts = self.node_counts
        if min(counts) < 1 or any(more <= fewer for more, fewer in pairwise(counts)):
            raise ValueError(f"nodes is {','.join(map(str, counts))}: give numbers of hosts, the largest first, as 4,2")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node_rank is {self.node_rank} of {self.num_nodes} nodes: count from 0")
        if self.prefix not in PREFIXES:
            raise ValueError(f"prefix is '{self.prefix}': give {', '.join(PREFIXES)}")
        if self.bind not in BINDINGS:
            raise ValueError(f"bind is '{self.bind}': give {', '.join(BINDINGS)}")
        if self.head is None and (self.num_nodes > 1 or self.supervises):
            raise ValueError("ranks on other hosts need to know where the run meets: give head as HOST:PORT")
        if wildcard := {self.interface, self.head and self.head.host} & WILDCARDS:
            raise ValueError(
                f"'{wildcard.pop()}' is no address that other processes could connect to: give the head, and the "
                "interface, an address of its host, a name, or an interface such as eth0"
            )
        if self.supervises and (self.num_nodes > 1 or self.max_restarts):
            raise ValueError("a supervisor starts no ranks, so it has neither nodes nor restarts: leave them out")

    @property
    def supervises(self) -> bool:
        """Whether the ranks are started by somebody else."""
        return not self.command

    @property
    def num_ranks(self) -> int:
        return self.num_processes * (self.num_nodes if self.present is None else len(self.present))

    @property
    def node_counts(self) -> tuple[int, ...]:
        """All numbers of nodes that the run may have, descending."""
        return (self.num_nodes, *self.fewer_nodes)

    @property
    def shares_key(self) -> bool:
        """Whether the run's key must be known elsewhere too, and so cannot be made here."""
        return self.num_nodes > 1 or self.supervises

    def local_ranks(self) -> range:
        """Returns the ranks of this node, none where it does not take part: ranks count over the nodes that do."""
        nodes = range(self.num_nodes) if self.present is None else self.present
        if self.supervises or self.node_rank not in nodes:
            return range(0)
        first = nodes.index(self.node_rank) * self.num_processes
        return range(first, first + self.num_processes)


# -- the environment by which a launcher tells a process its place ---------------------------------------------------

RANK, NUM_RANKS = "RRFP_RANK", "RRFP_NUM_RANKS"
RENDEZVOUS, COORDINATOR = "RRFP_RENDEZVOUS", "RRFP_COORDINATOR"
ATTEMPT, INTERFACE, DETECT, LAUNCHER = "RRFP_ATTEMPT", "RRFP_INTERFACE", "RRFP_DETECT", "RRFP_LAUNCHER"
PROCESS_NUMBER = "RRFP_PROCESS_NUMBER"
RANK_COUNTS = "RRFP_RANK_COUNTS"
"""All numbers of ranks that the run may have, descending, separated by commas; its configuration is for the first."""
SPARE = "RRFP_SPARE"
"""Set in a spare process (:class:`~rrfp_jax.cluster.child_processes.Child`)."""
RESTARTS_LEFT, STARTED = "RRFP_RESTARTS_LEFT", "RRFP_STARTED"
"""Start of a launcher, as text that fits into a file name: the same for all of its ranks and attempts."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's place in a run."""

    rank: int
    num_ranks: int
    rendezvous: str
    """Address of the rendezvous of all ranks, ``tcp://host:port``."""
    coordinator: str
    """Address of JAX's coordination service, ``host:port``."""
    attempt: int = 0
    """Number of times the launcher has restarted the run."""
    interface: str | None = None
    """This host's network interface, if it is neither the one that the configuration names for all nor the one on the
    way to the rendezvous."""
    number: int = 0
    """Number of processes that the rank had before this one, which were lost: more than 0 comes back to a run under
    way."""

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
        """Returns the variables that :func:`rrfp_jax.runtime.cluster.membership_from` reads, without the run key."""
        variables = {
            RANK: str(self.rank),
            NUM_RANKS: str(self.num_ranks),
            RENDEZVOUS: self.rendezvous,
            COORDINATOR: self.coordinator,
            ATTEMPT: str(self.attempt),
            PROCESS_NUMBER: str(self.number),
        }
        return variables if self.interface is None else variables | {INTERFACE: self.interface}

    def meeting_place(self) -> tuple[str, int]:
        host, _, port = self.rendezvous.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)

    def meeting_at(self, host: str) -> "Membership":
        """Returns the same place, with this address for the host of rendezvous and coordination service."""
        shown = f"[{host}]" if ":" in host else host
        ports = (address.rpartition(":")[2] for address in (self.rendezvous, self.coordinator))
        rendezvous, coordinator = (f"{shown}:{port}" for port in ports)
        return replace(self, rendezvous=f"tcp://{rendezvous}", coordinator=coordinator)


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host.removeprefix("tcp://")) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
