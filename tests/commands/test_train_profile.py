"""A trace of chosen steps: every task once per microbatch under its name, on the ranks that were chosen."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.schedules import Task
from rrfp_jax.training.run_config import parse_steps
from tests.commands.running import run_afresh, run_command
from tests.commands.test_train_trackers import OPTIONS, end_by, signal

DEBUG = "tpu_gpu_configs/cpu/debug.yaml"
SMALL = OPTIONS[2:-2]


def tasks_of(folder: Path) -> Counter[tuple[int, str]]:
    """How often a trace names each task, by step."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    assert list(folder.glob("plugins/profile/*/*.xplane.pb")), "what XProf reads"
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named: Counter[tuple[int, str]] = Counter()
    for event in events:
        if "step" in event.get("args", {}) and event["name"][:1].isdigit():
            Task.parse(event["name"])
            named[int(event["args"]["step"]), event["name"]] += 1
    return named


def tasks_of_steps(steps: range, num_microbatches: int = 8, chunks: range = range(2)) -> set[tuple[int, str]]:
    each = {f"{chunk}{kind}{m}" for chunk in chunks for kind in "FB" for m in range(num_microbatches)}
    each |= {f"{chunk}{kind}" for chunk in chunks for kind in "RU"}
    return {(step, name) for step in steps for name in each}


@pytest.mark.slow
def test_every_task_of_the_chosen_steps_has_its_name_once(tmp_path: Path) -> None:
    chosen = ("--profile-steps", "2:4", "--steps", 6)
    done = run_command("train", "--config", DEBUG, *SMALL, "--run-dir", tmp_path, *chosen)
    assert done.returncode == 0, done.stderr
    assert f"the trace of steps 2:4 is in {tmp_path / 'profile' / 'rank-0'}" in done.stdout
    named = tasks_of(tmp_path / "profile" / "rank-0")
    assert set(named) == tasks_of_steps(range(2, 4))
    assert set(named.values()) == {1}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))


@pytest.mark.slow
def test_rank_0_alone_traces_its_own_tasks(tmp_path: Path) -> None:
    command = ("--processes", 2, "--", "experiments.train", "--config", DEBUG, *SMALL, "--run-dir", tmp_path)
    done = run_afresh("launch", *command, "--profile-steps", "1:2", "--steps", 4, timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0"]
    assert set(tasks_of(tmp_path / "profile" / "rank-0")) == tasks_of_steps(range(1, 2), chunks=range(1))


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_leaves_the_trace_of_what_it_has_trained(tmp_path: Path) -> None:
    options = ("--config", DEBUG, *SMALL, "--run-dir", tmp_path, "--steps", 100_000, "--profile-steps", "5:90000")
    assert end_by(signal.SIGTERM, "step     8 ", ["-m", "experiments.train"], *options) == 7
    named = tasks_of(tmp_path / "profile" / "rank-0")
    last = max(step for step, _ in named)
    assert last >= 9
    assert set(named) == tasks_of_steps(range(5, last + 1))


def test_steps_are_given_as_first_and_end() -> None:
    assert parse_steps("10:13") == range(10, 13)
    for text in ("10", "10:", "13:10", "3:3", "-1:3", "1:2:3"):
        with pytest.raises(ValueError, match=r"profile_steps is '.*': give the first step"):
            parse_steps(text)
    with pytest.raises(ValueError, match="the last step is 4: give steps up to that"):
        load_train_config(DEBUG, {"run.steps": 5, "run.profile_steps": "5:6"})


def test_a_file_may_have_them_without_quotes(tmp_path: Path) -> None:
    text = Path(DEBUG).read_text().replace("  steps: 120\n", "  steps: 120\n  profile_steps: 10:13\n")
    (tmp_path / "mine.yaml").write_text(text)
    config = load_train_config(str(tmp_path / "mine.yaml"), {})
    assert config.run.profile_steps == "10:13"
    (tmp_path / "again.yaml").write_text(config.as_yaml())
    assert load_train_config(str(tmp_path / "again.yaml"), {}) == config
