"""Trackers of a real run: stopped, killed, failed, and gone on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.running import ROOT, run_afresh, run_command, sentence
from tests.environment import of_child
from tests.observe.tracker_reading import READERS, assert_equal, by_step, of_file

HANGING = str(Path(__file__).with_name("hanging_train.py"))
OPTIONS = (
    *("--config", "tpu_gpu_configs/cpu/debug.yaml", "--hidden", 32, "--mlp-dim", 32, "--length", 16),
    *("--batch-size", 8, "--max-bytes", 200_000, "--num-stages", 2),
    *("--trackers", ",".join("{wandb: {mode: offline}}" if name == "wandb" else name for name in READERS)),
)


def end_by(number: signal.Signals, at: str, program: list[str], *options: object) -> int:
    """Run until a line of a step is printed, send a signal, and return the exit code."""
    command = [sys.executable, *program, *map(str, options)]
    environment = of_child() | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith(at) for line in process.stdout), "the run has ended before"
        process.send_signal(number)
        process.communicate(timeout=120)
    return process.returncode


def assert_all_equal(run: Path) -> None:
    for tracker in READERS:
        assert_equal(tracker, run)


@pytest.mark.slow
def test_all_trackers_equal_the_file_when_told_to_stop_and_go_on_after_a_kill(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = (*OPTIONS, "--run-dir", run, "--checkpoint-every", 40)
    train = ["-m", "experiments.train"]
    assert end_by(signal.SIGTERM, "step    10 ", train, *options, "--steps", 100_000) == 7
    assert_all_equal(run)
    stopped = len(of_file(run))
    assert end_by(signal.SIGKILL, "step   125 ", train, *options, "--steps", 100_000) == -signal.SIGKILL
    assert len(of_file(run)) > stopped
    done = run_afresh("train", *options, "--steps", 160)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in of_file(run)] == list(range(160))
    for tracker in READERS:  # a kill may cost the last rows before it
        assert by_step(READERS[tracker](run))[-1][0] == 159


@pytest.mark.slow
def test_all_trackers_have_the_last_row_of_a_run_that_was_given_up(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HANGING, *map(str, OPTIONS), "--run-dir", tmp_path, "--progress-deadline-s", "5"],
        cwd=ROOT,
        env=of_child() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert len(of_file(tmp_path)) == 2
    assert_all_equal(tmp_path)


@pytest.mark.slow
def test_a_tracker_that_there_is_not_is_refused_and_one_that_cannot_start_costs_a_warning(tmp_path: Path) -> None:
    options = (*OPTIONS[:-4], "--run-dir", tmp_path / "run", "--steps", 2)
    assert "trackers has 'excel': give some of tensorboard" in sentence(
        run_command("train", *options, "--trackers", "excel")
    )
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("no folder")
    done = run_command("train", *options, "--trackers", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the tracker tensorboard is left out from here on: ") == 1
    assert "metrics.jsonl also go to tensorboard" in done.stdout
    assert len(of_file(tmp_path / "run")) == 2
