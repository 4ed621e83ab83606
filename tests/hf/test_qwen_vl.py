"""Qwen2.5-VL beside transformers: positions, logits, gradients, files, and chats with images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from rrfp_jax.hf.importing import plan_import, write_import
from tests.commands.running import run_command, sentence
from tests.hf.ours import Ours

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both
from tests.hf.hub_qwen_vl import (  # noqa: E402 - likewise
    MAX_PATCHES,
    MIN_PATCHES,
    PATCH,
    TEMPLATE,
    config_of,
    model_of,
    processor_of,
    seen,
)
from tests.hf.test_against_transformers import assert_close, check_gradients, exported  # noqa: E402 - likewise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("seed", range(40))
def test_models(seed: int, tmp_path: Path):
    model = model_of(config_of(seed), seed)
    given, leaves = seen(model, seed)
    hub_models.save(model, tmp_path / "theirs", shard_size="5GB" if seed % 2 else "20KB")
    plan = plan_import(tmp_path / "theirs")
    write_import(plan, tmp_path / "ours")
    ours = Ours(tmp_path / "ours")
    theirs = model(**given).logits
    assert_close(ours.logits(leaves), theirs.detach(), 2e-5)
    assert torch.equal(exported(tmp_path)(**given).logits, theirs)
    check_gradients(model, theirs, leaves["tokens"], plan, ours, leaves)


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 40, 220), "white": (240, 240, 240)}


def question(number: int, image: dict[str, str]) -> list[dict[str, Any]]:
    content: list[dict[str, str]] = [image, {"type": "text", "text": "Which colour is it?"}]
    return [{"role": "user", "content": content if number % 3 else content[::-1]}]


def test_a_small_one_learns_colours_from_chats_and_tells_them_in_transformers(tmp_path: Path):
    """Imported, trained in four stages on chats with pictures of many sizes, exported, and asked by transformers."""
    processor = processor_of(tmp_path / "theirs", TEMPLATE)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    model = model_of(
        transformers.Qwen2_5_VLConfig(
            text_config={
                **sizes,
                "vocab_size": len(processor.tokenizer),
                "intermediate_size": 96,
                "rope_parameters": rope,
            },
            vision_config={**vision, "patch_size": PATCH, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
            image_token_id=processor.image_token_id,
            tie_word_embeddings=True,
        ),
        0,
    )
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.1)
    hub_models.save(model, tmp_path / "theirs")
    chance, lines, names = np.random.default_rng(0), [], list(COLOURS)
    for number in range(64):
        name, (width, height) = names[number % 4], chance.integers(12, 44, 2)
        noise = np.array(COLOURS[name]) + chance.integers(-25, 25, (height, width, 3))
        Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.png")
        chat = [*question(number, {"type": "image"}), {"role": "assistant", "content": f"It is {name}."}]
        lines.append(json.dumps({"messages": chat, "images": [f"{number}.png"]}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    done = run_command("convert", "import", tmp_path / "theirs", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    images = {"patch_size": PATCH, "min_patches": MIN_PATCHES, "max_patches": MAX_PATCHES}
    images |= {name: getattr(processor.image_processor, f"image_{name}") for name in ("mean", "std")}
    sections = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text()) | {
        "data": {"path": str(tmp_path / "data.jsonl"), "kind": "image_text", "images": images},
        "pipeline": {"num_stages": 4},
        "optimizer": {"learning_rate": 6e-3},
        "run": {"platform": "cpu", "init_from": str(tmp_path / "ours"), "run_dir": str(tmp_path / "run")},
    }
    sections["data"] |= {"batch_size": 16, "num_microbatches": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    done = run_command("train", "--config", tmp_path / "run.yaml", "--steps", 160)
    assert done.returncode == 0, done.stderr
    done = run_command("sample", tmp_path / "run", "--image", tmp_path / "0.png")
    assert "has rope_sections, with which images are seen in training alone: export it" in sentence(done)

    done = run_command("convert", "export", tmp_path / "run", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    theirs = hub_models.load(tmp_path / "back")
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    for number in range(16):
        asked = processor.apply_chat_template(
            question(number, {"type": "image", "path": str(tmp_path / f"{number}.png")}), **options, return_tensors="pt"
        )
        made = theirs.generate(
            **asked, max_new_tokens=20, do_sample=False, eos_token_id=processor.tokenizer.eos_token_id
        )
        answer = processor.tokenizer.decode(made[0, asked["input_ids"].shape[1] :])
        assert answer == f"It is {names[number % 4]}.<|im_end|>"
