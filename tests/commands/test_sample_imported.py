"""Imported models that see are shown images as their own processors do, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rrfp_jax.commands import sample
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.sampling.prompts import Tokenizer, prompt_of_import
from rrfp_jax.data.packing import patches_of
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import CARRIED, ModelFolder, open_model
from tests.hf.ours import Ours

GOLDEN = Path(__file__).parents[1] / "hf" / "golden"
KINDS = {"llava_clip": "<image>", "llava_siglip": "<image>", "internvl": "<IMG_CONTEXT>"}
"""What the models call the token that stands for an image."""
AROUND = {"internvl": ([5], [6])}
FEATURES = {"llava_clip": 4, "llava_siglip": 4, "internvl": 1}
SQUARE: dict[str, Any] = {
    "do_resize": True, "size": {"height": 4, "width": 4}, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.25], "image_std": [0.5], "do_center_crop": None,
}  # fmt: skip
CROPPED = {**SQUARE, "size": {"shortest_edge": 5}, "resample": 3, "do_center_crop": True, "crop_size": 4}


def tokenizer_of(image_token: str) -> Library:
    """Words w0 to w28, of which number 1 stands for images, and 5 and 6 for what InternVL puts around them."""
    names = {1: image_token, 5: "<img>", 6: "</img>"}
    words = Library(WordLevel({names.get(number, f"w{number}"): number for number in range(29)}))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens([AddedToken(names[number], special=True, normalized=False) for number in names])
    return words


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each golden model, with a tokenizer and a processor of its own, as an import."""
    found = {}
    for kind, token in KINDS.items():
        source = tmp_path_factory.mktemp(kind)
        for name in ("config.json", "model.safetensors"):
            (source / name).write_bytes((GOLDEN / kind / name).read_bytes())
        tokenizer_of(token).save(str(source / "tokenizer.json"))
        settings = CROPPED if kind == "llava_clip" else SQUARE
        if kind == "llava_siglip":
            (source / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
        else:
            (source / "preprocessor_config.json").write_text(json.dumps(settings))
        found[kind] = source.parent / f"{kind}-ours"
        write_import(plan_import(source), found[kind])
    return found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = [folder / "wide.png", folder / "tall.png"]
    for path, shape in zip(paths, [(9, 23), (31, 12)], strict=True):
        Image.fromarray(rng.integers(256, size=shape, dtype=np.uint8)).save(path)
    return paths


def pixels_of(path: Path, kind: str) -> np.ndarray:
    """As the settings above say, step by step."""
    picture = Image.open(path)
    if kind == "llava_clip":
        wide = picture.width > picture.height
        longer = int(5 * max(picture.size) / min(picture.size))
        picture = picture.resize((longer, 5) if wide else (5, longer), Image.Resampling.BICUBIC)
        top, left = (picture.height - 4) // 2, (picture.width - 4) // 2
        picture = picture.crop((left, top, left + 4, top + 4))
    else:
        picture = picture.resize((4, 4), Image.Resampling.BILINEAR)
    return (np.asarray(picture, np.float32)[:, :, None] / 255 - 0.25) / 0.5


def shown(folder: ModelFolder, kind: str, text: str, pictures: list[Path]) -> Any:
    vocabulary = Tokenizer(folder.path / CARRIED / "tokenizer.json")
    return prompt_of_import(text, pictures, folder, vocabulary)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_shown_as_the_model_s_own_processor_does(
    kind: str, imported: dict[str, Path], pictures: list[Path]
) -> None:
    folder = open_model(imported[kind], "the model")
    before, behind = AROUND.get(kind, ([], []))
    image = [*before, *[1] * FEATURES[kind], *behind]
    for text in ("w7 <image> w8 <image> w9", f"w7 {KINDS[kind]} w8 <image> w9"):
        prompt = shown(folder, kind, text, pictures)
        assert prompt.tokens.tolist() == [7, *image, 8, *image, 9]
    index = prompt.image_leaves["image_index"][0]
    assert np.array_equal(index >= 0, prompt.tokens == 1)
    assert index[index >= 0].tolist() == [*range(2 * FEATURES[kind])]
    expected = np.stack([patches_of(pixels_of(path, kind), 2, 1) for path in pictures])
    np.testing.assert_allclose(prompt.image_leaves["patches"], expected, atol=1e-6)
    assert shown(folder, kind, "w3", pictures[:1]).tokens.tolist() == [*image, 3]
    with pytest.raises(ValueError, match="the prompt has 2 times <image> and 1 images are given"):
        shown(folder, kind, "<image> <image>", pictures[:1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_is_what_whole_forwards_say(
    kind: str, imported: dict[str, Path], pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = imported[kind], "w7 <image> w8"
    prompt = shown(open_model(path, "the model"), kind, text, pictures[:1])
    ours, length, made = Ours(path), len(prompt.tokens), []
    for _ in range(8):
        tokens = np.array([[*prompt.tokens.tolist(), *made, *[0] * (8 - len(made))]], np.int32)
        index = np.full_like(tokens, -1)
        index[:, :length] = prompt.image_leaves["image_index"]
        logits = ours.logits({**prompt.image_leaves, "tokens": tokens, "image_index": index})
        made.append(int(np.argmax(logits[0, length + len(made) - 1])))
    arguments = [str(path), "--prompt", text, "--image", str(pictures[0]), "--max-tokens", "8"]
    assert sample.main(arguments) == 0
    names = tokenizer_of(KINDS[kind])
    told = made[: made.index(2)] if 2 in made else made  # eos_token_id of text_config
    assert capsys.readouterr().out.split() == [names.id_to_token(token) for token in told]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 8, "width": 8}}, r"size is \[8, 8\]: the tower sees 2 x 2 patches of 2 pixels: give 4"),
        ({"size": {"shortest_edge": 4}}, "size is .*: pictures of one size are needed, so give height and width"),
        ({"size": {"longest_edge": 4}}, "size is .*: height and width are needed, or shortest_edge"),
        ({"resample": 9}, "resample is 9: a filter of Pillow is needed, 0 to 5"),
        ({"image_mean": [0.1, 0.2]}, r"image_mean is \[0.1, 0.2\]: 1 numbers are needed, one for each channel"),
        ({"image_std": [0]}, r"image_std is \[0\]: positive numbers are needed"),
        ({"rescale_factor": None}, "rescale_factor is None: a number is needed"),
        ({"do_pad": True}, "do_pad is True: images are not padded here"),
        (None, r"has no preprocessor_config\.json, which says how images become patches: put that of the model there"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any] | None, message: str, imported: dict[str, Path], pictures: list[Path]
) -> None:
    path = imported["internvl"] / CARRIED / "preprocessor_config.json"
    kept = path.read_text()
    try:
        path.unlink()
        if changes is not None:
            path.write_text(json.dumps(SQUARE | changes))
        with pytest.raises(BadInput, match=message):
            sample.main([str(imported["internvl"]), "--prompt", "w3", "--image", str(pictures[0])])
    finally:
        path.write_text(kept)


def test_tokens_and_files_that_do_not_fit_are_refused(imported: dict[str, Path], tmp_path: Path) -> None:
    path = str(imported["llava_clip"])
    (tmp_path / "none.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"none\.png cannot be decoded"):
        sample.main([path, "--prompt", "w3", "--image", str(tmp_path / "none.png")])
    with pytest.raises(BadInput, match="tokens of bytes have none that stands for an image"):
        sample.main([path, "--prompt", "w3", "--image", str(tmp_path / "none.png"), "--tokenizer", "bytes"])
