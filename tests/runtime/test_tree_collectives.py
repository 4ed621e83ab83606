"""TreeAllGather of thousands of ranks over a network that only counts."""

import logging
import threading

import pytest

from rrfp_jax.layout import CONTROL_DEGREE
from rrfp_jax.runtime import tree_collectives
from rrfp_jax.runtime.tree_collectives import TreeAllGather
from rrfp_jax.testing.virtual_network import VirtualNetwork


def gather(num_ranks: int, data_of, *, to_all: bool = True):
    network = VirtualNetwork(num_ranks)
    ranks = [TreeAllGather(rank) for rank in network.ranks]
    under_way = [each.bring("sizes", data_of(each.rank), to_all=to_all) for each in ranks]
    network.run()
    assert all(gathering.complete.is_set() for gathering in under_way)
    return ranks, network


@pytest.mark.parametrize("num_ranks", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_sizes_of_many_ranks_gather(num_ranks: int) -> None:
    sizes = lambda rank: [[[10 * rank + chunk, 1 << 30, 3 << 30, 1 << 40] for chunk in range(10)], [[rank, None]]]  # noqa: E731
    ranks, network = gather(num_ranks, sizes)
    expected = {rank: sizes(rank) for rank in range(num_ranks)}
    for rank in (0, 1, num_ranks // 2 - 1, num_ranks - 1):
        assert ranks[rank].result("sizes") == expected
    busiest = max(network.ranks, key=lambda rank: rank.counts.num_sent)
    assert busiest.counts.num_sent <= CONTROL_DEGREE + 1
    assert max(len(rank.counts.neighbours) for rank in network.ranks) <= CONTROL_DEGREE + 1


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 6, 100])
def test_what_only_rank_0_needs_makes_no_large_answers(num_ranks: int) -> None:
    ranks, network = gather(num_ranks, lambda rank: rank, to_all=False)
    assert ranks[0].result("sizes") == {rank: rank for rank in range(num_ranks)}
    for each in ranks[1:]:
        assert each.result("sizes") == {0: 0}
    assert all(rank.counts.sent_bytes < 40 * (CONTROL_DEGREE + 1 + num_ranks) for rank in network.ranks)


def test_rank_0_says_for_whom_it_waits_and_then_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tree_collectives, "_SPEAK_AFTER_S", 0.05)
    network = VirtualNetwork(4)
    ranks = [TreeAllGather(rank) for rank in network.ranks]
    found: list[dict[int, object]] = []
    waits = threading.Thread(target=lambda: found.append(ranks[0].gather("boundary 3", "a")))
    with caplog.at_level(logging.INFO, "rrfp_jax"):
        ranks[1].bring("boundary 3", "b")
        waits.start()
        while not network_ran(network, waits):
            if caplog.messages and len(ranks) == 4:
                for each in (ranks.pop(), ranks.pop()):
                    each.bring("boundary 3", "c")
    assert found == [{0: "a", 1: "b", 2: "c", 3: "c"}]
    assert caplog.messages == ["waiting for rank 2 and rank 3 (boundary 3)"]


def network_ran(network: VirtualNetwork, waits: threading.Thread) -> bool:
    network.run()
    waits.join(0.01)
    return not waits.is_alive()
