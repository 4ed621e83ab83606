"""A launcher's place in a run, read from the variables that schedulers set around it. Pure: a function of a mapping.

What starts others is looked at after what it starts: ``mpirun`` and SkyPilot run inside allocations of SLURM or pods of
Kubernetes, whose variables are still there and may number the nodes in another way. So the first of :data:`SOURCES`
that is there is taken, whole, and no other is mixed in.
"""

import re
from collections.abc import Callable, Mapping

from rrfp_jax.launch.variables import Reader, Surroundings


def _open_mpi(read: Reader) -> Surroundings:
    num_nodes, node_rank = read.number("OMPI_COMM_WORLD_SIZE"), read.number("OMPI_COMM_WORLD_RANK")
    read.needed(node_rank, "OMPI_COMM_WORLD_RANK")
    if (beside := read.number("OMPI_COMM_WORLD_LOCAL_SIZE")) not in (None, 1):
        raise ValueError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE is {beside}: one launcher is needed on each node: mpirun --map-by ppr:1:node"
        )
    return Surroundings(
        scheduler="Open MPI",
        num_nodes=num_nodes,
        node_rank=node_rank,
        head_port=read.port(),
        variables=tuple(read.names),
    )


def _skypilot(read: Reader) -> Surroundings:
    hosts = (read.text("SKYPILOT_NODE_IPS") or "").split()
    node_rank, said = read.number("SKYPILOT_NODE_RANK"), read.number("SKYPILOT_NUM_NODES")
    read.needed(hosts[0] if hosts else None, "SKYPILOT_NODE_IPS")
    read.needed(node_rank, "SKYPILOT_NODE_RANK")
    if said not in (None, len(hosts)):
        raise ValueError(f"SKYPILOT_NUM_NODES is {said}, but SKYPILOT_NODE_IPS has {len(hosts)} lines: unset one")
    return Surroundings(
        scheduler="SkyPilot",
        num_nodes=len(hosts),
        node_rank=node_rank,
        head_host=hosts[0],
        head_port=read.port(),
        num_processes=read.number("SKYPILOT_NUM_GPUS_PER_NODE") or None,
        variables=tuple(read.names),
    )


def _slurm(read: Reader) -> Surroundings:
    num_nodes = read.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    node_rank = read.number("SLURM_NODEID")
    hosts = read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    read.needed(num_nodes, "SLURM_NNODES")
    assert num_nodes is not None
    if num_nodes == 1:  # perhaps in a batch script, or in a shell of salloc, with SLURM_NTASKS for steps to come
        node_rank = 0
        tasks = read.number("SLURM_STEP_NUM_TASKS")
    else:
        read.needed(read.text("SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_STEP_ID")
        read.needed(node_rank, "SLURM_NODEID")
        read.needed(hosts, "SLURM_JOB_NODELIST")
        tasks = read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks not in (None, num_nodes):
        raise ValueError(
            f"SLURM runs {tasks} tasks on {num_nodes} node{'' if num_nodes == 1 else 's'} ({read.names[-1]}): one "
            f"launcher is needed on each node: srun --nodes {num_nodes} --ntasks {num_nodes} --ntasks-per-node 1"
        )
    return Surroundings(
        scheduler="SLURM",
        num_nodes=num_nodes,
        node_rank=node_rank,
        head_host=None if hosts is None else first_host(hosts),
        head_port=read.port(),
        num_processes=read.number("SLURM_GPUS_ON_NODE") or None,
        variables=tuple(read.names),
    )


def _torch_elastic(read: Reader) -> Surroundings:
    num_nodes, node_rank = read.number("PET_NNODES"), read.number("PET_NODE_RANK")
    host = read.text("PET_MASTER_ADDR")
    read.needed(num_nodes, "PET_NNODES")
    read.needed(node_rank, "PET_NODE_RANK")
    processes = read.text("PET_NPROC_PER_NODE")
    return Surroundings(
        scheduler="Kubeflow (PET)",
        num_nodes=num_nodes,
        node_rank=node_rank,
        head_host=host,
        head_port=read.port("PET_MASTER_PORT"),
        num_processes=int(processes) if processes is not None and processes.isdecimal() else None,  # or auto, gpu
        variables=tuple(read.names),
    )


def _jax(read: Reader) -> Surroundings:
    place = read.text("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
    read.needed(place, "JAX_COORDINATOR_ADDRESS")
    assert place is not None
    where, host, port = read.names[-1], *_split(place)
    num_nodes, node_rank = read.agreed("NNODES", "JAX_NUM_PROCESSES"), read.agreed("NODE_RANK", "JAX_PROCESS_ID")
    read.needed(num_nodes, "NNODES", "JAX_NUM_PROCESSES")
    read.needed(node_rank, "NODE_RANK", "JAX_PROCESS_ID")
    said = read.number("JAX_COORDINATOR_PORT")
    if port is not None and said not in (None, port):
        raise ValueError(f"{where}={place} and JAX_COORDINATOR_PORT={said} contradict each other: unset what is wrong")
    if port is None:
        port = read.port("JAX_COORDINATOR_PORT") if said is None else said
    return Surroundings(
        scheduler="JAX's variables",
        num_nodes=num_nodes,
        node_rank=node_rank,
        head_host=host,
        head_port=port,
        variables=tuple(dict.fromkeys(read.names)),
    )


def _kubernetes(read: Reader) -> Surroundings:
    node_rank = read.number("JOB_COMPLETION_INDEX")
    return Surroundings(scheduler="Kubernetes", node_rank=node_rank, head_port=read.port(), variables=tuple(read.names))


SOURCES: dict[str, tuple[tuple[str, ...], Callable[[Reader], Surroundings]]] = {
    "Open MPI": (("OMPI_COMM_WORLD_SIZE",), _open_mpi),
    "SkyPilot": (("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), _skypilot),
    "SLURM": (("SLURM_JOB_ID",), _slurm),
    "Kubeflow": (("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"), _torch_elastic),
    "JAX": (("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), _jax),
    "Kubernetes": (("JOB_COMPLETION_INDEX",), _kubernetes),
}
"""In the order in which they are looked for: by which variables they are known, and how they are read."""


def read_surroundings(environ: Mapping[str, str]) -> Surroundings:
    """What the first scheduler says that is there.

    Raises ValueError where there is none, or where what it says is incomplete or contradicts itself.
    """
    for marks, reader in SOURCES.values():
        if any(environ.get(mark) for mark in marks):
            return reader(Reader(environ))
    known = "; ".join(f"{name}: {' or '.join(marks)}" for name, (marks, _) in SOURCES.items())
    raise ValueError(
        f"--from-environment finds no scheduler's variables here ({known}): give --nodes, --node-rank, --head"
    )


def first_host(names: str) -> str:
    """The first host of SLURM's list, such as ``node[07-09,12]-ib,login1``; ``scontrol show hostnames`` gives all."""
    first = re.split(r",(?![^\[]*\])", names)[0]
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.-]+", host) or re.search(r"\[\d+x\d", first):
        raise ValueError(f"the first host of SLURM's list '{names}' cannot be told: give --head HOST:PORT")
    return host


def _split(place: str) -> tuple[str, int | None]:
    """Host and port of ``host``, ``host:port`` or ``[::1]:port``."""
    match = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+):(\d+)", place)
    if match is None:
        return place, None
    return match[1] or match[3], int(port) if (port := match[2] or match[4]) else None
