"""The host's cost by the moment at which it decides: just in time loses less than at the end of a task."""

import io
from functools import partial

import pytest
from rich.console import Console

from experiments import bench_dispatch
from rrfp_jax.core import TimingRule


def test_every_case_is_printed_and_just_in_time_loses_least(monkeypatch):
    monkeypatch.setattr(bench_dispatch, "SIZES", ((4, 32),))
    monkeypatch.setattr(bench_dispatch, "DURATIONS_MS", (2.0,))
    monkeypatch.setattr(bench_dispatch, "ORDERS", {"bf": (1, {"hint": "bf"})})
    monkeypatch.setattr(bench_dispatch, "SIGMAS", (0.5,))
    monkeypatch.setattr(bench_dispatch, "NUM_SEEDS", 1)
    compared = {name: bench_dispatch.RULES_TO_COMPARE[name] for name in ("0 of 64", "0.5 of 64")}
    monkeypatch.setattr(bench_dispatch, "RULES_TO_COMPARE", compared)
    shown = io.StringIO()
    rows = dict(bench_dispatch.bench_dispatch(Console(file=shown, width=200)))
    assert list(rows) == ["bf, 2 ms, sigma 0.5"]
    assert "4 stages x 32 microbatches" in shown.getvalue()
    losses = rows["bf, 2 ms, sigma 0.5"]
    assert losses["0 of 64"].total <= 1 < losses["at the end"].total
    assert losses["known ends"].total < losses["0 of 64"].total + 0.2
    assert losses["0 of 64"].total < losses["0.5 of 64"].total
    assert losses["0 of 64"].order == losses["timer alone"].order, "certain choices are the same later"
    assert losses["0 of 64"].total < losses["timer alone"].total


@pytest.mark.parametrize("name", ["1f1b with foresight", "zb-h1 with foresight"])
def test_a_table_loses_little_more_than_slower_links_would_cost_it(name, monkeypatch):
    monkeypatch.setattr(bench_dispatch, "ORDERS", {name: bench_dispatch.ORDERS[name]})
    monkeypatch.setattr(bench_dispatch, "NUM_SEEDS", 1)
    just_in_time = partial(bench_dispatch._just_in_time, TimingRule())
    at_the_end = bench_dispatch._at_the_end
    ways = {"just in time": just_in_time, "slower links": bench_dispatch._slower_links, "at the end": at_the_end}
    monkeypatch.setattr(bench_dispatch, "_ways", lambda: ways)
    ((_, order),) = bench_dispatch._orders(4, 32)
    losses = bench_dispatch._losses(order, 2.0, 0.5)
    assert losses["slower links"].total > 1
    assert losses["just in time"].total < losses["slower links"].total + 1
    assert losses["just in time"].total < losses["at the end"].total / 2
