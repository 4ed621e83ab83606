"""What an import refuses: one sentence that names the file, the field or the tensor, and nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rrfp_jax.exchange.importing import plan_import, write_import

GOLDEN = Path(__file__).parent / "golden"


def copy_of(family: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / family, folder, ignore=shutil.ignore_patterns("expected*"))
    return folder


def change(folder: Path, values: dict[str, Any]) -> Path:
    """Fields of ``config.json``, those of parts by dotted names."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        *parts, last = name.split(".")
        inner = config
        for part in parts:
            inner = inner[part]
        inner[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WINDOW = {"use_sliding_window": True, "sliding_window": 4}
REFUSED_FIELDS = [
    ("llama", {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "factor is None: a number is needed"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8}}, "beta_fast is 8"),
    ("llama", {"rope_parameters.partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_parameters.attention_factor": 2.0}, "attention_factor is 2.0"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention is"),
    ("llama", {"logit_scale": 0.25}, "logit_scale is 0.25"),
    ("llama", {"hidden_size": "8"}, "hidden_size is '8'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"num_hidden_layers": 10**9}, "num_layers is 1000000000: give at most 16384"),
    ("llama", {"num_hidden_layers": 10**18}, "num_hidden_layers is 1000000000000000000: a whole number from 1 to"),
    ("llama", {"num_hidden_layers": 1000}, "num_hidden_layers is 1000, and the files hold 21 tensors: give files that"),
    ("mixtral", {"num_local_experts": 10**9}, "num_experts is 1000000000: give at most 65536"),
    (
        "llava_clip",
        {"vision_config.num_hidden_layers": 1000},
        "num_hidden_layers of the tower is 1000, and the f",
    ),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf: a number is needed"),
    ("llama", {"model_type": "l" * 10**6}, "llllll': models here are llama"),
    ("llama", {"head_dim": 5}, "heads are 5 wide"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": None, "max_window_layers": 1},
        "max_win",
    ),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("mixtral", {"output_router_logits": True}, "output_router_logits is True"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    ("llava_clip", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
    ("llava_siglip", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
    ("llava_clip", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer is [-2, -1]"),
    ("llava_clip", {"vision_feature_layer": 0}, "vision_feature_layer is 0"),
    ("llava_clip", {"vision_feature_layer": -3}, "vision_feature_layer is -3"),
    ("llava_clip", {"multimodal_projector_bias": 0}, "multimodal_projector_bias is 0: true or false is needed"),
    ("llava_clip", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
    ("llava_clip", {"vision_config.model_type": "pixtral"}, "model_type is 'pixtral'"),
    ("llava_clip", {"vision_config.hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("llava_clip", {"vision_config.attention_dropout": 0.5}, "attention_dropout is 0.5"),
    ("llava_clip", {"text_config.model_type": "gemma"}, "model_type is 'gemma'"),
    ("llava_clip", {"text_config.mlp_bias": True}, "mlp_bias is True"),
    ("internvl", {"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
    ("internvl", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
    ("internvl", {"vision_config.use_mask_token": True}, "use_mask_token is True"),
    ("internvl", {"vision_config.use_absolute_position_embeddings": False}, "use_absolute_position_embeddings is F"),
    ("internvl", {"vision_config.use_mean_pooling": False}, "use_mean_pooling is False"),
    ("internvl", {"vision_config.layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05"),
    ("internvl", {"vision_config.norm_type": "group_norm"}, "norm_type is 'group_norm'"),
    ("internvl", {"vision_config.image_size": [6, 4]}, "6 patches"),
    ("internvl", {"vision_config.patch_size": [2, 2, 2]}, "patch_size is [2, 2, 2]"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "none of the 2 layers has experts"),
]


@pytest.mark.parametrize(("family", "values", "said"), REFUSED_FIELDS, ids=lambda value: None)
def test_fields_are_refused_by_name(family: str, values: dict[str, Any], said: str, tmp_path: Path):
    source = change(copy_of(family, tmp_path / "theirs"), values)
    with pytest.raises(ValueError, match=r"config\.json") as refusal:
        plan_import(source)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda held: held.update({"model.extra.weight": np.ones(2, np.float32)}), "holds model.extra.weight"),
        (lambda held: held.pop(NORM), f"lacks the tensor {NORM}"),
        (lambda held: held.update({NORM: np.ones(3, np.float32)}), f"{NORM} has shape [3]"),
        (lambda held: held.update({NORM: np.ones(8, np.int8)}), f"{NORM} is I8"),
        (lambda held: held.update({NORM: np.ones(8, np.float16)}), "float16"),
    ],
)
def test_tensors_are_refused_by_name(damage: Callable, said: str, tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    tensors(source, damage)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refusal:
        plan_import(source)
    assert said in str(refusal.value)


def test_shards_must_be_there(tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    names = sorted(load_file(source / "model.safetensors"))
    shutil.move(source / "model.safetensors", source / "model-00001-of-00002.safetensors")
    places = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | {NORM: "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        plan_import(source)
    index.write_text(json.dumps({"weight_map": places | {"more": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match="lacks more"):
        plan_import(source)
    index.write_text(json.dumps({"weight_map": {name: place for name, place in places.items() if name != NORM}}))
    with pytest.raises(ValueError, match=f"holds {NORM}"):
        plan_import(source)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere"}}))
    with pytest.raises(ValueError, match="is no file of the folder"):
        plan_import(source)


def test_damaged_files_are_refused(tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        plan_import(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither"):
        plan_import(source)
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        plan_import(source)
    with pytest.raises(ValueError, match="cannot be read"):
        plan_import(tmp_path / "nowhere")


def test_a_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    plan = plan_import(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no whole safetensors"):
        write_import(plan, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    with pytest.raises(ValueError, match="is not empty"):
        write_import(plan, source)


def test_old_names_and_a_doubled_table_are_understood(tmp_path: Path):
    source = change(
        copy_of("qwen2", tmp_path / "theirs"),
        {
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "layer_types": None,
            "torch_dtype": "float32",
        },
    )
    old = plan_import(source)

    def double(held: dict[str, np.ndarray]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    tensors(source, double)
    doubled = plan_import(source)
    assert doubled.form == old.form
    assert doubled.form.sections.model.tie_embeddings
    tensors(source, lambda held: held.update({"lm_head.weight": held["lm_head.weight"] + 1}))
    assert not plan_import(source).form.sections.model.tie_embeddings  # transformers does not tie what differs


IN_MEMORY = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
}


@pytest.mark.parametrize("family", ["llava_clip", "llava_siglip", "internvl"])
def test_the_names_in_memory_are_read_as_well(family: str, tmp_path: Path):
    source = copy_of(family, tmp_path / "theirs")
    older = plan_import(source)

    def rename(held: dict[str, np.ndarray]) -> None:
        for name in list(held):
            before = next(before for before in IN_MEMORY if name.startswith(before))
            held[IN_MEMORY[before] + name.removeprefix(before)] = held.pop(name)

    tensors(source, rename)
    newer = plan_import(source)
    assert newer.matches == older.matches
    assert {name for name, _ in newer.carried} == {name for name, _ in older.carried}
    assert len(newer.carried) == {"llava_clip": 18, "llava_siglip": 13, "internvl": 0}[family]
    tensors(source, lambda held: held.update({"vision_tower.odd.weight": np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=r"holds vision_tower\.odd\.weight, for which"):
        plan_import(source)
