"""A stage's values on their way: messages that arrived or wait to be sent, and batch leaves on their way to the
devices.

Messages are keyed by step and message, so they may come in any order and early. An edge between two chunks of the same
stage uses the same key and never leaves the stage.

Batch leaves go ahead of the tasks that read them. A device begins to copy into new memory when it has done all that was
launched before that memory was taken. If a program is given arrays of the host, their copies begin behind everything
that is queued, and the program waits for them: no byte is copied while the device computes. So each chunk has the
leaves of ``LEAVES_AHEAD`` microbatches on its devices or on their way there. That number is 2, since the copy that
begins as a task is launched is to take place during that task or the next.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rrfp_jax.core import BESIDE, Message, MessageKind
from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD
from rrfp_jax.programs.shapes import num_bytes as bytes_on_device
from rrfp_jax.schedules import PipelineGraph, Placement

SendArray = Callable[[Any, int, Message, int, int | None], Any]
"""Brings a value, of a message of a bucket, into the form in which it reaches a stage. With a step also sends it, where
that can be done at once; see ``Transport.send_array``."""
StepPair = tuple[int, int]
"""A step and a microbatch."""
_Place = Callable[[], dict[str, Any]]
"""Begins to copy the leaves of a microbatch; returns them as they lie on the devices."""

_NOT_COUNTED = (MessageKind.SHARED, MessageKind.REPORT, MessageKind.VERDICT, MessageKind.TAKEN)


class Mailbox:
    """The inbox and outbox of one stage. Dictionary operations are atomic, so any of its threads may use it."""

    def __init__(self, placement: Placement, stage: int, send_array: SendArray, graph: PipelineGraph) -> None:
        self._placement, self._stage, self._send_array, self._graph = placement, stage, send_array, graph
        self._inbox: dict[int, dict[Message, tuple[Any, int]]] = {}
        """By step and message, a value and its bytes on one device."""
        self._outbox: dict[tuple[int, Message], Any] = {}
        self._ahead: set[tuple[int, Message]] = set()
        """Messages that were fetched and have not been delivered."""
        self._incoming = threading.Lock()
        self._last_finished = [-1, -1]
        """The last step that has ended, and the last evaluation in idle time."""
        # Bytes that came and went. Each counter has one thread that writes it, or a lock, so none is ever lost.
        self._accepted_bytes = self._posted_bytes = self._taken_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes, on one device of the stage, of the values that have arrived and have not been taken."""
        return self._accepted_bytes + self._posted_bytes - self._taken_bytes

    def begin(self, step: int) -> None:
        self._inbox.setdefault(step, {})

    def accept(self, step: int, message: Message, payload: Any) -> None:
        """Takes a value from another stage, whose step need not have begun here; a second or late delivery is
        dropped."""
        if step <= self._last_finished[step >= BESIDE]:
            return
        with self._incoming:
            if (step, message) in self._ahead:
                self._ahead.discard((step, message))
            else:
                self._keep(step, message, payload)

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        """Takes a value before it is delivered, if ``ahead`` has it; returns whether it is here."""
        with self._incoming:
            if message in self._inbox[step]:
                return True
            payload = ahead()
            if payload is None:
                return False
            self._ahead.add((step, message))
            self._keep(step, message, payload)
            return True

    def _keep(self, step: int, message: Message, payload: Any) -> None:
        inbox = self._inbox.setdefault(step, {})
        if message not in inbox:
            num_bytes = _num_bytes(message, payload)
            inbox[message] = (payload, num_bytes)
            self._accepted_bytes += num_bytes

    def post(self, step: int, message: Message, value: Any, bucket: int = 0) -> None:
        """Takes a value that a chunk of this stage has produced for the chunk that ``message`` names."""
        receiver = self._placement.stage_of_chunk[message.target]
        staged = self._send_array(value, receiver, message, bucket, step)
        if receiver == self._stage:
            # What passes of one chunk hand to each other is counted where it was made.
            is_lent = message.kind is MessageKind.ACTIVATION and self._graph.are_passes(*message[1:3])
            num_bytes = 0 if is_lent else _num_bytes(message, staged)
            self._inbox[step][message] = (staged, num_bytes)
            self._posted_bytes += num_bytes
        else:
            self._outbox[step, message] = staged

    def holds(self, step: int, message: Message) -> bool:
        """Returns whether a value has arrived and was not taken."""
        return message in self._inbox.get(step, ())

    def read(self, step: int, message: Message) -> Any:
        """Returns a value that has arrived; it stays until the step ends or :meth:`take` removes it."""
        return self._inbox[step][message][0]

    def take(self, step: int, message: Message) -> Any:
        value, num_bytes = self._inbox[step].pop(message)
        self._taken_bytes += num_bytes
        return value

    def ahead(self, step: int, message: Message) -> Any:
        """Returns a value that waits to be sent, or None; it goes on waiting."""
        return self._outbox.get((step, message))

    def payload(self, step: int, message: Message) -> Any:
        return self._outbox.pop((step, message))

    def finish(self, step: int) -> None:
        self._last_finished[step >= BESIDE] = step
        self._ahead = {key for key in self._ahead if key[0] != step}
        left = self._inbox.pop(step, {})
        self._accepted_bytes -= sum(num_bytes for _, num_bytes in left.values())


def _num_bytes(message: Message, value: Any) -> int:
    """Returns the bytes, on one device, of arrays that a task takes out. Other values are read where they lie, and
    count 0."""
    if message.kind in _NOT_COUNTED:
        return 0
    return value.nbytes if isinstance(value, np.ndarray) else bytes_on_device(value)


class LeavesAhead:
    """Begins copies of batch leaves ahead of the tasks that read them. For any thread.

    The copies begin on a thread of its own, which ends with this object: beginning one takes some tenths of a
    millisecond, which neither the event loop nor the thread that launches has.
    """

    def __init__(self, stage: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rrfp-stage-{stage}-leaves")
        self._lock = threading.Lock()
        self._coming: dict[int, dict[StepPair, _Place]] = defaultdict(dict)
        """By chunk, microbatches whose copies have not begun, in the order in which they usually come."""
        self._begun: dict[int, dict[StepPair, Future[dict[str, Any]]]] = defaultdict(dict)
        """By chunk, microbatches whose copies have begun and that no task has read."""

    def expect(self, chunk: int, coming: Iterable[tuple[StepPair, _Place]]) -> None:
        """Enqueues microbatches that the chunk will read, behind all that it was to read before."""
        with self._lock:
            self._coming[chunk].update(coming)
            self._go_on(chunk)

    def take(self, chunk: int, pair: StepPair) -> dict[str, Any] | None:
        with self._lock:
            self._coming[chunk].pop(pair, None)
            begun = self._begun[chunk].pop(pair, None)
            self._go_on(chunk)
        # A copy that is beginning at this moment is waited for: to begin another would take as long.
        return None if begun is None or begun.cancel() else begun.result()

    def forget(self, step: int) -> None:
        """Drops the leaves of a step, which has ended."""
        with self._lock:
            every: list[dict[StepPair, Any]] = [*self._coming.values(), *self._begun.values()]
            for known in every:
                for pair in [pair for pair in known if pair[0] == step]:
                    del known[pair]

    def _go_on(self, chunk: int) -> None:
        coming, begun = self._coming[chunk], self._begun[chunk]
        while coming and len(begun) < LEAVES_AHEAD:
            pair = next(iter(coming))
            begun[pair] = self._thread.submit(coming.pop(pair))
