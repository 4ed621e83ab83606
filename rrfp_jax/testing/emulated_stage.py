"""Emulated stages: the real runtime on programs that sleep, for schedules and jitter without a model or an accelerator.

Each task is a jitted program with a small array in and out, after which the stage's thread sleeps until the task's
duration has passed since its launch, as the recorded span of a real task would have it; the core is free meanwhile, so
many stages run on few cores. With all durations zero the overhead of the runtime remains.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.mailbox import Mailbox, SendArray
from rrfp_jax.runtime.sleeping import Sleeper, sleep_exactly
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome, one_after_the_other
from rrfp_jax.schedules import Op, Pair, PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.simulation.costs import Costs, InjectedSleeps, StageTimes

DEFAULT_ACTIVATION_BYTES = 32
_ITEM_BYTES = 4


class EmulatedStage:
    """A stage whose tasks take given durations; implements the runtime's ``StageExecutor``.

    ``durations_ms`` is [steps, chunks, microbatches, 3] for F, input and weight gradient; a fused backward takes the
    sum of the last two, and step ``s`` reads row ``s mod steps``; an operation takes its own ``ms``, or no time
    where all durations are 0. ``sleeps`` are the RRFP paper's, beside them, as in a simulation. ``activation`` is the
    spec of the arrays between chunks, as :func:`activation_spec` makes it. A stage of several devices works on one of
    them, and hands its outputs over as if all had them. ``hands_ahead``: receivers, all in this process, can have
    outputs from the launch on, as on an accelerator.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        placement: Placement,
        stage: int,
        *,
        durations_ms: np.ndarray,
        sleeps: InjectedSleeps | None = None,
        send_array: SendArray,
        device: jax.Device,
        activation: jax.ShapeDtypeStruct | None = None,
        num_devices: int = 1,
        hands_ahead: bool = False,
    ) -> None:
        self._inputs, self._outputs = _traffic(graph)
        self._placement, self._stage = placement, stage
        self._graph, self._graphs = graph, dict[int, PipelineGraph]()
        ops = graph.ops if durations_ms.any() else [replace(op, ms=0.0) for op in graph.ops]
        self._duration_ms = duration_of(durations_ms, sleeps, ops)
        self._device = threading.Lock()
        """Held while the stage's device is busy, with a task or a piece of other work."""
        self._sleepers = {op.letter: Sleeper() for op in graph.ops}
        self._mailbox = Mailbox(placement, stage, send_array, graph)
        self.accept, self.ahead, self.fetch = self._mailbox.accept, self._mailbox.ahead, self._mailbox.fetch
        self.hands_ahead = hands_ahead
        self._is_alone = num_devices == 1
        activation = activation or activation_spec(DEFAULT_ACTIVATION_BYTES)
        self._source = np.zeros(activation.shape, activation.dtype)
        self._sleeper = Sleeper()
        self._program = _compile(device, activation)
        _warm_up(self._program, self._source)

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:  # noqa: ARG002
        self._graphs[step] = graph
        self._mailbox.begin(step)

    def launch(self, step: int, task: Task | Pair) -> Launched:
        """Runs the task on the thread that launches it; its outputs leave the stage once it is waited for.

        An operation has no program and takes its time. A pair takes the time of both tasks.
        """
        if isinstance(task, Pair):
            return one_after_the_other(self.launch(step, task.first), self.launch(step, task.second))
        if task.kind in self._sleepers:
            begun_s = time.perf_counter()
            self._sleepers[task.kind].until(begun_s + self._duration_ms(step, task) * 1e-3)
            return Launched(begun_s)
        with self._device:
            return self._compute(step, task)

    def run_piece(self, lasts_ms: float) -> None:
        """Keeps the stage's device busy for so long, as a piece of other work; from any thread."""
        with self._device:
            sleep_exactly(lasts_ms * 1e-3)

    def _compute(self, step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        value: Any = self._source
        for message in self._present(step, self._inputs.get(task, ())):  # the last of them goes into the program
            value = self._mailbox.take(step, message)
        result = self._program(value)
        result.block_until_ready()  # even if it is ready: so is a failed one
        if duration_ms := self._duration_ms(step, task):
            self._sleeper.until(begun_s + duration_ms * 1e-3)
        outputs = self._present(step, self._outputs.get(task, ()))
        value = result if self._is_alone else np.asarray(result)
        for message in outputs:
            if self._leaves_at_once(message):  # the next task may be launched before this one was waited for
                self._mailbox.post(step, message, value)
        return Launched(begun_s, partial(self._post, step, outputs, value))

    def _post(self, step: int, outputs: Iterable[Message], value: Any) -> None:
        for message in outputs:
            if not self._leaves_at_once(message):
                self._mailbox.post(step, message, value)

    def _leaves_at_once(self, message: Message) -> bool:
        return self.hands_ahead or self._placement.stage_of_chunk[message.target] == self._stage

    def _present(self, step: int, messages: Iterable[Message]) -> Iterable[Message]:
        """Returns the messages between chunks that both run the microbatch in this step."""
        graph = self._graphs[step]
        if graph.absent == self._graph.absent:
            return messages
        exists = graph.exists
        return [m for m in messages if exists(m.source, m.microbatch) and exists(m.target, m.microbatch)]

    def payload(self, step: int, message: Message) -> Any:
        if message.kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT):
            return self._mailbox.payload(step, message)
        return None

    def finish(self, step: int) -> StageOutcome:
        self._mailbox.finish(step)
        del self._graphs[step]
        return StageOutcome()


def duration_of(
    durations_ms: np.ndarray, sleeps: InjectedSleeps | None = None, ops: Iterable[Op] = ()
) -> Callable[[int, Task], float]:
    """Returns a function that gives the milliseconds of a task of a step, from durations as :class:`EmulatedStage` has.

    It serves one stage, which calls it once for each task, in the order in which tasks start.
    """
    return StageTimes(Costs(durations_ms=durations_ms, sleeps=sleeps), ops).duration_ms


@lru_cache(maxsize=1)  # all stages of a process have the same graph
def _traffic(graph: PipelineGraph) -> tuple[dict[Task, list[Message]], dict[Task, list[Message]]]:
    """Returns the messages that each task takes from the mailbox, and the messages that it posts."""
    taken, posted = defaultdict(list), defaultdict(list)
    for task in graph.tasks():
        for source in graph.dependencies(task):
            if source.chunk != task.chunk:
                kind = MessageKind.ACTIVATION if source.kind is TaskKind.F else MessageKind.GRADIENT
                message = Message(kind, source.chunk, task.chunk, task.microbatch)
                taken[task].append(message)
                posted[source].append(message)
    return dict(taken), dict(posted)


def activation_spec(num_bytes: int) -> jax.ShapeDtypeStruct:
    """Returns the spec of a float32 vector of ``num_bytes``. Raises ValueError unless that is a positive multiple of
    4."""
    if num_bytes < _ITEM_BYTES or num_bytes % _ITEM_BYTES:
        raise ValueError(f"activations have {num_bytes} bytes: give a positive multiple of {_ITEM_BYTES}")
    return jax.ShapeDtypeStruct((num_bytes // _ITEM_BYTES,), jnp.float32)


def _compile(device: jax.Device, activation: jax.ShapeDtypeStruct) -> Any:
    def program(value: jax.Array) -> jax.Array:
        return value + 1

    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(program).lower(jax.ShapeDtypeStruct(activation.shape, activation.dtype, sharding=sharding)).compile()


def _warm_up(program: Any, value: np.ndarray) -> None:
    # The first calls of a compiled program are slower than all others.
    for _ in range(2):
        program(value).block_until_ready()
