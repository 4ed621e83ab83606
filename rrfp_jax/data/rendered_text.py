"""Read the pictures: words drawn in several faces, their transcriptions as what is to be predicted.

A sample is 1 to ``max_images`` pictures of one word each, then one line with each word; or, text only, a piece of the
corpus. Pictures are as wide as their words, so numbers and sizes of images vary by nature. Some words are held out, by
a checksum, so that the score is one of reading, not of remembering.

What is drawn follows from (seed, step, number of the sample) alone, from raw bits of a counter-based generator: the
same in every layout, in every process and with every version of NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.batching import Batching, BatchingConfig, Cost, Limits
from rrfp_jax.data.corpus import read_corpus
from rrfp_jax.data.dataset import Batch, Bucket, Reads
from rrfp_jax.data.drawing import MARGIN, ink, rows_of_ink, widths
from rrfp_jax.data.packing import PatchFormat, Shape, index_leaf, patches_leaf, place_leaves, text_leaves
from rrfp_jax.data.patches import patches_of
from rrfp_jax.data.samples import Grid, Sample, Text, make_sample
from rrfp_jax.data.words import divided, words_of
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields
from rrfp_jax.planning.packing import Packing, pack

HEIGHT = 16
"""Pixels of every picture from top to bottom."""
_SURVEYED_SAMPLES = 2048
_TRAINING, _HELD_OUT = 0, 1
"""Where the two kinds of samples draw from."""


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
    text_only: float = 0.2
    """Fraction of the samples that have no picture."""
    text_length: int = 32
    """Bytes of the longest text-only samples; the shortest have a quarter."""
    faces: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold")
    """Faces that words are drawn in, by the names of matplotlib's font files."""
    font_sizes: tuple[int, ...] = (11, 12, 13)
    """Sizes of letters, in pixels per em."""
    min_contrast: float = 0.6
    """Ink is between so much and 1; paper is 0."""
    max_shift: int = 2
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
        if self.text_length < 8:
            raise ValueError(f"text_length is {self.text_length}: give at least 8")
        for name in ("held_out", "text_only", "min_contrast", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 to 1")
        if not self.faces or not self.font_sizes:
            raise ValueError("faces or font_sizes is empty, so nothing could be drawn: give at least one of each")
        if HEIGHT % (self.patch_size * self.merge):
            raise ValueError(
                f"patch_size {self.patch_size} x merge {self.merge} does not divide the height of a picture, {HEIGHT}: "
                "give for example 8 and 2, or 8 and 1"
            )


class _Picture(NamedTuple):
    """A word, how it is drawn, and how wide that is, in pixels."""

    word: str
    face: str
    size: int
    width: int


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Samples of held-out words to be read aloud: prompts, and what should follow.

    Every sample has a row of its own, and a prompt goes up to ``starts``; what comes after is to be filled in token by
    token. ``segments`` are 1 up to the end of each row.
    """

    leaves: dict[str, NDArray]
    """One microbatch, as a bucket of its own."""
    starts: NDArray[np.int32]
    """``[rows]``: the position whose token is the first of the transcription; the one before predicts it."""
    words: list[tuple[str, ...]]
    """The words of each sample, one line each."""
    pictures: list[list[NDArray[np.float32]]]
    """Their pictures as the encoder sees them, ``[16, width]``, ink 1."""


class RenderedText:
    """A deterministic data set of drawn words; see the module's text.

    Args:
        cost: what a sample costs, for balancing; None: a token and a patch cost the same.

    Attributes: ``config``; ``training_words`` and ``held_out_words``; ``num_bytes`` of text; ``shapes``, all that a
    microbatch can have; ``largest_grid``, the rows and the most columns of patches that a picture has.
    Raises ValueError, with the remedy, where there are no words, a face is unknown, or rows are too short.
    """

    def __init__(self, config: RenderedTextConfig, *, cost: Cost | None = None) -> None:
        self.config = config
        self._text = read_corpus(config.path, suffixes=config.suffixes, max_bytes=config.max_bytes)
        self.num_bytes = len(self._text)
        words = sorted(set(config.words)) if config.words is not None else self._words_of_text()
        self.training_words, self.held_out_words = divided(words, config.held_out)
        self._check(words)
        self._widths = {
            (face, size): dict(zip(words, widths(words, face, size).tolist(), strict=True))
            for face in config.faces
            for size in config.font_sizes
        }
        widest = max(self._rounded(max(each.values())) for each in self._widths.values())
        self.largest_grid = Grid(HEIGHT // config.patch_size, widest // config.patch_size)
        self._format = PatchFormat(config.patch_size**2, config.merge, is_packed=True)
        num_steps = -(-_SURVEYED_SAMPLES // config.batch_size)
        survey = [self.samples(step) for step in range(num_steps)]
        self._batching = Batching(config, self._format, self._limits(words), survey, cost)
        self.shapes = self._batching.shapes

    def _words_of_text(self) -> list[str]:
        return words_of(self._text.tobytes(), self.config.min_letters, self.config.max_letters)

    def _check(self, words: Sequence[str]) -> None:
        config = self.config
        strange = next((word for word in words if not (word.isascii() and word.isalpha())), None)
        if strange is not None:
            raise ValueError(f"the word {strange!r} cannot be drawn: give words of the letters A to Z and a to z")
        if not self.training_words or (config.held_out and not self.held_out_words):
            raise ValueError(
                f"of {len(words)} words {len(self.held_out_words)} are held out, and {len(self.training_words)} are "
                "left to train on: give more words (more text, or other numbers of letters), or another held_out"
            )
        if self.num_bytes <= config.text_length:
            raise ValueError(
                f"{self.num_bytes} bytes of text are too few for a sample of {config.text_length}: give more text, or "
                "a smaller text_length"
            )
        for face in config.faces:
            for size in config.font_sizes:
                top, bottom = rows_of_ink(face, size)
                if (height := bottom - top) > HEIGHT:
                    raise ValueError(
                        f"letters of {face} in size {size} are {height} pixels high, but a picture has {HEIGHT}: give "
                        "smaller font_sizes"
                    )

    def _limits(self, words: Sequence[str]) -> Limits:
        config = self.config
        image = self.largest_grid.num_patches
        letters = max(map(len, words))
        longest = max(config.text_length, config.max_images * (image // config.merge**2 + 1 + letters + 1))
        num = config.microbatch_size
        images = num * config.max_images
        return Limits(longest, num * longest, image, images, images * image, has_text_only=config.text_only > 0)

    def _rounded(self, width: int) -> int:
        block = self.config.patch_size * self.config.merge
        return -(-width // block) * block

    @cached_property
    def fingerprint(self) -> str:
        """The words in a few words, the same wherever the text is."""
        import hashlib

        digest = hashlib.sha256(
            "\n".join([*self.training_words, "", *self.held_out_words]).encode() + self._text.tobytes()
        )
        return f"{len(self.training_words)} words and {self.num_bytes} bytes, SHA-256 {digest.hexdigest()[:16]}"

    @property
    def buckets(self) -> list[Bucket]:
        """All shapes that a microbatch can have."""
        return self._batching.buckets

    def batch(self, step: int, reads: Reads | None = None) -> Batch:
        """The batch of ``step`` (0, 1, ...), a list of microbatches for each leaf; what is not read is not drawn.

        Leaves of a microbatch: ``tokens``, ``positions``, ``segments``, ``targets`` (int32) and ``weights`` (float32),
        each ``[rows, length]``; and unless it is text only, ``image_index`` (int32, the same shape), ``patches``
        (float32 ``[image_rows, image_length, patch_size**2]``), ``patch_segments``, ``patch_rows`` and
        ``patch_columns`` (int32 ``[image_rows, image_length]``).
        """
        if step < 0:
            raise ValueError(f"step is {step}: give 0 or more")
        drawn = [self._draw(step, number, _TRAINING) for number in range(self.config.batch_size)]

        def patches(number: int, image: int) -> NDArray[np.float32]:
            return self._patches(self._pixels(drawn[number][image], step, number, image, _TRAINING))

        samples = [self._sample(pictures, step, number) for number, pictures in enumerate(drawn)]
        return self._batching.leaves(samples, patches, reads)

    def samples(self, step: int) -> list[Sample]:
        """The samples of ``step``, whatever microbatches they come into."""
        return [
            self._sample(self._draw(step, number, _TRAINING), step, number) for number in range(self.config.batch_size)
        ]

    def held_out(self, num_samples: int, *, rows: int = 32) -> list[HeldOut]:
        """The first samples of held-out words, none of them text only, in batches of ``rows`` and of one shape."""
        if num_samples % rows or num_samples < rows:
            raise ValueError(f"{num_samples} samples do not divide into batches of {rows}: give a multiple of {rows}")
        drawn = [self._draw(0, number, _HELD_OUT) for number in range(num_samples)]
        parts = [range(start, start + rows) for start in range(0, num_samples, rows)]
        places = [self._image_places([drawn[number] for number in part]) for part in parts]
        image_rows = max(each.num_rows for each in places)
        shape = Shape(rows, self._batching.length, image_rows, self._batching.image_length)
        return [
            self._readings(drawn, part, image_places, shape) for part, image_places in zip(parts, places, strict=True)
        ]

    def _image_places(self, drawn: Sequence[Sequence[_Picture]]) -> Packing:
        area = self.config.patch_size**2
        return pack(
            [HEIGHT * each.width // area for pictures in drawn for each in pictures], self._batching.image_length
        )

    def _readings(
        self, drawn: Sequence[Sequence[_Picture]], numbers: range, image_places: Packing, shape: Shape
    ) -> HeldOut:
        prompts = [make_sample([*self._prompt(drawn[number]), Text(b"\n", 0)], self.config.merge) for number in numbers]
        places = Packing(len(prompts), tuple(range(len(prompts))), (0,) * len(prompts))
        pictures = [
            [self._pixels(each, 0, number, image, _HELD_OUT) for image, each in enumerate(drawn[number])]
            for number in numbers
        ]
        patches = (self._patches(pixels) for of_sample in pictures for pixels in of_sample)
        leaves: dict[str, NDArray] = text_leaves(prompts, places, shape)
        leaves["positions"][:] = np.arange(shape.length)
        leaves["segments"][:] = 1
        leaves["targets"][:] = 0
        leaves["image_index"] = index_leaf(prompts, places, image_places, shape, self.config.merge)
        leaves["patches"] = patches_leaf(patches, image_places, shape, self._format.patch_dim)
        leaves |= place_leaves(prompts, image_places, shape, self._format)
        return HeldOut(
            leaves=leaves,
            starts=np.array([prompt.length for prompt in prompts], np.int32),
            words=[tuple(each.word for each in drawn[number]) for number in numbers],
            pictures=pictures,
        )

    def _draw(self, step: int, number: int, kind: int) -> list[_Picture]:
        """The pictures of a sample."""
        config = self.config
        bits = _bits(config.seed, step, number, kind=kind, purpose=0, num=2 + 3 * config.max_images).tolist()
        if kind == _TRAINING and bits[0] * 2.0**-64 < config.text_only:
            return []
        words = self.held_out_words if kind == _HELD_OUT else self.training_words
        pictures = []
        for image in range(1 + bits[1] % config.max_images):
            of_word, of_face, of_size = bits[2 + 3 * image : 5 + 3 * image]
            word = words[of_word % len(words)]
            face, size = config.faces[of_face % len(config.faces)], config.font_sizes[of_size % len(config.font_sizes)]
            pictures.append(_Picture(word, face, size, self._rounded(self._widths[face, size][word])))
        return pictures

    def _sample(self, pictures: Sequence[_Picture], step: int, number: int) -> Sample:
        if pictures:
            return make_sample(
                [*self._prompt(pictures), *(Text(f"{each.word}\n".encode(), 1) for each in pictures)], self.config.merge
            )
        bits = _bits(self.config.seed, step, number, kind=_TRAINING, purpose=1, num=2).tolist()
        shortest = self.config.text_length // 4
        length = shortest + bits[0] % (self.config.text_length - shortest + 1)
        start = bits[1] % (self.num_bytes - length)
        return make_sample([Text(self._text[start : start + length + 1].tobytes(), 1)], self.config.merge)

    def _prompt(self, pictures: Sequence[_Picture]) -> list[Grid | Text]:
        patch = self.config.patch_size
        parts: list[Grid | Text] = []
        for picture in pictures:
            parts += [Grid(HEIGHT // patch, picture.width // patch), Text(b"\n", 0)]
        return parts

    def _pixels(self, picture: _Picture, step: int, number: int, image: int, kind: int) -> NDArray[np.float32]:
        """The picture, ``[16, width]``: ink up to 1 on paper that is 0, and noise."""
        config = self.config
        shape = (HEIGHT, picture.width)
        if config.blind:
            return np.zeros(shape, np.float32)
        num = 3 + HEIGHT * picture.width // 8
        bits = _bits(config.seed, step, number, kind=kind, purpose=2 + image, num=num)
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

    def _patches(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return patches_of(pixels[:, :, None], self.config.patch_size, self.config.merge)


def _bits(seed: int, step: int, number: int, *, kind: int, purpose: int, num: int) -> NDArray[np.uint64]:
    """Raw bits of a stream of their own: keyed by (seed, step), from a counter that begins at the other three.

    NumPy guarantees these over its versions, as it does not for what Generator makes of them.
    """
    return np.random.Philox(counter=[0, number, kind, purpose], key=[seed, step]).random_raw(num)
