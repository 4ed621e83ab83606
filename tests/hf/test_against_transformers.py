"""Random models of every family: logits, gradients and files beside those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.tensor_files import stored_tensors
from tests.hf.ours import Ours

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SEEDS = range(4)
MANY = ("gemma3_text", "gpt_oss")
"""Families whose layers are of several kinds, so that few configurations show little."""


def assert_close(ours: Any, theirs: Any, limit: float) -> None:
    """Within ``limit`` of the largest number."""
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("family", "seed"),
    [(family, seed) for family in hub_models.TEXT for seed in (range(40) if family in MANY else SEEDS)],
)
def test_text_models(family: str, seed: int, tmp_path: Path):
    model = hub_models.text_model(family, seed)
    tokens = hub_models.random_tokens(model.config.vocab_size, seed)
    hub_models.save(model, tmp_path / "theirs", shard_size="5GB" if seed % 2 else "20KB")
    plan = plan_import(tmp_path / "theirs")
    write_import(plan, tmp_path / "ours")
    ours = Ours(tmp_path / "ours")

    theirs = model(input_ids=torch.tensor(tokens).long()).logits
    assert_close(ours.logits({"tokens": tokens}), theirs.detach(), 2e-5)
    back = exported(tmp_path)
    assert torch.equal(back(input_ids=torch.tensor(tokens).long()).logits, theirs)
    check_gradients(model, theirs, tokens, plan, ours, {"tokens": tokens})


@pytest.mark.parametrize("seed", range(200, 203))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_long_texts(family: str, seed: int, tmp_path: Path):
    """Far into a text the last bit of a wave shows: the angles are those of transformers, in float32 as there."""
    model = hub_models.text_model(family, seed)
    tokens = hub_models.random_tokens(model.config.vocab_size, seed, (1, 1500))
    write_import(plan_import(hub_models.save(model, tmp_path / "theirs")), tmp_path / "ours")
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(tokens).long()).logits
    assert_close(Ours(tmp_path / "ours").logits({"tokens": tokens}), theirs, 2e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", hub_models.SEEING)
def test_models_that_see(kind: str, seed: int, tmp_path: Path):
    model = hub_models.seeing_model(kind, seed)
    pixels, tokens, leaves = hub_models.seen(model.config, seed)
    hub_models.save(model, tmp_path / "theirs", shard_size="5GB" if seed % 2 else "20KB")
    plan = plan_import(tmp_path / "theirs")
    write_import(plan, tmp_path / "ours")
    ours = Ours(tmp_path / "ours")

    given = {"input_ids": torch.tensor(tokens).long(), "pixel_values": torch.tensor(pixels)}
    theirs = model(**given).logits
    assert_close(ours.logits(leaves), theirs.detach(), 2e-5)
    assert torch.equal(exported(tmp_path)(**given).logits, theirs)
    check_gradients(model, theirs, tokens, plan, ours, leaves)


def exported(folder: Path) -> Any:
    """What ``from_pretrained`` makes of the export of the import, whose files hold the same bits as the first ones."""
    write_export(plan_export(folder / "ours"), folder / "back", shard_bytes=20_000)
    before, after = (stored_tensors(folder / name) for name in ("theirs", "back"))
    for name, tensor in before.items():
        other = after[name if name in after else hub_models.hub_name(name)]
        assert tensor.read().tobytes() == other.read().tobytes(), name
    assert len(before) == len(after)
    return hub_models.load(folder / "back")


def check_gradients(model: Any, logits: Any, tokens: np.ndarray, plan: Any, ours: Ours, leaves: Any) -> None:
    """Every leaf's gradient, by the norm of the difference."""
    targets = torch.tensor(tokens[:, 1:]).long()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    loss.backward()
    our_loss, grads = ours.gradients(leaves)
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    theirs = hub_models.gradients_by_file_name(model)
    theirs |= {hub_models.hub_name(name): gradient for name, gradient in theirs.items()}
    largest = max(np.linalg.norm(gradient) for gradient in theirs.values())
    for match in plan.matches:
        mine = grads
        for key in match.ours:
            mine = mine[key]
        expected = match.transform.to_ours([theirs[name] for name in match.theirs])
        size = max(np.linalg.norm(expected), 1e-3 * largest)
        assert np.linalg.norm(np.asarray(mine) - expected) <= 1e-4 * size, match.ours
