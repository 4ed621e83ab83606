"""Help texts: every option of every command and bench says what it is, what it takes and what it is without being
given, at every width of a terminal."""

import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from argparse import SUPPRESS, Action
from dataclasses import fields
from importlib import import_module

import pytest

from rrfp_jax.commands import main
from rrfp_jax.commands.common.options import AS_MAPPING, CommandParser, examples_in, field_texts, field_words
from rrfp_jax.commands.main import COMMANDS, module_of
from rrfp_jax.commands.training.config import SECTIONS, choices_of_options
from rrfp_jax.models.vision_config import VisionConfig
from rrfp_jax.training.run_config import PipelineConfig
from tests.commands.running import ROOT
from tests.environment import of_child

BENCHES = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if "make_parser()" in path.read_text())
MODULES = [*map(module_of, COMMANDS), *(f"experiments.{name}" for name in BENCHES)]
EACH = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.rpartition(".")[2])
WIDTHS = (80, 120)


def parser_of(module: str) -> CommandParser:
    parser = import_module(module).make_parser()
    assert isinstance(parser, CommandParser)
    return parser


def shown_options(parser: CommandParser) -> list[Action]:
    return [action for action in parser._actions if action.help != SUPPRESS]


def test_the_benches_that_take_options_are_known() -> None:
    assert {"bench", "bench_device", "bench_split", "bench_foresight", "bench_torch"} <= {*BENCHES}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_of_the_checkout_too(name: str) -> None:
    text = (ROOT / "experiments" / f"{name}.py").read_text()
    assert f'run("{name}")' in text or f'run("experiments.{name}")' in text


@EACH
def test_every_option_has_a_text_and_says_what_it_is_without_being_given(module: str) -> None:
    parser = parser_of(module)
    formatter = parser._get_formatter()
    for action in shown_options(parser):
        text = formatter._expand_help(action)
        assert len(text.split()) > 1, action.option_strings
        if action.option_strings and action.nargs != 0:
            assert re.search(r"\b(default|required|optional)\b", text), action.option_strings


@EACH
def test_every_option_says_what_it_takes(module: str) -> None:
    parser = parser_of(module)
    formatter = parser._get_formatter()
    for action in shown_options(parser):
        shown = f"{formatter._format_action_invocation(action)} {formatter._expand_help(action)}"
        if action.nargs != 0:
            place = action.metavar or (formatter._get_default_metavar_for_optional(action))
            assert place in shown or action.choices, action.option_strings
        for choice in action.choices or ():
            assert re.search(rf"(?<![\w-]){re.escape(str(choice))}(?![\w-])", shown), (action.option_strings, choice)


@EACH
def test_many_options_stand_under_headings(module: str) -> None:
    parser = parser_of(module)
    alone = [action for action in shown_options(parser) if action in parser._optionals._group_actions]
    assert len(alone) <= 10


@EACH
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(
    module: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    parser = parser_of(module)
    shown = parser.format_help()
    assert [line for line in shown.splitlines() if len(line) > width] == []
    flat = " ".join(shown.split())
    formatter = parser._get_formatter()
    for action in shown_options(parser):
        assert " ".join(formatter._expand_help(action).split()) in flat


@EACH
@pytest.mark.parametrize("columns", ["20", "1000"])
def test_terminals_of_other_widths_get_the_nearest(module: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(columns: str) -> str:
        monkeypatch.setenv("COLUMNS", columns)
        return parser_of(module).format_help()

    assert shown(columns) == shown("80" if columns == "20" else "120")


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_overview_names_every_command_at_every_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main._answer("--help") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    for name, purpose in COMMANDS.items():
        assert f" {name} {purpose} " in f" {' '.join(shown.split())} "


def test_a_pager_has_the_width_of_its_terminal() -> None:
    """Where the output goes into a pipe, the errors still go to the terminal."""
    code = "from rrfp_jax.commands.common.options import width; print(width())"
    environment = {name: text for name, text in of_child().items() if name != "COLUMNS"}

    def told(errors: int) -> int:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            check=True,
        )
        return int(done.stdout)

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 97))
    assert told(theirs) == 97
    assert told(subprocess.DEVNULL) == 120
    for end in (ours, theirs):
        os.close(end)


@EACH
def test_the_examples_at_the_end_are_accepted(module: str) -> None:
    """Each is a command line whose command takes its options; what follows ``--`` is one too."""
    examples = examples_in(import_module(module).__doc__ or "")
    if module.startswith("rrfp_jax."):
        assert examples, "a command shows how it is used"
        shown = parser_of(module).format_help()
        assert shown.rstrip().endswith(examples.splitlines()[-1])
    for line in examples.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" >")[0], comments=True)
        if words[0] == "python":
            words[:3] = ["rrfp", words[2]]
        while words:
            assert words.pop(0) == "rrfp"
            name = words.pop(0)
            mine = words[: words.index("--")] if "--" in words else words
            parser_of(module_of(name)).parse_args(mine)
            words = ["rrfp", *words[len(mine) + 1 :]] if len(mine) < len(words) else []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_every_record_is_an_option_with_its_docstring(section: str) -> None:
    shown = parser_of(module_of("train")).format_help()
    flat = " ".join(shown.split())
    assert f"\n{section}:\n" in shown
    for field in fields(SECTIONS[section]):
        name = f"{section}.{field.name}"
        words = field_words(SECTIONS[section], field.name, choices_of_options().get(name, ()))
        assert words.text, f"{name} has no docstring"
        assert words.short, f"{name} has no first sentence"
        assert (field.name if section in AS_MAPPING else f"{words.short} (") in flat
        assert "``" not in words.text
        assert ":class:" not in words.text
        assert words.left_out != "optional" or field.default is None


def test_what_null_means_is_the_default_and_choices_are_listed() -> None:
    words = field_words(PipelineConfig, "hint", ("bf", "fb"))
    assert words.short == "The rule that ranks the ready tasks"
    assert words.left_out == "default: the schedule where there is one, else bf (bf-deep with several chunks per stage)"
    assert words.default == "null"
    flat = " ".join(parser_of(module_of("train")).format_help().split())
    assert "--consume NAME How stages follow the schedule: strict keeps to its rows; ready runs the best" in flat
    assert "(one of strict, foresight, ready, foresight+pairs; default foresight)" in flat
    assert "--backward split|fused How backwards run: as input and weight gradient" in flat
    assert (
        "(one of bf, bfw, bf-deep, fb, b-priority, f-priority, schedule, FILE.py:NAME; default: the schedule where"
        in flat
    )
    assert "--tie-embeddings true|false" in flat
    assert "--run-dir PATH The directory that the run writes to (default: a new folder under runs/, named by" in flat
    assert "--num-layers N Number of decoder layers, embedding and head not counted (required in the file)" in flat


def test_what_one_changes_most_often_comes_first() -> None:
    shown = parser_of(module_of("train")).format_help()
    places = [shown.index(f"\n{section}:\n") for section in ("run", "pipeline", "optimizer", "data", "model", "vision")]
    assert places == sorted(places)


def test_a_record_made_of_another_has_the_texts_of_both() -> None:
    texts = field_texts(VisionConfig)
    assert set(texts) >= {"", *(field.name for field in fields(VisionConfig))}
    assert all(texts.values())
    assert texts[""].startswith("A vision transformer")


@pytest.mark.parametrize("command", ["train --help", "simulate --num-stages 2 --num-microbatches 2", "launch --help"])
def test_commands_run_without_docstrings(command: str) -> None:
    """PYTHONOPTIMIZE=2 leaves them out, and assertions too."""
    done = subprocess.run(
        [sys.executable, "-m", "rrfp_jax.commands.main", *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONOPTIMIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
