"""One stage's share of a step, compiled into small tables of integers.

A plan numbers the stage's tasks and *gates* and counts, for each, the nodes and messages that it waits for. A gate is a
condition that fires by itself and may send messages; it is never dispatched. The gates of a step are

* *gradients complete* of a chunk that shares parameters with a chunk of another stage: all its B (or W) are done; sends
  its share of the gradients;
* *complete here* and *complete in all replicas*, of a chunk with copies in other replicas: they send to each other
  along a tree of the replicas, up and then down, and R follows;
* *gradients complete*, *sums complete* and *shares complete* of a chunk whose replicas add up by messages: below;
* *report*: the stage has done its part of the step's agreement, and the reports of the stages below it in the tree of
  stages (:func:`report_tree`) are in; sends one report for all of them to the stage above;
* *taken*, of a chunk that reads ahead (:mod:`rrfp_jax.core.memory`): all its readers on other stages have sent their
  receipts, so that the chunk's step ends no sooner;
* *verdict*: on the root, the first stage, its report is complete; elsewhere, the verdict has arrived from above. Sends
  it to the stages below.

Sums by messages
----------------
The gradients of a chunk are cut into as many pieces as the graph has replicas. Piece k is added up by the k-th of the
replicas in which the chunk is not lost, modulo their number. As its gradients are complete a replica sends every piece
to the replica that adds it up. R of a chunk adds up the pieces of its replica: it waits for its own gradients and for
their pieces of all other living replicas, and its end sends the sums to these. Once R has ended and all other sums are
here, they are *complete*: U may run, and the stage may report. So a stage that knows the verdict has all that its
updates need. Chunks of one replica that share parameters send their shared layers' pieces straight to the replicas that
add them up for each of them.
In deterministic mode a replica that runs several blocks of microbatches makes a sum of each, in microbatch order, and
sends pieces of each (:func:`blocks_of`). So whoever runs a block, the same terms are added up in the same order.

Where replicas share the optimizer state too (:attr:`StepRules.shares`), a chunk's parameters have as many shares as
there are replicas. Two replicas hold the state of each share and update it (:func:`share_holders`). As its U ends, the
first of them sends the share's parameters to the replicas that do not hold it, whose step ends once all shares are
*complete*. So every parameter is up to date at the end of a step, and each share outlives the loss of one holder.

Plans are immutable and shared; an arbiter's own state is a copy of ``needs`` that it counts down. The plan of a step in
which some pairs are absent is the full one with their tasks taken out (:mod:`rrfp_jax.core.stage_setup`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.layout import CONTROL_DEGREE, children, parent
from rrfp_jax.schedules import COMPUTE, PipelineGraph, Placement, Task, TaskKind, bits

LANE = {TaskKind.F: 0, TaskKind.B: 1, TaskKind.I: 1, TaskKind.W: 2, TaskKind.R: 3, TaskKind.U: 3}
"""Ready tasks queue in four lanes: forwards, input gradients, weight gradients, and the tasks of the step's end."""
NUM_LANES = 4

RUNNING, FINISHED, DUE = -1, -2, -3
"""Values in place of a node's count of missing prerequisites: a dispatched task; a node that has finished, or that the
step lacks; a task that is about to end, behind which another one may be dispatched."""


class Agreement(StrEnum):
    """The subject on which all stages agree once per step before any optimizer update."""

    NONE = "none"
    """No agreement: a stage ends its step on its own."""
    LOSS = "loss"
    """The total weight of the loss: a stage reports once its losses are computed, without any as the step begins."""
    ALL = "all"
    """Also the gradient norm and whether everything is finite: every stage reports after its last R."""


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """The parts of a step beyond the graph's own tasks. Raises ValueError for a tree that cannot be."""

    ordered: bool = False
    """Accumulate each chunk's gradients in microbatch order (deterministic mode); by messages in each block alone."""
    updates: bool = True
    """End the step with R and U of every chunk that has a backward."""
    agreement: Agreement = Agreement.ALL
    """The subject on which the stages agree between R and U."""
    lockstep: bool = False
    """End the step in one fixed order on each stage, as collectives between replicas of a stage need it: all R from the
    last chunk to the first, as backwards complete them, and then all U from the first to the last."""
    by_messages: bool = False
    """Whether the replicas of a stage add up their gradients by messages, in pieces, instead of all together in R. Not
    in lockstep."""
    shares: bool = False
    """Whether each replica updates the shares of a chunk's parameters that it holds alone, and gets the others."""
    tree_degree: int = CONTROL_DEGREE
    """How many stages report to the same one at most."""

    def __post_init__(self) -> None:
        if self.tree_degree < 1:
            raise ValueError(f"tree_degree is {self.tree_degree}: at least 1 stage must report to another")
        if self.by_messages and self.lockstep:
            raise ValueError("replicas that add up by messages end no step in lockstep: leave out one of both")
        if self.shares and not self.by_messages:
            raise ValueError("replicas that send each other shares of parameters add up by messages: give both")


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The tables of one stage. Nodes below ``len(tasks)`` are tasks, the rest gates."""

    stage: int
    tasks: tuple[Task, ...]
    gate_names: tuple[str, ...]
    needs: tuple[int, ...]
    """How many finished nodes and arrived messages each node waits for."""
    dependents: tuple[tuple[int, ...], ...]
    """The nodes of this stage that wait for each node."""
    sends: tuple[tuple[tuple[Message, int], ...], ...]
    """The messages that each node sends when it finishes, and the receiving stages."""
    arrivals: dict[Message, int]
    """The number of each message that comes from another stage."""
    messages: tuple[Message, ...]
    """The message of each number, also those that the step lacks."""
    awaited_by: tuple[int, ...]
    """The node that waits for each message, by its number."""
    index: dict[Task, int]
    lanes: tuple[int, ...]
    """The ready lane of each task; below 0 for engines beside compute: -1 for the first, -2 for the second."""
    first_microbatch: int
    tasks_per_microbatch: tuple[int, ...]
    """How many F, B, I and W tasks this stage has for each microbatch, from ``first_microbatch`` on."""
    holds: dict[int, tuple[int, ...]]
    """For each chunk that reads ahead, and each microbatch of its range, how many ends let go of it: the end of its own
    F and of each reader's F; 0 where it is absent."""
    lets_go: dict[int, tuple[int, ...]]
    """The chunks of which a node's end lets a microbatch go."""
    engines: tuple[str, ...] = ()
    """The lanes beside compute that this stage's operations keep busy."""
    once: range = range(0)
    """The operations that run once per step."""
    absent: frozenset[int] = frozenset()
    """The nodes that this step lacks: nothing waits for them, and they wait for nothing."""

    @property
    def num_nodes(self) -> int:
        return len(self.needs)

    def present(self) -> list[tuple[int, Task]]:
        return [(node, task) for node, task in enumerate(self.tasks) if node not in self.absent]

    def name(self, node: int) -> str:
        return str(self.tasks[node]) if node < len(self.tasks) else self.gate_names[node - len(self.tasks)]

    @cached_property
    def prerequisites(self) -> tuple[tuple[int | Message, ...], ...]:
        """The nodes and messages that each node waits for: ``dependents`` and ``arrivals`` the other way round."""
        before: list[list[int | Message]] = [[] for _ in self.needs]
        for other, nodes in enumerate(self.dependents):
            for node in nodes:
                before[node].append(other)
        for message, number in self.arrivals.items():
            before[self.awaited_by[number]].append(message)
        return tuple(map(tuple, before))


def report_tree(
    graph: PipelineGraph, placement: Placement, stage: int, degree: int
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the stage to which a stage reports, None for the root, and those that report to it.

    The tree (:mod:`rrfp_jax.layout`) is over all stages but those whose chunks are lost.
    """
    if not graph.lost:
        return parent(stage, degree), tuple(children(stage, placement.num_stages, degree))
    living = [s for s, chunks in enumerate(placement.chunks_of_stage) if not graph.lost.issuperset(chunks)]
    place = living.index(stage)
    above = parent(place, degree)
    return None if above is None else living[above], tuple(living[c] for c in children(place, len(living), degree))


def pieces_of_chunks(sharers: Iterable[int], num_replicas: int) -> dict[int, tuple[int, ...]]:
    """Returns the pieces that each of these chunks adds up: ascending copies in living replicas of one or more chunks.

    There are always ``num_replicas`` pieces, so that their sums keep their bits where a replica is lost.
    """
    copies: dict[int, list[int]] = {}
    for chunk in sharers:
        copies.setdefault(chunk // num_replicas, []).append(chunk)
    return {
        chunk: tuple(range(rank, num_replicas, len(living)))
        for living in copies.values()
        for rank, chunk in enumerate(living)
    }


def blocks_of(graph: PipelineGraph, chunk: int, *, ordered: bool) -> tuple[int, ...]:
    """Returns the blocks of microbatches of which this chunk makes a sum each.

    Piece ``k`` of the sum at place ``p`` among them travels as number ``p * graph.num_replicas + k``. Unless
    ``ordered``, there is one sum of all microbatches, in the place of the replica's own block.
    """
    base, replica = divmod(chunk, graph.num_replicas)
    if not ordered or not graph.holders:
        return (replica,)
    return tuple(block for block, holder in enumerate(graph.holders[base]) if holder == replica)


def share_holders(share: int, living: Iterable[int], num_replicas: int) -> tuple[int, ...]:
    """Returns the replicas that hold a share of the optimizer state: the first two that live, from its own number on.

    A holder that lives stays one whoever else is lost.
    """
    return tuple(sorted(living, key=lambda replica: (replica - share) % num_replicas)[:2])


def shares_of(graph: PipelineGraph, chunk: int) -> dict[int, tuple[int, list[int]]]:
    """Returns, for each share of a chunk's parameters, the copy that sends it and the living ones that do not hold it;
    nothing for a chunk that does not train."""
    number, base = graph.num_replicas, chunk - chunk % graph.num_replicas
    sharers = filter(graph.updates, graph.sharing(chunk) if graph.updates(chunk) else ())
    living = [c - base for c in sharers if c - base in range(number)]
    shares = {}
    for share in range(number if living else 0):
        holders = share_holders(share, living, number)
        shares[share] = base + holders[0], [base + other for other in living if other not in holders]
    return shares


def end_followers(plan: StagePlan, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the nodes among these that wait for real ends: gates, and the tasks of engines beside compute."""
    lanes, num_tasks = plan.lanes, len(plan.tasks)
    return tuple([node for node in nodes if node >= num_tasks or lanes[node] < 0])


def stage_plan(
    graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules, *, has_row: bool = True
) -> StagePlan:
    """Returns the plan of one stage; raises ValueError where graph and placement do not fit together.

    ``has_row``: whether an order names every task. Without one, an operation that takes memory back for a task is
    issued once all other inputs of that task are here.
    """
    if graph.num_chunks != placement.num_chunks:
        raise ValueError(
            f"the graph has {graph.num_chunks} chunks and the placement {placement.num_chunks}: they must agree"
        )
    for group in graph.passes:
        if len({placement.stage_of_chunk[chunk] for chunk in group}) > 1:
            raise ValueError(
                f"chunks {group} are passes of the same parameters and lie on different stages: put them on one"
            )
    if graph.lost and graph.lost.issuperset(placement.chunks_of_stage[stage]):
        raise ValueError(f"stage {stage} is lost: it takes no part in such a step")
    return _PlanBuilder(graph, placement, stage, rules, has_row=has_row).build()


class _PlanBuilder:
    """The tables of a plan while it is made."""

    def __init__(
        self, graph: PipelineGraph, placement: Placement, stage: int, rules: StepRules, *, has_row: bool
    ) -> None:
        self.graph, self.placement, self.stage, self.rules = graph, placement, stage, rules
        self.has_row = has_row
        self.chunks = placement.chunks_of_stage[stage]
        self.tasks = list(graph.tasks(self.chunks))
        self.num_microbatch_tasks = len(self.tasks)
        self.trained = [c for c in self.chunks if graph.updates(c)] if rules.updates else []
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
        self.sums: dict[int, int] = {}
        """The gates of chunks whose sums come by messages."""
        self.holds: dict[int, tuple[int, ...]] = {}
        self.lets_go: dict[int, tuple[int, ...]] = {}

    def build(self) -> StagePlan:
        for chunk in self.chunks:
            self._wire_forwards(chunk)
            if self.graph.has_backward(chunk):
                self._wire_backwards(chunk)
            elif self.graph.successors(chunk):
                self._wire_readers(chunk)
        for chunk in filter(self.graph.updates, self.chunks) if self.rules.ordered else ():
            self._wire_order(chunk)
        for chunk in self.trained:
            self._wire_reduction(chunk)
            if self.rules.shares:
                self._wire_shares(chunk)
        if self.rules.lockstep:
            reductions = [self.index[Task(TaskKind.R, chunk)] for chunk in reversed(self.trained)]
            for before, after in pairwise(reductions):
                self._after(after, before)
        if self.graph.ops:
            self._wire_operations()
        self._wire_agreement()
        ranges = [own for c in self.chunks if (own := self.graph.range_of(c))]
        first = min((own.start for own in ranges), default=0)
        per_microbatch = [0] * (max((own.stop for own in ranges), default=0) - first)
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
        """Count the ends that let go of each output of a chunk that reads ahead, and wait for receipts."""
        forwards = self._nodes(TaskKind.F, chunk)
        ends = dict.fromkeys(forwards, 1)
        let_go = list(forwards.values())
        readers = self.graph.successors(chunk)
        for s in readers:
            for m in self.graph.microbatches(s):
                if m in forwards:
                    ends[m] += 1
        elsewhere = [s for s in readers if self.placement.stage_of_chunk[s] != self.stage]
        for s in set(readers).difference(elsewhere):
            let_go += [node for m, node in self._nodes(TaskKind.F, s).items() if m in forwards]
        for node in let_go:
            self.lets_go[node] = (*self.lets_go.get(node, ()), chunk)
        if elsewhere:
            gate = self._gate(f"outputs of chunk {chunk} taken")
            for s in elsewhere:
                for m in self.graph.microbatches(s):
                    if m in forwards:
                        self._after_message(gate, Message(MessageKind.TAKEN, s, chunk, m))
        self.holds[chunk] = tuple(ends.get(m, 0) for m in self.graph.range_of(chunk))

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
        """Let the tasks of ``chunk`` wait for the tasks of this kind of chunk ``source``, directly or by message."""
        if self.placement.stage_of_chunk[source] == self.stage:
            for m, node in self._nodes(kind, source).items():
                if m in nodes:
                    self._after(nodes[m], node)
            return
        for m, node in self._common(nodes, chunk, source):
            self._after_message(node, Message(carried, source, chunk, m))

    def _send(self, nodes: dict[int, int], carried: MessageKind, chunk: int, target: int) -> None:
        stage = self.placement.stage_of_chunk[target]
        if stage != self.stage:
            for m, node in self._common(nodes, chunk, target):
                self.sends[node].append((Message(carried, chunk, target, m), stage))

    def _common(self, nodes: dict[int, int], chunk: int, other: int) -> Iterable[tuple[int, int]]:
        """Returns a chunk's microbatches that another one has too, with their nodes."""
        own = self.graph.present(chunk)
        common = own & self.graph.present(other)
        return nodes.items() if common == own else [(m, nodes[m]) for m in bits(common)]

    def _wire_operations(self) -> None:
        """Wire operations to their prerequisites and followers, which are all on this stage, as an operation is on a
        chunk."""
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
        """Let an operation that takes memory wait for all other inputs of the task that it comes before.

        Issued sooner, it would hold memory that forwards need meanwhile (:mod:`rrfp_jax.core.memory`).
        """
        waiting: dict[int, list[Message]] = {}
        for message, node in self.arrivals.items():
            waiting.setdefault(node, []).append(message)
        for task, node in self.index.items():
            if task.kind is not kind:
                continue
            for follower in self.dependents[node]:
                if follower in waiting:
                    # One gate waits for all messages of the follower, so that the operation can wait for it too.
                    messages = waiting.pop(follower)
                    self.input_gates[follower] = gate = self._gate(f"inputs of {self.tasks[follower]}")
                    for message in messages:
                        self.arrivals[message] = gate
                    self.needs[gate] = len(messages)
                    self.needs[follower] -= len(messages)
                    self._after(follower, gate)
                if follower in self.input_gates:
                    self._after(node, self.input_gates[follower])
                needed = self.graph.dependencies(self.tasks[follower])
                self._after(node, *(self.index[t] for t in needed if t.chunk != task.chunk and t in self.index))

    def _wire_order(self, chunk: int) -> None:
        """Let the gradients of a chunk be added up in one order, within each block where blocks are sums."""
        share = self.graph.num_microbatches // self.graph.num_replicas
        for earlier, later in pairwise(self.graph.accumulations(chunk)):
            if not self.rules.by_messages or earlier.microbatch // share == later.microbatch // share:
                self._after(self.index[later], self.index[earlier])

    def _wire_reduction(self, chunk: int) -> None:
        """Let R of a chunk wait for the gradients of all chunks that share its parameters."""
        reduction = self.index[Task(TaskKind.R, chunk)]
        if self.rules.by_messages and self.graph.num_replicas > 1:
            self._wire_pieces(chunk, reduction)
            return
        own, copies = self._sharers(chunk)
        stage_of = self.placement.stage_of_chunk
        complete = [node for c in own if stage_of[c] == self.stage for node in self._accumulations(c)]
        remote = [c for c in own if stage_of[c] != self.stage]
        if remote:
            gate = self._gate(f"gradients of chunk {chunk} complete")
            self._after(gate, *self._accumulations(chunk))
            for c in remote:
                self._tell_sharer(gate, chunk, c)
        waiting = reduction if len(copies) == 1 else self._wire_replicas(chunk, copies, reduction)
        self._after(waiting, *complete)
        for c in remote:
            self._after_message(waiting, Message(MessageKind.SHARED, c, chunk))

    def _wire_replicas(self, chunk: int, copies: list[int], reduction: int) -> int:
        """Let R of a chunk wait for all replicas, which send to each other along a tree. Returns the gate of this
        one."""
        place, degree, shared = copies.index(chunk), self.rules.tree_degree, MessageKind.SHARED
        above, below = parent(place, degree), children(place, len(copies), degree)
        here = self._gate(f"chunk {chunk} complete here and in the replicas below")
        everywhere = self._gate(f"chunk {chunk} complete in all replicas")
        for child in below:
            self._after_message(here, Message(shared, copies[child], chunk))
            self._tell_sharer(everywhere, chunk, copies[child])
        if above is None:
            self._after(everywhere, here)
        else:
            self._tell_sharer(here, chunk, copies[above])
            self._after_message(everywhere, Message(shared, copies[above], chunk))
        self._after(reduction, everywhere)
        return here

    def _wire_pieces(self, chunk: int, reduction: int) -> None:
        """Let R of a chunk wait for the pieces that its replica adds up, and its sums for those of the others."""
        stage_of, num_replicas = self.placement.stage_of_chunk, self.graph.num_replicas
        sharers = [c for c in self.graph.sharing(chunk) if self.graph.updates(c)]
        pieces = pieces_of_chunks(sharers, num_replicas)
        complete = self._gate(f"gradients of chunk {chunk} complete here")
        self._after(complete, *self._accumulations(chunk))
        self._after(reduction, *self._accumulations(chunk))
        sums = self.sums[chunk] = self._gate(f"sums of chunk {chunk} complete")
        self._after(sums, reduction)
        for other in sharers:
            if stage_of[other] != self.stage:
                self.sends[complete] += [
                    (Message(MessageKind.PIECE, chunk, other, first + piece), stage_of[other])
                    for first in self._firsts(chunk)
                    for piece in pieces[other]
                ]
                for first in self._firsts(other):
                    for piece in pieces[chunk]:
                        self._after_message(reduction, Message(MessageKind.PIECE, other, chunk, first + piece))
            elif other != chunk:
                self._after(reduction, *self._accumulations(other))
            if other != chunk and other // num_replicas == chunk // num_replicas:
                self.sends[reduction] += [
                    (Message(MessageKind.SUM, chunk, other, piece), stage_of[other]) for piece in pieces[chunk]
                ]
                for piece in pieces[other]:
                    self._after_message(sums, Message(MessageKind.SUM, other, chunk, piece))

    def _firsts(self, chunk: int) -> range:
        """Returns the numbers from which the pieces of each sum of a chunk count."""
        num_replicas = self.graph.num_replicas
        num_sums = len(blocks_of(self.graph, chunk, ordered=self.rules.ordered))
        return range(0, num_sums * num_replicas, num_replicas)

    def _wire_shares(self, chunk: int) -> None:
        """Let U of a chunk send the shares that its replica is the first to hold, and the step wait for those that it
        does not hold."""
        stage_of, update, awaited = self.placement.stage_of_chunk, self.index[Task(TaskKind.U, chunk)], []
        for share, (first, lacking) in shares_of(self.graph, chunk).items():
            if chunk == first:
                self.sends[update] += [
                    (Message(MessageKind.SHARE, chunk, other, share), stage_of[other]) for other in lacking
                ]
            elif chunk in lacking:
                awaited.append(Message(MessageKind.SHARE, first, chunk, share))
        if awaited:
            complete = self._gate(f"shares of chunk {chunk} complete")
            self._after(complete, update)
            for message in awaited:
                self._after_message(complete, message)

    def _tell_sharer(self, gate: int, chunk: int, other: int) -> None:
        self.sends[gate].append((Message(MessageKind.SHARED, chunk, other), self.placement.stage_of_chunk[other]))

    def _sharers(self, chunk: int) -> tuple[list[int], list[int]]:
        """Returns the chunks of the own replica that share this chunk's parameters, and its copies in all replicas."""
        graph, num_replicas = self.graph, self.graph.num_replicas
        trained = [c for c in graph.sharing(chunk) if graph.updates(c)]
        own = [c for c in trained if c % num_replicas == chunk % num_replicas]
        return own, [c for c in trained if c // num_replicas == chunk // num_replicas]

    def _wire_agreement(self) -> None:
        """Let U wait for R and, where the stages agree on something, for the verdict."""
        updates = [self.index[Task(TaskKind.U, c)] for c in self.trained]
        for chunk, update in zip(self.trained, updates, strict=True):
            reduction = self.index[Task(TaskKind.R, self.trained[0] if self.rules.lockstep else chunk)]
            self._after(update, self.sums.get(chunk, reduction))
        if self.rules.lockstep:
            for earlier, later in pairwise(updates):
                self._after(later, earlier)
        if self.rules.agreement is Agreement.NONE:
            return
        if self.rules.agreement is Agreement.ALL:
            # All but U, and what may wait for it.
            reported = [*range(self.num_microbatch_tasks + len(self.trained)), *self.sums.values()]
        else:
            giving = filter(self.graph.gives_loss, self.chunks)
            reported = [node for chunk in giving for node in self._nodes(TaskKind.F, chunk).values()]
        # Reports go up the tree of stages, and the verdict comes down.
        stage = self.stage
        above, below = report_tree(self.graph, self.placement, stage, self.rules.tree_degree)
        verdict, report = self._gate("verdict"), self._gate("report")
        self._after(report, *reported)
        for child in below:
            self._after_message(report, Message(MessageKind.REPORT, child, stage))
        if above is None:
            self._after(verdict, report)
        else:
            self.sends[report].append((Message(MessageKind.REPORT, stage, above), above))
            self._after_message(verdict, Message(MessageKind.VERDICT, above, stage))
        self.sends[verdict] += [(Message(MessageKind.VERDICT, stage, child), child) for child in below]
        for update in updates:
            self._after(update, verdict)

    # -- tables that grow ----------------------------------------------------------------------------------------------

    def _lane(self, task: Task) -> int:
        known = LANE.get(task.kind)
        if known is not None:
            return known
        op = self.graph.operations.by_letter[task.kind]
        if op.is_beside:
            return -1 - self.engines.index(op.lane)  # below 0, where the lanes of compute are not
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
        """Returns a chunk's nodes of one kind, by microbatch."""
        if (kind, chunk) not in self.nodes:
            self.nodes[kind, chunk] = {m: self.index[Task(kind, chunk, m)] for m in self.graph.microbatches(chunk)}
        return self.nodes[kind, chunk]

    def _accumulations(self, chunk: int) -> list[int]:
        return [self.index[task] for task in self.graph.accumulations(chunk)]
