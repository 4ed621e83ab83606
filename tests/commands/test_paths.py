"""Paths of a configuration: one rule for ``~``, and whole paths in what a run saves."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.config_sources import whole_paths
from rrfp_jax.commands.training.planned import plan_run

MODEL = {"vocab_size": 256, "hidden": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8}
REST = {"pipeline": {"num_stages": 2}, "optimizer": {"learning_rate": 1e-3}}
ROWS = {"length": 16, "batch_size": 4, "num_microbatches": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "text.txt").write_text("a text that is long enough for some rows of bytes " * 20)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def loaded(overrides: dict[str, Any] | None = None, **sections: Any) -> Any:
    run = {"steps": 1, "platform": "cpu"} | sections.pop("run", {})
    Path("run.yaml").write_text(yaml.safe_dump({"model": MODEL} | REST | {"run": run} | sections))
    return load_train_config("run.yaml", overrides or {}, trust=True)


def test_a_tilde_is_home_in_every_field_that_is_a_path(home: Path) -> None:
    given = {"init_from": "~/imp", "run_dir": "~/run"}
    found = loaded({"data.path": "~/text.txt"}, data=ROWS, run=given)
    assert (found.run.init_from, found.run.run_dir) == (str(home / "imp"), str(home / "run"))
    assert found.data.path == str(home / "text.txt")
    files = loaded(
        data={"kind": "jsonl", "path": ["~/a/*.jsonl", "b"], "tokenizer": "~/t", "cache": "~/c", **ROWS}
    ).data
    assert (files.path, files.tokenizer, files.cache) == ((f"{home}/a/*.jsonl", "b"), f"{home}/t", f"{home}/c")
    sets = loaded(data={"kind": "tokens", "path": "~/set", "tokenizer": "bytes", **ROWS}).data
    assert (sets.path, sets.tokenizer) == ((f"{home}/set",), "bytes")
    images = {"path": "~/a.jsonl", "tokenizer": "~/t", "batch_size": 2, "num_microbatches": 1}
    images |= {"kind": "image_text", "images": {"image_folder": "~/i"}}
    seen = loaded(data=images).data
    assert (seen.path, seen.image_folder, seen.tokenizer) == (f"{home}/a.jsonl", f"{home}/i", f"{home}/t")
    assert loaded(data=ROWS, pipeline={"num_stages": 2, "schedule": "~/mine.py:mine"}).pipeline.schedule == (
        f"{home}/mine.py:mine"
    )
    with pytest.raises(ValueError, match=r"run\.init_from is ~nobody-has-this-name/x: it begins with a ~ that names"):
        loaded(data=ROWS, run={"init_from": "~nobody-has-this-name/x"})


def saved_data(data: dict[str, Any]) -> dict[str, Any]:
    return whole_paths(loaded(data=data).as_dict())["data"]


def test_what_a_run_saves_has_whole_paths(home: Path) -> None:
    sets = {"sets": {"own": {"path": "home/text.txt"}, "home": {"path": "~/text.txt"}, "rest": {"batch_size": 2}}}
    found = loaded(
        data={"path": "home/text.txt", **ROWS, "held_out": 0.2}, evaluation=sets, run={"init_from": "../imp"}
    )
    saved = whole_paths(found.as_dict())
    assert saved["data"]["path"] == str(home / "text.txt")
    assert saved["run"]["init_from"] == str(home.parent / "../imp")
    assert saved["evaluation"]["sets"] == {
        "own": {"path": str(home / "text.txt")}, "home": {"path": str(home / "text.txt")}, "rest": {"batch_size": 2},
    }  # fmt: skip
    assert found.as_dict()["data"]["path"] == "home/text.txt"  # as it was given, for people to read
    files = saved_data({"kind": "jsonl", "path": ["a/*.jsonl", "/b"], **ROWS})
    assert (files["path"], files["tokenizer"]) == ([str(home.parent / "a/*.jsonl"), "/b"], None)
    assert saved_data({"kind": "jsonl", "path": "a", "tokenizer": "bytes", **ROWS})["tokenizer"] == "bytes"


def test_nodes_that_have_the_data_at_other_places_agree(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan_run(_with_text(home), Path("run"))
    (home / "node").mkdir()
    monkeypatch.chdir(home / "node")
    other = plan_run(_with_text(home), Path("run"))
    assert one.agreed == other.agreed
    assert one.training["data"]["path"] != other.training["data"]["path"]


def _with_text(home: Path) -> Any:
    Path("text").mkdir()
    Path("text", "a.txt").write_text((home / "text.txt").read_text())
    return loaded(data={"path": "text", **ROWS})
