"""How an array of ours becomes tensors of theirs, and back, bit by bit.

Products are ``x @ kernel`` here, with ``kernel`` ``[in, out]``, and ``x @ weight.T`` there, with ``weight``
``[out, in]``. A transform only looks at an array in another way: nothing is copied but by :class:`Stacked`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Transform(Protocol):
    """From an array of ours to one tensor of theirs or several, and back."""

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """The shapes of the tensors that an array of this shape becomes."""

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """The array that these tensors are."""

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """The tensors that this array is."""


@dataclass(frozen=True)
class Kept:
    """The same on both sides, but for so many axes of length 1 that stand before theirs."""

    leading: int = 0

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """One, with those axes."""
        return [(1,) * self.leading + ours]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Without those axes."""
        return theirs[0].reshape(theirs[0].shape[self.leading :])

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """With those axes."""
        return [ours.reshape(self.their_shapes(ours.shape)[0])]


@dataclass(frozen=True)
class Transposed:
    """A matrix, ``[in, out]`` here and ``[out, in]`` there."""

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """One, turned round."""
        return [ours[::-1]]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Turned round."""
        return theirs[0].T

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Turned round."""
        return [ours.T]


@dataclass(frozen=True)
class Convolution:
    """The product with patches: ``[channels * height * width, out]`` here, a convolution's kernel there."""

    channels: int
    height: int
    width: int

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """One, ``[out, channels, height, width]``."""
        return [(ours[1], self.channels, self.height, self.width)]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """The values of a patch in one axis, in the order channel, row, column."""
        return theirs[0].reshape(len(theirs[0]), -1).T

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """The values of a patch in three axes."""
        return [ours.T.reshape(self.their_shapes(ours.shape)[0])]


@dataclass(frozen=True)
class Stacked:
    """The matrices of experts, one array ``[experts, in, out]`` here and a tensor ``[out, in]`` of each there."""

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """One for each expert."""
        return [ours[:0:-1]] * ours[0]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Side by side; copied."""
        return np.stack([matrix.T for matrix in theirs])

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """One by one."""
        return [matrix.T for matrix in ours]


SAME, TURNED, PER_EXPERT = Kept(), Transposed(), Stacked()
