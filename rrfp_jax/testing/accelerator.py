"""An emulated accelerator: a device with a queue of its own, to measure how well the host keeps it busy.

It differs from virtual CPU devices in three ways: a task is handed over and runs later, behind the tasks handed over
before it; handing it over costs the host time; and nobody learns of its end before it has come. The device's own times
are exact, however late the host's threads wake up, so idle time is counted in the device's time.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.runtime.sleeping import Sleeper, sleep_exactly
from rrfp_jax.runtime.stage_threads import Launched, StageExecutor, StageOutcome, one_after_the_other
from rrfp_jax.schedules import COMPUTE, Pair, Task, TaskKind
from rrfp_jax.schedules.timeline import Span
from rrfp_jax.testing.comparing import WrappedStage


@dataclass(frozen=True)
class DeviceTask:
    """A task on the device, in the device's time (``time.perf_counter``)."""

    start_s: float
    end_s: float

    def wait(self) -> None:
        """Blocks until the task has ended."""
        while (remaining_s := self.end_s - time.perf_counter()) > 0:
            sleep_exactly(remaining_s)


class EmulatedAccelerator:
    """A device that runs its tasks one after another. Several stages may share it.

    Args:
        launch_ms: how long handing over a task occupies the thread that does it.
    """

    def __init__(self, *, launch_ms: float = 0.0) -> None:
        if not 0 <= launch_ms < float("inf"):
            raise ValueError(f"launch_ms is {launch_ms}: give 0 or more milliseconds")
        self._launch_s = launch_ms * 1e-3
        self._sleeper = Sleeper()
        self._lock = threading.Lock()
        self._free_s = 0.0

    def launch(self, duration_ms: float, *, since_s: float | None = None, inputs_s: float = 0.0) -> DeviceTask:
        """Hands over a task of this duration. Its launch began at ``since_s``, by default now; the device waits for its
        inputs until ``inputs_s``."""
        self._sleeper.until((time.perf_counter() if since_s is None else since_s) + self._launch_s)
        with self._lock:
            start_s = max(time.perf_counter(), self._free_s, inputs_s)
            self._free_s = start_s + duration_ms * 1e-3
            return DeviceTask(start_s, self._free_s)


class AcceleratedStage(WrappedStage):
    """Wraps a stage's executor so that its tasks take given times on an emulated accelerator.

    For emulated stages, and for those of a model: give
    ``lambda stage: AcceleratedStage(stage, EmulatedAccelerator(launch_ms=0.3), duration_ms)`` as
    ``RuntimeOptions.wrap_stage``, and every stage has an accelerator of its own. The programs themselves run on the CPU
    meanwhile; a task should be given at least the time that its program takes there.

    Args:
        inner: the executor that runs the programs.
        accelerator: the device on which tasks take their time.
        duration_ms: returns the milliseconds of a task of a step.
        stage: the number of the stage in the recorded spans.
        lanes_beside: the engine of each operation that does not run on the accelerator's own queue.
    """

    def __init__(
        self,
        inner: StageExecutor,
        accelerator: EmulatedAccelerator,
        duration_ms: Callable[[int, Task], float],
        *,
        stage: int = 0,
        lanes_beside: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(inner)
        self._lanes_beside = lanes_beside
        self._engines = {lane: EmulatedAccelerator() for lane in lanes_beside.values()}
        self._accelerator, self._duration_ms, self._stage = accelerator, duration_ms, stage
        self._ends_s: dict[int, dict[Task, float]] = {}
        """Ends of launched tasks on the device, by step."""
        self._inputs_s = 0.0
        """Time at which the inputs fetched for the next launch are there."""
        self.spans: list[Span] = []
        """Exact times of the device's tasks, complete for steps that have ended."""

    def launch(self, step: int, task: Task | Pair) -> Launched:
        if isinstance(task, Pair):  # The device takes as long for both as for each alone.
            return one_after_the_other(self.launch(step, task.first), self.launch(step, task.second))
        since_s = time.perf_counter()
        inner = super().launch(step, task)
        lane = self._lanes_beside.get(task.kind, COMPUTE)
        engine = self._engines.get(lane, self._accelerator)
        on_device = engine.launch(self._duration_ms(step, task), since_s=since_s, inputs_s=self._inputs_s)
        self._inputs_s = 0.0
        self._ends_s.setdefault(step, {})[task] = on_device.end_s
        self.spans.append(Span(step, self._stage, task, on_device.start_s, on_device.end_s, lane))
        return Launched(time.perf_counter(), partial(_wait, inner, on_device))

    def ahead(self, step: int, message: Message) -> Any:
        """Returns a payload and the time at which it is there, in the devices' time; None before its task's launch."""
        payload, ends_s = super().ahead(step, message), self._ends_s.get(step, {})
        kinds = (TaskKind.F,) if message.kind is MessageKind.ACTIVATION else (TaskKind.B, TaskKind.I)
        makers = [Task(kind, message.source, message.microbatch) for kind in kinds]
        end_s = next((ends_s[task] for task in makers if task in ends_s), None)
        return None if payload is None or end_s is None else (payload, end_s)

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        return super().fetch(step, message, partial(self._take, ahead))

    def _take(self, ahead: Callable[[], Any]) -> Any:
        taken = ahead()
        if taken is None:
            return None
        payload, end_s = taken
        self._inputs_s = max(self._inputs_s, end_s)
        return payload

    def finish(self, step: int) -> StageOutcome:
        self._ends_s.pop(step, None)
        return super().finish(step)


def _wait(inner: Launched, on_device: DeviceTask) -> None:
    on_device.wait()
    inner.wait()
