"""Random models of every family: logits, gradients and files beside those of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.tensor_files import stored_tensors
from rrfp_jax.models import language_model
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
MANY = ("qwen2_moe", "gemma3_text", "gpt_oss", "glm", "glm4", "deepseek_v3")
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


@pytest.mark.parametrize("seed", [300, 301, 302, 304])  # in 303 no other layers have experts
def test_layers_that_predict_further_ahead(seed: int, tmp_path: Path):
    """Their loss is that of transformers' own such layers, and their tensors go both ways."""
    from safetensors.numpy import load_file, save_file
    from transformers.modeling_layers import MtpModel

    model = hub_models.text_model("deepseek_v3", seed)
    hub_models.save(model, tmp_path / "theirs")
    ahead = hub_models.randomised(MtpModel(model, 2), seed + 1)
    for parameter in ahead.layers.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ahead.config._attn_implementation = ahead.config._experts_implementation = "eager"
    tensors, file = {}, tmp_path / "theirs" / "model.safetensors"
    for name, tensor in ahead.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        where = f"model.layers.{model.config.num_hidden_layers + int(number)}."
        array = tensor.numpy()
        if rest.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(array):
                for part, half in zip(("gate_proj", "up_proj"), np.split(both, 2), strict=True):
                    tensors[f"{where}mlp.experts.{expert}.{part}.weight"] = half
        elif rest.endswith("experts.down_proj"):
            for expert, matrix in enumerate(array):
                tensors[f"{where}mlp.experts.{expert}.down_proj.weight"] = matrix
        else:
            tensors[where + rest] = array
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    write_import(plan_import(tmp_path / "theirs"), tmp_path / "ours")

    tokens = hub_models.random_tokens(model.config.vocab_size, seed)
    given = torch.tensor(tokens).long()
    with torch.no_grad():
        stream, expected = model.model(input_ids=given).last_hidden_state, 0.0
        places = torch.arange(tokens.shape[1])[None]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        for number, layer in enumerate(ahead.layers, 1):
            later = torch.roll(given, -number, 1)
            angles = model.model.rotary_emb(stream, position_ids=places)
            stream = layer(
                model.model.embed_tokens(later), stream, position_embeddings=angles, attention_mask=mask,
                position_ids=places, cache=None,
            )  # fmt: skip
            # the target of a place is the next token, and that of the layer lies so many further on
            logits, targets = model.lm_head(stream)[:, : -1 - number], given[:, 1 + number :]
            expected += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    ours = Ours(tmp_path / "ours")
    (chunk,) = language_model(ours.sections.model).split(1)
    targets, weights = np.roll(tokens, -1, axis=1), np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    named = chunk.apply(ours.params, None, {"tokens": tokens, "targets": targets, "weights": weights}, key=None)[2]
    assert float(named["ahead_loss"]) == pytest.approx(0.3 / 2 * float(expected), rel=2e-5)

    write_export(plan_export(tmp_path / "ours"), tmp_path / "back", shard_bytes=20_000)
    before, after = (stored_tensors(tmp_path / name) for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(before[name].read().tobytes() == after[name].read().tobytes() for name in before)


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
