"""How commands speak: log lines without names of modules, and how far compiling has come."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from rrfp_jax import Layout, Pipeline, looped
from rrfp_jax.commands.common.console import log_plainly, make_console, make_table, say, show_text
from rrfp_jax.commands.common.errors import BadInput, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.training.training_console import CompileReport, TrainingConsole
from rrfp_jax.exit_codes import print_fatal_message
from rrfp_jax.schedules import chain
from rrfp_jax.training.loop import StepRow


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """As it was before, whatever the test sets up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.basicConfig(force=True)  # what another library may have done before
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_of_ours_is_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    log_plainly()
    logging.getLogger("rrfp_jax.cluster.peer_network").warning("rank %d lost rank %d", 0, 3)
    logging.getLogger("rrfp_jax.runtime.tree_collectives").info("waiting for ranks 2-3")
    logging.getLogger("rrfp_jax.anything").debug("for developers")
    shown = capsys.readouterr()
    assert shown.err == "warning: rank 0 lost rank 3\nwaiting for ranks 2-3\n"
    assert shown.out == ""


def test_what_another_library_logs_is_one_line_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    log_plainly()
    logging.getLogger("absl").setLevel(logging.INFO)
    logging.getLogger("absl").info("orbax-checkpoint version: 0.12.8")
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        logging.getLogger("orbax.checkpoint").exception("save failed\nTraceback:\n  File x\n  File y")
    shown = capsys.readouterr().err
    assert shown == "error: orbax: save failed OSError: [Errno 28] No space left on device\n"


def test_a_defect_of_this_program_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log_plainly()
    try:
        raise KeyError("rank")
    except KeyError:
        logging.getLogger("rrfp_jax.runtime").exception("the watch failed")
    assert capsys.readouterr().err.startswith("error: the watch failed\nTraceback (most recent call last):")


def told(*, is_terminal: bool, is_quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, quiet=is_quiet)
    report = CompileReport(console)
    for done in range(25):
        report(done, 24)
    report.stop()
    return out.getvalue()


def test_compiling_is_told_in_a_few_lines_where_there_is_no_terminal() -> None:
    lines = told(is_terminal=False).splitlines()
    assert lines[0] == "compiling or loading 24 programs (0 done)"
    assert lines[-1] == "the stages' 24 programs were ready after 0 s"
    assert len(lines) == 2, "what is quick is not told step by step"


def test_compiling_is_a_bar_on_a_terminal_and_nothing_in_other_ranks() -> None:
    shown = told(is_terminal=True)
    assert "compiling or loading 24 programs" in shown
    assert "24 done" in shown
    assert "(0 done)" not in shown
    assert told(is_terminal=True, is_quiet=True) == ""


def row(step: int, *, skipped: bool = False) -> StepRow:
    zeros = dict.fromkeys((field.name for field in fields(StepRow)), 0)
    known = {"step": step, "loss": 5.0 - step, "grad_norm": 1.5, "tokens_per_s": 12_345.6, "bubble_fraction": 0.25}
    return StepRow(**{**zeros, **known, "step_time_s": 0.5, "skipped": skipped})  # type: ignore[arg-type]


def trained(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, first: int = 0) -> str:
    """What is shown of steps up to the fourth, of which the third was left out."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=80, color_system=None)
    monkeypatch.setattr("rrfp_jax.commands.training.training_console.make_console", lambda **_: console)
    shown = TrainingConsole(4)
    with shown:
        for step in range(first, 4):
            shown.show_step(row(step, skipped=step == 2))
    return out.getvalue()


def test_a_log_has_a_line_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained(monkeypatch, is_terminal=False).splitlines()
    assert [line.split()[:4] for line in lines] == [["step", str(n), "loss", f"{5 - n:.4f}"] for n in range(4)]
    assert [line.endswith("skipped: not finite") for line in lines] == [False, False, True, False]


@pytest.mark.parametrize("first", [0, 1])
def test_a_terminal_has_one_bar_and_lines_for_what_is_not_usual(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    shown = trained(monkeypatch, is_terminal=True, first=first)
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", shown) if line.strip()]
    bars = [line for line in drawn if line.startswith("step ") and "/4 " in line]
    assert max(map(len, drawn)) < 80, "so that the echo of Ctrl-C stays on the line"
    assert bars[-1].startswith("step 4/4 ")
    assert "loss 2.0000  12,346 tokens/s  bubble 25%" in bars[-1]
    assert [line for line in drawn if line not in bars] == [
        "step 2: no update, because loss or gradients were not finite",
        f"steps {first} to 3: the loss went from {5 - first:.4f} to 2.0000",
    ]
    assert shown.rfind("\x1b[2K") > shown.rfind("step 4/4"), "the bar goes"


@pytest.mark.parametrize("width", [80, 120])
def test_the_stage_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr("rrfp_jax.commands.training.training_console.make_console", lambda **_: console)
    pipeline = SimpleNamespace(
        chunks=[SimpleNamespace(name=f"layers {n}-{n + 9} with a long name") for n in range(0, 40, 10)],
        placement=looped(2, 2),
        layout=Layout(num_stages=2),
        process=SimpleNamespace(devices_of=lambda unit: [f"cpu:{unit}"], is_here=True),
        order=SimpleNamespace(foresight=None, bounds=["512 MiB", "8"], graph=chain(4, 1)),
        forecast=[SimpleNamespace(peak=123 * 2**30, host_peak=0)] * 2,
        num_params=lambda: [1_234_567_890, 2],
        remat=("none",) * 4,
    )
    TrainingConsole(4).show_stages(cast(Pipeline, pipeline))
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= width
    assert len(lines) == 5, "title, headings, a line, and one line for a stage"
    assert "layers 0-9" in lines[3]
    assert lines[3].split()[-5:] == ["1,234,567,890", "512", "MiB", "123", "GiB"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_numbers_of_a_table_are_whole_however_narrow_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    table = make_table("comparison", "order", *(f"{word} of the first" for word in "abcd"), numeric=True)
    numbers = [f"{number},591.031" for number in range(4)]
    table.add_row("zb-h1:ready+foresight", *numbers)
    make_console().print(table)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert ["zb-h1:ready+foresight", *numbers] in [line.split() for line in lines]
    assert "…" not in stream.getvalue()
    assert all(len(line) <= max(width, 75) for line in lines)


OBEYED, SHOWN = "a\x1b[2J\x1b]0;owned\x07\x9b31m\u202e", "a\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202e"
"""What clears a terminal, names it anew and colours it, and what is printed in its place."""


def test_words_of_others_are_not_obeyed_by_the_terminal_wherever_they_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_plainly()
    logging.getLogger("rrfp_jax.anything").warning("tensor %s", OBEYED)
    console, table = make_console(), make_table(OBEYED, "name")
    table.add_row(OBEYED)
    console.print(OBEYED, markup=False)
    console.print(table)
    say(OBEYED)
    print_fatal_message(OBEYED)

    def refuse() -> int:
        raise BadInput(f"column {OBEYED}")

    with pytest.raises(SystemExit):
        run_command(refuse)
    with pytest.raises(SystemExit):
        CommandParser("train", "Train.").error(OBEYED)
    shown = capsys.readouterr()
    for stream in (shown.out, shown.err):
        assert stream.count(SHOWN) == 4
        assert not set(stream) & set("\x1b\x07\x9b\u202e")


def test_a_text_goes_into_a_file_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    show_text(OBEYED)
    assert capsys.readouterr().out == f"{OBEYED}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_text(OBEYED)
    assert capsys.readouterr().out == f"{SHOWN}\n"
