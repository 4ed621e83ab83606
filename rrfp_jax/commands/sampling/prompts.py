"""A prompt of text and images for a generator, in the form in which the run's data set shows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.commands.sampling.generating import TokenPrompt
from rrfp_jax.data.image_text import MARKER, byte_patches, image_grid
from rrfp_jax.data.image_text_config import ImageTextConfig
from rrfp_jax.data.image_tokens import TextWriter
from rrfp_jax.data.packing import PatchFormat, Shape, index_leaf, patches_leaf, place_leaves
from rrfp_jax.data.row_packing import pack_rows
from rrfp_jax.data.samples import IMAGE_TOKEN, Grid, Text, make_sample
from rrfp_jax.models.encoder import PixelScale
from rrfp_jax.models.vision_language_config import VisionLanguageConfig, check_image_index


def prompt_with_images(
    text: str,
    images: Sequence[Path],
    data: ImageTextConfig,
    model: VisionLanguageConfig,
    writer: TextWriter | None = None,
) -> TokenPrompt:
    """Returns a prompt of bytes or of ``writer``'s tokens, with images at ``<image>`` in the text, or before it.

    The images become patches as in training. Raises ValueError, with the remedy, for files that are no images, images
    that the encoder has no positions for, and for text and images that do not fit together.
    """
    grids = [_grid(data, image) for image in images]
    parts = _parts(text, grids, data, writer)
    # The last token of a sample is only predicted, so one more is put behind the prompt.
    image_token = IMAGE_TOKEN if writer is None else writer.image_token
    sample = make_sample([*parts, Text(b"\0", 0)], data.merge, image_token)
    if not images:
        return TokenPrompt(tokens=sample.tokens)
    is_packed = model.vision.is_packed
    patch_format = PatchFormat(model.vision.patch_dim, data.merge, is_packed=is_packed)
    length = max(grid.num_patches for grid in grids)
    places, own_row = pack_rows([grid.num_patches for grid in grids], length), pack_rows([sample.length], sample.length)
    shape = Shape(1, sample.length, places.num_rows, length)
    leaves: dict[str, NDArray[Any]] = {
        "image_index": index_leaf([sample], own_row, places, shape, data.merge),
        "patches": patches_leaf(
            [_patches(data, image, grid) for image, grid in zip(images, grids, strict=True)],
            places,
            shape,
            patch_format,
        ),
        **place_leaves([sample], places, shape, patch_format),
    }
    check_image_index(model, {**leaves, "tokens": sample.tokens[None]}, "the prompt")
    return TokenPrompt(tokens=sample.tokens, image_leaves=leaves)


def _parts(text: str, grids: Sequence[Grid], data: ImageTextConfig, writer: TextWriter | None) -> list[Text | Grid]:
    pieces = text.split(MARKER)
    if len(pieces) == 1:
        pieces = [""] * len(grids) + pieces
    if len(pieces) != len(grids) + 1:
        raise ValueError(
            f"the prompt has {len(pieces) - 1} times {MARKER} and {len(grids)} images are given: make them equal"
        )
    if writer is not None:
        try:
            return writer.parts(pieces, "", grids, data.merge)
        except ValueError as error:
            raise ValueError(f"the prompt {error}") from None
    parts: list[Text | Grid] = []
    for piece, grid in zip(pieces, [*grids, None], strict=True):
        parts += [Text(piece.encode(errors="replace"), 0)] if piece else []
        parts += [grid] if grid is not None else []
    if not parts or isinstance(parts[-1], Grid):
        raise ValueError("the prompt ends in an image, behind which nothing is predicted: give it text after that")
    return parts


def _grid(data: ImageTextConfig, image: Path) -> Grid:
    try:
        return image_grid(data, image)
    except ValueError as error:
        raise ValueError(f"image {image} {error}") from None


def _patches(data: ImageTextConfig, image: Path, grid: Grid) -> NDArray[np.float32]:
    try:
        pixels = byte_patches(data, image, grid)
    except ValueError as error:
        raise ValueError(f"image {image} {error}") from None
    return np.asarray(PixelScale(data.mean, data.std).scaled(pixels))
