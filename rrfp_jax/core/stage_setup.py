"""The parts of a stage's arbiter: its place in the pipeline, how it picks tasks, and the rules of each kind of step.

Steps that evaluate
-------------------
A step may run forwards alone, between two steps that train; the start of a step says so
(:attr:`rrfp_jax.core.events.StepStarted.evaluates`). Its graph is that of training with no edge that carries a gradient
and with no chunk that trains (:meth:`rrfp_jax.schedules.PipelineGraph.evaluating`), for as many batches as one such
step runs: the pipeline fills and drains once for all of them. Nothing is updated; the stages agree on the loss alone.

Forwards keep nothing for a backward, so no table, footprint or window of training has a meaning here. Whatever training
follows, a stage evaluates by readiness, the larger chunk first, which finishes the microbatches that have begun. Each
chunk runs at most :data:`OUTPUTS_AHEAD` outputs ahead of its readers (:mod:`rrfp_jax.core.memory`), so that inboxes
stay small. The window is as large as the step and refuses nothing.

Nothing can deadlock. Within the step it is the argument of the read-ahead under a window, for which a limit of 1
suffices. Between steps nothing is left: a stage ends the step when all its tasks have ended, and a chunk when all its
outputs have been taken. So the next step begins where it would have begun without the evaluation; messages of it that
come early are kept, as ever.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.hints import BF_DEEP, Consumption, ready
from rrfp_jax.core.memory import AheadBound, RowMemory, canonical_row
from rrfp_jax.core.plan import Agreement, StepRules, stage_plan
from rrfp_jax.core.step_plan import StepPlan
from rrfp_jax.schedules import PipelineGraph, Placement, Task

OUTPUTS_AHEAD = 4
"""How many outputs of a chunk may wait for their readers: one is read, one arrives, and two even out delays."""
EVALUATION = ready(BF_DEEP)
"""How stages pick their tasks while they evaluate."""


@dataclass(frozen=True)
class StageSetup:
    """The parts of a stage's arbiter; the same for all members of a group.

    Raises ValueError for foresight or a footprint without a table's row that ranks the ready tasks, and for a bound of
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
    """The most that the microbatches held may weigh together, in steps that give weights
    (:attr:`rrfp_jax.core.events.StepStarted.weights`); None: no step does."""
    rules: StepRules = StepRules()  # noqa: RUF009 - frozen
    """The parts of a step beyond the graph's tasks."""
    certain_ahead: bool = False
    """Whether the next task is handed over while one runs where the choice is certain
    (:mod:`rrfp_jax.core.dispatch`)."""
    foresight: ForesightRules | None = None
    """How the stage waits for its table's next entry; None: never."""
    read_ahead: tuple[AheadBound, ...] = ()
    """How far its chunks that run F only may run ahead of their readers (:mod:`rrfp_jax.core.memory`); chunks without
    a bound, and under strict consumption all, as far as they like."""
    footprint: int | None = None
    """How many activations the stage may hold, in units (:func:`rrfp_jax.core.memory.memory_unit`); None: the window
    counts."""
    evaluation_batches: int = 0
    """How many batches a step that evaluates runs; 0: no step evaluates."""

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

    def evaluating(self) -> "StageSetup":
        """Returns the setup that the stage follows while it evaluates."""
        graph = self.graph.evaluating(self.evaluation_batches)
        own = self.placement.chunks_of_stage[self.stage]
        return StageSetup(
            graph,
            self.placement,
            self.stage,
            consumption=EVALUATION,
            window=graph.num_microbatches,
            rules=StepRules(updates=False, agreement=Agreement.LOSS, tree_degree=self.rules.tree_degree),
            certain_ahead=self.certain_ahead,
            read_ahead=tuple(bound for bound in outputs_ahead(graph) if bound.chunk in own),
        )


def outputs_ahead(graph: PipelineGraph) -> tuple[AheadBound, ...]:
    """Returns the bound of every chunk that others read; ``graph`` is the one of evaluation."""
    return tuple(AheadBound(chunk=c, limit=OUTPUTS_AHEAD) for c in range(graph.num_chunks) if graph.reads_ahead(c))


class StepMode:
    """All that is fixed for the steps of one kind on a stage: for steps that train, or for steps that evaluate."""

    def __init__(self, setup: StageSetup, *, evaluates: bool = False) -> None:
        self.graph, self.rules, self.consumption = setup.graph, setup.rules, setup.consumption
        self.footprint, self.capacity, self.evaluates = setup.footprint, setup.capacity, evaluates
        is_strict = self.consumption.is_strict
        self.limit = None if is_strict or setup.footprint is not None else setup.window
        """How many microbatches the stage may hold; None: as many as come."""
        self.read_ahead = () if is_strict else setup.read_ahead
        row = self.consumption.hint.row
        self.follows_row = row is not None
        plan = stage_plan(setup.graph, setup.placement, setup.stage, setup.rules, has_row=self.follows_row)
        self.full = StepPlan(plan, self.consumption, evaluates=evaluates)
        """The plan of a step that lacks nothing."""
        self.row_tasks: Sequence[Task] = row or ()
        """The order in which memory is reserved: the table's, or else the canonical one."""
        self.row_memory: RowMemory | None = None
        if setup.footprint is not None:
            if row is None:
                self.row_tasks = canonical_row(setup.graph, setup.placement.chunks_of_stage[setup.stage])
            self.row_memory = RowMemory(self.full, setup.graph, self.row_tasks)
            self.row_memory.check_limit(setup.footprint, setup.stage)
        self.has_other_takers = self.row_memory is not None and self.row_memory.has_other_takers
