"""What the runtime asks of a stage: carry out tasks, hand out what messages carry, take what messages bring.

One implementation runs the compiled programs of real chunks (:mod:`rrfp_jax.runtime.program_stage`), another emulates
them (:mod:`rrfp_jax.testing.emulated_stage`). ``run`` is called on the stage's compute thread and everything else on
the event loop, so ``run`` alone may wait for a device; all others must return within microseconds.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rrfp_jax.arbitration import Message
from rrfp_jax.tasks import PipelineGraph, Task

Batch = Mapping[str, Any]
"""A step's batch: leaves of shape [num_microbatches, ...]."""


class StageOutcome(NamedTuple):
    """What a step leaves on one stage."""

    result: Any = None
    """Alike on all stages."""
    peak_memory_bytes: int = 0
    """The most that the stage held during the step."""


class StageExecutor(Protocol):
    """The work of one stage."""

    def begin(self, step: int, batch: Batch, graph: PipelineGraph) -> None:
        """The batch of a step is here; the step itself may start later. ``graph`` is the step's own."""

    def run(self, step: int, task: Task) -> None:
        """Run one task to its end; called on the compute thread, one task at a time."""

    def payload(self, step: int, message: Message) -> Any:
        """What this message carries; called once, after the task that produces it has finished."""

    def accept(self, step: int, message: Message, payload: Any) -> None:
        """A message's content; it may belong to a step that has not begun here, and it may be a second delivery."""

    def finish(self, step: int) -> StageOutcome:
        """The step is done on this stage: free what it held and return its outcome."""
