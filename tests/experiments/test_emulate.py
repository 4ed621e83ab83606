"""The emulate command: its JSON, and its refusals."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.emulate import figures_in_words
from tests.commands.running import run_command, sentence


def test_the_last_line_is_one_json_object_with_the_runs_figures(tmp_path: Path) -> None:
    durations = tmp_path / "D.npy"
    np.save(durations, np.random.default_rng(0).uniform(0.5, 2, (3, 2, 4, 3)))
    result = run_command(
        "emulate",
        *("--num-stages", 2, "--num-microbatches", 4, "--schedule", "1f1b", "--consume", "strict"),
        *("--durations", durations, "--steps", 4, "--json", "--timeline", tmp_path / "t.png"),
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert len(figures["makespan_ms"]) == len(figures["step_ms"]) == 4
    assert figures["order"] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
    ]
    assert figures["peak_in_flight"] == [2, 1]
    assert figures["step_ms_mean"] == pytest.approx(np.mean(figures["step_ms"]), abs=1e-5)
    assert figures["us_per_task"] == pytest.approx(figures["step_ms_mean"] * 1e3 / 16)
    assert len(figures["stage_bubbles"]) == 2
    assert 0 <= figures["bubble_fraction"] < 1
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_a_schedule_as_hint_looks_ahead_where_it_pays() -> None:
    options = ("--num-stages", 2, "--num-microbatches", 3, "--schedule", "zb-h1", "--durations-ms", "20,20,20")
    figures = {}
    for switch in ("on", "off"):
        result = run_command("emulate", *options, "--steps", 2, "--json", "--footprint", switch, "--foresight", switch)
        assert result.returncode == 0, result.stderr
        figures[switch] = json.loads(result.stdout.splitlines()[-1])
    assert figures["on"]["looking_ahead"] == 2
    assert "looking_ahead" not in figures["off"]


def test_a_split_backward_runs_input_and_weight_gradients() -> None:
    result = run_command(
        "emulate", *("--num-stages", 2, "--num-microbatches", 3, "--hint", "bfw", "--durations-ms", "0,0,0"),
        *("--steps", 2, "--json"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    order = json.loads(result.stdout.splitlines()[-1])["order"]
    assert all({f"{stage}{kind}{m}" for kind in "FIW" for m in range(3)} == set(row) for stage, row in enumerate(order))


def test_the_figures_say_what_they_hold() -> None:
    metrics = SimpleNamespace(step_ms_mean=600.0, makespan_ms_mean=590.0, bubble_fraction=0.2, us_per_task=4000.0)
    figures = {"dispatch_overhead_ms": 3.4, "wall_us_per_rank_task": 19958.7, "cpu_us_per_task": 120.0}
    _, overhead, per_rank = figures_in_words(metrics, figures)
    assert "3.400 ms per task: what the host took between two tasks" in overhead
    assert "19958.7 us of wall time, work, waits and overhead together" in per_rank
    assert "wall_us_per_rank_task" not in per_rank, "names are for --json"
    assert len(list(figures_in_words(metrics, {"dispatch_overhead_ms": 3.4}))) == 2
    metrics.stage_bubbles = [0.1, 0.2, 0.3]
    *_, ahead = figures_in_words(metrics, {"dispatch_overhead_ms": 3.4, "looking_ahead": 2})
    assert ahead.startswith("foresight is at work on 2 of 3 stages")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--durations", "missing.npy"), "cannot read durations missing.npy"),
        (("--durations-ms", "1,2"), "three numbers"),
        (("--durations-ms", "1,2,-3"), "0 or more"),
        (("--window", 0), "window"),
        (("--schedule", "1f1b", "--window", 1), "window 1 of stage 0 is less than the 4 microbatches"),
        (("--foresight", "on"), "foresight needs a schedule"),
        (("--schedule", "1f1b", "--consume", "strict", "--footprint", "on"), "footprint needs a schedule"),
        (("--footprint", "yes", "--schedule", "1f1b"), "footprint is 'yes': write on or off"),
        (("--link-delay-ms", "0-9:3"), "link 0-9 does not exist"),
        (("--link-delay-ms", "0-1:-3"), "extra_ms of link 0-1"),
        (("--steps", 0), "at least 1"),
        (
            ("--dispatch-ahead", -1),
            "dispatch_ahead is -1: give auto, just-in-time (in place of a number of tasks), certain, pairs, or 0",
        ),
        (
            ("--dispatch-ahead", "later"),
            "dispatch_ahead is 'later': give auto, just-in-time (in place of a number of tasks), certain, pairs, or 0",
        ),
        (("--launch-ms", 1), "give --accelerator too"),
        (("--accelerator", "--launch-ms", "nan"), "launch-ms is nan: give 0 or more milliseconds"),
        (("--num-microbatches", 0), "at least 1"),
        (("--schedule", "gpipe", "--consume", "strict", "--window", 2), "window"),
        (("--schedule", "1f2b"), "1f1b"),
        (("--timeline", "t.gif"), "end in .png, .svg or .html"),
        (("--timeline", "README.md/t.png"), "is a file"),
        (("--trace", "t.txt"), "end in .json"),
        (("--progress-deadline-s", "nan"), "positive number of seconds"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(options: tuple[object, ...], message: str) -> None:
    assert message in sentence(run_command("emulate", *options))


def test_a_run_without_progress_ends_with_its_own_code_and_the_report() -> None:
    result = run_command("emulate", "--progress-deadline-s", 0.001)
    assert (result.returncode, result.stdout) == (3, "")
    assert "error: no task finished" in result.stderr
    assert "stage 0 has been running 0F0" in result.stderr


def test_corrupt_duration_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.npy"
    np.save(whole, np.ones((1, 4, 16, 3)))
    cut = tmp_path / "cut.npy"
    cut.write_bytes(whole.read_bytes()[:-100])
    text = tmp_path / "text.npy"
    text.write_text("10 10 10")
    words = tmp_path / "words.npy"
    np.save(words, np.full((1, 4, 16, 3), "ten"))
    other = tmp_path / "other.npy"
    np.save(other, np.ones((1, 2, 16, 3)))
    nan = tmp_path / "nan.npy"
    np.save(nan, np.full((1, 4, 16, 3), np.nan))
    for path, message in (
        (cut, "not a whole .npy file"),
        (text, "not a whole .npy file"),
        (words, "real numbers"),
        (other, "2 chunks"),
        (nan, "non-finite"),
    ):
        assert message in sentence(run_command("emulate", "--durations", path)), path


def test_offload_keeps_to_its_slots() -> None:
    result = run_command(
        "emulate",
        *("--num-stages", 3, "--num-microbatches", 6, "--schedule", "1f1b", "--offload", 2, "--copy-ms", 0.5),
        *("--durations-ms", "2,2,2", "--steps", 2, "--json"),
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["peak_memory"] == [2, 2, 1]
    assert figures["host_peak"][0] >= 1
    assert figures["host_peak"][1:] == [0, 0]
