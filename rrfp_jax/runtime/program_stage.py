"""A stage that runs the compiled programs of its chunks; implements the runtime's ``StageExecutor``.

The compute thread alone touches parameters, optimizer state, accumulators and stashes, and waits for none of them: a
task may be launched on what the tasks before it are still making. What reaches the event loop (messages, losses, norms)
is complete before the task that produces it is reported finished.

What a task is waited for by
----------------------------
By results that nothing takes over: all results of one program are complete together, and a program that takes over
what another returned (the accumulators, from microbatch to microbatch) may be launched before that one was waited for.
A program that returns nothing else returns a scalar for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax

from rrfp_jax.core import Message, MessageKind, StepRules
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.agreement import StageReport, Verdict, agree, merged
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.chunk import Loss
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.held_bytes import held_by, owns_inputs
from rrfp_jax.runtime.leaves_ahead import LeavesAhead
from rrfp_jax.runtime.mailbox import Mailbox, Ship
from rrfp_jax.runtime.memory_meter import MemoryMeter
from rrfp_jax.runtime.operating import OperationContext, operations_of
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.stage_replicas import StageReplicas
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome
from rrfp_jax.runtime.transports.edges import is_on_host
from rrfp_jax.runtime.transports.interface import TransportFailed
from rrfp_jax.runtime.wishes import Wishes
from rrfp_jax.schedules import Op, PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.tree import children, parent


@dataclass
class _Step:
    graph: PipelineGraph
    batch: StepBatch
    stashes: dict[tuple[int, int], Any] = field(default_factory=dict)
    forwards: dict[Task, Callable[[], tuple[Any, Any]]] = field(default_factory=dict)
    """For operations that run a forward once more: what does so, and returns output and stash."""
    owed: dict[tuple[int, int], Any] = field(default_factory=dict)
    """What W needs of a microbatch whose I has run."""
    losses: list[tuple[int, int, Loss]] = field(default_factory=list)
    """(microbatch, chunk, loss), appended once they are complete, and read in turns."""
    squared_norms: list[tuple[int, Any]] = field(default_factory=list)
    """(chunk, squared norm), likewise."""
    shared_layers: dict[int, Any] = field(default_factory=dict)
    """Shared accumulators of this stage's chunks as they were before any R: each R keeps its own here, and then
    replaces them by the sum."""
    verdict: Verdict | None = None


class _Enqueued(NamedTuple):
    """What a task leaves to be done once it has been launched."""

    awaited: Any
    """Arrays that are complete when the task is."""
    posts: Sequence[tuple[Message, Any]] = ()
    """What other chunks get."""
    record: Callable[[], None] | None = None
    """Called once the task has ended."""


class ProgramStage:
    """Runs the chunks of one stage.

    Args:
        graph, placement, stage: the pipeline of all replicas, and this unit in it.
        programs: the compiled programs of each chunk of this stage.
        states: parameters, optimizer state and accumulators of each of them; taken over.
        copies: how the numbers of chunks belong to replicas.
        replicas: what the stage's replicas do together; None: there is only one.
        meter: counts the memory that the stage holds.
        ship: brings an output into the form in which it travels to a stage.
        wishes: what processes ask of each other; the verdict tells all.
        in_transit: how many bytes this process holds of messages to and from others.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        placement: Placement,
        stage: int,
        *,
        programs: Mapping[int, CompiledChunk],
        states: dict[int, ChunkState],
        update_rules: UpdateRules,
        step_rules: StepRules,
        copies: Replication,
        replicas: StageReplicas | None,
        meter: MemoryMeter,
        ship: Ship,
        wishes: Wishes,
        in_transit: Callable[[], int] = lambda: 0,
    ) -> None:
        self._wishes = wishes
        self._graph, self._stage, self._meter, self._in_transit = graph, stage, meter, in_transit
        self._programs, self.states = dict(programs), states
        self._update_rules = update_rules
        self._copies, self._replicas = copies, replicas
        self._replica = copies.replica(next(iter(programs)))
        self._ship = ship
        self._placement = placement
        self._mailbox = Mailbox(placement, stage, ship)
        self._steps: dict[int, _Step] = {}
        self._above = parent(stage, step_rules.tree_degree)
        self._below = children(stage, placement.num_stages, step_rules.tree_degree)
        self._posts_at_once = not any(is_on_host(each.sharding) for each in programs.values())
        """Elsewhere other stages get a view of a value, for which it must be there."""
        self.hands_ahead = self._posts_at_once
        self._leaves_ahead = LeavesAhead(stage) if self._posts_at_once else None
        """None where programs take NumPy's arrays as they are."""
        self.ahead, self.fetch = self._mailbox.ahead, self._mailbox.fetch
        self._take: dict[TaskKind, Callable[[int, int, int], tuple[Any, ...]]] = {
            TaskKind.F: self._inputs,
            TaskKind.B: self._output_grads,
            TaskKind.I: self._output_grads,
        }
        """What tasks read that comes from other chunks."""
        self._enqueue: dict[TaskKind, Callable[..., _Enqueued]] = {
            TaskKind.F: self._forward,
            TaskKind.B: self._backward,
            TaskKind.I: self._input_gradient,
            TaskKind.W: self._weight_gradient,
            TaskKind.R: self._reduce,
            TaskKind.U: self._update,
        }
        self._operations = operations_of(graph)
        self._enqueue |= {TaskKind(letter): partial(self._operate, op) for letter, op in self._operations.items()}
        self._keep_inputs = [op for op in graph.ops if op.keeps_inputs]
        self._remake_stash = [op for op in graph.ops if op.remakes_stash]
        self._kept: dict[int, dict[str, Any]] = {chunk: {} for chunk in states}
        """What operations keep for each chunk."""
        self._owners = {chunk for chunk in programs if owns_inputs(chunk, graph, placement)}
        for chunk, held in states.items():
            held.derived = self._programs[chunk].prepare(held.params)

    # -- in turns ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:
        self._steps[step] = _Step(graph, batch)
        self._mailbox.begin(step)
        for chunk in self._programs if self._leaves_ahead is not None else ():
            self._expect_leaves(step, chunk)

    def _expect_leaves(self, step: int, chunk: int) -> None:
        assert self._leaves_ahead is not None
        programs, state = self._programs[chunk], self._steps[step]
        coming = []
        for microbatch in state.graph.microbatches(chunk):
            own = programs.of(state.batch.buckets[microbatch])
            if own.leaves:
                coming.append(((step, microbatch), partial(_place, own, state.batch, microbatch)))
        self._leaves_ahead.expect(chunk, coming)

    def accept(self, step: int, message: Message, payload: Any) -> None:
        self._mailbox.accept(step, message, payload)

    def payload(self, step: int, message: Message) -> Any:
        kind = message.kind
        if kind is MessageKind.SHARED:
            return self._tie(step, message)
        if kind is MessageKind.REPORT:
            return self._report(step)
        if kind is MessageKind.VERDICT:
            return self._verdict(step).as_plain()
        if kind is MessageKind.TAKEN:
            return None
        return self._mailbox.payload(step, message)

    def finish(self, step: int) -> StageOutcome:
        """The step's verdict, and the most memory that the stage held."""
        peak = self._meter.reset()
        outcome = StageOutcome(self._verdict(step), peak.device, peak.host)
        del self._steps[step]
        if self._leaves_ahead is not None:
            self._leaves_ahead.forget(step)
        self._mailbox.finish(step)
        return outcome

    def _tie(self, step: int, message: Message) -> Any:
        """Accumulators for a chunk of the same replica; the word that they are complete for another replica."""
        if self._copies.replica(message.target) != self._replica:
            return None
        layers = self._layers_before_reduction(step, message.source)
        return self._ship(layers, self._placement.stage_of_chunk[message.target], message, 0, None)

    def _report(self, step: int) -> dict[str, bytes]:
        """What this stage and those below it contribute, as one report."""
        state = self._steps[step]
        # copies in one go: another thread may be appending
        norms, losses = tuple(state.squared_norms), tuple(state.losses)
        own = StageReport(
            squared_norms=tuple(sorted((chunk, float(norm)) for chunk, norm in norms)),
            losses=tuple((m, chunk, float(loss.loss_sum), float(loss.weight)) for m, chunk, loss in losses),
            named_sums=tuple(
                (m, chunk, name, float(value)) for m, chunk, loss in losses for name, value in loss.named_sums.items()
            ),
        )
        messages = (Message(MessageKind.REPORT, child, self._stage) for child in self._below)
        return merged([own.as_plain(), *(self._mailbox.read(step, message) for message in messages)])

    def _verdict(self, step: int) -> Verdict:
        """The agreement of a step: worked out on stage 0, received from above by all others."""
        state = self._steps[step]
        if state.verdict is None:
            if self._above is None:
                rules = self._update_rules
                stop, save = self._wishes.decide(self._stage, step)
                state.verdict = agree(
                    [self._report(step)],
                    clip_norm=rules.clip_norm,
                    skip_nonfinite=rules.skip_nonfinite,
                    stop=stop,
                    save=save,
                )
            else:
                message = Message(MessageKind.VERDICT, self._above, self._stage)
                state.verdict = Verdict(**self._mailbox.read(step, message))
        return state.verdict

    # -- on the compute thread, but for waiting ----------------------------------------------------------------------

    def launch(self, step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        read: list[tuple[Any, ...]] = []
        try:
            if task.kind in self._take:
                read.append(self._take[task.kind](step, task.chunk, task.microbatch))
            enqueued = self._enqueue[task.kind](step, task.chunk, task.microbatch, *read)
            if self._posts_at_once:  # otherwise a program may run within its launch
                begun_s = time.perf_counter()
            for message, value in enqueued.posts:
                if self._posts_at_once or self._stays(message):
                    self._post(step, message, value)
            if self._posts_at_once:
                self._measure(step, task)
        except BaseException as error:
            self._abort(error)
            self._check_copies(task, read)
            raise
        return Launched(begun_s, partial(self._wait, step, task, enqueued, read))

    def _wait(self, step: int, task: Task, enqueued: _Enqueued, read: Any) -> None:
        """Wait for a task; on the thread that waits for this stage's tasks, which need not be the compute thread."""
        try:
            # wait for ready arrays too: an array whose program has failed says that it is ready, and raises here alone
            jax.block_until_ready(enqueued.awaited)
            if not self._posts_at_once:
                for message, value in enqueued.posts:
                    if not self._stays(message):
                        self._post(step, message, value)
                self._measure(step, task)
        except BaseException as error:
            self._abort(error)
            self._check_copies(task, read)
            raise
        if enqueued.record is not None:
            enqueued.record()

    def _check_copies(self, task: Task, read: Any) -> None:
        """Raise TransportFailed where a failed task is not to blame, since an array that it reads has not come."""
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(read) if isinstance(leaf, jax.Array)]
        for leaf in arrays:
            # one that has failed says that it is ready; what is on its way still has not
            if not leaf.is_deleted() and leaf.is_ready():
                try:
                    leaf.block_until_ready()
                except Exception as error:
                    raise TransportFailed(
                        f"what {task} reads could not be brought to the devices of stage {self._stage}: {error}"
                    ) from error

    def _stays(self, message: Message) -> bool:
        """Whether a message is for this stage, whose next task may be launched before this one has ended."""
        return self._placement.stage_of_chunk[message.target] == self._stage

    def _bucket(self, step: int, microbatch: int) -> int:
        return self._steps[step].batch.buckets[microbatch]

    def _post(self, step: int, message: Message, value: Any) -> None:
        self._mailbox.post(step, message, value, self._bucket(step, message.microbatch))

    def _measure(self, step: int, task: Task) -> None:
        op = self._operations.get(task.kind)
        if op is not None and not op.remakes_stash:
            return
        bucket = 0 if task.microbatch < 0 else self._bucket(step, task.microbatch)
        inbox_bytes = self._mailbox.held_bytes + self._in_transit()
        is_remade = bool(self._steps[step].graph.ops) and self._is_remade(task.chunk, task.microbatch)
        self._meter.ran(task, bucket, inbox_bytes, is_remade=is_remade)

    def _abort(self, error: BaseException) -> None:
        if self._replicas is not None:  # the others must not wait for this one
            self._replicas.abort(error)

    def _programs_of(self, step: int, chunk: int, microbatch: int) -> MicrobatchPrograms:
        return self._programs[chunk].of(self._bucket(step, microbatch))

    def _inputs(self, step: int, chunk: int, microbatch: int) -> tuple[Any, ...]:
        """The output of every predecessor, None for those that the microbatch skips."""
        graph = self._steps[step].graph
        return tuple(
            self._mailbox.take(step, Message(MessageKind.ACTIVATION, p, chunk, microbatch))
            if graph.exists(p, microbatch)
            else None
            for p in graph.predecessors(chunk)
        )

    def _forward(self, step: int, chunk: int, microbatch: int, inputs: tuple[Any, ...]) -> _Enqueued:
        state, held = self._steps[step], self.states[chunk]
        graph, programs = state.graph, self._programs_of(step, chunk, microbatch)
        placed = None if self._leaves_ahead is None else self._leaves_ahead.take(chunk, (step, microbatch))
        leaves = _leaves(programs, state.batch, microbatch) if placed is None else placed
        read = (inputs, leaves, step if state.batch.step is None else state.batch.step, microbatch)
        for op in self._keep_inputs if graph.ops else ():
            if op.exists(chunk, microbatch):
                task = Task(TaskKind(op.letter), chunk, microbatch)
                state.forwards[task] = lambda: programs.forward(held.params, *read, derived=held.derived)
        if graph.ops and self._is_remade(chunk, microbatch):
            outputs = programs.outputs(held.params, *read, derived=held.derived)
        else:
            outputs, stash = programs.forward(held.params, *read, derived=held.derived)
            if graph.has_backward(chunk):
                state.stashes[chunk, microbatch] = stash
        if not graph.successors(chunk):
            _start_copies(outputs)
            return _Enqueued(outputs, record=partial(state.losses.append, (microbatch, chunk, Loss(*outputs))))
        posts = [
            (Message(MessageKind.ACTIVATION, chunk, successor, microbatch), outputs)
            for successor in graph.successors(chunk)
            if graph.exists(successor, microbatch)
        ]
        return _Enqueued(outputs, posts)

    def _is_remade(self, chunk: int, microbatch: int) -> bool:
        """Whether an operation makes the stash of this pair."""
        return any(op.exists(chunk, microbatch) for op in self._remake_stash)

    def _backward(self, step: int, chunk: int, microbatch: int, output_grads: tuple[Any, ...]) -> _Enqueued:
        state, held, programs = self._steps[step], self.states[chunk], self._programs_of(step, chunk, microbatch)
        stash = state.stashes.pop((chunk, microbatch))
        input_grads, held.accumulators, done = programs.backward(
            held.params, stash, output_grads, held.accumulators, derived=held.derived
        )
        return _Enqueued(done, self._input_grads(step, chunk, microbatch, input_grads))

    def _input_gradient(self, step: int, chunk: int, microbatch: int, output_grads: tuple[Any, ...]) -> _Enqueued:
        state, held, programs = self._steps[step], self.states[chunk], self._programs_of(step, chunk, microbatch)
        stash = state.stashes.pop((chunk, microbatch))
        input_grads, owed = programs.input_gradient(held.params, stash, output_grads, derived=held.derived)
        if state.graph.trains(chunk):
            state.owed[chunk, microbatch] = owed
        return _Enqueued((input_grads, owed), self._input_grads(step, chunk, microbatch, input_grads))

    def _weight_gradient(self, step: int, chunk: int, microbatch: int) -> _Enqueued:
        programs, held = self._programs_of(step, chunk, microbatch), self.states[chunk]
        owed = self._steps[step].owed.pop((chunk, microbatch))
        held.accumulators, done = programs.weight_gradient(held.params, owed, held.accumulators, derived=held.derived)
        return _Enqueued(done)

    def _output_grads(self, step: int, chunk: int, microbatch: int) -> tuple[Any, ...]:
        """The gradient from every successor that returns one, None from those that the microbatch skips."""
        graph = self._steps[step].graph
        return tuple(
            self._mailbox.take(step, Message(MessageKind.GRADIENT, s, chunk, microbatch))
            if graph.exists(s, microbatch)
            else None
            for s in graph.gradient_successors(chunk)
        )

    def _input_grads(
        self, step: int, chunk: int, microbatch: int, input_grads: tuple[Any, ...]
    ) -> list[tuple[Message, Any]]:
        """The gradient for every predecessor that gets one, but for those that the microbatch skips."""
        graph = self._steps[step].graph
        return [
            (Message(MessageKind.GRADIENT, chunk, predecessor, microbatch), grad)
            for predecessor, grad in zip(graph.gradient_predecessors(chunk), input_grads, strict=True)
            if graph.exists(predecessor, microbatch)
        ]

    def _operate(self, op: Op, step: int, chunk: int, microbatch: int) -> _Enqueued:
        """An operation of one's own; on the thread of its lane. What its microbatch holds is counted on both sides of a
        copy until that has ended."""
        assert op.run is not None
        state, task = self._steps[step], Task(TaskKind(op.letter), chunk, microbatch)
        context = OperationContext(
            step=step,
            task=task,
            state=self.states[chunk],
            stashes=state.stashes,
            kept=self._kept[chunk],
            programs=self._programs_of(step, chunk, microbatch) if microbatch >= 0 else None,
            owns_inputs=chunk in self._owners and not any(op.exists(chunk, microbatch) for op in self._keep_inputs),
            forward=state.forwards.pop(task, None),
        )
        if op.remakes_stash:  # which is counted as what a program of the chunk makes
            return _Enqueued(op.run(context))
        before = held_by(state.stashes.get(task[1:]))
        done = op.run(context)
        after = held_by(state.stashes.get(task[1:]))
        self._meter.begins(before, after, self._mailbox.held_bytes + self._in_transit())
        return _Enqueued(done, record=partial(self._meter.ended, before, after))

    def _reduce(self, step: int, chunk: int, _: int) -> _Enqueued:
        programs, held = self._programs[chunk], self.states[chunk]
        shared: tuple[Any, ...] = ()
        if len(tied := self._copies.of_replica(self._graph.sharing(chunk), self._replica)) > 1:
            self._steps[step].shared_layers[chunk] = programs.shared_layers(held.accumulators)
            shared = tuple(self._shared_layers(step, other, chunk) for other in tied)
        if self._replicas is None:
            state = (held.optimizer_state,) if held.optimizer_state else ()  # a chunk that does not train has none
            held.accumulators, norm = programs.updates.reduce(held.accumulators, shared, *state)
        else:
            base = self._copies.base(chunk)
            held.accumulators, norm = self._replicas.reduce(
                step, base, self._replica, held.accumulators, shared, optimizer_state=held.optimizer_state
            )
        if self._replica:  # the sums are everybody's, and are counted once
            return _Enqueued(norm)
        _start_copies(norm)
        return _Enqueued(norm, record=partial(self._steps[step].squared_norms.append, (chunk, norm)))

    def _shared_layers(self, step: int, source: int, chunk: int) -> Any:
        if source in self._programs:
            return self._layers_before_reduction(step, source)
        return self._mailbox.read(step, Message(MessageKind.SHARED, source, chunk))

    def _layers_before_reduction(self, step: int, chunk: int) -> Any:
        """Shared accumulators of a chunk of this stage, on any thread: its R may be under way meanwhile."""
        now = self._programs[chunk].shared_layers(self.states[chunk].accumulators)
        return self._steps[step].shared_layers.get(chunk, now)

    def _update(self, step: int, chunk: int, _: int) -> _Enqueued:
        programs, held, verdict = self._programs[chunk], self.states[chunk], self._verdict(step)
        base = self._copies.base(chunk)
        if self._replicas is not None and self._replicas.shares_optimizer(base):
            held.params = self._replicas.update(step, base, self._replica, held.params, verdict)
        else:
            held.params, held.optimizer_state, held.accumulators = programs.updates.update(
                held.params, held.optimizer_state, held.accumulators, verdict.scale, verdict.apply
            )
        held.derived = programs.prepare(held.params)
        return _Enqueued((held.params, held.derived))


def _leaves(programs: MicrobatchPrograms, batch: StepBatch, microbatch: int) -> dict[str, Any]:
    """What a microbatch has of the leaves that the chunk reads."""
    return {name: batch.leaves[name][microbatch] for name in programs.leaves}


def _place(programs: MicrobatchPrograms, batch: StepBatch, microbatch: int) -> dict[str, Any]:
    return programs.place(_leaves(programs, batch, microbatch))


def _start_copies(tree: Any) -> None:
    """Begin to bring numbers to the host that a report will ask for."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
