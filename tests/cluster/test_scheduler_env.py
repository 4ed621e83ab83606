"""What schedulers' variables say of a launcher's place, and how options complete it."""

import pytest

from rrfp_jax.cluster.config import Address
from rrfp_jax.cluster.scheduler_env import SOURCES, NodePlace, first_host, read_scheduler_env

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-10]",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_NTASKS": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
KUBEFLOW_TORCH = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
}
KUBEFLOW_JAX = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:6666",
    "JAX_COORDINATOR_PORT": "6666",
    "JOB_COMPLETION_INDEX": "1",
}
BY_HAND = {"JAX_COORDINATOR_IP": "10.0.0.4", "JAX_COORDINATOR_PORT": "7777", "NNODES": "2", "NODE_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "head", "processes"),
    [
        (SLURM, "gpu09:8476", 8),
        (SLURM | {"RRFP_PORT": "9000"}, "gpu09:9000", 8),
        (SKYPILOT, "10.0.0.4:8476", 8),
        (SKYPILOT | SLURM, "10.0.0.4:8476", 8),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "10.0.0.4:8476", None),
        (KUBEFLOW_TORCH, "run-node-0-0.run:29400", 8),
        (KUBEFLOW_TORCH | {"PET_NPROC_PER_NODE": "auto"}, "run-node-0-0.run:29400", None),
        (KUBEFLOW_JAX, "run-node-0-0.run:6666", None),
        (BY_HAND, "10.0.0.4:7777", None),
        (BY_HAND | {"JAX_COORDINATOR_IP": "[fe80::1]:80", "JAX_COORDINATOR_PORT": ""}, "[fe80::1]:80", None),
        (BY_HAND | {"JAX_COORDINATOR_IP": "fe80::1"}, "[fe80::1]:7777", None),
        (OPEN_MPI | SLURM, None, None),
    ],
)
def test_every_scheduler_says_which_node_of_two_this_is(
    environ: dict[str, str], head: str | None, processes: int | None
) -> None:
    found, source = read_scheduler_env(environ)
    assert (found.node_rank, found.num_nodes, found.num_processes) == (1, 2, processes)
    assert (found.head and str(found.head)) == head
    assert all(name in environ for name in source.partition("(")[2].strip(")").split(", "))


def test_one_node_of_slurm_is_the_first_also_in_a_batch_script() -> None:
    environ = {"SLURM_JOB_ID": "3", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu07", "SLURM_NTASKS": "8"}
    place, told = NodePlace(num_processes=4).completed(environ)
    assert place == NodePlace(num_nodes=1, node_rank=0, num_processes=4)
    assert told.startswith("node 0 of 1, processes on each: 4; from SLURM (SLURM_NNODES")


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu07", "gpu07"),
        ("login1,gpu[07-10]", "login1"),
        ("gpu[07-10],login1", "gpu07"),
        ("gpu[003,007-015]", "gpu003"),
        ("rack[2-3]node[00-15]-ib.local,x", "rack2node00-ib.local"),
    ],
)
def test_the_first_host_of_slurms_list(names: str, first: str) -> None:
    assert first_host(names) == first


def test_a_list_that_only_slurm_can_read_is_refused() -> None:
    with pytest.raises(ValueError, match="give --head"):
        first_host("bgl[123x456]")


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({"PATH": "/bin"}, "finds no scheduler's variables"),
        (SLURM | {"SLURM_NODEID": ""}, "but not SLURM_NODEID"),
        (SLURM | {"SLURM_STEP_ID": ""}, "but not SLURM_STEP_ID"),
        (SLURM | {"SLURM_NODEID": "2"}, "say node 2 of 2"),
        (SLURM | {"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'"),
        (SLURM | {"SLURM_NTASKS": "16"}, "16 tasks on 2 nodes .SLURM_NTASKS.: one launcher"),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"},
            "8 tasks on 1 node .SLURM_STEP_NUM_TASKS.:",
        ),
        (SLURM | {"RRFP_PORT": "65535"}, "RRFP_PORT is 65535"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES is 3, but SKYPILOT_NODE_IPS has 2"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "but not SKYPILOT_NODE_IPS"),
        (KUBEFLOW_TORCH | {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        (KUBEFLOW_TORCH | {"PET_NODE_RANK": ""}, "but not PET_NODE_RANK"),
        (KUBEFLOW_JAX | {"NNODES": "3"}, "NNODES=3 and JAX_NUM_PROCESSES=2 contradict"),
        (KUBEFLOW_JAX | {"JAX_COORDINATOR_PORT": "1"}, "JAX_COORDINATOR_PORT=1 contradict"),
        (KUBEFLOW_JAX | {"JAX_COORDINATOR_ADDRESS": ""}, "but not JAX_COORDINATOR_ADDRESS"),
        (BY_HAND | {"NNODES": ""}, "but not NNODES or JAX_NUM_PROCESSES"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "one launcher is needed on each node"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_named(environ: dict[str, str], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        read_scheduler_env(environ)


def test_where_nothing_is_found_all_that_is_looked_for_is_listed() -> None:
    with pytest.raises(ValueError, match="give --nodes, --node-rank, --head") as refused:
        read_scheduler_env({})
    assert all(mark in str(refused.value) for marks, _ in SOURCES.values() for mark in marks)


def test_what_is_given_wins_and_what_is_still_missing_is_named() -> None:
    elsewhere = Address.parse("other:1")
    place, told = NodePlace(num_nodes=3, head=elsewhere, num_processes=2).completed(SLURM)
    assert place == NodePlace(num_nodes=3, node_rank=1, head=elsewhere, num_processes=2)
    assert told.endswith("; as given: --nodes, --head, --processes")
    with pytest.raises(ValueError, match=r"Kubernetes .JOB_COMPLETION_INDEX. .*: give --nodes, --processes, --head"):
        NodePlace().completed({"JOB_COMPLETION_INDEX": "1"})
    with pytest.raises(ValueError, match="give --head"):
        NodePlace(num_processes=2).completed(OPEN_MPI)
