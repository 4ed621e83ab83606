"""A sample of text and images, before it is put into a microbatch.

A sample is a sequence of parts: text, and images at the places where they are seen. An image takes as many positions as
it has *features*: patches after a merge of ``merge x merge`` of them. A token is a byte or one of a tokenizer; at a
feature's position stands a token for images, ``IMAGE_TOKEN`` among bytes, which the feature replaces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IMAGE_TOKEN = 0xFF
"""Stands at the positions of image features; a byte that UTF-8 never has."""


class Grid(NamedTuple):
    """The size of an image in patches."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        """Rows times columns."""
        return self.rows * self.columns


class Text(NamedTuple):
    """A part of a sample that is text."""

    content: bytes | NDArray[np.int32]
    """The bytes of the text, or its tokens ``[length]``."""
    weight: float
    """Weight in the loss of predicting each of these tokens: 0 for a prompt."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence, ready to be laid into a row."""

    tokens: NDArray[np.int32]
    """``[length]``."""
    targets: NDArray[np.int32]
    """``[length]``: the token after each."""
    weights: NDArray[np.float32]
    """``[length]``: how much each target counts in the loss."""
    features: NDArray[np.int32]
    """``[length]``: the number of the feature that stands there, over all images of the sample in order; -1: none."""
    images: tuple[Grid, ...]

    @property
    def length(self) -> int:
        """Number of positions."""
        return len(self.tokens)

    @property
    def patches(self) -> tuple[int, ...]:
        """Patches of each image."""
        return tuple(grid.num_patches for grid in self.images)


def make_sample(parts: Sequence[Text | Grid], merge: int, image_token: int = IMAGE_TOKEN) -> Sample:
    """The sample of these parts, for prediction of the next token. There must be two tokens or more."""
    contents = [
        _tokens(part.content) if isinstance(part, Text) else np.full(part.num_patches // merge**2, image_token)
        for part in parts
    ]
    lengths = list(map(len, contents))
    sequence = np.concatenate(contents).astype(np.int32)
    weights = np.array([part.weight if isinstance(part, Text) else 0 for part in parts], np.float32).repeat(lengths)
    is_feature = np.array([isinstance(part, Grid) for part in parts]).repeat(lengths)
    features = np.where(is_feature, is_feature.cumsum(dtype=np.int32) - 1, np.int32(-1))
    assert len(sequence) > 1, "a sample needs a token and the one to predict after it"
    if is_feature[-1]:
        raise ValueError("a sample ends in an image, which nothing is predicted from: put text after it")
    return Sample(
        tokens=sequence[:-1],
        targets=sequence[1:],
        weights=weights[1:],
        features=features[:-1],
        images=tuple(part for part in parts if isinstance(part, Grid)),
    )


def _tokens(content: bytes | NDArray[np.int32]) -> NDArray[np.integer]:
    return np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
