"""PEFT computes the logits of our export, and we those of its adapters."""

from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.hf.exporting import plan_export, write_adapters, write_export
from rrfp_jax.hf.importing import plan_adapters, plan_import, write_adapters_import, write_import
from tests.hf.ours import Ours

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.hf import hub_models  # noqa: E402 - it needs them

TARGETS = (["q_proj", "v_proj"], "all-linear", r".*\.[02]\..*(k_proj|o_proj)")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4"])
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = hub_models.text_model(family, seed)
    hub_models.save(model, tmp_path / "whole")
    targets = ["q_proj", "o_proj"] if family in ("mixtral", "qwen3_moe", "glm4") else TARGETS[seed % 3]
    settings = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, use_rslora=seed == 3, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(hub_models.load(tmp_path / "whole"), settings).eval()
    torch.manual_seed(seed)
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(tensor, std=0.3)
    adapted.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, (2, 11)).astype(np.int32)
    with torch.no_grad():
        wanted = adapted(input_ids=torch.tensor(tokens).long()).logits.numpy()
        plain = hub_models.load(tmp_path / "whole")(input_ids=torch.tensor(tokens).long()).logits.numpy()
    assert np.abs(wanted - plain).max() > 1e-2, "the adapters do something"

    write_import(plan_import(tmp_path / "whole"), tmp_path / "base")
    write_adapters_import(plan_adapters(tmp_path / "theirs", tmp_path / "base"), tmp_path / "ours")
    close = {"atol": 1e-4 * max(1.0, np.abs(wanted).max())}
    np.testing.assert_allclose(Ours(tmp_path / "ours").logits({"tokens": tokens}), wanted, **close)

    plan = plan_export(tmp_path / "ours")
    write_adapters(plan, tmp_path / "back")
    back = peft.PeftModel.from_pretrained(hub_models.load(tmp_path / "whole"), tmp_path / "back")
    write_export(plan, tmp_path / "merged", shard_bytes=10**9)
    for each in (back, hub_models.load(tmp_path / "merged")):
        with torch.no_grad():
            logits = each(input_ids=torch.tensor(tokens).long()).logits.numpy()
        np.testing.assert_allclose(logits, wanted, **close)
