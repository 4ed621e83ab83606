"""Runs that train adapters: what they save, in which layouts they go on, and what becomes of them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.data import TextBytes
from rrfp_jax.models import add_adapters, language_model
from rrfp_jax.models.adapters import merged_params
from rrfp_jax.programs.chunk import ADAPTERS
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from tests.commands.running import run_afresh, run_command, sentence
from tests.hf.test_starting import imported, run_file
from tests.plain_loop import assert_same_training, train_plainly

ADAPTED = {"rank": 3, "alpha": 6.0, "targets": ["query", "value", "mlp.*"], "dropout": 0.25}


def adapted_run(folder: Path, start: Path, **run: Any) -> Path:
    path = run_file(folder, start, **run)
    sections = yaml.safe_load(path.read_text()) | {"adapters": ADAPTED}
    # gradients of factors that were just zero are small, and Adam would make numbers of their rounding
    sections["optimizer"]["arguments"] = {"eps": 1e-4}
    path.write_text(yaml.safe_dump(sections))
    return path


def trained_plainly(path: Path, start: Path) -> tuple[list[float], dict[str, Any]]:
    config = load_train_config(str(path), {"optimizer.final_learning_rate": 1e-3})
    assert config.adapters is not None
    chunks = add_adapters(language_model(config.model).split(1), config.adapters)
    fresh = jax.jit(chunks[0].init)(jax.random.key(config.run.seed))
    base = read_params(newest_step(start / "checkpoints"))
    data, schedule = TextBytes(config.data), learning_rate_schedule(config.optimizer, config.run.steps)
    return train_plainly(
        chunks,
        {**base, **{name: layer for name, layer in fresh.items() if name.startswith(ADAPTERS)}},
        make_optimizer(config.optimizer, schedule),
        [data.batch(step) for step in range(config.run.steps)],
        clip_norm=config.optimizer.clip_norm,
        frozen=base.keys(),
        seed=config.run.seed,
    )


@pytest.mark.slow
def test_adapters_train_on_an_import_and_go_on_in_another_layout(tmp_path: Path) -> None:
    start = imported(tmp_path)
    path = adapted_run(tmp_path, start, steps=4, checkpoint_every=2)
    for steps, layout in (
        (2, ["--hint", "bfw"]),
        (4, ["--num-stages", 2, "--mesh", "{tensor: 2}", "--remat", "full"]),
    ):
        flat = ("--final-learning-rate", 1e-3)  # so that the rates of both do not depend on the number of steps
        done = run_afresh("train", "--config", path, "--steps", steps, *layout, *flat)
        assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    params = read_params(newest_step(tmp_path / "run" / "checkpoints"))
    assert_same_training(losses, params, *trained_plainly(path, start))
    base = read_params(newest_step(start / "checkpoints"))
    for name, layer in base.items():
        jax.tree.map(np.testing.assert_array_equal, params[name], layer)
    records = [*(tmp_path / "run" / "checkpoints").glob("step_00000004/data-*/*.json")]
    saved = {array[0][0] for record in records for array in json.loads(record.read_text())["arrays"]}
    assert saved == {f"{ADAPTERS}layers.{number}" for number in range(4)}

    # merged, the export computes what the run does
    done = run_afresh("convert", "export", tmp_path / "run", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    done = run_afresh("convert", "import", tmp_path / "merged", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    config = load_train_config(str(path), {})
    assert config.adapters is not None
    merged = merged_params(params, config.adapters)
    again = read_params(newest_step(tmp_path / "again" / "checkpoints"))
    for name, layer in merged.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again[name], layer)
    ours, theirs = (
        run_afresh("sample", folder, "--prompt", "def ", "--max-tokens", 12, "--tokenizer", "bytes").stdout
        for folder in (tmp_path / "run", tmp_path / "again")
    )
    assert ours == theirs

    # other adapters are another training, and without its base the run cannot go on
    refused = run_command("train", "--config", path, "--adapters", "{rank: 2}")
    assert "adapters.rank was 3 and is 2" in sentence(refused)
    (tmp_path / "ours").rename(tmp_path / "gone")
    assert "put that folder back" in sentence(run_command("train", "--config", path, "--steps", 6))
