"""What a data set of drawn words is made of: a validated record, pure data."""

from dataclasses import dataclass

from rrfp_jax.data.batching_config import BatchingConfig
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields

HEIGHT = 16
"""Pixels of every picture from top to bottom."""


@dataclass(frozen=True, kw_only=True)
class RenderedTextConfig(BatchingConfig):
    """A data set of drawn words; ``batch_size`` and so on as for other samples of different sizes.

    Raises ValueError, with the remedy, for values that do not describe one.
    """

    path: str | None = None
    """Text that the words and the text-only samples are taken from: a file, or a folder. None: the running Python's own
    standard library."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")
    """Endings of the files that are read from a folder."""
    max_bytes: int = 64 * 2**20
    """How much text is read at most, in bytes."""
    words: tuple[str, ...] | None = None
    """The words to draw; None: those of the text."""
    min_letters: int = 2
    """Letters of the shortest words that are taken from the text."""
    max_letters: int = 5
    """Letters of the longest words that are taken from the text."""
    held_out: float = 0.05
    """Fraction of the words that are never trained on."""
    max_images: int = 4
    """Pictures per sample: 1 to so many, all numbers equally often."""
    interleaved: bool = True
    """Whether each picture is followed by its line; if not, all lines come after all pictures, which is harder."""
    text_only: float = 0.2
    """Fraction of the samples that have no picture."""
    text_length: int = 32
    """Bytes of the longest text-only samples; the shortest have a quarter."""
    faces: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold")
    """Faces that words are drawn in, by the names of matplotlib's font files."""
    font_sizes: tuple[int, ...] = (12,)
    """Sizes of letters, in pixels per em."""
    min_contrast: float = 0.6
    """Ink is between so much and 1; paper is 0."""
    max_shift: int = 1
    """Words begin up to so many pixels further right and further down."""
    noise: float = 0.1
    """Every pixel is moved by up to so much, either way."""
    patch_size: int = 8
    """Pixels of a patch along each side."""
    merge: int = 2
    """So many patches along each side make one image feature, which takes one position of the text."""
    blind: bool = False
    """Whether all pixels are 0, everything else being the same: what can be had without looking."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("max_bytes", "min_letters", "max_images", "patch_size", "merge")
        check_fields(self, AT_LEAST_1, *names)
        check_fields(self, NOT_NEGATIVE, "max_shift")
        if self.max_letters < self.min_letters:
            raise ValueError(f"max_letters is {self.max_letters}: give at least min_letters, {self.min_letters}")
        if self.max_letters > 1000:
            raise ValueError(f"max_letters is {self.max_letters}: give at most 1000, no word has more")
        if self.text_length < 8:
            raise ValueError(f"text_length is {self.text_length}: give at least 8")
        for name in ("held_out", "text_only", "min_contrast", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 to 1")
        if not self.faces or not self.font_sizes:
            raise ValueError("faces or font_sizes is empty, so nothing could be drawn: give at least one of each")
        if min(self.font_sizes) < 1:
            raise ValueError(f"font_sizes has {min(self.font_sizes)}: give at least 1")
        if self.seed >= 2**64:
            raise ValueError(f"seed is {self.seed}: give a number from 0 to {2**64 - 1}")
        if HEIGHT % (self.patch_size * self.merge):
            raise ValueError(
                f"patch_size {self.patch_size} x merge {self.merge} does not divide the height of a picture, {HEIGHT}: "
                "give for example 8 and 2, or 8 and 1"
            )
