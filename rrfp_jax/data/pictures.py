"""Which words are drawn in a sample, and how: face, size, place, grey and noise.

All of it follows from raw bits of a counter-based generator, keyed by (seed, step), from a counter that says sample,
kind and purpose. NumPy guarantees raw bits over its versions, as it does not for what ``Generator`` makes of them.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.drawing import MARGIN, ink, rows_of_ink, widths
from rrfp_jax.data.rendered_config import HEIGHT, RenderedTextConfig

_FIRST_IMAGE = 2
"""Purposes below are the sample's own."""


class Place(NamedTuple):
    """Where a sample stands in the run; its bits follow from it."""

    step: int
    number: int
    """In its step."""
    is_held_out: bool = False

    def bits(self, seed: int, purpose: int, num: int) -> NDArray[np.uint64]:
        """``num`` raw words of a stream of their own."""
        counter = [0, self.number, int(self.is_held_out), purpose]
        return np.random.Philox(counter=counter, key=[seed, self.step]).random_raw(num)


class Picture(NamedTuple):
    """A word, how it is drawn, and how wide that is, in pixels."""

    word: str
    face: str
    size: int
    width: int


class Pictures:
    """Draws from ``words``. Raises ValueError, with the remedy, for faces that are unknown or letters too high."""

    def __init__(self, config: RenderedTextConfig, words: Sequence[str]) -> None:
        self._config = config
        self._widths = {}
        for face in config.faces:
            for size in config.font_sizes:
                top, bottom = rows_of_ink(face, size)
                if bottom - top > HEIGHT:
                    raise ValueError(
                        f"letters of {face} in size {size} are {bottom - top} pixels high, but a picture has {HEIGHT}: "
                        "give smaller font_sizes"
                    )
                self._widths[face, size] = dict(zip(words, widths(words, face, size).tolist(), strict=True))
        self.widest = max(self._whole_blocks(max(each.values())) for each in self._widths.values())
        """Pixels."""

    @cached_property
    def fingerprint(self) -> bytes:
        """Of the widths of all words: another release of FreeType or of the faces may have others."""
        return hashlib.sha256(repr(sorted(self._widths.items())).encode()).digest()

    def _whole_blocks(self, width: int) -> int:
        block = self._config.patch_size * self._config.merge
        return -(-width // block) * block

    def choose(self, place: Place, words: Sequence[str]) -> list[Picture]:
        """The pictures of a sample, of these words; none where it is text only, which held-out samples never are."""
        config = self._config
        bits = place.bits(config.seed, 0, 2 + 3 * config.max_images).tolist()
        if not place.is_held_out and bits[0] * 2.0**-64 < config.text_only:
            return []
        pictures = []
        for image in range(1 + bits[1] % config.max_images):
            of_word, of_face, of_size = bits[2 + 3 * image : 5 + 3 * image]
            word = words[of_word % len(words)]
            face, size = config.faces[of_face % len(config.faces)], config.font_sizes[of_size % len(config.font_sizes)]
            pictures.append(Picture(word, face, size, self._whole_blocks(self._widths[face, size][word])))
        return pictures

    def pixels(self, picture: Picture, place: Place, image: int) -> NDArray[np.float32]:
        """Picture ``image`` of a sample, ``[16, width]``: ink up to 1 on paper that is 0, and noise."""
        config, shape = self._config, (HEIGHT, picture.width)
        if config.blind:
            return np.zeros(shape, np.float32)
        bits = place.bits(config.seed, _FIRST_IMAGE + image, 3 + HEIGHT * picture.width // 8)
        contrast, right, down = (bits[:3] >> np.uint64(11)) * 2.0**-53
        pixels = (bits[3:].view(np.uint8).astype(np.float32) * (2 / 255) - 1) * config.noise
        pixels = pixels.reshape(shape)
        mask, top = ink(picture.word, picture.face, picture.size)
        mask = mask[:, : picture.width - 2 * MARGIN]
        height, width = mask.shape
        highest, lowest = rows_of_ink(picture.face, picture.size)
        top += int(down * (min(config.max_shift, HEIGHT - (lowest - highest)) + 1))
        left = MARGIN + int(right * (min(config.max_shift, picture.width - 2 * MARGIN - width) + 1))
        darkness = config.min_contrast + (1 - config.min_contrast) * contrast
        pixels[top : top + height, left : left + width] += mask * np.float32(darkness / 255)
        return pixels
