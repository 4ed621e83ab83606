"""Messages between stages in virtual time: how long they travel, and the three ways in which tensors do so.

A way (:class:`Communication`) hears when a task has ended on a stage and which messages the stage's arbiter sends. It
decides when the messages arrive, and when the stage is free of communication again, reports the task to its arbiter and
gets the next one: the arbiter chooses when the stage is really free, not when the task ended.

Messages that stages exchange once per step (shared gradients, reports, verdicts) never occupy a stage.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.core import (
    Event,
    InputArrived,
    Message,
    MessageKind,
    Send,
    StageArbiter,
    TaskFinished,
    stage_plan,
)
from rrfp_jax.core.events import record
from rrfp_jax.schedules import Task

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
    """Gradients of shared parameters, or a piece of those of a chunk, once per step."""
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
        }.get(kind, self.shared_bytes)
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


_ARRIVAL, _END = 0, 1


class VirtualTime:
    """Actions at points of virtual time, in milliseconds.

    At the same time arrivals come first, so that a stage that chooses a task knows of all inputs so far.
    Other actions follow in the order in which they were posted. So a run is a function of its inputs.
    """

    __slots__ = ("_actions", "_num_posted", "is_paused", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.is_paused = False
        self._num_posted = 0
        self._actions: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def post(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Lets ``action(*arguments)`` run at ``at_ms``, which must not lie in the past."""
        self._num_posted += 1
        heappush(self._actions, (at_ms, _END, self._num_posted, action, arguments))

    def post_arrival(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Lets ``action(*arguments)`` run at ``at_ms``, before all actions at that time that are no arrivals."""
        self._num_posted += 1
        heappush(self._actions, (at_ms, _ARRIVAL, self._num_posted, action, arguments))

    def run(self) -> bool:
        """Runs actions, and those that they post, until none is left or one of them pauses. Returns whether one did."""
        actions, self.is_paused = self._actions, False
        while actions and not self.is_paused:
            self.now_ms, _, _, action, arguments = heappop(actions)
            action(*arguments)
        return self.is_paused


class AsyncTransfers:
    """Transfers that occupy no stage."""

    def __init__(self, queue: VirtualTime, links: Links, deliver: Callable[[int, Event], None]) -> None:
        self.queue, self.links, self.deliver = queue, links, deliver
        self._transfer_ms: dict[tuple[MessageKind, int, int], float] = {}
        self._link_free_ms: dict[tuple[int, int], float] = {}

    def task_ended(self, stage: int, step: int, task: Task) -> None:
        """Hears that a task's computation has ended now."""
        self.deliver(stage, record(TaskFinished, (step, self.queue.now_ms / 1e3, task)))

    def send(self, stage: int, send: Send) -> None:
        step, message, target = send
        start_ms, duration_ms = self.queue.now_ms, self.duration_ms(message.kind, stage, target)
        if self.links.contention and message.kind not in CONTROL:
            start_ms = max(start_ms, self._link_free_ms.get((stage, target), 0.0))
            self._link_free_ms[stage, target] = start_ms + duration_ms
        self.queue.post_arrival(start_ms + duration_ms, self.arrive, target, step, message)

    def arrive(self, stage: int, step: int, message: Message) -> None:
        self.deliver(stage, record(InputArrived, (step, self.queue.now_ms / 1e3, message)))

    def duration_ms(self, kind: MessageKind, source: int, target: int) -> float:
        key = (kind, source, target)
        lasts_ms = self._transfer_ms.get(key)
        if lasts_ms is None:
            lasts_ms = self._transfer_ms[key] = self.links.transfer_ms(kind, source, target)
        return lasts_ms


class BlockingTransfers(AsyncTransfers):
    """Transfers that occupy the sender until each of its messages, one after the other, has arrived.

    Raises ValueError where an option has no meaning with a sender that waits.
    """

    communication = Communication.BLOCKING

    def __init__(
        self,
        queue: VirtualTime,
        links: Links,
        deliver: Callable[[int, Event], None],
        arbiters: Sequence[StageArbiter],
    ) -> None:
        super().__init__(queue, links, deliver)
        if links.contention:
            raise ValueError(
                f"contention has no effect with {self.communication} communication, in which a stage makes one "
                "transfer at a time: leave it out, or take async"
            )
        if any(arbiter.certain_ahead for arbiter in arbiters):
            raise ValueError(
                f"dispatch_ahead has no meaning with {self.communication} communication, in which a stage sends before "
                "it goes on: set it to 0, or take async"
            )
        self._plans = [stage_plan(a.graph, a.placement, a.stage, a.rules) for a in arbiters]

    def task_ended(self, stage: int, step: int, task: Task) -> None:
        # The arbiter hears of the end only after the last arrival, and so chooses when the stage is free again.
        at_ms = self.queue.now_ms
        for message, target in self._tensors_of(stage, task):
            at_ms += self.duration_ms(message.kind, stage, target)
            self.queue.post_arrival(at_ms, self.arrive, target, step, message)
        self.queue.post(at_ms, super().task_ended, stage, step, task)

    def send(self, stage: int, send: Send) -> None:
        # The tensors of tasks left when the task ended, before the arbiter knew of it.
        if send.message.kind not in (MessageKind.ACTIVATION, MessageKind.GRADIENT):
            super().send(stage, send)

    def _tensors_of(self, stage: int, task: Task) -> list[tuple[Message, int]]:
        """Returns the messages that carry the output of ``task``, with the stages to which they go."""
        plan = self._plans[stage]
        sends = plan.sends[plan.index[task]]
        return [send for send in sends if send[0].kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT)]


class _Pending(NamedTuple):
    """A message whose transfer has not begun; the number gives the order in which messages were sent."""

    number: int
    source: int
    target: int
    step: int
    message: Message


class RendezvousTransfers(BlockingTransfers):
    """Both sides are occupied during a transfer.

    Rules
    -----
    * A stage computes, is in a transfer with one other stage, or is free.
    * After a task with messages a stage is free, but does not compute again until all of them have arrived. After a
      task without messages it takes the next one at once, if there is any.
    * A transfer begins as soon as both of its stages are free, the oldest of a stage first. A message that waits in
      the opposite direction goes along (Megatron's ``send_forward_recv_backward``), and both take as long as the
      longer one.

    Why no deadlock beyond the arbiters' own freedom from it: when nobody computes and no transfer is under way, all
    stages are free, so any waiting message could begin its transfer. Hence none waits, and every arbiter has been told
    everything that has happened.
    """

    communication = Communication.RENDEZVOUS

    def __init__(
        self,
        queue: VirtualTime,
        links: Links,
        deliver: Callable[[int, Event], None],
        arbiters: Sequence[StageArbiter],
        is_computing: Callable[[int], bool],
    ) -> None:
        super().__init__(queue, links, deliver, arbiters)
        self._is_computing = is_computing
        self._in_transfer = [False] * len(arbiters)
        self._outgoing: list[deque[_Pending]] = [deque() for _ in arbiters]
        self._incoming: list[deque[_Pending]] = [deque() for _ in arbiters]
        self._ended: list[tuple[int, Task] | None] = [None] * len(arbiters)
        self._held: list[list[tuple[int, Message]]] = [[] for _ in arbiters]
        self._num_messages = 0

    def task_ended(self, stage: int, step: int, task: Task) -> None:
        self._ended[stage] = (step, task)
        for message, target in self._tensors_of(stage, task):
            self._num_messages += 1
            pending = _Pending(self._num_messages, stage, target, step, message)
            self._outgoing[stage].append(pending)
            self._incoming[target].append(pending)
        self._settle(stage)
        self._begin_transfer(stage)

    def arrive(self, stage: int, step: int, message: Message) -> None:
        if self._in_transfer[stage]:
            self._held[stage].append((step, message))
        else:
            super().arrive(stage, step, message)

    def _is_free(self, stage: int) -> bool:
        return not self._in_transfer[stage] and not self._is_computing(stage)

    def _begin_transfer(self, stage: int) -> None:
        """Begins the oldest transfer of a stage that can begin now, if there is one."""
        if not self._is_free(stage):
            return
        waiting = sorted([*self._outgoing[stage], *self._incoming[stage]])
        first = next((p for p in waiting if self._is_free(p.source) and self._is_free(p.target)), None)
        if first is None:
            return
        opposite = next((p for p in self._outgoing[first.target] if p.target == first.source), None)
        together = [first] if opposite is None else [first, opposite]
        for pending in together:
            self._outgoing[pending.source].remove(pending)
            self._incoming[pending.target].remove(pending)
        self._in_transfer[first.source] = self._in_transfer[first.target] = True
        lasts_ms = max(self.duration_ms(p.message.kind, p.source, p.target) for p in together)
        self.queue.post_arrival(self.queue.now_ms + lasts_ms, self._end_transfer, together)

    def _end_transfer(self, together: list[_Pending]) -> None:
        stages = sorted((together[0].source, together[0].target))
        for stage in stages:
            self._in_transfer[stage] = False
        for pending in together:
            self._held[pending.target].append((pending.step, pending.message))
        for stage in stages:
            self._settle(stage)
        for stage in stages:
            self._begin_transfer(stage)

    def _settle(self, stage: int) -> None:
        """Tells the arbiter of a stage that has left a transfer, or a task, of the arrivals and the end meanwhile."""
        held, self._held[stage] = self._held[stage], []
        for step, message in held:
            super().arrive(stage, step, message)
        ended = self._ended[stage]
        if ended is not None and not self._outgoing[stage]:
            self._ended[stage] = None
            self.deliver(stage, TaskFinished(ended[0], self.queue.now_ms / 1e3, ended[1]))
