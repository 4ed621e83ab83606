"""The one form of costs: of a layer of each type, of a model that is a sequence of such layers, and of all ways to run
it.

The costs of a chunk are the sums of those of its layers. Ends of the model are layers too: an embedding and a head are
types of their own, of which there is one each. Whatever the source (measured, from compiled programs, or worked out
from a device's record), planning sees this form alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields

if TYPE_CHECKING:
    from rrfp_jax.simulation.costs import Durations


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """One layer of a type, for one microbatch, on the devices of one stage. Raises ValueError for negative numbers."""

    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    backward_ms: float | None = None
    """Milliseconds of the whole backward as one task; None: the sum of its halves."""
    update_ms: float = 0.0
    """Milliseconds of the optimizer, once per step."""
    fixed_bytes: int = 0
    """On each device all the time: parameters, gradient accumulators, optimizer state."""
    gradient_bytes: int = 0
    """Bytes of the parameters' gradient, which replicas sum up once per step."""
    stash_bytes: int = 0
    """Per microbatch, from F to B or I."""
    owed_bytes: int = 0
    """Per microbatch, from I to W where the backward is split."""
    kept_bytes: int = 0
    """Per microbatch, from F to B or I, beside the stash, where it is the first layer of a chunk: the part of its input
    that the chunk keeps however many layers follow."""
    temporaries_bytes: int = 0
    """Bytes while one of its programs runs; a chunk needs those of its largest layer."""
    more_temporaries_bytes: int = 0
    """Bytes that the programs of a chunk need beyond that for each layer."""
    split_temporaries_bytes: int | None = None
    """The same where the backward is split; None: as much."""
    step_temporaries_bytes: int = 0
    """Bytes while the optimizer's program runs, once per step; those of a chunk's layers add up."""
    remade_bytes: int = 0
    """Bytes per microbatch of the output that the layer behind it in a chunk makes again, in place of its stash."""
    output_bytes: int = 0
    """Bytes per microbatch that it hands on; as many come back as a gradient."""
    flops: float = 0.0
    """Operations of the model, forward and backward of one microbatch, on all devices of the stage; rematerialisation
    does not count."""

    def __post_init__(self) -> None:
        check_fields(self, NOT_NEGATIVE, *self.__dataclass_fields__)

    def added_bytes(self, *, split: bool, is_first: bool = False) -> int:
        """Returns the bytes of temporaries that each layer of a chunk adds to those of the largest one.

        In the first chunk of a model W does the whole backward."""
        halves = self.more_temporaries_bytes if self.split_temporaries_bytes is None else self.split_temporaries_bytes
        if not split:
            return self.more_temporaries_bytes
        return max(halves, self.more_temporaries_bytes) if is_first else halves

    def task_ms(self, *, split: bool) -> tuple[float, float, float]:
        """F, input gradient and weight gradient, whose sum is the whole backward where that is not split."""
        halves_ms = self.input_gradient_ms + self.weight_gradient_ms
        scale = 1.0 if split or not halves_ms or self.backward_ms is None else self.backward_ms / halves_ms
        return self.forward_ms, self.input_gradient_ms * scale, self.weight_gradient_ms * scale

    def work_ms(self, *, split: bool) -> float:
        """All tasks of one microbatch."""
        return sum(self.task_ms(split=split))

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        """Returns the costs of a layer with that of analytic costs beside it, such as its adapters."""
        return LayerCosts(
            **{name: (getattr(self, name) or 0) + (getattr(other, name) or 0) for name in _ADDED},
            backward_ms=self.backward_ms,
            split_temporaries_bytes=self.split_temporaries_bytes,
        )

    def at_speed(self, speed: float) -> "LayerCosts":
        """Returns the costs on a device that is so many times as fast."""
        if speed == 1:
            return self
        backward_ms = None if self.backward_ms is None else self.backward_ms / speed
        times_ms = {name: getattr(self, name) / speed for name in _COMPUTED}
        return replace(self, backward_ms=backward_ms, **times_ms)


_ADDED = [name for name in LayerCosts.__dataclass_fields__ if name not in ("backward_ms", "split_temporaries_bytes")]
_COMPUTED = ("forward_ms", "input_gradient_ms", "weight_gradient_ms", "update_ms")


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """The times of messages from one stage to another. Raises ValueError for numbers that no link has."""

    latency_ms: float = 0.0
    gb_per_s: float | None = None
    """10^9 bytes per second; None: size does not matter."""
    control_ms: float = 0.0
    """Milliseconds of a message without tensors."""
    replicas_gb_per_s: float | None = None
    """Between the replicas of a stage, for the sums of gradients; None: as between stages."""
    host_gb_per_s: float | None = None
    """From a device to pinned memory of its host, or back; None: not known, and no activation moves there."""

    def __post_init__(self) -> None:
        check_fields(self, NOT_NEGATIVE, "latency_ms", "control_ms")
        check_fields(self, POSITIVE, "gb_per_s", "replicas_gb_per_s", "host_gb_per_s")

    def transfer_ms(self, num_bytes: float) -> float:
        """Returns the milliseconds of a tensor of ``num_bytes``."""
        return self.latency_ms + (0.0 if self.gb_per_s is None else num_bytes / self.gb_per_s / 1e6)

    def sum_ms(self, num_bytes: float, replicas: int) -> float:
        """Returns the milliseconds of a sum of gradients over replicas, as a ring does it: each device sends and
        receives ``2 (n - 1) / n`` of the bytes (Patarasuk and Yuan, 2009)."""
        rate = self.replicas_gb_per_s or self.gb_per_s
        if replicas == 1 or not num_bytes:
            return 0.0
        bytes_ms = 0.0 if rate is None else 2 * (replicas - 1) / replicas * num_bytes / rate / 1e6
        return 2 * (replicas - 1) * self.latency_ms + bytes_ms


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """A device as it is. Raises ValueError for numbers that no device has."""

    speed: float = 1.0
    """How many times as fast it computes as the device for which the costs of layers are."""
    bytes: int | None = None
    """Memory; None: as the costs say."""
    host_gb_per_s: float | None = None
    """To pinned memory of its host, or back; None: as the costs' links say."""
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "speed", "bytes", "host_gb_per_s")


@dataclass(frozen=True, kw_only=True)
class MachineCosts:
    """The devices of a machine that are not alike, and the links between them. Raises ValueError for matrices that are
    not square, and for numbers that no link has."""

    devices: tuple[DeviceCosts, ...]
    latency_ms: tuple[tuple[float, ...], ...] = ()
    """[sending device][receiving device]; empty: as the costs' links say. The diagonal does not count."""
    gb_per_s: tuple[tuple[float | None, ...], ...] = ()
    """The same of bandwidths, in 10^9 bytes per second; None: size does not matter."""

    def __post_init__(self) -> None:
        number = len(self.devices)
        if not number:
            raise ValueError("the machine has no device: name at least one")
        for name, rule in (("latency_ms", NOT_NEGATIVE), ("gb_per_s", POSITIVE)):
            rows = getattr(self, name)
            if rows and {len(rows), *map(len, rows)} != {number}:
                raise ValueError(
                    f"{name} has {len(rows)} rows of {', '.join(map(str, sorted({*map(len, rows)})))} numbers: give "
                    f"{number} rows of {number}, as there are {number} devices"
                )
            for source, row in enumerate(rows):
                for target, value in enumerate(row):
                    if source != target and value is not None and not rule.holds(value):
                        raise ValueError(
                            f"{name} from device {source} to device {target} is {value}: give {rule.words}"
                        )

    def link(self, sources: Sequence[int], targets: Sequence[int], links: LinkCosts) -> LinkCosts:
        """Returns the slowest link from one of some devices to another of others; ``links`` say the rest."""
        pairs = [(a, b) for a in sources for b in targets if a != b]
        latencies = [self.latency_ms[a][b] for a, b in pairs if self.latency_ms]
        rates = [rate for a, b in pairs if self.gb_per_s and (rate := self.gb_per_s[a][b]) is not None]
        to_host = [self.devices[a].host_gb_per_s or links.host_gb_per_s for a in sources]
        return LinkCosts(
            latency_ms=max(latencies, default=links.latency_ms),
            gb_per_s=min(rates, default=None if self.gb_per_s and pairs else links.gb_per_s),
            control_ms=links.control_ms,
            replicas_gb_per_s=None if self.gb_per_s else links.replicas_gb_per_s,
            host_gb_per_s=None if None in to_host else min(rate for rate in to_host if rate),
        )


_SHARE = FieldRule("a share between 0 and 1", lambda value: 0 <= value <= 1)
NOISE_KINDS = ("F", "I", "W")
"""Kinds of task along the last axis of durations."""
MOST_SIGMA = 5
"""The largest sigma of a logarithm; with more, one task in a hundred takes longer than all others together."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Independent factors of every task, with mean 1 each. Raises ValueError for numbers that no distribution has."""

    sigma: Mapping[str, float] = field(default_factory=dict)
    """Sigma of the logarithm, by kind F, I and W; a kind that is not named does not vary."""
    tail: float = 0.0
    """The share of tasks that take ``tail_factor`` times as long."""
    tail_factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, _SHARE, "tail")
        check_fields(self, NOT_NEGATIVE, "tail_factor")
        for kind, sigma in self.sigma.items():
            if kind not in NOISE_KINDS or not 0 <= sigma <= MOST_SIGMA:
                raise ValueError(
                    f"sigma {sigma} of kind {kind!r}: give 0 to {MOST_SIGMA}, for {', '.join(NOISE_KINDS)}"
                )
        if not self.tail_mean > 0:
            raise ValueError(f"tail {self.tail}, {self.tail_factor}: no task takes any time, give a factor above 0")

    @classmethod
    def alike(cls, sigma: float) -> "Noise":
        """The same for all kinds, without a tail."""
        return cls(sigma=dict.fromkeys(NOISE_KINDS, sigma))

    @property
    def is_none(self) -> bool:
        """Whether nothing varies."""
        return not any(self.sigma.values()) and (not self.tail or self.tail_factor == 1)

    @property
    def tail_mean(self) -> float:
        """How many times as long tasks take for their tail."""
        return 1 + self.tail * (self.tail_factor - 1)

    def draws(self, durations_ms: "Durations", num_draws: int, rng: np.random.Generator) -> "Durations":
        """Returns ``num_draws`` noisy steps [draws, chunks, microbatches, 3] of the first step of ``durations_ms``."""
        sigmas = np.array([self.sigma.get(kind, 0.0) for kind in NOISE_KINDS])
        shape = (num_draws, *durations_ms.shape[1:])
        factors = np.exp(sigmas * rng.standard_normal(shape) - sigmas**2 / 2)
        if self.tail:
            factors *= np.where(rng.random(shape) < self.tail, self.tail_factor, 1.0) / self.tail_mean
        drawn: Durations = durations_ms[:1] * factors
        return drawn


NONE = "none"
HALVES = "attention", "mlp"
"""The parts of a decoder layer, between which a chunk may end; costs of a type that has any know those of its parts
too, by :func:`halves_of`."""


def halves_of(name: str) -> tuple[str, ...]:
    """Returns the names of the types of a layer's parts."""
    return tuple(f"{name}:{half}" for half in HALVES)


def is_half(name: str) -> bool:
    """Returns whether a type is of a part of a layer."""
    return name.endswith(tuple(f":{half}" for half in HALVES))


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The costs on one stage, where stages differ."""

    types: Mapping[str, LayerCosts]
    """The costs of each type of layer here."""
    links: tuple[LinkCosts, ...]
    """The link to each stage, and between the replicas of this one; the slowest of those that are used counts."""
    limit: int | None = None
    """Bytes of a device; None: not known."""
    speed: float = 1.0
    """The speed of the slowest replica."""
    remat: str = NONE
    devices: tuple[int, ...] = ()
    """Numbers of the devices in the machine."""
    speeds: tuple[float, ...] = ()
    """The speed of each replica, and below the link from each to each of the other stages', [stage][own][other], where
    stages have different numbers of replicas; empty: ``speed`` and ``links`` for all."""
    pairs: tuple[tuple[tuple[LinkCosts, ...], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model as the types of its layers in order, and the costs of each type.

    Raises ValueError, with the remedy, for a layer whose type has no costs, or a model without layers.
    """

    layers: tuple[str, ...]
    """The type of each layer, in the order in which a microbatch meets them, ends included."""
    types: Mapping[str, LayerCosts]
    ends: frozenset[int] = frozenset()
    """Layers behind which a chunk must end, as between an encoder and its decoder."""
    task_ms: float = 0.0
    """Milliseconds of every task beside its layers: the part of launching it that nothing hides."""
    links: LinkCosts = field(default_factory=LinkCosts)
    stages: tuple[StageCosts, ...] = ()
    """The costs on each stage; empty: ``types`` and ``links`` on all of them."""

    def __post_init__(self) -> None:
        check_fields(self, NOT_NEGATIVE, "task_ms")
        if not self.layers:
            raise ValueError("the costs name no layer: give the type of every layer of the model, in order")
        missing = [name for name in dict.fromkeys(self.layers) if name not in self.types]
        if missing:
            known = ", ".join(self.types) or "none"
            raise ValueError(f"the costs lack the layer type {missing[0]!r}: add it; those given are {known}")
        wrong = [end for end in self.ends if not 0 <= end < len(self.layers)]
        if wrong:
            raise ValueError(
                f"a chunk cannot end behind layer {wrong[0]} of {len(self.layers)}: use 0 or more, and less"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers, ends included."""
        return len(self.layers)

    def of(self, layer: int, stage: int = 0) -> LayerCosts:
        """The costs of a layer by its number; ``stage`` counts where stages differ."""
        return (self.stages[stage].types if self.stages else self.types)[self.layers[layer]]

    def link(self, source: int, target: int, replicas: tuple[int, int] | None = None) -> LinkCosts:
        """The link from one stage to another, of one to itself that between its replicas; or that between these two
        ``replicas`` of both."""
        if not self.stages:
            return self.links
        here = self.stages[source]
        if replicas is None or not here.pairs:
            return here.links[target]
        own, other = replicas
        return here.pairs[target][own][other]

    def in_halves(self, cut: Collection[int] | None = None) -> "ModelCosts":
        """Returns the costs with layers taken apart as far as their halves are known: those of these numbers, or
        all."""
        units = [
            halves_of(name) if (cut is None or at in cut) and self.types.keys() >= {*halves_of(name)} else (name,)
            for at, name in enumerate(self.layers)
        ]
        behind = list(accumulate(map(len, units)))
        layers = tuple(name for names in units for name in names)
        return replace(self, layers=layers, ends=frozenset(behind[end] - 1 for end in self.ends))

    def without_messages(self) -> "ModelCosts":
        """Returns the costs if messages between stages took no time; sums of gradients stay as they are."""

        def silent(links: LinkCosts) -> LinkCosts:
            rate = links.replicas_gb_per_s or links.gb_per_s
            return replace(links, latency_ms=0.0, gb_per_s=None, control_ms=0.0, replicas_gb_per_s=rate)

        stages = tuple(replace(each, links=tuple(map(silent, each.links)), pairs=()) for each in self.stages)
        return replace(self, links=silent(self.links), stages=stages)


class StageSetting(NamedTuple):
    """One way to run the stages of a model, for which there are costs."""

    microbatch_size: int = 1
    """Samples of a microbatch."""
    tensor: int = 1
    """Devices that share every layer."""
    remat: str = NONE
    """Name of the arrays that backwards compute again (:data:`rrfp_jax.costs.layer_sizes.REMAT_NAMES`)."""

    @property
    def words(self) -> str:
        """The setting in words, for messages."""
        return f"microbatch size {self.microbatch_size}, tensor {self.tensor}, remat {self.remat}"


def every_setting(sizes: Sequence[int], tensors: Sequence[int], remats: Sequence[str]) -> list[StageSetting]:
    """Returns every combination."""
    return [StageSetting(size, tensor, remat) for tensor in tensors for remat in remats for size in sizes]


@dataclass(frozen=True, kw_only=True)
class CostEntry:
    """The costs of the layer types in one way to run a stage."""

    types: Mapping[str, LayerCosts]
    microbatch_size: int = 1
    """Samples of a microbatch."""
    tensor: int = 1
    """Devices that share every layer."""
    remat: str = NONE
    """Name of the arrays that backwards compute again."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "microbatch_size", "tensor")

    @property
    def setting(self) -> StageSetting:
        """The way to run a stage."""
        return StageSetting(self.microbatch_size, self.tensor, self.remat)


@dataclass(frozen=True, kw_only=True)
class CostBook:
    """All that the planner knows about a model and the machine that it is to run on. Raises ValueError where entries
    lack a layer type, or say two things of one way to run."""

    layers: tuple[str, ...]
    """The type of each layer in order, ends included."""
    entries: tuple[CostEntry, ...]
    ends: frozenset[int] = frozenset()
    """Layers behind which a chunk must end."""
    links: LinkCosts = field(default_factory=LinkCosts)
    machine: MachineCosts | None = None
    """The devices and links one by one; None: all are alike."""
    noise: Noise = field(default_factory=Noise)
    task_ms: float = 0.0
    """Milliseconds of every task beside its layers."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axes of every stage's mesh beside ``tensor``, with their sizes: those that all entries are for."""
    tokens_per_sample: float = 0.0
    """0: not known, so that no throughput in tokens is told."""
    device: str = ""
    """The device in words."""
    device_bytes: int | None = None
    """Memory of a device; None: not known."""
    device_flops: float | None = None
    """Peak operations per second of a device in the dtype that computes; None: not known."""
    source: str = ""
    """The source of the costs, in words."""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "device_bytes", "device_flops")
        check_fields(self, NOT_NEGATIVE, "task_ms", "tokens_per_sample")
        if not self.entries:
            raise ValueError("the costs have no entry: give those of at least one microbatch size")
        seen: set[StageSetting] = set()
        for entry in self.entries:
            words = entry.setting.words
            if entry.setting in seen:
                raise ValueError(f"two entries are for {words}: leave one out")
            seen.add(entry.setting)
            costs = self._model(entry)
            if not any(costs.of(layer).work_ms(split=True) for layer in range(costs.num_layers)):
                raise ValueError(f"no layer takes any time for {words}: give milliseconds above 0 to some")

    def at(self, *, microbatch_size: int, tensor: int = 1, remat: str = NONE) -> ModelCosts:
        """The costs of the model run so; raises ValueError, with those that there are, where no entry says so."""
        wanted = StageSetting(microbatch_size, tensor, remat)
        for entry in self.entries:
            if entry.setting == wanted:
                return self._model(entry)
        known = "; ".join(entry.setting.words for entry in self.entries)
        raise ValueError(f"no costs are known for {wanted.words}: take one of {known}, or profile it")

    def _model(self, entry: CostEntry) -> ModelCosts:
        return ModelCosts(
            layers=self.layers,
            types=entry.types,
            ends=self.ends,
            task_ms=self.task_ms,
            links=self.links,
        )
