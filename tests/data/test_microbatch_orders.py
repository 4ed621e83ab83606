"""The order of microbatches by predicted cost: shorter steps, at equal memory, and never by much longer ones."""

import logging
from itertools import accumulate

import numpy as np
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.data.balancing import MicrobatchOrders, balanced, in_places, uneven_shares
from rrfp_jax.schedules import ScheduleRequest, TaskKind, absences, build_schedule, chain, linear
from rrfp_jax.simulation import Costs, simulate

STAGES, MICROBATCHES = 4, 12


def drawn(seed, sigma=0.6):
    """Costs by two sizes of each microbatch: the first half of the chunks see one, the others the other."""
    sizes = np.exp(sigma * np.random.default_rng(seed).normal(size=(2, MICROBATCHES)))
    return 10.0 * np.repeat(np.repeat(sizes, STAGES // 2, axis=0)[..., None], 3, axis=2)


def order_of(**options):
    return Ordering(**({"window": STAGES} | options)).resolve(linear(STAGES), chain(STAGES, MICROBATCHES))


def table_order(name, **options):
    table = build_schedule(name, ScheduleRequest(num_stages=STAGES, num_microbatches=MICROBATCHES))
    return Ordering(schedule=table, **options).resolve(table.placement, table.graph)


def step_of(order, costs, absent=()):
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.NONE))
    return simulate(arbiters, Costs(durations_ms=costs[None]), absent=(absent,) if absent else ()).timeline


def step_ms(order, costs, numbers=None, absent=()):
    numbers = range(costs.shape[1]) if numbers is None else numbers
    return step_of(order, costs[:, list(numbers)], in_places(absent, numbers)).makespan_s() * 1e3


@pytest.mark.parametrize(
    ("order", "most"),
    [(order_of(), 0.9), (table_order("1f1b", consume="strict"), 0.85), (table_order("zb-h1"), 0.9)],
    ids=["bf", "1f1b strict", "zb-h1 foresight"],
)
def test_the_order_found_is_shorter_and_its_length_is_the_predicted_one(order, most):
    orders, before, after = MicrobatchOrders(order), [], []
    for seed in range(6):
        costs = drawn(seed)
        chosen = orders.choose(costs)
        assert sorted(chosen.order) == list(range(MICROBATCHES))
        assert chosen == MicrobatchOrders(order).choose(costs)
        before.append(step_ms(order, costs))
        after.append(step_ms(order, costs, chosen.order))
        assert after[-1] == pytest.approx(chosen.predicted_ms)
        assert after[-1] <= before[-1]
        hill = orders.choose(costs, rounds=0)
        assert sorted(hill.order) == list(range(MICROBATCHES))
    assert sum(after) <= most * sum(before)


def test_costs_that_nobody_knew_exactly_keep_most_of_the_gain():
    order, gains = order_of(), []
    orders, rng = MicrobatchOrders(order), np.random.default_rng(0)
    for seed in range(10):
        costs = drawn(seed)
        noise = np.exp(0.3 * rng.normal(size=costs.shape) - 0.045)
        numbers = orders.choose(costs).order
        gains.append([step_ms(order, each) - step_ms(order, each, numbers) for each in (costs, costs * noise)])
    quiet, noisy = np.sum(gains, axis=0)
    assert noisy >= 0.6 * quiet > 0


def test_absent_pairs_come_along():
    order, rng = order_of(), np.random.default_rng(2)
    costs = drawn(3)
    pairs = absences((chunk, m) for m in rng.permutation(MICROBATCHES)[:4].tolist() for chunk in range(STAGES))
    costs[:, [m for m in range(MICROBATCHES) if pairs[0][1] >> m & 1]] = 0
    chosen = MicrobatchOrders(order).choose(costs, pairs)
    assert chosen.predicted_ms == pytest.approx(step_ms(order, costs, chosen.order, pairs))
    assert chosen.predicted_ms <= step_ms(order, costs, absent=pairs)
    assert in_places(pairs, range(MICROBATCHES)) == pairs


def test_microbatches_keep_their_order_where_costs_are_not_to_be_trusted():
    orders = MicrobatchOrders(order_of())
    orders.trusts_costs = False
    assert orders.choose(drawn(0)) is None


def test_microbatches_that_cost_the_same_keep_their_order():
    assert MicrobatchOrders(order_of()).choose(np.full((STAGES, MICROBATCHES, 3), 0.1) * 3) is None


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_costs_that_mean_nothing_are_told_of_once(wrong, caplog):
    orders, costs = MicrobatchOrders(order_of()), drawn(0)
    costs[1, 2] = wrong
    with caplog.at_level(logging.WARNING):
        assert orders.choose(costs) is None
        assert orders.choose(costs) is None
    assert caplog.messages == ["microbatches keep their order: their predicted costs are not all positive numbers"]
    assert orders.choose(drawn(0)) is not None


def test_uneven_shares_shorten_both_ends():
    """At the same window; stages hold more only by as much as the microbatches between are longer, 12 / 10.2 here."""

    def peak(costs, numbers):
        costs = costs[:, list(numbers)]
        held = [[] for _ in range(STAGES)]
        for span in step_of(order_of(), costs).spans:
            size = costs[span.task.chunk, span.task.microbatch, 0]
            is_forward = span.task.kind is TaskKind.F
            held[span.stage].append((span.start_s, 1, size) if is_forward else (span.end_s, 0, -size))
        return max(max(accumulate(change for *_, change in sorted(each))) for each in held)

    shares, results = uneven_shares(STAGES, MICROBATCHES), []
    assert shares[:4] == [0.4, 0.4, 0.7, 0.7]
    assert shares[4:] == [1.0] * (MICROBATCHES - 4)
    for seed in range(5):
        samples = np.exp(0.8 * np.random.default_rng(seed).normal(size=4 * MICROBATCHES))
        even, uneven = (
            np.repeat(
                [[[sum(samples[group])] * 3 for group in balanced(samples, MICROBATCHES, shares=each)]], 4, axis=0
            )
            for each in (None, shares)
        )
        plain, best = range(MICROBATCHES), MicrobatchOrders(order_of()).choose(uneven).order
        results.append([step_ms(order_of(), even), step_ms(order_of(), uneven, best)])
        assert peak(uneven, best) <= 1.2 * peak(even, plain)
    before, after = np.sum(results, axis=0)
    assert after <= 0.95 * before


def test_groups_by_shares_have_all_samples_and_none_is_empty():
    rng = np.random.default_rng(0)
    for num_samples in (6, 7, 30):
        costs, shares = rng.random(num_samples) + 0.01, [0.1, 0.1, 1.0, 1.0, 1.0, 2.0]
        groups = balanced(costs, 6, shares=shares)
        assert sorted(member for group in groups for member in group) == list(range(num_samples))
        assert all(groups)
    costs = np.ones(62)
    assert [len(group) for group in balanced(costs, 6, shares=[1, 10, 10, 10, 10, 21])] == [1, 10, 10, 10, 10, 21]
