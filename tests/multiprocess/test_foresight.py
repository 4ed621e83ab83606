"""Foresight between real processes: announcements, holds, what the figures say, logs that replay, and going on."""

import json
from pathlib import Path

import pytest

from rrfp_jax.commands import replay
from rrfp_jax.core import Announce, TaskAnnounced, WakeAt
from rrfp_jax.runtime.event_log import read_log
from tests.multiprocess.launching import launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, outcome_of, training_config

SIZES = ("--num-stages", 4, "--num-microbatches", 6, "--steps", 3)


@pytest.mark.slow
def test_stages_of_two_processes_hold_for_each_other_and_every_log_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow link lies between the processes: two stages are on each."""
    work = ("--schedule", "zb-h1", "--durations-ms", "10,10,20", "--link-delay-ms", "1-2:40")
    output = ("--json", "--events", tmp_path / "events.json.gz")
    with launched("--processes", 2, "--", "experiments.emulate", *SIZES, *work, *output) as launcher:
        assert launcher.wait() == 0, launcher.text
        figures = json.loads(next(line for line in launcher.stdout if line.startswith("{")))
    assert figures["looking_ahead"] == 4, "rank 0 is told of all"
    assert any(stage.get("hold", 0) > 0 for stage in figures["idle_ms"])
    assert replay.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_same"] is True
    held = False
    for stage in (stage for rank in range(2) for stage in read_log(tmp_path / f"events-rank{rank}.json.gz").stages):
        entries = [entry for segment in stage.segments for entry in segment.entries]
        answers = [answer for _, answers in entries for answer in answers]
        assert any(isinstance(event, TaskAnnounced) for event, _ in entries), stage.arbiter.stage
        assert any(isinstance(answer, Announce) for answer in answers), stage.arbiter.stage
        held |= any(isinstance(answer, WakeAt) for answer in answers)
    assert held


@pytest.mark.slow
def test_a_run_with_foresight_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """In deterministic mode, and so with the bits of a strict run."""
    runs = {}
    for name, consume in (("ahead", "foresight"), ("strict", "strict")):
        folder = tmp_path / name
        folder.mkdir()
        config = training_config(folder, schedule="zb-h1", consume=consume, deterministic=True)
        for steps in (3, 6):
            command = ("--config", config, "--steps", steps, "--run-dir", folder / "run")
            with launched("--processes", 2, "--", "experiments.train", *command, **QUICK_TO_COMPILE) as launcher:
                assert launcher.wait() == 0, launcher.text
                assert ("going on after 3 steps" in launcher.text) == (steps == 6)
        runs[name] = outcome_of(folder / "run", 6)
    runs["ahead"].assert_same(runs["strict"])
