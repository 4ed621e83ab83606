"""The configuration of text with images: their files and the treatment of images, a validated record of pure data."""

from dataclasses import dataclass

from rrfp_jax.data.batching_config import BatchingConfig
from rrfp_jax.data.held_out import A_FRACTION
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields

_MOST_PIXELS = 178_956_970
"""Largest number of pixels that an image may have: a file of a few kilobytes may have as many, and they fill a
gigabyte."""


@dataclass(frozen=True, kw_only=True)
class ImageTextConfig(BatchingConfig):
    """A data set of text with images; ``batch_size`` and so on as for other samples of different sizes.

    Raises ValueError, with the remedy, for values that do not describe one.
    """

    path: str
    """The JSONL file."""
    image_folder: str | None = None
    """The folder to which the paths of images are relative; None: the folder of the JSONL file."""
    tokenizer: str | None = None
    """A tokenizer.json or a folder that has one; ``bytes``: none, tokens are the bytes of the text. None: the tokenizer
    of the model in ``run.init_from``, which also names the tokens for an image; without such a model, bytes."""
    held_out: float = 0.0
    """About which fraction of the samples is never trained on but kept for evaluation: by a checksum of the names of
    images, those that share one, directly or by way of others, together; of the text where a sample has no image."""
    channels: int = 3
    """3: images are RGB; 1: grey."""
    patch_size: int = 14
    """Pixels of a patch along each side."""
    merge: int = 2
    """So many patches along each side make one image feature, which takes one position of the text."""
    image_size: int | None = None
    """Pixels of each side to which all images are resized; None: each keeps its own size, rounded to whole features."""
    row_order: bool = False
    """Whether the patches of images of one ``image_size`` come row by row, for a model that merges them itself. If not,
    the patches of a feature are consecutive."""
    max_patches: int = 1024
    """An image of its own size that has more patches is made smaller."""
    max_pixels: int = 64 * 2**20
    """An image file with more is refused."""
    max_bad_samples: int = 0
    """Number of samples with an unreadable line or image that are left out before the run saves and ends."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels, which are 0 to 1, by the encoder: one number for all channels, or one for each."""
    std: tuple[float, ...] = (0.5,)
    """Divides the pixels after ``mean`` is subtracted: one number for all channels, or one for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, AT_LEAST_1, "patch_size", "merge", "image_size", "max_patches", "max_pixels")
        check_fields(self, A_FRACTION, "held_out")
        check_fields(self, NOT_NEGATIVE, "max_bad_samples")
        if self.max_pixels > _MOST_PIXELS:
            raise ValueError(
                f"max_pixels is {self.max_pixels}, and small files may fill the memory: give at most {_MOST_PIXELS}"
            )
        if self.channels not in {1, 3}:
            raise ValueError(f"channels is {self.channels}: give 3 for colours or 1 for grey")
        if self.row_order and self.image_size is None:
            raise ValueError("row_order is for images of one size: give image_size, or leave row_order out")
        if self.max_patches < self.merge**2:
            raise ValueError(f"max_patches is {self.max_patches}: give at least {self.merge**2}, one feature")
        block = self.patch_size * self.merge
        if self.image_size is not None and self.image_size % block:
            raise ValueError(
                f"image_size is {self.image_size}: give a multiple of {block}, patch_size x merge, for example "
                f"{self.image_size + -self.image_size % block}"
            )
        if self.image_size is not None and self.image_length is not None:
            num_patches = (self.image_size // self.patch_size) ** 2
            if self.image_length != num_patches:
                raise ValueError(
                    f"image_length is {self.image_length}, and images of one size have a row each, of {num_patches} "
                    f"patches: give {num_patches}, or leave image_length out"
                )
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in {1, self.channels}:
                raise ValueError(f"{name} has {len(getattr(self, name))} numbers: give 1, or {self.channels}")
        if min(self.std) <= 0:
            raise ValueError(f"std is {min(self.std)}: give positive numbers")
