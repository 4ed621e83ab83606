"""What an import refuses: one sentence that names the file, the field or the tensor, and nothing is left behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rrfp_jax.data.images import ImageTokens
from rrfp_jax.hf.image_settings import read_image_tokens
from rrfp_jax.hf.importing import plan_import, write_import
from tests.commands.running import run_code

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
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate is 0"),
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
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf: a finite number is needed"),
    ("llama", {"model_type": "l" * 10**6}, "llllll': models here are llama"),
    ("llama", {"head_dim": 5}, "heads are 5 wide"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ("gemma3_text", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types is"),
    ("gemma3_text", {"sliding_window": None}, "layer_types is"),
    ("gemma3_text", {"num_hidden_layers": 10**9, "layer_types": None}, "num_layers is 1000000000: give at most 16384"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ("gemma3_text", {"rope_theta": 7.0}, "rope_theta is 7.0: full_attention of rope_parameters says 500"),
    ("gemma3_text", {"rope_parameters.sliding_attention.rope_type": "dynamic"}, "rope_type is 'dynamic'"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("glm4", {"rope_parameters.partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: an even number of the 6"),
    (
        "glm4",
        {"rope_parameters.partial_rotary_factor": 1e308},
        "partial_rotary_factor is 1e+308: an even number of the",
    ),
    ("glm4", {"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0: rope_parameters says 0.7"),
    ("glm4", {"attention_bias": 1}, "attention_bias is 1: true or false is needed"),
    ("glm", {"rope_parameters.rope_type": "dynamic"}, "rope_type is 'dynamic'"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
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
    ("qwen2_5_vl", {"text_config.rope_parameters.mrope_section": [1, 1, 1]}, "rope_sections [1, 1, 1] are 3 waveleng"),
    ("qwen2_5_vl", {"text_config.rope_parameters.mrope_section": [1, 1]}, "mrope_section is [1, 1]: three numbers"),
    ("qwen2_5_vl", {"text_config.rope_parameters.rope_type": "dynamic"}, "rope_type is 'dynamic'"),
    ("qwen2_5_vl", {"text_config.head_dim": 6}, "head_dim is 6"),
    ("qwen2_5_vl", {"text_config.hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("qwen2_5_vl", {"text_config.model_type": "llama"}, "model_type is 'llama'"),
    ("qwen2_5_vl", {"text_config": 3}, "text_config is 3: an object is needed"),
    ("qwen2_5_vl", {"hidden_size": 12}, "hidden_size is 12: models here have nothing for this field"),
    ("qwen2_5_vl", {"vision_config.out_hidden_size": 12}, "out_hidden_size is 12"),
    ("qwen2_5_vl", {"vision_config.model_type": "qwen2_vl"}, "model_type is 'qwen2_vl'"),
    ("qwen2_5_vl", {"vision_config.hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("qwen2_5_vl", {"vision_config.window_size": 3}, "window_size is 3: at least 4 pixels are needed"),
    ("qwen2_5_vl", {"vision_config.fullatt_block_indexes": "all"}, "fullatt_block_indexes is 'all'"),
    ("qwen2_5_vl", {"vision_config.rope_parameters.rope_type": "default"}, "rope_type is 'default'"),
    ("qwen2_5_vl", {"vision_config.rope_parameters.factor": 2.0}, "factor is 2.0"),
    ("qwen2_5_vl", {"vision_config.num_heads": 4}, "heads are 2 wide"),
    ("qwen2_5_vl", {"vision_config.depth": 1000}, "num_hidden_layers of the tower is 1000"),
    ("qwen2_5_vl", {"vision_config.deepstack_visual_indexes": [1]}, "deepstack_visual_indexes is [1]"),
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


def test_a_full_disk_is_no_bad_input(tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    code = (
        "import resource\n"
        "from rrfp_jax.commands import convert\n"
        "from rrfp_jax.commands.common.errors import run_command\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))\n"
        f"run_command(lambda: convert.main(['import', {str(source)!r}, {str(tmp_path / 'ours')!r}]))\n"
    )
    done = run_code(code, tmp_path)
    assert done.returncode == 1
    assert re.search(r"^error: .*ours.* cannot be written \(File too large\)", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


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
    assert doubled.model == old.model
    assert doubled.model.sections.model.tie_embeddings
    tensors(source, lambda held: held.update({"lm_head.weight": held["lm_head.weight"] + 1}))
    assert not plan_import(source).model.sections.model.tie_embeddings  # transformers does not tie what differs


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


def test_a_qwen_vl_is_read_in_its_older_and_newer_forms(tmp_path: Path):
    source = copy_of("qwen2_5_vl", tmp_path / "theirs")
    known = plan_import(source)

    def rename(held: dict[str, np.ndarray]) -> None:
        for name in [name for name in held if name != "lm_head.weight"]:
            held["model." + name.replace("model.", "language_model.")] = held.pop(name)

    tensors(source, rename)
    assert plan_import(source).matches == known.matches
    shown = ImageTokens(feature=1, before="<|vision_start|>", behind="<|vision_end|>", are_in_chats=True)
    assert read_image_tokens(source) == shown
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["layer_types"]
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config["vision_config"] |= {"in_chans": config["vision_config"].pop("in_channels"), "model_type": "qwen2_5_vl"}
    (source / "config.json").write_text(json.dumps({**text, **config}))  # as the files of the hub have it
    assert plan_import(source).model.sections == known.model.sections
    (source / "config.json").write_text(json.dumps({**text, **config, "text_config": {**text, "model_type": None}}))
    assert plan_import(source).model.sections == known.model.sections


def sharded(folder: Path) -> Path:
    """The same weights in two shards with their index."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(held), {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: held[name] for name in part}, folder / shard)
        places |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_two_sets_of_weights_are_refused_and_a_stale_index_is_passed_over(tmp_path: Path):
    source, single = sharded(copy_of("llama", tmp_path / "theirs")), copy_of("llama", tmp_path / "single")
    shutil.copyfile(single / "model.safetensors", source / "model.safetensors")
    with pytest.raises(ValueError, match=r"two sets of weights, model\.safetensors and model-00001-of-00002.*: remove"):
        plan_import(source)
    (source / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"two sets of weights, model\.safetensors and model-00002-of-00002.*: remove"):
        plan_import(source)
    (source / "model-00002-of-00002.safetensors").unlink()
    assert plan_import(source).matches == plan_import(single).matches
    places = dict.fromkeys(load_file(single / "model.safetensors"), "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert plan_import(source).matches == plan_import(single).matches


def test_the_index_says_which_of_several_copies_counts(tmp_path: Path):
    source = sharded(copy_of("llama", tmp_path / "theirs"))
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    first, second = (source / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    held = load_file(first)
    stale = {name: 9 + tensor for name, tensor in load_file(second).items()}
    save_file({**held, **stale}, first)
    plan = plan_import(source)
    assert {name: tensor.path.name for name, tensor in plan.stored.items()} == index
    save_file({**held, "model.more.weight": np.ones(2, np.float32)}, first)
    with pytest.raises(ValueError, match=r"holds model\.more\.weight, of which"):
        plan_import(source)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_numbers_that_are_not_read_are_named_with_one_remedy(dtype: str, options: dict[str, str], tmp_path: Path):
    import ml_dtypes

    source = copy_of("llama", tmp_path / "theirs")
    kind = np.float64 if dtype == "float64" else ml_dtypes.float8_e4m3fn
    held = {name: tensor.astype(kind) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(held, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"is F(64|8_E4M3), and models here are read in float32, bfloat16, float16:"):
        plan_import(source, **options)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer.model", "config.json"])
def test_a_pointer_in_place_of_a_file_is_named(name: str, tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    (source / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    with pytest.raises(ValueError, match=rf"{name} is a pointer of Git LFS and not the file: fetch it with git"):
        plan_import(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_leave_nothing(value: float, tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    tensors(source, lambda held: held[NORM].__setitem__(3, value))
    with pytest.raises(ValueError, match=f"{NORM} has numbers that are not finite in float32: copy the model again"):
        write_import(plan_import(source), tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta is inf: a finite number is needed"),
        ({"rope_parameters.rope_theta": float("nan")}, "rope_theta is nan: a finite number is needed"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf: a finite number is needed"),
        ({"rope_theta": 77.0}, "rope_theta is 77.0: rope_parameters says"),
        (
            {"rope_theta": 77.0, "rope_parameters": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_theta is 77.0: rope_scaling says 5",
        ),
    ],
)
def test_numbers_of_the_rotation_are_finite_and_do_not_contradict(values: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"config\.json") as refusal:
        plan_import(change(copy_of("llama", tmp_path / "theirs"), values))
    assert said in str(refusal.value)


SECRETS = ["generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "config.json"]


@pytest.mark.parametrize("name", [*SECRETS, "model.safetensors"])
def test_a_link_that_leads_out_of_the_folder_is_refused_by_name(name: str, tmp_path: Path):
    source = copy_of("llama", tmp_path / "theirs")
    secret = tmp_path / "secret"
    secret.write_bytes((source / name).read_bytes() if (source / name).exists() else b"{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(ValueError, match=rf"{name} is a link to .*/secret, which is not in .*theirs: put the"):
        plan_import(source)


def test_a_link_in_an_import_is_not_exported(tmp_path: Path):
    from rrfp_jax.hf.exporting import plan_export, write_export

    write_import(plan_import(copy_of("llama", tmp_path / "theirs")), tmp_path / "ours")
    (tmp_path / "secret").write_text("root:x")
    (tmp_path / "ours" / "hugging-face" / "README.md").symlink_to("../../secret")
    with pytest.raises(ValueError, match=r"README\.md is a link to .*/secret, which is not in .*hugging-face: put the"):
        write_export(plan_export(tmp_path / "ours"), tmp_path / "back", shard_bytes=10**9)
    assert not (tmp_path / "back").exists()


def test_the_cache_of_the_hub_is_read_and_rights_are_kept(tmp_path: Path):
    from rrfp_jax.hf.exporting import plan_export, write_export

    plain, snapshot = copy_of("llama", tmp_path / "plain"), tmp_path / "models--a--b" / "snapshots" / "1a2b"
    (plain / "generation_config.json").write_text("{}")
    (plain / "generation_config.json").chmod(0o640)
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in plain.iterdir():
        shutil.move(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    write_import(plan_import(snapshot), tmp_path / "ours")
    write_export(plan_export(tmp_path / "ours"), tmp_path / "back", shard_bytes=10**9)
    for copied in (tmp_path / "ours" / "hugging-face", tmp_path / "back"):
        file = copied / "generation_config.json"
        assert not file.is_symlink()
        assert file.stat().st_mode & 0o777 == 0o640
