"""What is found for few microbatches serves many."""

from dataclasses import replace

import pytest

from rrfp_jax.planning.orders import search_orders
from rrfp_jax.planning.orders.found import Pool
from rrfp_jax.planning.orders.improving import improve
from rrfp_jax.planning.orders.problem import problem_of
from rrfp_jax.planning.orders.reducing import extend, reduced
from rrfp_jax.planning.orders.rule_search import search_rules
from tests.planning.orders.cuts import PART, PLACEMENTS, homogeneous


@pytest.mark.parametrize("name", ["v", "looped 2"])
def test_an_extended_order_repeats_its_middle_without_losing_time(name: str) -> None:
    cut, room = homogeneous(PLACEMENTS[name](4), 48, hop_ms=0.5), [4 * PART] * 4
    small, pool = Pool(problem_of(replace(cut, num_microbatches=12), room)), Pool(problem_of(cut, room))
    search_rules(small, lambda: small.evaluations < 40)
    improve(small, 1, lambda: small.evaluations < 60)
    extend(small, pool, lambda: True)
    best = pool.found()[0]
    best.table.validate()
    assert max(best.peak) <= 4 * PART
    fewer = small.found()[0]
    loss_ms = fewer.makespan_ms - fewer.bound_ms
    assert best.makespan_ms - best.bound_ms <= 4 * loss_ms + 5  # as often as the small one fits into it
    assert {bool(candidate.rule) for candidate in pool.best} == {True, False}


def test_only_large_problems_are_reduced() -> None:
    assert reduced(homogeneous(PLACEMENTS["waves"](8), 32)) is None
    small = reduced(homogeneous(PLACEMENTS["v"](8), 128))
    assert small is not None
    assert small.num_microbatches == 24


@pytest.mark.slow
def test_a_large_search_keeps_to_memory_and_beats_named_tables() -> None:
    found = search_orders(homogeneous(PLACEMENTS["v"](16), 128, hop_ms=0.5), [8 * PART] * 16)
    named = next(order for order in found if order.is_named)
    assert found[0].makespan_ms < named.makespan_ms
    assert max(found[0].peak) <= 8 * PART
