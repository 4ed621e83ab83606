"""Folders of Hugging Face with random parameters, made without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.hf._model_config import read_config
from rrfp_jax.hf._tensor_names import match_tensors
from rrfp_jax.hf.tensor_files import PlannedTensor, ShardWriter

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_folder(folder: Path, config: dict[str, Any] = TINY_LLAMA, *, shard_bytes: int = 2**40, seed: int = 0) -> Path:
    """``config.json`` and safetensors files; matrices of about 0.1, vectors of about 1."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    form = read_config(config, "the test", has_head=None, dtype="float32")
    found = match_tensors(form.table, form.sections.shapes())
    planned = [
        PlannedTensor(name, shape, "float32")
        for match in found
        for name, shape in zip(match.theirs, match.their_shapes, strict=True)
    ]
    chance = np.random.default_rng(seed)
    with ShardWriter(folder, planned, shard_bytes).open() as writer:
        for name, shape, _ in planned:
            numbers = chance.standard_normal(shape, np.float32)
            writer.write(name, 0.1 * numbers if len(shape) > 1 else 1 + 0.1 * numbers)
        writer.write_index()
    return folder
