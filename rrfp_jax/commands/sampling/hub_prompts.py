"""A prompt of text and images as an imported model reads it, in the form in which its own processor shows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rrfp_jax.commands.sampling.generating import TokenPrompt
from rrfp_jax.commands.sampling.vocabulary import Tokenizer
from rrfp_jax.data.image_files import read_colours
from rrfp_jax.data.image_text import MARKER
from rrfp_jax.data.patches import patches_of
from rrfp_jax.hf.image_settings import ImageSettings, read_image_settings, read_image_tokens
from rrfp_jax.hf.model_folder import CARRIED, ModelFolder
from rrfp_jax.models.encoder_config import ProjectorConfig

_MOST_PIXELS = 64 * 2**20


def prompt_of_import(text: str, images: Sequence[Path], folder: ModelFolder, vocabulary: Tokenizer) -> TokenPrompt:
    """A prompt with images where the text says ``<image>``, or before it; each is resized as a whole.

    Raises ValueError, with the remedy, for files that are no images, where text and images do not fit together, and
    where the import does not say how images are shown to it.
    """
    vision, projector = folder.sections.vision, folder.sections.projector or ProjectorConfig()
    assert vision is not None
    settings, tokens = read_image_settings(folder.path / CARRIED, vision), read_image_tokens(folder.path / CARRIED)
    per_image = (vision.num_patches or 0) // projector.patches_per_feature
    feature = vocabulary.word_of(tokens.feature)
    pieces = text.replace(feature, MARKER).split(MARKER)
    if len(pieces) == 1:
        pieces = [""] * len(images) + pieces
    if len(pieces) != len(images) + 1:
        raise ValueError(
            f"the prompt has {len(pieces) - 1} times {MARKER} and {len(images)} images are given: make them equal"
        )
    written = vocabulary.encode(f"{tokens.before}{feature * per_image}{tokens.behind}".join(pieces))
    is_feature = written == tokens.feature
    if is_feature.sum() != per_image * len(images):
        raise ValueError(
            f"the tokenizer writes {is_feature.sum()} tokens for {len(images)} images of {per_image} features: give "
            "the tokenizer that came with the model"
        )
    index = np.where(is_feature, is_feature.cumsum() - 1, -1).astype(np.int32)
    patches = np.stack([_patches(settings, image) for image in images])
    return TokenPrompt(tokens=written, image_leaves={"image_index": index[None], "patches": patches})


def _patches(settings: ImageSettings, path: Path) -> NDArray[np.float32]:
    """``[patches, channels * patch_size**2]``; a margin that makes no patch is left out."""
    try:
        picture = read_colours(path, channels=settings.channels, max_pixels=_MOST_PIXELS)
    except ValueError as error:
        raise ValueError(f"image {path} {error}") from None
    pixels: NDArray[Any] = np.asarray(_in_size(settings, picture), np.float32).reshape(
        *settings.size, settings.channels
    )
    if settings.factor is not None:
        pixels = pixels * np.float32(settings.factor)
    if settings.mean is not None and settings.std is not None:
        pixels = (pixels - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    patch = settings.patch_size
    height, width = (side // patch * patch for side in settings.size)
    return patches_of(pixels[:height, :width], patch, 1)


def _in_size(settings: ImageSettings, picture: Image.Image) -> Image.Image:
    if settings.resized is not None:
        picture = picture.resize(_resized(settings.resized, picture), Image.Resampling(settings.resample))
    if settings.crop is None:
        return picture
    height, width = settings.crop
    # where the picture is smaller, Pillow makes the rest black, as transformers does
    top, left = (picture.height - height) // 2, (picture.width - width) // 2
    return picture.crop((left, top, left + width, top + height))


def _resized(size: tuple[int, int] | int, picture: Image.Image) -> tuple[int, int]:
    """Width and height."""
    if isinstance(size, tuple):
        return size[1], size[0]
    short, long = sorted(picture.size)
    longer = int(size * long / short)
    return (size, longer) if picture.width <= picture.height else (longer, size)
