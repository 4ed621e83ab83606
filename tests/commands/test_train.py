"""The train command end to end, and its refusals."""

import json
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.training.config import add_overrides, load_train_config, overrides_of
from tests.commands.running import ROOT, run_afresh, run_command, sentence
from tests.environment import of_child

HANGING = str(Path(__file__).with_name("hanging_train.py"))
DEBUG = "tpu_gpu_configs/cpu/debug.yaml"
SMALL = ("--hidden", 32, "--mlp-dim", 32, "--length", 16, "--batch-size", 8, "--max-bytes", 200_000)
ROW = {
    "step",
    "loss",
    "means",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "predicted_step_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "positions_per_s",
    "images_per_s",
    "token_padding",
    "patch_padding",
    "forwards_skipped",
    "model_flops",
    "model_tflops_per_device",
    "mfu",
    "bubble_fraction",
    "idle_s",
    "looking_ahead",
    "skipped",
    "fault",
    "num_skipped",
    "bad_samples",
    "peak_memory_bytes",
    "peak_host_bytes",
    "lost_units",
    "slow_units",
    "goodput",
}


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_directory_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "failure.json").write_text("of an earlier run")
    options = ("--config", DEBUG, *SMALL, "--hint", "fb", "--num-stages", 2, "--run-dir", run)
    first = run_afresh("train", *options, "--steps", 3)
    assert first.returncode == 0, first.stderr
    assert f"the resolved configuration is in {run / 'config.yaml'}" in first.stdout
    assert "num_stages:" not in first.stdout, "the configuration itself is in its file only"
    assert "compiling or loading 8 programs (0 done)" in first.stdout
    assert "the stages' 8 programs were ready after" in first.stdout
    assert not any(library in first.stderr for library in ("absl", "orbax", "INFO"))
    assert "embedding, layers 0-1" in first.stdout
    assert first.stdout.count("tokens/s") == 3
    files = {"config.yaml", "metrics.jsonl", "timeline.png", "trace.json", "checkpoints"}
    assert {path.name for path in run.iterdir()} == files
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["pipeline"]["hint"], config["run"]["steps"]) == ("fb", 3)

    with (run / "metrics.jsonl").open("a") as file:  # a step that was trained and not saved
        file.write(json.dumps({"step": 3, "loss": 1.0}) + "\n")
    second = run_command("train", *options, "--steps", 5, "--num-stages", 1)
    assert second.returncode == 0, second.stderr
    assert "going on after 3 steps" in second.stdout
    assert "was to have 3 steps and now has 5" in second.stdout
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(set(row) == ROW for row in rows)
    assert 5 < rows[0]["loss"] < 6.5
    assert rows[1]["learning_rate"] > rows[0]["learning_rate"] > 0
    assert not any(row["skipped"] for row in rows)

    again = run_command("train", *options, "--steps", 5)
    assert (again.returncode, "holds all 5 steps" in again.stdout) == (0, True)
    assert rows_of(run) == rows


@pytest.mark.slow
def test_the_first_example_learns_to_spell_and_its_second_start_compiles_nothing(tmp_path: Path) -> None:
    """What ``make train`` runs."""
    options = (
        "--config",
        DEBUG,
        "--run-dir",
        tmp_path / "run",
    )
    cache = {"RRFP_COMPILE_CACHE": str(tmp_path / "programs")}
    first = run_afresh("train", *options, timeout_s=900, environment=cache)
    assert first.returncode == 0, first.stderr
    losses = [row["loss"] for row in rows_of(tmp_path / "run")]
    assert losses[0] > 5.4, "all bytes are as likely"
    assert sum(losses[-10:]) / 10 < 2.2
    (compiled,) = re.findall(r"programs in all: .*, (\d+) compiled", first.stdout)
    assert int(compiled) > 16
    second = run_afresh("train", *options, timeout_s=300, environment=cache)
    assert second.returncode == 0, second.stderr
    assert re.search(r"programs in all: (\d+) loaded from .*, 0 compiled", second.stdout)


@pytest.mark.slow
def test_another_training_is_refused_unless_forced_and_fresh_starts_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--config", DEBUG, *SMALL, "--num-stages", 1, "--run-dir", run)
    assert run_command("train", *options, "--steps", 2).returncode == 0
    before = rows_of(run)
    other = (*options, "--steps", 3, "--learning-rate", 1e-4)
    refused = sentence(run_command("train", *other))
    assert "optimizer.learning_rate was 0.005 and is 0.0001" in refused
    assert "--fresh" in refused
    assert rows_of(run) == before

    text = tmp_path / "text.md"
    text.write_text("another text " * 10_000)
    assert "data.text was " in sentence(run_command("train", *options, "--steps", 3, "--path", text))

    forced = run_command("train", *other, "--force")
    assert forced.returncode == 0, forced.stderr
    assert "forced: optimizer.learning_rate was 0.005" in forced.stdout
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2]

    fresh = run_command("train", *options, "--steps", 1, "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert "starting over: removing config.yaml, metrics.jsonl, timeline.png, trace.json, checkpoints" in fresh.stdout
    assert [row["step"] for row in rows_of(run)] == [0]
    assert rows_of(run)[0]["loss"] == before[0]["loss"]


@pytest.mark.slow
def test_a_split_backward_trains_on_one_device(tmp_path: Path) -> None:
    order = ("--consume", "strict", "--schedule", "zb-h1", "--remat", "dots", "--num-stages", 2, "--devices", 1)
    result = run_command("train", "--config", DEBUG, *SMALL, *order, "--steps", 2, "--run-dir", tmp_path)
    assert result.returncode == 0, result.stderr
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"0F0", "0I0", "0W0", "1I7", "1W7"} <= names
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(5 < row["loss"] < 6.5 for row in rows)


@pytest.mark.slow
def test_two_copies_in_opposite_directions_train_as_one_stage_does(tmp_path: Path) -> None:
    losses = []
    for number, order in enumerate(
        (("--num-stages", 1), ("--schedule", "bitpipe", "--hint", "null", "--num-stages", 2))
    ):
        run = tmp_path / str(number)
        options = ("--config", DEBUG, *SMALL, "--window", "null", *order, "--steps", 4, "--run-dir", run)
        result = run_command("train", *options)
        assert result.returncode == 0, result.stderr
        losses.append([row["loss"] for row in rows_of(run)])
    assert "layer 1 (copy)" in result.stdout
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_a_schedule_as_hint_trains_within_its_footprint_and_tells_where_it_looks_ahead(tmp_path: Path) -> None:
    order = ("--schedule", "1f1b", "--hint", "schedule", "--window", "null", "--num-stages", 2, "--devices", 1)
    result = run_command("train", "--config", DEBUG, *SMALL, *order, "--steps", 2, "--run-dir", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path)
    assert rows[0]["looking_ahead"] == 2, "before anything is known of durations"
    assert f"ahead {rows[1]['looking_ahead']}/2" in result.stdout
    assert "may hold" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", 0), "window"),
        (("--layout", "Et|t|t|t*2L"), "layout [1, 1, 1, 2] sums to 5 but the model has 4 layers"),
        (("--layout", "Et|t|t"), "has 0 times L, the head: give it one"),
        (("--num-stages", 3), "give layout, for example 'Et*2|t|tL', or auto"),
        (("--batch-size", 30), "num_microbatches"),
        (("--path", "no/such/folder"), "no/such/folder"),
        (("--hint", "fastest"), "choose one of"),
        (("--consume", "strict"), "needs a schedule"),
        (("--consume", "strict", "--schedule", "gpipe", "--window", 4), "window"),
        (("--consume", "some"), "consume is some: give strict, foresight or ready"),
        (("--footprint", "on"), "'--footprint' is no option: give consume foresight or ready"),
        (("--schedule", "1f1b", "--hint", "schedule", "--window", 3), "give at least 4, leave window out"),
        (("--learning-rate", "fast"), "optimizer.learning_rate is 'fast'"),
        (("--steps", 0), "steps is 0"),
        (("--num-heads", 5), "head"),
        (("--layout", "Et*4L"), "layout has 1 chunks, and the stages and the schedule take 4"),
        (("--platform", "null"), "rank 0 has 1 cpu device"),
        (("--platform", "null"), "run.devices 1"),
        (("--devices", 0), "devices is 0"),
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
        ("pipeline: {adaptive: true}", "'adaptive' is no key of pipeline: plan from a finished run's durations"),
        ("pipeline: {data: 2}", "'data' is no key of pipeline: give replicas"),
        ("pipeline: {clip_norm: 1}", "'clip_norm' is no key of pipeline: give optimizer.clip_norm"),
        ("optimizer: {weight_decay: 0.1}", "give optimizer.arguments, such as {weight_decay: 0.1}"),
        ("modle: {}", "'modle' is no section: did you mean 'model'"),
        ("model: [", "is not YAML"),
        ("just text", "must hold the sections"),
        ("", "must hold the sections"),
        ("run: {steps: .inf}", "run.steps is inf: give a whole number"),
        ("model: {rope_theta: .nan}", "rope_theta is nan"),
    ],
)
def test_broken_configurations_are_refused(tmp_path: Path, text: str, message: str) -> None:
    complete = {name: {} for name in ("model", "data", "pipeline", "optimizer", "run")}
    if text in ("run: {steps: .inf}", "model: {rope_theta: .nan}"):
        complete = yaml.safe_load(Path(DEBUG).read_text())
    if "{" in text and "modle" not in text:
        changed = yaml.safe_load(text)
        text = yaml.safe_dump({name: values | changed.get(name, {}) for name, values in complete.items()})
    with pytest.raises(ValueError, match=message):
        load_train_config(write_config(tmp_path, text), {})


def test_a_section_with_nothing_below_it_has_no_settings_or_is_named(tmp_path: Path) -> None:
    text = Path(DEBUG).read_text().partition("cluster:")[0]
    path = write_config(tmp_path, f"{text}\ncluster:\n")
    assert load_train_config(path, {}) == load_train_config(DEBUG, {"cluster.progress_deadline_s": 600.0})
    for section in ("evaluation", "vision"):
        with pytest.raises(ValueError, match=f"the section {section} is empty: give it its keys, or take it out"):
            load_train_config(write_config(tmp_path, f"{text}\n{section}:\n"), {})


def test_a_missing_file_and_a_missing_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read"):
        load_train_config("nowhere.yaml", {})
    binary = tmp_path / "config.png"
    binary.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"config\.png is not UTF-8 text: give"):
        load_train_config(str(binary), {})
    content = yaml.safe_load(Path(DEBUG).read_text())
    del content["run"]["steps"]
    with pytest.raises(ValueError, match=r"run\.steps is missing"):
        load_train_config(write_config(tmp_path, yaml.safe_dump(content)), {})


def test_a_comma_makes_a_list_only_where_several_values_fit() -> None:
    parser = ArgumentParser()
    add_overrides(parser)
    given = overrides_of(parser.parse_args(["--run-dir", "a, b", "--window", "8,6"]))
    assert given == {"run.run_dir": "a, b", "pipeline.window": [8, 6]}


def test_a_map_without_a_space_behind_its_colon_is_refused_with_the_way_to_write_it() -> None:
    parser = ArgumentParser()
    add_overrides(parser)
    with pytest.raises(ValueError, match=r"'\{tensor:2\}' has no value for 'tensor:2': write 'tensor: 2'$"):
        overrides_of(parser.parse_args(["--mesh", "{tensor:2}"]))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ({"run.trackers": "wandb"}, ("wandb",)),
        ({"run.trackers": {"wandb": {"mode": "offline"}}}, ({"wandb": {"mode": "offline"}},)),
        ({"data.suffixes": ".py"}, (".py",)),
        ({"pipeline.window": 3}, 3),
        ({"pipeline.window": [3, 2, 2, 1]}, (3, 2, 2, 1)),
        ({"pipeline.memory_limit": 1_000_000}, 1_000_000),
        ({"pipeline.memory_limit": "1GiB"}, "1GiB"),
    ],
)
def test_forms_that_a_value_may_take(override: dict[str, object], value: object) -> None:
    section, name = next(iter(override)).split(".")
    assert getattr(getattr(load_train_config(DEBUG, override), section), name) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"pipeline.window": 1.5}, "pipeline.window is 1.5: give a whole number or a list or text"),
        ({"pipeline.memory_limit": -1}, "memory_limit is -1: give at least 1 byte"),
        ({"optimizer.clip_norm": "inf"}, "clip_norm is inf"),
        ({"cluster.progress_deadline_s": float("nan")}, "progress_deadline_s is nan"),
        ({"optimizer.arguments": {"weight_decay": float("inf")}}, "weight_decay is inf"),
        ({"model.rope_theta": "inf"}, "model.rope_theta is inf: give a finite number"),
        ({"run.platform": "tpu"}, "give cpu for virtual devices"),
    ],
)
def test_values_that_mean_nothing_are_refused(override: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_train_config(DEBUG, override)


@pytest.mark.parametrize(("place", "message"), [("file", "is a file"), ("file/run", "no folder"), ("run", "metrics")])
def test_a_run_directory_that_cannot_be_written_is_refused_first(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    asked = ("--run-dir", tmp_path / place, "--path", "no/such/folder")
    assert message in sentence(run_command("train", "--config", DEBUG, *asked))


def test_ctrl_c_ends_a_run_although_a_program_hangs_and_says_what_is_saved(tmp_path: Path) -> None:
    options = ("--config", DEBUG, *SMALL, "--num-stages", 2, "--run-dir", tmp_path)
    command = [sys.executable, HANGING, *map(str, options)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=of_child() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("step     1") for line in process.stdout)
            second = sentence(run_command("train", *options, "--fresh"))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=40)  # less than the progress deadline, which would end it too
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert f"{tmp_path} is in use: process {process.pid} on " in second
    assert "interrupted\nnothing was saved: the same command starts over\n" in errors
    assert (tmp_path / "timeline.png").exists()
    assert not (tmp_path / "run.lock").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_whose_last_state_is_not_on_the_disk_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_00000002").symlink_to(tmp_path / "archive")
    options = ("--config", DEBUG, *SMALL, "--num-stages", 1, "--run-dir", tmp_path / "run")
    result = run_command("train", *options, "--steps", 2, "--checkpoint-every", 1)
    assert result.returncode == 1, result.stderr
    assert "step 2 was not saved: " in result.stderr
    assert "error: the state after step 1 is not on the disk: the last checkpoint holds step 0," in result.stderr
    assert "Traceback" not in result.stderr
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1]
    assert list((tmp_path / "archive").iterdir()) == []


def test_a_run_without_progress_ends_with_its_own_code_and_a_report(tmp_path: Path) -> None:
    result = run_command(
        "train", "--config", DEBUG, *SMALL, "--num-stages", 2, "--progress-deadline-s", 1e-4, "--run-dir", tmp_path
    )
    assert result.returncode == 3, result.stderr
    assert "no task finished" in result.stderr
    report = json.loads((tmp_path / "failure.json").read_text())
    assert [state["stage"] for state in report["stages"]] == [0, 1]
    assert not (tmp_path / "timeline.png").exists()


@pytest.mark.slow
def test_strict_settings_of_jax_are_not_for_our_models_and_what_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--config", DEBUG, *SMALL, "--num-stages", 2, "--steps", 1, "--run-dir", tmp_path / "run")
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "raise")
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "strict")
    done = run_afresh("train", *options)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    done = run_afresh("train", *options, "--steps", 2)
    assert done.returncode == 2
    assert "jax_disable_jit is on" in done.stderr
    assert len(done.stderr.splitlines()) == 1
