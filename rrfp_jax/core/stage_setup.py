"""What the arbiter of a stage is made of, in one record: its place in the pipeline, and how it picks its tasks."""

from dataclasses import KW_ONLY, dataclass

from rrfp_jax.core.consumption import Consumption
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.plan import StepRules
from rrfp_jax.core.read_ahead import AheadBound
from rrfp_jax.schedules import PipelineGraph, Placement


@dataclass(frozen=True)
class StageSetup:
    """What the arbiter of a stage is made of; the same for all members of a group.

    Raises ValueError for foresight or a footprint without a table's row that ranks what is ready, and for a bound of
    read-ahead that is too small or for no chunk of the stage that has one.
    """

    graph: PipelineGraph
    placement: Placement
    stage: int
    _: KW_ONLY
    consumption: Consumption
    """:func:`ready` with a hint, or :func:`strict` with a table's row."""
    window: int
    """How many microbatches the stage may hold; strict consumption, and a footprint, take its place."""
    capacity: int | None = None
    """What the microbatches held may weigh together, in steps that say what each weighs
    (:attr:`rrfp_jax.core.events.StepStarted.weights`); None: no step does."""
    rules: StepRules = StepRules()  # noqa: RUF009 - frozen
    """What a step consists of beyond the graph's tasks."""
    certain_ahead: bool = False
    """Whether the next task is handed over while one runs where nothing that may still happen changes the choice
    (:mod:`rrfp_jax.core.certainty`)."""
    foresight: ForesightRules | None = None
    """How the stage waits for what its table names next; None: never."""
    read_ahead: tuple[AheadBound, ...] = ()
    """How far its chunks that run F only may run ahead of their readers (:mod:`rrfp_jax.core.read_ahead`), those
    that are not named as far as they like; under strict consumption all."""
    footprint: int | None = None
    """How many activations the stage may hold (:mod:`rrfp_jax.core.footprint`), in units
    (:func:`rrfp_jax.core.footprint.memory_unit`); None: the window counts."""
    evaluation_batches: int = 0
    """How many batches a step runs that evaluates (:mod:`rrfp_jax.core.evaluation`); 0: no step does."""

    def __post_init__(self) -> None:
        has_row = not self.consumption.is_strict and self.consumption.hint.row is not None
        moves_memory = bool(self.graph.ops) and self.graph.operations.moves_memory
        if not has_row and (self.foresight is not None or (self.footprint is not None and not moves_memory)):
            raise ValueError("foresight and footprint need a table as hint, whose row they follow")
        if moves_memory and self.footprint is None:
            raise ValueError("operations that move memory need a footprint: say how many activations a stage may hold")
        if self.capacity is not None and (self.consumption.is_strict or self.footprint is not None):
            raise ValueError(
                "a capacity takes the place of the window: strict consumption and a footprint heed neither"
            )
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"capacity of stage {self.stage} is {self.capacity}: it must hold at least 1")
        for bound in self.read_ahead:
            if bound.chunk not in self.placement.chunks_of_stage[self.stage]:
                raise ValueError(f"chunk {bound.chunk}, whose read-ahead is bounded, is not on stage {self.stage}")
            bound.check(self.graph)
