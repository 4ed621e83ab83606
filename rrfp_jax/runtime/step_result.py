"""What one training step gave, now or as a future."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from rrfp_jax.runtime.holding import Hold
from rrfp_jax.runtime.steps_under_way import StepOutcome
from rrfp_jax.schedules.timeline import StepSums, Timeline
from rrfp_jax.waiting import result_of


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave."""

    step: int
    loss: float
    """Summed loss over total weight."""
    weight: float
    """Total weight, for a language model the number of tokens."""
    grad_norm: float | None
    """Global norm of the gradient of ``loss`` before clipping; None where neither clipping nor skipping asks for it."""
    skipped: bool
    """Whether the update was left out; ``fault`` says why."""
    peak_memory_bytes: tuple[int, ...] = field(repr=False)
    """The most that each stage held during the step; since the start of the process where the backend counts."""
    peak_host_bytes: tuple[int, ...] = field(repr=False)
    """The most that operations of each stage had in host memory during the step."""
    timeline: Timeline = field(repr=False)
    """When every task ran, and why stages were idle: of the stages that this process hosts."""
    sums: StepSums = field(repr=False)
    """What the timelines of all stages add up to; in other processes than the first, of the stages hosted there."""
    stop: bool = field(repr=False)
    """Whether a process has asked to end the run; the same in all processes, as is ``save``."""
    save: bool = field(repr=False)
    """Whether it is time to save the state."""
    ended_s: float = field(repr=False)
    """When the step had ended on all stages (``time.perf_counter``)."""
    fault: str | None = field(default=None, repr=False)
    """The fault of the step: a loss or gradients that are not finite, no weight at all, or a negative one."""
    means: dict[str, float] = field(default_factory=dict, repr=False)
    """What the last chunk summed beside the loss, by name, over the total weight."""
    forwards_skipped: int = field(default=0, repr=False)
    """Pairs of a chunk and a microbatch that skipped it, such as encoders' and those without images."""


class StepMetrics:
    """The result of an enqueued step; ``result()`` waits for it."""

    def __init__(
        self,
        future: "Future[StepOutcome]",
        step: int,
        *,
        has_norm: bool,
        forwards_skipped: int,
        hold: Hold,
    ) -> None:
        self._future, self._step, self._has_norm = future, step, has_norm
        self._forwards_skipped = forwards_skipped
        self._hold = hold

    def done(self) -> bool:
        self._hold.check_process()
        return self._future.done()

    def result(self) -> StepResult:
        """Wait for the end of the step. Raises RunFailed, with the wait-for report, if the run cannot go on."""
        self._hold.check_process()
        outcome = result_of(self._future)
        verdict = outcome.result
        return StepResult(
            step=self._step,
            loss=verdict.loss,
            weight=verdict.weight,
            grad_norm=verdict.grad_norm if self._has_norm else None,
            skipped=not verdict.apply,
            fault=verdict.fault,
            peak_memory_bytes=tuple(outcome.peak_memory_bytes.values()),
            peak_host_bytes=tuple(outcome.peak_host_bytes.values()),
            timeline=outcome.timeline,
            sums=outcome.sums,
            stop=verdict.stop,
            save=verdict.save,
            means=verdict.means,
            ended_s=outcome.ended_s,
            forwards_skipped=self._forwards_skipped,
        )
