"""Two launchers on loopback whose places come from a scheduler's variables."""

from contextlib import ExitStack

import pytest

from rrfp_jax.cluster import RunKey
from tests.multiprocess.launching import launched
from tests.multiprocess.ports import free_port


def slurm(node: int, port: int) -> dict[str, str]:
    lists = {"SLURM_JOB_NODELIST": "localhost,node[2-9]", "SLURM_STEP_NODELIST": "localhost,node2"}
    counts = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_NODEID": str(node)}
    return {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "RRFP_PORT": str(port), **lists, **counts}


def skypilot(node: int, port: int) -> dict[str, str]:
    counts = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NODE_RANK": str(node)}
    return {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n", "RRFP_PORT": str(port), **counts}


def kubeflow_torch(node: int, port: int) -> dict[str, str]:
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "2", **place}


def kubeflow_jax(node: int, port: int) -> dict[str, str]:
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_COORDINATOR_PORT": str(port)}
    return {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(node), **place}


def by_hand(node: int, port: int) -> dict[str, str]:
    place = {"JAX_COORDINATOR_IP": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
    return {"NNODES": "2", "NODE_RANK": str(node), **place}


def open_mpi(node: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(node),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "RRFP_PORT": str(port),
    }


def kubernetes(node: int, port: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(node)}


@pytest.mark.parametrize(
    ("surroundings", "options"),
    [
        (slurm, ()),
        *[
            pytest.param(kind, options, marks=pytest.mark.slow)
            for kind, options in (
                (skypilot, ()),
                (kubeflow_torch, ()),
                (kubeflow_jax, ("--processes", 2)),
                (by_hand, ("--processes", 2)),
                (open_mpi, ("--processes", 2, "--head", "127.0.0.1:{port}")),
                (kubernetes, ("--processes", 2, "--nodes", 2, "--head", "127.0.0.1:{port}")),
            )
        ],
    ],
)
def test_two_launchers_find_each_other(surroundings, options: tuple[object, ...]) -> None:
    port, key = free_port(), RunKey.generate().environment()
    given = [str(option).format(port=port) for option in options]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                launched("--from-environment", *given, "--", "talker", "--meet", **key, **surroundings(node, port))
            )
            for node in range(2)
        ]
        assert [node.wait() for node in nodes] == [0, 0], [node.text for node in nodes]
    for number, node in enumerate(nodes):
        (told,) = [line for line in node.own_lines() if line.startswith("node ")]
        assert told.startswith(f"node {number} of 2, head ")
        assert f":{port}, processes on each: 2; from " in told
        assert "ranks 0-3 ended well" in node.text
