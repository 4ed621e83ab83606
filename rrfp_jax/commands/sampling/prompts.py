"""The prompt of a generator: a vocabulary for its text, and images in the form in which the model reads them.

Runs on bytes, and on images with text, have a token for each byte of UTF-8. Token sets and imports bring their
tokenizer along. A run shows images as its data set does; an import, as its own processor does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rrfp_jax.commands.sampling.generating import TokenPrompt
from rrfp_jax.data.buckets import pack_rows
from rrfp_jax.data.config import ImageTextConfig
from rrfp_jax.data.image_text import MARKER, byte_patches, image_grid
from rrfp_jax.data.images import TextWriter, read_colours
from rrfp_jax.data.packing import (
    IMAGE_TOKEN,
    Grid,
    PatchFormat,
    Shape,
    Text,
    image_leaves,
    make_sample,
    patches_of,
)
from rrfp_jax.data.tokenizer_files import library_reason, load, lost_part, unknown_of
from rrfp_jax.hf.image_settings import ImageSettings, read_image_settings, read_image_tokens
from rrfp_jax.hf.model_folder import CARRIED, ModelFolder
from rrfp_jax.hf.tensor_files import read_json
from rrfp_jax.models.encoder import PixelScale
from rrfp_jax.models.vision_config import ProjectorConfig, VisionLanguageConfig, check_image_index
from rrfp_jax.storage import local_copy

_MOST_PIXELS = 64 * 2**20
_OF_ROWS = ("tokens", "jsonl", "parquet")
"""Kinds of data whose documents are laid into rows."""
_REMEDY_OF_IMAGES = "give the tokenizer.json that came with the model"
_REMEDY = "give the tokenizer.json of its tokens with --tokenizer, or --tokenizer bytes"


class Bytes:
    """The vocabulary of a run on bytes, with a token for each byte of UTF-8.

    Attributes:
        stops: tokens at which a text ends.
    """

    def __init__(self, stops: tuple[int, ...] = ()) -> None:
        self.stops = stops

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens of a text, int32 ``[length]``; raises ValueError for text that it cannot write, and for
        an empty one that nothing opens."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt holds {text[error.start]!r}, which is no character: take it out") from None
        if not content:
            raise ValueError("the prompt is empty, and a text of bytes has no start token: give it a character")
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Returns the text of tokens, with broken characters replaced."""
        return bytes(int(token) for token in tokens if 0 <= token < 256).decode(errors="replace")


class Tokenizer:
    """The vocabulary of a tokenizer's file, as the ``tokenizers`` library reads it.

    Args:
        stops: tokens at which a text ends.
        start: token in place of a prompt that is empty otherwise.
        opens: put the file's own opening tokens before a text, as imported models know it; runs on data of their own
            have never seen them.
    """

    def __init__(
        self, path: Path, *, stops: tuple[int, ...] = (), start: int | None = None, opens: bool = True
    ) -> None:
        self.stops, self._start, self._opens = stops, start, opens
        self._tokenizer = load(path.read_bytes(), str(path))
        self._unknown = unknown_of(self._tokenizer)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens of a text, int32 ``[length]``."""
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=self._opens)
        except BaseException as error:
            raise ValueError(
                f"the tokenizer cannot write the prompt ({library_reason(error)}): give it other words"
            ) from None
        if (lost := lost_part(self._tokenizer, text, encoded, self._unknown)) is not None:
            raise ValueError(f"the tokenizer has no token for {lost!r} of the prompt: take it out")
        tokens = encoded.ids
        if not tokens and self._start is not None:
            tokens = [self._start]
        if not tokens:
            raise ValueError("the prompt is empty, and the tokenizer has no start token: give it a character")
        return np.array(tokens, np.int32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def word_of(self, token: int) -> str:
        """Returns the text of a token; raises ValueError where there is none of this number."""
        word: str | None = self._tokenizer.id_to_token(token)
        if word is None:
            raise ValueError(f"the tokenizer has no token {token}, which stands for images: {_REMEDY_OF_IMAGES}")
        return word


Vocabulary = Bytes | Tokenizer


def vocabulary_of(folder: ModelFolder, given: str | None) -> Vocabulary:
    """Returns the vocabulary of a run or an import; ``given`` is a tokenizer's file, or ``bytes``, to take instead.

    Raises ValueError, with the remedy, where there is none.
    """
    if given is not None:
        return Bytes() if given == "bytes" else Tokenizer(_existing(Path(given).expanduser()))
    kind = folder.tokens()
    if kind is None:
        raise ValueError(f"{folder.path} does not say what its tokens are: {_REMEDY}")
    if kind.file is None:
        return Bytes(kind.ends)
    section = {} if folder.is_import else folder.config.get("data") or {}
    if section.get("kind") not in _OF_ROWS:
        return Tokenizer(_existing(kind.file), stops=kind.ends, opens=_knows_openings(folder))
    # Rows that go on across documents show the beginning of a document after the end of the one before.
    start = None if section.get("pack") else kind.ends[0]
    return Tokenizer(_existing(kind.file), stops=kind.ends, start=start, opens=False)


def _knows_openings(folder: ModelFolder) -> bool:
    """Returns whether the model was imported, and so knows the tokens with which its tokenizer opens a text."""
    files = folder.files()
    return files is not None and (files / "config.json").is_file()


def check_fits(tokens: NDArray[np.int32], folder: ModelFolder, max_tokens: int) -> None:
    """Raise ValueError where a prompt has tokens that the model does not know, or leads beyond its positions.

    Models here have no positions of their own, but those of Hugging Face say up to where they were trained.
    """
    vocab_size = folder.sections.model.vocab_size
    if tokens.max() >= vocab_size:
        raise ValueError(
            f"the prompt has token {tokens.max()}, and the model knows {vocab_size}: give the tokenizer that it was "
            "trained with"
        )
    files = folder.files()
    most: int | None = None
    if files is not None and (files / "config.json").is_file():
        config = read_json(files / "config.json")
        most = config.get("text_config", config).get("max_position_embeddings")
    if most is not None and len(tokens) + max_tokens > most:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and max_tokens is {max_tokens}, but the model has {most} positions: "
            "give fewer"
        )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"there is no tokenizer {path}: {_REMEDY}")
    return path


# -- images as a run's data set shows them ----------------------------------------------------------------------


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
    patches = [_patches(data, image, grid) for image, grid in zip(images, grids, strict=True)]
    leaves = image_leaves([sample], own_row, places, shape, patch_format, patches=patches)
    check_image_index(model, {**leaves, "tokens": sample.tokens[None]}, "the prompt")
    return TokenPrompt(tokens=sample.tokens, image_leaves=leaves)


def _parts(text: str, grids: Sequence[Grid], data: ImageTextConfig, writer: TextWriter | None) -> list[Text | Grid]:
    pieces = _pieces(text, len(grids))
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


def _pieces(text: str, num_images: int) -> list[str]:
    """Returns the text between the images; without a marker all images stand before the text."""
    pieces = text.split(MARKER)
    if len(pieces) == 1:
        pieces = [""] * num_images + pieces
    if len(pieces) != num_images + 1:
        raise ValueError(
            f"the prompt has {len(pieces) - 1} times {MARKER} and {num_images} images are given: make them equal"
        )
    return pieces


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


# -- images as the processor of an import shows them ------------------------------------------------------------


def prompt_of_import(text: str, images: Sequence[Path], folder: ModelFolder, vocabulary: Tokenizer) -> TokenPrompt:
    """Returns a prompt with images where the text says ``<image>``, or before it; each is resized as a whole.

    Raises ValueError, with the remedy, for files that are no images, where text and images do not fit together, and
    where the import does not say how images are shown to it.
    """
    vision, projector = folder.sections.vision, folder.sections.projector or ProjectorConfig()
    assert vision is not None
    files = local_copy(folder.path / CARRIED)
    settings, tokens = read_image_settings(files, vision), read_image_tokens(files)
    per_image = (vision.num_patches or 0) // projector.patches_per_feature
    feature = vocabulary.word_of(tokens.feature)
    pieces = _pieces(text.replace(feature, MARKER), len(images))
    written = vocabulary.encode(f"{tokens.before}{feature * per_image}{tokens.behind}".join(pieces))
    is_feature = written == tokens.feature
    if is_feature.sum() != per_image * len(images):
        raise ValueError(
            f"the tokenizer writes {is_feature.sum()} tokens for {len(images)} images of {per_image} features: give "
            "the tokenizer that came with the model"
        )
    index = np.where(is_feature, is_feature.cumsum() - 1, -1).astype(np.int32)
    patches = np.stack([_hub_patches(settings, image) for image in images])
    return TokenPrompt(tokens=written, image_leaves={"image_index": index[None], "patches": patches})


def _hub_patches(settings: ImageSettings, path: Path) -> NDArray[np.float32]:
    """Returns float32 ``[patches, channels * patch_size**2]``; a margin that makes no patch is left out."""
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
    """Returns a picture resized and cropped as the settings say; an integer size is that of the shorter side."""
    size = settings.resized
    if isinstance(size, int):
        short, long = sorted(picture.size)
        longer = int(size * long / short)
        size = (longer, size) if picture.width <= picture.height else (size, longer)
    if size is not None:
        height, width = size
        picture = picture.resize((width, height), Image.Resampling(settings.resample))
    if settings.crop is None:
        return picture
    height, width = settings.crop
    # Where the picture is smaller, Pillow makes the rest black, as transformers does.
    top, left = (picture.height - height) // 2, (picture.width - width) // 2
    return picture.crop((left, top, left + width, top + height))
