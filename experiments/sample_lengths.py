"""Lengths of samples in published data sets, as distributions with their sources.

**Single-image instruction tuning** (``sft``): the lengths that OmniBal (arXiv 2407.20761; github.com/ModelTC/OmniBal,
Apache-2.0, lengths only) counted over four sets of InternVL-Chat's instruction data, 70,706 samples: tiles of 448 x 448
pixels, of which each is 1,024 patches of 14 pixels and 256 tokens, and tokens of text. Kept here are the shares of the
numbers of tiles and quantiles of the text; the median, the 95% quantile and the largest are those of all samples, the
others of some 180 in a row of each set. Between two quantiles lengths are equally likely, and tiles and text of one set
are taken as independent. Tiles and tokens of the mixture follow each other closely: a sample that is heavy for the
encoder is heavy for the decoder.

**Interleaved documents** (``interleaved``): images per document as in OBELICS (arXiv 2306.16527, section 4.1: 2.5 on
average, at most 30), drawn from a geometric distribution; text log-normal with its median of 677 and mean of 815
tokens; 6% without images, as in LLaVA-1.5's mixture (arXiv 2310.03744). Sizes of images follow the shares that
LAION-400M publishes (laion.ai/blog/laion-400-open-dataset): of the smaller side 51% have 256 pixels or more, 16% 512
and 2.3% 1,024; of the larger one 65%, 27% and 6.3%. Images keep their size, in patches of 14 pixels, 2 x 2 of
which become one token; both sides are drawn at the same quantile, and go from 128 to 1,536 pixels.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PATCHES_PER_TOKEN = 4
"""Number of patches, 2 x 2, that become one token of the decoder."""
PATCH_PIXELS = 14
TILE_PATCHES = 1024


class Sample(NamedTuple):
    """One sample: the patches of each of its images (none attends to another's), and its tokens of text."""

    images: tuple[int, ...]
    text_tokens: int

    @property
    def patches(self) -> int:
        """Number of patches of all images."""
        return sum(self.images)

    @property
    def features(self) -> int:
        """Tokens that the images take in the decoder."""
        return self.patches // PATCHES_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Number of tokens of text and images."""
        return self.text_tokens + self.features


class SampleSet(NamedTuple):
    """Lengths of one set of instruction data."""

    num_samples: int
    tile_shares: dict[int, float]
    """Shares of the samples by their number of tiles; they need not add up to 1 exactly."""
    text_quantiles: tuple[int, ...]
    """Tokens of text, at :data:`QUANTILES`."""


QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SFT_SETS = {
    "ai2d": SampleSet(12_413, {1: 0.47, 3: 0.30, 4: 0.05, 5: 0.19}, (40, 43, 48, 52, 57, 75, 115, 347)),
    "docvqa": SampleSet(10_211, {3: 0.19, 5: 0.81}, (45, 65, 142, 231, 350, 697, 848, 1258)),
    "chartqa": SampleSet(18_317, {1: 0.03, 3: 0.06, 5: 0.91}, (35, 40, 44, 66, 88, 218, 321, 552)),
    "synthdog_en": SampleSet(29_765, {3: 0.58, 5: 0.42}, (46, 62, 84, 110, 140, 216, 290, 503)),
}

MEAN_IMAGES, MOST_IMAGES = 2.5, 30
TEXT_ONLY = 0.06
TEXT_MEDIAN, TEXT_MEAN = 677, 815
SIDES = (128, 256, 512, 1024, 1536)
"""Pixels of a side. It lies between two of them with the shares below, and equally likely by ratio."""
SMALLER_SIDE, LARGER_SIDE = (0.49, 0.35, 0.137, 0.023), (0.35, 0.38, 0.207, 0.063)


def sft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields samples of the four sets, mixed in the proportions of their numbers, without end."""
    names = list(SFT_SETS)
    counts = np.array([SFT_SETS[name].num_samples for name in names], np.float64)
    while True:
        one = SFT_SETS[names[rng.choice(len(names), p=counts / counts.sum())]]
        shares = np.array(list(one.tile_shares.values()))
        tiles = int(rng.choice(list(one.tile_shares), p=shares / shares.sum()))
        text = float(np.interp(rng.random(), QUANTILES, one.text_quantiles))
        yield Sample((TILE_PATCHES,) * tiles, round(text))


def interleaved_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields documents of text with images of their own sizes, without end."""
    sigma = math.sqrt(2 * math.log(TEXT_MEAN / TEXT_MEDIAN))
    more_than_one = MEAN_IMAGES / (1 - TEXT_ONLY)
    while True:
        count = 0 if rng.random() < TEXT_ONLY else min(MOST_IMAGES, int(rng.geometric(1 / more_than_one)))
        images = tuple(_image_patches(rng) for _ in range(count))
        yield Sample(images, max(1, round(float(rng.lognormal(math.log(TEXT_MEDIAN), sigma)))))


def _image_patches(rng: np.random.Generator) -> int:
    """Returns the patches of an image whose sides are cut to whole blocks of 2 x 2 patches."""
    quantile = rng.random()
    block = 2 * PATCH_PIXELS
    sides = (_side(quantile, SMALLER_SIDE), _side(quantile, LARGER_SIDE))
    return PATCHES_PER_TOKEN * math.prod(max(1, int(side / block)) for side in sides)


def _side(quantile: float, shares: tuple[float, ...]) -> float:
    ends = np.cumsum((0.0, *shares))
    return float(np.exp(np.interp(quantile, ends / ends[-1], np.log(SIDES))))
