"""Chats with images become the tokens, the mask, the positions and the pixels that transformers' processors make."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

from rrfp_jax.data import ImageText, ImageTextConfig
from rrfp_jax.data.images import ImageTokens, TextWriter
from rrfp_jax.data.tokenizer_files import kind_of_file
from rrfp_jax.models.encoder import PixelScale
from tests.data.chats import random_chat, save_tokenizer, unmarked, write_chats

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf.hub_qwen_vl import (  # noqa: E402 - it needs both
    MAX_PATCHES,
    MIN_PATCHES,
    PATCH,
    TEMPLATE,
    config_of,
    model_of,
    processor_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SIZES = [(9, 5), (60, 21), (17, 40), (33, 33), (40, 39), (300, 4), (8, 8)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, chance = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = [folder / f"{width}x{height}.png" for width, height in SIZES]
    for path, (width, height) in zip(paths, SIZES, strict=True):
        Image.fromarray(chance.integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)
    return paths


def chat_of(seed: int, images: list[Path]) -> list[dict[str, Any]]:
    """A chat in which some of the user's messages show images between texts."""
    chance, chat = random.Random(seed), random_chat(seed)
    for message in chat:
        message["content"] = message["content"].replace("<|im_end|>", "|")
        if message["role"] == "user" and chance.random() < 0.7:
            shown = [{"type": "image", "path": str(each)} for each in chance.choices(images, k=chance.randint(1, 3))]
            texts = [{"type": "text", "text": text} for text in (message["content"], "süß")]
            message["content"] = chance.sample(shown + texts, k=len(shown) + 2)
    return chat


def made_by(processor: Any, chat: list[dict[str, Any]]) -> Any:
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    return processor.apply_chat_template(chat, **options, return_tensors="pt")


def check_tokens(sample: Any, made: Any) -> None:
    assert sample.targets.tolist() == made["input_ids"][0, 1:].tolist()
    assert sample.weights.tolist() == np.array(made["assistant_masks"].tolist())[0, 1:].tolist()


@pytest.mark.parametrize("is_marked", [True, False])
def test_chats_of_qwen(tmp_path: Path, images: list[Path], is_marked: bool):
    template = TEMPLATE if is_marked else unmarked(TEMPLATE)
    processor = processor_of(tmp_path / "tokenizer", template)
    marking = processor_of(tmp_path / "marking", TEMPLATE)
    sees = model_of(config_of(2), 0)
    sees.config.vision_config.spatial_merge_size = 2
    chats = [chat_of(seed, images) for seed in range(60)]
    write_chats(tmp_path / "data.jsonl", chats)
    kind = kind_of_file(tmp_path / "tokenizer" / "tokenizer.json", (0,))
    marks = ImageTokens(feature=processor.image_token_id, before="", behind="", are_in_chats=True)
    mean, std = (tuple(getattr(processor.image_processor, f"image_{name}")) for name in ("mean", "std"))
    config = ImageTextConfig(
        path=str(tmp_path / "data.jsonl"), batch_size=60, num_microbatches=60, balance=False,
        patch_size=PATCH, min_patches=MIN_PATCHES, max_patches=MAX_PATCHES, mean=mean, std=std,
    )  # fmt: skip
    scale = PixelScale(mean, std)
    data = ImageText(config, writer=TextWriter(kind, marks, opens=True), has_grid_positions=True)
    batch, num_images = data.batch(0), 0
    order = {tuple(sample.tokens.tolist()): sample for sample in data.samples(0)}
    pixels = {}
    for number, tokens in enumerate(batch["tokens"]):
        if batch["patches"][number] is not None:
            text, index = tuple(tokens[batch["segments"][number] > 0].tolist()), batch["image_index"][number]
            of_features = batch["patches"][number].reshape(-1, 4, 3 * PATCH**2)
            pixels[text] = of_features[index[index >= 0]].reshape(-1, 3 * PATCH**2)
    for chat in chats:
        made = made_by(marking, chat)
        ids = made["input_ids"][0].numpy()
        sample = order[tuple(ids[:-1].tolist())]
        check_tokens(sample, made)
        if "image_grid_thw" in made:
            assert [[1, *grid] for grid in sample.images] == made["image_grid_thw"].tolist()
            of_index = {name: made[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
            theirs = sees.model.get_rope_index(**of_index)[0][:, 0].numpy().T
            assert sample.grid_positions(2).tolist() == theirs[:-1].tolist()
            num_images += len(sample.images)
            pictures = made["pixel_values"].numpy().reshape(-1, 3, 2, PATCH**2)
            assert (pictures[:, :, 0] == pictures[:, :, 1]).all()
            wanted = pictures[:, :, 0].reshape(len(pictures), -1)
            np.testing.assert_allclose(scale.scaled(pixels[tuple(ids[:-1].tolist())]), wanted, atol=1e-5)
    assert num_images > 60
    for tokens, positions, segments in zip(batch["tokens"], batch["positions"], batch["segments"], strict=True):
        own = order[tuple(tokens[segments > 0].tolist())]
        assert positions[segments > 0].tolist() == own.grid_positions(2).tolist()


class LlavaProcessor(transformers.LlavaProcessor):
    """Takes processors of images that need no torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def test_chats_of_llava(tmp_path: Path, images: list[Path]):
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    save_tokenizer(tmp_path, "chatml", template)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken("<image>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    processor = LlavaProcessor(
        image_processor=transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
            size={"height": 16, "width": 16}, do_center_crop=False
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    chats = [chat_of(seed, images) for seed in range(30)]
    write_chats(tmp_path / "data.jsonl", chats)
    writer = TextWriter(
        kind_of_file(tmp_path / "tokenizer.json", (0,)), ImageTokens(feature=processor.image_token_id), opens=True
    )
    few: dict[str, Any] = {"batch_size": 30, "num_microbatches": 1, "patch_size": PATCH, "merge": 1, "image_size": 16}
    data = ImageText(ImageTextConfig(path=str(tmp_path / "data.jsonl"), **few), writer=writer)
    order = {tuple(sample.tokens.tolist()): sample for sample in data.samples(0)}
    for chat in chats:
        made = made_by(processor, chat)
        check_tokens(order[tuple(made["input_ids"][0, :-1].tolist())], made)
    assert data.num_images > 30
