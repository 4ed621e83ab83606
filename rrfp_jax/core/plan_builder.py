"""How a stage's plan is made: who feeds whom here, by end or by message."""

from itertools import pairwise

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.plan import StagePlan, StepRules
from rrfp_jax.core.plan_end import StepEnd
from rrfp_jax.schedules import PipelineGraph, Placement, Task, TaskKind


def stage_plan(
    graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules, *, has_row: bool = True
) -> StagePlan:
    """Compile the plan of one stage; raises ValueError where graph and placement do not fit together.

    ``has_row``: whether an order names every task. Without one, an operation that takes memory back for a task is
    issued once all other inputs of that task are here.
    """
    if graph.num_chunks != placement.num_chunks:
        raise ValueError(
            f"the graph has {graph.num_chunks} chunks and the placement {placement.num_chunks}: they must agree"
        )
    return _PlanBuilder(graph, placement, stage, rules, has_row=has_row).build()


class _PlanBuilder(StepEnd):
    """What tasks with a microbatch wait for, and operations; :meth:`build` makes all of it a plan."""

    def build(self) -> StagePlan:
        for chunk in self.chunks:
            self._wire_forwards(chunk)
            if self.graph.has_backward(chunk):
                self._wire_backwards(chunk)
            elif self.graph.successors(chunk):
                self._wire_readers(chunk)
        if self.rules.ordered:
            self._wire_order()
        for chunk in self.trained:
            self._wire_reduction(chunk)
        if self.rules.lockstep:
            reductions = [self.index[Task(TaskKind.R, chunk)] for chunk in reversed(self.trained)]
            for before, after in pairwise(reductions):
                self._after(after, before)
        if self.graph.ops:
            self._wire_operations()
        self._wire_agreement()
        first = min(self.graph.range_of(c).start for c in self.chunks)
        per_microbatch = [0] * (max(self.graph.range_of(c).stop for c in self.chunks) - first)
        for task in self.tasks[: self.num_microbatch_tasks]:
            per_microbatch[task.microbatch - first] += 1
        return StagePlan(
            stage=self.stage,
            tasks=tuple(self.tasks),
            gate_names=tuple(self.gate_names),
            needs=tuple(self.needs),
            dependents=tuple(map(tuple, self.dependents)),
            sends=tuple(map(tuple, self.sends)),
            arrivals={message: number for number, message in enumerate(self.arrivals)},
            messages=tuple(self.arrivals),
            awaited_by=tuple(self.arrivals.values()),
            index=self.index,
            lanes=tuple(map(self._lane, self.tasks)),
            first_microbatch=first,
            tasks_per_microbatch=tuple(per_microbatch),
            holds=self.holds,
            lets_go=self.lets_go,
            engines=self.engines,
            once=range(len(self.tasks) - len(self.once), len(self.tasks)),
        )

    def _wire_forwards(self, chunk: int) -> None:
        nodes = self._nodes(TaskKind.F, chunk)
        for p in self.graph.predecessors(chunk):
            self._receive(nodes, TaskKind.F, p, MessageKind.ACTIVATION, chunk)
            if self.graph.reads_ahead(p):
                self._send(nodes, MessageKind.TAKEN, chunk, p)
        for s in self.graph.successors(chunk):
            self._send(nodes, MessageKind.ACTIVATION, chunk, s)

    def _wire_readers(self, chunk: int) -> None:
        """What lets go of the outputs of a chunk that reads ahead."""
        forwards = self._nodes(TaskKind.F, chunk)
        ends = dict.fromkeys(forwards, 1)
        for node in forwards.values():
            self._let_go(node, chunk)
        readers = self.graph.successors(chunk)
        for s in readers:
            for m in self.graph.microbatches(s):
                if m in forwards:
                    ends[m] += 1
        elsewhere = [s for s in readers if self.placement.stage_of_chunk[s] != self.stage]
        for s in set(readers).difference(elsewhere):
            for m, node in self._nodes(TaskKind.F, s).items():
                if m in forwards:
                    self._let_go(node, chunk)
        if elsewhere:
            gate = self._gate(f"outputs of chunk {chunk} taken")
            for s in elsewhere:
                for m in self.graph.microbatches(s):
                    if m in forwards:
                        self._after_message(gate, Message(MessageKind.TAKEN, s, chunk, m))
        self.holds[chunk] = tuple(ends.get(m, 0) for m in self.graph.range_of(chunk))

    def _let_go(self, node: int, chunk: int) -> None:
        self.lets_go[node] = (*self.lets_go.get(node, ()), chunk)

    def _wire_backwards(self, chunk: int) -> None:
        graph = self.graph
        nodes = self._nodes(graph.input_gradient_kind(chunk), chunk)
        for m, forward in self._nodes(TaskKind.F, chunk).items():
            self._after(nodes[m], forward)
        for s in graph.gradient_successors(chunk):
            self._receive(nodes, graph.input_gradient_kind(s), s, MessageKind.GRADIENT, chunk)
        for p in graph.gradient_predecessors(chunk):
            self._send(nodes, MessageKind.GRADIENT, chunk, p)
        if graph.accumulating_kind(chunk) is TaskKind.W:
            for m, weight in self._nodes(TaskKind.W, chunk).items():
                self._after(weight, nodes[m])

    def _receive(self, nodes: dict[int, int], kind: TaskKind, source: int, carried: MessageKind, chunk: int) -> None:
        """The tasks of ``chunk`` wait for those of this kind of chunk ``source``, by themselves or by message."""
        if self.placement.stage_of_chunk[source] == self.stage:
            for m, node in self._nodes(kind, source).items():
                if m in nodes:
                    self._after(nodes[m], node)
            return
        for m in self.graph.microbatches(source):
            if m in nodes:
                self._after_message(nodes[m], Message(carried, source, chunk, m))

    def _send(self, nodes: dict[int, int], carried: MessageKind, chunk: int, target: int) -> None:
        stage = self.placement.stage_of_chunk[target]
        if stage != self.stage:
            for m in self.graph.microbatches(target):
                if m in nodes:
                    self.sends[nodes[m]].append((Message(carried, chunk, target, m), stage))

    def _wire_order(self) -> None:
        for chunk in self.chunks:
            if self.graph.trains(chunk):
                for earlier, later in pairwise(self._accumulations(chunk)):
                    self._after(later, earlier)

    def _wire_operations(self) -> None:
        """What operations wait for, and what waits for them; all on this stage, as an operation is on a chunk."""
        operations = self.graph.operations
        for task, node in self.index.items():
            own = task.kind in operations.by_letter
            for needed in operations.dependencies(task) if own else operations.before(task):
                if needed in self.index:  # a step without updates has no R and U
                    self._after(node, self.index[needed])
        if not self.has_row:
            for op in self.graph.ops:
                if op.holds and op.before:
                    self._issue_with_inputs(TaskKind(op.letter))

    def _issue_with_inputs(self, kind: TaskKind) -> None:
        """An operation that takes memory waits for what the task waits for that it comes before: messages, and tasks of
        the stage's other chunks."""
        waiting: dict[int, list[Message]] = {}
        for message, node in self.arrivals.items():
            waiting.setdefault(node, []).append(message)
        for task, node in self.index.items():
            if task.kind is not kind:
                continue
            for follower in self.dependents[node]:
                if follower in waiting:
                    self._gather(follower, waiting.pop(follower))
                if follower in self.input_gates:
                    self._after(node, self.input_gates[follower])
                needed = self.graph.dependencies(self.tasks[follower])
                self._after(node, *(self.index[t] for t in needed if t.chunk != task.chunk and t in self.index))

    def _gather(self, node: int, messages: list[Message]) -> None:
        """Let one gate wait for all messages of a task, for others to wait for it too."""
        self.input_gates[node] = gate = self._gate(f"inputs of {self.tasks[node]}")
        for message in messages:
            self.arrivals[message] = gate
        self.needs[gate] = len(messages)
        self.needs[node] -= len(messages)
        self._after(node, gate)
