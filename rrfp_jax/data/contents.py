"""What a batch holds, for the metrics of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class BatchContents:
    """How much of a batch is data, and how much is padding."""

    microbatches_without_images: int
    images: int
    patches: int
    """Patches of images, padding left out."""
    tokens: int
    """Positions of text, image features among them, padding left out."""
    patch_padding: float
    """Which part of all patches is padding, 0 to 1."""
    token_padding: float
    """Which part of all positions is padding, 0 to 1."""
    token_lengths: NDArray[np.int64] = field(repr=False, compare=False)
    """The length of every sequence within which tokens look at each other, in no particular order."""
    patch_lengths: NDArray[np.int64] = field(repr=False, compare=False)
    """The patches of every image."""


def contents_of(batch: Mapping[str, Any]) -> BatchContents:
    """Count what is in a batch, over all its microbatches, from ``segments`` and ``patch_segments``.

    Both are whole in every process, whatever it reads. A batch without ``segments`` is text without padding.
    """
    segments = [leaf for leaf in batch.get("segments", batch.get("tokens", ())) if leaf is not None]
    used = [np.count_nonzero(leaf) if "segments" in batch else leaf.size for leaf in segments]
    num_positions = sum(leaf.size for leaf in segments)
    of_patches = list(batch.get("patch_segments", [None] * len(segments)))
    images = [leaf for leaf in of_patches if leaf is not None]
    num_patches, patches = sum(leaf.size for leaf in images), sum(np.count_nonzero(leaf) for leaf in images)
    return BatchContents(
        microbatches_without_images=len(of_patches) - len(images),
        images=sum(int(leaf.max(axis=1).sum()) for leaf in images),
        patches=int(patches),
        tokens=int(sum(used)),
        patch_padding=1 - patches / num_patches if num_patches else 0.0,
        token_padding=1 - sum(used) / num_positions if num_positions else 0.0,
        token_lengths=_lengths(segments, is_packed="segments" in batch),
        patch_lengths=_lengths(images, is_packed=True),
    )


def _lengths(leaves: Iterable[NDArray[Any]], *, is_packed: bool) -> NDArray[np.int64]:
    """How long the sequences are that lie in rows, ``[rows, length]``; where rows are packed, of each segment but 0."""
    found = [np.zeros(0, np.int64)]
    for leaf in leaves:
        rows, length = leaf.shape
        if not is_packed:
            found.append(np.full(rows, length))
            continue
        num_ids = int(leaf.max(initial=0)) + 1
        places = np.asarray(leaf, np.int64) + num_ids * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * num_ids).reshape(rows, num_ids)[:, 1:]
        found.append(counts[counts > 0])
    return np.concatenate(found)
