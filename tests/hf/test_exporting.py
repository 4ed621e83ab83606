"""The way back: the same bits, the same files beside them, and one sentence where it does not go."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from rrfp_jax.hf._model_config import new_config
from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import ModelSections
from rrfp_jax.hf.tensor_files import stored_tensors
from rrfp_jax.models.config import ExpertsConfig, LanguageModelConfig, LayerVariant, RopeScaling
from tests.hf.random_folder import TINY_LLAMA, write_folder

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
_LLAMA = LanguageModelConfig(vocab_size=256, hidden=32, num_layers=2, num_heads=4, mlp_dim=48)

FEW = {"num_experts": 4, "experts_per_token": 2}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in stored_tensors(folder).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_round_trip_gives_the_same_bits(family: str, tmp_path: Path):
    source = shutil.copytree(GOLDEN / family, tmp_path / "theirs", ignore=shutil.ignore_patterns("expected*"))
    (source / "tokenizer.json").write_text('{"a": 1}')
    write_import(plan_import(source), tmp_path / "ours")
    write_export(plan_export(tmp_path / "ours"), tmp_path / "back", shard_bytes=2000)
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        other = after[name]
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (other.dtype, other.shape, other.tobytes())
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > 1


def test_other_numbers_and_what_does_not_fit_into_them(tmp_path: Path):
    source = write_folder(tmp_path / "theirs", TINY_LLAMA | {"num_hidden_layers": 1})
    write_import(plan_import(source, dtype="bfloat16"), tmp_path / "ours")
    sections = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())
    assert sections["model"]["param_dtype"] == sections["model"]["compute_dtype"] == "bfloat16"
    write_export(plan_export(tmp_path / "ours", dtype="float16"), tmp_path / "back", shard_bytes=10**9)
    assert {tensor.dtype.name for tensor in tensors_of(tmp_path / "back").values()} == {"float16"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float16"

    large = load_file(source / "model.safetensors")
    large["model.norm.weight"][:] = 1e6
    from safetensors.numpy import save_file

    save_file(large, source / "model.safetensors")
    write_import(plan_import(source), tmp_path / "large")
    with pytest.raises(ValueError, match="final_norm/scale has numbers that are too large for float16"):
        write_export(plan_export(tmp_path / "large", dtype="float16"), tmp_path / "none", shard_bytes=10**9)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "back", "large"}, "nothing is left"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "llama"),
        ({"rope_scaling": RopeScaling(factor=8.0)}, "llama"),
        ({"rope_scaling": RopeScaling(factor=8.0, kind="linear"), "qkv_bias": True}, "qwen2"),
        ({"rope_scaling": RopeScaling(factor=4.0, kind="yarn", original_max_positions=64)}, "llama"),
        ({"sliding_window": 5, "head_dim": 12}, "mistral"),
        ({"qkv_bias": True, "sliding_window": 5}, "qwen2"),
        ({"qk_norm": True, "tie_embeddings": True}, "qwen3"),
        ({"experts": ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=7)}, None),
        ({"experts": ExpertsConfig(num_experts=4, experts_per_token=2)}, "mixtral"),
        ({"qk_norm": True, "experts": ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=7)}, "qwen3_moe"),
        ({"variant": LayerVariant(interleaved=True)}, "glm"),
        ({"variant": LayerVariant(interleaved=True, post_norms=True, rotary_dim=2), "head_dim": 98}, "glm4"),
        (
            {"experts": ExpertsConfig(**FEW, mlp_dim=7, shared_mlp_dim=9, shared_gate=True, every=2)},
            "qwen2_moe",
        ),
        ({"qk_norm": True, "qkv_bias": True}, None),
        ({"experts": ExpertsConfig(num_experts=4, experts_per_token=2, shared_mlp_dim=7)}, None),
        ({"experts": ExpertsConfig(num_experts=4, experts_per_token=2, capacity_factor=1.0)}, None),
    ],
)
def test_a_model_that_began_here_becomes_one_of_a_family(changes: dict, kind: str | None, tmp_path: Path):
    from rrfp_jax.hf.exporting import hub_model
    from rrfp_jax.hf.model_folder import ModelFolder

    sections = ModelSections(model=replace(_LLAMA, **changes))
    folder = ModelFolder(path=tmp_path, sections=sections, config={})
    if kind is None:
        with pytest.raises(ValueError, match=r"^[^\n]*(experts|qkv_bias)[^\n]*$"):
            hub_model(folder, None)
        return
    model, config = hub_model(folder, None)
    assert config["model_type"] == kind == new_config(sections, "here")["model_type"]
    assert model.sections.shapes() == sections.shapes()


def test_what_cannot_be_exported_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has neither"):
        plan_export(tmp_path)
    write_import(plan_import(write_folder(tmp_path / "theirs")), tmp_path / "ours")
    (tmp_path / "run").mkdir()
    model = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())
    config = {**model, "run": {"init_from": str(tmp_path / "ours")}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        plan_export(tmp_path / "run")
    shutil.rmtree(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"run began with init_from .*ours has neither"):
        plan_export(tmp_path / "run")
