"""Runs that evaluate: from the configuration to the lines of the metrics file, and what is refused before the start."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.reading.draw import HELD_OUT, TRAIN, draw_data
from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.evaluate import config_of
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.data_sets import make_evaluation_sets
from tests.commands.running import run_command


def config(**overrides: Any) -> Any:
    return load_train_config("cpu/debug", {f"{name.replace('__', '.')}": value for name, value in overrides.items()})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text("some other text, and more of it\n" * 400)
    return path


def test_sets_are_the_part_held_out_or_data_of_their_own(text: Path) -> None:
    named = {"held": {}, "own": {"path": str(text)}, "short": {"path": str(text), "length": 16, "batch_size": 8}}
    settings = config(data__held_out=0.1, evaluation__sets=named)
    sets = make_evaluation_sets(settings)
    held, own, short = sets.values()
    assert [*sets] == ["held", "own", "short"]
    assert own.num_bytes == text.stat().st_size + 1
    assert own.batch(0)["tokens"].shape[-1] == settings.data.length
    assert short.batch(0)["tokens"].shape == (settings.data.num_microbatches, 8 // settings.data.num_microbatches, 16)
    assert held.fingerprint != own.fingerprint
    assert [*make_evaluation_sets(config(data__held_out=0.1, evaluation__every=2))] == ["held_out"]
    assert make_evaluation_sets(config()) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"evaluation__every": 2}, "evaluation.sets.held_out: held_out is 0, so nothing is kept for evaluation"),
        ({"evaluation__sets": {"a": {"lenght": 3}}}, "evaluation.sets.a: 'lenght' is no key of data: did you mean"),
        ({"evaluation__sets": {"a": {"path": "/nowhere"}}}, "evaluation.sets.a: data folder /nowhere does not exist"),
        ({"evaluation__sets": {"a": {"num_microbatches": 2}}}, "num_microbatches is that of training"),
        ({"evaluation__sets": {"a": {"length": "x"}}}, "evaluation.sets.a: data.length is 'x': give a whole number"),
        (
            {"data__held_out": 0.1, "evaluation__sets": {"a": {"length": 2**24}}},
            "hold back not one sequence of length 16777216",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        make_evaluation_sets(config(**overrides))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_rows_of_a_set_count_once_however_many_batches_are_taken(text: Path) -> None:
    few = text.with_name("few.txt")
    few.write_text("x" * 200)
    length, batch = {"length": 16}, {"batch_size": 8}
    settings = config(data__held_out=0.0, evaluation__sets={"own": {"path": str(few), **length, **batch}})
    own = make_evaluation_sets(settings)["own"]
    assert sum(own.batch(step)["weights"].sum() for step in range(3)) == own.num_windows * 16 < 3 * 8 * 16
    few.write_text("abc")
    with pytest.raises(ValueError, match="hold 0 sequences of length 16 to evaluate on, fewer"):
        make_evaluation_sets(settings)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(run: Path, *options: object) -> None:
    small = ("--num-layers", 2, "--num-stages", 2, "--hidden", 32, "--num-heads", 2, "--mlp-dim", 32, "--length", 16)
    common = ("--config", "cpu/debug", *small, "--deterministic", "true", "--held-out", 0.1, "--run-dir", run)
    result = run_command("train", *common, *options, timeout_s=400)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_finished_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run directory, it has no config\.yaml"):
        config_of(tmp_path, {}, batches=None, sets=None)
    (tmp_path / "config.yaml").write_text(config(data__held_out=0.1, pipeline__schedule="1f1b").as_yaml())
    with pytest.raises(ValueError, match=r"'mine' is no set of .*: it has held_out"):
        config_of(tmp_path, {}, batches=None, sets=["mine"])
    found = config_of(tmp_path, {"pipeline.replicas": 2}, batches=5, sets=None)
    assert (found.pipeline.num_stages, found.pipeline.replicas, found.pipeline.schedule) == (1, 2, None)
    assert found.evaluation is not None
    assert found.evaluation.batches == 5


@pytest.mark.slow
def test_rows_stand_once_after_a_resume_and_training_is_that_without(tmp_path: Path, text: Path) -> None:
    sets = json.dumps({"held": {}, "own": {"path": str(text), "length": 8}})
    evaluating = ("--evaluation.every", 2, "--evaluation.batches", 3, "--evaluation.sets", sets)
    evaluating += ("--evaluation.when", "start", "--evaluation.keep-best", "true", "--keep-checkpoints", 1)
    train(tmp_path / "plain", "--steps", 6)
    train(tmp_path / "run", "--steps", 6, *evaluating)
    plain, rows = rows_of(tmp_path / "plain"), rows_of(tmp_path / "run")
    trained = [row for row in rows if "evaluation" not in row]
    assert [(row["loss"], row["grad_norm"]) for row in trained] == [(row["loss"], row["grad_norm"]) for row in plain]
    found = [(row["step"], row["evaluation"]) for row in rows if "evaluation" in row]
    assert found == [(step, name) for step in (-1, 1, 3, 5) for name in ("held", "own")]
    train(tmp_path / "run", "--steps", 8, *evaluating)
    again = [(row["step"], row["evaluation"]) for row in rows_of(tmp_path / "run") if "evaluation" in row]
    assert again == [*found, (7, "held"), (7, "own")]
    assert all(row["bits_per_byte"] > 0 for row in rows if "evaluation" in row)
    # of the finished run, on one device
    alone = run_command("evaluate", tmp_path / "run", "--json", "--evaluation.sets", sets, timeout_s=300)
    assert alone.returncode == 0, alone.stderr
    told = json.loads(alone.stdout)
    last = rows_of(tmp_path / "run")[-2:]
    assert told["steps"] == 8
    for row, expected in zip(told["sets"], last, strict=True):
        assert (row["step"], row["evaluation"], row["tokens"]) == (7, expected["evaluation"], expected["tokens"])
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
def test_evaluations_in_idle_time_have_the_same_rows_also_over_a_resume(tmp_path: Path) -> None:
    averaging = ("--optimizer.arguments", "{average_decay: 0.5}", "--checkpoint-every", 3)
    evaluating = ("--evaluation.every", 2, "--evaluation.batches", 3)
    for folder, when in (("plain", "start"), ("idle", "start+idle")):
        for steps in (5, 8):
            train(tmp_path / folder, "--steps", steps, *averaging, *evaluating, "--evaluation.when", when)
    plain, idle = (
        {(row["step"], row.get("evaluation")): row["loss"] for row in rows_of(tmp_path / folder)}
        for folder in ("plain", "idle")
    )
    assert idle == plain
    assert [step for step, name in idle if name] == [-1, 1, 3, 4, 5, 7]


@pytest.mark.slow
def test_evaluations_exports_and_further_runs_take_the_average(tmp_path: Path) -> None:
    run, averaging = tmp_path / "run", ("--optimizer.arguments", "{average_decay: 0.5}")
    evaluating = ("--evaluation.every", 2, "--evaluation.batches", 3, "--final-learning-rate", 1e-3)
    train(run, "--steps", 4, *averaging, *evaluating)
    shared = ("--pipeline.replicas", 2, "--optimizer.shard", "true", "--hint", "bfw")
    train(run, "--steps", 6, *averaging, *evaluating, *shared)
    train(tmp_path / "plain", "--steps", 6, *evaluating)
    of_run, of_plain = (rows_of(folder) for folder in (run, tmp_path / "plain"))
    for row, plain in zip(of_run, of_plain, strict=True):
        if "evaluation" not in row:
            assert row["loss"] == pytest.approx(plain["loss"], rel=1e-5)  # the average has no part in training
        elif row["step"] > 0:
            assert row["loss"] != pytest.approx(plain["loss"], rel=1e-5)
    stored = newest_step(run / "checkpoints")
    average = read_params(stored)
    plain = read_params(newest_step(tmp_path / "plain" / "checkpoints"))
    assert not np.allclose(average["layers.0"]["mlp"]["up"]["kernel"], plain["layers.0"]["mlp"]["up"]["kernel"])
    alone = run_command("evaluate", run, "--json", "--evaluation.batches", 3, timeout_s=300)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout)["sets"][0]["loss"] == pytest.approx(of_run[-1]["loss"], rel=1e-6)
    for verb, source, target in (("export", run, tmp_path / "out"), ("import", tmp_path / "out", tmp_path / "in")):
        done = run_command("convert", verb, source, target)
        assert done.returncode == 0, done.stderr
    jax.tree.map(np.testing.assert_array_equal, read_params(newest_step(tmp_path / "in" / "checkpoints")), average)
    # Adapters are trained beside the average, also after a resume.
    adapting = ("--init-from", run, "--adapters", "{rank: 2}", *evaluating)
    for steps in (2, 4):
        train(tmp_path / "adapted", "--steps", steps, *adapting)
        with_adapters = read_params(newest_step(tmp_path / "adapted" / "checkpoints"))
        jax.tree.map(np.testing.assert_array_equal, {name: with_adapters[name] for name in average}, average)
    done = run_command("evaluate", tmp_path / "adapted", "--json", "--evaluation.batches", 3, timeout_s=300)
    last = rows_of(tmp_path / "adapted")[-1]
    assert json.loads(done.stdout)["sets"][0]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    refused = run_command("train", "--config", run / "config.yaml", "--optimizer.arguments", "{average_decay: 0.9}")
    assert "average_decay" in refused.stderr


@pytest.mark.slow
def test_a_run_that_sees_has_the_exact_match_that_it_reads_with(tmp_path: Path) -> None:
    """On the same pictures: the set's only batch has all that ``experiments.reading`` asks for."""
    run, plain, letters = tmp_path / "run", tmp_path / "plain", "abcdxy"
    easy = {"max_images": 1, "text_only": 0, "held_out": 0.3, "num_pictures": 400, "num_held_out": 32}
    words = " ".join(one + other for one in letters for other in letters)
    draw_data(tmp_path / "words", num_samples=800, text=words, **easy)
    options = ("--config", "cpu/multimodal", "--num-stages", 2, "--layout", "Pvp@0|Et*2L@1", "--deterministic", "true")
    options += ("--data.path", tmp_path / "words" / TRAIN, "--data.images", "{text_buckets: 1, image_buckets: 1}")
    evaluating = ("--evaluation.every", 100, "--evaluation.batches", 1)
    held_out = {"path": str(tmp_path / "words" / HELD_OUT), "batch_size": 32}
    evaluating += ("--evaluation.sets", json.dumps({"held_out": held_out}))
    for folder, more in ((run, evaluating), (plain, ())):
        done = run_command("train", *options, *more, "--steps", 200, "--run-dir", folder, timeout_s=280)
        assert done.returncode == 0, done.stderr
    trained = [row for row in rows_of(run) if "evaluation" not in row]
    kept = ("loss", "grad_norm", "means")
    assert [[row[name] for name in kept] for row in trained] == [[row[name] for name in kept] for row in rows_of(plain)]
    first, last = [row for row in rows_of(run) if "evaluation" in row]
    assert 0 < last["exact_match"] < 1
    assert first["token_accuracy"] < last["token_accuracy"] < 1
    assert last["exact_match"] < last["token_accuracy"]
    picture = tmp_path / "words.png"
    read = run_command("reading", run, "--samples", 32, "--beside", plain, "--picture", picture)
    assert [line.split()[:2] for line in read.stdout.splitlines() if "%" in line] == [["run", "200"], ["plain", "200"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{last['exact_match']:.1%}" in read.stdout.split(), read.stdout
    told = run_command("evaluate", run, "--json")
    assert told.returncode == 0, told.stderr
    [of_set] = json.loads(told.stdout)["sets"]
    assert [of_set[name] for name in ("exact_match", "token_accuracy")] == [
        last[name] for name in ("exact_match", "token_accuracy")
    ]
    shown = run_command("evaluate", run).stdout
    assert "exact match" in shown
    assert f"{last['token_accuracy']:.1%}" in shown
