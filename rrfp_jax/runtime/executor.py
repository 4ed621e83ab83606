"""What the runtime asks of a stage: carry out tasks, hand out what messages carry, take what messages bring.

One implementation runs the compiled programs of real chunks (:mod:`rrfp_jax.runtime.program_stage`), another emulates
them (:mod:`rrfp_jax.testing.emulated_stage`). ``launch`` is called on the stage's compute thread, and what it returns
is waited for there or on the stage's waiting thread (:mod:`rrfp_jax.runtime.compute`). Everything else is called in
turns (:mod:`rrfp_jax.runtime.turns`), one call at a time, and must return within microseconds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rrfp_jax.core import Message
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.schedules import PipelineGraph, Task


def _nothing() -> None:
    return


class Launched(NamedTuple):
    """A task that the stage's devices have been given."""

    begun_s: float
    """When they can have begun it, unless they were busy (``time.perf_counter``)."""
    wait: Callable[[], None] = _nothing
    """Waits, without holding up other threads, until the task has ended, and raises what it failed with. Called once,
    in the order of launches."""


class StageOutcome(NamedTuple):
    """What a step leaves on one stage."""

    result: Any = None
    """Alike on all stages."""
    peak_memory_bytes: int = 0
    """The most that the stage held during the step on its devices."""
    peak_host_bytes: int = 0
    """And in host memory, where operations put it there."""


class HandsAhead(Protocol):
    """What an executor offers besides, where devices wait for inputs by themselves: its outputs can be handed on as
    their tasks are launched."""

    hands_ahead: bool
    """Whether it does."""

    def ahead(self, step: int, message: Message) -> Any:
        """What :meth:`StageExecutor.payload` will return for a stage of this process, and still will; None before its
        task was launched, and after it was handed out. On any thread."""

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        """Take a message's content before it is delivered, from the stage that makes it, and the delivery for a second
        one; tells whether it is here now. On the compute thread."""


class StageExecutor(Protocol):
    """The work of one stage."""

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:
        """The batch of a step is here; the step itself may start later. ``graph`` is the step's own."""

    def launch(self, step: int, task: Task) -> Launched:
        """Give one task to the devices; they run a stage's tasks one after another, in the order of launches.

        The tasks before may still be running, so what they made may be used here and not waited for.
        """

    def payload(self, step: int, message: Message) -> Any:
        """What this message carries; called once, after the task that produces it has ended and was waited for."""

    def accept(self, step: int, message: Message, payload: Any) -> None:
        """A message's content; it may belong to a step that has not begun here, and it may be a second delivery."""

    def finish(self, step: int) -> StageOutcome:
        """The step is done on this stage: free what it held and return its outcome."""
