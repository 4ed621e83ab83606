"""The data sections of a configuration: what the model must be for them, and with what a run goes on."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.training.assembly import check_same_training
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.data_sets import make_data_set, vocabulary_note
from rrfp_jax.commands.training.model_parts import cut_language_model
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.planner.analytic_costs import microbatch_specs
from tests.commands.running import run_command, sentence
from tests.data.token_sets import VOCAB, token_set

MODEL = {"vocab_size": VOCAB, "hidden": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8}
ROWS = {"length": 16, "batch_size": 4, "num_microbatches": 2}


@pytest.fixture(autouse=True)
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed, name in enumerate("ab"):
        token_set(tmp_path / name, [5, 30, 9, 14, 3, 12, 40, 8], seed)
    (tmp_path / "text.jsonl").write_text('{"text": "a text that is long enough for a few rows of sixteen bytes"}\n')


def written(**sections: Any) -> Path:
    path = Path("run.yaml")
    rest = {"pipeline": {"num_stages": 2}, "optimizer": {"learning_rate": 1e-3}, "run": {"steps": 1, "platform": "cpu"}}
    path.write_text(yaml.safe_dump({"model": MODEL} | rest | sections))
    return path


def config(**sections: Any) -> TrainConfig:
    return load_train_config(str(written(**sections)), {})


@pytest.mark.parametrize("pack", [False, True])
def test_the_model_reads_segments_where_rows_are_packed(pack: bool) -> None:
    given = config(data={"kind": "tokens", "path": "a", "pack": pack, **ROWS})
    chunks = cut_language_model(given, 2)
    batch = make_data_set(given).batch(0)
    assert {leaf for chunk in chunks for leaf in chunk.leaves} == set(batch)
    (planned,) = microbatch_specs(given, microbatch_size=2)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in planned.items()} == {
        name: (leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()
    }


def test_the_vocabulary_of_the_model_must_hold_all_tokens() -> None:
    small, large = MODEL | {"vocab_size": VOCAB - 1}, MODEL | {"vocab_size": 128}
    with pytest.raises(ValueError, match="vocab_size is 89, but the tokens of the data are up to 89: give at least 90"):
        make_data_set(config(model=small, data={"kind": "tokens", "path": "a", **ROWS}))
    with pytest.raises(
        ValueError, match="vocab_size is 128, but the tokens of the data are up to 255: give at least 256"
    ):
        make_data_set(config(model=large, data={"kind": "jsonl", "path": "text.jsonl", **ROWS, "batch_size": 2}))
    given = config(model=large, data={"kind": "tokens", "path": "a", **ROWS})
    assert vocabulary_note(given, make_data_set(given)) == (
        "the model's vocabulary of 128 is larger than that of the data, 90: the other tokens never come"
    )
    same = config(data={"kind": "tokens", "path": "a", **ROWS})
    assert vocabulary_note(same, make_data_set(same)) is None


def test_text_alone_is_refused_for_a_model_that_sees() -> None:
    vision = {"hidden": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8, "patch_dim": 64, "grid": 4}
    with pytest.raises(ValueError, match="data of kind tokens is text alone, and the model has vision: give image"):
        make_data_set(config(data={"kind": "tokens", "path": "a", **ROWS}, vision=vision))


def test_a_run_goes_on_with_the_same_tokens_wherever_they_lie_and_with_no_others() -> None:
    def training(**changes: Any) -> dict[str, Any]:
        given = config(data={"kind": "tokens", "path": ["a", "b"], "weights": [2, 1], **ROWS} | changes)
        return plan_run(given, Path("run")).training

    saved = training()
    shutil.copytree("a", "elsewhere")
    assert not check_same_training(saved, training(path=["elsewhere", "b"], num_microbatches=4), force=False)
    with pytest.raises(ValueError, match=r"data.text was '.* tokens, SHA-256 .*' and is '.*': go back"):
        check_same_training(saved, training(path=["b", "a"]), force=False)
    for name, value in {"weights": [1, 1], "pack": True, "held_out": 0.1, "seed": 1, "length": 8}.items():
        with pytest.raises(ValueError, match=f"data.{name} was .* and is .*: go back"):
            check_same_training(saved, training(**{name: value}), force=False)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"path": "none", **ROWS}, "token set none does not exist: write it with rrfp tokenize"),
        (
            {"path": "a", **ROWS, "length": 500},
            "129 tokens in 8 documents, not enough for a row of 500: give more",
        ),
        ({"path": "a", **ROWS, "held_out": 0.999}, "not one row of 16 is left to train on: give more text, another"),
        ({"path": "a", **ROWS, "tokenizer": "run.yaml"}, "and the configuration names run.yaml, another one"),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_one_sentence(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_run(config(data={"kind": "tokens", **section}), Path("run"))


@pytest.mark.slow
def test_the_command_says_it_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / written(data={"kind": "tokens", "path": str(tmp_path / "a"), **ROWS, "length": 500})
    answer = sentence(run_command("train", "--config", path, "--run-dir", tmp_path / "run"))
    assert "not enough for a row of 500" in answer
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{since: 2024-01-01}", "data.arguments.since is 2024-01-01, a date, which no checkpoint keeps: put it in"),
        ("{at: 2024-01-01T10:00:00Z}", "data.arguments.at is 2024-01-01 10:00:00+00:00, a date"),
        ("{most: .inf}", "data.arguments.most is inf: give a finite number"),
        ("{part: [1, {least: .nan}]}", "data.arguments.part.least is nan: give a finite number"),
        ("{raw: !!binary aGVsbG8=}", "data.arguments.raw is b'hello', of type bytes"),
        ("{raw: !!set {a, b}}", "data.arguments.raw is {'"),
        ("{mix: {a: 1, 2: x}}", "data.arguments.mix has the key 2, which is no text: put it in quotes"),
        ("{by_year: {2023: 1}}", "data.arguments.by_year has the key 2023, which is no text"),
        ("{flags: {yes: 1}}", "data.arguments.flags has the key True, which is no text"),
        ("{none: {~: 1}}", "data.arguments.none has the key None, which is no text"),
        ("{large: 18446744073709551616}", "data.arguments.large is 18446744073709551616: give a number of at most"),
        ('{half: "\\ud800"}', "data.arguments.half is '\\ud800', which is no Unicode text"),
        (f"{{deep: {'[' * 40}{']' * 40}}}", "data.arguments.deep is nested more than 32 levels deep"),
        (f"{{long: !!binary {'aGVs' * 200}}}", "..., of type bytes"),
    ],
)
def test_a_value_that_would_not_come_back_is_refused_where_it_is_read(
    arguments: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    text = "{model: {vocab_size: 9, hidden: 8, num_layers: 1, num_heads: 1, mlp_dim: 8}, pipeline: {num_stages: 1}, "
    text += "optimizer: {learning_rate: 0.1}, run: {steps: 1}, data: {object: 'a:B', batch_size: 1, "
    path.write_text(f"{text}num_microbatches: 1, arguments: {arguments}}}}}", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(words)):
        load_train_config(str(path), {})
    path.write_text(f"{text}num_microbatches: 1}}, evaluation: {{sets: {{a: {arguments}}}}}}}", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(words.replace("data.arguments", "evaluation.sets.a"))):
        load_train_config(str(path), {})
