"""The simulator's speed: the large case stays within its limit, and time grows with the number of tasks."""

import io

import pytest
from rich.console import Console

from experiments import bench_simulation


def test_every_case_is_printed(monkeypatch):
    monkeypatch.setattr(bench_simulation, "NUM_STAGES", 2)
    monkeypatch.setattr(bench_simulation, "MICROBATCHES", (2, 4))
    shown = io.StringIO()
    assert set(bench_simulation.bench_simulation(Console(file=shown))) == {12, 24}
    assert "24 tasks" in shown.getvalue()


@pytest.mark.slow
def test_a_hundred_thousand_tasks_take_at_most_five_seconds():
    seconds = bench_simulation.bench_simulation(Console(file=io.StringIO()))
    assert seconds[98_304] <= 5
    assert seconds[98_304] <= 2 * 4 * seconds[24_576]
