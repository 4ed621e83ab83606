"""Experts in MXFP4: the numbers that an import makes of them, and files that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.hf._model_config import read_config
from rrfp_jax.hf._tensor_names import match_tensors
from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import open_model

GOLDEN = Path(__file__).parent / "golden" / "gpt_oss"
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERTS, SIZE = 3, 32


def packed_model(folder: Path) -> dict[str, np.ndarray]:
    """Writes a model of one layer whose experts are packed, and returns their matrices as they are defined."""
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("expected*"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "hidden_size": SIZE}
    config |= {"intermediate_size": SIZE, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    rng, made, whole = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    model = read_config(config, "it", has_head=True, dtype="float32")
    for match in match_tensors(model.table, model.sections.shapes()):
        for name, shape in zip(match.theirs, match.their_shapes, strict=True):
            made[name] = rng.normal(size=shape).astype(np.float32)
    prefix = "model.layers.0."
    for name, rows in (("gate_up_proj", 2 * SIZE), ("down_proj", SIZE)):
        path = f"{prefix}mlp.experts.{name}"
        del made[path]
        blocks = rng.integers(0, 256, (EXPERTS, rows, 1, 16)).astype(np.uint8)
        powers = rng.integers(120, 130, (EXPERTS, rows, 1)).astype(np.uint8)
        made[f"{path}_blocks"], made[f"{path}_scales"] = blocks, powers
        whole[name] = np.zeros((EXPERTS, SIZE, rows), np.float32)
        for expert, row, byte in np.ndindex(EXPERTS, rows, 16):
            both, power = int(blocks[expert, row, 0, byte]), 2.0 ** (int(powers[expert, row, 0]) - 127)
            whole[name][expert, 2 * byte, row] = NUMBERS[both % 16] * power
            whole[name][expert, 2 * byte + 1, row] = NUMBERS[both // 16] * power
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return whole


def test_matrices_are_those_of_the_definition_and_go_back_unpacked(tmp_path: Path) -> None:
    whole = packed_model(tmp_path / "theirs")
    write_import(plan_import(tmp_path / "theirs", dtype="float32"), tmp_path / "ours")
    experts: Any = read_params(newest_step(open_model(tmp_path / "ours", "it").checkpoints))["layers.0"]["mlp"][
        "experts"
    ]
    np.testing.assert_array_equal(experts["gate"], whole["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(experts["up"], whole["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(experts["down"], whole["down_proj"])

    write_export(plan_export(tmp_path / "ours"), tmp_path / "back", shard_bytes=1 << 20)
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, matrix in whole.items():
        np.testing.assert_array_equal(back[f"model.layers.0.mlp.experts.{name}"], matrix)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("damage", ["lost", "short", "float"])
def test_blocks_and_exponents_must_belong_together(damage: str, tmp_path: Path) -> None:
    packed_model(tmp_path / "theirs")
    held, name = load_file(tmp_path / "theirs" / "model.safetensors"), "model.layers.0.mlp.experts.down_proj_scales"
    powers = held.pop(name)
    if damage != "lost":
        held[name] = powers[:, 1:] if damage == "short" else powers.astype(np.float32)
    save_file(held, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_(blocks has no scales|scales is float32, and MXFP4 is U8)"):
        plan_import(tmp_path / "theirs")
