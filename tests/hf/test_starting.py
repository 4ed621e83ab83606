"""Runs that start from imported parameters, in any layout; and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.data_sets import check_init_from
from rrfp_jax.data import TextBytes
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.models import language_model
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from tests.commands.running import run_command, sentence
from tests.hf.random_folder import write_folder
from tests.plain_loop import assert_same_training, train_plainly

STEPS = 3
_REST = {
    "data": {"length": 16, "batch_size": 8, "num_microbatches": 4, "max_bytes": 100_000},
    "pipeline": {"num_stages": 4},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"steps": STEPS, "platform": "cpu"},
}


def imported(folder: Path) -> Path:
    theirs = write_folder(folder / "theirs")
    (theirs / "tokenizer.json").unlink()  # so that nothing says that bytes are not the model's tokens
    write_import(plan_import(theirs), folder / "ours")
    return folder / "ours"


def run_file(folder: Path, start: Path, **run: object) -> Path:
    sections = yaml.safe_load((start / "model.yaml").read_text()) | _REST
    sections["run"] = {**_REST["run"], "init_from": str(start), "run_dir": str(folder / "run"), **run}
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder / "run.yaml"


def trained_plainly(config: TrainConfig, start: Path) -> tuple[list[float], dict]:
    """The same training without a pipeline."""
    data, schedule = TextBytes(config.data), learning_rate_schedule(config.optimizer, config.run.steps)
    batches = [data.batch(step) for step in range(config.run.steps)]
    return train_plainly(
        language_model(config.model).split(1),
        read_params(newest_step(start / "checkpoints")),
        make_optimizer(config.optimizer, schedule),
        batches,
        clip_norm=config.optimizer.clip_norm,
    )


@pytest.mark.slow
def test_a_run_in_four_stages_starts_from_an_import_and_follows_the_plain_loop(tmp_path: Path):
    start = imported(tmp_path)
    path = run_file(tmp_path, start)
    done = run_command("train", "--config", path)
    assert done.returncode == 0, done.stderr
    assert f"starting from the parameters of {start}" in done.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    params = read_params(newest_step(tmp_path / "run" / "checkpoints"))
    assert_same_training(losses, params, *trained_plainly(load_train_config(str(path), {}), start))

    # another run goes on from that one, in two stages, with another dtype of parameters
    again = run_command(
        "train", "--config", path, "--init-from", tmp_path / "run", "--run-dir", tmp_path / "second",
        "--num-stages", 2, "--param-dtype", "bfloat16", "--steps", 1,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    first = json.loads((tmp_path / "second" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(losses[-1], abs=0.3)
    assert newest_step(tmp_path / "second" / "checkpoints").step == 1


def test_another_model_is_refused_by_the_names_of_its_fields(tmp_path: Path):
    start = imported(tmp_path)
    path = str(run_file(tmp_path, start))
    check_init_from(load_train_config(path, {"model.param_dtype": "bfloat16", "model.init_std": 0.5}))
    with pytest.raises(ValueError, match=r"model.rope_theta is 10.0 and not 500000.0; model.qk_norm is True"):
        check_init_from(load_train_config(path, {"model.rope_theta": 10.0, "model.qk_norm": True}))
    with pytest.raises(ValueError, match=r"has neither model\.yaml nor config\.yaml"):
        check_init_from(load_train_config(path, {"run.init_from": str(tmp_path)}))


@pytest.mark.slow
def test_a_folder_without_parameters_is_refused(tmp_path: Path):
    start = imported(tmp_path)
    path = run_file(tmp_path, start)
    next((start / "checkpoints").glob("step_*/commit.json")).unlink()
    done = run_command("train", "--config", path)
    assert done.returncode == 2
    assert "holds no checkpoint" in sentence(done)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_imported_arrays_are_the_tensors_of_the_files(tmp_path: Path):
    from rrfp_jax.hf.tensor_files import stored_tensors

    start = imported(tmp_path)
    params, theirs = read_params(newest_step(start / "checkpoints")), stored_tensors(tmp_path / "theirs")
    query = theirs["model.layers.2.self_attn.q_proj.weight"].read()
    np.testing.assert_array_equal(params["layers.2"]["attention"]["query"]["kernel"], query.T)
