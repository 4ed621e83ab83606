"""A stage that runs the compiled programs of its chunks; implements the runtime's ``StageExecutor``.

The compute thread alone touches parameters, optimizer state, accumulators and stashes, and waits for none of them: a
task may be launched on results that the tasks before it are still making. Everything that reaches the event loop
(messages, losses, norms) is complete before the task that produces it is reported finished.

Waiting for a task
------------------
A task is waited for by results that no other program takes over. All results of one program are complete together, and
a program that takes over a result of another (the accumulators, from microbatch to microbatch) may be launched before
that one was waited for. A program that returns nothing else returns a scalar for it.

Pairs
-----
F, B, I and W are generators. Each prepares its call, yields it, and goes on with the results, so that somebody else
runs the call: alone, or by the program that does the work of two calls. Where there is no such program, the calls of a
pair run one after the other.
"""

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from rrfp_jax.core import BESIDE, Message, MessageKind, StepRules
from rrfp_jax.core.plan import report_tree
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.agreement import NormHistory, StageReport, Verdict, agree, merged
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.chunk import Loss
from rrfp_jax.programs.compiled import CompiledChunk, PairPrograms
from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms, PairProgram, ProgramCall
from rrfp_jax.programs.optimizers import DelayedState
from rrfp_jax.programs.shapes import loss_of, part_of
from rrfp_jax.programs.state import ChunkState, overlaid
from rrfp_jax.runtime.consistency import GRADIENTS, INPUT_GRADIENTS, OUTPUTS, ResultSum, begin_sum
from rrfp_jax.runtime.control_plane import StopRequests
from rrfp_jax.runtime.failure import TransportFailed
from rrfp_jax.runtime.mailbox import LeavesAhead, Mailbox, SendArray
from rrfp_jax.runtime.operations import OperationContext, operations_of
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.stage_memory import MemoryMeter, held_by
from rrfp_jax.runtime.stage_reduction import PieceExchange, SparseExchange, StageReplicas
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome
from rrfp_jax.runtime.transports.edges import IN_PARTS, is_on_host
from rrfp_jax.schedules import Op, Pair, PipelineGraph, Placement, Task, TaskKind


@dataclass
class _Step:
    """The state of a step on the stage."""

    graph: PipelineGraph
    batch: StepBatch
    above: int | None
    """The stage to which this one reports; None: it is the first that takes part."""
    below: tuple[int, ...]
    """The stages that report to this one."""
    stashes: dict[tuple[int, int], Any] = field(default_factory=dict)
    """By chunk and microbatch, the arrays kept for the backward."""
    forwards: dict[Task, Callable[[], tuple[Any, Any]]] = field(default_factory=dict)
    """For operations that run a forward once more: a function that does so, and returns output and stash."""
    weight_residuals: dict[tuple[int, int], Any] = field(default_factory=dict)
    """By chunk and microbatch, the residuals that W needs once I has run."""
    losses: list[tuple[int, int, Loss]] = field(default_factory=list)
    """Microbatch, chunk and loss, appended once they are complete, and read in the serial executor."""
    squared_norms: list[tuple[int, Any]] = field(default_factory=list)
    """Base number of a chunk and its squared norm, appended and read like the losses."""
    shared_layers: dict[int, Any] = field(default_factory=dict)
    """Shared accumulators of this stage's chunks as they were before any R: each R keeps its own here, and then
    replaces them by the sum."""
    sums: list[tuple[int, TaskKind, int, Callable[[], int]]] = field(default_factory=list)
    """In a step that verifies, for each result of a task: which one, the task's kind, the chunk's base number, and a
    function that returns the sum of its bits. Appended by the compute thread alone."""
    ordinal: int | None = None
    """With a delay, how many steps that train the stage has begun before this one; None for a step that trains
    nothing."""
    verdict: Verdict | None = None
    updated: set[int] = field(default_factory=set)
    """Chunks whose U was launched."""
    derived: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """By chunk, the values derived from the parameters that an evaluation in idle time brings with it."""


@dataclass
class _Version:
    """State that a chunk has for a second step under way, beside its newest parameters and one step's gradients."""

    older: Any
    """The parameters before the last update."""
    derived: tuple[Any, ...] | None
    """Values that the compiled programs derive from them."""
    accumulators: Any
    """Gradients of steps with an odd ordinal."""
    num_updates: int = 0
    """How many updates have been launched."""


def _older_params(held: ChunkState) -> Any:
    """Returns a chunk's parameters before the last update; those that do not train are the newest ones."""
    return overlaid(held.params, [part.older for part in held.optimizer_state])


class _Enqueued(NamedTuple):
    """The rest of a task's work, once it has been launched."""

    awaited: Any
    """Arrays that are complete when the task is."""
    posts: Sequence[tuple[Message, Any]] = ()
    """Messages for other chunks, with their values."""
    record: Callable[[], None] | None = None
    """Called once the task has ended."""
    pair: PairProgram | None = None
    """The program that runs both tasks of a pair; None where each has run its own."""


_TaskInCalls = Generator[ProgramCall, Any, _Enqueued]
"""A task that makes at most one call, by yielding it."""


def _begun(task: _TaskInCalls) -> ProgramCall | _Enqueued:
    """Returns the call that a task makes, or the rest of its work where it makes none."""
    try:
        return next(task)
    except StopIteration as ended:
        enqueued: _Enqueued = ended.value
        return enqueued


def _gone_on(task: _TaskInCalls, results: Any) -> _Enqueued:
    """Returns the rest of a task's work, given the results of its call."""
    try:
        task.send(results)
    except StopIteration as ended:
        enqueued: _Enqueued = ended.value
        return enqueued
    raise AssertionError("a task makes one call at most")


def _alone(task: _TaskInCalls) -> _Enqueued:
    """Runs a task, and its call alone; returns the rest of its work."""
    # As _begun, ProgramCall.run and _gone_on, in one piece: this is on the host's way from each task to the next.
    try:
        program, given, finish = next(task)
        task.send(finish(None if program is None else program(*given), given))
    except StopIteration as ended:
        enqueued: _Enqueued = ended.value
        return enqueued
    raise AssertionError("a task makes one call at most")


def _record_all(records: Iterable[Callable[[], None]]) -> None:
    for record in records:
        record()


class ProgramStage:
    """Runs the chunks of one stage.

    Args:
        stage: the number of this unit in the pipeline of all replicas.
        programs: the compiled programs of each chunk of this stage.
        states: parameters, optimizer state and accumulators of each of them that holds any; taken over.
        graph, placement: those of all replicas.
        copies: tells how the numbers of chunks belong to replicas.
        update_rules: the treatment of gradients.
        norms: the norms of the last steps' gradients; None: there are none yet.
        step_rules: the rules of a step that trains.
        stop_requests: requests of single processes, which the verdict tells to all.
        replicas: runs R and U for all replicas of the stage together; None: there is only one.
        meter: counts the memory that the stage holds.
        send_array: brings an output into the form in which it travels to a stage.
        in_transit: returns how many bytes this process holds of messages to and from others.
        pairs: the programs that do the work of two programs of these chunks.
    """

    def __init__(
        self,
        stage: int,
        programs: Mapping[int, CompiledChunk],
        states: dict[int, ChunkState],
        *,
        graph: PipelineGraph,
        placement: Placement,
        copies: Replication,
        update_rules: UpdateRules,
        norms: NormHistory | None = None,
        step_rules: StepRules,
        stop_requests: StopRequests,
        replicas: StageReplicas | None,
        meter: MemoryMeter,
        send_array: SendArray,
        in_transit: Callable[[], int] = lambda: 0,
        pairs: PairPrograms | None = None,
    ) -> None:
        self._graph, self._placement, self._copies = graph, placement, copies
        self._update_rules, self._stop_requests, self._in_transit = update_rules, stop_requests, in_transit
        self._norms = NormHistory() if norms is None else norms
        self._stage, self._programs = stage, dict(programs)
        self.states = {chunk: states[graph.holder(chunk)] for chunk in programs}
        """The states by chunk; passes have one and the same."""
        self.number = stage
        """The number of this unit."""
        self._replicas, self._meter, self._send_array = replicas, meter, send_array
        self._replica = self._copies.replica(next(iter(programs)))
        self._mailbox = Mailbox(self._placement, stage, send_array, graph)
        self._exchange: PieceExchange | None = None
        """None unless replicas add up their gradients by messages."""
        self.shares_updates = step_rules.shares
        """Whether replicas send each other shares of the parameters."""
        if step_rules.by_messages:
            self._exchange = (PieceExchange if update_rules.sparse is None else SparseExchange)(
                self._programs,
                states,
                graph=graph,
                copies=copies,
                mailbox=self._mailbox,
                meter=meter,
                ordered=step_rules.ordered,
            )
        self._steps: dict[int, _Step] = {}
        self._last: tuple[int, Verdict] | None = None
        """The last step that has ended, with its verdict."""
        self._tree_degree = step_rules.tree_degree
        self._posts_at_once = not any(is_on_host(each.sharding) for each in programs.values())
        """Whether messages leave as their task is launched. Where programs run on the host, other stages get a view of
        a value, for which it must be complete."""
        self.hands_ahead = self._posts_at_once
        self._leaves_ahead = LeavesAhead(stage) if self._posts_at_once else None
        """None where programs take NumPy's arrays as they are."""
        self.accept, self.ahead, self.fetch = self._mailbox.accept, self._mailbox.ahead, self._mailbox.fetch
        self._in_calls: dict[TaskKind, Callable[..., _TaskInCalls]] = {
            TaskKind.F: self._forward,
            TaskKind.B: self._backward,
            TaskKind.I: self._input_gradient,
            TaskKind.W: self._weight_gradient,
        }
        self._enqueue: dict[TaskKind, Callable[..., _Enqueued]] = {
            TaskKind.R: self._reduce,
            TaskKind.U: self._update,
        }
        self._pairs = pairs or {}
        self._operations = operations_of(self._graph)
        self._enqueue |= {TaskKind(letter): partial(self._operate, op) for letter, op in self._operations.items()}
        self._keep_inputs = [op for op in self._graph.ops if op.keeps_inputs]
        self._remake_stash = [op for op in self._graph.ops if op.remakes_stash]
        self._kept: dict[int, dict[str, Any]] = {chunk: {} for chunk in programs}
        """By chunk, a dictionary in which operations keep values from task to task."""
        for chunk, held in states.items():
            held.derived = self._programs[chunk].prepare(held.params)
        self._num_beside = 0
        """How many evaluations in idle time are under way."""
        self._num_trained = 0
        """How many steps that train have begun."""
        self._versions: dict[int, _Version] = {}
        """With a delay, what belongs to a second step, by the number of a chunk that trains."""
        for chunk, held in states.items():
            if any(isinstance(part, DelayedState) for part in held.optimizer_state):
                older = _older_params(held)
                derived = self._programs[chunk].prepare(older)
                self._versions[chunk] = _Version(older, derived, self._programs[chunk].zeros())

    # -- in the serial executor --------------------------------------------------------------------------------------

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:
        state = _Step(graph, batch, *report_tree(graph, self._placement, self._stage, self._tree_degree))
        if self._versions and any(map(graph.updates, range(graph.num_chunks))):
            state.ordinal = self._num_trained
            self._num_trained += 1
        self._steps[step] = state
        self._mailbox.begin(step)
        if step >= BESIDE:
            self._count_copies(1)
        if self._exchange is not None and step < BESIDE:
            self._exchange.begin(step, graph, step if batch.step is None else batch.step)
        if self._leaves_ahead is None or step >= BESIDE:  # Leaves of training go ahead, and need the room.
            return
        for chunk, compiled in self._programs.items():
            coming = []
            for microbatch in graph.microbatches(chunk):
                programs = compiled.of(batch.buckets[microbatch])
                if programs.leaves:
                    coming.append(((step, microbatch), partial(_place, programs, batch, microbatch)))
            self._leaves_ahead.expect(chunk, coming)

    def payload(self, step: int, message: Message) -> Any:
        kind = message.kind
        if kind is MessageKind.SHARED:
            # Another replica hears only that the accumulators are complete: a collective sums them.
            if self._copies.replica(message.target) != self._replica:
                return None
            layers = self._layers_before_reduction(step, message.source)
            return self._send_array(layers, self._placement.stage_of_chunk[message.target], message, 0, None)
        if kind is MessageKind.REPORT:
            return self._report(step)
        if kind is MessageKind.VERDICT:
            return self._verdict(step).as_plain()
        if kind is MessageKind.TAKEN:
            return None
        if kind is MessageKind.PIECE and not self._steps[step].graph.present(message.source):
            # No task completes these gradients: they are zeros, which are cut as the first of their pieces leaves.
            assert self._exchange is not None
            posts = self._exchange.cut(step, message.source)
            jax.block_until_ready([value for _, value in posts])
            self._post(step, posts)
        return self._mailbox.payload(step, message)

    def finish(self, step: int) -> StageOutcome:
        """Frees all that the stage held of a step; returns the step's verdict and the stage's peak memory."""
        if step >= BESIDE:
            outcome = StageOutcome(self._verdict(step))
            del self._steps[step]
            self._count_copies(-1)
            self._mailbox.finish(step)
            return outcome
        if self._exchange is not None and self.shares_updates:
            self._exchange.take_shares(step, self._steps[step].graph)
        peak = self._meter.reset()
        outcome = StageOutcome(self._verdict(step), peak.device, peak.host, self._result_sums(step))
        self._last = step, self._verdict(step)
        del self._steps[step]
        if self._exchange is not None:
            self._exchange.finish(step)
        if self._leaves_ahead is not None:
            self._leaves_ahead.forget(step)
        self._mailbox.finish(step)
        return outcome

    def _count_copies(self, change: int) -> None:
        """Counts the parameters that evaluations in idle time bring, which all of them under way share."""
        before, self._num_beside = self._num_beside, self._num_beside + change
        if not before or not self._num_beside:
            sizes = [each.sizes for each in self._programs.values()]
            self._meter.keep(change * sum(each.params_bytes + each.derived_bytes for each in sizes))

    def _result_sums(self, step: int) -> list[ResultSum]:
        found, numbers = list[ResultSum](), dict[int, int]()
        for result, kind, chunk, take in self._steps[step].sums:
            if result == GRADIENTS:  # Each task adds to those of the one before.
                numbers[chunk] = numbers.get(chunk, 0) + 1
            number = numbers[chunk] if result == GRADIENTS else 0
            found.append(ResultSum(self._stage, result, str(kind), chunk, number, take()))
        return found

    def _add_up(self, step: int, result: int, kind: TaskKind, chunk: int, values: Any) -> None:
        """Begins to add up the bits of a task's result in a step that verifies, before another program takes it
        over."""
        state = self._steps[step]
        if state.batch.verifies:
            state.sums.append((result, kind, self._copies.base(chunk), begin_sum(values)))

    def _weights(self, step: int, chunk: int) -> tuple[Any, Any]:
        """Returns the parameters that a step reads, and the values derived from them.

        With a delay the step of ordinal n reads what the update of ordinal n - 2 left: the newest parameters until the
        update of the step before is launched, and from then on the older ones.
        """
        if step >= BESIDE:
            return self._brought(step, chunk)
        held = self.states[chunk]
        if not self._versions:
            return held.params, held.derived
        version, ordinal = self._versions.get(self._graph.holder(chunk)), self._steps[step].ordinal
        if version is None or ordinal is None or version.num_updates < ordinal:
            return held.params, held.derived
        return version.older, version.derived

    def _brought(self, step: int, chunk: int) -> tuple[Any, Any]:
        """Returns the parameters that an evaluation in idle time brings with it, and the values derived from them."""
        state, holder = self._steps[step], self._graph.holder(chunk)
        assert state.batch.params is not None
        params = state.batch.params[holder]
        if holder not in state.derived:
            state.derived[holder] = self._programs[holder].prepare(params)
        return params, state.derived[holder]

    def _sums(self, step: int, chunk: int) -> Any:
        """Returns the accumulators to which the tasks of a step add a chunk's gradients."""
        version = self._odd_version(step, chunk) if self._versions else None
        return self.states[chunk].accumulators if version is None else version.accumulators

    def _keep_sums(self, step: int, chunk: int, sums: Any) -> None:
        version = self._odd_version(step, chunk) if self._versions else None
        if version is None:
            self.states[chunk].accumulators = sums
        else:
            version.accumulators = sums

    def _odd_version(self, step: int, chunk: int) -> _Version | None:
        """Returns what has the accumulators of a step with an odd ordinal; None for other steps."""
        is_odd = (self._steps[step].ordinal or 0) % 2
        return self._versions.get(self._graph.holder(chunk)) if is_odd else None

    def _layers_before_reduction(self, step: int, chunk: int) -> Any:
        """Returns shared accumulators of a chunk of this stage; its R may be under way on another thread meanwhile."""
        now = self._programs[chunk].shared_layers(self._sums(step, chunk))
        return self._steps[step].shared_layers.get(chunk, now)

    def _report(self, step: int) -> dict[str, bytes]:
        """Returns the contributions of this stage and the stages below it in the tree, as one report."""
        state = self._steps[step]
        # Copied in one go each: another thread may be appending.
        norms, losses = tuple(state.squared_norms), tuple(state.losses)
        own = StageReport(
            squared_norms=tuple(sorted((chunk, float(norm)) for chunk, norm in norms)),
            losses=tuple((m, chunk, float(loss.loss_sum), float(loss.weight)) for m, chunk, loss in losses),
            named_sums=tuple(
                (m, chunk, name, float(value)) for m, chunk, loss in losses for name, value in loss.named_sums.items()
            ),
        )
        messages = (Message(MessageKind.REPORT, child, self._stage) for child in state.below)
        return merged([own.as_plain(), *(self._mailbox.read(step, message) for message in messages)])

    def _verdict(self, step: int) -> Verdict:
        """Returns the agreement of a step: computed on the first stage that takes part, received from the stage above
        on all others."""
        state = self._steps[step]
        if state.verdict is None and state.above is None:
            rules, stop, save = self._update_rules, False, False
            if step < BESIDE:
                stop, save = self._stop_requests.decide(self._stage, step)
            state.verdict = agree(
                [self._report(step)],
                clip_norm=rules.clip_norm,
                largest_norm=self._norms.limit(rules.spike_deviations, rules.spike_window),
                skip_nonfinite=rules.skip_nonfinite,
                stop=stop,
                save=save,
                num_replicas=None if rules.sparse is None else self._copies.num_replicas,
            )
            if state.batch.verifies:
                state.verdict = replace(state.verdict, apply=False)
            self._note_norm(step)
        elif state.verdict is None:
            assert state.above is not None
            message = Message(MessageKind.VERDICT, state.above, self._stage)
            state.verdict = Verdict(**self._mailbox.read(step, message))
            self._note_norm(step)
        return state.verdict

    def _note_norm(self, step: int) -> None:
        """Remembers the norm of a step whose verdict is known; any unit may have to judge after the first is lost."""
        state, rules = self._steps[step], self._update_rules
        if (
            rules.spike_deviations is not None
            and step < BESIDE
            and state.verdict is not None
            and not state.batch.verifies
        ):
            self._norms.add(step, state.verdict.grad_norm, rules.spike_window)

    # -- while the pipeline is frozen (:mod:`rrfp_jax.runtime.recovery`) -----------------------------------------------

    def newest_verdict(self) -> tuple[int, Verdict] | None:
        """Returns the newest step whose verdict is known here, with the verdict; None where there is none."""
        for step, state in sorted(self._steps.items(), reverse=True):
            message = None if state.above is None else Message(MessageKind.VERDICT, state.above, self._stage)
            if state.verdict is not None or (message is not None and self._mailbox.holds(step, message)):
                return step, self._verdict(step)
        return self._last

    def finish_decided(self, step: int, verdict: Verdict) -> None:
        """Updates what a step has not updated yet whose verdict others have told; blocks until that is done."""
        state = self._steps.get(step)
        if state is None:  # It has ended here.
            return
        state.verdict = verdict
        self._note_norm(step)
        for chunk in self._programs:
            if state.graph.updates(chunk) and chunk not in state.updated:
                jax.block_until_ready(self._update(step, chunk, -1).awaited)

    @property
    def held_shares(self) -> frozenset[int]:
        """The shares of the optimizer state that are held here; none where it is not cut."""
        if self._exchange is None or not self.shares_updates:
            return frozenset()
        return self._exchange.held_shares

    def share_frames(self, share: int, *, has_state: bool) -> list[Any]:
        """Returns the bytes of a share's parameters, and of its optimizer state where they are to ``has_state``."""
        assert self._exchange is not None
        return self._exchange.share_frames(share, has_state=has_state)

    def put_share(self, share: int, frames: Sequence[Any], *, has_state: bool) -> None:
        """Takes what :meth:`share_frames` returned in another replica."""
        assert self._exchange is not None
        self._exchange.put_share(share, frames, has_state=has_state)

    def drop_share(self, share: int) -> None:
        """Frees the optimizer state of a share."""
        assert self._exchange is not None
        self._exchange.drop_share(share)

    def clear(self) -> None:
        """Drops the gradients that steps have added up which are done again."""
        for chunk, held in self.states.items():
            if self._graph.holder(chunk) == chunk:
                held.accumulators = self._programs[chunk].zeros()

    # -- on the stage's threads --------------------------------------------------------------------------------------

    def launch(self, step: int, task: Task | Pair) -> Launched:
        begun_s = time.perf_counter()
        read: tuple[Any, ...] = ()
        try:
            if isinstance(task, Pair):
                read = (self._read(step, task.first), self._read(step, task.second))
                enqueued = self._together(step, task, *read)
            else:
                read, (kind, chunk, microbatch) = self._read(step, task), task
                if (make := self._in_calls.get(kind)) is not None:
                    enqueued = _alone(make(step, chunk, microbatch, *read))
                else:
                    enqueued = self._enqueue[kind](step, chunk, microbatch)
            if self._posts_at_once:
                begun_s = time.perf_counter()  # Elsewhere the program may run within its launch.
            # Values for chunks of this stage go at once: their task may be launched before this one has ended.
            self._post(
                step, [each for each in enqueued.posts if self._posts_at_once or each[0].target in self._programs]
            )
            if self._posts_at_once:
                self._measure(step, task, enqueued.pair)
        except BaseException as error:
            self._fail(error, task, read)
            raise
        return Launched(begun_s, partial(self._wait, step, task, enqueued, read))

    def _read(self, step: int, task: Task) -> tuple[Any, ...]:
        """Takes the values of other chunks that a task reads: outputs of all predecessors of F, gradients from all
        successors of B and I that return one, each from the replica that runs the microbatch; None from chunks that it
        skips."""
        graph, (kind, chunk, microbatch) = self._steps[step].graph, task
        if (held := self.states[chunk]).derived is None:  # Shares of its parameters have come.
            held.derived = self._programs[chunk].prepare(held.params)
        if kind is TaskKind.F:
            message_kind, others = MessageKind.ACTIVATION, graph.predecessors(chunk)
        elif kind is TaskKind.B or kind is TaskKind.I:
            message_kind, others = MessageKind.GRADIENT, graph.gradient_successors(chunk)
        else:
            return ()
        take = self._mailbox.take
        return (
            tuple(
                None if other is None else take(step, Message(message_kind, other, chunk, microbatch))
                for other in graph.of_each_base(others, microbatch)
            ),
        )

    def _together(self, step: int, pair: Pair, *reads: tuple[Any, ...]) -> _Enqueued:
        """Launches two tasks; returns the rest of the work of both."""
        tasks = [
            self._in_calls[task.kind](step, task.chunk, task.microbatch, *read)
            for task, read in zip(pair, reads, strict=True)
        ]
        program: PairProgram | None = None
        if pair.first[1:] == pair.second[1:]:  # W of this very I, which reads residuals of its program.
            _, chunk, microbatch = pair.first
            program = self._programs_of(step, chunk, microbatch).whole_backward
            if program is not None and (self._copies.base(chunk), microbatch) not in self._steps[step].batch.left_out:
                return _alone(self._backward(step, chunk, microbatch, *reads[0]))._replace(pair=program)
            program, rest = None, [_alone(task) for task in tasks]
        else:
            begun = [_begun(task) for task in tasks]
            program, results = self._run_both(*begun)
            rest = [
                _gone_on(task, result) if isinstance(each, ProgramCall) else each
                for task, each, result in zip(tasks, begun, results, strict=True)
            ]
        return _Enqueued(
            [each.awaited for each in rest],
            [post for each in rest for post in each.posts],
            partial(_record_all, [each.record for each in rest if each.record is not None]),
            program,
        )

    def _run_both(
        self, first: ProgramCall | _Enqueued, second: ProgramCall | _Enqueued
    ) -> tuple[PairProgram | None, tuple[Any, ...]]:
        """Runs the calls of two tasks; returns the program that does the work of both, if there is one, and the results
        of each call, None for a task without one."""
        if isinstance(first, ProgramCall) and isinstance(second, ProgramCall) and first.program and second.program:
            if (pair := self._pairs.get((first.program, second.program))) is not None:
                return pair, pair.run(first, second)
            if (pair := self._pairs.get((second.program, first.program))) is not None:
                return pair, pair.run(second, first)[::-1]
        return None, tuple([each.run() if isinstance(each, ProgramCall) else None for each in (first, second)])

    def _wait(self, step: int, task: Task | Pair, enqueued: _Enqueued, read: Any) -> None:
        """Waits for a task; on the thread that waits for this stage's tasks, which need not be the compute thread."""
        try:
            # Ready arrays too: an array whose program has failed says that it is ready, and raises here alone.
            jax.block_until_ready(enqueued.awaited)
            if not self._posts_at_once:
                self._post(step, [each for each in enqueued.posts if each[0].target not in self._programs])
                self._measure(step, task, enqueued.pair)
        except BaseException as error:
            self._fail(error, task, read)
            raise
        if enqueued.record is not None:
            enqueued.record()

    def _fail(self, error: BaseException, task: Task | Pair, read: Any) -> None:
        """Ends the waits of other replicas for this one. Raises TransportFailed where the failed task is not to blame,
        since an array that it reads has not come."""
        if self._replicas is not None:
            self._replicas.abort(error)
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(read) if isinstance(leaf, jax.Array)]
        for leaf in arrays:
            # An array that has failed says that it is ready; one on its way does not.
            if not leaf.is_deleted() and leaf.is_ready():
                try:
                    leaf.block_until_ready()
                except Exception as cause:
                    raise TransportFailed(
                        f"what {task} reads could not be brought to the devices of stage {self._stage}: {cause}"
                    ) from cause

    def _post(self, step: int, posts: Iterable[tuple[Message, Any]]) -> None:
        for message, value in posts:
            if message.kind in IN_PARTS:
                bucket = message.microbatch if message.kind is MessageKind.SHARE else 0
            else:
                bucket = self._steps[step].batch.buckets[message.microbatch]
            self._mailbox.post(step, message, value, bucket)

    def _measure(self, step: int, task: Task | Pair, pair: PairProgram | None = None) -> None:
        if isinstance(task, Pair):
            self._measure_pair(step, task, pair)
            return
        op = self._operations.get(task.kind)
        if op is not None and not op.remakes_stash:  # Counted where it begins and ends.
            return
        state = self._steps[step]
        bucket = 0 if task.microbatch < 0 else state.batch.buckets[task.microbatch]
        is_remade = bool(state.graph.ops) and self._is_remade(task.chunk, task.microbatch)
        inbox_bytes = self._mailbox.held_bytes + self._in_transit()
        self._meter.ran(task, bucket, inbox_bytes, is_remade=is_remade)
        if self._exchange is not None and step < BESIDE:
            self._exchange.count_cut(step, task.chunk)

    def _measure_pair(self, step: int, tasks: Pair, pair: PairProgram | None) -> None:
        if pair is None:
            for task in tasks:
                self._measure(step, task)
            return
        buckets = self._steps[step].batch.buckets
        inbox_bytes = self._mailbox.held_bytes + self._in_transit()
        self._meter.ran_pair([(task, buckets[task.microbatch]) for task in tasks], pair.temporaries, inbox_bytes)
        if self._exchange is not None:
            for task in tasks:
                self._exchange.count_cut(step, task.chunk)

    def _is_remade(self, chunk: int, microbatch: int) -> bool:
        return any(op.exists(chunk, microbatch) for op in self._remake_stash)

    def _programs_of(self, step: int, chunk: int, microbatch: int) -> MicrobatchPrograms:
        return self._programs[chunk].of(self._steps[step].batch.buckets[microbatch])

    # -- F, B, I and W -----------------------------------------------------------------------------------------------

    def _forward(self, step: int, chunk: int, microbatch: int, inputs: tuple[Any, ...]) -> _TaskInCalls:
        state, (params, derived) = self._steps[step], self._weights(step, chunk)
        graph, programs = state.graph, self._programs_of(step, chunk, microbatch)
        placed = None if self._leaves_ahead is None else self._leaves_ahead.take(chunk, (step, microbatch))
        leaves = placed or {name: state.batch.leaves[name][microbatch] for name in programs.leaves}
        own_number = state.batch.number(microbatch)
        number = 0 if state.batch.verifies else own_number
        read = (inputs, leaves, step if state.batch.step is None else state.batch.step, number)
        for op in self._keep_inputs if graph.ops else ():
            if op.exists(chunk, microbatch):
                task = Task(TaskKind(op.letter), chunk, microbatch)
                state.forwards[task] = lambda: programs.forward(params, *read, derived=derived)
        if graph.ops and self._is_remade(chunk, microbatch):
            outputs = programs.outputs(params, *read, derived=derived)
        else:
            outputs, stash = yield programs.forward_call(params, *read, derived=derived)
            if graph.has_backward(chunk):
                state.stashes[chunk, microbatch] = stash
        self._add_up(step, OUTPUTS, TaskKind.F, chunk, outputs)
        record = None
        if graph.gives_loss(chunk):
            loss = loss_of(graph, chunk, outputs)
            _start_copies(loss)
            record = partial(state.losses.append, (own_number, chunk, Loss(*loss)))
        posts = [
            (
                Message(MessageKind.ACTIVATION, chunk, successor, microbatch),
                part_of(outputs, graph.part(chunk, successor)),
            )
            for successor in graph.successors(chunk)
            if graph.exists(successor, microbatch)
        ]
        return _Enqueued(outputs, posts, record)

    def _backward(self, step: int, chunk: int, microbatch: int, output_grads: tuple[Any, ...]) -> _TaskInCalls:
        state, programs = self._steps[step], self._programs_of(step, chunk, microbatch)
        params, derived = self._weights(step, chunk)
        graph, stash = state.graph, state.stashes.pop((chunk, microbatch))
        if self._exchange is not None and graph.trains(chunk):
            self._exchange.turn_to(step, graph.holder(chunk), microbatch)
        input_grads, sums, awaited = yield programs.backward_call(
            params, stash, output_grads, self._sums(step, chunk), derived=derived
        )
        self._keep_sums(step, chunk, sums)
        posts = self._with_input_grads(step, TaskKind.B, chunk, microbatch, input_grads)
        return self._with_pieces(step, chunk, awaited, posts) if graph.trains(chunk) else _Enqueued(awaited, posts)

    def _input_gradient(self, step: int, chunk: int, microbatch: int, output_grads: tuple[Any, ...]) -> _TaskInCalls:
        """Launches I, which leaves residuals to W."""
        state, programs = self._steps[step], self._programs_of(step, chunk, microbatch)
        params, derived = self._weights(step, chunk)
        stash = state.stashes.pop((chunk, microbatch))
        input_grads, residuals = yield programs.input_gradient_call(params, stash, output_grads, derived=derived)
        if state.graph.trains(chunk):
            state.weight_residuals[chunk, microbatch] = residuals
        posts = self._with_input_grads(step, TaskKind.I, chunk, microbatch, input_grads)
        return _Enqueued((input_grads, residuals), posts)

    def _with_input_grads(
        self, step: int, kind: TaskKind, chunk: int, microbatch: int, input_grads: tuple[Any, ...]
    ) -> list[tuple[Message, Any]]:
        """Returns the messages with the input gradients of a task."""
        graph = self._steps[step].graph
        self._add_up(step, INPUT_GRADIENTS, kind, chunk, input_grads)
        # A microbatch may skip a predecessor, which then gets no gradient.
        predecessors = graph.of_each_base(graph.gradient_predecessors(chunk), microbatch)
        return [
            (Message(MessageKind.GRADIENT, chunk, predecessor, microbatch), grad)
            for predecessor, grad in zip(predecessors, input_grads, strict=True)
            if predecessor is not None
        ]

    def _weight_gradient(self, step: int, chunk: int, microbatch: int) -> _TaskInCalls:
        programs, (params, derived) = self._programs_of(step, chunk, microbatch), self._weights(step, chunk)
        residuals = self._steps[step].weight_residuals.pop((chunk, microbatch))
        if self._exchange is not None:
            self._exchange.turn_to(step, self._graph.holder(chunk), microbatch)
        if (self._copies.base(chunk), microbatch) in self._steps[step].batch.left_out:
            # W stays a task, so orders, memory and groups need not know: it frees the residuals, and no program runs.
            return self._with_pieces(step, chunk, (), [])
        sums, done = yield programs.weight_gradient_call(params, residuals, self._sums(step, chunk), derived=derived)
        self._keep_sums(step, chunk, sums)
        return self._with_pieces(step, chunk, done, [])

    def _with_pieces(self, step: int, chunk: int, awaited: Any, posts: list[tuple[Message, Any]]) -> _Enqueued:
        """Returns the rest of a task that has added to the gradients of a chunk: the last one sends their pieces."""
        self._add_up(step, GRADIENTS, self._graph.accumulating_kind(chunk), chunk, self._sums(step, chunk))
        pieces = [] if self._exchange is None else self._exchange.added(step, self._graph.holder(chunk))
        return _Enqueued((awaited, [value for _, value in pieces]), [*posts, *pieces])

    # -- operations, R and U -----------------------------------------------------------------------------------------

    def _operate(self, op: Op, step: int, chunk: int, microbatch: int) -> _Enqueued:
        assert op.run is not None
        state, task = self._steps[step], Task(TaskKind(op.letter), chunk, microbatch)
        sources = self._graph.predecessors(chunk)
        comes_alone = len(sources) == 1 and self._placement.stage_of_chunk[sources[0]] != self._stage
        context = OperationContext(
            step=step,
            task=task,
            state=self.states[chunk],
            stashes=state.stashes,
            kept=self._kept[chunk],
            programs=self._programs_of(step, chunk, microbatch) if microbatch >= 0 else None,
            owns_inputs=comes_alone and not any(each.exists(chunk, microbatch) for each in self._keep_inputs),
            forward=state.forwards.pop(task, None),
        )
        if op.remakes_stash:  # Its bytes are counted like those of the chunk's programs.
            return _Enqueued(op.run(context))
        # The arrays of the microbatch are counted on both sides of a copy until that has ended.
        before = held_by(state.stashes.get(task[1:]))
        done = op.run(context)
        after = held_by(state.stashes.get(task[1:]))
        self._meter.begins(before, after, self._mailbox.held_bytes + self._in_transit())
        return _Enqueued(done, record=partial(self._meter.ended, before, after))

    def _reduce(self, step: int, chunk: int, _: int) -> _Enqueued:
        programs, held, state = self._programs[chunk], self.states[chunk], self._steps[step]
        if self._exchange is not None:
            norms, posts = self._exchange.reduce(step, chunk)
            _start_copies(norms)
            place = self._copies.base(chunk) if self._update_rules.sparse is None else chunk
            found = [(place, norm) for norm in norms]
            awaited = norms, [value for _, value in posts]
            return _Enqueued(awaited, posts, record=partial(state.squared_norms.extend, found))
        shared: tuple[Any, ...] = ()
        if len(tied := self._copies.of_replica(self._graph.sharing(chunk), self._replica)) > 1:
            state.shared_layers[chunk] = programs.shared_layers(self._sums(step, chunk))
            shared = tuple(
                self._layers_before_reduction(step, other)
                if other in self._programs
                else self._mailbox.read(step, Message(MessageKind.SHARED, other, chunk))
                for other in tied
            )
        if self._replicas is None:
            own = (held.optimizer_state,) if held.optimizer_state else ()  # A chunk that does not train has none.
            sums, norm = programs.updates.reduce(self._sums(step, chunk), shared, *own)
        else:
            base = self._copies.base(chunk)
            sums, norm = self._replicas.reduce(
                step, base, self._replica, self._sums(step, chunk), shared, optimizer_state=held.optimizer_state
            )
        self._keep_sums(step, chunk, sums)
        if self._replica:  # All replicas have the same sums, which count once.
            return _Enqueued(norm)
        _start_copies(norm)
        return _Enqueued(norm, record=partial(state.squared_norms.append, (self._copies.base(chunk), norm)))

    def _update(self, step: int, chunk: int, _: int) -> _Enqueued:
        programs, held, verdict = self._programs[chunk], self.states[chunk], self._verdict(step)
        base = self._copies.base(chunk)
        self._steps[step].updated.add(chunk)
        if self._exchange is not None:
            self._exchange.join(step, chunk)
        if self._replicas is not None and self._replicas.shares_optimizer(base):
            held.params = self._replicas.update(step, base, self._replica, held.params, verdict)
        else:
            scale = verdict.scales[self._replica] if verdict.scales else verdict.scale
            held.params, held.optimizer_state, sums = programs.updates.update(
                held.params, held.optimizer_state, self._sums(step, chunk), scale, verdict.apply
            )
            self._keep_sums(step, chunk, sums)
            if (version := self._versions.get(chunk)) is not None:
                version.older, version.derived = _older_params(held), held.derived
                version.num_updates += 1
        posts: list[tuple[Message, Any]] = []
        if self._exchange is not None and self.shares_updates:
            graph = self._steps[step].graph
            posts = self._exchange.share_posts(graph, chunk)
            if self._exchange.awaits_shares(graph, chunk):  # Others make the rest of the parameters.
                held.derived = None
                return _Enqueued((held.params, [value for _, value in posts]), posts)
        held.derived = programs.prepare(held.params)
        return _Enqueued((held.params, held.derived, [value for _, value in posts]), posts)


def _place(programs: MicrobatchPrograms, batch: StepBatch, microbatch: int) -> dict[str, Any]:
    return programs.place({name: batch.leaves[name][microbatch] for name in programs.leaves})


def _start_copies(tree: Any) -> None:
    """Begins to bring numbers to the host that a report will ask for."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
