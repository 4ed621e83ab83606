"""The options of the commands: what a misspelt one is answered, and whom a wrong value is blamed on."""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from rrfp_jax.commands import simulate, train
from rrfp_jax.commands.common.options import INSTEAD, CommandParser, add_record_options
from rrfp_jax.commands.training.config import SECTIONS, TrainConfig, load_train_config
from rrfp_jax.core import check_words
from tests.commands.running import ROOT

DEBUG, MULTIMODAL = "tpu_gpu_configs/cpu/debug.yaml", "tpu_gpu_configs/cpu/multimodal.yaml"


def test_the_choices_that_are_shown_are_accepted() -> None:
    from rrfp_jax.commands.training.config import choices_of_options

    for name, choices in choices_of_options().items():
        for choice in choices:
            if name not in ("pipeline.schedule", "pipeline.hint", "data.kind", "vision.kind") and choice != "TEXT":
                given = {name: choice} | ({"optimizer.final_learning_rate": None} if choice == "constant" else {})
                load_train_config(MULTIMODAL if name.startswith(("vision", "projector")) else DEBUG, given)
            if name == "pipeline.hint" and choice != "FILE.py:NAME":
                check_words("ready", choice, None, has_schedule=choice == "schedule")


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--num-stagess", "'--num-stagess' is no option: did you mean --num-stages"),
        ("--num-stage=2", "'--num-stage=2' is no option: did you mean --num-stages"),
        ("--adaptive=on", f"'--adaptive' is no option: {INSTEAD['pipeline.adaptive']}"),
        ("--tensor=2", "'--tensor' is no option: give mesh, such as {tensor: 2}"),
        ("--pipeline.data", "'--pipeline.data' is no option: give replicas"),
        ("--tracking.wandb-mode", f"'--tracking.wandb-mode' is no option: {INSTEAD['tracking']}"),
        ("--zzzzzzzz", "'--zzzzzzzz' is no option: rrfp train --help lists all options"),
    ],
)
def test_a_misspelt_option_is_answered_in_one_line(given: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.make_parser().parse_args(["--config", DEBUG, given])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {answer}\n"


def test_numbers_below_zero_are_values() -> None:
    assert simulate.make_parser().parse_args(["--durations-ms", "-1,2,3"]).durations_ms == "-1,2,3"


def test_fields_of_one_name_in_two_records_keep_their_section() -> None:
    parser = CommandParser("x", "x")
    add_record_options(parser, SECTIONS, {})
    assert vars(parser.parse_args(["--data.seed", "3", "--run.seed", "4", "--model.hidden", "8"])) == {
        "data.seed": "3",
        "run.seed": "4",
        "model.hidden": "8",
    }


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        ({"model.num_layers": -1}, "--num-layers -1: model: num_layers is -1: give"),
        ({"model.hidden": 97, "model.num_heads": 5}, "--num-heads 5 --hidden 97: |--hidden 97 --num-heads 5: "),
        ({"run.steps": 5, "run.seed": -3}, "--run.seed -3: run: seed is -3"),
        ({"optimizer.learning_rate": "fast"}, "--learning-rate fast: optimizer.learning_rate is 'fast'"),
        ({"run.deterministic": 3}, "--deterministic 3: run.deterministic is 3"),
        (
            {"model.rope_scaling": {"factor": 8, "low": 1}},
            "--rope-scaling .*: model.rope_scaling has no key 'low': take",
        ),
        ({"model.rope_scaling": {"factor": -1}}, "--rope-scaling .*: model: factor is -1"),
    ],
)
def test_a_value_of_the_command_line_is_blamed_on_it(overrides: dict[str, object], blamed: str) -> None:
    with pytest.raises(ValueError, match=f"^({blamed})"):
        load_train_config(DEBUG, overrides)


def test_a_section_with_one_option_takes_some_of_its_keys() -> None:
    def read(*options: str) -> TrainConfig:
        given = train.make_parser().parse_args(["--config", MULTIMODAL, *options])
        return load_train_config(MULTIMODAL, train.overrides_of(given))

    plain, changed = read(), read("--vision", "{num_layers: 3, overrides: {norm_eps: 1.0e-7}}")
    assert plain.vision is not None
    assert changed == replace(plain, vision=replace(plain.vision, num_layers=3, norm_eps=1e-7))
    with pytest.raises(ValueError, match=r"^--vision {num_layers: -3}: vision: num_layers is -3"):
        read("--vision", "{hidden: 32, num_layers: -3}")
    with pytest.raises(ValueError, match=r"^an override: 'layers' is no key of vision: "):
        read("--vision", "{layers: 3}")
    for wrong in ("clip", "[3]", "3"):
        with pytest.raises(ValueError, match="is no mapping: give the keys of the section"):
            read("--vision", wrong)


def test_an_override_of_no_key_is_refused_with_the_key_that_is_meant() -> None:
    with pytest.raises(ValueError, match=r"^an override: 'stepz' is no key of run: did you mean 'steps'"):
        load_train_config(DEBUG, {"run.stepz": 3})
    with pytest.raises(ValueError, match=r"^an override: 'steps' is no section: the known ones are model,"):
        load_train_config(DEBUG, {"steps": 3})


def test_a_value_of_the_file_is_blamed_on_the_file_whatever_else_is_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(Path(DEBUG).read_text().replace("num_layers: 4", "num_layers: -4"))
    for overrides in ({}, {"model.hidden": 64}, {"run.steps": 3}):
        with pytest.raises(ValueError, match=rf"^{path}: model: num_layers is -4"):
            load_train_config(str(path), overrides)
    assert load_train_config(str(path), {"model.num_layers": 4}).model.num_layers == 4


REFUSED = (
    ("--num-layers", "-1"),
    ("--num-stages", "3"),
    ("--window", "0"),
    ("--path", "no/such/folder"),
    ("--hint", "fastest"),
    ("--layout", "Et|t|t|t*2L"),
    ("--run-dir", f"{DEBUG}/runs"),
    ("--model.vocab-size", "100"),
)


def test_what_does_not_fit_is_refused_before_jax_is_loaded() -> None:
    code = f"""
import sys, time
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.train import main
for options in {REFUSED!r}:
    try:
        main(["--config", {DEBUG!r}, *options])
    except BadInput as error:
        print(options, error)
    else:
        raise SystemExit(f"{{options}} was not refused")
    loaded = sorted(set(sys.modules) & {{"jax", "flax", "optax", "matplotlib", "zmq"}})
    assert not loaded, (options, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(REFUSED)


def test_a_home_is_found_wherever_a_file_or_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands ``~`` within quotes, or behind ``=``."""
    monkeypatch.setenv("HOME", "/home/me")
    assert (
        import_module("rrfp_jax.commands.convert").make_parser().parse_args(["export", "~/run", "~/out"]).folder
        == "/home/me/out"
    )
    assert simulate.make_parser().parse_args(["--timeline=~/a.html"]).timeline == "/home/me/a.html"
    assert import_module("rrfp_jax.commands.replay").make_parser().parse_args(["~/a", "b"]).logs == ["/home/me/a", "b"]
    given = train.make_parser().parse_args(["--config=~/x.yaml", "--run-dir=~/try #2", "--interface", "~"])
    assert given.config == "/home/me/x.yaml"
    assert train.overrides_of(given) == {"run.run_dir": "/home/me/try #2", "cluster.interface": "~"}
    assert import_module("rrfp_jax.commands.sample").make_parser().parse_args(["r", "--prompt", "~/x"]).prompt == "~/x"
