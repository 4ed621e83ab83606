"""Which tasks may run, and when a stage is handed its next one: at the end of the running one, as soon as the choice is
certain, or just in time.

The ready set
-------------
It holds the tasks whose inputs are all here, sorted by the hint's order in four lanes.

The forwards lie in two lists, those of microbatches that the stage holds and those of *fresh* ones, since the window
restrains only the latter. Either all fresh forwards are admissible, or those of one microbatch, or none; so the first
admissible one is found without a walk over those that wait behind a full window. The forwards of a chunk whose
read-ahead is bounded (:mod:`rrfp_jax.core.memory`) have a list of their own, and are walked over only while that bound
admits something. Where microbatches have weights, a light one may fit where a heavy one does not: then all fresh ones
are walked over, while there is room for the lightest.

Certain choices
---------------
A stage decides late because a better task may become ready meanwhile. Where nothing that may still happen can change
the choice, waiting gains nothing. It costs the way of the end from the device to the loop and of the choice back; in a
group also the leader's note to all others. So a certain choice is handed over while the task before it runs. The
running task counts as finished then, as it does where a driver has a stage decide early.

A hint chooses one of the lanes' heads, by its state. Give it, in place of the tasks that are ready and admissible, all
that have not started: if it takes task x even then, it takes x from any of them that x is among. For a hint takes the
smallest position of some lane, namely the first lane of its state's sequence that has a head; or the smallest position
of all; or the entry of a strict row. With fewer tasks to choose from, no lane in front of x's has a head more, and none
in x's lane comes before x. So neither an arrival nor an end changes the choice: x is certain as soon as it is ready and
admissible with the running task counted as finished.

A driver that says when a task is about to end (:class:`rrfp_jax.core.DecideNow`) has anything chosen then. A
choice that was certain before is still the same, so the order is that of a stage which chooses everything at that
moment; only the device has certain tasks sooner.

A stage that hands over certain choices early runs the same tasks in the same order as one that does not: until the
running task ends, it may start only the task that it would start then whatever happens meanwhile. Nothing new can
deadlock, as with every early decision. An announcement says that a task has begun on the device, so it waits for the
end of the task before, also of one that was not certain: the time from there to the message's arrival varies least, and
foresight relies on it. Foresight, which holds the best-ranked task for the table's next entry, has nothing to hold, for
a certain choice is that entry.

In a group the leader's choice travels while the task before it runs, and each member takes it up as its own ends.

Certain choices go early with just-in-time dispatch too: they equal the choice at the very end, so the order is the
same, and the device has them in time however short the task before is.

Pairs
-----
A pair is two tasks that one program runs: F of one microbatch, and B, I or W of another, or I of one and W of another.
Collectives inside each, such as the sums of tensor-parallel layers, then hide behind the other's products; in a program
by itself F or I waits for them (STP, 2510.27257; DualPipe, 2412.19437). Both tasks start together and end together.

A stage that goes by readiness chooses a task as ever, starts it, and looks among the tasks that are ready and
admissible then for a partner: to F first a backward, then W; to a backward first F, then W if it is I; to W an F, then
I. So a pair needs no more than its two tasks need one after the other, in memory too: the second is admitted with the
first held. A stage that keeps to a row joins the entries that its table names, and waits until both are ready; the W of
an I may be its partner in a row, which makes a whole backward of them.

A driver that posts :class:`rrfp_jax.core.DecideNow` names the second task of a pair, and both count as ended then. A
certain choice does not go early, since its partner would not be certain.

Nothing new can deadlock. Both tasks of a pair are ready as it starts, so it ends; then the stage is in a state to which
it could have come by running one after the other. A row's pair waits for inputs of both at once, and whether all rows
end so is checked with the table.

Just in time
------------
A driver that posts :class:`rrfp_jax.core.DecideNow` asks a :class:`DecisionTimer` for the moment. The timer learns two
things, in seconds of any clock: how long the tasks of each kind and chunk take, and how long the host takes from the
decision to the launch. The decision is due where the task may end within the host's latency: at a low quantile of the
recent durations, less a high quantile of the recent latencies. Unknown times count as 0, so the first tasks of a
kind decide as they start.

Why so early: a decision that comes too late leaves the device idle for the difference, one that comes early only
ignores tasks that become ready meanwhile. Where an idle second costs c times as much as one by which the decision is
early, the cheapest moment is the 1 / (1 + c) quantile; measured (:mod:`experiments.bench_dispatch`), c is so large that
the shortest of the recent tasks is the best guide.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from rrfp_jax.core.hints import Choice, Heads
from rrfp_jax.core.memory import Window
from rrfp_jax.core.plan import NUM_LANES
from rrfp_jax.core.stage_setup import StepPlan
from rrfp_jax.schedules import Pair, Task, TaskKind

AUTO = "auto"
JUST_IN_TIME = "just-in-time"
CERTAIN = "certain"
PAIRS = "pairs"
DISPATCH_WORDS = f"{AUTO}, {JUST_IN_TIME} (in place of a number of tasks), {CERTAIN}, {PAIRS}, or 0"
"""All values that users may give, for messages."""
HELD = NUM_LANES
"""The number of the list, behind the lanes, with the forwards of held microbatches."""
AHEAD = HELD + 1
"""The number of the first list with the forwards of a bounded chunk; there is one for each of these."""
NOTHING = -1
"""In place of the node that an engine runs."""


class ReadySet:
    """Positions of ready tasks, ascending in each list; a position is a task's place in the hint's order."""

    __slots__ = ("_common", "lanes")

    def __init__(self, num_bounded: int = 0) -> None:
        self.lanes: tuple[list[int], ...] = tuple([] for _ in range(AHEAD + num_bounded))
        """The lanes, of the forwards the fresh ones; then the forwards of held microbatches, and of bounded chunks."""
        self._common = self.lanes[:AHEAD]

    def copy(self) -> "ReadySet":
        twin = object.__new__(ReadySet)
        twin.lanes = tuple(lane.copy() for lane in self.lanes)
        twin._common = twin.lanes[:AHEAD]
        return twin

    def add(self, lane: int, position: int) -> None:
        """Add a ready task: forwards of bounded chunks to their list, other forwards of held microbatches to
        :data:`HELD`, all else to its lane."""
        insort(self.lanes[lane], position)

    def remove(self, lane: int, position: int) -> None:
        entries = self.lanes[lane]
        del entries[bisect_left(entries, position)]

    def hold(self, forwards: Iterable[int]) -> None:
        """Move the forwards of a microbatch, at these positions, to :data:`HELD`: the stage holds it from now on."""
        fresh, held = self.lanes[0], self.lanes[HELD]
        if not fresh:
            return
        for position in forwards:
            if _holds(fresh, position):
                del fresh[bisect_left(fresh, position)]
                insort(held, position)

    def heads(self, window: Window, microbatch_at: tuple[int, ...], forwards_of: Mapping[int, Sequence[int]]) -> Heads:
        """Returns the first admissible position of each lane, bounded chunks apart; only forwards can be inadmissible.

        Args:
            microbatch_at: the microbatch of the task at each position.
            forwards_of: for each microbatch of the stage the positions of its forwards.
        """
        fresh, backwards, weights, last, held = self._common
        forward = held[0] if held else None
        if fresh and (forward is None or fresh[0] < forward) and not window.is_full:
            if window.admits(microbatch_at[fresh[0]]):
                forward = fresh[0]
            elif not window.is_even:
                forward = _first_that_fits(fresh, window, microbatch_at, forward)
            elif window.admits(window.oldest):
                oldest = [p for p in forwards_of[window.oldest] if _holds(fresh, p)]
                forward = min([*oldest, *held[:1]], default=None)
        return (
            forward,
            backwards[0] if backwards else None,
            weights[0] if weights else None,
            last[0] if last else None,
        )

    def first_ahead(self, windows: Sequence[Window], window: Window, microbatch_at: tuple[int, ...]) -> int | None:
        """Returns the first forward of the bounded chunks that the chunk's window and the stage's admit."""
        best: int | None = None
        for waiting, chunk_window in zip(self.lanes[AHEAD:], windows, strict=True):
            if not waiting or chunk_window.is_full:
                continue
            for position in waiting:
                if best is not None and position > best:
                    break
                m = microbatch_at[position]
                if chunk_window.admits(m) and window.admits(m):
                    best = position
                    break
        return best


def _first_that_fits(
    fresh: Sequence[int], window: Window, microbatch_at: tuple[int, ...], held: int | None
) -> int | None:
    """Returns the first admissible position of fresh forwards of different weights, or ``held`` if that is before."""
    refused: dict[int, int] = {}
    ages = window.ages()
    for position in fresh:
        if held is not None and position > held:
            break
        m = microbatch_at[position]
        weight, age = window.weight(m), ages[m]
        # Younger microbatches of the same weight are refused too.
        if age < refused.get(weight, age + 1):
            if window.admits(m):
                return position
            refused[weight] = age
    return held


def _holds(positions: list[int], position: int) -> bool:
    place = bisect_left(positions, position)
    return place < len(positions) and positions[place] == position


_PARTNERS = {TaskKind.F: (1, 2), TaskKind.B: (0,), TaskKind.I: (0, 2), TaskKind.W: (0, 1)}
"""For each kind of task the lanes in which to look for its partner, the best first."""


def best_partner(kind: TaskKind, heads: Heads, ranked: StepPlan) -> int | None:
    """Returns the position of the task that runs in one program with a task of this kind; None: it runs alone.

    ``heads``: the best admissible position of each lane, now that the task has started.
    """
    for lane in _PARTNERS.get(kind, ()):
        head = heads[lane]
        # B adds to the gradients as W does, and neither hides the other's sums.
        if head is not None and not (kind is TaskKind.W and ranked.task_at[head].kind is TaskKind.B):
            return head
    return None


class Certainty:
    """The tasks of one step of one stage that have not started, for certain choices."""

    __slots__ = ("_heads", "_ranked")

    def __init__(self, ranked: StepPlan) -> None:
        self._ranked = ranked
        self._heads = [positions[0] if positions else None for positions in ranked.in_lanes]
        """For each lane the first position that had not started at the last look."""

    def copy(self) -> Self:
        twin = type(self)(self._ranked)
        twin._heads = self._heads.copy()
        return twin

    def choice(self, choose: Callable[[int, Heads], Choice], state: int, waiting: Sequence[int]) -> int | None:
        """Returns the position that the hint takes if every task that has not started were ready and admissible.

        Args:
            state: the state of the hint.
            waiting: for each node, as the arbiter has it: below 0 from its start on.
        """
        at, heads = self._ranked.at, self._heads
        for lane, head in enumerate(heads):
            if head is not None and waiting[at[head]] < 0:
                positions = self._ranked.in_lanes[lane]
                behind = range(bisect_right(positions, head), len(positions))
                heads[lane] = next((positions[n] for n in behind if waiting[at[positions[n]]] >= 0), None)
        return choose(state, (heads[0], heads[1], heads[2], heads[3]))[0]


class Engines:
    """The engines beside a stage's compute lane: each runs one operation at a time, the first of its order that can
    run.

    An engine never waits for its next entry, whatever the stage's consumption is, which orders the tasks that the
    stage *computes*. The graph holds the operations and their engines (:mod:`rrfp_jax.schedules.operations`).
    """

    __slots__ = ("ready", "running")

    def __init__(self, number: int) -> None:
        self.ready: tuple[list[int], ...] = tuple([] for _ in range(number))
        """The positions of each engine's ready operations, ascending."""
        self.running = [NOTHING] * number
        """The node that each engine runs, or :data:`NOTHING`."""

    def copy(self) -> "Engines":
        twin = object.__new__(Engines)
        twin.ready = tuple(positions.copy() for positions in self.ready)
        twin.running = self.running.copy()
        return twin

    def nodes(self) -> list[int]:
        return [node for node in self.running if node != NOTHING]


# -- just in time ------------------------------------------------------------------------------------------------------


class Dispatch(NamedTuple):
    """When a stage is handed its next task; by default at the end of the running one."""

    just_in_time: bool = False
    """Whether the next one is chosen when the running one may end within the host's latency (:class:`DecideNow`)."""

    certain: bool = False
    """Whether the next one is handed over as soon as nothing that may happen changes the choice
    (:mod:`rrfp_jax.core.dispatch`)."""

    pairs: bool = False
    """Whether two ready tasks run as one program where they can."""

    @property
    def is_early(self) -> bool:
        """Whether tasks are handed over while others run."""
        return self.just_in_time or self.certain


def is_dispatch(value: object) -> bool:
    return value in (AUTO, JUST_IN_TIME, CERTAIN, PAIRS) or (
        isinstance(value, int) and value is not False and value == 0
    )


def dispatch_of(value: int | str, *, on_host: bool) -> Dispatch:
    """Returns the meaning of a value for a stage whose devices are the host's own cores, or other ones.

    On the host ``auto`` is ``certain``, which costs no further thread: another choice waits for the running task's end,
    since a core has no queue that could run empty, and threads that hand tasks to each other take it from the work.
    Elsewhere it is ``just-in-time``, which is ``certain`` first: any other task is chosen just in time. 0 chooses every
    task at the end of the one before. ``pairs`` joins two tasks where it can, and chooses at that end on the host,
    elsewhere just in time.

    Raises ValueError for any other value.
    """
    if not is_dispatch(value):
        raise ValueError(f"dispatch_ahead is {value!r}: give {DISPATCH_WORDS}")
    if value == PAIRS:
        return Dispatch(pairs=True, just_in_time=not on_host)
    if value == 0:
        return Dispatch()
    if value == CERTAIN or (value == AUTO and on_host):
        return Dispatch(certain=True)
    return Dispatch(just_in_time=True, certain=True)


def parse_dispatch(text: str) -> int | str:
    """Returns a value as the command line has it: a number, or the text itself."""
    return int(text) if text.removeprefix("-").isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class TimingRule:
    """How much a timer remembers and how careful it is. Raises ValueError on numbers that mean nothing."""

    quantile: float = 0.0
    """The quantile of the recent durations of a kind and chunk: the share of tasks that may end before their successor
    is there."""
    window: int = 64
    """How many durations of each kind and chunk are recent."""
    latency_quantile: float = 0.9
    latency_window: int = 64

    def __post_init__(self) -> None:
        for name in ("quantile", "latency_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number between 0 and 1")
        for name in ("window", "latency_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: remember at least 1")


def timing_rule(*, looks_ahead: bool) -> TimingRule:
    """Returns the rule for a stage with or without foresight.

    With foresight being late costs less, since a stage that has handed over its next entry hides its launches anyway,
    and an early choice may fill a wait with a worse task.
    """
    return TimingRule(quantile=0.2) if looks_ahead else TimingRule()


class DecisionTimer:
    """Learns how long tasks and the host take; for one stage, on one clock."""

    __slots__ = ("_durations", "_latencies", "rule")

    def __init__(self, rule: TimingRule = TimingRule()) -> None:
        self.rule = rule
        self._durations: dict[Hashable, _Recent] = {}
        self._latencies = _Recent(rule.latency_window, rule.latency_quantile)

    @staticmethod
    def _key(task: Task | Pair) -> Hashable:
        """Returns the kind and chunk of a task, or of both tasks of a pair."""
        return (task.first[:2], task.second[:2]) if isinstance(task, Pair) else task[:2]

    def ended(self, task: Task | Pair, duration_s: float) -> None:
        """Learn how long a task or a pair of these kinds and chunks took on the device."""
        key = self._key(task)
        recent = self._durations.get(key)
        if recent is None:
            recent = self._durations[key] = _Recent(self.rule.window, self.rule.quantile)
        recent.add(duration_s)

    def latency(self, seconds: float) -> None:
        """Learn how long the host took from a decision to its launch."""
        self._latencies.add(seconds)

    def delay_s(self, task: Task | Pair) -> float:
        """Returns how long after the start of a task or a pair to decide on the next one."""
        recent = self._durations.get(self._key(task))
        return 0.0 if recent is None else max(0.0, recent.quantile() - self._latencies.quantile())


_ROUNDING_S = 1e-9
"""Most by which sums of times differ where they should be equal."""
_LEAST_FIT = 0.6
"""The part of a piece that must fit in before the first input that foresight expects, since that may come later."""


class GapTimer:
    """Learns how long a stage idles at each place of a step, and how long pieces of other work take; on one clock.

    A place is the number of tasks that the stage has started in the step. The timer knows whether a piece fits in. A
    long one, the 95th percentile, must fit into idle time that is nearly the lower quartile of the last five at this
    place, or into the time before the first input that foresight expects; and :data:`_LEAST_FIT` of it into the latter,
    where that is known. So pieces of 10 ms between tasks of 10 ms slow simulated steps by at most 1.2%, where running
    them always costs up to 28% (FreeRide, 2409.06941, has such pieces). Where tasks vary by 30%, steps with
    foresight are .1 to .7% slower and 37 to 65% of the idle time is used; by history alone .2 to 1.1% and 35 to 53%.
    """

    __slots__ = ("_gaps", "_pieces", "_place", "_since_s")

    def __init__(self) -> None:
        self._gaps: dict[int, deque[float]] = {}
        self._pieces: dict[Hashable, _Recent] = {}
        self._place = 0
        self._since_s: float | None = None
        """The time at which the stage began to idle; None while it has a task."""

    def idles(self, place: int, now_s: float) -> None:
        """Learn that the stage has nothing to run; it may have begun to idle before, at another place."""
        self._place = place
        if self._since_s is None:
            self._since_s = now_s

    def goes_on(self, now_s: float) -> None:
        """Learn that the stage is handed a task."""
        if self._since_s is not None:
            self._gaps.setdefault(self._place, deque(maxlen=5)).append(now_s - self._since_s)
            self._since_s = None

    def piece_ended(self, duration_s: float, kind: Hashable = None) -> None:
        """Learn how long a piece of some kind took."""
        self._pieces.setdefault(kind, _Recent(64, 0.95)).add(duration_s)

    def fits(self, now_s: float, kind: Hashable = None, earliest_s: float | None = None) -> bool:
        """Returns whether a piece of this kind that begins now will probably end before the stage has a task.

        ``earliest_s``: when foresight expects the first input (:meth:`.StageArbiter.earliest_input_s`).
        """
        gap, piece_s = self._gaps.get(self._place), self._pieces[kind].quantile() if kind in self._pieces else 0.0
        if self._since_s is None or gap is None:
            return False
        if earliest_s is not None:
            if earliest_s - now_s >= piece_s - _ROUNDING_S:
                return True
            if earliest_s - now_s < _LEAST_FIT * piece_s:
                return False
        least, *others = sorted(gap)
        expected_s = 0.1 * least + 0.9 * others[0] if len(gap) == gap.maxlen else least
        return expected_s - (now_s - self._since_s) >= piece_s - _ROUNDING_S


class _Recent:
    """The newest values, sorted, and one quantile of them."""

    __slots__ = ("_newest", "_quantile", "_sorted")

    def __init__(self, size: int, quantile: float) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        self._quantile = quantile

    def add(self, value: float) -> None:
        newest = self._newest
        if len(newest) == newest.maxlen:
            del self._sorted[bisect_left(self._sorted, newest[0])]
        newest.append(value)
        insort(self._sorted, value)

    def quantile(self) -> float:
        """Returns the quantile of the newest values; 0 without any."""
        ordered = self._sorted
        return ordered[int(self._quantile * (len(ordered) - 1))] if ordered else 0.0
