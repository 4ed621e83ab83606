"""Whatever happens to one rank, all end soon, with one report, a code that says why, and nothing left behind."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.runtime.event_log import read_log
from tests.multiprocess.launching import PATIENCE_S, Launched, launched
from tests.multiprocess.reports import assert_report, rank_text, survivors_end
from tests.multiprocess.runs import QUICK_TO_COMPILE, training_config

SILENCE_S = 5.0
CLOSED_S = 2.0
"""Within which a closed connection is noticed."""
SLACK_S = 3.0
"""For the others' last words, on a machine that is busy."""
START_S = 12.0
LONG_TEXT_S = 5.0
"""Within which all ranks have ended, however long the text of an error is."""


def emulate(
    fault: str, rank: int, num_ranks: int, *more: object, start_deadline_s: float = PATIENCE_S
) -> tuple[object, ...]:
    """The launcher's arguments for an emulated run that does not end by itself."""
    return (
        *("--processes", num_ranks, "--start-deadline-s", start_deadline_s, "--grace-s", 4, "--"),
        *("faulty", fault, rank, "emulate", "--num-stages", num_ranks, "--num-microbatches", 4),
        *("--durations-ms", "5,5,5", "--steps", 100_000, "--silence-deadline-s", SILENCE_S),
        *("--progress-deadline-s", 4, *more),
    )


def signalled(launcher: Launched, rank: int, number: int, num_ranks: int) -> tuple[int, float]:
    """Signal a rank once all run: the launcher's code, and the seconds until all other ranks had ended."""
    launcher.numbers(r"running (\d+)", num_ranks)
    pids = launcher.ranks()
    started_s = time.monotonic()
    os.kill(pids.pop(rank), number)
    ended_s = survivors_end(pids.values(), started_s)
    code = launcher.wait()
    assert not launcher.living()
    return code, ended_s


@pytest.mark.parametrize(
    ("num_ranks", "rank"),
    [(2, 0), pytest.param(4, 0, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_killed_rank(num_ranks: int, rank: int) -> None:
    with launched(*emulate("none", rank, num_ranks)) as launcher:
        code, ended_s = signalled(launcher, rank, signal.SIGKILL, num_ranks)
    assert code == 137
    assert ended_s < CLOSED_S + SLACK_S
    for other in set(range(num_ranks)) - {rank}:
        said = f"rank {rank} (stage {rank}) was lost: closed its connection"
        assert_report(launcher, other, said, num_stages=num_ranks - 1)
    assert "code 5, lost another rank" in launcher.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "encrypts"),
    [
        (signal.SIGKILL, "true"),
        *(pytest.param(signal.SIGSTOP, encrypts, marks=pytest.mark.slow) for encrypts in ("false", "true")),
    ],
)
def test_a_rank_that_ends_while_large_arrays_travel(number: int, encrypts: str) -> None:
    """Those that send to it, and wait for the rest of what it has begun to send, end as others do."""
    arrays = ("--activation-bytes", 8 << 20, "--encrypt-arrays", encrypts, "--progress-deadline-s", 60)
    with launched(*emulate("none", 1, 3, *arrays, "--durations-ms", "0,0,0")) as launcher:
        code, ended_s = signalled(launcher, 1, number, 3)
    assert code == (137 if number == signal.SIGKILL else 5)
    assert ended_s < (CLOSED_S if number == signal.SIGKILL else SILENCE_S) + SLACK_S
    said = "closed its connection" if number == signal.SIGKILL else "silent for "
    for other in (0, 2):
        assert_report(launcher, other, f"rank 1 (stage 1) was lost: {said}", num_stages=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "rank"),
    [(2, 1), pytest.param(4, 0, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_stopped_rank(num_ranks: int, rank: int) -> None:
    with launched(*emulate("none", rank, num_ranks, "--progress-deadline-s", 60)) as launcher:
        code, ended_s = signalled(launcher, rank, signal.SIGSTOP, num_ranks)
    assert code == 5
    assert 0.5 * SILENCE_S < ended_s < SILENCE_S + SLACK_S
    for other in set(range(num_ranks)) - {rank}:
        said = f"rank {rank} (stage {rank}) was lost: silent for "
        culprit = f"all stages that wait do so, directly or not, for stage {rank}"
        assert_report(launcher, other, said, " waits for the ", f"(stage {rank})", culprit, num_stages=num_ranks - 1)
        silent_s = float(rank_text(launcher, other).partition(said)[2].split()[0])
        assert 0.5 * SILENCE_S < silent_s < SILENCE_S + SLACK_S
    assert f"rank {rank}: stood still (SIGSTOP): the launcher ended it" in launcher.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("oom", "RESOURCE_EXHAUSTED: Out of memory allocating"),
        ("raise", "ArithmeticError: an injected error"),
    ],
)
def test_a_task_that_fails(fault: str, error: str) -> None:
    with launched(*emulate(fault, 1, 3)) as launcher:
        assert launcher.wait() == 4
        assert not launcher.living()
    summary = f"step 1: 1F0 on stage 1 failed: {'jax' * (fault == 'oom')}"
    assert_report(launcher, 1, f"error: {summary}", error, "stage 1 failed in 1F0", num_stages=3)
    for other in (0, 2):
        assert_report(
            launcher, other, f"error: rank 1 gave up: {summary}", error, "stage 1 failed in 1F0", num_stages=3
        )
    assert "ranks 0, 2: code 5, lost another rank" in launcher.text


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_task_that_fails_with_a_text_of_5_mb(num_ranks: int) -> None:
    """Its cause comes to all at once: nobody waits for a deadline."""
    with launched(*emulate("raise-long", 1, num_ranks, "--progress-deadline-s", 30)) as launcher:
        launcher.numbers(r"running (\d+)", 1)
        started_s = time.monotonic()
        assert launcher.wait() == 4
        ended_s = time.monotonic() - started_s
        assert not launcher.living()
    assert ended_s < LONG_TEXT_S
    summary = "step 1: 1F0 on stage 1 failed: RuntimeError: xxxx"
    for rank in range(num_ranks):
        said = f"error: {'' if rank == 1 else 'rank 1 gave up: '}{summary}"
        assert_report(launcher, rank, said, " more letters)", "stage 1 failed in 1F0", num_stages=num_ranks)
        assert len(rank_text(launcher, rank)) < 10_000
    others = "rank 0" if num_ranks == 2 else "ranks 0, 2-3"
    assert f"{others}: code 5, lost another rank" in launcher.text


@pytest.mark.slow
def test_a_task_that_never_ends() -> None:
    with launched(*emulate("hang", 1, 3)) as launcher:
        assert launcher.wait() == 3
        assert not launcher.living()
    for rank in range(3):
        sayings = ("error: no task finished for 4.", "stage 1 has been running 1F0 for 4.", "stage 2 has been idle")
        assert_report(launcher, rank, *sayings, num_stages=3)
    assert "ranks 0-2: code 3, no progress" in launcher.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sayings"),
    [
        (
            "configuration",
            {0: 'window is null on ranks 0, 2, "3" on rank 1', 1: 'window is null on ranks 0, 2, "3" on'},
        ),
        ("absent", {0: "missing: rank 1", 2: "missing: rank 1"}),
        ("key", {0: "rank 1 ended with code 6", 1: "does not accept this process's run key", 2: "rank 1"}),
    ],
)
def test_ranks_that_do_not_come_together(fault: str, sayings: dict[int, str]) -> None:
    started_s = time.monotonic()
    with launched(*emulate(fault, 1, 3, start_deadline_s=START_S)) as launcher:
        assert launcher.wait() == 6
        assert not launcher.living()
    assert time.monotonic() - started_s < START_S + 4 + 2 * SLACK_S  # the grace time for the one that never came
    for rank, saying in sayings.items():
        if not (fault == "key" and _came_too_late(launcher, rank)):
            assert saying in rank_text(launcher, rank), launcher.text
    assert "Traceback" not in launcher.text


def _came_too_late(launcher: Launched, rank: int) -> bool:
    """Whether a rank was still on its way when rank 1 had ended: then the launcher says why, and ends it."""
    said = rf"rank 1 ended with code 6 before all ranks had come: ranks? [^:]*\b{rank}\b[^:]*, not there yet"
    return any(re.search(said, line) for line in launcher.own_lines())


@pytest.mark.slow
def test_a_rank_that_finds_another_text_under_the_same_path(tmp_path: Path) -> None:
    for folder in ("text", "other/text"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder * 100)
    config = training_config(tmp_path, path="~/text")
    arguments = ("--processes", 2, "--", "faulty", "home", 1, "train", "--config", config)
    with launched(*arguments, "--run-dir", tmp_path / "run", HOME=str(tmp_path)) as launcher:
        assert launcher.wait() == 6
    assert re.search(r'data.text is "401 bytes, SHA-256 \w+" on rank 0, "1001 bytes, SHA', launcher.text), launcher.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "changes"),
    [(signal.SIGKILL, {}), (signal.SIGSTOP, {}), (signal.SIGKILL, {"schedule": "gpipe", "offload": 2})],
    ids=["killed", "stopped", "killed amid copies"],
)
def test_a_rank_of_a_stage_that_spans_several(number: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Its partner waits for it inside a collective, which fails or hangs."""
    config = training_config(tmp_path, mesh={"tensor": 2}, steps=100_000, silence_deadline_s=SILENCE_S, **changes)
    arguments = ("--processes", 4, "--", "faulty", "none", 0, "train", "--config", config)
    with launched(*arguments, "--run-dir", tmp_path / "run", **QUICK_TO_COMPILE) as launcher:
        code, ended_s = signalled(launcher, 1, number, 4)
    assert code == (137 if number == signal.SIGKILL else 5)
    assert ended_s < SLACK_S + (CLOSED_S if number == signal.SIGKILL else SILENCE_S)
    for other in (0, 2, 3):
        assert_report(launcher, other, "rank 1 (stage 0) was lost", num_stages=3)
    assert "ranks 0, 2-3: code 5, lost another rank" in launcher.text


@pytest.mark.slow
def test_a_failed_training_run_leaves_its_report_and_its_last_events(tmp_path: Path) -> None:
    config = training_config(tmp_path, num_layers=2, steps=100_000, silence_deadline_s=SILENCE_S)
    folder = tmp_path / "run"
    arguments = ("--processes", 2, "--grace-s", 10, "--", "faulty", "none", 0, "train", "--config", config)
    with launched(*arguments, "--run-dir", folder, **QUICK_TO_COMPILE) as launcher:
        code, ended_s = signalled(launcher, 0, signal.SIGKILL, 2)
    assert code == 137
    assert ended_s < CLOSED_S + SLACK_S
    assert_report(launcher, 1, "rank 0 (stage 0) was lost: closed its connection", num_stages=1)
    report = json.loads((folder / "failure.json").read_text())
    assert report["lost_ranks"] == [0]
    assert report["lost_stages"] == [0]
    assert [stage["stage"] for stage in report["stages"]] == [1]
    log = read_log(folder / "events-rank1.json.gz")
    assert log.rank == 1


@pytest.mark.slow
def test_ports_are_free_for_the_next_run() -> None:
    """A run is killed and started again at once, on the same ports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = ("--head", f"127.0.0.1:{port}")
    for _ in range(2):
        with launched(*head, *emulate("none", 0, 2)) as launcher:
            code, _ = signalled(launcher, 1, signal.SIGKILL, 2)
            assert code == 137
