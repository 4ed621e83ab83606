"""The plan of one step: the stage's full plan with the tasks of absent pairs taken out, ranked by its consumption.

Taking out costs a copy of the tables and a little for each absent pair of the stage and of its neighbours, where
building another plan costs far more; and it needs nothing but fixed tables, so that it may be done on any thread before
the step's turn comes. Nodes keep their numbers.
"""

from dataclasses import replace

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.foresight import ArrivalTable
from rrfp_jax.core.hints import Consumption
from rrfp_jax.core.plan import FINISHED, NUM_LANES, StagePlan, StepRules
from rrfp_jax.schedules import Absences, PipelineGraph, Task, TaskKind, bits


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
        return self._with(plan, absent, ())

    def weighing(self, weights: tuple[int, ...]) -> "StepPlan":
        """Returns the plan of a step in which microbatches have these weights."""
        return self._with(self.plan, self.absent, weights)

    def _with(self, plan: StagePlan, absent: Absences, weights: tuple[int, ...]) -> "StepPlan":
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
            self.removed |= self._pointless_gates()
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
            lets_go={node: self._let_go(node, masks) for node in plan.lets_go},
            absent=frozenset(self.removed),
        )

    def _pointless_gates(self) -> set[int]:
        """Returns the gates that stand before removed tasks alone: the gates of their inputs."""
        plan = self.plan
        before = (gate for node in self.removed for gate in plan.prerequisites[node])
        gates = {gate for gate in before if isinstance(gate, int) and gate >= len(plan.tasks)}
        return {gate for gate in gates if self.removed.issuperset(plan.dependents[gate])}

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

    def _let_go(self, node: int, masks: dict[int, int]) -> tuple[int, ...]:
        m = self.plan.tasks[node].microbatch
        return tuple(c for c in self.plan.lets_go[node] if not masks.get(c, 0) >> m & 1)

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
