"""Foresight: wait for the table's next entry once it is in sight, and fill the wait with what ends in time.

Readiness alone starts a low-ranked task just before the high-ranked one arrives; a strict order waits for the
high-ranked one although nobody has begun to produce it. Foresight takes the middle. A stage that starts a task
*announces* what it will send, so that whoever waits for it knows that it is on its way.

Rule
----
Let *next* be the first entry of the hint's order that this stage has not started, those apart that wait for others to
take what a bounded chunk has read ahead, and *best* the best-ranked task that is ready and admissible. *Usual* is the
moving average of what a task of a kind and chunk took here; *lead* that of the time from an announcement to the
arrival, for each edge.

1. Best is next, or next is not admissible, or it lacks something of this stage's own: run best.
2. All that next lacks is announced: it is *in sight*, and expected a lead after it was heard of. Run the best-ranked
   ready task that usually ends before then. If none does, hold: run nothing until next is there, but at most
   ``patience`` times what best usually takes; then run best, and what was waited for so long counts as not announced.
3. Something that next lacks is not announced, and best usually takes longer than that input's lead: a task started now
   could be in the way of what has not even begun. Hold for *notice*, at most for what it takes longer, in parts. An
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
consumed strictly. By induction along the table's order of all tasks: let y be next on its stage. What produces its
inputs starts no later than under strict consumption, so y's inputs arrive no later. The stage can then be busy only
with a task x that was started out of order.
Either y was in sight: then x ends before y's inputs arrive, exactly as expected. Or it was not yet announced: then it
arrives at least a lead, so at least the length of x, after x started. Every entry before y has ended no later than
under strict consumption; y is admissible, as the footprint always admits the row's next entry. And x, which was started
out of order, starts before it would have strictly, which is after y. Where x may last longer than the lead, an entry is
delayed by at most the difference, less the notice taken.

Why it cannot deadlock
----------------------
A hold ends by itself: as it begins, the arbiter asks to be woken at its end, when rule 4 applies to the same ready
task; and since its length counts from when the stage became free, one hold cannot renew another. So a ready task is
delayed by a finite time and nothing else changes: the arguments of :mod:`rrfp_jax.core.window` and
:mod:`rrfp_jax.core.footprint` stand as they are. Announcements only shift these times. A lost one leaves rules 3
and 4; a false or late one costs a hold; doubled ones, and those of what is here already, change nothing; wrong averages
cost at most ``patience`` times the usual length of the task held.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from rrfp_jax.core.estimates import Averages, Edge, Estimates, TaskKey
from rrfp_jax.core.events import Message
from rrfp_jax.core.hints import Heads
from rrfp_jax.core.outlook import Outlook
from rrfp_jax.field_rules import check_types

NEVER_S = inf


@dataclass(frozen=True, kw_only=True)
class ForesightRules:
    """How far a stage looks ahead. Raises ValueError on numbers that mean nothing."""

    fit: float = 1.05
    """A task fits if its usual length is at most so many times the wait; above 1 for ties, which rounding decides."""
    patience: float = 3.0
    """The longest hold, in usual lengths of the task that is held."""
    notice: float = 1.0
    """The longest wait for an announcement, in parts of what the held task usually takes longer than the lead."""
    worth: float = 0.8
    """The least share of waits for an announcement that must not be in vain, for each edge."""
    kept: float = 0.9
    """How much one more observation leaves of an average of durations or leads."""
    worth_kept: float = 0.7
    """How much one more wait leaves of the share of those that were not in vain."""
    shortest_s: float = 0.0
    """A stage whose tasks usually take less has no use for announcements, and neither makes nor awaits any."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("fit", "patience", "notice", "shortest_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in ("worth", "kept", "worth_kept"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a part between 0 and 1")

    def make(self, outlook: Outlook, estimates: Estimates | None = None) -> "Foresight":
        """What one stage keeps under these rules, if it knows no more than this."""
        return Foresight(self, outlook, estimates or Estimates())


class Foresight:
    """What one stage has heard and learnt, and its holds. Times are seconds on the stage's own clock.

    Messages and positions are numbers, as in :class:`rrfp_jax.core.outlook.Outlook`.
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
        "outlook",
        "rules",
    )

    def __init__(self, rules: ForesightRules, outlook: Outlook, estimates: Estimates) -> None:
        self.rules = rules
        self._durations_s = Averages[TaskKey](outlook.kinds, estimates.durations_s, rules.kept)
        self._leads_s = Averages[Edge](outlook.edges, estimates.leads_s, rules.kept)
        self._notices = Averages[Edge](outlook.edges, estimates.notices, rules.worth_kept)
        self._early: dict[int, dict[Message, float]] = {}
        self.begin(-1, outlook)

    def begin(self, step: int, outlook: Outlook) -> None:
        """A step begins, with these tasks and messages; what was heard of it early counts."""
        self.outlook = outlook
        self.heard_s = [NEVER_S] * len(outlook.edge_of)
        """When each message was announced, if it is not here yet."""
        for message, time_s in self._early.pop(step, {}).items():
            if message in outlook.arrivals:
                self.heard_s[outlook.arrivals[message]] = time_s
        self._given_up: set[int] = set()
        self._asked_s: dict[int, float] = {}
        self._started_s = [NEVER_S] * len(outlook.kind_at)
        """When the task at each position started, if it runs."""
        self._last_end_s = 0.0  # tasks of steps before have ended before any of this one starts
        self.held_since_s: float | None = None
        self._wake_s: float | None = None
        self._told_wake_s: float | None = None
        self.next = 0
        """No position before this one is left to start; where a task at this one is ready, it is the next entry."""
        durations_s = self._durations_s.known().values()
        self.is_awake = not durations_s or sum(durations_s) / len(durations_s) >= self.rules.shortest_s
        self._announces = outlook.announces if self.is_awake else ((),) * len(outlook.announces)

    def copy(self) -> "Foresight":
        twin = object.__new__(type(self))
        for name in Foresight.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._durations_s, twin._leads_s = self._durations_s.copy(), self._leads_s.copy()
        twin._notices = self._notices.copy()
        twin._early = {step: heard.copy() for step, heard in self._early.items()}
        twin.heard_s, twin._started_s = self.heard_s.copy(), self._started_s.copy()
        twin._asked_s, twin._given_up = self._asked_s.copy(), self._given_up.copy()
        return twin

    def fresh(self, estimates: Estimates) -> "Foresight":
        """One that knows nothing but these averages."""
        return self.rules.make(self.outlook, estimates)

    def estimates(self) -> Estimates:
        """What was learnt so far, as plain data."""
        return Estimates(
            durations_s=self._durations_s.known(), leads_s=self._leads_s.known(), notices=self._notices.known()
        )

    def key(self, *, is_active: bool) -> Hashable:
        """All that the future depends on, times included: between steps far less than within one."""
        early = frozenset((step, *heard) for step, of_step in self._early.items() for heard in of_step.items())
        averages = [tuple(some.values) for some in (self._durations_s, self._leads_s, self._notices)]
        if not is_active:
            return (early, *averages)
        values = (self.held_since_s, self._wake_s, self._told_wake_s, self._last_end_s, self.is_awake)
        sets = (frozenset(self._given_up), frozenset(self._asked_s.items()))
        return (early, *averages, values, tuple(self.heard_s), tuple(self._started_s), *sets)

    @property
    def is_holding(self) -> bool:
        return self.held_since_s is not None

    # -- what happens ------------------------------------------------------------------------------------------------

    def hear(self, number: int, time_s: float) -> None:
        """An announcement of the present step, of what is not here yet; it counts from its time on."""
        if self.heard_s[number] == NEVER_S:
            self.heard_s[number] = time_s

    def hear_early(self, step: int, message: Message, time_s: float) -> None:
        """An announcement of a later step."""
        self._early.setdefault(step, {}).setdefault(message, time_s)

    def arrived(self, number: int, time_s: float) -> None:
        heard_s = self.heard_s[number]
        if self._asked_s and number in self._asked_s:
            self._note(number, in_time=heard_s <= min(time_s, self._asked_s.pop(number)))
        if heard_s <= time_s:
            self._leads_s.learn(self.outlook.edge_of[number], time_s - heard_s)
        self.heard_s[number] = NEVER_S

    def tick(self) -> None:
        """The driver has woken the stage, in time or not."""
        self._told_wake_s = None

    def start(self, position: int, time_s: float) -> tuple[tuple[Message, int], ...]:
        """The task at this position starts; gives its announcements."""
        self._started_s[position] = time_s
        if position == self.next:
            self.next = position + 1
        if self.held_since_s is not None:
            self.release()
        return self._announces[position]

    def announcements(self, position: int) -> tuple[tuple[Message, int], ...]:
        """What to say as the task at this position begins, to which stages; nothing while foresight sleeps."""
        return self._announces[position]

    def begun(self, position: int, time_s: float) -> None:
        """The last input of the task at this position, which was handed over before, has come."""
        self._started_s[position] = time_s

    def release(self) -> None:
        """Nothing is held any more: a task starts, or an engine has taken the memory that those held need."""
        self.held_since_s = self._wake_s = self._told_wake_s = None

    def finish(self, position: int, time_s: float) -> None:
        """The task has really ended; it took the device from its start, or from the end of the one before it."""
        started_s, last_end_s = self._started_s[position], self._last_end_s
        self._started_s[position], self._last_end_s = NEVER_S, time_s
        taken_s = time_s - (started_s if started_s > last_end_s else last_end_s)
        self._durations_s.learn(self.outlook.kind_at[position], taken_s)

    def expected_end_s(self, position: int) -> float:
        """Of a running task, as far as anything is known."""
        return max(self._started_s[position], self._last_end_s) + (self._usual_s(position) or 0.0)

    def _usual_s(self, position: int) -> float | None:
        """What such a task usually takes; as long as the longest other one, if it has not run yet; None: none has."""
        durations_s = self._durations_s.values
        usual_s = durations_s[self.outlook.kind_at[position]]
        return usual_s if usual_s is not None else max((d for d in durations_s if d is not None), default=None)

    def _lead_s(self, number: int) -> float | None:
        """From a message's announcement to its arrival; None if nothing has ever been announced here.

        Of an edge that is new it is the least that its kind of message has had on other edges, or 0: where a stage
        waits for its first gradient, that is better than to expect none.
        """
        edge = self.outlook.edge_of[number]
        lead_s = self._leads_s.values[edge]
        if lead_s is not None:
            return lead_s
        kind, leads_s = self._leads_s.keys[edge][0], self._leads_s.known()
        return min((lead_s for other, lead_s in leads_s.items() if other[0] is kind), default=0.0 if leads_s else None)

    # -- what to do --------------------------------------------------------------------------------------------------

    def choose(
        self,
        best: int,
        heads: Heads,
        missing: Sequence[int],
        now_s: float,
        free_s: float,
    ) -> int | None:
        """Which of the ready tasks to run, or None to hold; then :meth:`wake_at_s` says until when.

        Args:
            best: the position of the best-ranked task that is ready and admissible.
            heads: the positions of all that may run instead, ``best`` among them.
            missing: what the next entry lacks; nothing else keeps it from running.
            now_s: the present.
            free_s: when the stage becomes free; not before the present.
        """
        if self._asked_s:
            self._settle(now_s)
        usual_s = self._durations_s.values[self.outlook.kind_at[best]] or self._usual_s(best)
        is_given_up = self._given_up and not self._given_up.isdisjoint(missing)
        if usual_s is None or not self.is_awake or is_given_up:
            return best
        since_s = free_s if self.held_since_s is None else self.held_since_s
        expected_s = free_s
        for number in missing:
            heard_s = self.heard_s[number]
            if heard_s > now_s:
                return self._choose_unheard(best, usual_s, number, now_s, since_s)
            lead_s = self._leads_s.values[self.outlook.edge_of[number]] or self._lead_s(number)
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
        """Whether to hand over the next entry, at this position, before its promised inputs are there."""
        return self.is_awake

    def _first_that_fits(self, heads: Heads, wait_s: float) -> int | None:
        """The best-ranked of these tasks that usually takes no longer than this wait."""
        first: int | None = None
        for head in heads:
            if head is not None and (first is None or head < first):
                length_s = self._durations_s.values[self.outlook.kind_at[head]] or self._usual_s(head)
                if length_s is not None and length_s <= wait_s:
                    first = head
        return first

    def _choose_unheard(self, best: int, usual_s: float, number: int, now_s: float, since_s: float) -> int | None:
        """Rule 3; what was not announced in time is learnt, whether the stage waited for it or not."""
        lead_s = self._leads_s.values[self.outlook.edge_of[number]] or self._lead_s(number)
        if lead_s is None or usual_s <= self.rules.fit * lead_s:
            return best
        until_s = since_s + self.rules.notice * (usual_s - lead_s)
        if now_s >= until_s:
            if self._asked_s.pop(number, None) is not None:
                self._note(number, in_time=False)
            return best
        self._asked_s.setdefault(number, until_s)
        share = self._notices.values[self.outlook.edge_of[number]]
        if share is not None and share < self.rules.worth:
            return best
        self._hold(since_s, min(until_s, self.heard_s[number]))
        return None

    def _hold(self, since_s: float, until_s: float) -> None:
        self.held_since_s, self._wake_s = since_s, until_s

    def wake_at_s(self) -> float | None:
        """When the hold ends; None if the driver has been asked for that already."""
        if self._wake_s == self._told_wake_s:
            return None
        self._told_wake_s = self._wake_s
        return self._wake_s

    def _settle(self, now_s: float) -> None:
        """Learn from the announcements that were waited for and have been heard by now."""
        heard_s = self.heard_s
        for number in sorted([n for n in self._asked_s if heard_s[n] <= now_s], key=lambda n: (heard_s[n], n)):
            self._note(number, in_time=heard_s[number] <= self._asked_s.pop(number))

    def _note(self, number: int, *, in_time: bool) -> None:
        edge = self.outlook.edge_of[number]
        if self._notices.values[edge] is None:
            self._notices.learn(edge, 1.0)
        self._notices.learn(edge, float(in_time))
