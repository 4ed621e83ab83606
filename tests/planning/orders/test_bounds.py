"""No order is quicker than its bound, and orders that reach theirs are known."""

import numpy as np
import pytest

from rrfp_jax.planning.orders.bounds import memory_bound
from rrfp_jax.planning.orders.dispatch import Manner, dispatch
from rrfp_jax.planning.orders.problem import NS_PER_MS, problem_of
from rrfp_jax.planning.orders.replay import latest_starts, peaks, replay
from tests.planning.orders.cuts import PART, PLACEMENTS, homogeneous


def test_one_microbatch_at_a_time_takes_its_whole_way_each_time() -> None:
    problem = problem_of(homogeneous(PLACEMENTS["linear"](4), 5, hop_ms=1.0), [PART] * 4)
    way_ms = 4 * 20 + 10 + 2 * 3  # forth and back, and the last W
    assert memory_bound(problem) == 5 * way_ms * NS_PER_MS


def test_what_fits_before_the_first_backward_returns_bounds_the_rest() -> None:
    problem = problem_of(homogeneous(PLACEMENTS["linear"](4), 8), [2 * PART] * 4)
    # stage 0: the first I at 70 ms, two F of 10 ms before it
    assert memory_bound(problem) >= (70 + 8 * 30 - 20) * NS_PER_MS
    assert memory_bound(problem_of(homogeneous(PLACEMENTS["linear"](4), 8), None)) == 0


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("reserve", [True, False])
def test_any_ranking_gives_an_order_that_fits_and_is_no_quicker_than_its_bound(name: str, reserve: bool) -> None:
    rng = np.random.default_rng(7)
    for memory in (1, 2, 5):
        cut = homogeneous(PLACEMENTS[name](3), 6, hop_ms=float(rng.integers(3)))
        problem = problem_of(cut, [memory * PART] * 3)
        manner = Manner(float(rng.integers(2)), reserve, tuple(rng.integers(1, 4, problem.num_chunks).tolist()))
        ranking = rng.random(problem.num_tasks)
        made = dispatch(problem, ranking, manner)
        assert dispatch(problem, ranking, manner) == made
        if not made.is_complete:
            assert not reserve
            continue
        run = replay(problem, made.rows)
        assert run is not None
        assert run.makespan >= max(problem.bound, memory_bound(problem))
        assert max(peaks(problem, made.rows)) <= memory * PART
        latest = latest_starts(problem, made.rows, run)
        assert all(early <= late for early, late in zip(run.starts, latest, strict=True))
        assert dispatch(problem, rng.random(problem.num_tasks), manner, cutoff=problem.bound - 1)[0] is False
