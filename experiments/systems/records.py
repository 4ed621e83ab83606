"""Devices, networks and the model that runs on them; times of a stage's forward and of a hop, and the systems compared.

The default is the middle one of the nine systems of a tabular study of schedules (arXiv 2605.24006), as far as it is
public. A forward's time is a roofline: the longer of its operations and its traffic to memory; a backward takes twice
as long, half for the input and half for the weights. A hop's time is Hockney's: a latency, and the bytes over the
bandwidth. The other systems have a device, a network or both that are ten times slower or faster.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields

_PART = FieldRule("a part above 0, up to 1", lambda value: 0 < value <= 1)
_STEP = 10.0
"""Factor between a level and the next one."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device that runs one stage.

    Raises ValueError on numbers that no device has.
    """

    tflops: float = 1000.0
    """Operations at its peak, 10^12 per second."""
    compute_efficiency: float = 1.0
    """The part of these that the model gets, up to 1."""
    memory_gb_per_s: float = 34_000.0
    """Bandwidth of its memory, 10^9 bytes per second."""
    memory_efficiency: float = 1.0
    """The part of that bandwidth that the model gets, up to 1."""
    memory_latency_us: float = 0.05
    """Latency of its memory, once per block, in microseconds."""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "tflops", "memory_gb_per_s")
        check_fields(self, _PART, "compute_efficiency", "memory_efficiency")
        check_fields(self, NOT_NEGATIVE, "memory_latency_us")

    def compute_ms(self, operations: float) -> float:
        return operations / (self.tflops * self.compute_efficiency * 1e9)

    def memory_ms(self, num_bytes: float) -> float:
        return self.memory_latency_us / 1e3 + num_bytes / (self.memory_gb_per_s * self.memory_efficiency * 1e6)

    def scaled(self, factor: float) -> "Device":
        """Returns a device that computes so many times as fast, with the same memory."""
        return replace(self, tflops=self.tflops * factor)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between two stages.

    Raises ValueError on numbers that no network has.
    """

    gb_per_s: float = 50.0
    """Bandwidth of each directed link, 10^9 bytes per second."""
    latency_us: float = 0.5
    """Latency of a message, in microseconds."""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "gb_per_s")
        check_fields(self, NOT_NEGATIVE, "latency_us")

    @property
    def latency_ms(self) -> float:
        return self.latency_us / 1e3

    def hop_ms(self, num_bytes: float) -> float:
        return self.latency_ms + num_bytes / (self.gb_per_s * 1e6)

    def scaled(self, factor: float) -> "Network":
        """Returns a network with so many times the bandwidth, and a latency shorter by as much."""
        return replace(self, gb_per_s=self.gb_per_s * factor, latency_us=self.latency_us / factor)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder of equal blocks, cut evenly over the stages.

    Raises ValueError on numbers that no model has.
    """

    blocks: int = 128
    """Transformer blocks of the whole model."""
    hidden: int = 4096
    """Width of the model; its feed-forward layers are four times as wide."""
    sequence: int = 4096
    """Tokens of a sequence."""
    sequences: int = 1
    """Sequences of a microbatch."""
    element_bytes: int = 2
    """Bytes of a weight and of an element of an activation."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "blocks", "hidden", "sequence", "sequences", "element_bytes")

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences

    @property
    def block_operations(self) -> float:
        """Operations of a block's forward: 24 h^2 per token, and 4 s h for attention over its sequence of s tokens."""
        return self.tokens * (24.0 * self.hidden**2 + 4.0 * self.sequence * self.hidden)

    @property
    def block_bytes(self) -> float:
        """Bytes that one block's forward moves: its 12 h^2 weights, and 38 activations of width h per token.

        The activations are those that its operations read and write, with attention that keeps no scores in memory.
        """
        return self.element_bytes * (12.0 * self.hidden**2 + 38.0 * self.tokens * self.hidden)

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation, or its gradient, from stage to stage."""
        return self.element_bytes * self.tokens * self.hidden


class Hop(NamedTuple):
    """A hop in forwards of a whole stage: all that the network is to a schedule."""

    ratio: float
    latency: float
    """Time of a message without bytes, such as an announcement."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One device and one network under one model."""

    network_level: str
    compute_level: str
    device: Device
    network: Network
    model: Model

    @property
    def name(self) -> str:
        return f"{self.network_level} network, {self.compute_level} compute"

    @cached_property
    def hop_ms(self) -> float:
        return self.network.hop_ms(self.model.message_bytes)

    @property
    def is_compute_bound(self) -> bool:
        """Whether operations take longer than memory."""
        return self._compute_ms >= self._memory_ms

    @property
    def _compute_ms(self) -> float:
        return self.device.compute_ms(self.model.block_operations)

    @property
    def _memory_ms(self) -> float:
        return self.device.memory_ms(self.model.block_bytes)

    def forward_ms(self, num_stages: int) -> float:
        """Returns the milliseconds of F of a whole stage; I and W take as long each."""
        return self.model.blocks / num_stages * max(self._compute_ms, self._memory_ms)

    def hop(self, num_stages: int) -> Hop:
        """Returns the hop, which is equal for systems that are equal to a schedule."""
        forward_ms = self.forward_ms(num_stages)
        return Hop(*(_rounded(ms / forward_ms) for ms in (self.hop_ms, self.network.latency_ms)))


def make_systems(
    device: Device, network: Network, model: Model, *, num_networks: int = 3, num_devices: int = 3
) -> tuple[System, ...]:
    """Returns all pairs of networks and devices, the slowest network with the slowest device first.

    Raises ValueError for a number of levels that has no middle.
    """
    for what, number in (("networks", num_networks), ("devices", num_devices)):
        if number < 1 or number % 2 == 0:
            raise ValueError(f"{number} levels of {what} have no middle one: give 1, 3 or another odd number")
    return tuple(
        System(
            network_level=network_level,
            compute_level=compute_level,
            device=device.scaled(compute_factor),
            network=network.scaled(network_factor),
            model=model,
        )
        for network_level, network_factor in _levels(num_networks)
        for compute_level, compute_factor in _levels(num_devices)
    )


def _levels(number: int) -> Iterator[tuple[str, float]]:
    """Yields names and factors, the slowest first."""
    words = {-1: "slow", 0: "mid", 1: "fast"}
    for place in range(number):
        power = place - number // 2
        factor = _STEP**power
        yield words.get(power, f"x{factor:g}"), factor


def _rounded(ratio: float) -> float:
    """Rounds to nine digits, so that rounding tells no two systems apart."""
    return ratio if ratio == 0 else round(ratio, 8 - math.floor(math.log10(abs(ratio))))
