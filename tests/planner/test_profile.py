"""The profile command: its refusals, and a profile of a small model end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.costs import CutModel
from rrfp_jax.planner.cost_file import read_costs
from rrfp_jax.schedules import linear
from tests.commands.running import run_command, sentence

TINY: dict[str, Any] = {
    "model": {"vocab_size": 256, "hidden": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 32},
    "data": {"length": 16, "batch_size": 8, "num_microbatches": 4, "max_bytes": 65536},
    "pipeline": {"num_stages": 2, "hint": "bf", "window": 4},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"steps": 4, "platform": "cpu"},
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "give one of them"),
        (
            ("--config", "cpu/debug", "--microbatch-size", "1,x"),
            "'1,x' is no list of numbers of at least 1: write",
        ),
        (("--config", "cpu/debug", "--tensor", "0"), "'0' is no list of numbers of at least 1: write"),
        (("--config", "cpu/debug", "--remat", "none,some"), "--remat names 'some': choose among none, dots, full"),
        (("--config", "cpu/debug", "--repeats", "0"), "repeats is 0: measure at least 1 step"),
        (("--timeline", "nowhere"), "nowhere/config.yaml cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options: tuple[str, ...], told: str) -> None:
    assert told in sentence(run_command("profile", *options))


@pytest.mark.slow
def test_a_profile_is_a_file_of_costs(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    ways = ("--microbatch-size", "1,2", "--remat", "none,full", "--repeats", "3")
    result = run_command("profile", "--config", tiny, "--output", out, "--json", *ways)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    book = read_costs(out)
    assert book.layers == ("embedding", "layer", "layer", "head")
    assert told["runs"] == 2 * 2 * 3 * (4 * 4 * (3 + 2) + 2 * 4)
    assert [(e.microbatch_size, e.remat) for e in book.entries] == [(1, "none"), (2, "none"), (1, "full"), (2, "full")]
    for entry in book.entries:
        layer = entry.types["layer"]
        assert min(layer.forward_ms, layer.weight_gradient_ms, layer.backward_ms or 0, layer.update_ms) > 0
        assert layer.kept_bytes == 0
        assert (layer.stash_bytes == layer.output_bytes) == (entry.remat == "full")  # each layer keeps its input alone
    small, large = book.entries[0].types["layer"], book.entries[1].types["layer"]
    assert small.fixed_bytes == large.fixed_bytes
    assert 2 * small.stash_bytes == pytest.approx(large.stash_bytes, rel=0.02)
    cut = CutModel(costs=book.at(microbatch_size=2), counts=(2, 2), placement=linear(2), num_microbatches=4)
    assert all(stage > 0 for stage in cut.stage_work_ms)


@pytest.mark.slow
def test_a_run_that_was_trained_tells_the_times_of_its_layers(tiny: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "costs.json"
    trained = run_command("train", "--config", tiny, "--run-dir", run, "--num-layers", 3, "--layout", "Et|t*2L")
    assert trained.returncode == 0, trained.stderr
    result = run_command("profile", "--timeline", run, "--output", out)
    assert result.returncode == 0, result.stderr
    assert "layers added up are off by" in result.stdout
    book = read_costs(out)
    assert book.layers == ("embedding", "layer", "layer", "layer", "head")
    assert book.entries[0].types["layer"].backward_ms
    assert book.entries[0].types["layer"].stash_bytes > 0
