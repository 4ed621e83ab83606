"""The leaves of a microbatch: samples laid into rows of text, their images into rows of patches.

Samples that share a row are told apart by ``segments`` (from 1; 0 is padding), and ``positions`` start at 0 in each.
Images that share a row are told apart by ``patch_segments`` in the same way. ``image_index`` says for each position of
text which image feature stands there, counted over the microbatch's rows of features, or -1.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import Bucket
from rrfp_jax.data.patches import places_of
from rrfp_jax.data.row_packing import Packing
from rrfp_jax.data.samples import Sample

TEXT_LEAVES = ("tokens", "positions", "segments", "targets", "weights")
_PLACES = ("patch_rows", "patch_columns")
"""Only where images of different sizes share rows."""


class Shape(NamedTuple):
    """The shape of a microbatch: rows of text, and rows of patches; ``image_rows`` 0: no leaf of images."""

    rows: int
    length: int
    image_rows: int
    image_length: int


class PatchFormat(NamedTuple):
    """How images become patches."""

    patch_dim: int
    """Values per patch."""
    merge: int
    """A feature is made of ``merge x merge`` patches."""
    is_packed: bool
    """Whether images of different sizes share rows; if not, each fills its row."""
    dtype: Any = np.float32
    """Of a patch's values: bytes are pixels as a file has them, which the encoder scales."""


def leaf_specs(shape: Shape, patch_format: PatchFormat) -> Bucket:
    """The leaves of a microbatch of this shape, as ``jax.ShapeDtypeStruct``."""
    import jax

    text, images = (shape.rows, shape.length), (shape.image_rows, shape.image_length)
    specs = {name: jax.ShapeDtypeStruct(text, np.float32 if name == "weights" else np.int32) for name in TEXT_LEAVES}
    if shape.image_rows:
        specs["image_index"] = jax.ShapeDtypeStruct(text, np.int32)
        specs["patches"] = jax.ShapeDtypeStruct((*images, patch_format.patch_dim), patch_format.dtype)
        names = ("patch_segments", *_PLACES) if patch_format.is_packed else ("patch_segments",)
        specs |= {name: jax.ShapeDtypeStruct(images, np.int32) for name in names}
    return specs


def text_leaves(samples: Sequence[Sample], places: Packing, shape: Shape) -> dict[str, NDArray[Any]]:
    """``TEXT_LEAVES`` of a microbatch, int32 and ``weights`` float32, each ``[rows, length]``; padding is 0."""
    leaves = {
        name: np.zeros((shape.rows, shape.length), np.float32 if name == "weights" else np.int32)
        for name in TEXT_LEAVES
    }
    for segment, number in _segments(places):
        sample, row = samples[number], places.rows[number]
        at = slice(places.offsets[number], places.offsets[number] + sample.length)
        leaves["tokens"][row, at] = sample.tokens
        leaves["positions"][row, at] = np.arange(sample.length)
        leaves["segments"][row, at] = segment
        leaves["targets"][row, at] = sample.targets
        leaves["weights"][row, at] = sample.weights
    return leaves


def index_leaf(
    samples: Sequence[Sample], places: Packing, image_places: Packing, shape: Shape, merge: int
) -> NDArray[np.int32]:
    """``image_index`` of a microbatch, int32 ``[rows, length]``; -1 where a token's own embedding stands."""
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
    return index


def place_leaves(
    samples: Sequence[Sample], image_places: Packing, shape: Shape, patch_format: PatchFormat
) -> dict[str, NDArray[np.int32]]:
    """``patch_segments``, and of packed images ``patch_rows`` and ``patch_columns``, int32 ``[image_rows,
    image_length]``; padding is 0."""
    names = ("patch_segments", *_PLACES)
    leaves = {name: np.zeros((shape.image_rows, shape.image_length), np.int32) for name in names}
    grids = [grid for sample in samples for grid in sample.images]
    for segment, image in _segments(image_places):
        row, start = image_places.rows[image], image_places.offsets[image]
        at = slice(start, start + grids[image].num_patches)
        leaves["patch_segments"][row, at] = segment
        leaves["patch_rows"][row, at], leaves["patch_columns"][row, at] = places_of(grids[image], patch_format.merge)
    return leaves if patch_format.is_packed else {"patch_segments": leaves["patch_segments"]}


def patches_leaf(
    patches: Iterable[NDArray[Any]], image_places: Packing, shape: Shape, patch_format: PatchFormat
) -> NDArray[Any]:
    """``patches`` of a microbatch, ``[image_rows, image_length, patch_dim]``, from those of each image."""
    leaf = np.zeros((shape.image_rows, shape.image_length, patch_format.patch_dim), patch_format.dtype)
    for values, row, start in zip(patches, image_places.rows, image_places.offsets, strict=True):
        leaf[row, start : start + len(values)] = values
    return leaf


def _segments(places: Packing) -> Sequence[tuple[int, int]]:
    """(segment from 1, number) of what was packed, row by row."""
    counts = [0] * places.num_rows
    segments = []
    for number in sorted(range(len(places.rows)), key=lambda number: places.offsets[number]):
        counts[places.rows[number]] += 1
        segments.append((counts[places.rows[number]], number))
    return segments
