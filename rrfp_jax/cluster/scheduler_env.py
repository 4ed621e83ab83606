"""A launcher's place in a run: its options give it, or the variables that schedulers set around it. Pure.

A scheduler that starts others is looked for after those that it starts: ``mpirun`` and SkyPilot run inside allocations
of SLURM or pods of Kubernetes, whose variables are still there and may number the nodes in another way. So the first of
:data:`SOURCES` that is there is taken, whole, and no other is mixed in.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rrfp_jax.cluster.config import Address

_PORT, _DEFAULT_PORT = "RRFP_PORT", 8476
_LAST_PORT = (1 << 16) - 2
"""Largest port of a head: the coordination service takes the next one."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """A launcher's place among those of a run; None where its options, or the variables, say nothing."""

    num_nodes: int | None = None
    node_rank: int | None = None
    head: Address | None = None
    num_processes: int | None = None
    """Number of processes on each node."""

    def completed(self, environ: Mapping[str, str]) -> "tuple[NodePlace, str]":
        """Returns the place with missing values from the environment, and a line that says where each came from.

        Raises:
            ValueError: where nothing is found, or not enough.
        """
        found, source = read_scheduler_env(environ)
        # Options win over the environment, one by one: a user may know better about the head alone.
        given = {name: value for name, value in vars(self).items() if value is not None}
        full = NodePlace(**(vars(found) | given))
        options = {"num_nodes": "--nodes", "node_rank": "--node-rank", "num_processes": "--processes", "head": "--head"}
        lacks = [option for name, option in options.items() if getattr(full, name) is None]
        if full.num_nodes == 1:
            # On one node the run meets on loopback, which needs no name and no free port from the scheduler.
            lacks = [option for option in lacks if option != "--head"]
            full = NodePlace(**(vars(full) | {"head": self.head}))
        if lacks:
            raise ValueError(f"{source} does not say all that is needed: give {', '.join(lacks)}")
        where = "" if full.head is None else f", head {full.head}"
        told = (
            f"node {full.node_rank} of {full.num_nodes}{where}, processes on each: {full.num_processes}; from {source}"
        )
        return full, told + (f"; as given: {', '.join(options[name] for name in given)}" if given else "")


def read_scheduler_env(environ: Mapping[str, str]) -> tuple[NodePlace, str]:
    """Returns the place that the first scheduler gives whose variables are set, and its name with these variables.

    Raises:
        ValueError: where there is none, or its variables are incomplete or contradict each other.
    """
    for name, (marks, reader) in SOURCES.items():
        if any(environ.get(mark) for mark in marks):
            read = _Variables(environ)
            place, names = reader(read), list(dict.fromkeys(read.names))
            if place.num_nodes is not None and place.node_rank is not None and place.node_rank >= place.num_nodes:
                told = " and ".join(names)
                raise ValueError(f"{told} say node {place.node_rank} of {place.num_nodes}: nodes count from 0")
            return place, f"{name} ({', '.join(names)})"
    known = "; ".join(f"{name}: {' or '.join(marks)}" for name, (marks, _) in SOURCES.items())
    raise ValueError(
        f"--from-environment finds no scheduler's variables here ({known}): give --nodes, --node-rank, --head"
    )


class _Variables:
    """Reads variables, and remembers those that were set, so that errors can name them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.names: list[str] = []

    def text(self, *names: str) -> str | None:
        for name in names:
            if value := self._environ.get(name, "").strip():
                self.names.append(name)
                return value
        return None

    def number(self, *names: str) -> int | None:
        """Returns the first of these that is set as a number. Raises ValueError for any other text."""
        text = self.text(*names)
        if text is None or (text.isascii() and text.isdecimal()):
            return None if text is None else int(text)
        raise ValueError(f"{self.names[-1]} is '{text}': a number is needed; give the launcher's options instead")

    def agreed(self, *names: str) -> int | None:
        """Returns the number that all of these have that are set. Raises ValueError where they differ, or none is."""
        said = {name: number for name in names if (number := self.number(name)) is not None}
        if len(set(said.values())) > 1:
            listed = " and ".join(f"{name}={number}" for name, number in said.items())
            raise ValueError(f"{listed} contradict each other: unset what is wrong")
        self.need(next(iter(said.values()), None), *names)
        return next(iter(said.values()))

    def head(self, host: str, *ports: str) -> Address:
        """Returns the head on this host, at the first of these ports, or of ``RRFP_PORT``, or the default port."""
        port = self.number(*ports, _PORT)
        if port is not None and not 0 < port <= _LAST_PORT:
            raise ValueError(f"{self.names[-1]} is {port}: give a port from 1 to {_LAST_PORT}")
        return Address(host=host, port=_DEFAULT_PORT if port is None else port)

    def need(self, value: str | int | None, *names: str) -> None:
        if value is None:
            raise ValueError(f"{' and '.join(self.names)} set, but not {' or '.join(names)}: set it, or give options")


def _open_mpi(read: _Variables) -> NodePlace:
    num_nodes, node_rank = read.number("OMPI_COMM_WORLD_SIZE"), read.number("OMPI_COMM_WORLD_RANK")
    read.need(node_rank, "OMPI_COMM_WORLD_RANK")
    if (beside := read.number("OMPI_COMM_WORLD_LOCAL_SIZE")) not in (None, 1):
        raise ValueError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE is {beside}: one launcher is needed on each node: mpirun --map-by ppr:1:node"
        )
    return NodePlace(num_nodes=num_nodes, node_rank=node_rank)


def _skypilot(read: _Variables) -> NodePlace:
    hosts = (read.text("SKYPILOT_NODE_IPS") or "").split()
    node_rank, said = read.number("SKYPILOT_NODE_RANK"), read.number("SKYPILOT_NUM_NODES")
    read.need(hosts[0] if hosts else None, "SKYPILOT_NODE_IPS")
    read.need(node_rank, "SKYPILOT_NODE_RANK")
    if said not in (None, len(hosts)):
        raise ValueError(f"SKYPILOT_NUM_NODES is {said}, but SKYPILOT_NODE_IPS has {len(hosts)} lines: unset one")
    processes = read.number("SKYPILOT_NUM_GPUS_PER_NODE") or None
    return NodePlace(num_nodes=len(hosts), node_rank=node_rank, head=read.head(hosts[0]), num_processes=processes)


def _slurm(read: _Variables) -> NodePlace:
    num_nodes = read.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    node_rank = read.number("SLURM_NODEID")
    hosts = read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    read.need(num_nodes, "SLURM_NNODES")
    assert num_nodes is not None
    if num_nodes == 1:  # perhaps in a batch script, or in a shell of salloc, with SLURM_NTASKS for steps to come
        node_rank = 0
        tasks = read.number("SLURM_STEP_NUM_TASKS")
    else:
        read.need(read.text("SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_STEP_ID")
        read.need(node_rank, "SLURM_NODEID")
        read.need(hosts, "SLURM_JOB_NODELIST")
        tasks = read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks not in (None, num_nodes):
        raise ValueError(
            f"SLURM runs {tasks} tasks on {num_nodes} node{'' if num_nodes == 1 else 's'} ({read.names[-1]}): one "
            f"launcher is needed on each node: srun --nodes {num_nodes} --ntasks {num_nodes} --ntasks-per-node 1"
        )
    head, processes = None if hosts is None else read.head(first_host(hosts)), read.number("SLURM_GPUS_ON_NODE") or None
    return NodePlace(num_nodes=num_nodes, node_rank=node_rank, head=head, num_processes=processes)


def _kubeflow(read: _Variables) -> NodePlace:
    num_nodes, node_rank = read.number("PET_NNODES"), read.number("PET_NODE_RANK")
    host, said = read.text("PET_MASTER_ADDR"), read.text("PET_NPROC_PER_NODE")
    read.need(num_nodes, "PET_NNODES")
    read.need(node_rank, "PET_NODE_RANK")
    processes = int(said) if said is not None and said.isdecimal() else None  # or auto, gpu
    head = None if host is None else read.head(host, "PET_MASTER_PORT")
    return NodePlace(num_nodes=num_nodes, node_rank=node_rank, head=head, num_processes=processes)


def _jax(read: _Variables) -> NodePlace:
    place = read.text("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
    read.need(place, "JAX_COORDINATOR_ADDRESS")
    assert place is not None
    where, host, port = read.names[-1], place, None
    # host:port or [::1]:port; anything else is a host alone, such as a bare IPv6 address
    if match := re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+):(\d+)", place):
        host, port = match[1] or match[3], int(text) if (text := match[2] or match[4]) else None
    # Kubeflow's trainer and JAX name the same numbers; both may be set, and then must agree.
    num_nodes, node_rank = read.agreed("NNODES", "JAX_NUM_PROCESSES"), read.agreed("NODE_RANK", "JAX_PROCESS_ID")
    said = read.number("JAX_COORDINATOR_PORT")
    if port is not None and said not in (None, port):
        raise ValueError(f"{where}={place} and JAX_COORDINATOR_PORT={said} contradict each other: unset what is wrong")
    port = said if port is None else port
    head = read.head(host) if port is None else Address(host=host, port=port)
    return NodePlace(num_nodes=num_nodes, node_rank=node_rank, head=head)


SOURCES: dict[str, tuple[tuple[str, ...], Callable[[_Variables], NodePlace]]] = {
    "Open MPI": (("OMPI_COMM_WORLD_SIZE",), _open_mpi),
    "SkyPilot": (("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), _skypilot),
    "SLURM": (("SLURM_JOB_ID",), _slurm),
    "Kubeflow": (("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"), _kubeflow),
    "JAX": (("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), _jax),
    "Kubernetes": (
        ("JOB_COMPLETION_INDEX",),
        lambda read: NodePlace(node_rank=read.number("JOB_COMPLETION_INDEX")),
    ),
}
"""Schedulers in the order in which they are looked for: the variables by which each is known, and its reader."""


def first_host(names: str) -> str:
    """Returns the first host of SLURM's list, such as ``node[07-09,12]-ib,login1``.

    ``scontrol show hostnames`` gives all.
    """
    # Split at the first comma outside of brackets, then take the first number of each bracket.
    first = re.split(r",(?![^\[]*\])", names)[0]
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.-]+", host) or re.search(r"\[\d+x\d", first):
        raise ValueError(f"the first host of SLURM's list '{names}' cannot be told: give --head HOST:PORT")
    return host
