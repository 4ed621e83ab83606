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

Steps with other owners
-----------------------
A step may have owners of its microbatches other than the blocks of every replica (:mod:`rrfp_jax.core.replicas`); the
start of a step says which. A stage then has another number of microbatches, and others. It keeps its window or
footprint, its rules and its hint. A table that ranks what is ready is made anew for as many microbatches as the stage
owns, the i-th of the table being the i-th that it owns; where there is no such table, BF ranks. Memory is reserved
microbatch by microbatch, on all stages, whatever ranks the tasks (:mod:`rrfp_jax.core.memory`): tables made for
different numbers have no common order from which the rows of all stages come. A table that is followed strictly, or
that names operations, cannot have other owners.

Microbatches come in the sequence of their places within the blocks of the replicas, for memory as for hints. By number,
one that a replica has taken over would come behind or before all of its own, and the replica from whose block it is
would wait. Gradients that are added up in the order of their numbers keep that order.

The plan of one step
--------------------
It is the stage's full plan with the tasks of absent pairs taken out, ranked by its consumption.
Taking out costs a copy of the tables and a little for each absent pair of the stage and of its neighbours, where
building another plan costs far more; and it needs nothing but fixed tables, so that it may be done on any thread before
the step's turn comes. Nodes keep their numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.foresight import ArrivalTable, ForesightRules
from rrfp_jax.core.hints import BF, BF_DEEP, SCHEDULE_WEIGHTS_LAST, Consumption, Rank, ready, schedule_hint
from rrfp_jax.core.memory import AheadBound, RowMemory, canonical_row
from rrfp_jax.core.plan import FINISHED, NUM_LANES, Agreement, StagePlan, StepRules, stage_plan
from rrfp_jax.core.replicas import StepOwners, check_blocks, with_owners
from rrfp_jax.schedules import Absences, Pair, PipelineGraph, Placement, Task, TaskKind, bits

OUTPUTS_AHEAD = 4
"""How many outputs of a chunk may wait for their readers: one is read, one arrives, and two even out delays."""
EVALUATION = ready(BF_DEEP)
"""How stages pick their tasks while they evaluate."""


_MODES_KEPT = 4
"""How many owners' modes a stage keeps: with its plan a mode may take a megabyte, and owners seldom change."""
_Row = tuple[Task, ...]


class OtherRows:
    """The rows of one stage's table for other numbers of microbatches, made when they are first asked for.

    Args:
        make: returns the row for a number of microbatches, numbered from 0, or None where there is no such table.
        made: rows that are known.
    """

    def __init__(self, make: Callable[[int], _Row | None] = lambda _: None, made: dict[int, _Row | None] | None = None):
        self._make, self.made = make, {} if made is None else made

    def of(self, number: int) -> _Row | None:
        if number not in self.made:
            self.made[number] = self._make(number)
        return self.made[number]


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
    """How many activations the stage may hold, in units (:attr:`rrfp_jax.schedules.PipelineGraph.memory_unit`); None:
    the window counts."""
    evaluation_batches: int = 0
    """How many batches a step that evaluates runs; 0: no step evaluates."""
    other_rows: OtherRows = field(default_factory=OtherRows, compare=False)
    """The rows of the hint's table for steps in which the stage owns another number of microbatches."""
    owners: StepOwners | None = None
    """The owners of the microbatches, where these are not the blocks of every replica."""
    delay: int = 0
    """How many updates the weights of a step lack; 1: two steps may be under way (:mod:`rrfp_jax.core.overlap`)."""
    pairs: bool = False
    """Whether the stage runs two tasks as one program where it can (:mod:`rrfp_jax.core.dispatch`)."""

    def __post_init__(self) -> None:
        if self.delay:
            self._check_delay()
        if self.pairs and (self.certain_ahead or self.graph.ops):
            raise ValueError(
                "pairs are chosen when the stage is free, from its own tasks: leave out certain_ahead and operations"
            )
        has_row = not self.consumption.is_strict and self.consumption.hint.row is not None
        moves_memory = bool(self.graph.ops) and self.graph.operations.moves_memory
        has_order = has_row or moves_memory or self.owners is not None
        if (not has_row and self.foresight is not None) or (not has_order and self.footprint is not None):
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

    def _check_delay(self) -> None:
        if self.delay != 1:
            raise ValueError(f"delay is {self.delay}: at most one more step may be under way; give 0 or 1")
        refused = {
            "strict consumption, which keeps to the tasks of one step": self.consumption.is_strict,
            "a footprint, which counts the memory of one step": self.footprint is not None,
            "a window in bytes": self.capacity is not None,
            "foresight, which waits for tasks of one step": self.foresight is not None,
            "chunks that run F only, such as frozen encoders, whose read-ahead is bounded": bool(self.read_ahead),
            "operations beside compute": bool(self.graph.ops),
            "pairs, which end before the stage chooses again": self.pairs,
            "microbatches with other owners": self.owners is not None,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise ValueError(
                    f"steps that overlap (delay {self.delay}) do not go with {what}: leave out one of them"
                )

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
            owners=self.owners,
        )._in_sequence()

    @property
    def sequence(self) -> tuple[int, ...]:
        """The microbatches of the step in the order in which memory is reserved; empty: by number, or by a table."""
        if self.owners is None or (self.rules.ordered and not self.rules.by_messages):
            return ()
        share = self.graph.num_microbatches // self.graph.num_replicas
        return tuple(sorted(range(self.graph.num_microbatches), key=lambda m: (m % share, m)))

    def sequence_of(self, microbatches: range) -> tuple[int, ...]:
        """Returns those of a range in that order."""
        return tuple(m for m in self.sequence if m in microbatches)

    def _in_sequence(self) -> "StageSetup":
        """Returns the setup with a hint and bounds of read-ahead that go by the sequence."""
        if not self.sequence:
            return self
        place = {m: number for number, m in enumerate(self.sequence)}
        hint = self.consumption.hint

        def rank(task: Task) -> Rank:
            return hint.rank(task._replace(microbatch=place.get(task.microbatch, task.microbatch)))

        bounds = []
        for bound in self.read_ahead:
            turns = (m for m in self.sequence_of(self.graph.range_of(bound.chunk)) for _ in range(2))
            bounds.append(replace(bound, turns=tuple(turns)))
        ranked = self.consumption if hint.row is not None else ready(replace(hint, rank=rank))
        return replace(self, consumption=ranked, read_ahead=tuple(bounds))

    def with_owners(self, given: StepOwners) -> "StageSetup":
        """Returns the setup that the stage follows in steps with these owners.

        Raises ValueError for owners that do not fit the pipeline, and where the stage's order cannot have others.
        """
        if self.consumption.is_strict:
            raise ValueError(
                "strict consumption keeps to its table's microbatches, so owners cannot change: take consume ready"
            )
        graph = with_owners(self.graph, self.placement, given)
        if self.rules.ordered and self.rules.by_messages:
            check_blocks(graph)
        own = self.placement.chunks_of_stage[self.stage]
        consumption, hint = self.consumption, self.consumption.hint
        is_guided = hint.row is not None
        if is_guided:
            owned = {m for chunk in own for m in graph.microbatches(chunk)}
            row = self.other_rows.of(len(owned))
            is_guided = row is not None
            if row is None:
                consumption = ready(BF_DEEP if len(own) > 1 else BF)
            else:
                numbers = [
                    m for m in replace(self, owners=given).sequence or range(graph.num_microbatches) if m in owned
                ]
                tasks = (t._replace(microbatch=numbers[t.microbatch]) if t.microbatch >= 0 else t for t in row)
                consumption = ready(schedule_hint(tasks, weights_last=hint.name == SCHEDULE_WEIGHTS_LAST))
        return replace(
            self,
            graph=graph,
            consumption=consumption,
            foresight=self.foresight if is_guided else None,
            read_ahead=tuple(replace(b, turns=()) for b in self.read_ahead if graph.reads_ahead(b.chunk)),
            owners=given,
        )._in_sequence()


def outputs_ahead(graph: PipelineGraph) -> tuple[AheadBound, ...]:
    """Returns the bound of every chunk that others read; ``graph`` is the one of evaluation."""
    return tuple(AheadBound(chunk=c, limit=OUTPUTS_AHEAD) for c in range(graph.num_chunks) if graph.reads_ahead(c))


class StepMode:
    """All that is fixed for the steps of one kind on a stage: for steps that train, or for steps that evaluate."""

    def __init__(self, setup: StageSetup, *, evaluates: bool = False) -> None:
        self.graph, self.rules, self.consumption = setup.graph, setup.rules, setup.consumption
        self.footprint, self.capacity, self.evaluates = setup.footprint, setup.capacity, evaluates
        self.owners, self.foresight = setup.owners, setup.foresight
        is_strict = self.consumption.is_strict
        self.joins = setup.pairs
        """Whether tasks may start with a partner."""
        self.row_pairs = self.consumption.pairs if setup.pairs and is_strict else frozenset()
        """The entries of a row that is kept to which must start together."""
        self.limit = None if is_strict or setup.footprint is not None else setup.window
        """How many microbatches the stage may hold; None: as many as come."""
        self.read_ahead = () if is_strict else setup.read_ahead
        row = self.consumption.hint.row
        self.reserves_by_row = row is not None and setup.owners is None
        """Whether memory is reserved in the order in which a table ranks."""
        plan = stage_plan(setup.graph, setup.placement, setup.stage, setup.rules, has_row=self.reserves_by_row)
        self.full = StepPlan(plan, self.consumption, evaluates=evaluates, owners=setup.owners)
        """The plan of a step that lacks nothing."""
        self.row_tasks: Sequence[Task] = row or () if self.reserves_by_row else ()
        """The order in which memory is reserved: the table's, or else the canonical one."""
        self.row_memory: RowMemory | None = None
        if setup.footprint is not None:
            if not self.reserves_by_row:
                own = setup.placement.chunks_of_stage[setup.stage]
                self.row_tasks = canonical_row(setup.graph, own, setup.sequence)
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
        first = plan.first_microbatch
        self.sequence = setup.sequence_of(range(first, first + len(plan.tasks_per_microbatch)))
        """The order in which the window takes microbatches; empty: by number."""
        self.has_other_takers = self.row_memory is not None and self.row_memory.has_other_takers

    def partner_in_row(self, ranked: "StepPlan", position: int) -> int | None:
        """Returns the next position, if the row that the stage keeps to joins its task with the one at ``position``."""
        behind, tasks = position + 1, ranked.task_at
        if not self.row_pairs or behind == len(tasks):
            return None
        return behind if Pair(tasks[position], tasks[behind]) in self.row_pairs else None


class OwnerModes:
    """The modes of one stage's steps with other owners, of which the latest are kept; for any thread."""

    def __init__(self, setup: StageSetup) -> None:
        self._setup = setup
        self._kept: dict[tuple[StepOwners, bool], StepMode] = {}

    def of(self, owners: StepOwners, *, evaluates: bool) -> StepMode:
        """Returns the mode of steps with these owners. Raises ValueError as :meth:`StageSetup.with_owners`."""
        key = owners, evaluates
        known = self._kept.get(key)
        if known is None:
            setup = self._setup.with_owners(owners)
            known = StepMode(setup.evaluating() if evaluates else setup, evaluates=evaluates)
            # A new dictionary each time, since another thread may be reading the old one.
            self._kept = dict([*self._kept.items(), (key, known)][-_MODES_KEPT:])
        return known


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
        "owners",
        "plan",
        "position",
        "task_at",
        "weights",
    )

    def __init__(
        self,
        plan: StagePlan,
        consumption: Consumption,
        absent: Absences = (),
        *,
        evaluates: bool = False,
        owners: StepOwners | None = None,
    ) -> None:
        self.plan, self.absent, self.evaluates, self.owners = plan, absent, evaluates, owners
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
            return StepPlan(plan, consumption, absent, evaluates=self.evaluates, owners=self.owners)
        return self.changed(plan, absent, ())

    def changed(self, plan: StagePlan, absent: Absences, weights: tuple[int, ...]) -> "StepPlan":
        """Returns the same positions with another plan, and with weights of microbatches."""
        twin = object.__new__(StepPlan)
        twin._arrival_table = self._arrival_table if plan is self.plan else None
        twin.plan, twin.absent, twin.weights = plan, absent, weights
        twin.evaluates, twin.owners = self.evaluates, self.owners
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
            if self.rules.ordered and graph.updates(chunk) and not masks.keys().isdisjoint(graph.passes_of(chunk)):
                self._close_gaps(chunk, masks)
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

    def _close_gaps(self, chunk: int, masks: dict[int, int]) -> None:
        """Let accumulation in one order go on behind the microbatches that are left out."""
        graph, earlier, is_gap = self.graph, None, False
        share, block = graph.num_microbatches // graph.num_replicas, -1
        for task in graph.accumulations(chunk):
            m = task.microbatch
            if self.rules.by_messages and m // share != block:
                earlier, is_gap, block = None, False, m // share
            if masks.get(task.chunk, 0) >> m & 1:
                is_gap = True
                continue
            node = self.plan.index[task]
            if is_gap and earlier is not None:
                self.dependents[earlier] = (*self.dependents[earlier], node)
                self.needs[node] += 1
            earlier, is_gap = node, False
