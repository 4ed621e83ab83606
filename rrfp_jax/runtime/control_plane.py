"""The control plane: small messages of plain data between the processes of a run, over its :class:`PeerNetwork`.

:class:`Peers` carries notes within groups, announcements, step statistics, failures and all-gathers for one driver
after another. :class:`StopRequests` carries the requests of single processes for the whole run, to stop and to save.

:class:`Clocks` measures the offset of this process's clock from rank 0's along the control tree, and again from time to
time. A rank asks its parent for the time several times and believes the answer that came back soonest, to half a round
trip. To that it adds the offset of the parent's own clock from rank 0's; the parent holds its first answer back until
it knows that. Clocks of hosts drift by seconds a day, so an offset measured at the start is worth little later on. The
shortest of these round trips also tells how long a control message takes. A parent measures it too, from its answer to
the child's next question, so that every rank of several knows one.
"""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.failure_detector import WaitTimes, watched
from rrfp_jax.cluster.wire import field, pack_plain, unpack_plain
from rrfp_jax.core import GroupHeard, Message, Note, TaskAnnounced
from rrfp_jax.layout import ControlTree, Layout, whole_tree
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.failure import FailureNews
from rrfp_jax.runtime.transports.messages import KEY_BYTES, MessageKey, pack_key, unpack_key
from rrfp_jax.runtime.tree_collectives import PeerFailed, StatisticsReduction, TreeAllGather
from rrfp_jax.schedules.timeline import StepSums
from rrfp_jax.waiting import wait_for

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime

_LOG = logging.getLogger(__name__)
_NOTE, _TASK, _FAILURE = "note", "task", "failure"
_STOP, _DECISION, _CLOCK = "stop", "decision", "clock"
_NUM_PINGS = 8
_FRESH_S = 60.0
_UNIT = struct.Struct("<I")
_MAX_NEWS_BYTES = 1 << 26
_LOOK_S = 0.5


class Peers:
    """Talks to the other ranks, for one driver after another."""

    def __init__(self, network: PeerNetwork, layout: Layout, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.network, self.layout, self.rank = network, layout, network.rank
        self.tree = whole_tree(network.rank, network.num_ranks)
        """The ranks that live."""
        self.clocks = Clocks(network, clock)
        self.statistics = StatisticsReduction(network)
        self.all_gather = TreeAllGather(network)
        self._driver: PipelineRuntime | None = None
        self._led = frozenset(unit for unit in layout.units_of(self.rank) if layout.ranks_of(unit)[0] == self.rank)
        """Units that this rank hosts as the first or only one."""
        self._task_topic = network.in_epoch(_TASK).encode()
        self.others_go_on = False
        """Whether the others go on without this rank where it fails, so that nobody is told."""
        self._wait_times: WaitTimes | None = None
        """None before the first driver has started."""
        stages = {layout.stage_of(unit) for unit in layout.units_of(self.rank)}
        self._partners = frozenset(rank for stage in stages for rank in layout.ranks_of_stage(stage)) - {self.rank}
        """Ranks with which programs of this one run collectives, if any do."""
        self.waiting_s: dict[str, float] = {}
        """When this rank began to wait for all others at once, by the occasion."""
        self._num_ended = 0
        """Number of steps that the latest driver has ended."""
        self._warned_s = 0.0
        """Beginning of the wait that was warned of last."""
        self._heard: set[str] = set()
        """Ranks whose stages some news of a failure has described."""
        network.subscribe(_FAILURE, self._failure)

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that live, those first that have been there longest."""
        return self.tree.living

    # -- on any thread -----------------------------------------------------------------------------------------------

    def gather(self, name: str, data: Any = None, **more: Any) -> dict[int, Any]:
        """Brings plain data and returns the data of all ranks; see :meth:`TreeAllGather.gather`."""
        with self.waiting(name):
            return self.all_gather.gather(name, data, **more)

    @contextmanager
    def waiting(self, occasion: str) -> Iterator[None]:
        """Encloses a wait of this rank for all others."""
        self.waiting_s[occasion] = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_s.pop(occasion, None)

    def tell(self, unit: int, member: int, step: int, note: Note) -> None:
        """Sends a note to a member of a unit's group, which a task there may wait for."""
        ranks = self.layout.ranks_of(unit)
        header = {"unit": unit, "step": step, "member": ranks.index(self.rank), "note": to_plain(note)}
        # Queued even on the loop: a note from another thread that came before goes first (see StopRequests.decide).
        self.network.call_soon(partial(self.network.send, ranks[member], _NOTE, header))

    def announce_task(self, unit: int, step: int, message: Message) -> None:
        """Tells the leader of a unit's group that the task which will send the unit this message has started.

        The announcement travels beside data, for which it never waits: where data queue up, it is dropped.
        """
        header = _UNIT.pack(unit) + pack_key(MessageKey(step, message))
        self.network.send_arrays(self.layout.ranks_of(unit)[0], self._task_topic, header, may_drop=True)

    def step_ended_here(self, step: int, sums: StepSums, peaks_of_units: Mapping[int, tuple[int, int]]) -> None:
        """Adds a step that the units of this rank have ended; see :meth:`StatisticsReduction.add`."""
        self.network.on_loop(self.statistics.add, step, sums, peaks_of_units)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def follow(self, tree: ControlTree) -> None:
        """Goes on without the ranks that are not in a tree."""
        self.tree = tree
        for each in (self.statistics, self.clocks):
            each.follow(tree)

    def attach(self, driver: "PipelineRuntime") -> None:
        """Hands everything that has come and that will come to a driver."""
        self._driver = driver
        self.statistics.begin(driver.steps.ended_everywhere)
        self.network.subscribe(_NOTE, self._note)
        self._task_topic = self.network.in_epoch(_TASK).encode()
        self.network.subscribe_packed(self._task_topic, self._task)

    def watch_waits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has silent ranks asked whether they live where this rank waits much longer than usual, from now on."""
        if self._wait_times is None:
            self._wait_times = WaitTimes(self.network.patience_s)
            self._look_at_waits(loop, self._wait_times)

    def _look_at_waits(self, loop: asyncio.AbstractEventLoop, wait_times: WaitTimes) -> None:
        waits, now_s = {}, time.perf_counter()
        if self._driver is not None:
            waits, self._num_ended = self._driver.waits(), self._driver.steps.num_ended
        for occasion, since_s in [*self.waiting_s.items()][:1]:  # the longest of them
            waits[-1, False] = since_s, f"rank {self.rank} waits for all others ({occasion})"
        began_s = {kind: since_s for kind, (since_s, _) in waits.items()}
        too_long = wait_times.look(now_s, began_s, self._num_ended)
        standstill = None
        if too_long:
            kind = min(too_long, key=lambda kind: waits[kind][0])
            since_s, activity = waits[kind]
            text = f"{activity} for {now_s - since_s:.1f} s, {too_long[kind]:.1f} s at most before"
            # Without recovery a loss ends the run, so the deadline stays where nobody waits within a collective.
            standstill = text, range(self.layout.num_ranks) if self.others_go_on else self._partners
            if kind[0] in self._led and self._partners and since_s != self._warned_s:
                self._warned_s = since_s
                heard = self.network.activities()
                others = "; ".join(f"rank {rank}: {heard[rank]}" for rank in self._partners & heard.keys())
                _LOG.warning("rank %d: %s; last heard of the others: %s", self.rank, text, others)
        self.network.tell_activity("; ".join(text for _, text in waits.values()), standstill)
        loop.call_later(_LOOK_S, self._look_at_waits, loop, wait_times)

    def detach(self) -> None:
        """Lets go of the driver, which is closed; later messages are kept for the next."""
        if self._driver is not None:
            self._driver = None
            self.network.unsubscribe(_NOTE)
            self.network.unsubscribe(self._task_topic)

    def announce(self, news: FailureNews) -> None:
        """Tells this rank's neighbours of a failure, after which no all-gather can be completed. Never raises."""
        if self.others_go_on:
            return
        self.lose(f"rank {news.origin} gave up: {news.summary}")
        try:
            packed = pack_plain(to_plain(news), _MAX_NEWS_BYTES)
            for rank in control_neighbours(self.rank, self.layout.num_ranks):
                self.network.send(rank, _FAILURE, {}, [packed])
        except Exception:  # The run ends all the same; the others notice that this rank is gone.
            _LOG.exception("rank %d could not tell the others why it gives up", self.rank)

    def lose(self, why: str) -> None:
        """Ends every all-gather and comparison of clocks that is not complete: a rank is gone for good."""
        self.all_gather.fail(why)
        self.clocks.fail(why)

    def _note(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        unit, step, member = (field(header, name, int) for name in ("unit", "step", "member"))
        assert self._driver is not None
        self._driver.observe(unit, GroupHeard, step, member, _record(Note, field(header, "note", list)))

    def _task(self, rank: int, header: bytes, _: list[memoryview]) -> None:
        if len(header) != _UNIT.size + KEY_BYTES:
            raise MalformedMessage(f"rank {rank} announces a task in {len(header)} bytes")
        (unit,) = _UNIT.unpack_from(header)
        step, message = unpack_key(header[_UNIT.size :])[:2]
        if unit not in self._led:
            raise MalformedMessage(f"rank {rank} announces a task to unit {unit}, which this rank does not lead")
        assert self._driver is not None
        self._driver.observe(unit, TaskAnnounced, step, message)

    def _failure(self, rank: int, _: dict[str, Any], frames: list[memoryview]) -> None:
        if len(frames) != 1:
            raise MalformedMessage(f"rank {rank} tells of a failure in {len(frames)} frames")
        plain = unpack_plain(frames[0], _MAX_NEWS_BYTES)
        # Several neighbours describe the same stages: each is read once.
        new = [state for state in field(plain, "states", list) if str(state[:1]) not in self._heard]
        self._heard.update(str(state[:1]) for state in new)
        news: FailureNews = _record(FailureNews, {**plain, "states": new})
        if not 0 <= news.origin < self.layout.num_ranks:
            raise MalformedMessage(f"rank {rank} tells of a failure of rank {news.origin}, which does not exist")
        self.lose(f"rank {news.origin} gave up: {news.summary}")
        if self.rank in news.lost:
            self.network.suspected_by(news.origin, news.lost[self.rank])
        if self._driver is not None:
            self._driver.failure.heard(news)


def control_neighbours(rank: int, num_ranks: int) -> frozenset[int]:
    """Returns the ranks with which a rank exchanges control messages: its neighbours in the tree, and those it watches.

    The tree alone falls apart where a rank is lost; along the others the news of that still reaches everybody.
    """
    return watched(rank, num_ranks).union(whole_tree(rank, num_ranks).neighbours)


def _record(kind: Any, plain: Any) -> Any:
    try:
        return from_plain(kind, plain)
    except MalformedRecord as error:
        raise MalformedMessage(str(error)) from error


class StopRequests:
    """Requests of single processes for the whole run: to stop within two steps, and to save the state.

    A request to stop is told once along the control tree, so every process soon knows of it. One clock decides when it
    is time to save by the minute. Nobody acts upon either before the process that computes a step's verdict has put it
    into the verdict, which all processes read alike, at the same step.

    **If the stage of that process spans several processes**, each of them computes the verdict, and all must find the
    same. So the first of them decides the requests in the *next* step's verdict, and tells the others. The message has
    arrived when they need it: it is handed to the event loop before the first process has any part in choosing that
    step's tasks, as are all notes by which it chooses; the loop sends in that order, and messages to a rank keep their
    order.

    Args:
        network: carries messages to the others; None where there are none.
    """

    def __init__(self, network: PeerNetwork | None, layout: Layout) -> None:
        self._network, self._layout = network, layout
        self._decided: dict[int, tuple[bool, bool]] = {}
        """Decisions by step, where the deciding stage spans several processes."""
        self._was_time_to_save = False
        self.stop = False
        """Whether any process has asked to stop, as far as is known here."""
        self.is_time_to_save: Callable[[], bool] = lambda: False
        """Returns at once whether enough time has passed since the last save; asked once per step."""
        if network is not None:
            self._tree = whole_tree(network.rank, network.num_ranks)
            network.subscribe(_STOP, lambda *_: self._tell_all())
            network.subscribe(_DECISION, self._hear_decision)

    def ask_to_stop(self) -> None:
        """Asks all processes to stop; from any thread or signal handler."""
        if self._network is None:
            self.stop = True
        else:
            self._network.call_soon(self._tell_all)

    def decide(self, unit: int, step: int) -> tuple[bool, bool]:
        """Returns whether to stop and whether to save, for the verdict of a step; called once by each process of
        ``unit``."""
        leader, *followers = self._layout.ranks_of(unit)
        if not followers:
            return self._now()
        network = self._network
        assert network is not None
        if network.rank == leader:
            self._decided[step + 1] = stop, save = self._now()
            decision = {"step": step + 1, "stop": stop, "save": save}
            for rank in followers:
                network.call_soon(partial(network.send, rank, _DECISION, decision))
        return self._decided.pop(step, (False, False))

    def _now(self) -> tuple[bool, bool]:
        is_time, was_time = self.is_time_to_save(), self._was_time_to_save
        self._was_time_to_save = is_time
        return self.stop, is_time and not was_time  # Until the state has been saved, it stays time.

    def has_saved(self) -> None:
        """Notes that the state is being saved: from now on it may be time again."""
        self._was_time_to_save = False

    def _tell_all(self) -> None:
        if not self.stop:
            self.stop = True
            assert self._network is not None
            for rank in self._tree.neighbours:
                self._network.send(rank, _STOP, {})

    def follow(self, tree: ControlTree) -> None:
        """Goes by another tree from now on, and asks its ranks again where this one knows of a request to stop; on the
        event loop."""
        self._tree, asked = tree, self.stop
        self.stop = False
        if asked:
            self._tell_all()

    def _hear_decision(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        self._decided[field(header, "step", int)] = field(header, "stop", bool), field(header, "save", bool)


class Clocks:
    """Compares this rank's clock with rank 0's; all ranks call :meth:`synchronise` equally often."""

    def __init__(self, network: PeerNetwork, clock: Callable[[], float]) -> None:
        self._network, self._clock = network, clock
        self._tree = whole_tree(network.rank, network.num_ranks)
        self.offset_s = 0.0
        """Seconds to add to this process's clock to have rank 0's."""
        self._round = self._num_asked = 0
        """Number of comparisons that were completed here, and that were begun."""
        self.round_trip_s: float | None = None
        """Shortest time from a message of this rank to the answer; None: nothing was measured yet."""
        self._answered: dict[int, tuple[int, int, float]] = {}
        """Latest answer to each child: round, number and time."""
        self._measured_s = clock()
        self._pings: list[tuple[float, float]] = []
        self._unanswered: list[tuple[int, dict[str, Any]]] = []
        self._done = threading.Event()
        self._failure: str | None = None
        self._listen()

    def synchronise(self, *, deadline_s: float | None = None) -> None:
        """Measures the offset; on any thread but the loop's. Raises PeerFailed where the parent does not answer."""
        self._done.clear()
        self._network.call_soon(self._begin)
        if not wait_for(self._done, deadline_s) or self._failure is not None:
            why = self._failure or f"rank {self._tree.parent} did not answer within {deadline_s:g} s"
            raise PeerFailed(f"rank {self._network.rank} could not compare its clock: {why}")

    # -- on the event loop -------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Ends all waits, since a rank is gone."""
        self._failure = why
        self._done.set()

    def follow(self, tree: ControlTree) -> None:
        """Goes by another tree in a new epoch."""
        self._network.unsubscribe(self._topic)
        self._tree, self._unanswered = tree, []
        self._listen()

    def come_late(self) -> None:
        """Measures the offset in a run under way, without waiting for it."""
        self._num_asked += 1
        self._pings = []
        self._ask(1)

    def _listen(self) -> None:
        self._topic = self._network.in_epoch(_CLOCK)
        self._network.subscribe(self._topic, self._receive)

    def refresh(self) -> None:
        """Measures the offset again, without waiting for it, where that was last done a minute ago or more."""
        is_known = self._round == self._num_asked > 0
        if not self._tree.is_root and is_known and self._clock() - self._measured_s > _FRESH_S:
            self._measured_s = self._clock()
            self._pings = []
            self._ask(1)  # Number 0 is the one that a parent may hold back; it knows its own offset by now.

    def _begin(self) -> None:
        self._num_asked += 1
        self._pings = []
        if self._tree.is_root:
            self._know(self.offset_s)  # 0 on rank 0, whose clock stays that of the run where it is lost
        else:
            self._ask(0)

    def _ask(self, number: int) -> None:
        assert self._tree.parent is not None
        header = {"round": self._num_asked, "number": number, "sent_s": self._clock()}
        self._network.send_arrays(self._tree.parent, self._topic.encode(), pack_plain(header), ())

    def _receive(self, sender: int, header: dict[str, Any], _: list[memoryview]) -> None:
        if sender == self._tree.parent:
            self._hear(header)
        elif field(header, "number", int) == 0 and field(header, "round", int) > self._round:
            self._unanswered.append((sender, header))
        else:
            self._reply(sender, header)

    def _reply(self, child: int, header: dict[str, Any]) -> None:
        place, now_s = (field(header, "round", int), field(header, "number", int)), self._clock()
        *before, answered_s = self._answered.get(child, (0, 0, now_s))
        if before == [place[0], place[1] - 1]:
            self._note_trip(now_s - answered_s)
        self._answered[child] = (*place, now_s)
        answer = {**header, "clock_s": self._clock(), "offset_s": self.offset_s}
        self._network.send_arrays(child, self._topic.encode(), pack_plain(answer), ())

    def _hear(self, header: dict[str, Any]) -> None:
        now_s, number = self._clock(), field(header, "number", int)
        if field(header, "round", int) != self._num_asked:
            return  # A refresh asked this, before all ranks began to measure again.
        sent_s, theirs_s, offset_s = (field(header, name, float) for name in ("sent_s", "clock_s", "offset_s"))
        if number:  # The first answer may have been held back.
            self._pings.append((now_s - sent_s, theirs_s - (sent_s + now_s) / 2))
            self._note_trip(now_s - sent_s)
        if number < _NUM_PINGS:
            self._ask(number + 1)
        else:
            self._know(min(self._pings)[1] + offset_s)

    def _note_trip(self, trip_s: float) -> None:
        self.round_trip_s = trip_s if self.round_trip_s is None else min(self.round_trip_s, trip_s)

    def _know(self, offset_s: float) -> None:
        self.offset_s, self._round, self._measured_s = offset_s, self._num_asked, self._clock()
        held, self._unanswered = self._unanswered, []
        for sender, header in held:
            self._reply(sender, header)
        self._done.set()
