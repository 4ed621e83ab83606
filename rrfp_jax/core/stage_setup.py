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

The plan of one step
--------------------
It is the stage's full plan with the tasks of absent pairs taken out, ranked by its consumption.
Taking out costs a copy of the tables and a little for each absent pair of the stage and of its neighbours, where
building another plan costs far more; and it needs nothing but fixed tables, so that it may be done on any thread before
the step's turn comes. Nodes keep their numbers.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.foresight import ArrivalTable, ForesightRules
from rrfp_jax.core.hints import BF_DEEP, Consumption, ready
from rrfp_jax.core.memory import AheadBound, RowMemory, canonical_row
from rrfp_jax.core.plan import FINISHED, NUM_LANES, Agreement, StagePlan, StepRules, stage_plan
from rrfp_jax.schedules import Absences, PipelineGraph, Placement, Task, TaskKind, bits

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
            self.row_memory = RowMemory(plan, self.full.at, setup.graph, self.row_tasks)
            memory, limit = self.row_memory, setup.footprint
            if memory.unnamed:
                some = ", ".join(map(str, memory.unnamed[:3]))
                raise ValueError(
                    f"the row of stage {setup.stage} lacks {some}, and memory follows it: name every task, once"
                )
            if memory.peak > limit:
                peak, least = memory.peak / memory.unit, -(-memory.peak // memory.unit)
                raise ValueError(
                    f"the footprint of stage {setup.stage} is {limit / memory.unit:g} activations and its table holds "
                    f"{peak:g}: allow at least {least}, or take a schedule with a lower peak"
                )
        self.has_other_takers = self.row_memory is not None and self.row_memory.has_other_takers


# -- the plan of one step ----------------------------------------------------------------------------------------------


class StepPlan:
    """A plan with its consumption's order, fixed during a step. A position is a task's place in that order."""

    __slots__ = (
        "_arrival_table",
        "absent",
        "at",
        "evaluates",
        "forwards_of",
        "in_lanes",
        "microbatch_at",
        "plan",
        "position",
        "task_at",
        "weights",
    )

    def __init__(
        self, plan: StagePlan, consumption: Consumption, absent: Absences = (), *, evaluates: bool = False
    ) -> None:
        self.plan, self.absent, self.evaluates = plan, absent, evaluates
        self._arrival_table: ArrivalTable | None = None
        self.weights: tuple[int, ...] = ()
        """The weight of each microbatch, for the event that starts the step."""
        self.at = consumption.order(plan)
        position = [-1] * len(plan.tasks)
        for place, node in enumerate(self.at):
            position[node] = place
        self.position = tuple(position)
        self.task_at = tuple(plan.tasks[node] for node in self.at)
        self.microbatch_at = tuple(task.microbatch for task in self.task_at)
        self.in_lanes: tuple[list[int], ...] = tuple([] for _ in range(NUM_LANES))
        """The positions of each lane's tasks, ascending."""
        for place, node in enumerate(self.at):
            if plan.lanes[node] >= 0:
                self.in_lanes[plan.lanes[node]].append(place)
        self.forwards_of: dict[int, list[int]] = {}
        for place, node in enumerate(self.at):
            if not plan.lanes[node]:
                self.forwards_of.setdefault(plan.tasks[node].microbatch, []).append(place)

    @property
    def arrival_table(self) -> ArrivalTable:
        """The table that foresight reads. Made when it is first asked for, since other orders need none."""
        if self._arrival_table is None:
            self._arrival_table = ArrivalTable(self.plan, self.task_at)
        return self._arrival_table

    def without(self, absent: Absences, graph: PipelineGraph, rules: StepRules, consumption: Consumption) -> "StepPlan":
        """Returns the plan of a step without these pairs of ``graph``, on which this full plan was built."""
        if not absent:
            return self
        plan = _Removal(self.plan, graph, rules).plan_without(dict(absent))
        # Strict consumption counts positions through its row, so it needs them without gaps.
        if consumption.is_strict:
            return StepPlan(plan, consumption, absent, evaluates=self.evaluates)
        return self.changed(plan, absent, ())

    def changed(self, plan: StagePlan, absent: Absences, weights: tuple[int, ...]) -> "StepPlan":
        """Returns the same positions with another plan, and with weights of microbatches."""
        twin = object.__new__(StepPlan)
        twin._arrival_table = self._arrival_table if plan is self.plan else None
        twin.plan, twin.absent, twin.weights, twin.evaluates = plan, absent, weights, self.evaluates
        twin.at, twin.position, twin.task_at = self.at, self.position, self.task_at
        twin.microbatch_at, twin.forwards_of, twin.in_lanes = self.microbatch_at, self.forwards_of, self.in_lanes
        return twin


class _Removal:
    """The tables of a plan while tasks are taken out of them."""

    def __init__(self, plan: StagePlan, graph: PipelineGraph, rules: StepRules) -> None:
        self.plan, self.graph, self.rules = plan, graph, rules
        self.needs, self.dependents, self.sends = list(plan.needs), list(plan.dependents), list(plan.sends)
        self.arrivals = plan.arrivals.copy()
        self.removed: set[int] = set()

    def plan_without(self, masks: dict[int, int]) -> StagePlan:
        """Returns the plan without the microbatches in the mask of each chunk."""
        plan, graph = self.plan, self.graph
        own = dict.fromkeys(task.chunk for task in plan.tasks)
        self.removed = {
            plan.index[task]
            for chunk in own
            for m in bits(masks.get(chunk, 0) & graph.present(chunk))
            for kind in graph.kinds(chunk)
            for task in [Task(kind, chunk, m)]
            if task in plan.index
        }
        per_microbatch = list(plan.tasks_per_microbatch)
        for node in self.removed:
            per_microbatch[plan.tasks[node].microbatch - plan.first_microbatch] -= 1
        if graph.ops:
            # Gates that stand before removed tasks alone, the gates of their inputs, go too.
            before = {gate for node in self.removed for gate in plan.prerequisites[node] if isinstance(gate, int)}
            gates = {gate for gate in before if gate >= len(plan.tasks)}
            self.removed |= {gate for gate in gates if self.removed.issuperset(plan.dependents[gate])}
        for node in self.removed:
            self._remove(node)
        for node in self.removed:
            self.needs[node] = FINISHED
        for chunk in own:
            self._forget_messages(chunk, masks)
            self._forget_readers(chunk, masks)
            if self.rules.ordered and chunk in masks and graph.trains(chunk):
                self._close_gaps(chunk, masks[chunk])
        return replace(
            plan,
            needs=tuple(self.needs),
            dependents=tuple(self.dependents),
            sends=tuple(self.sends),
            arrivals=self.arrivals,
            tasks_per_microbatch=tuple(per_microbatch),
            holds={chunk: self._holds(chunk, masks) for chunk in plan.holds},
            lets_go={
                node: tuple(c for c in chunks if not masks.get(c, 0) >> plan.tasks[node].microbatch & 1)
                for node, chunks in plan.lets_go.items()
            },
            absent=frozenset(self.removed),
        )

    def _remove(self, node: int) -> None:
        for dependent in self.plan.dependents[node]:
            self.needs[dependent] -= 1
        self.dependents[node] = self.sends[node] = ()
        for before in self.plan.prerequisites[node]:
            if isinstance(before, Message):
                del self.arrivals[before]
            elif before not in self.removed:
                self.dependents[before] = tuple(d for d in self.dependents[before] if d not in self.removed)

    def _forget_messages(self, chunk: int, masks: dict[int, int]) -> None:
        """Take out the messages between a chunk's tasks that are left and neighbours elsewhere that the step lacks."""
        graph, index = self.graph, self.plan.index
        left = graph.present(chunk) & ~masks.get(chunk, 0)
        neighbours = [(MessageKind.ACTIVATION, p, MessageKind.GRADIENT) for p in graph.predecessors(chunk)]
        neighbours += [(MessageKind.GRADIENT, s, MessageKind.ACTIVATION) for s in graph.successors(chunk)]
        for received, other, sent in neighbours:
            kind = graph.input_gradient_kind(chunk) if sent is MessageKind.GRADIENT else TaskKind.F
            for m in bits(left & masks.get(other, 0)):
                self._forget(Message(received, other, chunk, m))
                sender = index.get(Task(kind, chunk, m))
                if sender is not None:
                    message = Message(sent, chunk, other, m)
                    self.sends[sender] = tuple(send for send in self.sends[sender] if send[0] != message)

    def _forget_readers(self, chunk: int, masks: dict[int, int]) -> None:
        """Take out receipts where the step lacks the reader or the output that it would read."""
        graph, index, absent = self.graph, self.plan.index, masks.get(chunk, 0)
        for s in graph.successors(chunk) if graph.reads_ahead(chunk) else ():
            for m in bits(absent | masks.get(s, 0)):
                self._forget(Message(MessageKind.TAKEN, s, chunk, m))
        for p in filter(graph.reads_ahead, graph.predecessors(chunk)):
            for m in bits(graph.present(chunk) & ~absent & masks.get(p, 0)):
                node, receipt = index[Task(TaskKind.F, chunk, m)], Message(MessageKind.TAKEN, chunk, p, m)
                self.sends[node] = tuple(send for send in self.sends[node] if send[0] != receipt)

    def _forget(self, message: Message) -> None:
        """Let nothing wait for this message any more, if anything did."""
        number = self.arrivals.pop(message, None)
        if number is not None:
            self.needs[self.plan.awaited_by[number]] -= 1

    def _holds(self, chunk: int, masks: dict[int, int]) -> tuple[int, ...]:
        """Returns how many ends let go of each microbatch, without the ends of absent readers."""
        graph = self.graph

        def runs(c: int, m: int) -> bool:
            return graph.exists(c, m) and not masks.get(c, 0) >> m & 1

        readers = graph.successors(chunk)
        return tuple(1 + sum(runs(s, m) for s in readers) if runs(chunk, m) else 0 for m in graph.range_of(chunk))

    def _close_gaps(self, chunk: int, mask: int) -> None:
        """Let accumulation in microbatch order go on behind the microbatches that are left out."""
        graph, index = self.graph, self.plan.index
        kind, earlier, is_gap = graph.accumulating_kind(chunk), None, False
        for m in graph.microbatches(chunk):
            if mask >> m & 1:
                is_gap = True
                continue
            node = index[Task(kind, chunk, m)]
            if is_gap and earlier is not None:
                self.dependents[earlier] = (*self.dependents[earlier], node)
                self.needs[node] += 1
            earlier, is_gap = node, False
