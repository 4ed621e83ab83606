"""Foresight: wait for the table's next entry once it is in sight, and fill the wait with tasks that end in time.

Readiness alone starts a low-ranked task just before the high-ranked one arrives; a strict order waits for the
high-ranked one although no stage has begun to produce it. Foresight takes the middle. A stage that starts a task
*announces* the messages that it will send, so that the receivers know that they are on their way.

Rule
----
Let *next* be the first entry of the hint's order that this stage has not started, apart from entries that a bound of
read-ahead holds back, and *best* the best-ranked task that is ready and admissible. *Usual* is the moving average of
the time that a task of a kind and chunk took here; *lead* is that of the time from an announcement to the arrival, for
each edge.

1. Best is next, or next is not admissible, or it lacks something of this stage's own: run best.
2. All that next lacks is announced: it is *in sight*, and expected a lead after it was heard of. Run the best-ranked
   ready task that usually ends before then. If none does, hold: run nothing until next is there, but at most
   ``patience`` times as long as best usually takes; then run best, and count the awaited inputs as not announced.
3. Something that next lacks is not announced, and best usually takes longer than that input's lead: a task started now
   could be in the way of an input that no stage makes yet. Hold for *notice*, at most for the difference, in parts. An
   announcement within that time leads to rule 2. Where such waits keep being in vain, as on an edge whose sender is
   far behind, notice is not taken.
4. Otherwise run best, as without foresight.

Longest holds count from the moment when the stage last became free. A stage that hands its device a task before the
running one has ended counts from the end that it expects; more than one task ahead it hands over the next entry only.
The first task of a kind is expected to take as long as the longest other one, and where none has run, none is held. The
first lead of an edge is expected to be the least of other edges, and where nothing was ever announced, there is none.

Why never slower where nothing varies
-------------------------------------
Let durations and links be constant, averages exact, ``fit`` at most 1 but for rounding, ``patience`` at least 1, the
footprint at least the row's peak, read-ahead never less than the row's, and no task longer than the lead of an input
that it could delay (so it is where F, I and W take equally long). Then each task starts no later than if the row were
consumed strictly. By induction along the table's order of all tasks: let y be next on its stage. The tasks that produce
its inputs start no later than under strict consumption, so y's inputs arrive no later. The stage can then be busy only
with a task x that was started out of order.
Either y was in sight: then x ends before y's inputs arrive, exactly as expected. Or it was not yet announced: then it
arrives at least a lead, so at least the length of x, after x started. Every entry before y has ended no later than
under strict consumption; y is admissible, as the footprint always admits the row's next entry. And x, which was started
out of order, starts before it would have strictly, which is after y. Where x may last longer than the lead, an entry is
delayed by at most the difference, less the notice taken.

Before the input
----------------
A stage that is idle as an input comes has no running task behind which to hide the launch of the next one. Where the
output of a task can be handed to programs from its launch on, as a future, and devices wait for it by themselves, the
driver may *promise* an input once the task that makes it has been announced and handed to its device
(:class:`rrfp_jax.core.InputPromised`). A stage with foresight that has nothing to run, or would hold, hands over the
next entry if that lacks nothing but promised inputs. The entry counts as started then, and as begun when its last input
has come: only then are its own messages announced. It takes the place of a hold: the stage runs nothing else until the
entry has ended, however late its input comes.

Why it cannot deadlock
----------------------
A hold ends by itself: as it begins, the arbiter asks to be woken at its end, when rule 4 applies to the same ready
task; and since its length counts from when the stage became free, one hold cannot renew another. So a ready task is
delayed by a finite time and nothing else changes: the argument of :mod:`rrfp_jax.core.memory` stands as it is.
Announcements only shift these times. A lost one leaves rules 3 and 4; a false or late one costs a hold; doubled ones,
and those of inputs that are here already, change nothing; wrong averages cost at most ``patience`` times the usual
length of the task held.

An entry that is handed over before its inputs waits on its device for tasks that were handed over before it, on this
device and on others. So the first of all tasks that were handed over and have not ended waits for nothing and ends: no
task waits for ever. It was admissible, and lacked nothing else, as it started; once its inputs are there the stage is
in a state to which it could have come without promises. A late or lost promise costs time only. A false one would be
a defect of the driver, as an arrival of an input that is not there would be.
"""

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.hints import Heads
from rrfp_jax.core.plan import StagePlan
from rrfp_jax.field_rules import check_types
from rrfp_jax.schedules import Task, TaskKind

NEVER_S = inf
_TaskKey = tuple[TaskKind, int]
"""Kind and chunk of a task."""
_EdgeKey = tuple[MessageKind, int, int]
"""Kind of a message, source and target chunk."""
_K = TypeVar("_K")


@dataclass(kw_only=True)
class Estimates:
    """Moving averages that outlive the steps, from the stage's own clock alone. Plain data, so that a log can hold
    them."""

    durations_s: dict[_TaskKey, float] = field(default_factory=dict)
    """The usual duration of a task, in seconds."""
    leads_s: dict[_EdgeKey, float] = field(default_factory=dict)
    """The time from an announcement to the arrival of the announced message, in seconds."""
    notices: dict[_EdgeKey, float] = field(default_factory=dict)
    """The share of waits for an announcement that were not in vain."""


class _Averages(Generic[_K]):
    """Moving averages by number: first those of ``keys`` in their order, then of all other known keys.

    ``kept`` is the part of an average that one more observation leaves. Most events teach one average and most choices
    ask for some, so they lie in a list.
    """

    __slots__ = ("_known", "_share", "keys", "values")

    def __init__(self, keys: Iterable[_K], known: Mapping[_K, float], kept: float) -> None:
        self._share = 1 - kept
        self.keys = tuple(dict.fromkeys((*keys, *known)))
        self.values = [known.get(key) for key in self.keys]
        """The average by number; None: not known."""
        self._known = [self.keys.index(key) for key in known]
        """The numbers of known averages, in the order in which they were first learnt."""

    def copy(self) -> "_Averages[_K]":
        twin: _Averages[_K] = object.__new__(type(self))
        twin.keys, twin._share = self.keys, self._share
        twin.values, twin._known = self.values.copy(), self._known.copy()
        return twin

    def learn(self, number: int, observed: float) -> None:
        """Take one more observation; the first one is the average itself."""
        before = self.values[number]
        if before is None:
            self.values[number] = observed
            self._known.append(number)
        else:
            self.values[number] = before + self._share * (observed - before)

    def known(self) -> dict[_K, float]:
        return {self.keys[number]: value for number in self._known if (value := self.values[number]) is not None}


class ArrivalTable:
    """The inputs and announcements of one step's tasks, in tables by number.

    Fixed during a step; kinds and edges have the same numbers in all steps of one kind. Messages have the numbers of
    :attr:`rrfp_jax.core.plan.StagePlan.arrivals`; positions are places in the hint's order.
    """

    def __init__(self, plan: StagePlan, task_at: Sequence[Task]) -> None:
        self.arrivals, self.task_at = plan.arrivals, task_at
        keys = [task[:2] for task in task_at]
        self.kinds: tuple[_TaskKey, ...] = tuple(dict.fromkeys(keys))
        """The keys of durations."""
        number_of_kind = {key: number for number, key in enumerate(self.kinds)}
        self.kind_at = tuple(number_of_kind[key] for key in keys)
        """By position, the number of the task's kind and chunk among these."""
        edges = [message[:3] for message in plan.messages]
        self.edges: tuple[_EdgeKey, ...] = tuple(dict.fromkeys(edges))
        """The keys of leads."""
        number_of_edge = {key: number for number, key in enumerate(self.edges)}
        self.edge_of = tuple(number_of_edge[key] for key in edges)
        """By the message's number, the number of its edge among these."""
        inputs: list[list[int]] = [[] for _ in plan.needs]
        for number in plan.arrivals.values():
            inputs[plan.awaited_by[number]].append(number)
        self.inputs_of = tuple(map(tuple, inputs))
        """The numbers of the messages that each node waits for."""
        self.awaited = tuple(
            (number, self.edge_of[number])
            for message, number in plan.arrivals.items()
            if message.kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT)
        )
        """The numbers of activations and gradients, each with that of its edge."""
        self.announces: tuple[tuple[tuple[Message, int], ...], ...] = tuple(
            tuple(send for send in plan.sends[plan.index[task]] if send[0].kind is not MessageKind.TAKEN)
            for task in task_at
        )
        """By position, the messages that the start of the task announces, and to which stages: all but receipts."""


class PendingInputs:
    """The inputs of one stage that are promised, and the tasks that were handed over before their inputs arrived."""

    __slots__ = ("awaiting", "early", "promised")

    def __init__(self) -> None:
        self.promised: set[int] = set()
        """Numbers of promised messages in the present step; none of them has arrived."""
        self.awaiting: dict[int, int] = {}
        """For each node that was handed over before its inputs, how many are still to come."""
        self.early: dict[int, set[Message]] = {}
        """Promised inputs of later steps that are not here yet."""

    def copy(self) -> "PendingInputs":
        twin = PendingInputs()
        twin.promised, twin.awaiting = self.promised.copy(), self.awaiting.copy()
        twin.early = {step: promised.copy() for step, promised in self.early.items()}
        return twin

    def begin(self, step: int | None, numbers: Mapping[Message, int]) -> None:
        """Begin a step that waits for these messages."""
        early = () if step is None else self.early.pop(step, ())
        self.promised = {numbers[message] for message in early if message in numbers}
        self.awaiting = {}

    def hear_early(self, step: int, message: Message) -> None:
        """Keep a promise of a later step, of an input that is not here yet."""
        self.early.setdefault(step, set()).add(message)

    def cover(self, missing: Iterable[int]) -> bool:
        return bool(self.promised) and self.promised.issuperset(missing)

    def key(self) -> Hashable:
        early = frozenset((step, message) for step, promised in self.early.items() for message in promised)
        return (early, frozenset(self.promised), frozenset(self.awaiting.items()))


@dataclass(frozen=True, kw_only=True)
class ForesightRules:
    """How far a stage looks ahead. Raises ValueError on numbers that mean nothing."""

    fit: float = 1.05
    """A task fits if its usual length is at most this many times the wait; above 1 for ties, which rounding decides."""
    patience: float = 3.0
    """The longest hold, in usual lengths of the task that is held."""
    notice: float = 1.0
    """The longest wait for an announcement, in parts of the time by which the held task usually exceeds the lead."""
    worth: float = 0.8
    """The least share of waits for an announcement that must not be in vain, for each edge."""
    kept: float = 0.9
    """The part of an average of durations or leads that one more observation leaves."""
    worth_kept: float = 0.7
    """The part of the share of useful waits that one more wait leaves."""
    shortest_s: float = 0.0
    """A stage whose tasks usually take less has no use for announcements, and neither makes nor awaits any. In
    seconds."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("fit", "patience", "notice", "shortest_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in ("worth", "kept", "worth_kept"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a part between 0 and 1")

    def make(self, table: ArrivalTable, estimates: Estimates | None = None) -> "Foresight":
        """Returns the foresight of one stage that knows these estimates alone. The model checker makes another one."""
        return Foresight(self, table, estimates or Estimates())


class Foresight:
    """The announcements that one stage has heard, its averages, and its holds.

    Times are seconds on the stage's own clock. Messages and positions are numbers, as in :class:`ArrivalTable`.
    """

    __slots__ = (
        "_announces",
        "_asked_s",
        "_durations_s",
        "_early",
        "_given_up",
        "_last_end_s",
        "_leads_s",
        "_notices",
        "_started_s",
        "_told_wake_s",
        "_wake_s",
        "heard_s",
        "held_since_s",
        "is_awake",
        "next",
        "rules",
        "table",
    )

    def __init__(self, rules: ForesightRules, table: ArrivalTable, estimates: Estimates) -> None:
        self.rules = rules
        self._durations_s = _Averages[_TaskKey](table.kinds, estimates.durations_s, rules.kept)
        self._leads_s = _Averages[_EdgeKey](table.edges, estimates.leads_s, rules.kept)
        self._notices = _Averages[_EdgeKey](table.edges, estimates.notices, rules.worth_kept)
        self._early: dict[int, dict[Message, float]] = {}
        self.begin(-1, table)

    def begin(self, step: int, table: ArrivalTable) -> None:
        """Begin a step with these tasks and messages; early announcements of it count."""
        self.table = table
        self.heard_s = [NEVER_S] * len(table.edge_of)
        """The time at which each message was announced, if it is not here yet."""
        for message, time_s in self._early.pop(step, {}).items():
            if message in table.arrivals:
                self.heard_s[table.arrivals[message]] = time_s
        self._given_up: set[int] = set()
        self._asked_s: dict[int, float] = {}
        self._started_s = [NEVER_S] * len(table.kind_at)
        """The start of the task at each position, if it runs."""
        self._last_end_s = 0.0  # tasks of steps before have ended before any of this one starts
        self.held_since_s: float | None = None
        self._wake_s: float | None = None
        self._told_wake_s: float | None = None
        self.next = 0
        """No position before this one is left to start; where a task at this one is ready, it is the next entry."""
        durations_s = self._durations_s.known().values()
        self.is_awake = not durations_s or sum(durations_s) / len(durations_s) >= self.rules.shortest_s
        self._announces = table.announces if self.is_awake else ((),) * len(table.announces)

    def copy(self) -> "Foresight":
        twin = object.__new__(type(self))
        twin.rules, twin.table, twin._announces = self.rules, self.table, self._announces
        twin.next, twin.is_awake, twin._last_end_s = self.next, self.is_awake, self._last_end_s
        twin.held_since_s, twin._wake_s, twin._told_wake_s = self.held_since_s, self._wake_s, self._told_wake_s
        twin._durations_s, twin._leads_s = self._durations_s.copy(), self._leads_s.copy()
        twin._notices = self._notices.copy()
        twin._early = {step: heard.copy() for step, heard in self._early.items()}
        twin.heard_s, twin._started_s = self.heard_s.copy(), self._started_s.copy()
        twin._asked_s, twin._given_up = self._asked_s.copy(), self._given_up.copy()
        return twin

    def of_other_steps(self, table: ArrivalTable) -> "Foresight":
        """Returns the foresight of steps with other tasks and messages, which knows all that this one has learnt and
        heard for later steps."""
        twin = self.rules.make(table, self.estimates())
        twin._early = self._early
        return twin

    def estimates(self) -> Estimates:
        return Estimates(
            durations_s=self._durations_s.known(), leads_s=self._leads_s.known(), notices=self._notices.known()
        )

    def key(self, *, is_active: bool) -> Hashable:
        """Returns all that the future depends on, times included: between steps far less than within one."""
        early = frozenset((step, *heard) for step, of_step in self._early.items() for heard in of_step.items())
        averages = [tuple(some.values) for some in (self._durations_s, self._leads_s, self._notices)]
        if not is_active:
            return (early, *averages)
        values = (self.held_since_s, self._wake_s, self._told_wake_s, self._last_end_s, self.is_awake)
        sets = (frozenset(self._given_up), frozenset(self._asked_s.items()))
        return (early, *averages, values, tuple(self.heard_s), tuple(self._started_s), *sets)

    # -- events ------------------------------------------------------------------------------------------------------

    def hear(self, number: int, time_s: float) -> None:
        """Take an announcement of the present step, of an input that is not here yet; it counts from its time on."""
        if self.heard_s[number] == NEVER_S:
            self.heard_s[number] = time_s

    def hear_early(self, step: int, message: Message, time_s: float) -> None:
        """Keep an announcement of a later step."""
        self._early.setdefault(step, {}).setdefault(message, time_s)

    def arrived(self, number: int, time_s: float) -> None:
        """Learn the lead of an input that is here, and whether the stage waited for its announcement in vain."""
        heard_s = self.heard_s[number]
        if self._asked_s and number in self._asked_s:
            self._note(number, in_time=heard_s <= min(time_s, self._asked_s.pop(number)))
        if heard_s <= time_s:
            self._leads_s.learn(self.table.edge_of[number], time_s - heard_s)
        self.heard_s[number] = NEVER_S

    def tick(self) -> None:
        """Note that the driver has woken the stage, in time or not."""
        self._told_wake_s = None

    def start(self, position: int, time_s: float) -> tuple[tuple[Message, int], ...]:
        """Note that the task at this position starts. Returns its announcements."""
        self._started_s[position] = time_s
        if position == self.next:
            self.next = position + 1
        if self.held_since_s is not None:
            self.release()
        return self._announces[position]

    def announcements(self, position: int) -> tuple[tuple[Message, int], ...]:
        """Returns the messages to announce as the task at this position begins; none while foresight sleeps."""
        return self._announces[position]

    def begun(self, position: int, time_s: float) -> None:
        """Note that the last input of the task at this position, which was handed over before, has come."""
        self._started_s[position] = time_s

    def release(self) -> None:
        """End a hold: a task starts, or an engine has taken the memory that the held ones need."""
        self.held_since_s = self._wake_s = self._told_wake_s = None

    def finish(self, position: int, time_s: float, *, goes_on: bool = False) -> None:
        """Learn the time that a task took, which has really ended: from its start, or from the end of the one before
        it.

        ``goes_on``: its partner, which ends at the same time, is still to finish. Each of them counts half then.
        """
        started_s, last_end_s = self._started_s[position], self._last_end_s
        self._started_s[position], self._last_end_s = NEVER_S, time_s
        taken_s = time_s - (started_s if started_s > last_end_s else last_end_s)
        if goes_on:
            taken_s /= 2
            self._last_end_s = time_s - taken_s
        self._durations_s.learn(self.table.kind_at[position], taken_s)

    def earliest_s(self, arrived: Container[int], now_s: float) -> float | None:
        """Returns when the first activation or gradient that has not arrived may come: a lead after it was announced,
        and no sooner than a lead from now if it was not. None where some lead is unknown, or all are here."""
        earliest_s, leads_s = NEVER_S, self._leads_s.values
        for number, edge in self.table.awaited if self.is_awake else ():
            if number not in arrived:
                lead_s = leads_s[edge]
                if lead_s is None:
                    return None
                earliest_s = min(earliest_s, min(self.heard_s[number], now_s) + lead_s)
        return None if earliest_s == NEVER_S else earliest_s

    def expected_end_s(self, position: int) -> float:
        """Returns when a running task usually ends, as far as anything is known."""
        return max(self._started_s[position], self._last_end_s) + self.usual_s(position)

    def usual_s(self, position: int) -> float:
        """Returns the usual duration of a task, as far as anything is known."""
        return self._usual_s(position) or 0.0

    def _usual_s(self, position: int) -> float | None:
        """Returns the usual duration of a task: that of the longest other one, if it has not run yet; None: none has
        run."""
        durations_s = self._durations_s.values
        usual_s = durations_s[self.table.kind_at[position]]
        return usual_s if usual_s is not None else max((d for d in durations_s if d is not None), default=None)

    def _lead_s(self, number: int) -> float | None:
        """Returns the time from a message's announcement to its arrival; None if nothing has ever been announced here.

        For a new edge it is the least lead of the same kind of message on other edges, or 0: where a stage waits for
        its first gradient, that is better than to expect none."""
        edge = self.table.edge_of[number]
        lead_s = self._leads_s.values[edge]
        if lead_s is not None:
            return lead_s
        kind, leads_s = self._leads_s.keys[edge][0], self._leads_s.known()
        return min((lead_s for other, lead_s in leads_s.items() if other[0] is kind), default=0.0 if leads_s else None)

    # -- choices ----------------------------------------------------------------------------------------------------

    def choose(
        self,
        best: int,
        heads: Heads,
        missing: Sequence[int],
        now_s: float,
        free_s: float,
    ) -> int | None:
        """Returns which of the ready tasks to run, or None to hold; then :meth:`wake_at_s` says until when.

        Args:
            best: the position of the best-ranked task that is ready and admissible.
            heads: the positions of all that may run instead, ``best`` among them.
            missing: the inputs that the next entry lacks; nothing else keeps it from running.
            now_s: the present.
            free_s: when the stage becomes free; not before the present.
        """
        if self._asked_s:
            # Learn from the announcements that the stage waited for and has heard by now, in the order of hearing.
            told_s = self.heard_s
            for number in sorted([n for n in self._asked_s if told_s[n] <= now_s], key=lambda n: (told_s[n], n)):
                self._note(number, in_time=told_s[number] <= self._asked_s.pop(number))
        usual_s = self._durations_s.values[self.table.kind_at[best]] or self._usual_s(best)
        is_given_up = self._given_up and not self._given_up.isdisjoint(missing)
        if usual_s is None or not self.is_awake or is_given_up:
            return best
        since_s = free_s if self.held_since_s is None else self.held_since_s
        expected_s = free_s
        for number in missing:
            heard_s = self.heard_s[number]
            if heard_s > now_s:
                return self._choose_unheard(best, usual_s, number, now_s, since_s)
            lead_s = self._leads_s.values[self.table.edge_of[number]] or self._lead_s(number)
            arrives_s = heard_s + (lead_s or 0.0)
            expected_s = arrives_s if arrives_s > expected_s else expected_s
        wait_s = self.rules.fit * (expected_s - free_s)
        if wait_s > 0:
            if usual_s <= wait_s:
                return best
            fits = self._first_that_fits(heads, wait_s)
            if fits is not None:
                return fits
        until_s = since_s + self.rules.patience * usual_s
        if now_s >= until_s:
            self._given_up.update(missing)
            return best
        self._hold(since_s, until_s)
        return None

    def awaits(self, position: int) -> bool:  # noqa: ARG002 - free choice asks which
        """Returns whether to hand over the next entry, at this position, before its promised inputs are there."""
        return self.is_awake

    def _first_that_fits(self, heads: Heads, wait_s: float) -> int | None:
        """Returns the best-ranked of these tasks that usually takes no longer than this wait."""
        first: int | None = None
        for head in heads:
            if head is not None and (first is None or head < first):
                length_s = self._durations_s.values[self.table.kind_at[head]] or self._usual_s(head)
                if length_s is not None and length_s <= wait_s:
                    first = head
        return first

    def _choose_unheard(self, best: int, usual_s: float, number: int, now_s: float, since_s: float) -> int | None:
        """Follow rule 3. Learns that an announcement was late, whether the stage waited for it or not."""
        lead_s = self._leads_s.values[self.table.edge_of[number]] or self._lead_s(number)
        if lead_s is None or usual_s <= self.rules.fit * lead_s:
            return best
        until_s = since_s + self.rules.notice * (usual_s - lead_s)
        if now_s >= until_s:
            if self._asked_s.pop(number, None) is not None:
                self._note(number, in_time=False)
            return best
        self._asked_s.setdefault(number, until_s)
        share = self._notices.values[self.table.edge_of[number]]
        if share is not None and share < self.rules.worth:
            return best
        self._hold(since_s, min(until_s, self.heard_s[number]))
        return None

    def _hold(self, since_s: float, until_s: float) -> None:
        self.held_since_s, self._wake_s = since_s, until_s

    def wake_at_s(self) -> float | None:
        """Returns when the hold ends; None if the driver has been asked for that already."""
        if self._wake_s == self._told_wake_s:
            return None
        self._told_wake_s = self._wake_s
        return self._wake_s

    def _note(self, number: int, *, in_time: bool) -> None:
        edge = self.table.edge_of[number]
        if self._notices.values[edge] is None:
            self._notices.learn(edge, 1.0)
        self._notices.learn(edge, float(in_time))
