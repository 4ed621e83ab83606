"""Image files, their size and their pixels; and texts with images, written as a tokenizer does.

Only plain raster formats are opened, and nothing is decoded that is larger than a limit. A tokenizer takes a text as a
whole, with the words that the model's family puts in place of an image, so that the text has the tokens that the
model's own processor would give it.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from rrfp_jax.data._documents import counted_tokens
from rrfp_jax.data.packing import Grid, Text
from rrfp_jax.data.tokenizer_files import TokenKind, library_reason, load, lost_part, size_of, unknown_of
from rrfp_jax.record_files import parse_json

Image.MAX_IMAGE_PIXELS = None
"""Pillow's own limit is off, because at first it only warns, and data threads cannot each switch a warning off for
themselves; the limit here is our own."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Modes of grey with values up to 65535."""
_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)
"""Values of a photograph's orientation that swap width and height."""


def size_of_image(path: Path, max_pixels: int) -> tuple[int, int]:
    """Returns (width, height) of the upright image, from the head of the file.

    Raises ValueError, in words that follow the name of the file, where it cannot be opened or is too large.
    """
    with _opened(path, max_pixels, "cannot be opened as an image") as image:
        width, height = image.size
        if _is_photograph(image) and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
            width, height = height, width
    return width, height


def _is_photograph(image: Image.Image) -> bool:
    """Returns whether a camera may have noted which side is up; of other formats that would mean to decode them."""
    return image.format in {"JPEG", "MPO"}


@contextmanager
def _opened(path: Path, max_pixels: int, failure: str) -> Iterator[Image.Image]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is no file")
        with Image.open(path, formats=_FORMATS) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in {"PNG", "PPM"}):
                raise ValueError(f"pixels of 32 bits, mode {image.mode}, whose range is not known")
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"is larger than max_pixels, {max_pixels} ({error}): make it smaller, or raise the limit"
        ) from error
    except Exception as error:  # decoders raise whatever comes up in a broken file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
        raise ValueError(f"{failure} ({reason}): mend or remove it") from error


def fitting_grid(width: int, height: int, *, block: int, merge: int, max_patches: int) -> Grid:
    """Returns the patches of an image whose sides are changed to multiples of ``block`` pixels, ``merge`` patches.

    At most ``max_patches``, the shape of the image being kept as far as that allows.
    """
    most = max_patches // merge**2
    down, across = max(1.0, height / block), max(1.0, width / block)
    rows, columns = round(down), round(across)
    if rows * columns > most:
        scale = math.sqrt(most / (down * across))
        rows = min(most, max(1, math.floor(down * scale)))
        columns = min(most // rows, max(1, math.floor(across * scale)))
        rows = min(most // columns, rows)
    return Grid(rows * merge, columns * merge)


def processor_grid(width: int, height: int, *, patch: int, merge: int, min_patches: int, max_patches: int) -> Grid:
    """Returns the patches of an image as Qwen's image processor counts them, operation by operation.

    Raises ValueError, in words that follow the name of the file, for an image that it refuses.
    """
    if max(width, height) > 200 * min(width, height):
        raise ValueError(f"is {width} x {height} pixels, more than 200 times as long as wide: cut or remove it")
    block, most, least = patch * merge, max_patches * patch**2, min_patches * patch**2
    rows, columns = round(height / block), round(width / block)
    if rows * columns * block**2 > most:
        shrinks = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrinks / block)) for side in (height, width))
    elif rows * columns * block**2 < least:
        grows = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grows / block) for side in (height, width))
    return Grid(rows * merge, columns * merge)


def read_bytes(path: Path, grid: Grid, *, patch_size: int, channels: int, max_pixels: int) -> NDArray[np.uint8]:
    """Returns the image in the size of ``grid``, ``[height, width, channels]`` from 0 to 255, grey or RGB.

    Raises ValueError, in words that follow the name of the file, where it cannot be decoded or is too large.
    """
    size = (grid.columns * patch_size, grid.rows * patch_size)
    with _opened(path, max_pixels, "cannot be decoded") as image:
        image.draft(None, size)  # a large JPEG is decoded at a fraction of its size
        resized = _colours(image, channels).resize(size, Image.Resampling.BICUBIC)
    return np.asarray(resized, np.uint8).reshape(size[1], size[0], channels)


def read_colours(path: Path, *, channels: int, max_pixels: int) -> Image.Image:
    """Returns the image in its own size, upright, grey or RGB; raises ValueError as :func:`read_bytes`."""
    with _opened(path, max_pixels, "cannot be decoded") as image:
        return _colours(image, channels)


def _colours(image: Image.Image, channels: int) -> Image.Image:
    upright = image
    if _is_photograph(image):
        upright = ImageOps.exif_transpose(image)
    elif image.mode in _SIXTEEN_BITS:  # ``convert`` would make white of all but the darkest
        upright = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 0xFFFF) // 257).astype(np.uint8))
    return upright.convert("L" if channels == 1 else "RGB")


_REMEDY = "give the tokenizer.json that came with the model"


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """The words that stand for an image in the text, as a tokenizer writes them."""

    feature: int
    """The token of each feature."""
    before: str = ""
    behind: str = ""
    are_in_chats: bool = False
    """Whether chat templates write the words before and behind an image; if not, the processor does."""


class TextWriter:
    """Writes the text and the images of a sample as tokens.

    Args:
        kind: the tokens; the first of its ends closes a sample.
        marks: the words that stand for an image; None: the model is shown no images.
        opens: whether a text begins with the opening tokens of the tokenizer's file, as imported models know it.

    Attributes: ``kind``; ``vocab_size``; ``image_token``; ``closing``, the part that closes a sample; ``told``, the
    settings that decide the tokens of a text.
    Raises ValueError, with the remedy, if the file is no tokenizer, or has no token for images.
    """

    def __init__(self, kind: TokenKind, marks: ImageTokens | None, *, opens: bool) -> None:
        assert kind.file is not None
        self.kind, self._opens, self._file = kind, opens, kind.file
        data = kind.file.read_bytes()
        self._tokenizer = load(data, str(kind.file))
        # This tokenizer tells which characters a token is of: a post-processor, which puts tokens around a text, may
        # also trim those places.
        plain = {**parse_json(data), "post_processor": None}
        self._plain = load(json.dumps(plain).encode(), str(kind.file))
        self._unknown, self.vocab_size = unknown_of(self._tokenizer), size_of(self._tokenizer)
        self._end = kind.ends[0]
        self.closing = Text(np.array([self._end], np.int32), 1)
        self.image_token, self._are_in_chats = self._end, False
        self._mark: tuple[str, str, str] | None = None
        if marks is not None:
            self.image_token, self._are_in_chats = marks.feature, marks.are_in_chats
            word: str | None = self._tokenizer.id_to_token(marks.feature)
            if word is None:
                raise ValueError(f"{self._file} has no token {marks.feature}, which stands for images: {_REMEDY}")
            self._mark = (marks.before, word, marks.behind)
        self.told = (kind.tokenizer.sha256, self._end, self._mark, opens)

    def parts(self, pieces: Sequence[str], answer: str, grids: Sequence[Grid], merge: int) -> list[Text | Grid]:
        """Returns the parts of a sample: ``pieces`` of a text with the images between them, and an answer at the end.

        Text of the answer counts in the loss; without an answer all text does, except the words that stand for images.
        Raises ValueError, in words that follow the name of the sample, if the tokenizer cannot write it.
        """
        text, is_image = _with_images(pieces, self._shown(grids, merge, self._mark))
        # A token that reaches into the answer belongs to it: it cannot be read before the answer is known.
        turns = [(len(text) if answer else 0, len(text) + len(answer))]
        is_image += [False] * len(answer)
        return self._parts(text + answer, turns, is_image, grids, merge, opens=self._opens, is_closed=True)

    def chat_parts(
        self, text: str, turns: Sequence[tuple[int, int]], grids: Sequence[Grid], merge: int, *, opens: bool
    ) -> list[Text | Grid]:
        """Returns the parts of a chat as its template has written it, as the processor of the model would go on.

        The token of a feature stands for each image in ``text``. Text of the ``turns``, in characters, counts in the
        loss. ``opens`` says whether the tokenizer's opening tokens are still missing. Raises ValueError as
        :meth:`parts`.
        """
        mark = self._mark
        if mark is not None and self._are_in_chats:
            mark = ("", mark[1], "")
        word = "" if mark is None else mark[1]
        pieces = text.split(word) if word else [text]
        if len(pieces) != len(grids) + 1:
            raise ValueError(
                f"has {len(grids)} images, and the chat template writes {len(pieces) - 1} times {word!r} for them: "
                "make them equal, and leave that out of the text"
            )
        shown = self._shown(grids, merge, mark)
        written, is_image = _with_images(pieces, shown)
        ends = np.cumsum([len(piece) + len(word) for piece in pieces[:-1]])
        added = np.cumsum([0, *(len(each) - len(word) for each in shown)])

        def moved(place: int) -> int:
            # by what the images before it have grown
            return place + int(added[np.searchsorted(ends, place, side="right")])

        moved_turns = [(moved(start), moved(stop)) for start, stop in turns]
        return self._parts(written, moved_turns, is_image, grids, merge, opens=self._opens and opens)

    def _shown(self, grids: Sequence[Grid], merge: int, mark: tuple[str, str, str] | None) -> list[str]:
        """Returns the words of each image."""
        if grids and mark is None:
            raise ValueError(f"has images, and {self._file} has no token that stands for them: leave them out")
        before, word, behind = mark or ("", "", "")
        return [before + word * (grid.num_patches // merge**2) + behind for grid in grids]

    def _parts(
        self,
        text: str,
        turns: Sequence[tuple[int, int]],
        is_image: Sequence[bool],
        grids: Sequence[Grid],
        merge: int,
        *,
        opens: bool,
        is_closed: bool = False,
    ) -> list[Text | Grid]:
        """Returns the parts of a text; ``is_closed`` says that a token behind it closes the sample."""
        try:
            whole, plain = self._tokenizer.encode(text, add_special_tokens=opens), self._plain.encode(text)
        except BaseException as error:
            raise ValueError(f"cannot be written by {self._file} ({library_reason(error)}): change it") from None
        if (lost := lost_part(self._tokenizer, text, plain, self._unknown)) is not None:
            raise ValueError(f"has {lost!r}, for which {self._file} has no token: take it out")
        ids = np.array(whole.ids, np.int32)
        weights = np.zeros(len(whole.ids), np.float32)
        is_own = ~np.array(whole.special_tokens_mask, bool) if opens else np.ones(len(whole.ids), bool)
        is_shown = [end > start and not is_image[end - 1] for start, end in plain.offsets]
        weights[is_own] = counted_tokens(plain.offsets, turns) & np.array(is_shown, bool)
        if is_closed and len(ids) and ids[-1] == self._end and not is_own[-1]:  # the tokenizer has closed it too
            ids, weights = ids[:-1], weights[:-1]
        sizes = [grid.num_patches // merge**2 for grid in grids]
        is_feature = ids == self.image_token if sizes else np.zeros(len(ids), bool)
        if is_feature.sum() != sum(sizes):
            raise ValueError(
                f"becomes {is_feature.sum()} tokens for images whose features are {sum(sizes)}: {_REMEDY}, and leave "
                "its token for images out of the text"
            )
        # Stretches of one weight each become parts, and images stand in place of their features.
        image = np.full(len(ids), -1)
        image[is_feature] = np.repeat(np.arange(len(sizes)), sizes)
        changes = 1 + np.flatnonzero((np.diff(image) != 0) | (np.diff(weights) != 0))
        parts: list[Text | Grid] = []
        for start, stop in zip([0, *changes], [*changes, len(ids)], strict=True):
            if start < stop:
                number = image[start]
                parts.append(grids[number] if number >= 0 else Text(ids[start:stop], float(weights[start])))
        return parts


def _with_images(pieces: Sequence[str], shown: Sequence[str]) -> tuple[str, list[bool]]:
    """Returns the text with the words of images between its pieces, and whether each character is of an image."""
    text, is_image = pieces[0], [False] * len(pieces[0])
    for words, piece in zip(shown, pieces[1:], strict=True):
        text, is_image = text + words + piece, is_image + [True] * len(words) + [False] * len(piece)
    return text, is_image
