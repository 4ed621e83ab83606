"""Owners after a loss and for slow units: evenly and with few moves, by measures in which the work cancels."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.rebalancing import SpeedWatch, UnitWork, adopted_owners, owners_in_words, planned_owners
from rrfp_jax.core.replicas import block_owners


def blocks(num_stages, num_replicas, share):
    return block_owners(num_stages, num_replicas * share, num_replicas)


def counts(row):
    return [row.count(replica) for replica in sorted(set(row))]


# -- after a loss ------------------------------------------------------------------------------------------------------


@st.composite
def losses(draw):
    num_stages, num_replicas, share = (draw(st.integers(low, 5)) for low in (1, 2, 1))
    units = range(num_stages * num_replicas)
    kept = [draw(st.integers(0, num_replicas - 1)) * num_stages + stage for stage in range(num_stages)]
    return blocks(num_stages, num_replicas, share), {*kept, *draw(st.sets(st.sampled_from(units)))}


@given(losses())
def test_living_units_keep_their_microbatches_and_share_the_others_evenly(case):
    normal, living = case
    for stage, (before, after) in enumerate(zip(normal, adopted_owners(normal, living), strict=True)):
        alive = {unit // len(normal) for unit in living if unit % len(normal) == stage}
        assert set(after) == alive
        assert all(old == new for old, new in zip(before, after, strict=True) if old in alive)
        assert max(counts(after)) - min(counts(after)) <= 1


def test_adopted_microbatches_of_neighbouring_ages_go_to_different_replicas():
    (row,) = adopted_owners(blocks(1, 4, 6), {0, 1, 3})
    assert row[12:18] == (0, 1, 3, 0, 1, 3)


def test_a_stage_without_replicas_is_refused():
    with pytest.raises(ValueError, match="stage 1 has lost all its replicas"):
        adopted_owners(blocks(2, 2, 3), {0, 2})


# -- planning ----------------------------------------------------------------------------------------------------------


def last_end(row, factors, costs):
    return max(f * sum(c for c, owner in zip(costs, row, strict=True) if owner == r) for r, f in enumerate(factors))


@given(
    st.integers(2, 4).flatmap(lambda n: st.lists(st.floats(1, 1.8), min_size=n, max_size=n)),
    st.integers(2, 12),
)
def test_with_equal_costs_no_division_ends_a_tenth_of_a_microbatch_sooner(factors, share):
    (normal,) = blocks(1, len(factors), share)
    (row,) = planned_owners((normal,), dict(enumerate(factors)))
    end, best = last_end(row, factors, [1.0] * len(row)), greedy_end(len(row), factors)
    # A unit of which half the microbatches have left keeps the rest.
    kept = max(factor * (share - share // 2) for factor in factors)
    assert end <= max(best + 0.1 * max(factors) + 1e-6, kept + 1e-6)


def greedy_end(num_microbatches, factors):
    """Returns the soonest end of equal microbatches, each going to whoever would have run it first."""
    numbers = [0] * len(factors)
    for _ in range(num_microbatches):
        numbers[min(range(len(factors)), key=lambda r: (numbers[r] + 1) * factors[r])] += 1
    return max(number * factor for number, factor in zip(numbers, factors, strict=True))


@given(st.data(), st.integers(1, 3), st.integers(2, 4), st.integers(1, 8))
def test_every_plan_ends_no_later_moves_no_microbatch_twice_and_leaves_each_unit_half(data, stages, replicas, share):
    normal = blocks(stages, replicas, share)
    factors = data.draw(st.dictionaries(st.integers(0, stages * replicas - 1), st.sampled_from([0.7, 1.3, 2.0, 9.0])))
    row_of_costs = st.lists(st.floats(0, 5), min_size=replicas * share, max_size=replicas * share)
    costs = [data.draw(row_of_costs) for _ in range(stages)]
    planned = planned_owners(normal, factors, costs)
    assert planned == planned_owners(normal, factors, costs)
    for stage, (before, after) in enumerate(zip(normal, planned, strict=True)):
        of_stage = [factors.get(r * stages + stage, 1.0) for r in range(replicas)]
        assert last_end(after, of_stage, costs[stage]) <= last_end(before, of_stage, costs[stage]) * (1 + 1e-9)
        for r in range(replicas):
            assert sum(old == r != new for old, new in zip(before, after, strict=True)) <= share // 2
        if all(factor == 1 for factor in of_stage):
            assert after == before


def test_a_unit_that_takes_1_3_times_as_long_gives_three_of_sixteen_away_from_the_middle():
    normal = blocks(8, 4, 16)
    planned = planned_owners(normal, {2 * 8 + 4: 1.3})
    assert counts(planned[4]) == [17, 17, 13, 17]
    moved = [m for m in range(64) if planned[4][m] != normal[4][m]]
    assert min(moved) > 32
    assert max(moved) < 47
    assert all(b - a > 2 for a, b in pairwise(moved))
    assert planned[:4] + planned[5:] == normal[:4] + normal[5:]
    assert owners_in_words(normal, planned) == [
        "stage 4: replicas 0, 1, 2, 3 run 17, 17, 13, 17 microbatches instead of 16, 16, 16, 16"
    ]


def test_owners_after_a_loss_are_planned_among_the_living():
    normal = blocks(2, 3, 6)
    adopted = adopted_owners(normal, {0, 1, 2, 3, 5})
    planned = planned_owners(adopted, {2: 1.5})
    assert counts(adopted[0]) == [9, 9]
    assert counts(planned[0]) == [11, 7]
    assert planned[1] == normal[1]
    assert owners_in_words(normal, planned) == [
        "stage 0: replicas 0, 1, 2 run 11, 7, 0 microbatches instead of 6, 6, 6"
    ]


# -- slow units --------------------------------------------------------------------------------------------------------


def observed(watch, *steps, num_stages=1, first=0):
    """Lets the watch see the ratio of each unit, by unit number, step after step; returns all that it says."""
    found = []
    for step, ratios in enumerate(steps, first):
        cost = 3.0 + step % 4  # the work varies, and cancels
        found += watch.observe(step, {unit: UnitWork(cost, ratio * cost) for unit, ratio in enumerate(ratios)})
    return found


SLOW, EVEN = (1, 1, 1.2, 1), (1, 1, 1, 1)


def test_five_steps_that_agree_make_a_finding_and_four_do_not():
    watch = SpeedWatch(1)
    assert observed(watch, *[EVEN] * 9, *[SLOW] * 4) == []
    assert watch.factors == {}
    (found,) = observed(watch, SLOW, first=13)
    assert found == (13, 0, 2, pytest.approx(1.2), 1.0, 9)
    assert watch.factors == {2: pytest.approx(1.2)}
    assert found.sentence == (
        "stage 0, replica 2 takes 1.20 times as long as its stage's replicas for the same predicted work, over 9 steps "
        "up to step 13"
    )


def test_a_unit_that_is_slow_from_the_start_is_found_after_five_steps():
    (found,) = observed(SpeedWatch(1), *[SLOW] * 8)
    assert (found.step, found.num_steps) == (4, 5)


def test_pauses_in_four_of_nine_steps_change_nothing():
    pause = (1, 7, 1, 1)
    assert observed(SpeedWatch(1), *[*[EVEN] * 5, *[pause] * 4] * 9) == []


def test_a_factor_in_force_stays_until_the_unit_departs_from_it_or_is_as_fast_as_the_others():
    watch = SpeedWatch(1)
    assert len(observed(watch, *[SLOW] * 9)) == 1
    assert observed(watch, *[(1, 1, 1.11, 1), (1, 1, 1.29, 1)] * 9) == []
    assert observed(watch, *[(1, 1, 1.14, 1)] * 9) == []  # less than a tenth below 1.2
    (back,) = observed(watch, *[(1, 1, 1.04, 1)] * 9, first=36)
    assert (back.factor, back.step, watch.factors) == (1.0, 40, {})
    assert back.sentence.startswith(
        "stage 0, replica 2 takes as long as its stage's replicas again, after 1.20 times as long, for the same"
    )
    assert observed(watch, *[(1, 1, 1.08, 1)] * 20) == []  # neither near enough to 1.2 nor far enough from 1


def test_departures_that_lie_within_the_noise_of_the_steps_say_nothing():
    noisy = [(1, 1, ratio, 1) for ratio in (0.8, 1.5, 1.15, 1.6, 0.9, 1.15, 0.7, 1.5, 1.2)]
    assert observed(SpeedWatch(1), *noisy * 4) == []


def test_of_two_replicas_the_faster_one_is_the_measure():
    (found,) = observed(SpeedWatch(1), *[(1.2, 1)] * 5)
    assert (found.replica, found.factor) == (0, pytest.approx(1.2))


def test_a_stage_that_is_slow_in_all_replicas_is_named_and_moves_nothing():
    watch = SpeedWatch(3)
    (found,) = observed(watch, *[(1, 1.5, 1) * 2] * 5, num_stages=3)
    assert (found.stage, found.replica, watch.factors) == (1, None, {})
    assert found.sentence.startswith("stage 1 in all its replicas takes 1.50 times as long as the other stages")
    assert found.sentence.endswith("; owners cannot help, another cut of the layers can")


def test_a_unit_that_was_away_is_measured_anew():
    watch = SpeedWatch(1)
    observed(watch, *[SLOW] * 9)
    watch.observe(9, {unit: UnitWork(1, 1) for unit in (0, 1, 3)})
    assert watch.factors == {}
    assert observed(watch, *[EVEN] * 4, *[SLOW] * 4) == []


def test_steps_in_which_a_unit_ran_nothing_say_nothing_of_it():
    watch = SpeedWatch(1)
    for step in range(9):
        works = {0: UnitWork(1, 1), 1: UnitWork(1, 1), 2: UnitWork(0, 0) if step % 2 else UnitWork(1, 1.2)}
        found = watch.observe(step, works)
        assert bool(found) == (step == 8)
    assert watch.observe(9, {unit: UnitWork(0, 0) for unit in range(3)}) == []


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=4, max_size=4), max_size=25), st.integers(1, 2))
def test_factors_follow_from_the_reports_alone(ratios, num_stages):
    watches = SpeedWatch(num_stages), SpeedWatch(num_stages)
    first, second = (observed(watch, *ratios) for watch in watches)
    assert first == second
    assert watches[0].factors == watches[1].factors
    in_force = dict.fromkeys(product(range(num_stages), (None, *range(4))), 1.0)
    for change in first:
        assert in_force[change.stage, change.replica] == change.before != change.factor
        in_force[change.stage, change.replica] = change.factor
