"""Start all stages of a pipeline in this process."""

from collections.abc import Callable, Sequence

import jax

from rrfp_jax.arbitration import StageArbiter
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.executor import StageExecutor
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.runtime.transport import Deliver, InProcessTransport


def start_in_process(
    arbiters: Sequence[StageArbiter],
    make_stage: Callable[[int, Ship], StageExecutor],
    shardings: Sequence[jax.sharding.Sharding],
    *,
    progress_deadline_s: float,
    log_steps: int,
) -> PipelineRuntime:
    """A running runtime of ``len(arbiters)`` stages, which exchange their outputs within this process.

    ``make_stage(stage, ship)`` builds the executor of each stage; ``shardings[stage]`` says where its inputs must lie.
    """
    transports: list[InProcessTransport] = []

    def make_transport(deliver: Deliver) -> InProcessTransport:
        transports.append(InProcessTransport(deliver, dict(enumerate(shardings))))
        return transports[0]

    def ship(value: object, stage: int) -> object:
        return transports[0].ship(value, stage)

    return PipelineRuntime(
        arbiters,
        [make_stage(arbiter.stage, ship) for arbiter in arbiters],
        make_transport,
        progress_deadline_s=progress_deadline_s,
        log_steps=log_steps,
    )
