"""The bench of searched orders shows what it promises."""

import io

import pytest
from rich.console import Console

from experiments import bench_orders, order_cases
from rrfp_jax.schedules import linear, v_shaped


def test_all_columns_are_filled_and_nothing_found_is_slower_than_a_named_table(monkeypatch):
    monkeypatch.setattr(bench_orders, "PLACEMENTS", {"linear": linear(2), "V": v_shaped(2)})
    monkeypatch.setattr(bench_orders, "NUM_MICROBATCHES", 4)
    shown = io.StringIO()
    rows = bench_orders.bench_orders(Console(file=shown, width=200), [order_cases.gemma_like(50)])
    assert "Gemma-like" in shown.getvalue()
    (row,) = rows
    assert row.gain is not None
    assert row.gain >= 0
    assert row.even.order.makespan_ms >= row.best_cut.order.makespan_ms
    assert row.bound_ms <= row.found.order.makespan_ms


@pytest.mark.slow
@pytest.mark.parametrize("case", order_cases.CASES, ids=lambda case: f"{case.name} {case.memory}")
def test_found_orders_fit_and_are_no_slower_than_the_best_named_table_on_its_best_cut(case):
    row = bench_orders.measure(case)
    assert max(row.found.order.peak) <= case.limit
    assert row.gain is None or row.gain >= 0
