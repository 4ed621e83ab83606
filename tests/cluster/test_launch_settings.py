"""What a launcher is told: ranks by node, interfaces, the environment of ranks."""

from dataclasses import replace

import pytest

from rrfp_jax.cluster.child_processes import rank_environment
from rrfp_jax.cluster.config import Address, LaunchSettings
from rrfp_jax.cluster.host import listens_on


def test_addresses():
    assert str(Address.parse("node-1:29400")) == "node-1:29400"
    assert str(Address.parse("[fe80::1]:80")) == "[fe80::1]:80"
    for text in ("node", "node:", ":80", "node:0", "node:65535", "node:x"):
        with pytest.raises(ValueError, match="give HOST:PORT"):
            Address.parse(text)


def test_ranks_are_dealt_out_node_by_node():
    head = Address.parse("127.0.0.1:29400")
    node = LaunchSettings(command=("m",), num_processes=3, num_nodes=4, node_rank=2, head=head)
    assert list(node.local_ranks()) == [6, 7, 8]
    assert (node.num_ranks, node.shares_key) == (12, True)
    supervisor = LaunchSettings(command=(), num_processes=3, head=head)
    assert (list(supervisor.local_ranks()), supervisor.num_ranks, supervisor.shares_key) == ([], 3, True)
    alone = LaunchSettings(command=("m",), num_processes=3)
    assert (alone.shares_key, listens_on(alone)) == (False, None)


def test_ranks_count_over_the_nodes_that_take_part():
    head = Address.parse("127.0.0.1:29400")
    node = LaunchSettings(command=("m",), num_processes=3, num_nodes=4, fewer_nodes=(2,), node_rank=3, head=head)
    assert (list(node.local_ranks()), node.num_ranks, node.node_counts) == ([9, 10, 11], 12, (4, 2))
    assert list(replace(node, present=(1, 3)).local_ranks()) == [3, 4, 5]
    assert (list(replace(node, present=(0, 2)).local_ranks()), replace(node, present=(0, 2)).num_ranks) == ([], 6)
    for counts in ((4,), (5,), (2, 2), (2, 0), (1, 2)):
        with pytest.raises(ValueError, match="the largest first, as 4,2"):
            replace(node, fewer_nodes=counts)


def test_the_interface_is_what_reaches_the_head():
    head = Address.parse("localhost:29400")
    common = {"command": ("m",), "num_processes": 1, "num_nodes": 2, "head": head}
    assert listens_on(LaunchSettings(**common, node_rank=0)) in ("127.0.0.1", "::1")
    assert listens_on(LaunchSettings(**common, node_rank=1)) in ("127.0.0.1", "::1")
    assert listens_on(LaunchSettings(**common, node_rank=1, interface="eth7")) == "eth7"
    lost = LaunchSettings(**common | {"head": Address.parse("no.such.host.invalid:1")}, node_rank=1)
    with pytest.raises(ValueError, match=r"no\.such\.host\.invalid:1 is unknown or out of reach"):
        listens_on(lost)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]", "*"])
def test_wildcards_are_no_places_to_meet(wildcard: str):
    common = {"command": ("m",), "num_processes": 1, "num_nodes": 2}
    with pytest.raises(ValueError, match="is no address that other processes could connect to: give the head"):
        LaunchSettings(**common, head=Address.parse(f"{wildcard}:29400"))
    with pytest.raises(ValueError, match="is no address that other processes could connect to"):
        LaunchSettings(**common, head=Address.parse("node-1:29400"), interface=wildcard)


def test_what_the_user_set_stands_and_keys_go_their_own_way():
    environ = {"NPROC": "2", "RRFP_RUN_KEY": "secret", "RRFP_RUN_KEY_FILE": "f", "RRFP_DETECT": "1", "A": "b"}
    made = rank_environment(environ, None)
    assert (made["NPROC"], made["A"], made["OMP_NUM_THREADS"], made["RRFP_LAUNCHER"]) == ("2", "b", "1", "1")
    assert not made.keys() & {"RRFP_RUN_KEY", "RRFP_RUN_KEY_FILE", "RRFP_DETECT"}
    assert rank_environment(environ, 4)["NPROC"] == "4"
    assert rank_environment({}, None)["NPROC"] == "8"


def test_variables_of_nccl_reach_every_rank() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO"}
    assert rank_environment(given, None).items() >= given.items()
