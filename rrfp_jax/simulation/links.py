"""Durations of messages from stage to stage, and who is occupied by a transfer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rrfp_jax.core import Message, MessageKind

CONTROL = (MessageKind.REPORT, MessageKind.VERDICT, MessageKind.TAKEN)
"""Kinds of messages that carry no tensor and occupy no link."""


class Communication(StrEnum):
    """Ways of communication, by who is occupied while a tensor travels."""

    ASYNC = "async"
    """Nobody: the sender goes on at once (RRFP)."""
    BLOCKING = "blocking"
    """The sender: it starts its next task after the transfer; the receiver takes it in by itself."""
    RENDEZVOUS = "rendezvous"
    """Both (Megatron-LM, gloo): a transfer waits until neither computes; opposite transfers of a pair go together."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Latency plus size over bandwidth for tensors; a latency alone for control messages.

    Raises ValueError on negative numbers.
    """

    latency_ms: float = 0.0
    activation_bytes: float = 0.0
    gradient_bytes: float = 0.0
    """Bytes of one microbatch's gradient between two chunks; ``activation_bytes`` is the same for its activation."""
    shared_bytes: float = 0.0
    """Gradients of shared parameters, once per step."""
    bandwidth_gb_per_s: float = math.inf
    """Bandwidth of each directed link, 10^9 bytes per second."""
    extra_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Extra latency of tensors on directed links, by (sending stage, receiving stage)."""
    control_ms: float = 0.0
    """Latency of reports, verdicts and receipts, which carry no tensor."""
    announce_ms: float | None = None
    """Latency of announcements, which carry no tensor; None: that of tensors on the same link, without their bytes."""
    announce_loss: float = 0.0
    """The share of announcements that never arrive, between 0 and 1."""
    loss_seed: int = 0
    """Which ones get lost; the same messages in the same steps, whatever the order."""
    contention: bool = False
    """A directed link carries one tensor at a time, from the start of its transfer to its end; later ones queue.

    For asynchronous communication only: the other modes keep a sender from starting two transfers at once.
    """

    def __post_init__(self) -> None:
        names = ("latency_ms", "activation_bytes", "gradient_bytes", "shared_bytes", "control_ms")
        numbers = {name: getattr(self, name) for name in names}
        numbers["announce_ms"] = self.announce_ms or 0.0
        numbers |= {f"extra_ms of link {a}-{b}": extra for (a, b), extra in self.extra_ms.items()}
        for name, number in numbers.items():
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} is {number}: give 0 or more")
        if not 0 <= self.announce_loss <= 1:
            raise ValueError(f"announce_loss is {self.announce_loss}: give a part between 0 and 1")
        if self.loss_seed < 0:
            raise ValueError(f"loss_seed is {self.loss_seed}: give 0 or more")
        if not self.bandwidth_gb_per_s > 0:
            raise ValueError(f"bandwidth_gb_per_s is {self.bandwidth_gb_per_s}: give more than 0")

    def transfer_ms(self, kind: MessageKind, source: int, target: int) -> float:
        """Returns the time of a message of this kind from stage ``source`` to stage ``target`` on an idle link."""
        if kind in CONTROL:
            return self.control_ms
        size = {
            MessageKind.ACTIVATION: self.activation_bytes,
            MessageKind.GRADIENT: self.gradient_bytes,
            MessageKind.SHARED: self.shared_bytes,
        }[kind]
        seconds = size / (self.bandwidth_gb_per_s * 1e9)
        return self.latency_ms + self.extra_ms.get((source, target), 0.0) + seconds * 1e3

    def announcement_ms(self, source: int, target: int) -> float:
        """Returns the time of an announcement; by default that of a tensor without any bytes."""
        if self.announce_ms is not None:
            return self.announce_ms
        return self.latency_ms + self.extra_ms.get((source, target), 0.0)

    def loses_announcement(self, step: int, message: Message) -> bool:
        """Whether this announcement never arrives."""
        if not self.announce_loss:
            return False
        kind = tuple(MessageKind).index(message.kind)
        draw = np.random.default_rng((self.loss_seed, step, kind, *message[1:])).random()
        return bool(draw < self.announce_loss)


def both_directions(delays_ms: Mapping[tuple[int, int], float], num_stages: int) -> dict[tuple[int, int], float]:
    """Returns extra latencies by unordered pair as directed ones. Raises ValueError for a link that cannot exist."""
    directed: dict[tuple[int, int], float] = {}
    for (a, b), delay in delays_ms.items():
        if a == b or not (0 <= a < num_stages and 0 <= b < num_stages):
            raise ValueError(f"link {a}-{b} does not exist: name two different stages of 0..{num_stages - 1}")
        directed[a, b] = directed[b, a] = delay
    return directed
