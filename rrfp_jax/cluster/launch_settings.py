"""Settings of a launcher: the processes that it starts, and where their run meets."""

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp_jax.cluster import KEY_FILE_VARIABLE, KEY_VARIABLE
from rrfp_jax.cluster.config import DETECT, LAUNCHER, PINNED_THREADS, WILDCARDS, Address
from rrfp_jax.cluster.host import address_of, own_address, refuse_misleading_name
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, SECONDS, check_fields

OWN_COMMANDS = "rrfp_jax.commands.main"
"""The module of all commands of this package."""
BINDINGS = ("cores", "none")
PREFIXES = ("auto", "always", "never")
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """One launcher's part of a run: on one machine, or on node ``node_rank`` of ``num_nodes``."""

    command: tuple[str, ...]
    """The module that every rank runs, and its arguments; empty for a supervisor that starts none."""
    num_processes: int
    """Number of ranks on each node; of a supervisor, of all ranks."""
    num_nodes: int = 1
    node_rank: int = 0
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
    """See :class:`~rrfp_jax.cluster.output.Output`."""
    threads: int | None = None
    """The size of XLA's CPU thread pool in each process; None: ``NPROC`` where it is set, else 8."""
    bind: str = "cores"
    """Whether each rank keeps to its share of this node's cores, see
    :func:`~rrfp_jax.cluster.child_processes.rank_cores`."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_processes", "num_nodes", "threads")
        check_fields(self, SECONDS, "grace_s", "start_deadline_s")
        check_fields(self, NOT_NEGATIVE, "max_restarts")
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
        """Number of ranks of the whole run."""
        return self.num_processes * self.num_nodes

    @property
    def hosts_head(self) -> bool:
        """Whether rendezvous and coordination service are here."""
        return self.node_rank == 0

    @property
    def shares_key(self) -> bool:
        """Whether the run's key must be known elsewhere too, and so cannot be made here."""
        return self.num_nodes > 1 or self.supervises

    def local_ranks(self) -> range:
        """Returns the ranks that this launcher starts."""
        first = self.node_rank * self.num_processes
        return range(first, first + (0 if self.supervises else self.num_processes))

    def listens_on(self) -> str | None:
        """Returns the interface of this node where it is not loopback.

        Raises:
            ValueError: where the head's name is unknown, out of reach, or leads to loopback while others shall come.
        """
        if self.interface is not None or self.head is None:
            return self.interface
        host, port = self.head.host, self.head.port
        if not self.hosts_head:
            return own_address(host, port)
        if self.shares_key:
            refuse_misleading_name(host, port)
        return address_of(host, port)


def rank_environment(environ: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Returns the environment of every rank, without its place and the key: pools pinned, output unbuffered."""
    cleaned = {name: value for name, value in environ.items() if name not in (KEY_VARIABLE, KEY_FILE_VARIABLE, DETECT)}
    defaults = {"NPROC": str(PINNED_THREADS), "PYTHONUNBUFFERED": "1", **dict.fromkeys(_POOLS, "1")}
    given = {} if threads is None else {"NPROC": str(threads)}
    return {**defaults, **cleaned, **given, LAUNCHER: "1"}
