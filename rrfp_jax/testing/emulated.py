"""Emulated stages: the real runtime on programs that sleep, for schedules and jitter without a model or an accelerator.

Each task is a jitted program with a small array in and out, which sleeps in a host callback for the task's duration;
the core is free meanwhile, so many stages run on few cores. With all durations zero the callback is left out, and what
remains is the overhead of the runtime.
"""

import ctypes
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import buffer_callback

from rrfp_jax.arbitration import Message, MessageKind
from rrfp_jax.runtime.executor import Batch
from rrfp_jax.runtime.mailbox import Mailbox, Ship
from rrfp_jax.simulation.costs import of_tasks
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind

_WIDTH = 8
_PR_SET_TIMERSLACK = 29


class EmulatedStage:
    """A stage whose tasks take given durations; implements the runtime's ``StageExecutor``.

    ``durations_ms`` is [steps, chunks, microbatches, 3] for F, input and weight gradient; a fused backward takes the
    sum of the last two, and step ``s`` reads row ``s mod steps``.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        placement: Placement,
        stage: int,
        *,
        durations_ms: np.ndarray,
        ship: Ship,
        device: jax.Device,
    ) -> None:
        self._graph, self._placement, self._stage = graph, placement, stage
        self._durations_ms = of_tasks(durations_ms)
        self._num_rows = len(durations_ms)
        self._mailbox = Mailbox(placement, stage, ship)
        self._source = np.zeros(_WIDTH, np.float32)
        self._program = _compile(bool(durations_ms.any()), device)
        _warm_up(self._program, self._source)

    def begin(self, step: int, batch: Batch, absent: frozenset[tuple[int, int]]) -> None:  # noqa: ARG002
        if absent:
            raise ValueError("emulated stages take their absent pairs from the graph, not from the step")
        self._mailbox.begin(step)

    def run(self, step: int, task: Task) -> None:
        duration_ms = self._durations_ms[task.kind][step % self._num_rows][task.chunk][task.microbatch]
        result = self._program(self._input(step, task), np.float32(duration_ms))
        if not result.is_ready():
            result.block_until_ready()
        for message in self._outputs(task):
            self._mailbox.post(step, message, result)

    def accept(self, step: int, message: Message, payload: Any) -> None:
        if message.kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT):
            self._mailbox.accept(step, message, payload)

    def payload(self, step: int, message: Message) -> Any:
        if message.kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT):
            return self._mailbox.payload(step, message)
        return None

    def finish(self, step: int) -> None:
        self._mailbox.finish(step)

    def _input(self, step: int, task: Task) -> Any:
        """Take everything that has arrived for the task; one of the values goes into its program."""
        value: Any = self._source
        kind, chunk, m = task
        if kind is TaskKind.F:
            for p in self._graph.predecessors(chunk):
                if self._graph.exists(p, m):
                    value = self._mailbox.take(step, Message(MessageKind.ACTIVATION, p, chunk, m))
        elif kind is not TaskKind.W:
            for s in self._graph.gradient_successors(chunk):
                if self._graph.exists(s, m):
                    value = self._mailbox.take(step, Message(MessageKind.GRADIENT, s, chunk, m))
        return value

    def _outputs(self, task: Task) -> list[Message]:
        kind, chunk, m = task
        exists = self._graph.exists
        if kind is TaskKind.F:
            return [Message(MessageKind.ACTIVATION, chunk, s, m) for s in self._graph.successors(chunk) if exists(s, m)]
        if kind is TaskKind.W:
            return []
        return [
            Message(MessageKind.GRADIENT, chunk, p, m) for p in self._graph.gradient_predecessors(chunk) if exists(p, m)
        ]


def _compile(sleeps: bool, device: jax.Device) -> Any:
    precise = threading.local()

    def sleep(_: Any, out: Any, value: Any, milliseconds: Any) -> None:
        if not hasattr(precise, "timer"):  # whichever thread XLA runs the callback on
            precise.timer = _reduce_timer_slack()
        time.sleep(float(np.asarray(milliseconds)) * 1e-3)
        np.asarray(out)[...] = np.asarray(value)

    def program(value: jax.Array, milliseconds: jax.Array) -> jax.Array:
        if not sleeps:
            return value + milliseconds
        shape = jax.ShapeDtypeStruct((_WIDTH,), jnp.float32)
        return buffer_callback.buffer_callback(sleep, shape)(value, milliseconds)

    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = (
        jax.ShapeDtypeStruct((_WIDTH,), jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding),
    )
    return jax.jit(program).lower(*specs).compile()


def _warm_up(program: Any, value: np.ndarray) -> None:
    """The first calls of a compiled program are slower than all others."""
    for _ in range(2):
        program(value, np.float32(0)).block_until_ready()


def _reduce_timer_slack() -> bool:
    """Let this thread's sleeps end within a microsecond of their time on Linux, instead of 50."""
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1) == 0
    except (AttributeError, OSError):
        return False
