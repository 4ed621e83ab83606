"""Imported models that see: what their prompts are, and what they write, beside transformers' processors."""

from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands.sampling.generating import Drawing, Generator
from rrfp_jax.commands.sampling.prompts import Tokenizer as OurTokenizer
from rrfp_jax.commands.sampling.prompts import prompt_of_import
from rrfp_jax.data.packing import patches_of
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import CARRIED, open_model
from rrfp_jax.models.vision_config import VisionLanguageConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SIZES = {"wide.png": (61, 20), "tall.jpg": (17, 40), "small.png": (3, 5), "grey.png": (12, 12)}
CONTEXT = "<IMG_CONTEXT>"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        shape = (height, width) if name == "grey.png" else (height, width, 3)
        Image.fromarray(rng.integers(256, size=shape, dtype=np.uint8)).save(folder / name)
    return [folder / name for name in SIZES]


def tokenizer_of(vocab_size: int) -> Any:
    """Words, with the tokens of images that hub_models has."""
    names = {1: CONTEXT, 3: "<img>", 4: "</img>", 5: "<video>"}
    words = Tokenizer(WordLevel({names.get(number, f"w{number}"): number for number in range(vocab_size)}))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    fields = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": CONTEXT}
    more = {"image_token": CONTEXT, "video_token": "<video>", **fields}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=more)


class InternVLOfImages:
    """What InternVLProcessor does with images; itself it needs torchvision, for videos."""

    def __init__(self, images: Any, tokenizer: Any, length: int) -> None:
        self._images, self._tokenizer = images, tokenizer
        self._written = f"<img>{CONTEXT * length}</img>"

    def save_pretrained(self, folder: Path) -> None:
        self._images.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def __call__(self, *, images: list[Image.Image], text: str, return_tensors: str) -> dict[str, Any]:
        of_text = self._tokenizer(text.replace(CONTEXT, self._written), return_tensors=return_tensors)
        return {**of_text, **self._images(images, return_tensors=return_tensors)}


def processor_of(kind: str, config: Any) -> Any:
    """As the families have it."""
    vision, tokenizer = config.vision_config, tokenizer_of(config.text_config.vocab_size)
    side, patch = (each if isinstance(each, int) else each[0] for each in (vision.image_size, vision.patch_size))
    square = {"height": side, "width": side}
    if kind == "internvl":
        length = int((side // patch * config.downsample_ratio) ** 2)
        return InternVLOfImages(transformers.GotOcr2ImageProcessorPil(size=square), tokenizer, length)
    if kind == "llava siglip":
        images = transformers.SiglipImageProcessorPil(size=square)
        options = {"vision_feature_select_strategy": "full"}
    else:
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
        options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(images, tokenizer, patch_size=patch, image_token=CONTEXT, **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", hub_models.SEEING)
def test_prompts_and_text_are_those_of_transformers(kind: str, seed: int, tmp_path: Path, pictures: list[Path]) -> None:
    config = hub_models.seeing_config(kind, seed)
    config.vision_config.num_channels = 3
    model = hub_models._seeing_model_of(kind, config, seed)
    processor = processor_of(kind, model.config)
    model.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    write_import(plan_import(tmp_path / "theirs"), tmp_path / "ours")
    folder = open_model(tmp_path / "ours", "the model")
    vocabulary = OurTokenizer(folder.path / CARRIED / "tokenizer.json")
    vision, projector = folder.sections.vision, folder.sections.projector
    assert vision is not None
    assert projector is not None
    whole = VisionLanguageConfig(vision=vision, projector=projector, decoder=folder.sections.model)
    generator = Generator(whole, read_params(newest_step(folder.checkpoints)))
    for first, second in zip(pictures, [*pictures[1:], pictures[0]], strict=True):
        prompt = prompt_of_import("w9 <image> w8 <image> w7", [first, second], folder, vocabulary)
        opened = [Image.open(path) for path in (first, second)]
        theirs = processor(images=opened, text=f"w9 {CONTEXT} w8 {CONTEXT} w7", return_tensors="pt")
        assert prompt.tokens.tolist() == theirs["input_ids"][0].tolist()
        pixels = np.asarray(theirs["pixel_values"]).transpose(0, 2, 3, 1)
        patch = isqrt(vision.patch_dim // 3)
        side = isqrt(vision.num_patches or 0) * patch
        pixels = pixels[:, :side, :side]
        expected = np.stack([patches_of(each, patch, 1) for each in pixels])
        np.testing.assert_allclose(prompt.image_leaves["patches"], expected, atol=1e-5)
        made = generator.tokens(prompt, Drawing(max_tokens=6)).tolist()
        with torch.no_grad():
            written = model.generate(
                input_ids=theirs["input_ids"],
                attention_mask=theirs["attention_mask"],
                pixel_values=theirs["pixel_values"],
                do_sample=False,
                max_new_tokens=6,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert made == written[0, -6:].tolist()
