"""Read the pictures: words drawn in several faces, their transcriptions as what is to be predicted.

A sample is 1 to ``max_images`` pictures of one word each, then one line with each word, or ``interleaved`` with them;
or, text only, a piece of the corpus. Pictures are as wide as their words, so numbers and sizes of images vary by
nature. Some words are held out, by a checksum, so that the score is one of reading, not of remembering.

What is drawn follows from (seed, step, number of the sample) alone: it is the same in every layout and every process.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.batching import Batching, Cost, Limits
from rrfp_jax.data.corpus import read_corpus
from rrfp_jax.data.cut_sizes import CutSizes
from rrfp_jax.data.dataset import Batch, Bucket, Reads
from rrfp_jax.data.packing import PatchFormat, Shape, index_leaf, patches_leaf, place_leaves, text_leaves
from rrfp_jax.data.parts import HELD_OUT, TRAIN, Part, refuse_nothing_held_out
from rrfp_jax.data.patches import patches_of
from rrfp_jax.data.pictures import Picture, Pictures, Place
from rrfp_jax.data.rendered_config import HEIGHT, RenderedTextConfig
from rrfp_jax.data.row_packing import Packing, pack_rows
from rrfp_jax.data.samples import Grid, Sample, Text, make_sample
from rrfp_jax.data.token_kind import BYTE_TOKENS
from rrfp_jax.data.words import divided, words_of

_SURVEYED_SAMPLES = 2048
_TEXT = 1
"""What the bits of a text-only sample are for."""


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
    """The words that are asked for in each sample, one line each: all; of ``interleaved`` samples the last one."""
    pictures: list[list[NDArray[np.float32]]]
    """The pictures of these words as the encoder sees them, ``[16, width]``, ink 1."""


class RenderedText:
    """A deterministic data set of drawn words; see the module's text.

    Args:
        cost: what a sample costs, for balancing; None: a token and a patch cost the same.
        part: samples of the words that are trained on, or of those that are held out, none of them text only.
        cut: of what the sizes of microbatches are multiples.

    Attributes: ``config``; ``training_words`` and ``held_out_words``; ``num_bytes`` of text; ``shapes``, all that a
    microbatch can have; ``largest_grid``, the rows and the most columns of patches that a picture has.
    Raises ValueError, with the remedy, where there are no words, a face is unknown, or rows are too short.
    """

    vocab_size = 256
    bytes_per_token = 1.0
    token_kind = BYTE_TOKENS
    """A token is a byte."""

    def __init__(
        self,
        config: RenderedTextConfig,
        *,
        cost: Cost | None = None,
        part: Part = TRAIN,
        cut: CutSizes | None = None,
    ) -> None:
        refuse_nothing_held_out(part, config.held_out)
        self.config = config
        self._text = read_corpus(config.path, suffixes=config.suffixes, max_bytes=config.max_bytes)
        self.num_bytes = len(self._text)
        words = sorted(set(config.words)) if config.words is not None else self._words_of_text()
        self.training_words, self.held_out_words = divided(words, config.held_out)
        self._check(words)
        self._drawn, self._is_held_out = self.training_words, False
        self._pictures = Pictures(config, words)
        self.largest_grid = Grid(HEIGHT // config.patch_size, self._pictures.widest // config.patch_size)
        self._format = PatchFormat(config.patch_size**2, config.merge, is_packed=True)
        num_steps = -(-_SURVEYED_SAMPLES // config.batch_size)
        survey = [self.samples(step) for step in range(num_steps)]
        self._batching = Batching(config, self._format, self._limits(max(map(len, words))), survey, cost, cut=cut)
        self.shapes = self._batching.shapes
        if part == HELD_OUT:  # of the same shapes as what is trained on
            self._drawn, self._is_held_out = self.held_out_words, True

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

    def _limits(self, letters: int) -> Limits:
        """For words of so many letters, all as wide as the widest."""
        config, patches = self.config, self.largest_grid.num_patches
        longest = max(config.text_length, config.max_images * (patches // config.merge**2 + 1 + letters + 1))
        num = config.microbatch_size
        images = num * config.max_images
        return Limits(longest, num * longest, patches, images, images * patches, has_text_only=config.text_only > 0)

    @cached_property
    def fingerprint(self) -> str:
        """The words and their widths in a few words, the same wherever the text is."""
        words = "\n".join([*self.training_words, "", *self.held_out_words]).encode()
        digest = hashlib.sha256(words + self._text.tobytes() + self._pictures.fingerprint).hexdigest()[:16]
        return f"{len(self.training_words)} words and {self.num_bytes} bytes, SHA-256 {digest}"

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
        places = self._places(step)
        chosen = [self._pictures.choose(place, self._drawn) for place in places]

        def patches(number: int, image: int) -> NDArray[np.float32]:
            return self._patches(self._pictures.pixels(chosen[number][image], places[number], image))

        samples = [self._sample(*sample) for sample in zip(places, chosen, strict=True)]
        return self._batching.leaves(samples, patches, reads)

    def samples(self, step: int) -> list[Sample]:
        """The samples of ``step``, whatever microbatches they come into."""
        return [self._sample(place, self._pictures.choose(place, self._drawn)) for place in self._places(step)]

    def _places(self, step: int) -> list[Place]:
        size = self.config.batch_size
        return [Place(step, number, is_held_out=self._is_held_out) for number in range(size)]

    def _sample(self, place: Place, pictures: Sequence[Picture]) -> Sample:
        config = self.config
        if pictures:
            return make_sample(self._parts(pictures, len(pictures)), config.merge)
        of_length, of_start = place.bits(config.seed, _TEXT, 2).tolist()
        shortest = config.text_length // 4
        length = shortest + of_length % (config.text_length - shortest + 1)
        start = of_start % (self.num_bytes - length)
        return make_sample([Text(self._text[start : start + length + 1].tobytes(), 1)], config.merge)

    def _parts(self, pictures: Sequence[Picture], num_lines: int) -> list[Grid | Text]:
        """All pictures, and of so many of them the lines."""
        patch = self.config.patch_size
        parts: list[Grid | Text] = []
        lines = [Text(f"{picture.word}\n".encode(), 1) for picture in pictures[:num_lines]]
        for number, picture in enumerate(pictures):
            parts += [Grid(HEIGHT // patch, picture.width // patch), Text(b"\n", 0)]
            if self.config.interleaved:
                parts += lines[number : number + 1]
        return parts if self.config.interleaved else [*parts, *lines]

    def _patches(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return patches_of(pixels[:, :, None], self.config.patch_size, self.config.merge)

    def held_out(self, num_samples: int, *, rows: int = 32) -> list[HeldOut]:
        """The first samples of held-out words, none of them text only, in batches of ``rows`` and of one shape.

        Raises ValueError where there are no such words, or the samples do not divide.
        """
        if not self.held_out_words:
            raise ValueError("held_out is 0, so all words are trained on: give a run that holds some out")
        if num_samples % rows or num_samples < rows:
            raise ValueError(f"{num_samples} samples do not divide into batches of {rows}: give a multiple of {rows}")
        places = [Place(0, number, is_held_out=True) for number in range(num_samples)]
        chosen = [self._pictures.choose(place, self.held_out_words) for place in places]
        prompts = [self._prompt(pictures) for pictures in chosen]
        parts = [slice(start, start + rows) for start in range(0, num_samples, rows)]
        image_places = [
            pack_rows([size for prompt in prompts[part] for size in prompt.patches], self._batching.image_length)
            for part in parts
        ]
        image_rows = max(each.num_rows for each in image_places)
        shape = Shape(rows, self._batching.length, image_rows, self._batching.image_length)
        return [
            self._held_out(places[part], chosen[part], prompts[part], packed, shape)
            for part, packed in zip(parts, image_places, strict=True)
        ]

    def _first_asked(self, pictures: Sequence[Picture]) -> int:
        return len(pictures) - 1 if self.config.interleaved else 0

    def _prompt(self, pictures: Sequence[Picture]) -> Sample:
        # The last token of a sample is only predicted, so one more is put after the prompt.
        return make_sample([*self._parts(pictures, self._first_asked(pictures)), Text(b"\n", 0)], self.config.merge)

    def _held_out(
        self,
        places: Sequence[Place],
        chosen: Sequence[Sequence[Picture]],
        prompts: Sequence[Sample],
        image_places: Packing,
        shape: Shape,
    ) -> HeldOut:
        pixels = [
            [self._pictures.pixels(picture, place, image) for image, picture in enumerate(pictures)]
            for place, pictures in zip(places, chosen, strict=True)
        ]
        patches = (self._patches(each) for of_sample in pixels for each in of_sample)
        own_rows = Packing(len(prompts), tuple(range(len(prompts))), (0,) * len(prompts))
        leaves: dict[str, NDArray] = text_leaves(prompts, own_rows, shape)
        leaves["positions"][:] = np.arange(shape.length)
        leaves["segments"][:] = 1
        leaves["targets"][:] = 0
        leaves["weights"][:] = 0
        leaves["image_index"] = index_leaf(prompts, own_rows, image_places, shape, self.config.merge)
        leaves["patches"] = patches_leaf(patches, image_places, shape, self._format)
        leaves |= place_leaves(prompts, image_places, shape, self._format)
        asked = [slice(self._first_asked(pictures), None) for pictures in chosen]
        return HeldOut(
            leaves=leaves,
            starts=np.array([prompt.length for prompt in prompts], np.int32),
            words=[
                tuple(picture.word for picture in pictures[part]) for pictures, part in zip(chosen, asked, strict=True)
            ],
            pictures=[of_sample[part] for of_sample, part in zip(pixels, asked, strict=True)],
        )
