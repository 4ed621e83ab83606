"""From transformers to four stages, on after a stop, and back: the export's loss there is ours."""

import json
from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.data import TextBytes
from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from tests.commands.running import run_afresh
from tests.hf.test_starting import run_file, trained_plainly
from tests.plain_loop import assert_same_training

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both

_TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_llama_is_tuned_in_four_stages_and_goes_back(tmp_path: Path):
    hub_models.save(hub_models.made("llama", _TINY, 1), tmp_path / "theirs")
    start = tmp_path / "ours"
    write_import(plan_import(tmp_path / "theirs"), start)
    path = run_file(tmp_path, start, steps=4, checkpoint_every=2)
    for steps in (2, 4):  # the second command goes on from the first one's checkpoint
        flat = ("--final-learning-rate", 1e-3)  # so that the rates of both do not depend on the number of steps
        done = run_afresh("train", "--config", path, "--steps", steps, *flat)
        assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = load_train_config(str(path), {"optimizer.final_learning_rate": 1e-3})
    params = read_params(newest_step(tmp_path / "run" / "checkpoints"))
    assert_same_training(losses, params, *trained_plainly(config, start))

    write_export(plan_export(tmp_path / "run"), tmp_path / "back", shard_bytes=10_000)
    theirs = hub_models.load(tmp_path / "back")
    batch = TextBytes(config.data).batch(0)
    tokens, targets = (torch.tensor(np.concatenate(list(batch[name]))).long() for name in ("tokens", "targets"))
    with torch.no_grad():
        logits = theirs(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    # our loss on the same batch: that of one more step, which begins with these parameters
    again = run_file(tmp_path, start, init_from=str(tmp_path / "run"), run_dir=str(tmp_path / "again"), steps=1)
    assert run_afresh("train", "--config", again).returncode == 0
    ours = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert loss == pytest.approx(ours, rel=1e-4)
