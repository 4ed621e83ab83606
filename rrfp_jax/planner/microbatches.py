"""The contents of a run's microbatches: rows of text, and rows of patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import make_data_set
from rrfp_jax.data import TRAIN, Part


@dataclass(frozen=True, kw_only=True)
class MicrobatchRows:
    """The largest microbatch of a size."""

    num_rows: int
    length: int
    """Tokens of a row."""
    image_rows: int = 0
    patch_length: int = 0
    """Patches of a row."""

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.num_rows * self.length

    @property
    def pairs(self) -> int:
        """Pairs of tokens, as attention over whole rows computes them."""
        return self.num_rows * self.length**2

    @property
    def patches(self) -> int:
        """Number of patches, padding included."""
        return self.image_rows * self.patch_length

    @property
    def patch_pairs(self) -> int:
        """Pairs of patches, as attention over whole rows computes them."""
        return self.image_rows * self.patch_length**2


def rows_of_microbatch(config: TrainConfig, microbatch_size: int) -> MicrobatchRows:
    """Returns the largest microbatch of this size; samples that share rows must be read to know it.

    Raises ValueError, with the remedy, where the data cannot be read.
    """
    return largest_rows(microbatch_specs(config, microbatch_size))


def largest_rows(buckets: Sequence[Mapping[str, Any]]) -> MicrobatchRows:
    """Returns the largest of these microbatches, from arrays or specs of their leaves."""
    shapes = [_rows({name: leaf.shape for name, leaf in each.items()}) for each in buckets]
    return max(shapes, key=lambda rows: (rows.tokens, rows.patches))


def microbatch_specs(config: TrainConfig, microbatch_size: int, part: Part = TRAIN) -> list[dict[str, Any]]:
    """Returns arrays or specs of a microbatch's leaves, for every shape that a part of the data has at this size.

    Raises ValueError, with the remedy, where data that must be read cannot be.
    """
    if config.row_length is not None:
        shape, dtypes = (microbatch_size, config.row_length), {"tokens": "i4", "targets": "i4", "weights": "f4"}
        if config.has_segments:
            dtypes |= {"positions": "i4", "segments": "i4"}
        return [{name: np.empty(shape, dtype) for name, dtype in dtypes.items()}]
    batch_size = microbatch_size * config.data.num_microbatches
    section: Any = {"data": replace(config.data, batch_size=batch_size)}
    return list(make_data_set(replace(config, **section), part, force=True).buckets or [])


def _rows(shapes: dict[str, tuple[int, ...]]) -> MicrobatchRows:
    image_rows, patch_length = shapes["patches"][:2] if "patches" in shapes else (0, 0)
    return MicrobatchRows(
        num_rows=shapes["tokens"][0], length=shapes["tokens"][1], image_rows=image_rows, patch_length=patch_length
    )
