"""What the arbiter of a stage is made of, in one record: its place in the pipeline, and how it picks its tasks."""

from dataclasses import KW_ONLY, dataclass

from rrfp_jax.arbitration.consumption import Consumption
from rrfp_jax.arbitration.plan import StepRules
from rrfp_jax.tasks import PipelineGraph, Placement


@dataclass(frozen=True)
class StageSetup:
    """What the arbiter of a stage is made of; the same for all members of a group."""

    graph: PipelineGraph
    placement: Placement
    stage: int
    _: KW_ONLY
    consumption: Consumption
    """:func:`ready` with a hint, or :func:`strict` with a table's row."""
    window: int
    """How many microbatches the stage may hold; strict consumption ignores it."""
    rules: StepRules = StepRules()  # noqa: RUF009 - frozen
    """What a step consists of beyond the graph's tasks."""
    dispatch_ahead: int = 0
    """How many tasks may be dispatched before the running one has finished (hides host latency)."""
