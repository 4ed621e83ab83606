"""A kit for comparing a pipeline's results: stages that hold tasks up, and the same chunks without a pipeline.

Delays show that the results of real programs do not depend on timing. A stage executor around another one is for
``RuntimeOptions.wrap_stage``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rrfp_jax.core import Message
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.chunk import Chunk, Params, param_specs, parts_of
from rrfp_jax.runtime.stage_threads import Launched, StageExecutor, StageOutcome
from rrfp_jax.schedules import Edge, Pair, PipelineGraph, Task

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

    def launch(self, step: int, task: Task | Pair) -> Launched:
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

    def launch(self, step: int, task: Task | Pair) -> Launched:
        begun_s = time.perf_counter()
        time.sleep(sum(self._delay(step, each) for each in ((task,) if isinstance(task, Task) else task)))
        return super().launch(step, task)._replace(begun_s=begun_s)


def run_unpipelined(
    chunks: Sequence[Chunk], params: Params, leaves: Mapping[str, Any], *, edges: Sequence[Edge] | None = None
) -> Any:
    """Returns the last chunk's output for one microbatch: the summed loss, its weight, and named sums if it has them.

    The function is differentiable, and meant to be jitted.

    Args:
        chunks: in their order; the last one returns the loss.
        params: the parameters of all chunks, by layer name.
        leaves: the microbatch's leaves by name. A chunk that lacks a leaf which it needs is left out, as in a pipeline.
        edges: edges from chunk to chunk; None: a chain.
    """
    if edges is None:
        edges = [Edge(source, target) for source, target in pairwise(range(len(chunks)))]
    outputs: dict[int, Any] = {}
    for number, chunk in enumerate(chunks):
        sources = [edge for edge in edges if edge.target == number]
        lacks_leaf = not set(chunk.leaves) - chunk.optional_leaves <= set(leaves)
        if lacks_leaf or any(edge.source not in outputs and not edge.is_optional for edge in sources):
            continue
        inputs = tuple(outputs.get(edge.source) for edge in sources)
        read = {name: leaves[name] for name in chunk.leaves if name in leaves}
        own = parts_of(params, param_specs(chunk))
        outputs[number] = chunk.apply(own, inputs if len(inputs) > 1 else next(iter(inputs), None), read, key=None)
    return outputs[len(chunks) - 1]
