"""From the samples of a step to its microbatches, in shapes that are known before the first step.

Which samples share a microbatch is decided first, by their costs alone; then each microbatch takes the smallest bucket
that holds it. The buckets are chosen by a survey of the first steps, for the least padding, and the largest is one that
holds every microbatch that can come: as many samples as are cut in order, each as large as the largest. Balancing
keeps within it. So nothing is ever outside the buckets, and they follow from data and configuration alone.

Balanced microbatches cost about the same but for their padding. Those of each replica come in the order of a hill, as
the cheapest fill and drain a pipeline fastest. Groups made uneven for this would gain less than buckets then pad.

Where stages have meshes, sizes are padded further, up to sizes that these divide. Which samples share a microbatch and
a row does not depend on it: a run may go on in another layout.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rrfp_jax.data.balancing import Groups, balanced, hill, samples_in_order, spread_by_cost
from rrfp_jax.data.buckets import (
    CutSizes,
    Packing,
    SizePair,
    best_buckets,
    most_rows,
    occurring_pairs,
    pack_rows,
    rounded_up,
    smallest_fitting,
)
from rrfp_jax.data.config import ImageTextConfig
from rrfp_jax.data.dataset import Batch, BucketSpecs, Reads
from rrfp_jax.data.packing import PatchFormat, Sample, Shape, image_leaves, leaf_specs, text_leaves

Cost = Callable[[int, Sequence[int]], float]
"""(tokens, patches of each image) -> the cost of a sample, a positive number."""
Patches = Callable[[int, int], NDArray[Any]]
"""(number of the sample in its step, number of the image in it) -> its patches ``[patches, patch_dim]``."""
_MULTIPLE = 8
"""Lengths of rows are multiples of this."""


class Limits(NamedTuple):
    """The largest that data can be, over any ``microbatch_size`` samples."""

    longest: int
    """Tokens of the longest sample."""
    tokens: int
    """Tokens of all samples."""
    largest_image: int
    """Patches of the largest image; 0: there are no images."""
    images: int
    """Number of images."""
    patches: int
    """Patches of all images."""
    has_text_only: bool
    """Whether a microbatch may have no image."""


class Microbatch(NamedTuple):
    """Some of a step's samples, and their places in the rows."""

    members: list[int]
    places: Packing
    image_places: Packing
    size: SizePair
    """The size that it needs: rows with ``pack``, else the length of rows; and rows of patches."""


class Batching:
    """Divides steps into microbatches.

    Args:
        survey: the samples of the first steps.
        cost: the cost of a sample; None: a token and a patch cost the same.
        cut: the numbers of which the sizes of microbatches are multiples.
        num_replicas: the number of replicas that share the microbatches.

    Attributes: ``shapes``, all that a microbatch can have, ascending; ``length`` of the longest rows, in tokens, and
    ``image_length``, in patches.
    Raises ValueError, with the remedy, where samples or images do not fit into the rows.
    """

    def __init__(
        self,
        config: ImageTextConfig,
        patch_format: PatchFormat,
        limits: Limits,
        survey: Sequence[Sequence[Sample]],
        cost: Cost | None = None,
        *,
        cut: CutSizes | None = None,
        num_replicas: int = 1,
    ) -> None:
        self._config, self._format, self._cut = config, patch_format, cut or CutSizes()
        self._share = -(-config.num_microbatches // num_replicas)
        self._cost: Cost = cost if cost is not None else lambda tokens, patches: tokens + sum(patches)
        self.length = _row_length(config.length, limits.longest, "length", "tokens, the longest sample", _MULTIPLE)
        block = patch_format.merge**2
        if config.image_length is not None and config.image_length % block:
            raise ValueError(
                f"image_length is {config.image_length}: give a multiple of {block}, the patches of a feature"
            )
        self.image_length = _row_length(
            config.image_length, limits.largest_image, "image_length", "patches, the largest image", block
        )
        # A size that holds any microbatch cut in order.
        num, text = config.microbatch_size, self.length
        if config.pack:
            text = most_rows(num, longest=limits.longest, total=limits.tokens, capacity=self.length)
        images = most_rows(
            limits.images, longest=limits.largest_image, total=limits.patches, capacity=self.image_length
        )
        self._largest = (text, images)
        sizes = [each.size for samples in survey for each in self.divide(samples)]
        self._pairs = self._choose(sizes, has_text_only=limits.has_text_only)
        self.shapes = [self._shape(pair) for pair in self._pairs]

    @cached_property
    def buckets(self) -> list[BucketSpecs]:
        """All shapes of a microbatch as leaves."""
        return [leaf_specs(shape, self._format) for shape in self.shapes]

    def _choose(self, sizes: Sequence[SizePair], *, has_text_only: bool) -> tuple[SizePair, ...]:
        """Returns the buckets for microbatches of these sizes, and for the largest that may come."""
        config, (text, images) = self._config, self._largest
        multiple = self._cut.rows if config.pack else lcm(_MULTIPLE, self._cut.length)
        texts = best_buckets([size[0] for size in sizes], config.text_buckets, multiple=multiple, largest=text)
        rows = [size[1] for size in sizes if size[1]]
        image_rows: tuple[int, ...] = ()
        if images:
            image_rows = best_buckets(rows, config.image_buckets, multiple=self._cut.image_rows, largest=images)
        always = [(text, images)] + ([(text, 0)] if has_text_only else [])
        return occurring_pairs(sizes, texts, image_rows, always=always)

    def _shape(self, pair: SizePair) -> Shape:
        cut, image_length = self._cut, self.image_length if pair[1] else 0
        if self._format.is_packed:  # an image that fills its row has as many patches as the encoder knows
            image_length = rounded_up(image_length, cut.image_length * self._format.merge**2)
        if self._config.pack:
            return Shape(pair[0], rounded_up(self.length, cut.length), pair[1], image_length)
        return Shape(rounded_up(self._config.microbatch_size, cut.rows), pair[0], pair[1], image_length)

    def divide(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """Returns the microbatches of a step, in the order in which replicas share them."""
        num_groups = self._config.num_microbatches
        if not self._config.balance:
            return [self._microbatch(samples, members) for members in samples_in_order(len(samples), num_groups)]
        costs = [self._cost(sample.length, sample.patches) for sample in samples]
        groups = self._gathered(samples, costs) if self._config.gather_text else None
        if groups is None:
            groups = self._balanced_part(samples, costs, range(len(samples)), num_groups)
        order = spread_by_cost([sum(costs[member] for member in group) for group in groups])
        microbatches = [self._microbatch(samples, groups[group]) for group in order]
        padded, found = [self._padded_cost(each.size) for each in microbatches], list[Microbatch]()
        for first in range(0, num_groups, self._share):
            found += [microbatches[first + number] for number in hill(padded[first : first + self._share])]
        return found

    def _padded_cost(self, size: SizePair) -> float:
        """Returns the cost of a microbatch whose rows are full, as programs run it."""
        num_rows, length = (size[0], self.length) if self._config.pack else (self._config.microbatch_size, size[0])
        return self._cost(length, [self.image_length] * size[1]) + (num_rows - 1) * self._cost(length, ())

    def _gathered(self, samples: Sequence[Sample], costs: Sequence[float]) -> Groups | None:
        """Returns groups of which some are text only, about as many as text costs; None where that comes to nothing.

        They take as much as fits; the rest is balanced with the samples that have images.
        """
        num_groups = self._config.num_microbatches
        text = [number for number, sample in enumerate(samples) if not sample.images]
        num_text = round(num_groups * sum(costs[number] for number in text) / sum(costs))
        filled: Groups = []
        for number in text:
            if filled and self._fits(samples, [*filled[-1], number]):
                filled[-1].append(number)
            elif len(filled) < num_text:
                filled.append([number])
        if not self._config.pack:  # all rows are to be taken
            filled = [group for group in filled if len(group) == self._config.microbatch_size]
        taken = sorted(chain.from_iterable(filled))
        others = sorted({*range(len(samples))} - {*taken})
        num_others = num_groups - len(filled)
        if not filled or bool(others) != bool(num_others) or len(others) < num_others:
            return None
        even = self._balanced_part(samples, costs, taken, len(filled))
        groups = even if all(self._fits(samples, group) for group in even) else filled
        if others:
            groups = groups + self._balanced_part(samples, costs, others, num_others)
        return groups if all(self._fits(samples, group) for group in groups) else None

    def _balanced_part(
        self, samples: Sequence[Sample], costs: Sequence[float], part: Sequence[int], num_groups: int
    ) -> Groups:
        def fits(members: Sequence[int]) -> bool:
            return self._fits(samples, [part[member] for member in members])

        groups = balanced([costs[number] for number in part], num_groups, fits=fits)
        return [[part[member] for member in group] for group in groups]

    def _fits(self, samples: Sequence[Sample], members: Sequence[int]) -> bool:
        if not self._config.pack and len(members) > self._config.microbatch_size:
            return False
        text, images = self._microbatch(samples, members).size
        return text <= self._largest[0] and images <= self._largest[1]

    def _microbatch(self, samples: Sequence[Sample], members: Sequence[int]) -> Microbatch:
        lengths = [samples[member].length for member in members]
        patches = [size for member in members for size in samples[member].patches]
        image_places = pack_rows(patches, self.image_length)
        if self._config.pack:
            places = pack_rows(lengths, self.length)
            text = places.num_rows
        else:
            places = Packing(len(members), tuple(range(len(members))), (0,) * len(members))
            text = max(lengths)
        return Microbatch(list(members), places, image_places, (text, image_places.num_rows))

    def leaves(self, samples: Sequence[Sample], patches: Patches, reads: Reads | None) -> Batch:
        """Returns the batch of these samples; ``patches`` makes those of (number of the sample, number of the image in
        it).

        It is called only for the patches that ``reads`` asks for. All other leaves are always whole: they are small,
        and describe the contents of the batch.
        """
        made: list[dict[str, Any]] = []
        for number, (members, places, image_places, size) in enumerate(self.divide(samples)):
            bucket = self._pairs.index(smallest_fitting(size, self._pairs))
            shape, own = self.shapes[bucket], [samples[member] for member in members]
            leaves: dict[str, Any] = text_leaves(own, places, shape, self._format)
            if shape.image_rows:
                leaves["patches"] = self.buckets[bucket]["patches"]  # the shape, where they are not made
                of_images = None
                if reads is None or number in reads.get("patches", ()):
                    of_images = (patches(each, image) for each in members for image in range(len(samples[each].images)))
                leaves |= image_leaves(own, places, image_places, shape, self._format, patches=of_images)
            made.append(leaves)
        names = dict.fromkeys(chain(*self.buckets))
        return {name: [leaves.get(name) for leaves in made] for name in names}


def _row_length(given: int | None, needed: int, name: str, what: str, multiple: int) -> int:
    if given is None:
        return max(multiple, -(-needed // multiple) * multiple)
    if given < needed:
        raise ValueError(
            f"{name} is {given}, but rows must hold {needed} {what}: give at least that, or smaller samples"
        )
    return given
