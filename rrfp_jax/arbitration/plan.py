"""One stage's share of a step, compiled into small tables of integers.

A plan numbers the stage's tasks and *gates* and counts, for each, what it waits for. A gate is a condition that fires
by itself and may send messages; it is never dispatched. The gates of a step are

* *gradients complete* of a chunk that shares parameters with a chunk elsewhere: all its B (or W) are done; sends its
  share of the gradients;
* *report*: the stage has done what the step's agreement needs from it; sends its report to the coordinator;
* *verdict*: on the coordinator, all reports are in; sends the verdict. On every other stage, the verdict has arrived.

Plans are immutable and shared; an arbiter's own state is a copy of ``needs`` that it counts down.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from rrfp_jax.arbitration.events import Message, MessageKind
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind

LANE = {TaskKind.F: 0, TaskKind.B: 1, TaskKind.I: 1, TaskKind.W: 2, TaskKind.R: 3, TaskKind.U: 3}
"""Ready tasks queue in four lanes: forwards, input gradients, weight gradients, and the tasks of the step's end."""
NUM_LANES = 4


class Agreement(StrEnum):
    """What the stages agree on once per step before any optimizer update."""

    NONE = "none"
    """Nothing: a stage ends its step on its own."""
    LOSS = "loss"
    """The total weight of the loss: only stages that compute a loss report."""
    ALL = "all"
    """Also the gradient norm and whether everything is finite: every stage reports after its last R."""


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What a step consists of beyond the graph's own tasks."""

    ordered: bool = False
    """Accumulate each chunk's gradients in microbatch order (deterministic mode)."""
    updates: bool = True
    """End the step with R and U of every chunk that has a backward."""
    agreement: Agreement = Agreement.ALL
    """What the stages agree on between R and U."""
    lockstep: bool = False
    """End the step in one fixed order on each stage, all R and then all U by chunk, as collectives between replicas
    of a stage need it."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The tables of one stage; see the module's description. Nodes below ``len(tasks)`` are tasks, the rest gates."""

    stage: int
    tasks: tuple[Task, ...]
    gate_names: tuple[str, ...]
    needs: tuple[int, ...]
    """How many finished nodes and arrived messages each node waits for."""
    dependents: tuple[tuple[int, ...], ...]
    """The nodes of this stage that wait for each node."""
    sends: tuple[tuple[tuple[Message, int], ...], ...]
    """What each node sends when it finishes, and to which stages."""
    arrivals: dict[Message, tuple[int, ...]]
    """The nodes that wait for each message."""
    index: dict[Task, int]
    lanes: tuple[int, ...]
    """The ready lane of each task."""
    tasks_per_microbatch: tuple[int, ...]
    """How many F, B, I and W tasks this stage has for each microbatch."""

    @property
    def num_nodes(self) -> int:
        return len(self.needs)

    def name(self, node: int) -> str:
        """A node's name in messages to people."""
        return str(self.tasks[node]) if node < len(self.tasks) else self.gate_names[node - len(self.tasks)]

    def prerequisites(self, node: int) -> tuple[int | Message, ...]:
        """The nodes and messages that ``node`` waits for."""
        return self._prerequisites[node]

    @cached_property
    def _prerequisites(self) -> tuple[tuple[int | Message, ...], ...]:
        """``dependents`` and ``arrivals`` the other way round; only tests and reports to people need it."""
        before: list[list[int | Message]] = [[] for _ in self.needs]
        for other, nodes in enumerate(self.dependents):
            for node in nodes:
                before[node].append(other)
        for message, nodes in self.arrivals.items():
            for node in nodes:
                before[node].append(message)
        return tuple(map(tuple, before))


def stage_plan(graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules) -> StagePlan:
    """Compile the plan of one stage; raises ValueError where graph and placement do not fit together."""
    if graph.num_chunks != placement.num_chunks:
        raise ValueError(
            f"the graph has {graph.num_chunks} chunks and the placement {placement.num_chunks}: they must agree"
        )
    return _PlanBuilder(graph, placement, stage, rules).build()


class _PlanBuilder:
    def __init__(self, graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules) -> None:
        self.graph, self.placement, self.stage, self.rules = graph, placement, stage, rules
        self.chunks = placement.chunks_of_stage[stage]
        self.tasks = list(graph.tasks(self.chunks))
        self.trained = [c for c in self.chunks if graph.has_backward(c)] if rules.updates else []
        for kind in (TaskKind.R, TaskKind.U):
            self.tasks += [Task(kind, c) for c in self.trained]
        self.index = {task: node for node, task in enumerate(self.tasks)}
        self.gate_names: list[str] = []
        self.needs = [0] * len(self.tasks)
        self.dependents: list[list[int]] = [[] for _ in self.tasks]
        self.sends: list[list[tuple[Message, int]]] = [[] for _ in self.tasks]
        self.arrivals: dict[Message, list[int]] = {}

    def build(self) -> StagePlan:
        for task in self.tasks:
            if task.microbatch >= 0:
                self._wire_task(task)
        if self.rules.ordered:
            self._wire_order()
        for position, chunk in enumerate(self.trained):
            self._wire_reduction(chunk, self.trained[:position])
        self._wire_agreement()
        per_microbatch = [0] * self.graph.num_microbatches
        for task in self.tasks:
            if task.microbatch >= 0:
                per_microbatch[task.microbatch] += 1
        return StagePlan(
            stage=self.stage,
            tasks=tuple(self.tasks),
            gate_names=tuple(self.gate_names),
            needs=tuple(self.needs),
            dependents=tuple(map(tuple, self.dependents)),
            sends=tuple(map(tuple, self.sends)),
            arrivals={message: tuple(nodes) for message, nodes in self.arrivals.items()},
            index=self.index,
            lanes=tuple(LANE[task.kind] for task in self.tasks),
            tasks_per_microbatch=tuple(per_microbatch),
        )

    def _gate(self, name: str) -> int:
        self.gate_names.append(name)
        self.needs.append(0)
        self.dependents.append([])
        self.sends.append([])
        return len(self.needs) - 1

    def _after(self, node: int, prerequisite: int) -> None:
        self.dependents[prerequisite].append(node)
        self.needs[node] += 1

    def _after_message(self, node: int, message: Message) -> None:
        self.arrivals.setdefault(message, []).append(node)
        self.needs[node] += 1

    def _wire_task(self, task: Task) -> None:
        node = self.index[task]
        for dependency in self.graph.dependencies(task):
            if dependency in self.index:
                self._after(node, self.index[dependency])
            else:
                self._after_message(node, _data_message(dependency, task))
        for receiver in self._receivers(task):
            stage = self.placement.stage_of_chunk[receiver.chunk]
            if stage != self.stage:
                self.sends[node].append((_data_message(task, receiver), stage))

    def _receivers(self, task: Task) -> Iterator[Task]:
        """The tasks of other chunks that wait for ``task``."""
        kind, chunk, m = task
        if kind is TaskKind.F:
            yield from (Task(TaskKind.F, s, m) for s in self.graph.successors(chunk) if self.graph.exists(s, m))
        elif kind is not TaskKind.W:
            for p in self.graph.gradient_predecessors(chunk):
                if self.graph.exists(p, m):
                    yield Task(self.graph.input_gradient_kind(p), p, m)

    def _wire_order(self) -> None:
        for chunk in self.chunks:
            if not self.graph.has_backward(chunk):
                continue
            kind = self.graph.accumulating_kind(chunk)
            nodes = [self.index[Task(kind, chunk, m)] for m in self.graph.microbatches(chunk)]
            for earlier, later in pairwise(nodes):
                self._after(later, earlier)

    def _wire_reduction(self, chunk: int, earlier: list[int]) -> None:
        """R of a chunk: after the chunk's and its sharers' gradients, and after R of the stage's smaller chunks."""
        reduction = self.index[Task(TaskKind.R, chunk)]
        if earlier:
            self._after(reduction, self.index[Task(TaskKind.R, earlier[-1])])
        for sharer in self.graph.sharing(chunk):
            if not self.graph.has_backward(sharer):
                continue
            if self.placement.stage_of_chunk[sharer] == self.stage:
                for node in self._accumulations(sharer):
                    self._after(reduction, node)
            else:
                self._after_message(reduction, Message(MessageKind.SHARED, sharer, chunk))
        remote = [
            (Message(MessageKind.SHARED, chunk, sharer), self.placement.stage_of_chunk[sharer])
            for sharer in self.graph.sharing(chunk)
            if self.graph.has_backward(sharer) and self.placement.stage_of_chunk[sharer] != self.stage
        ]
        if remote:
            gate = self._gate(f"gradients of chunk {chunk} complete")
            for node in self._accumulations(chunk):
                self._after(gate, node)
            self.sends[gate] += remote

    def _accumulations(self, chunk: int) -> list[int]:
        kind = self.graph.accumulating_kind(chunk)
        return [self.index[Task(kind, chunk, m)] for m in self.graph.microbatches(chunk)]

    def _wire_agreement(self) -> None:
        """U after R and, where the stages agree on something, after the verdict."""
        updates = [self.index[Task(TaskKind.U, c)] for c in self.trained]
        for chunk, update in zip(self.trained, updates, strict=True):
            self._after(update, self.index[Task(TaskKind.R, self.trained[-1] if self.rules.lockstep else chunk)])
        if self.rules.lockstep:
            for earlier, later in pairwise(updates):
                self._after(later, earlier)
        if self.rules.agreement is Agreement.NONE:
            return
        reporters = reporting_stages(self.graph, self.placement, self.rules)
        coordinator = reporters[0]
        verdict = self._gate("verdict")
        for update in updates:
            self._after(update, verdict)
        if self.stage in reporters:
            report = self._gate("report")
            for node in self._reported():
                self._after(report, node)
            if self.stage == coordinator:
                self._after(verdict, report)
            else:
                self.sends[report].append((Message(MessageKind.REPORT, self.stage, coordinator), coordinator))
        if self.stage != coordinator:
            self._after_message(verdict, Message(MessageKind.VERDICT, coordinator, self.stage))
            return
        for other in reporters[1:]:
            self._after_message(verdict, Message(MessageKind.REPORT, other, coordinator))
        self.sends[verdict] += [
            (Message(MessageKind.VERDICT, coordinator, other), other)
            for other in range(self.placement.num_stages)
            if other != coordinator
        ]

    def _reported(self) -> list[int]:
        if self.rules.agreement is Agreement.ALL:
            return [node for node, task in enumerate(self.tasks) if task.kind is not TaskKind.U]
        return [
            node
            for node, task in enumerate(self.tasks)
            if task.kind is TaskKind.F and not self.graph.successors(task.chunk)
        ]


def reporting_stages(graph: PipelineGraph, placement: Placement, rules: StepRules) -> tuple[int, ...]:
    """The stages that report to the step's agreement, ascending; the first of them coordinates."""
    if rules.agreement is Agreement.NONE:
        return ()
    if rules.agreement is Agreement.ALL:
        return tuple(range(placement.num_stages))
    sinks = (c for c in range(graph.num_chunks) if not graph.successors(c))
    return tuple(sorted({placement.stage_of_chunk[c] for c in sinks}))


def _data_message(producer: Task, consumer: Task) -> Message:
    kind = MessageKind.ACTIVATION if producer.kind is TaskKind.F else MessageKind.GRADIENT
    return Message(kind, producer.chunk, consumer.chunk, producer.microbatch)
