"""The plan of one step: the stage's full plan with the tasks of absent pairs taken out, ranked by its consumption.

Taking out costs a copy of the tables and a little for each absent pair of the stage and of its neighbours, where
building another plan costs far more; and it needs nothing but fixed tables, so that it may be done on any thread before
the step's turn comes. Nodes keep their numbers.
"""

from rrfp_jax.arbitration.consumption import Consumption
from rrfp_jax.arbitration.events import Message, MessageKind
from rrfp_jax.arbitration.plan import FINISHED, StagePlan, StepRules
from rrfp_jax.tasks import Absences, PipelineGraph, Task, bits


class StepPlan:
    """A plan with its consumption's order: what is fixed during a step. A position is a task's place in that order."""

    __slots__ = ("absent", "at", "forwards_of", "microbatch_at", "plan", "position")

    def __init__(self, plan: StagePlan, consumption: Consumption, absent: Absences = ()) -> None:
        self.plan, self.absent = plan, absent
        self.at = consumption.order(plan)
        position = [-1] * len(plan.tasks)
        for place, node in enumerate(self.at):
            position[node] = place
        self.position = tuple(position)
        self.microbatch_at = tuple(plan.tasks[node].microbatch for node in self.at)
        self.forwards_of: dict[int, list[int]] = {}
        for place, node in enumerate(self.at):
            if not plan.lanes[node]:
                self.forwards_of.setdefault(plan.tasks[node].microbatch, []).append(place)

    def without(self, absent: Absences, graph: PipelineGraph, rules: StepRules, consumption: Consumption) -> "StepPlan":
        """The plan of a step without these pairs of ``graph``, on which this full plan was built."""
        if not absent:
            return self
        plan = _Removal(self.plan, graph, rules).of(dict(absent))
        if consumption.is_strict:  # which counts positions through its row
            return StepPlan(plan, consumption, absent)
        twin = object.__new__(StepPlan)
        twin.plan, twin.absent = plan, absent
        twin.at, twin.position = self.at, self.position
        twin.microbatch_at, twin.forwards_of = self.microbatch_at, self.forwards_of
        return twin


class _Removal:
    """The tables of a plan while tasks are taken out of them."""

    def __init__(self, plan: StagePlan, graph: PipelineGraph, rules: StepRules) -> None:
        self.plan, self.graph, self.rules = plan, graph, rules
        self.needs, self.dependents, self.sends = list(plan.needs), list(plan.dependents), list(plan.sends)
        self.arrivals = plan.arrivals.copy()
        self.removed: set[int] = set()

    def of(self, masks: dict[int, int]) -> StagePlan:
        """The plan without the microbatches in the mask of each chunk."""
        plan, graph = self.plan, self.graph
        own = dict.fromkeys(task.chunk for task in plan.tasks)
        self.removed = {
            plan.index[task]
            for chunk in own
            for m in bits(masks.get(chunk, 0) & graph.present(chunk))
            for kind in graph.kinds(chunk)
            for task in [Task(kind, chunk, m)]
        }
        per_microbatch = list(plan.tasks_per_microbatch)
        for node in self.removed:
            per_microbatch[plan.tasks[node].microbatch - plan.first_microbatch] -= 1
            self._remove(node)
        for node in self.removed:
            self.needs[node] = FINISHED
        for chunk in own:
            self._forget_messages(chunk, masks)
            if self.rules.ordered and chunk in masks and graph.trains(chunk):
                self._close_gaps(chunk, masks[chunk])
        return StagePlan(
            stage=plan.stage,
            tasks=plan.tasks,
            gate_names=plan.gate_names,
            needs=tuple(self.needs),
            dependents=tuple(self.dependents),
            sends=tuple(self.sends),
            arrivals=self.arrivals,
            index=plan.index,
            lanes=plan.lanes,
            first_microbatch=plan.first_microbatch,
            tasks_per_microbatch=tuple(per_microbatch),
            absent=frozenset(self.removed),
        )

    def _remove(self, node: int) -> None:
        for dependent in self.plan.dependents[node]:
            self.needs[dependent] -= 1
        self.dependents[node] = self.sends[node] = ()
        for before in self.plan.prerequisites(node):
            if isinstance(before, Message):
                del self.arrivals[before]
            elif before not in self.removed:
                self.dependents[before] = tuple(d for d in self.dependents[before] if d not in self.removed)

    def _forget_messages(self, chunk: int, masks: dict[int, int]) -> None:
        """Between a chunk's tasks that are left and neighbours elsewhere that the step lacks."""
        graph, index = self.graph, self.plan.index
        left = graph.present(chunk) & ~masks.get(chunk, 0)
        neighbours = [(MessageKind.ACTIVATION, p, MessageKind.GRADIENT) for p in graph.predecessors(chunk)]
        neighbours += [(MessageKind.GRADIENT, s, MessageKind.ACTIVATION) for s in graph.successors(chunk)]
        for received, other, sent in neighbours:
            kind = graph.input_gradient_kind(chunk) if sent is MessageKind.GRADIENT else graph.kinds(chunk)[0]
            for m in bits(left & masks.get(other, 0)):
                node = self.arrivals.pop(Message(received, other, chunk, m), None)
                if node is not None:
                    self.needs[node] -= 1
                sender = index.get(Task(kind, chunk, m))
                if sender is not None:
                    told = Message(sent, chunk, other, m)
                    self.sends[sender] = tuple(send for send in self.sends[sender] if send[0] != told)

    def _close_gaps(self, chunk: int, mask: int) -> None:
        """Accumulation in microbatch order goes on behind the microbatches that are left out."""
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
