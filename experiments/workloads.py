"""Named workloads: samples drawn from published distributions, as durations of every task and pairs that do not exist.

``sft-single``
    single-image instruction tuning, so many samples per microbatch, each by itself;
``sft-packed``
    the same samples packed into rows of 4,096 tokens, one row per microbatch;
``interleaved``
    documents of text and images of any size, 6% of them without images.

:mod:`experiments.sample_lengths` has the distributions and their sources. A task takes time in proportion to its
operations in a named pair of models (:mod:`rrfp_jax.costs.flops`), the encoder's and the decoder's alike, scaled so
that the mean forward of a decoder's chunk takes the given time; nothing is padded. Layers are cut so that chunks cost
about the same on average; the projector belongs to the decoder's first chunk, the head to its last. An encoder has no
tasks for a microbatch without images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from experiments.sample_lengths import Sample, interleaved_samples, sft_samples
from rrfp_jax.commands.studies import GivenDurations, ModelGraph
from rrfp_jax.core import Order
from rrfp_jax.costs.flops import Flops, TaskFlops, pairs
from rrfp_jax.data.balancing import MicrobatchOrders, balanced, in_places, samples_in_order, uneven_shares
from rrfp_jax.data.buckets import pack_rows
from rrfp_jax.models.presets import ModelPair
from rrfp_jax.schedules import absences
from rrfp_jax.simulation.costs import Durations

ROW_TOKENS = 4096
"""Tokens of a row of packed samples."""
DEFAULT_SAMPLES = 2
"""Default number of samples of a microbatch."""

Microbatch = tuple[Sample, ...]
Steps = list[list[Microbatch]]

_SOURCES: dict[str, Callable[[np.random.Generator], Iterator[Sample]]] = {
    "sft-single": sft_samples,
    "sft-packed": sft_samples,
    "interleaved": interleaved_samples,
}
WORKLOADS = tuple(_SOURCES)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Samples to draw, and the models they are for. Raises ValueError for a name or a number that means nothing."""

    name: str
    pair: ModelPair
    num_steps: int
    num_microbatches: int
    samples: int | None = None
    """Mean samples of a microbatch; None: two, or in ``sft-packed``, which takes nothing else, as many as have room."""
    is_balanced: bool = True
    """Whether each step's samples are put into microbatches so that the dearest costs least; else as they come."""
    ends_for: int | None = None
    """Stages whose fill and drain short microbatches shorten, where microbatches are balanced and :func:`in_best_order`
    orders them; None: all of them cost about the same."""
    mean_forward_ms: float = 10.0
    """Mean milliseconds of the forward of a decoder's chunk."""
    encoder_trains: bool = True
    """Whether the encoder trains; else it runs F alone, and costs as much less."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ValueError(f"there is no workload {self.name!r}: the workloads are {', '.join(WORKLOADS)}")
        if self.is_packed and self.samples is not None:
            raise ValueError(f"{self.name} packs as many samples as have room: leave samples out, or take sft-single")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples is {self.samples}: give at least 1 per microbatch")
        if not 0 < self.mean_forward_ms < np.inf:
            raise ValueError(f"mean-forward-ms is {self.mean_forward_ms}: give a positive number of milliseconds")
        if self.num_steps < 1 or self.seed < 0:
            raise ValueError(f"steps is {self.num_steps} and workload-seed {self.seed}: give at least 1 and 0")

    @property
    def is_packed(self) -> bool:
        return self.name == "sft-packed"

    def steps(self) -> Steps:
        """Microbatches of every step: the same samples per step whether balanced or not."""
        source = _SOURCES[self.name](np.random.default_rng(self.seed))
        return [self._packed(source) if self.is_packed else self._grouped(source) for _ in range(self.num_steps)]

    def _grouped(self, source: Iterator[Sample]) -> list[Microbatch]:
        samples = list(islice(source, self.num_microbatches * (self.samples or DEFAULT_SAMPLES)))
        if self.is_balanced:
            groups = balanced([self._cost(sample) for sample in samples], self.num_microbatches, shares=self._shares)
        else:
            groups = samples_in_order(len(samples), self.num_microbatches)
        return [tuple(samples[index] for index in group) for group in groups]

    def _packed(self, source: Iterator[Sample]) -> list[Microbatch]:
        """Returns as many samples as the rows of a step have room for; the one too many is left out."""
        samples: list[Sample] = []
        while True:
            more = [*samples, next(source)]
            if pack_rows([sample.tokens for sample in more], ROW_TOKENS).num_rows > self.num_microbatches:
                break
            samples = more
        rows = pack_rows([sample.tokens for sample in samples], ROW_TOKENS).rows
        groups = [[index for index, row in enumerate(rows) if row == m] for m in range(self.num_microbatches)]
        if self.is_balanced:
            groups = self._exchanged(samples, groups)
        return [tuple(samples[index] for index in group) for group in groups]

    def _exchanged(self, samples: list[Sample], groups: list[list[int]]) -> list[list[int]]:
        """Returns rows of about the same cost, where they have the room; else the rows as they are packed."""

        def fits(members: Sequence[int]) -> bool:
            return sum(samples[index].tokens for index in members) <= ROW_TOKENS

        found = balanced([self._cost(sample) for sample in samples], len(groups), fits=fits, shares=self._shares)
        return found if all(map(fits, found)) else groups

    @property
    def _shares(self) -> list[float] | None:
        return None if self.ends_for is None else uneven_shares(self.ends_for, self.num_microbatches)

    def _cost(self, sample: Sample) -> float:
        """Returns the operations of a sample in both models, of all tasks."""
        work = Work.of(sample)
        encoder, decoder = self.pair.encoder, self.pair.decoder
        trained = decoder.whole(work.tokens, work.token_pairs) + self.pair.projector.whole(work.features)
        return trained.trained + self.of_encoder(encoder.whole(work.patches, work.patch_pairs))

    def of_encoder(self, flops: Flops) -> float:
        """Returns the operations of all tasks of some of the encoder's layers."""
        return sum(flops.tasks(has_backward=self.encoder_trains))


class Work(NamedTuple):
    """Sizes that the operations of a microbatch depend on."""

    patches: float
    patch_pairs: float
    features: float
    tokens: float
    token_pairs: float

    @classmethod
    def of(cls, *samples: Sample) -> "Work":
        """Returns the work of some samples, none of which attends to another; nor does an image to another one."""
        return cls(
            patches=sum(sample.patches for sample in samples),
            patch_pairs=pairs(patches for sample in samples for patches in sample.images),
            features=sum(sample.features for sample in samples),
            tokens=sum(sample.tokens for sample in samples),
            token_pairs=pairs(sample.tokens for sample in samples),
        )


class Cut(NamedTuple):
    """Layers of each chunk; the projector goes with the decoder's first, the head with its last."""

    encoder: tuple[int, ...]
    decoder: tuple[int, ...]
    dearest: float
    """Mean operations of the dearest chunk."""


def cut_layers(workload: Workload, mean: Work, num_encoder_chunks: int, num_decoder_chunks: int) -> Cut:
    """Cuts both models so that the dearest chunk costs least on average; raises ValueError with too few layers."""
    pair, of_encoder = workload.pair, workload.of_encoder
    for what, layers, chunks in (
        ("encoder", pair.encoder.num_layers, num_encoder_chunks),
        ("decoder", pair.decoder.num_layers, num_decoder_chunks),
    ):
        if chunks > layers:
            raise ValueError(f"the {what} has {layers} layers, which do not make {chunks} chunks: give it fewer")
    encoder_layer = of_encoder(pair.encoder.layer(mean.patches, mean.patch_pairs))
    decoder_layer = pair.decoder.layer(mean.tokens, mean.token_pairs).trained
    first = [of_encoder(pair.encoder.patches(mean.patches)), *[0.0] * (num_encoder_chunks - 1)]
    ends = [0.0] * num_decoder_chunks
    ends[0] += pair.projector.whole(mean.features).trained
    ends[-1] += pair.decoder.head(mean.tokens).trained
    encoder, most = _dealt(pair.encoder.num_layers, encoder_layer, first)
    decoder, most_decoder = _dealt(pair.decoder.num_layers, decoder_layer, ends)
    return Cut(encoder, decoder, max(most, most_decoder))


def _dealt(num_layers: int, layer: float, loads: list[float]) -> tuple[tuple[int, ...], float]:
    """Deals out equal layers, each to the cheapest chunk, at least one to each. Returns counts and the largest load."""
    counts = [1] * len(loads)
    loads = [load + layer for load in loads]
    for _ in range(num_layers - len(counts)):
        cheapest = min(range(len(loads)), key=loads.__getitem__)
        counts[cheapest] += 1
        loads[cheapest] += layer
    return tuple(counts), max(loads)


def best_encoder_stages(workload: Workload, mean: Work, num_stages: int) -> int:
    """Returns how many of the stages the encoder takes so that the dearest chunk costs least."""
    most = min(num_stages - 1, workload.pair.encoder.num_layers)
    least = max(1, num_stages - workload.pair.decoder.num_layers)
    if most < least:
        raise ValueError(f"{num_stages} stages do not hold an encoder and a decoder: give more stages, or fewer")
    return min(range(least, most + 1), key=lambda n: cut_layers(workload, mean, n, num_stages - n).dearest)


def mean_work(steps: Steps) -> Work:
    """Returns the mean work of a microbatch."""
    works = [Work.of(*microbatch) for step in steps for microbatch in step]
    return Work(*(sum(column) / len(works) for column in zip(*works, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Workload on a graph."""

    durations: GivenDurations
    cut: Cut
    spread: "Spread"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Spread of microbatches: standard deviation over mean, of the operations of whole encoder and decoder."""

    encoder_cv: float
    decoder_cv: float
    dearest_over_mean: float
    """Ratio of a step's dearest microbatch, encoder and decoder together, to its mean one; mean over the steps."""
    without_images: float
    """Fraction of the microbatches without images."""


def draw(workload: Workload, model: ModelGraph, steps: Steps) -> Drawn:
    """Returns durations [steps, chunks, microbatches, 3] and absent pairs of a workload of these ``steps``.

    Raises ValueError unless the graph has one encoder, with no more chunks than it has layers, and likewise a decoder.
    """
    if len(model.encoders) != 1:
        raise ValueError(f"workloads have one encoder, of images, and the graph has {len(model.encoders)}: give one")
    (encoder,), decoder = model.encoders, model.decoder
    cut = cut_layers(workload, mean_work(steps), len(encoder), len(decoder))
    flops = np.array([[_of_chunks(workload.pair, model, cut, Work.of(*m)) for m in step] for step in steps])
    flops = flops.swapaxes(1, 2)  # [steps, chunks, microbatches, 3]
    durations_ms: Durations = flops * (workload.mean_forward_ms / flops[:, decoder.start :, :, 0].mean())
    absent = []
    for step in steps:
        without = [m for m, samples in enumerate(step) if not any(sample.images for sample in samples)]
        absent.append(absences((chunk, m) for chunk in encoder for m in without))
    return Drawn(
        durations=GivenDurations(durations_ms, absent if any(absent) else ()),
        cut=cut,
        spread=_spread(flops, encoder.stop),
    )


def in_best_order(durations: GivenDurations, order: Order) -> GivenDurations:
    """Returns the durations with each step's microbatches in the best order that is found for this order of tasks."""
    orders, absent = MicrobatchOrders(order), list(durations.absent) or [()] * durations.num_steps
    steps = durations.durations_ms.copy()
    for step, costs in enumerate(durations.durations_ms):
        chosen = orders.choose(costs, absent[step])
        if chosen is not None:
            steps[step] = costs[:, chosen.order]
            absent[step] = in_places(absent[step], chosen.order)
    return GivenDurations(steps, absent if any(absent) else ())


def _of_chunks(pair: ModelPair, model: ModelGraph, cut: Cut, work: Work) -> list[TaskFlops]:
    """Returns the operations of one microbatch in every chunk."""
    encoder_layer = pair.encoder.layer(work.patches, work.patch_pairs)
    decoder_layer = pair.decoder.layer(work.tokens, work.token_pairs)
    chunks = [encoder_layer * count for count in cut.encoder] + [decoder_layer * count for count in cut.decoder]
    first = len(cut.encoder)
    chunks[first] += pair.projector.whole(work.features)
    chunks[-1] += pair.decoder.head(work.tokens)
    graph = model.graph
    tasks = [
        flops.tasks(trains=graph.trains(chunk), has_backward=graph.has_backward(chunk))
        for chunk, flops in enumerate(chunks)
    ]
    embedding = pair.encoder.patches(work.patches)  # no input of it needs a gradient
    tasks[0] = tasks[0]._replace(
        forward=tasks[0].forward + embedding.forward,
        weight_gradient=tasks[0].weight_gradient + (embedding.with_parameters if graph.trains(0) else 0.0),
    )
    return tasks


def _spread(flops: Durations, first_of_decoder: int) -> Spread:
    forward = flops[..., 0]
    encoder, decoder = forward[:, :first_of_decoder].sum(axis=1), forward[:, first_of_decoder:].sum(axis=1)
    whole = flops.sum(axis=(1, 3))
    return Spread(
        encoder_cv=float(encoder.std() / encoder.mean()),
        decoder_cv=float(decoder.std() / decoder.mean()),
        dearest_over_mean=float((whole.max(axis=1) / whole.mean(axis=1)).mean()),
        without_images=float((encoder == 0).mean()),
    )
