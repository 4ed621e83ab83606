"""The parts of bench, small, and what its commands refuse."""

import io

import pytest
from rich.console import Console

from experiments import bench_deterministic, bench_fidelity, bench_flow, bench_multimodal, bench_split
from tests.commands.running import run_command, sentence


def test_ordered_accumulation_is_compared_with_unordered(monkeypatch):
    monkeypatch.setattr(bench_deterministic, "REPEATS", 1)
    monkeypatch.setattr(bench_deterministic, "NUM_MICROBATCHES", 2)
    shown = io.StringIO()
    ratios = bench_deterministic.bench_deterministic(Console(file=shown, width=120))
    assert set(ratios) == {0.5, 1.0}
    assert all(0.3 < ratio < 3 for ratio in ratios.values())
    assert "ordered" in shown.getvalue()


def test_a_split_backward_is_measured_beside_the_fused_one(monkeypatch):
    monkeypatch.setattr(bench_split, "CASES", {"small": bench_split.Case(1, 8, 1, 4), "other": None})
    shown = io.StringIO()
    bench_split.bench_split(Console(file=shown, width=160), repeats=1, only="small")
    assert "small" in shown.getvalue()
    assert "(I+W)/B" in shown.getvalue()


def test_pipes_are_measured_beside_bare_queues_and_arbiters(monkeypatch):
    for name, value in {"NUM_TOKENS": 300, "REPEATS": 1, "LINES": (5,), "_STEPS": 1}.items():
        monkeypatch.setattr(bench_flow, name, value)
    shown = io.StringIO()
    bench_flow.bench_flow(Console(file=shown, width=160))
    assert "an arbiter per pipe" in shown.getvalue()


def test_simulated_and_real_settings_cover_every_way_to_consume():
    labels = {bench_fidelity.setting(seed)[0].label for seed in range(bench_fidelity.NUM_SETTINGS)}
    assert {"bf", "bf-deep", "1f1b strict", "1f1b as hint", "zb-h2 with foresight"} <= labels


def test_a_setting_runs_on_both_sides(monkeypatch):
    monkeypatch.setattr(bench_fidelity, "NUM_STEPS", 2)
    result = bench_fidelity.compare(8)
    assert result.label == "zb-h2 with foresight"
    assert 0.9 < result.ratio < 1.5


def test_pipelines_without_lost_units_run_on_both_sides():
    stages, replicas, share = 2, 2, 4
    # The last stage works without a break, after a forward and before a backward of the first one.
    for lost, simulated_ms in (((), 1 + 4 * 3 + 2), ((3,), 1 + 8 * 3 + 2)):
        emulated_ms, expected_ms = bench_fidelity.compare_after_losses(
            stages, replicas, share, lost, task_ms=1.0, sigma=0.0
        )
        assert expected_ms == pytest.approx(simulated_ms)
        assert emulated_ms >= expected_ms


def test_workloads_run_beside_their_forecast(monkeypatch):
    small = {"NUM_STEPS": 1, "REPEATS": 1, "NUM_MICROBATCHES": 6, "MEAN_FORWARD_MS": 1.0, "WORKLOADS": ["interleaved"]}
    for name, value in small.items():
        monkeypatch.setattr(bench_multimodal, name, value)
    shown = io.StringIO()
    results = bench_multimodal.bench_multimodal(Console(file=shown, width=160))
    assert [one.order for one in results] == [*bench_multimodal.ORDERS] * 2
    assert all(one.ideal_ms <= one.forecast_ms < 3 * one.real_ms for one in results)
    assert "zb-h1 strict" in shown.getvalue()
    assert "balanced beside as they come" in shown.getvalue()


@pytest.mark.parametrize(
    ("options", "message"), [(("--repeats", 0), "repeats is 0"), (("--only", "huge"), "choose among wide")]
)
def test_bad_input_is_refused_in_one_sentence(options, message):
    assert message in sentence(run_command("bench_split", *options))
