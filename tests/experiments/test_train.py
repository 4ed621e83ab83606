"""The train command end to end, and its refusals."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.config import load_train_config
from tests.experiments.commands import run_command, sentence

DEBUG = "tpu_gpu_configs/cpu/debug.yaml"
SMALL = ("--hidden", 32, "--mlp-dim", 32, "--length", 16, "--batch-size", 8, "--max-bytes", 200_000)
ROW = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s",
    "bubble_fraction",
    "skipped",
    "num_skipped",
    "peak_memory_bytes",
}


def test_a_run_writes_its_directory_and_a_second_one_appends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--config", DEBUG, *SMALL, "--hint", "fb", "--num-stages", 2, "--run-dir", run)
    first = run_command("train", *options, "--steps", 3)
    assert first.returncode == 0, first.stderr
    assert "num_stages: 2" in first.stdout
    assert "embedding, layers 0-1" in first.stdout
    assert first.stdout.count("tokens/s") == 3
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl", "timeline.png", "trace.json"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["pipeline"]["hint"], config["run"]["steps"]) == ("fb", 3)

    second = run_command("train", *options, "--steps", 2)
    assert second.returncode == 0, second.stderr
    assert "holds 3 rows of an earlier run" in second.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 0, 1]
    assert all(set(row) == ROW for row in rows)
    assert 5 < rows[0]["loss"] < 6.5
    assert rows[0]["loss"] == rows[3]["loss"]
    assert rows[1]["learning_rate"] > rows[0]["learning_rate"] > 0
    assert not any(row["skipped"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", 0), "window"),
        (("--layers-per-chunk", "1,1,1,2"), "4"),
        (("--num-stages", 3), "layers_per_chunk"),
        (("--batch-size", 30), "num_microbatches"),
        (("--path", "no/such/folder"), "no/such/folder"),
        (("--hint", "fastest"), "choose one of"),
        (("--consume", "strict"), "needs a schedule"),
        (("--consume", "strict", "--schedule", "gpipe", "--window", 4), "window"),
        (("--consume", "strict", "--schedule", "zb-h1"), "split"),
        (("--learning-rate", "fast"), "optimizer.learning_rate is 'fast'"),
        (("--steps", 0), "steps is 0"),
        (("--num-heads", 5), "head"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    run = tmp_path / "run"
    result = run_command("train", "--config", DEBUG, "--run-dir", run, *options)
    assert message in sentence(result)
    assert not run.exists()


def write_config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hiden: 3}", "'hiden' is no key of model: did you mean 'hidden'"),
        ("modle: {}", "'modle' is no section: did you mean 'model'"),
        ("model: [", "is not YAML"),
        ("just text", "must hold the sections"),
        ("", "must hold the sections"),
    ],
)
def test_broken_configurations_are_refused(tmp_path: Path, text: str, message: str) -> None:
    complete = {name: {} for name in ("model", "data", "pipeline", "optimizer", "run")}
    if text.startswith("model: {"):
        text = yaml.safe_dump({**complete, **yaml.safe_load(text)})
    with pytest.raises(ValueError, match=message):
        load_train_config(write_config(tmp_path, text), {})


def test_a_missing_file_and_a_missing_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read"):
        load_train_config("nowhere.yaml", {})
    content = yaml.safe_load(Path(DEBUG).read_text())
    del content["run"]["steps"]
    with pytest.raises(ValueError, match=r"run\.steps is missing"):
        load_train_config(write_config(tmp_path, yaml.safe_dump(content)), {})


def test_a_run_without_progress_ends_with_its_own_code_and_a_report(tmp_path: Path) -> None:
    result = run_command(
        "train", "--config", DEBUG, *SMALL, "--num-stages", 2, "--progress-deadline-s", 1e-4, "--run-dir", tmp_path
    )
    assert result.returncode == 3, result.stderr
    assert "no task finished" in result.stderr
    report = json.loads((tmp_path / "failure.json").read_text())
    assert [state["stage"] for state in report["stages"]] == [0, 1]
