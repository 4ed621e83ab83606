"""The comparison of plans with emulated runs has the settings that it promises, and compares what runs."""

import pytest

from experiments import bench_plan_emulated as bench
from experiments.bench_plan_emulated import Compared, SimToReal


def compared(*times_ms: tuple[float, float]) -> tuple[Compared, ...]:
    return tuple(Compared("", forecast, emulated, 0.0, 0.0) for forecast, emulated in times_ms)


def test_figures_of_a_comparison() -> None:
    found = SimToReal(compared((100, 101), (200, 190), (300, 300)), compared((100, 103), (101, 100)))
    assert found.largest_off == pytest.approx(0.05)
    assert found.rank_correlation == pytest.approx(1)
    assert found.regret == pytest.approx(0.03)
    assert SimToReal(compared((1, 3), (2, 2), (3, 1)), ()).rank_correlation == pytest.approx(-1)


def test_settings_differ_in_cut_order_consumption_and_foresight() -> None:
    book = bench.book_of(sigma=0.0, hop_ms=1.0, host_ms=0.0)
    found = [bench._candidate(number, book, window=4) for number in range(bench.SETTINGS)]
    assert {is_best for _, is_best in found} == {True, False}
    labels = {(one.order.label, one.cut.counts) for one, _ in found}
    assert len(labels) == bench.SETTINGS, "no setting twice"
    assert sum(one.is_searched for one, _ in found) == 4
    for word in ("strict", "with foresight", "as hint"):
        assert any(word in label for label, _ in labels)


def test_a_setting_runs_and_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEPS", 1)
    one = bench.compare(3, 0.1)
    assert one.emulated_ms > 100
    assert one.forecast_ms > 100
    assert one.host_ms > 0


@pytest.mark.slow
def test_a_plan_has_choices_enough_to_regret() -> None:
    plan, _ = bench.plan_of(0.1)
    assert len(plan.ranking) >= bench.TOP - 2
