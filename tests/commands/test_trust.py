"""Data names no code: what a configuration, or a run's folder, names is run only where the command line says so."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands import evaluate, train
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.training.config import load_train_config, read_train_config
from rrfp_jax.planner import plan, profile

MODEL = {"vocab_size": 256, "hidden": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8}
OWN = {"object": "a_strangers:data", "batch_size": 4, "num_microbatches": 2}
MARKING = "from pathlib import Path\nPath('ran').touch()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose code leaves a mark when it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "a_strangers", raising=False)
    (tmp_path / "a_strangers.py").write_text(f"{MARKING}def mine(s): return []\ndef data(): return 0\n")
    (tmp_path / "text.txt").write_text("some text " * 100)
    return tmp_path


def written(folder: Path, **sections: dict[str, Any]) -> Path:
    rest = {"model": MODEL, "pipeline": {"num_stages": 2}, "optimizer": {"learning_rate": 1e-3}}
    content = rest | {"run": {"steps": 1, "platform": "cpu"}} | sections
    if "data" not in content:
        content["data"] = {"path": "text.txt", "length": 8, "batch_size": 4, "num_microbatches": 2}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


NAMING = [
    ({"data": OWN}, "data.object a_strangers:data"),
    ({"data": OWN | {"object": "os:system", "arguments": {"command": "touch ran"}}}, "data.object os:system"),
    ({"pipeline": {"num_stages": 2, "schedule": "a_strangers.py:mine"}}, "pipeline.schedule a_strangers.py:mine"),
    ({"pipeline": {"num_stages": 2, "hint": "./a_strangers.py:mine"}}, r"pipeline.hint ./a_strangers.py:mine"),
    (
        {"run": {"steps": 1, "xla_flags": ["--xla_gpu_cuda_data_dir=theirs"]}},
        "run.xla_flags --xla_gpu_cuda_data_dir=theirs",
    ),
]


@pytest.mark.parametrize(("sections", "named"), NAMING)
def test_code_that_a_file_names_is_not_run(folder: Path, sections: dict[str, Any], named: str) -> None:
    path = written(folder, **sections)
    commands = (train, ["--config", str(path)]), (plan, ["--config", str(path), "--device", "h100", "--as-configured"])
    for command, arguments in (*commands, (profile, ["--config", str(path)])):
        with pytest.raises(BadInput, match=f"names code to run, {named}: give --.* to run that, or --trust to run all"):
            command.main(arguments)
    assert not (folder / "ran").exists()


def test_code_that_a_runs_folder_names_is_not_run(folder: Path) -> None:
    written(folder, data=OWN)
    with pytest.raises(BadInput, match=r"names code to run, data.object a_strangers:data: give --data.object"):
        evaluate.main([str(folder)])
    sets = {"own": {"object": "os:system"}}
    written(folder, data=OWN, evaluation={"sets": sets})
    with pytest.raises(
        BadInput, match=r"config.yaml names code to run, evaluation.sets.own.object os:system: give --t"
    ):
        evaluate.main([str(folder), "--data.object", "a_strangers:data"])
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("word", [["--trust"], ["--data.object", "a_strangers:data"]])
def test_the_command_line_says_what_is_run(folder: Path, word: list[str]) -> None:
    path = written(folder, data=OWN)
    with pytest.raises(BadInput, match=r"a_strangers:data is of type int, without __len__ and __getitem__"):
        train.main(["--config", str(path), "--run-dir", "run", *word])
    assert (folder / "ran").exists()


def test_a_schedule_of_the_command_line_takes_the_place_of_the_files(folder: Path) -> None:
    path = str(written(folder, pipeline={"num_stages": 2, "schedule": "a_strangers.py:mine"}))
    assert load_train_config(path, {"pipeline.schedule": "1f1b"}).pipeline.schedule == "1f1b"
    assert load_train_config(path, {}, trust=True).pipeline.schedule == "a_strangers.py:mine"
    assert read_train_config(path, {}).pipeline.schedule == "a_strangers.py:mine"  # which runs nothing


def test_presets_name_no_code() -> None:
    from rrfp_jax.commands.training.config_sources import preset_names

    for name in preset_names():
        load_train_config(name, {})
