"""How commands speak: log lines without names of modules, and how far compiling has come."""

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from rrfp_jax.commands.common.console import log_plainly
from rrfp_jax.commands.training.training_console import CompileReport


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
    logging.getLogger("rrfp_jax.network.peers").warning("rank %d lost rank %d", 0, 3)
    logging.getLogger("rrfp_jax.runtime.gatherings").info("waiting for ranks 2-3")
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
    assert lines[0] == "compiling 24 programs (0 done)"
    assert lines[-1] == "compiled 24 programs in 0 s"
    assert len(lines) == 2, "what is quick is not told step by step"


def test_compiling_is_a_bar_on_a_terminal_and_nothing_in_other_ranks() -> None:
    shown = told(is_terminal=True)
    assert "compiling 24 programs" in shown
    assert "24 done" in shown
    assert "(0 done)" not in shown
    assert told(is_terminal=True, is_quiet=True) == ""
