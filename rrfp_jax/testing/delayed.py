"""A stage whose tasks are held up: jitter for real programs, to show that results do not depend on timing."""

import time
from collections.abc import Callable
from typing import Any

from rrfp_jax.arbitration import Message
from rrfp_jax.runtime.executor import Batch, Launched, StageExecutor, StageOutcome
from rrfp_jax.tasks import PipelineGraph, Task

Delay = Callable[[int, Task], float]
"""Seconds by which a task of a step is held up before it runs."""


class DelayedStage:
    """Wraps a stage's executor; give ``lambda stage: DelayedStage(stage, delay)`` as ``RuntimeOptions.wrap_stage``."""

    def __init__(self, inner: StageExecutor, delay: Delay) -> None:
        self._inner, self._delay = inner, delay

    def begin(self, step: int, batch: Batch, graph: PipelineGraph) -> None:
        self._inner.begin(step, batch, graph)

    def launch(self, step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        time.sleep(self._delay(step, task))
        return self._inner.launch(step, task)._replace(begun_s=begun_s)

    def payload(self, step: int, message: Message) -> Any:
        return self._inner.payload(step, message)

    def accept(self, step: int, message: Message, payload: Any) -> None:
        self._inner.accept(step, message, payload)

    def finish(self, step: int) -> StageOutcome:
        return self._inner.finish(step)
