"""A stage whose tasks are held up: jitter for real programs, to show that results do not depend on timing."""

import time
from collections.abc import Callable

from rrfp_jax.runtime.executor import Launched, StageExecutor
from rrfp_jax.schedules import Task
from rrfp_jax.testing.wrapped import WrappedStage

Delay = Callable[[int, Task], float]
"""Seconds by which a task of a step is held up before it runs."""


class DelayedStage(WrappedStage):
    """Wraps a stage's executor; give ``lambda stage: DelayedStage(stage, delay)`` as ``RuntimeOptions.wrap_stage``."""

    def __init__(self, inner: StageExecutor, delay: Delay) -> None:
        super().__init__(inner)
        self._delay = delay

    def launch(self, step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        time.sleep(self._delay(step, task))
        return super().launch(step, task)._replace(begun_s=begun_s)
