"""The bench of evaluations goes through small settings and tells of each."""

import pytest

from experiments import bench_evaluation


@pytest.mark.slow
def test_it_measures_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"NUM_STAGES": 2, "NUM_MICROBATCHES": 2, "EVERY": 4, "NUM_EVALUATIONS": 1, "NUM_ROUNDS": 1}
    for name, value in {"SETTINGS": (("1f1b", "strict"),), "TASK_S": 0.002, **small}.items():
        monkeypatch.setattr(bench_evaluation, name, value)
    found = bench_evaluation.bench_evaluation()["1f1b", "strict"]
    assert found.step_ms >= 2 * 3 * 3  # three rows of tasks, each as long as F and B together
    assert found.between > 0
    assert 0 <= found.used < 1
