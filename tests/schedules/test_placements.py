"""The placements and graphs of V-shaped, wave and bidirectional schedules."""

import pytest

from rrfp_jax.schedules import Edge, bidirectional, opposite_chains, v_shaped, waves
from rrfp_jax.schedules.request import TWO_VS


def test_v_waves_and_two_directions() -> None:
    assert v_shaped(3).stage_of_chunk == (0, 1, 2, 2, 1, 0)
    assert waves(2, num_waves=2).stage_of_chunk == (0, 1, 1, 0, 0, 1, 1, 0)
    assert bidirectional(3).chunks_of_stage == ((0, 5), (1, 4), (2, 3))
    assert TWO_VS.placement(2, 4).stage_of_chunk == (0, 1, 1, 0, 1, 0, 0, 1)
    with pytest.raises(ValueError, match=r"num_waves \(0\)"):
        waves(4, num_waves=0)


def test_every_microbatch_runs_through_one_of_two_tied_chains() -> None:
    graph = opposite_chains(2, [0, 2], 3, split=True)
    assert graph.edges == (Edge(0, 1), Edge(2, 3))
    assert [graph.microbatches(chunk) for chunk in range(4)] == [(0, 2), (0, 2), (1,), (1,)]
    assert graph.shared == ((0, 2), (1, 3))
    assert graph.split == {0, 1, 2, 3}
