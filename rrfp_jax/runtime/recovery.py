"""Recovery: a pipeline goes on without ranks that are lost, in the same processes, with the programs that are compiled.

:class:`RecoveringRuntime` stands between a pipeline and its :class:`~rrfp_jax.runtime.driver.PipelineRuntime`, of which
it makes a new one in each epoch. The rules, and the argument why survivors never disagree, are those of
:mod:`rrfp_jax.core.membership`, which is driven here:

1. The network suspects a rank, and the head declares an epoch without it (:mod:`rrfp_jax.cluster._head_link`).
2. This rank freezes: its runtime is closed, tasks that run come to their end, and messages of the epoch are refused.
   The stages keep the steps under way, with the sums that have come.
3. The survivors tell the newest verdict that each knows. Who has not finished that step does so: the sums of all its
   gradients are here, since a verdict is only made after everybody has them.
4. Everything later is dropped, and accumulators are cleared. A new runtime starts with the same states. Once all
   survivors have come so far, the steps that were submitted and have not ended are submitted again, with other owners
   of the microbatches.

Where replicas share the optimizer state (:func:`rrfp_jax.core.plan.share_holders`), a survivor can finish a step for
the shares that it holds, and lacks other parameters. So before steps are submitted again, the ranks tell which shares
they hold. A holder of each share sends its parameters to the living replicas of the stage that do not hold it, and its
optimizer state too to a replica that is to hold it from now on. A loss meanwhile ends this, and the next epoch begins
anew with the shares that are held then. Where a share has no holder left, the run ends. A rank that comes back has its
shares from the checkpoint; those who held them in its place then drop them.

Callers notice nothing but the time: the futures of steps stay those that :meth:`RecoveringRuntime.submit` has returned.

A lost rank comes back as a new process where the run saves its state. That process prepares while the others train, and
tells the head (:meth:`RecoveringRuntime.come_back`). Then they save after the next step, and hold there until it has
read the checkpoint (:meth:`RecoveringRuntime.hold`); it lives in the next epoch.

Slow units are found and relieved here too (:mod:`rrfp_jax.core.rebalancing`). Every few steps all ranks gather the
times of their tasks. Each plans the owners of a step from the same gatherings, so all find the same.

Of two ranks that live and no longer hear each other the launcher declares one lost. The run ends where the rules do not
help, with an error on each rank: the launcher is gone, which alone declares losses; a task here never ends. A rank
whose task raises an error ends by itself, and the others go on without it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.cluster._head_link import HeadLink
from rrfp_jax.cluster.config import PeerAddress
from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.cluster.wire import field, pack_plain, unpack_plain
from rrfp_jax.core.membership import (
    BroughtData,
    EndRank,
    EpochDeclared,
    FetchState,
    FinishDecided,
    FreezeStep,
    GatherCalled,
    GatheredResult,
    GatheringEnded,
    HoldCalled,
    HoldEnded,
    LeaveRun,
    MembershipEvent,
    NewestVerdict,
    PassOn,
    PeerNote,
    RankMembership,
    RankSuspected,
    Recovered,
    ResumeFrom,
    StepDecided,
    TellHead,
    TellRank,
)
from rrfp_jax.core.plan import share_holders
from rrfp_jax.core.rebalancing import AlikeTasks, OwnerPlan, OwnerPlanner, TaskTimes, adopted_owners
from rrfp_jax.core.replicas import Owners, StepOwners
from rrfp_jax.exit_codes import PEER_LOST, print_fatal_message
from rrfp_jax.layout import ControlTree
from rrfp_jax.programs.agreement import Verdict
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.failure import PeerLost, RunFailed, WaitForReport
from rrfp_jax.runtime.steps import StepOutcome
from rrfp_jax.schedules import Absences
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.waiting import result_of, wait_for

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime
    from rrfp_jax.runtime.process import Process
    from rrfp_jax.runtime.stage import ProgramStage

_LOG = logging.getLogger(__name__)
_NOTE, _SHARE = "member", "share"
"""Topics of messages: notes of the membership, and shares of parameters and optimizer state."""
_RUN, _CHECKPOINT, _EPOCH, _TIMES = "run", "checkpoint", "epoch", "times"
"""Lanes of gatherings: those of the main thread, of the thread that saves, and of recovery itself."""
_STEPS_PER_GATHERING, _LAG = 2, 3
"""Steps whose times are gathered together, and how many steps a plan lies behind them at least: two are submitted
ahead, and the gathering takes a moment."""
_NOTES: dict[str, Any] = {kind.__name__: kind for kind in (NewestVerdict, Recovered, BroughtData, GatheredResult)}
_MAX_NOTE_BYTES = 1 << 26
_LEAVE_S, _MOMENT_S = 5.0, 1.0
_HEAD_S = 30.0
"""Seconds after which the head is given up that has not answered a suspicion."""


_Times = tuple[int, list[list[Any]]]
"""A step, and for all tasks of a unit that are alike: unit, chunk, kind, bucket, number of tasks and seconds."""


@dataclass
class _Submitted:
    """A step that was submitted and has not ended."""

    batch: StepBatch
    absent: Absences
    weights: Mapping[int, tuple[int, ...]]
    evaluates: bool
    owners: StepOwners | None
    trained: int | None
    plan: OwnerPlan
    future: "Future[StepOutcome]"

    @property
    def trains(self) -> bool:
        return not self.evaluates and not self.batch.verifies


class _StepTimed(NamedTuple):
    """A training step has ended here, with the times of its tasks."""

    step: int
    buckets: Sequence[int]
    timeline: Timeline


class _ShareCame(NamedTuple):
    """Another rank has sent a share of a unit's parameters, perhaps with the optimizer state."""

    epoch: int
    unit: int
    share: int
    has_state: bool
    frames: list[memoryview]


class RecoveringRuntime:
    """Runs a pipeline in one epoch after another; called like the runtime that it has at the time.

    Args:
        process: this rank.
        owners: the normal owners of the microbatches of a step.
        start: starts a runtime, after a loss with the step that is its first, and returns it with its stages.
        first_step: the step to begin with.
        weigh: returns the weights of microbatches, by unit, from their buckets and owners.
        planner: makes what finds slow units and plans owners; None: nothing does.
        in_blocks: whether one replica takes all microbatches of a lost unit (deterministic runs).
    """

    def __init__(
        self,
        process: "Process",
        owners: Owners,
        start: Callable[..., "tuple[PipelineRuntime, list[ProgramStage]]"],
        first_step: int,
        *,
        weigh: Callable[[Sequence[int], StepOwners], dict[int, tuple[int, ...]]],
        planner: Callable[[], OwnerPlanner] | None = None,
        in_blocks: bool = False,
    ) -> None:
        assert process.cluster is not None
        assert process.peers is not None
        self._process, self._layout, self._stop_requests = process, process.layout, process.stop_requests
        self._rank, self._network, self._peers = process.rank, process.cluster.network, process.peers
        self._normal, self._start, self._weigh = owners, start, weigh
        self.on_loss: Callable[[], None] = lambda: None
        """Called once the living ranks have changed, on the recovery's thread; must return at once."""
        self._lost = process.layout.absent
        """The units that are lost, or absent from the start."""
        self.takes_part = not process.comes_back
        """Whether this process is no newcomer, or no longer one."""
        self._membership = self._new_membership(first_step)
        self._known = frozenset(self._membership.living)
        """The ranks of the latest epoch in which this one has gone on."""
        self._numbers: dict[int, int] = {}  # of the ranks' processes, where they are not 0
        self._held: tuple[int, Future[None]] | None = None
        """The step for which the main thread holds, and what it waits for."""
        # The steps before which a newcomer is to have the state; None: it takes part, or the run has failed.
        self._fetches: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._make_planner, self._planner, self._in_blocks = planner, planner and planner(), in_blocks
        self._planned_since = 0 if self.takes_part else -1
        """The epoch in which the planner was made."""
        self._num_submitted = self._num_observed = 0
        """Training steps that were submitted, and gatherings of times that the planner has taken in."""
        self._times: list[_Times] = []
        """Times of this rank's tasks in the steps that were not gathered yet, with the steps' numbers."""
        self._is_gathering_times = False
        self._gathered_times: queue.SimpleQueue[Mapping[int, list[_Times]] | None] = queue.SimpleQueue()
        """Results that the planner has not taken in; None once there will be none."""
        self._is_waiting = False
        """Whether this rank waits until all survivors have a runtime in this epoch."""
        self._awaited: set[tuple[int, int]] | None = None
        """Units here and the shares that have not come to them; None while it is not known which."""
        self._early: list[_ShareCame] = []
        """Shares that have come before that was known."""
        self._suspected_s: float | None = None
        """Time of the first suspicion that the head has not answered."""
        self._lock = threading.RLock()
        """Guards the four below, the gatherings and the hold."""
        self._pending: dict[int, _Submitted] = {}
        self._is_frozen, self._is_closed = not self.takes_part, False
        self._error: RunFailed | None = None
        self._gatherings: dict[str, Future[dict[int, Any]]] = {}
        self._events: queue.SimpleQueue[MembershipEvent | FetchState | _StepTimed | _ShareCame | None] = (
            queue.SimpleQueue()
        )
        self._stages: list[ProgramStage] = []
        if self.takes_part:  # What a newcomer runs begins with its first epoch.
            self.runtime, self._stages = start()
        membership = process.cluster.membership
        self._head = HeadLink(
            membership.rendezvous,
            process.cluster.key,
            self._rank,
            self._layout,
            on_declared=self._events.put,
            brought=process.packed_brought(),
            number=membership.number,
        )
        self._thread = threading.Thread(target=self._run, name="rrfp-recovery", daemon=True)
        self._begin()

    def _begin(self) -> None:
        self._network.subscribe(_NOTE, self._hear)
        self._network.subscribe(_SHARE, self._hear_share)
        self._peers.gather = self.gather  # type: ignore[method-assign, assignment]
        self._peers.others_go_on = True
        self._network.leave_judgement()
        self._thread.start()

    def _new_membership(self, first_step: int) -> RankMembership:
        return RankMembership(
            self._rank, self._layout.num_ranks, first_step=first_step, is_newcomer=not self.takes_part
        )

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self,
        step: int,
        batch: StepBatch,
        absent: Absences = (),
        weights: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        *,
        evaluates: bool = False,
        owners: StepOwners | None = None,
        trained: int | None = None,
    ) -> "Future[StepOutcome]":
        """Enqueues a step, as :meth:`PipelineRuntime.submit`; its future waits for the step's end in whatever epoch."""
        plan = OwnerPlan()
        is_planned = self._planner is not None and not evaluates and not batch.verifies
        if self._planner is not None and is_planned:
            plan = self._plan(self._planner, batch.buckets)
        submitted = _Submitted(batch, absent, weights, evaluates, owners, trained, plan, Future())
        with self._lock:
            if self._error is not None:
                raise self._error
            # Noted first: a step may have ended by the time that its callback is added.
            self._pending[step] = submitted
            self._num_submitted += is_planned
            if not self._is_frozen:
                try:
                    self._pass_on(step, submitted)
                except Exception:
                    del self._pending[step]  # It was refused.
                    raise
        return submitted.future

    def suspect(self, rank: int, reason: str) -> None:
        """Notes that the network takes a rank for lost."""
        self._events.put(RankSuspected(rank, reason))

    def gather(self, name: str, data: Any = None) -> dict[int, Any]:
        """Brings plain data, blocks until every living rank has, and returns their data by rank, the same on all.

        Gatherings whose names begin with "checkpoint" and others may be called at the same time by two threads. Raises
        RunFailed where the run cannot go on.
        """
        if not self.takes_part:
            return self._process.gather_alone(name, data)
        lane = _CHECKPOINT if name.startswith(_CHECKPOINT) else _RUN
        with self._lock:
            if self._error is not None:
                raise self._error
            waiting = self._gatherings[lane] = Future()
        self._events.put(GatherCalled(lane, data))
        with self._peers.waiting(name):
            return result_of(waiting)

    def take_back(self) -> None:
        """Tells the launcher that :meth:`hold` will be called where new processes of lost ranks are awaited."""
        self._head.take_back()

    @property
    def awaits_newcomers(self) -> bool:
        """Whether new processes of lost ranks are prepared, as far as is known here."""
        return self._head.awaits_newcomers

    def hold(self, step: int) -> None:
        """Blocks, before a step, until the newcomers take part that have the state by then, or none is left.

        All ranks call it alike, with no step under way, and with the state saved.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            _, held = self._held = step, Future[None]()
        self._events.put(HoldCalled(step))
        result_of(held)

    def come_back(self, fetch: Callable[[int], None]) -> None:
        """Takes part in the run, with the state that ``fetch`` makes this process's own; blocks until it does.

        ``fetch`` is called with the number of a step, each time that the others hold before it.
        """
        self._head.offer(None)
        fetched: int | None = None
        while not self.takes_part:
            with suppress(queue.Empty):
                step = self._fetches.get(timeout=_MOMENT_S)
                if self._error is not None:
                    raise self._error
                if step is not None and step != fetched:
                    fetch(step)
                    fetched = step
                    self._membership = self._new_membership(step)
                    self._head.offer(step)

    def leave(self) -> None:
        """Tells the head that this rank has come to the end of the run; an end without that counts as a loss."""
        self._head.leave(_LEAVE_S)

    def close(self) -> bool:
        """Runs no more steps, as :meth:`PipelineRuntime.close`; gatherings go on. Also again."""
        with self._lock:
            self._is_closed = True
        return not self._stages or self.runtime.close()

    def end(self) -> None:
        """Leaves the run for good."""
        self.close()
        self._events.put(None)
        self._thread.join()
        self._head.close()
        self._network.unsubscribe(_NOTE)
        self._network.unsubscribe(_SHARE)

    def close_soon(self) -> None:
        """Closes everything on a thread of its own, without waiting; for the garbage collector."""
        threading.Thread(target=self.close, name="rrfp-close", daemon=True).start()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _plan(self, planner: OwnerPlanner, buckets: Sequence[int]) -> OwnerPlan:
        """Returns the plan of a training step that is submitted now, after waiting for the times that decide it."""
        while self._num_observed < (self._num_submitted - _LAG) // _STEPS_PER_GATHERING:
            if (gathered := self._gathered_times.get()) is None:
                break  # The step will not be run.
            self._num_observed += 1
            for of_step in zip(*gathered.values(), strict=True):
                times: dict[int, dict[AlikeTasks, TaskTimes]] = {}
                for _, found in of_step:
                    for unit, chunk, kind, bucket, num_tasks, busy_s in found:
                        times.setdefault(unit, {})[AlikeTasks(chunk, kind, bucket)] = TaskTimes(num_tasks, busy_s)
                for change in planner.observe(of_step[0][0], times):
                    if self._peers.tree.is_root:
                        _LOG.warning("%s", change.sentence)
        return planner.plan(buckets)

    def _pass_on(self, step: int, submitted: _Submitted) -> None:
        owners, weights = submitted.owners, submitted.weights
        if self._lost or (owners is None and submitted.plan.factors):
            living = [unit for unit in range(self._layout.num_units) if unit not in self._lost]
            table = adopted_owners(self._normal if owners is None else owners.owners, living, in_blocks=self._in_blocks)
            owners = StepOwners(submitted.plan.owners(table) if owners is None else table, self._lost)
            weights = self._weigh(submitted.batch.buckets, owners) if weights else weights
        inner = self.runtime.submit(
            step,
            submitted.batch,
            submitted.absent,
            weights,
            evaluates=submitted.evaluates,
            owners=owners,
            trained=submitted.trained,
        )
        inner.add_done_callback(partial(self._ended, step, self.runtime))

    @property
    def _lost_units(self) -> tuple[int, ...]:
        """The units that are lost, without those that never were there."""
        return tuple(unit for unit in self._lost if unit not in self._layout.absent)

    def _ended(self, step: int, runtime: "PipelineRuntime", inner: "Future[StepOutcome]") -> None:
        error = inner.exception()
        with self._lock:
            # What a frozen runtime could not end is submitted again.
            if error is not None and (self._is_frozen or runtime is not self.runtime):
                return
            submitted = self._pending.pop(step, None)
        if submitted is None:
            return
        if error is None:
            outcome = replace(inner.result(), lost_units=self._lost_units, slow_units=submitted.plan.factors)
            self._tell_times(submitted, outcome)
            submitted.future.set_result(outcome)
        else:
            submitted.future.set_exception(error)

    def _tell_times(self, submitted: _Submitted, outcome: StepOutcome) -> None:
        if self._planner is not None and submitted.trains:
            step = outcome.step if submitted.trained is None else submitted.trained
            self._events.put(_StepTimed(step, submitted.batch.buckets, outcome.timeline))

    # -- on the recovery's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                try:
                    event = self._events.get(timeout=_HEAD_S)
                except queue.Empty:
                    self._check_head()
                    continue
                if event is None:
                    break
                if isinstance(event, _StepTimed):
                    self._note_times(*event)
                    continue
                if isinstance(event, FetchState):
                    self._fetches.put(event.step)
                    continue
                if isinstance(event, HoldCalled):
                    if self._is_frozen or self._held is None or event.step != self._held[0]:
                        continue  # It is called again in the next epoch, or has ended.
                    self._note_verdicts()
                if isinstance(event, _ShareCame):
                    self._take_share(event)
                    continue
                if isinstance(event, EpochDeclared) and event.epoch > self._membership.epoch:
                    self._freeze()
                    self._meet(event.living)
                self._carry_out(event)
                self._check_head()
        except Exception as error:
            _LOG.exception("rank %d cannot go on without the ranks that were lost", self._rank)
            summary = f"rank {self._rank} cannot go on without the ranks that were lost: {error}"
            self._error = PeerLost(WaitForReport(summary=summary, stages=()))
        if self._error is not None:
            self._fail_all(self._error)

    def _check_head(self) -> None:
        """Raises an error where the head does not say who is lost."""
        if not (suspected := self._membership.suspected):
            self._suspected_s = None
        elif self._suspected_s is None:
            self._suspected_s = time.monotonic()
        elif time.monotonic() - self._suspected_s >= _HEAD_S:
            whom = "; ".join(f"rank {rank} is suspected ({why})" for rank, why in suspected.items())
            silent = f"the launcher, which declares losses, was last heard {self._head.silent_s:.0f} s ago"
            raise RuntimeError(f"{whom}, and {silent}")

    def _freeze(self) -> None:
        """Closes the runtime, and tells the membership of all verdicts that are known here."""
        with self._lock:
            self._is_frozen = True
        self._peers.waiting_s.setdefault("to go on after a loss", time.perf_counter())
        if self._stages and not self.runtime.close():
            raise RuntimeError("a task of the stages hosted here does not come to its end")
        self._note_verdicts()

    def _note_verdicts(self) -> None:
        """Tells the membership of all verdicts that are known here."""
        known = [told for stage in self._stages if (told := stage.newest_verdict()) is not None]
        if known:
            newest, verdict = max(known, key=lambda told: told[0])
            for step in range(self._membership.newest + 1, newest + 1):
                self._carry_out(StepDecided(step, verdict.as_plain() if step == newest else None))

    def _meet(self, living: tuple[int, ...]) -> None:
        """Connects to the processes of an epoch that have come back, or, as a newcomer, to all of them."""
        members = {rank: each for rank, each in self._head.members.items() if rank in living and rank != self._rank}
        new = {rank: each for rank, each in members.items() if each.number > self._numbers.get(rank, 0)}
        self._numbers |= {rank: each.number for rank, each in new.items()}
        if not self.takes_part and not self._membership.living:
            assert self._process.cluster is not None
            self._process.cluster.addresses |= {rank: PeerAddress(**each.address) for rank, each in new.items()}
            self._process.enter_run(living, self._numbers)
            return
        for rank, each in new.items():
            self._process.take_up(rank, each.number, PeerAddress(**each.address))

    def _carry_out(self, event: MembershipEvent) -> None:
        for instruction in self._membership.handle(event):
            match instruction:
                case TellHead(epoch, accusations, holds):
                    # As one gathering of times ended, the next may have begun: this rank holds once it has ended.
                    self._head.accuse(accusations, epoch=epoch, holds=None if self._membership.is_gathering else holds)
                case HoldEnded():
                    self._head.let_go()
                    self._end_hold()
                case TellRank(rank, epoch, note):
                    packed = pack_plain([type(note).__name__, *note], _MAX_NOTE_BYTES)
                    self._network.on_loop(self._network.send, rank, _NOTE, {"epoch": epoch}, [packed])
                case FreezeStep(epoch, living, reason):
                    _LOG.warning("epoch %d: %s; %s go on", epoch, reason, name_ranks(living))
                case FinishDecided(step, verdict):
                    self._finish(step, Verdict(**verdict))
                case ResumeFrom(epoch, living, step):
                    self._resume(epoch, living, step)
                case GatheringEnded(lane, result) if lane == _EPOCH:
                    self._exchange_shares(dict(result))
                case GatheringEnded(lane, result) if lane == _TIMES:
                    self._gathered_times.put(dict(result))
                    self._is_gathering_times = False
                    self._gather_times()
                case GatheringEnded(lane, result):
                    self._gatherings.pop(lane).set_result(dict(result))
                case LeaveRun():
                    self._end_gatherings()
                case EndRank(reason):
                    print_fatal_message(f"error: rank {self._rank} is no part of the run any more: {reason}")
                    os._exit(PEER_LOST)

    def _end_gatherings(self) -> None:
        # All have come to the last gathering, where ranks meet before they leave. The others may be gone before its
        # result has come, and nobody reads it.
        while self._gatherings:
            self._gatherings.popitem()[1].set_result({})

    def _note_times(self, step: int, buckets: Sequence[int], timeline: Timeline) -> None:
        """Has the times of a step's tasks gathered with those of others; steps come in their order."""
        found: dict[tuple[int, int, str, int], tuple[int, float]] = {}
        for span in timeline.spans:
            if span.task.microbatch >= 0 and not span.is_beside:
                base, bucket = span.task.chunk // self._layout.data, buckets[span.task.microbatch]
                number, busy_s = found.get(alike := (span.stage, base, str(span.task.kind), bucket), (0, 0.0))
                found[alike] = number + 1, busy_s + span.end_s - span.start_s
        self._times.append((step, [[*alike, *times] for alike, times in found.items()]))
        self._gather_times()

    def _gather_times(self) -> None:
        if not self._is_gathering_times and len(self._times) >= _STEPS_PER_GATHERING:
            told, self._times = self._times[:_STEPS_PER_GATHERING], self._times[_STEPS_PER_GATHERING:]
            self._is_gathering_times = True
            self._carry_out(GatherCalled(_TIMES, told))

    def _finish(self, step: int, verdict: Verdict) -> None:
        for stage in self._stages:
            stage.finish_decided(step, verdict)

    def _resume(self, epoch: int, living: tuple[int, ...], step: int) -> None:
        """Starts a new runtime, and tells the others once it takes messages."""
        units, ranks_of = range(self._layout.num_units), self._layout.ranks_of
        gone = {unit for unit in units if not set(ranks_of(unit)) <= set(living)}
        self._lost = tuple(sorted(gone.union(self._layout.absent)))
        entered = threading.Event()

        def enter() -> None:
            self._network.begin_epoch(epoch)
            tree = ControlTree(self._rank, living)
            self._peers.follow(tree)
            self._stop_requests.follow(tree)
            if not self.takes_part:
                self._peers.clocks.come_late()
            entered.set()

        self._network.call_soon(enter)
        wait_for(entered)
        for stage in self._stages:
            stage.clear()
        with self._lock:
            # A pipeline that is closed meanwhile has nothing left to run.
            if not self._is_closed:
                self.runtime, self._stages = self._start(step)
        self.on_loss()
        # A gathering that another loss has interrupted goes on by itself; its result will tell the earlier epoch.
        if not self._is_waiting:
            self._wait_for_others(epoch)

    def _wait_for_others(self, epoch: int) -> None:
        self._is_waiting, self._awaited = True, None
        held = [[stage.number, sorted(stage.held_shares)] for stage in self._stages]
        self._events.put(GatherCalled(_EPOCH, [epoch, self._planned_since, held]))

    def _exchange_shares(self, told: Mapping[int, tuple[int, int, list[tuple[int, list[int]]]]]) -> None:
        """Sends the shares that others need from here, and goes on at once where none is awaited.

        ``told`` has what each rank has brought: its epoch, the one since which its planner plans, and by unit the
        shares that it holds. Raises RuntimeError for a share that nobody holds.
        """
        self._is_waiting, epoch = False, self._membership.epoch
        if {each for each, _, _ in told.values()} != {epoch}:  # All ranks have this result, so all wait again.
            self._wait_for_others(epoch)
            return
        if len({since for _, since, _ in told.values()}) > 1:
            self._plan_anew()
        held = {unit: set(shares) for _, _, units in told.values() for unit, shares in units}
        self._awaited = set()
        for stage in self._stages:
            layout, own, number = self._layout, self._layout.replica_of(stage.number), self._layout.data
            units = layout.units_of_stage(layout.stage_of(stage.number))
            living = [replica for replica, unit in enumerate(units) if unit not in self._lost]
            for share in range(number if stage.shares_updates else 0):
                having = [replica for replica in living if share in held[units[replica]]]
                if not having:
                    raise RuntimeError(
                        f"share {share} of the optimizer state of stage {layout.stage_of(stage.number)} went with the "
                        "two replicas that held it: they were lost at the same time"
                    )
                holders = share_holders(share, living, number)
                # Kept while one of the two is yet to get it, for the other may be lost meanwhile.
                if own in having and own not in holders and {*holders} <= {*having}:
                    stage.drop_share(share)
                for target in (replica for replica in living if replica not in having):
                    if target == own:
                        self._awaited.add((stage.number, share))
                    elif own == having[0]:
                        has_state, rank = target in holders, layout.ranks_of(units[target])[0]
                        header = {"epoch": epoch, "unit": units[target], "share": share, "state": int(has_state)}
                        frames = stage.share_frames(share, has_state=has_state)
                        self._network.on_loop(self._network.send, rank, _SHARE, header, frames)
        early, self._early = self._early, []
        for came in (*early, None):
            self._take_share(came)

    def _take_share(self, came: _ShareCame | None) -> None:
        """Keeps a share that has come; goes on once all are here."""
        if came is not None and came.epoch != self._membership.epoch:
            return
        if self._awaited is None:
            self._early += [came] if came is not None else []
            return
        if came is not None and (came.unit, came.share) in self._awaited:
            stage = next(stage for stage in self._stages if stage.number == came.unit)
            stage.put_share(came.share, came.frames, has_state=came.has_state)
            self._awaited.discard((came.unit, came.share))
        if not self._awaited and self._is_frozen:
            self._go_on()

    def _go_on(self) -> None:
        """Runs all steps that have not ended."""
        self._peers.waiting_s.pop("to go on after a loss", None)
        step, verdict = self._membership.newest + 1, self._membership.verdict
        living = frozenset(self._membership.living)
        has_grown, self._known = bool(living - self._known), living
        with self._lock:
            self._is_frozen = False
            ended = [number for number in self._pending if number < step]
            over = {number: self._pending.pop(number) for number in ended}
            for number, submitted in sorted(self._pending.items()):
                self._pass_on(number, submitted)
        for number, submitted in over.items():
            # No times and peaks are known of a step that was finished while the pipeline was frozen.
            outcome = StepOutcome(
                step=number,
                result=Verdict(**verdict),
                stages={},
                timeline=Timeline(self._layout.num_units),
                ended_s=time.perf_counter(),
                lost_units=self._lost_units,
                slow_units=submitted.plan.factors,
            )
            self._tell_times(submitted, outcome)
            submitted.future.set_result(outcome)
        if not self.takes_part:
            self.takes_part = True
            self._fetches.put(None)
        elif has_grown:
            self._end_hold()
        elif self._held is not None:
            self._events.put(HoldCalled(self._held[0]))

    def _plan_anew(self) -> None:
        # Newcomers know nothing of earlier steps, and all must plan alike. Nobody has ended a step since the first of
        # them came, so those that were submitted since are pending.
        self._planned_since = self._membership.epoch
        if self._make_planner is None:
            return
        self._planner, self._num_observed = self._make_planner(), 0
        self._times, self._gathered_times = [], queue.SimpleQueue()
        with self._lock:
            pending = [step for step, each in self._pending.items() if each.trains]
            self._num_submitted = sum(step > self._membership.newest for step in pending)

    def _end_hold(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held[1].set_result(None)

    def _fail_all(self, error: RunFailed) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            waiting, self._gatherings = list(self._gatherings.values()), {}
            held, self._held = self._held, None
        if held is not None:
            held[1].set_exception(error)
        self._gathered_times.put(None)
        self._fetches.put(None)
        for submitted in pending:
            submitted.future.set_exception(error)
        for gathering in waiting:
            gathering.set_exception(error)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _hear_share(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        epoch, unit, share, has_state = (field(header, name, int) for name in ("epoch", "unit", "share", "state"))
        self._events.put(_ShareCame(epoch, unit, share, bool(has_state), frames))

    def _hear(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        try:
            name, *fields = unpack_plain(bytes(frames[0]), _MAX_NOTE_BYTES)
            note = _NOTES[name](*fields)
            if isinstance(note, Recovered):
                note = note._replace(results=tuple(PassOn(*each) for each in note.results))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MalformedMessage(f"rank {sender} sends a note that is none: {error}") from error
        self._events.put(PeerNote(sender, field(header, "epoch", int), note))
