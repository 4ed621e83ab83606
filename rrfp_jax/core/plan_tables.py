"""The tables of a stage's plan while it is made: its tasks, its gates, and what waits for what."""

from rrfp_jax.core.engines import lane_number
from rrfp_jax.core.events import Message
from rrfp_jax.core.plan import LANE, StepRules
from rrfp_jax.schedules import COMPUTE, PipelineGraph, Placement, Task, TaskKind


class PlanTables:
    """A plan that grows; the classes that inherit from this one say what waits for what."""

    def __init__(
        self, graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules, *, has_row: bool
    ) -> None:
        self.graph, self.placement, self.stage, self.rules = graph, placement, stage, rules
        self.has_row = has_row
        self.chunks = placement.chunks_of_stage[stage]
        self.tasks = list(graph.tasks(self.chunks))
        self.num_microbatch_tasks = len(self.tasks)
        self.trained = [c for c in self.chunks if graph.trains(c)] if rules.updates else []
        for kind in (TaskKind.R, TaskKind.U):
            self.tasks += [Task(kind, c) for c in self.trained]
        self.once = list(graph.operations.once(self.chunks)) if graph.ops else []
        self.tasks += self.once
        lanes = {graph.lane(task.kind): None for task in self.tasks} if graph.ops else {}
        self.engines = tuple(lane for lane in lanes if lane != COMPUTE)
        self.index = {task: node for node, task in enumerate(self.tasks)}
        self.gate_names: list[str] = []
        self.needs = [0] * len(self.tasks)
        self.dependents: list[list[int]] = [[] for _ in self.tasks]
        self.sends: list[list[tuple[Message, int]]] = [[] for _ in self.tasks]
        self.arrivals: dict[Message, int] = {}
        self.nodes: dict[tuple[TaskKind, int], dict[int, int]] = {}
        self.input_gates: dict[int, int] = {}
        self.holds: dict[int, tuple[int, ...]] = {}
        self.lets_go: dict[int, tuple[int, ...]] = {}

    def _lane(self, task: Task) -> int:
        known = LANE.get(task.kind)
        if known is not None:
            return known
        op = self.graph.operations.by_letter[task.kind]
        if op.is_beside:
            return lane_number(self.engines.index(op.lane))
        if task.microbatch < 0:
            return LANE[TaskKind.R]
        return LANE[TaskKind.B] if op.before else LANE[TaskKind.W]

    def _gate(self, name: str) -> int:
        self.gate_names.append(name)
        self.needs.append(0)
        self.dependents.append([])
        self.sends.append([])
        return len(self.needs) - 1

    def _after(self, node: int, *prerequisites: int) -> None:
        for prerequisite in prerequisites:
            self.dependents[prerequisite].append(node)
        self.needs[node] += len(prerequisites)

    def _after_message(self, node: int, message: Message) -> None:
        self.arrivals[message] = node
        self.needs[node] += 1

    def _nodes(self, kind: TaskKind, chunk: int) -> dict[int, int]:
        """A chunk's tasks of one kind, by microbatch."""
        if (kind, chunk) not in self.nodes:
            self.nodes[kind, chunk] = {m: self.index[Task(kind, chunk, m)] for m in self.graph.microbatches(chunk)}
        return self.nodes[kind, chunk]

    def _accumulations(self, chunk: int) -> list[int]:
        return list(self._nodes(self.graph.accumulating_kind(chunk), chunk).values())
