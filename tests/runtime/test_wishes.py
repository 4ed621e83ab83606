"""Wishes of processes: told once, decided once, and the same in all verdicts of a step."""

import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.runtime.wishes import Wishes
from rrfp_jax.testing.virtual_network import VirtualNetwork
from rrfp_jax.tree import CONTROL_DEGREE


def wishes_of(layout: Layout) -> tuple[list[Wishes], VirtualNetwork]:
    network = VirtualNetwork(layout.num_ranks)
    return [Wishes(rank, layout) for rank in network.ranks], network


@pytest.mark.parametrize("asking", [0, 7, 199])
def test_every_process_knows_of_a_wish_to_stop_and_nobody_is_told_twice_by_another(asking: int) -> None:
    ranks, network = wishes_of(Layout(num_stages=200, num_ranks=200))
    ranks[asking].ask_to_stop()
    ranks[asking].ask_to_stop()
    network.run()
    assert all(each.stop for each in ranks)
    assert max(rank.counts.num_sent for rank in network.ranks) <= CONTROL_DEGREE + 1


def test_alone_a_wish_is_in_the_next_verdict() -> None:
    alone = Wishes(None, Layout(num_stages=2))
    assert alone.decide(0, 3) == (False, False)
    alone.ask_to_stop()
    alone.is_time_to_save = lambda: True
    assert alone.decide(0, 4) == (True, True)
    assert alone.decide(0, 5) == (True, False)  # it has been said


def test_processes_of_one_stage_find_the_same_whatever_each_knows() -> None:
    ranks, network = wishes_of(Layout(num_stages=1, tensor=3, num_ranks=3))
    ranks[1].stop = True  # a wish on its way to the others
    ranks[2].is_time_to_save = lambda: True  # one clock decides, and this is another
    for step in range(3):
        assert {each.decide(0, step) for each in ranks} == {(False, False)}
        network.run()
    ranks[0].stop = True
    ranks[0].is_time_to_save = lambda: True
    seen = []
    for step in range(3, 6):
        (decision,) = {each.decide(0, step) for each in ranks}
        seen.append(decision)
        network.run()
    assert seen == [(False, False), (True, True), (True, False)]
