"""No sample is lost or doubled, limits are kept, and the dearest group never costs more than in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.data.balancing import balanced, samples_in_order, spread_by_cost

COSTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=24)


def dearest(groups, costs):
    return max(sum(costs[member] for member in group) for group in groups)


@given(COSTS, st.data())
def test_every_sample_is_in_one_group_and_no_group_is_dearer_than_in_order(costs, data):
    num_groups = data.draw(st.integers(1, len(costs)))
    groups = balanced(costs, num_groups)
    assert len(groups) == num_groups
    assert all(group and group == sorted(group) for group in groups)
    assert sorted(member for group in groups for member in group) == list(range(len(costs)))
    assert dearest(groups, costs) <= dearest(samples_in_order(len(costs), num_groups), costs) * (1 + 1e-9)
    assert groups == balanced(costs, num_groups)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_limits_are_kept(num_groups, size, data):
    """A number of members and a sum; what is in order sets the sum, so it fits and little else does."""
    num = num_groups * size
    costs = data.draw(st.lists(st.floats(0.01, 100), min_size=num, max_size=num))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=num, max_size=num))
    room = dearest(samples_in_order(num, num_groups), sizes)

    def fits(members):
        return len(members) <= size and sum(sizes[member] for member in members) <= room

    groups = balanced(costs, num_groups, fits=fits)
    assert all(fits(group) for group in groups)
    assert sorted(member for group in groups for member in group) == list(range(num))
    assert dearest(groups, costs) <= dearest(samples_in_order(num, num_groups), costs) * (1 + 1e-9)


def test_costs_that_can_be_equal_become_equal():
    assert dearest(balanced([7, 1, 1, 1, 5, 5, 3, 1], 2), [7, 1, 1, 1, 5, 5, 3, 1]) == 12
    # longest first leaves 3+2+2 beside 3+2; a swap does better
    assert dearest(balanced([3, 3, 2, 2, 2], 2), [3, 3, 2, 2, 2]) == 6


def test_microbatches_of_drawn_samples_come_close_to_their_mean():
    costs = np.random.default_rng(0).lognormal(0, 0.5, 64)
    assert dearest(balanced(costs, 8), costs) < 1.01 * costs.sum() / 8
    assert dearest(samples_in_order(64, 8), costs) > 1.1 * costs.sum() / 8


def test_one_that_fits_nowhere_sends_it_back_to_the_cut_in_order():
    def fits(members):
        return {*members} <= {0, 1, 2} or {*members} <= {3, 4}

    # longest first puts 1 and 2 apart, and then has no group left for 3
    assert balanced([1, 9, 9, 1, 1], 2, fits=fits) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 6, 8, 12])
def test_equal_ranges_of_microbatches_cost_about_the_same(num):
    """Halves are never worse than in order; smaller ranges are better on the whole."""
    excess = {True: [], False: []}
    for seed in range(20):
        costs = np.random.default_rng(seed).uniform(1, 3, num)
        order = spread_by_cost(list(costs))
        assert sorted(order) == list(range(num))
        for num_ranges in (parts for parts in (2, 4) if num % parts == 0 and num > parts):
            sums, plain = (values.reshape(num_ranges, -1).sum(axis=1) for values in (costs[order], costs))
            assert num_ranges > 2 or sums.max() <= plain.max()
            excess[True].append(sums.max() / sums.mean() - 1)
            excess[False].append(plain.max() / plain.mean() - 1)
    assert not excess[True] or np.mean(excess[True]) < 0.5 * np.mean(excess[False])


@pytest.mark.parametrize(
    ("costs", "num_groups", "message"),
    [
        ([1.0], 2, r"1 samples do not fill 2 groups"),
        ([1.0, 0.0], 1, r"costs of samples are 0\.0 to 1\.0: give positive numbers"),
        ([1.0, float("nan")], 1, r"give positive numbers"),
    ],
)
def test_bad_input_is_refused(costs, num_groups, message):
    with pytest.raises(ValueError, match=message):
        balanced(costs, num_groups)
