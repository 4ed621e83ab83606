"""Small models that transformers has written, with what it computes from them: ours computes the same."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rrfp_jax.hf.importing import plan_import, write_import
from tests.hf.ours import Ours

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


def test_all_families_are_there():
    assert {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gemma3_text",
        "gpt_oss",
        "glm",
        "glm4",
        "deepseek_v3",
        "llava_clip",
        "llava_siglip",
        "internvl",
        "qwen2_5_vl",
    } <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    source = tmp_path / "theirs"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((GOLDEN / family / name).read_bytes())
    write_import(plan_import(source), tmp_path / "ours")
    expected = load_file(GOLDEN / family / "expected.safetensors")
    logits = expected.pop("logits")
    ours = Ours(tmp_path / "ours").logits(expected)
    assert np.abs(ours - logits).max() <= 2e-5 * np.abs(logits).max()
