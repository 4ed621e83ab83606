"""Adapters of PEFT come in and go back bit by bit, and what adapters here do not compute is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.convert import main as convert
from rrfp_jax.hf._tensor_names import match_adapters
from rrfp_jax.hf.decoders import DECODER_FAMILIES
from rrfp_jax.hf.exporting import plan_export, write_adapters, write_export
from rrfp_jax.hf.importing import plan_adapters, plan_import, write_adapters_import, write_import
from rrfp_jax.hf.tensor_files import stored_tensors
from tests.hf.random_folder import TINY_LLAMA, write_folder

GOLDEN = Path(__file__).parent / "golden"
SMALL = TINY_LLAMA | {"num_hidden_layers": 2}
SHAPES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.1.self_attn.q_proj": (32, 32),
    "model.layers.1.mlp.down_proj": (32, 48),
}
"""Modules with an adapter, by their outputs and inputs."""


def write_peft(folder: Path, **changes: Any) -> Path:
    """Adapters as PEFT writes them, with random numbers."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "lora_dropout": 0.1, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    draw = np.random.default_rng(0)
    tensors = {}
    for module, (outputs, inputs) in SHAPES.items():
        for factor, shape in (("A", (3, inputs)), ("B", (outputs, 3))):
            tensors[f"base_model.model.{module}.lora_{factor}.weight"] = draw.standard_normal(shape, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_import(plan_import(write_folder(folder / "theirs", SMALL)), folder / "ours")
    return folder


def test_adapters_come_in_and_go_back(base: Path, tmp_path: Path) -> None:
    theirs = write_peft(tmp_path / "theirs")
    write_adapters_import(plan_adapters(theirs, base / "ours"), tmp_path / "ours")
    sections = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())
    targets = ["query", "layers.1.mlp.down"]
    assert sections["adapters"] == {"rank": 3, "alpha": 12, "targets": targets, "dropout": 0.1}
    assert not [*(tmp_path / "ours").rglob("*embedding*")], "the base is not copied"
    params = read_params(newest_step(tmp_path / "ours" / "checkpoints"))
    assert {"embedding", "layers.0", "adapters.layers.0", "adapters.layers.1"} <= params.keys()

    plan = plan_export(tmp_path / "ours")
    write_adapters(plan, tmp_path / "back")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 12, "theirs")
    assert config["target_modules"] == ["q_proj", "model.layers.1.mlp.down_proj"]

    write_export(plan, tmp_path / "merged", shard_bytes=10_000)
    whole, merged = (
        {n: t.read() for n, t in stored_tensors(f).items()} for f in (base / "theirs", tmp_path / "merged")
    )
    assert whole.keys() == merged.keys()
    for name, tensor in whole.items():
        if (module := name.removesuffix(".weight")) in SHAPES:
            down, up = (before[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
            np.testing.assert_allclose(merged[name], tensor + 4 * up @ down, atol=1e-5)
        else:
            np.testing.assert_array_equal(merged[name], tensor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': adapters here are LORA"),
        ({"use_dora": True}, "use_dora is True, which adapters here do not have: merge them with PEFT"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"r": 0}, "rank is 0: give at least 1"),
        (
            {"r": 4},
            "lora_A and lora_B of model.layers.0.self_attn.q_proj have the shapes [3, 32] and [32, 3], and by r",
        ),
    ],
)
def test_settings_that_adapters_here_do_not_have(
    changes: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(words)}[^\n]*$"):
        plan_adapters(write_peft(tmp_path / "theirs", **changes), base / "ours")


def test_adapters_of_another_base(base: Path, tmp_path: Path) -> None:
    theirs = write_peft(tmp_path / "theirs")
    for change, words in (
        ({"num_hidden_layers": 1}, "for which the model in .* has no matrix that takes an adapter: give --base"),
        ({"intermediate_size": 56}, r"by r and the model in .* they are \[3, 56\] and \[32, 3\]: give --base"),
    ):
        other = tmp_path / next(iter(change))
        write_import(plan_import(write_folder(other / "theirs", SMALL | change)), other / "ours")
        with pytest.raises(ValueError, match=words):
            plan_adapters(theirs, other / "ours")
    with pytest.raises(BadInput, match="give --base the import, or the run, with their model"):
        convert(["import", str(theirs), str(tmp_path / "none")])
    write_adapters_import(plan_adapters(theirs, base / "ours"), tmp_path / "ours")
    with pytest.raises(ValueError, match="has adapters already: give the folder of a language model without"):
        plan_adapters(theirs, tmp_path / "ours")
    with pytest.raises(ValueError, match="has no adapters: leave --adapters out"):
        write_adapters(plan_export(base / "ours"), tmp_path / "none")


def test_a_product_of_theirs_that_is_two_of_ours_has_no_adapter(tmp_path: Path) -> None:
    """GLM's gate and up are one matrix in its files, with one adapter for both."""
    write_import(plan_import(GOLDEN / "glm4"), tmp_path / "base")
    folder, names = tmp_path / "theirs", ("self_attn.q_proj", "mlp.gate_up_proj")
    write_peft(folder)
    tensors = {
        f"base_model.model.model.layers.0.{name}.lora_{factor}.weight": np.ones(shape, np.float32)
        for name in names
        for factor, shape in (("A", (3, 8)), ("B", (12, 3)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"gate_up_proj\.lora_A\.weight, .* no matrix .*, or merge them with PEFT$"):
        plan_adapters(folder, tmp_path / "base")
    save_file({name: tensors[name] for name in tensors if "q_proj" in name}, folder / "adapter_model.safetensors")
    write_adapters_import(plan_adapters(folder, tmp_path / "base"), tmp_path / "ours")
    plan = plan_export(tmp_path / "ours")
    write_adapters(plan, tmp_path / "back")
    other = match_adapters(DECODER_FAMILIES["glm4"].names, {("adapters.layers.0", "mlp", "up", "lora_a"): (8, 3)})
    with pytest.raises(
        ValueError, match=r"an adapter for layers\.0\.mlp\.up alone, .*: leave --adapters out, to merge"
    ):
        write_adapters(replace(plan, adapters=other), tmp_path / "none")


def test_a_base_that_is_gone_or_another_one(tmp_path: Path) -> None:
    write_import(plan_import(write_folder(tmp_path / "whole", SMALL)), tmp_path / "base")
    write_adapters_import(plan_adapters(write_peft(tmp_path / "theirs"), tmp_path / "base"), tmp_path / "ours")
    checkpoints = tmp_path / "ours" / "checkpoints"
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"holds adapters alone, and .*base.* cannot be read, .*: put that folder back"
    ):
        newest_step(checkpoints)
    write_import(plan_import(write_folder(tmp_path / "other", SMALL, seed=1)), tmp_path / "base")
    with pytest.raises(ValueError, match="is another than these were trained on: put that one back"):
        newest_step(checkpoints)
