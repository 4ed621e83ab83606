"""Stage executors around another one, for ``RuntimeOptions.wrap_stage``: one hands everything on, one delays tasks.

Delays show that the results of real programs do not depend on timing.
"""

import time
from collections.abc import Callable
from typing import Any

from rrfp_jax.core import Message
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.stage_threads import Launched, StageExecutor, StageOutcome
from rrfp_jax.schedules import PipelineGraph, Task

Delay = Callable[[int, Task], float]
"""Returns the seconds by which a task of a step is held up before it runs."""


class WrappedStage:
    """Hands every call on to ``inner``. Subclasses change how tasks are launched."""

    def __init__(self, inner: StageExecutor) -> None:
        self._inner = inner

    @property
    def hands_ahead(self) -> bool:
        return self._inner.hands_ahead

    def ahead(self, step: int, message: Message) -> Any:
        return self._inner.ahead(step, message)

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        return self._inner.fetch(step, message, ahead)

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:
        self._inner.begin(step, batch, graph)

    def launch(self, step: int, task: Task) -> Launched:
        return self._inner.launch(step, task)

    def payload(self, step: int, message: Message) -> Any:
        return self._inner.payload(step, message)

    def accept(self, step: int, message: Message, payload: Any) -> None:
        self._inner.accept(step, message, payload)

    def finish(self, step: int) -> StageOutcome:
        return self._inner.finish(step)


class DelayedStage(WrappedStage):
    """Holds up every task of a stage before it runs.

    Give ``lambda stage: DelayedStage(stage, delay)`` as ``RuntimeOptions.wrap_stage``.
    """

    def __init__(self, inner: StageExecutor, delay: Delay) -> None:
        super().__init__(inner)
        self._delay = delay

    def launch(self, step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        time.sleep(self._delay(step, task))
        return super().launch(step, task)._replace(begun_s=begun_s)
