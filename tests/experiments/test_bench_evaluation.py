"""The bench of evaluations goes through small settings and tells of each."""

import pytest

from experiments import bench_evaluation


def test_it_measures_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = (2, 1, 4, 0.0)
    monkeypatch.setattr(bench_evaluation, "SETTINGS", (setting,))
    monkeypatch.setattr(bench_evaluation, "FORWARD_MS", 1.0)
    monkeypatch.setattr(bench_evaluation, "NUM_ROUNDS", 1)
    found = bench_evaluation.bench_evaluation()
    assert found[setting].batches == 4
    assert found[setting].ideal_ms == pytest.approx(4 * 4 + 1)
    assert found[setting].real_ms >= found[setting].ideal_ms
