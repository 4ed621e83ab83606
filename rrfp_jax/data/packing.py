"""Samples of text and images, laid into the rows of a microbatch.

**A sample** is a sequence of parts: text, and images at the places where they are seen. An image takes as many
positions as it has *features*: patches after a merge of ``merge x merge`` of them. A token is a byte or one of a
tokenizer; at a feature's position stands a token for images, ``IMAGE_TOKEN`` among bytes, which the feature replaces.

**Patches** come in the order in which an encoder with a merge reads them: those of a ``merge x merge`` block are
consecutive, row by row within the block, and so are the blocks within the image. The values of a patch are in the order
channel, row, column, as in the kernel of a convolution ``[width, channels, patch, patch]``.

**The leaves.** Samples that share a row are told apart by ``segments`` (from 1; 0 is padding), and ``positions`` start
at 0 in each; for a decoder with ``rope_sections`` each token has three. Images that share a row are told apart by
``patch_segments`` in the same way. ``image_index`` says for each position of text which image feature stands there,
counted over the microbatch's rows of features, or -1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.buckets import Packing
from rrfp_jax.data.dataset import BucketSpecs

IMAGE_TOKEN = 0xFF
"""The token at the positions of image features; a byte that UTF-8 never has."""


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
    """Token numbers, int32 ``[length]``."""
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

    def grid_positions(self, merge: int) -> NDArray[np.int32]:
        """Returns the place in time, the row and the column of each token, ``[length, 3]``.

        All three are equal in text, where they count tokens. The features of an image stand at one time, and in rows
        and columns from that number on; text behind it begins beyond the largest of these numbers.
        """
        steps, inside = np.ones(self.length, np.int32), np.zeros((self.length, 3), np.int32)
        at = np.flatnonzero(self.features >= 0)
        for grid in self.images:
            rows, columns = grid.rows // merge, grid.columns // merge
            own, at = at[: rows * columns], at[rows * columns :]
            inside[own, 1], inside[own, 2] = np.divmod(np.arange(rows * columns), columns)
            steps[own] = 0
            steps[own[-1]] = max(rows, columns)
        return inside + (np.cumsum(steps) - steps)[:, None].astype(np.int32)


def make_sample(parts: Sequence[Text | Grid], merge: int, image_token: int = IMAGE_TOKEN) -> Sample:
    """Returns the sample of these parts, for prediction of the next token. There must be two tokens or more."""
    contents: list[NDArray[np.integer]] = []
    for part in parts:
        if isinstance(part, Grid):
            contents.append(np.full(part.num_patches // merge**2, image_token))
        else:
            content = part.content
            contents.append(np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content)
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


def patches_of(pixels: NDArray[Any], patch: int, merge: int) -> NDArray[Any]:
    """Cut ``pixels`` ``[height, width, channels]`` into ``[patches, channels * patch**2]``.

    Height and width must be multiples of ``patch * merge``.
    """
    height, width, channels = pixels.shape
    blocks = pixels.reshape(
        height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, channels
    ).transpose(0, 3, 1, 4, 6, 2, 5)
    return blocks.reshape(-1, channels * patch**2)


@lru_cache(maxsize=4096)
def places_of(grid: Grid, merge: int) -> NDArray[np.int32]:
    """Returns the row and column of each patch in its image, ``[2, patches]``, in the order of ``patches_of``."""
    rows, columns = np.meshgrid(np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    pixels = np.stack([rows, columns], axis=-1).astype(np.int32)
    places = np.ascontiguousarray(patches_of(pixels, 1, merge).T)
    places.flags.writeable = False
    return places


_TEXT_LEAVES = ("tokens", "positions", "segments", "targets", "weights")
_PLACES = ("patch_rows", "patch_columns")
"""Leaves that exist only where images of different sizes share rows."""


class Shape(NamedTuple):
    """The shape of a microbatch: rows of text, and rows of patches; ``image_rows`` 0: no leaf of images."""

    rows: int
    length: int
    image_rows: int
    image_length: int


class PatchFormat(NamedTuple):
    """The format in which images become patches."""

    patch_dim: int
    """Values per patch."""
    merge: int
    """A feature is made of ``merge x merge`` patches."""
    is_packed: bool
    """Whether images of different sizes share rows; if not, each fills its row."""
    dtype: Any = np.float32
    """Type of a patch's values; bytes are pixels as a file has them, which the encoder scales."""
    has_grid_positions: bool = False
    """Whether ``positions`` are a token's place in time, row and column, for a decoder with ``rope_sections``."""


def leaf_specs(shape: Shape, patch_format: PatchFormat) -> BucketSpecs:
    """Returns the leaves of a microbatch of this shape, as ``jax.ShapeDtypeStruct``."""
    import jax

    text, images = (shape.rows, shape.length), (shape.image_rows, shape.image_length)
    specs = {name: jax.ShapeDtypeStruct(text, np.float32 if name == "weights" else np.int32) for name in _TEXT_LEAVES}
    if patch_format.has_grid_positions:
        specs["positions"] = jax.ShapeDtypeStruct((*text, 3), np.int32)
    if shape.image_rows:
        specs["image_index"] = jax.ShapeDtypeStruct(text, np.int32)
        specs["patches"] = jax.ShapeDtypeStruct((*images, patch_format.patch_dim), patch_format.dtype)
        names = ("patch_segments", *_PLACES) if patch_format.is_packed else ("patch_segments",)
        specs |= {name: jax.ShapeDtypeStruct(images, np.int32) for name in names}
    return specs


def text_leaves(
    samples: Sequence[Sample], places: Packing, shape: Shape, patch_format: PatchFormat
) -> dict[str, NDArray[Any]]:
    """Returns the leaves of text of a microbatch, int32 and ``weights`` float32, each ``[rows, length]``; padding is
    0."""
    leaves = {
        name: np.zeros((shape.rows, shape.length), np.float32 if name == "weights" else np.int32)
        for name in _TEXT_LEAVES
    }
    if patch_format.has_grid_positions:
        leaves["positions"] = np.zeros((shape.rows, shape.length, 3), np.int32)
    for segment, number in _segments(places):
        sample, row = samples[number], places.rows[number]
        at = slice(places.offsets[number], places.offsets[number] + sample.length)
        leaves["tokens"][row, at] = sample.tokens
        own = sample.grid_positions(patch_format.merge) if patch_format.has_grid_positions else np.arange(sample.length)
        leaves["positions"][row, at] = own
        leaves["segments"][row, at] = segment
        leaves["targets"][row, at] = sample.targets
        leaves["weights"][row, at] = sample.weights
    return leaves


def image_leaves(
    samples: Sequence[Sample],
    places: Packing,
    image_places: Packing,
    shape: Shape,
    patch_format: PatchFormat,
    *,
    patches: Iterable[NDArray[Any]] | None,
) -> dict[str, NDArray[Any]]:
    """Returns the leaves of images of a microbatch.

    They are ``image_index``, int32 ``[rows, length]``, -1 where a token's own embedding stands; ``patch_segments``, and
    of packed images ``patch_rows`` and ``patch_columns``, int32 ``[image_rows, image_length]``; and ``patches``
    ``[image_rows, image_length, patch_dim]`` from those of each image, left out where ``patches`` is None. Padding of
    all but ``image_index`` is 0.
    """
    merge, images = patch_format.merge, (shape.image_rows, shape.image_length)
    index = np.full((shape.rows, shape.length), -1, np.int32)
    image = 0
    for number, sample in enumerate(samples):
        if not sample.images:
            continue
        features = []
        for num_patches in sample.patches:
            first = image_places.rows[image] * shape.image_length + image_places.offsets[image]
            features.append(np.arange(num_patches // merge**2, dtype=np.int32) + first // merge**2)
            image += 1
        at = slice(places.offsets[number], places.offsets[number] + sample.length)
        index[places.rows[number], at] = np.where(sample.features < 0, -1, np.concatenate(features)[sample.features])
    leaves: dict[str, NDArray[Any]] = {"image_index": index}
    names = ("patch_segments", *(_PLACES if patch_format.is_packed else ()))
    leaves |= {name: np.zeros(images, np.int32) for name in names}
    grids = [grid for sample in samples for grid in sample.images]
    for segment, image in _segments(image_places):
        row, start = image_places.rows[image], image_places.offsets[image]
        at = slice(start, start + grids[image].num_patches)
        leaves["patch_segments"][row, at] = segment
        if patch_format.is_packed:
            leaves["patch_rows"][row, at], leaves["patch_columns"][row, at] = places_of(grids[image], merge)
    if patches is not None:
        leaves["patches"] = np.zeros((*images, patch_format.patch_dim), patch_format.dtype)
        for values, row, start in zip(patches, image_places.rows, image_places.offsets, strict=True):
            leaves["patches"][row, start : start + len(values)] = values
    return leaves


def _segments(places: Packing) -> Sequence[tuple[int, int]]:
    """Returns (segment from 1, number) of each packed sequence, row by row."""
    counts = [0] * places.num_rows
    segments = []
    for number in sorted(range(len(places.rows)), key=lambda number: places.offsets[number]):
        counts[places.rows[number]] += 1
        segments.append((counts[places.rows[number]], number))
    return segments
