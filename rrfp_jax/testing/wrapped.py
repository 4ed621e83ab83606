"""A stage's executor around another one: hands everything on, for subclasses that change how tasks are launched."""

from collections.abc import Callable
from typing import Any, cast

from rrfp_jax.arbitration import Message
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.executor import HandsAhead, Launched, StageExecutor, StageOutcome
from rrfp_jax.schedules import PipelineGraph, Task


class WrappedStage:
    """Does what ``inner`` does; for ``RuntimeOptions.wrap_stage``."""

    def __init__(self, inner: StageExecutor) -> None:
        self._inner = inner

    @property
    def hands_ahead(self) -> bool:
        return getattr(self._inner, "hands_ahead", False)

    def ahead(self, step: int, message: Message) -> Any:
        return cast(HandsAhead, self._inner).ahead(step, message)

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        return cast(HandsAhead, self._inner).fetch(step, message, ahead)

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
