"""A sample of text and images, before it is put into a microbatch.

A sample is a sequence of parts: text, and images that stand where they are seen. An image takes as many positions as it
has *features*: patches after a merge of ``merge x merge`` of them. A token is a byte; at a feature's position it is
``IMAGE_TOKEN``, which the feature replaces.
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

    content: bytes
    weight: float
    """How much it counts in the loss to predict each of these bytes: 0 for a prompt."""


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


def make_sample(parts: Sequence[Text | Grid], merge: int) -> Sample:
    """The sample of these parts, for prediction of the next token. There must be two tokens or more."""
    tokens, weights, features = [], [], []
    num_features = 0
    for part in parts:
        if isinstance(part, Text):
            length = len(part.content)
            tokens.append(np.frombuffer(part.content, np.uint8).astype(np.int32))
            features.append(np.full(length, -1, np.int32))
        else:
            length = part.num_patches // merge**2
            tokens.append(np.full(length, IMAGE_TOKEN, np.int32))
            features.append(np.arange(num_features, num_features + length, dtype=np.int32))
            num_features += length
        weights.append(np.full(length, part.weight if isinstance(part, Text) else 0, np.float32))
    sequence, numbers, importance = np.concatenate(tokens), np.concatenate(features), np.concatenate(weights)
    assert len(sequence) > 1, "a sample needs a token and the one to predict after it"
    if numbers[-1] >= 0:
        raise ValueError("a sample ends in an image, which nothing is predicted from: put text after it")
    return Sample(
        tokens=sequence[:-1],
        targets=sequence[1:],
        weights=importance[1:],
        features=numbers[:-1],
        images=tuple(part for part in parts if isinstance(part, Grid)),
    )
