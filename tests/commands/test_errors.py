"""What a command's error becomes: a sentence, a report or a traceback, each with its exit code."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rrfp_jax.commands import config, launch, simulate
from rrfp_jax.commands.common.errors import BadInput, checking_input, end_with, run_command
from rrfp_jax.data import BrokenData
from rrfp_jax.runtime import NoProgress, RunFailed, TaskFailed, WaitForReport
from rrfp_jax.runtime.cluster import StartFailed
from rrfp_jax.runtime.failure import PeerLost
from tests.commands.running import ROOT

REPORT = WaitForReport(summary="nothing moves", stages=())


class Ended(BaseException):
    """Stands for the end of the process."""


def ending(main: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code, however the process ends."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises((Ended, SystemExit)) as ended:
        run_command(main)
    return int(ended.value.args[0])


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def test_a_value_error_is_bad_input_only_while_input_is_checked(monkeypatch, capsys):
    def checked() -> int:
        with checking_input():
            raise ValueError("window is 0:\n give 1")

    assert ending(checked, monkeypatch) == 2
    assert capsys.readouterr().err == "error: window is 0: give 1\n"
    assert ending(raising(ValueError("broken")), monkeypatch) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ValueError: broken" in shown


def test_data_that_turn_out_broken_are_bad_input_whenever_that_is(monkeypatch, capsys):
    error = BrokenData("image a.png cannot be decoded: mend or remove it")
    error.add_note("nothing was saved")
    assert ending(raising(error), monkeypatch) == 2
    assert capsys.readouterr().err == "error: image a.png cannot be decoded: mend or remove it\nnothing was saved\n"


def test_bad_input_passes_through_a_check_unchanged():
    error = BadInput("give 1")
    with pytest.raises(BadInput) as caught, checking_input():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("kind", "code"), [(NoProgress, 3), (TaskFailed, 4), (PeerLost, 5)])
def test_a_failed_run_prints_its_report_and_notes(kind: type[RunFailed], code: int, monkeypatch, capsys):
    failure = kind(REPORT)
    failure.add_note("the report is in runs/1")
    assert ending(raising(failure), monkeypatch) == code
    assert capsys.readouterr().err == "error: nothing moves\nthe report is in runs/1\n"


def test_processes_that_do_not_come_together(monkeypatch, capsys):
    assert ending(raising(StartFailed("missing: rank 1")), monkeypatch) == 6
    assert capsys.readouterr().err == "error: missing: rank 1\n"


def test_another_thread_ends_the_process_with_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(Ended(code)))
    with pytest.raises(Ended) as ended:
        end_with(PeerLost(REPORT))
    assert ended.value.args == (5,)
    assert capsys.readouterr().err == "error: nothing moves\n"


def test_other_ends(monkeypatch, capsys):
    assert ending(lambda: 0, monkeypatch) == 0
    assert ending(raising(KeyboardInterrupt()), monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert ending(raising(RuntimeError("of another kind")), monkeypatch) == 1
    assert "RuntimeError: of another kind" in capsys.readouterr().err


SIMULATE = ["simulate", "--num-stages", "2", "--num-microbatches", "4"]
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
"""The tests may run without buffers; a user's commands have them."""


@pytest.mark.parametrize("words", [SIMULATE, ["config", "--list"], ["config", "--help"]], ids=" ".join)
def test_a_reader_that_goes_away_is_no_failure(words: list[str]) -> None:
    command = [sys.executable, "-m", "rrfp_jax.commands.main", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=BUFFERED, text=True, **streams) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("words", [SIMULATE, ["config", "--list"]], ids=" ".join)
def test_output_that_a_full_disk_does_not_take_is_told_in_a_sentence(words: list[str]) -> None:
    command = [sys.executable, "-m", "rrfp_jax.commands.main", *words]
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            command, cwd=ROOT, env=BUFFERED, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: the output cannot be written (No space left on device): make room, or write elsewhere\n"
    )


def test_a_file_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch, capsys) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = tmp_path / "page.html"
    arguments = ["--num-stages", "2", "--num-microbatches", "4", "--timeline", str(page)]
    monkeypatch.setattr(Path, "write_text", full)
    assert ending(lambda: simulate.main(arguments), monkeypatch) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"error: {page} cannot be written (No space left on device): make room, or write elsewhere"


@pytest.mark.parametrize(
    ("main", "option"), [(simulate.main, "--timeline"), (launch.main, "--new-key"), (config.main, "--config")]
)
def test_a_path_that_a_file_system_refuses_is_bad_input(main, option: str, tmp_path, monkeypatch, capsys) -> None:
    path = str(tmp_path / ("long" * 100)) + (".html" if main is simulate.main else "")
    others = {
        simulate.main: ["--num-stages", "2", "--num-microbatches", "4"],
        launch.main: [],
        config.main: ["--explain", "window"],
    }
    assert ending(lambda: main([*others[main], option, path]), monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}")
    assert "File name too long" in line
