"""Random models of Qwen2.5-VL, small, and a processor of theirs; needs torch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from rrfp_jax.data.packing import Grid, places_of
from tests.data.chats import save_tokenizer
from tests.hf import hub_models

IMAGE = 1
"""The token of a feature."""


def config_of(seed: int) -> Any:
    """Odd sizes, windows and merges, tied or not, as chance has it."""
    chance = random.Random(f"qwen2_5_vl {seed}")
    heads, head_dim = chance.choice([(4, 2), (4, 4), (6, 3), (3, 1)]), chance.choice([6, 8, 12])
    cuts = sorted(chance.choices(range(head_dim // 2 + 1), k=2))
    rope = {"rope_type": "default", "rope_theta": chance.choice([1e4, 1e6])}
    if chance.random() < 0.3:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": chance.choice([0, 1])}
    text = {
        "vocab_size": chance.choice([61, 97, 130]),
        "hidden_size": heads[0] * head_dim,
        "intermediate_size": chance.choice([17, 29, 40]),
        "num_hidden_layers": chance.choice([1, 2, 3]),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "rms_norm_eps": chance.choice([1e-6, 1e-5, 1e-3]),
        "max_position_embeddings": 64,
        "rope_parameters": rope | {"mrope_section": [cuts[0], cuts[1] - cuts[0], head_dim // 2 - cuts[1]]},
        "initializer_range": 0.3,
        **(window if chance.random() < 0.3 else {}),
    }
    tower_heads, merge, patch = chance.choice([1, 2, 3]), chance.choice([1, 2, 2, 3]), chance.choice([2, 3])
    depth = chance.choice([1, 2, 3])
    vision = {
        "depth": depth,
        "hidden_size": tower_heads * chance.choice([4, 8, 12]),
        "num_heads": tower_heads,
        "hidden_act": chance.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
        "intermediate_size": chance.choice([9, 20]),
        "in_channels": chance.choice([1, 3]),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": chance.choice([1, 2, 2, 3]),
        "window_size": patch * merge * chance.choice([1, 2, 3]) + chance.choice([0, 1]),
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": sorted(chance.sample(range(depth + 1), k=chance.choice([0, 1]))),
        "initializer_range": 0.2,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=chance.random() < 0.5
    )


def model_of(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    return hub_models.randomised(transformers.Qwen2_5_VLForConditionalGeneration(config), seed)


def seen(model: Any, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Inputs of transformers, and our leaves: images of several sizes, one in the first row and two in the second.

    Our rows of patches hold two images and one, with padding behind these.
    """
    chance, config = np.random.default_rng(seed), model.config
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    grids = [Grid(*(merge * chance.integers(1, 5, 2)).tolist()) for _ in range(3)]
    features = [grid.num_patches // merge**2 for grid in grids]
    length = max(features[0] + 9, features[1] + features[2] + 7)
    tokens = chance.integers(2, config.text_config.vocab_size, (2, length)).astype(np.int32)
    patch_dim = vision.in_channels * vision.patch_size**2
    pictures = [chance.standard_normal((grid.num_patches, patch_dim), np.float32) for grid in grids]
    row_length = grids[0].num_patches + grids[1].num_patches + merge**2
    row_length = max(row_length, grids[2].num_patches)
    leaves = {name: np.zeros((2, row_length), np.int32) for name in ("patch_segments", "patch_rows", "patch_columns")}
    leaves["patches"] = np.zeros((2, row_length, patch_dim), np.float32)
    index = np.full((2, length), -1, np.int32)
    starts = [(0, 3), (1, 1), (1, features[1] + 3)]
    of_rows = [(0, 0), (0, grids[0].num_patches), (1, 0)]
    for number, ((row, start), (image_row, first)) in enumerate(zip(starts, of_rows, strict=True)):
        at, grid = slice(first, first + grids[number].num_patches), grids[number]
        tokens[row, start : start + features[number]] = IMAGE
        index[row, start : start + features[number]] = (
            np.arange(features[number]) + (image_row * row_length + first) // merge**2
        )
        leaves["patches"][image_row, at] = pictures[number]
        leaves["patch_segments"][image_row, at] = 1 + (first > 0)
        leaves["patch_rows"][image_row, at], leaves["patch_columns"][image_row, at] = places_of(grid, merge)
    # theirs are [channels, frames, pixels] within a patch, and an image is as many equal frames
    repeated = [
        np.repeat(each.reshape(len(each), vision.in_channels, 1, -1), vision.temporal_patch_size, axis=2)
        for each in pictures
    ]
    given = {
        "input_ids": torch.tensor(tokens).long(),
        "pixel_values": torch.tensor(np.concatenate([each.reshape(len(each), -1) for each in repeated])),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
        "mm_token_type_ids": torch.tensor((tokens == IMAGE).astype(np.int32)),
    }
    of_index = {name: given[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    positions = np.moveaxis(model.model.get_rope_index(**of_index)[0].numpy(), 0, -1).astype(np.int32)
    return given, {**leaves, "tokens": tokens, "image_index": index, "positions": np.ascontiguousarray(positions)}


TEMPLATE = """{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% elif message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""That of Qwen2.5-VL without videos, with marks around the assistant's text."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MIN_PATCHES, MAX_PATCHES = 4, 16, 120


class Processor(transformers.Qwen2_5_VLProcessor):
    """That of Qwen2.5-VL without videos, for which it needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def processor_of(folder: Path, template: str) -> Any:
    """A processor of transformers, with a tokenizer that is written into ``folder``."""
    save_tokenizer(folder, "chatml", template)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in VISION_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    images = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PATCHES * PATCH**2, "longest_edge": MAX_PATCHES * PATCH**2}, patch_size=PATCH
    )
    return Processor(
        image_processor=images,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        chat_template=template,
    )
