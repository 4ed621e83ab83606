"""The failure detector: every rank concludes from all news who is lost, who has left, and where a connection broke.

A rank that no longer hears another suspects it, and tells all. The suspicion may be wrong: perhaps only the connection
between the two broke, or one direction of it. So:

* **A suspected rank that lives answers**, by telling all that it is alive, unless it stood still until just now. Then
  nobody takes it for lost: the connection between the two ranks broke, and both are named, and the hosts on which they
  are.
* **A rank that does not answer within ``answer_s`` is lost.** A certain suspicion is believed at once: the process is
  gone, for its host refuses connections to its port, or it says itself that its event loop hangs. Only a rank that
  still has a connection to the suspected one waits for it to close too.
* **A rank that leaves says so, and names the ranks that it has lost**, since it may leave for just that. The loss comes
  first then, so nobody takes a consequence for the cause.
* **Where a head judges suspicions** (:mod:`rrfp_jax.core.membership`), a rank takes for lost whom it does not hear
  itself, answer or not, and leaves it to the head who of the two goes. The suspicions of others do not count.

A rank that was lost may come back as a new process (:meth:`FailureDetector.take_up`). News tells the number of each
such process, and whatever concerns another one than the hearer knows is not heard; news is repeated, so it will be.

News is told on once by each rank, so it reaches all over any connected graph; nothing here depends on the order in
which it comes, nor on who tells it first. Time enters as data.

**The graph of watchers** (:func:`watched`). Ranks stand in a circle; each watches the next and the previous one, and
those ``stride`` places ahead and behind, where ``stride`` is about the square root of their number. So no rank has more
than four neighbours, and news passes at most about ``stride`` of them.

*Any three ranks may vanish at once, and the others still hear of each other.* The graph looks the same from every rank,
and is connected, since the circle is. Such a graph of degree d stays connected however one removes fewer than
2 (d + 1) / 3 of its places (Watkins 1970), here fewer than 10 / 3. Up to five ranks all watch each other.

*One host may vanish, however many ranks it has*, where these are consecutive: the rest of the circle is a path. So may
two hosts with fewer than ``stride`` ranks each: the strides lead over either gap.

**A rank that stands still asks sooner.** Silence alone counts from the deadline on, for a process may be busy in one
long call, such as a garbage collection, in which no other Python runs. But a rank that waits much longer than usual
(:class:`WaitTimes`), for silent ranks that may hold it up, tries to connect to them. ZeroMQ's own threads take
connections in a busy process, and in a stopped one or behind a broken network nobody does: such a rank is suspected.
"""

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.cluster.wire import MalformedMessage, field

_MAX_NEWS = 1000
"""Largest number of suspicions and losses that are told on: enough for any one cause, and less than a message takes."""
_MAX_NAMED = 32
"""Largest number of losses that a farewell names."""
_MAX_REASON = 300
_ALL_WATCH = 5
"""Up to this many ranks, all watch each other."""
_BEATS_PER_DEADLINE = 8
_MAX_INTERVAL_S = 1.0
_LEAST_PATIENCE_S, _PATIENCE_PER_DEADLINE = 4.0, 15
_LONGER, _STEPS_KEPT = 4, 10


def watched(rank: int, num_ranks: int) -> frozenset[int]:
    """Returns the ranks that ``rank`` watches, which are also those that watch it."""
    if num_ranks <= _ALL_WATCH:
        return frozenset(range(num_ranks)) - {rank}
    stride = round(math.sqrt(num_ranks))
    return frozenset((rank + step) % num_ranks for step in (1, -1, stride, -stride))


def patience_s(deadline_s: float) -> float:
    """Returns the seconds of silence and of standstill, both of which must pass before a silent rank is asked."""
    return max(_LEAST_PATIENCE_S, deadline_s / _PATIENCE_PER_DEADLINE)


WaitKind = tuple[int, bool]
"""A stage, and whether it runs a task; else it is idle."""


class WaitTimes:
    """Tells which waits of this rank last much longer than usual; it looks at them now and then.

    Such a wait has lasted for the patience, and four times as long as any of its kind in the last ten steps. In the
    first step nothing is known, and no wait is too long: connections of collectives are made then, for example. Between
    two looks a wait may end unseen; the patience is longer than the time between looks.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._num_steps = patience_s, 0
        self._present: dict[WaitKind, tuple[float, float]] = {}
        """When each wait began that was not over at the last look, and how long it had lasted, by kind."""
        self._longest: deque[dict[WaitKind, float]] = deque([{}], maxlen=_STEPS_KEPT + 1)
        """For the last steps, the longest wait of each kind that is over."""

    def look(self, now_s: float, began_s: Mapping[WaitKind, float], num_steps: int) -> dict[WaitKind, float]:
        """Returns the kinds whose present waits are too long, with the longest of each kind in the last steps.

        Args:
            began_s: when the present wait of each kind began.
            num_steps: the number of steps that have ended.
        """
        for kind, (at_s, lasted_s) in self._present.items():
            if began_s.get(kind) != at_s:
                self._longest[-1][kind] = max(lasted_s, self._longest[-1].get(kind, 0.0))
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._longest.append({})
        self._present = {kind: (at_s, now_s - at_s) for kind, at_s in began_s.items()}
        if len(self._longest) == 1:
            return {}
        usual_s = {kind: max(of_step.get(kind, 0.0) for of_step in self._longest) for kind in began_s}
        return {
            kind: usual_s[kind]
            for kind, (_, lasted_s) in self._present.items()
            if lasted_s > max(self._patience_s, _LONGER * usual_s[kind])
        }


class HeartbeatClock:
    """Measures how long each peer has been silent, in time during which this process was itself awake.

    A process that was stopped, or whose machine slept, would otherwise wake up and find every peer silent. So this
    clock advances by at most ``2 * interval_s`` between two readings, however long the gap was. A peer is given up an
    interval before its deadline: the consequences take a moment, and have to be over by then.

    Args:
        deadline_s: silence, or standstill of a peer's event loop, after which the peer counts as lost.
        now_s: the reading of any monotonic clock.
    """

    def __init__(self, peers: Iterable[int], deadline_s: float, now_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = min(deadline_s / _BEATS_PER_DEADLINE, _MAX_INTERVAL_S)
        self.awake_s = 0.0
        self._last_look_s = now_s
        self._heard_s = dict.fromkeys(peers, 0.0)
        self._blocked_s: dict[int, float] = {}
        self._woke_s = -math.inf

    def advance(self, now_s: float) -> None:
        """Takes the time; to be called at least once per interval."""
        gap_s, self._last_look_s = now_s - self._last_look_s, now_s
        self.awake_s += min(gap_s, 2 * self.interval_s)
        if gap_s >= min(patience_s(self.deadline_s), self.deadline_s / 2):
            self._woke_s = self.awake_s

    @property
    def has_just_woken(self) -> bool:
        """Whether this process stood still a moment ago, for so long that others may have suspected it."""
        return self.awake_s - self._woke_s < 2 * self.interval_s

    def expect(self, rank: int) -> None:
        self._heard_s[rank] = self.awake_s

    def hear(self, rank: int, blocked_s: float) -> None:
        """Notes a heartbeat; ``blocked_s`` says for how long the peer's event loop has not run."""
        if rank in self._heard_s:
            self._heard_s[rank] = self.awake_s
            self._blocked_s[rank] = blocked_s

    def forget(self, rank: int) -> None:
        self._heard_s.pop(rank, None)
        self._blocked_s.pop(rank, None)

    def silent(self, at_least_s: float) -> dict[int, float]:
        """Returns the peers that have been silent for so long, with the seconds."""
        silent_s = {rank: self.awake_s - heard_s for rank, heard_s in self._heard_s.items()}
        return {rank: seconds for rank, seconds in silent_s.items() if seconds >= at_least_s}

    def overdue(self) -> list[tuple[int, str, bool]]:
        """Returns the peers beyond the deadline, each with the reason, and whether its event loop hangs while it lives.

        Once one is silent for too long, so are those named that have been so for nearly as long: a fault that breaks a
        connection breaks others too, and they are not heard at the same moment.
        """
        # A peer counts as hanging only while it is heard: one that is silent is named for that.
        silent_s = self.silent(0.0)
        limit_s = self.deadline_s - self.interval_s
        if any(seconds > limit_s for seconds in silent_s.values()):
            limit_s -= self.interval_s
        return [
            *((rank, f"silent for {seconds:.1f} s", False) for rank, seconds in silent_s.items() if seconds > limit_s),
            *(
                (rank, f"its event loop has not run for {seconds:.1f} s", True)
                for rank, seconds in self._blocked_s.items()
                if seconds > self.deadline_s and silent_s[rank] <= limit_s
            ),
        ]


class Suspicion(NamedTuple):
    """One rank's report that it does not hear another."""

    reporter: int
    suspect: int
    reason: str
    is_certain: bool = False


class Lost(NamedTuple):
    """A rank has died or hangs."""

    rank: int
    reason: str


class Left(NamedTuple):
    """A rank has ended in good order."""

    rank: int


class Broken(NamedTuple):
    """Ranks live that no longer hear each other; ``text`` names them and the network between."""

    text: str


Conclusion = Lost | Left | Broken


class FailureDetector:
    """One rank's knowledge of all others.

    Args:
        rank: this rank.
        hosts: the host of every rank.
        answer_s: seconds that a suspected rank has to answer.
        numbers: numbers of the ranks' processes, by rank, where they are not 0.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], answer_s: float, numbers: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self._rank, self.hosts, self._answer_s, self._numbers = rank, hosts, answer_s, dict(numbers)
        self.has_head = False
        """Whether a head judges suspicions."""
        self.present = set(range(len(hosts))) - {rank}
        """The other ranks that are neither lost nor have left."""
        self._suspicions: dict[tuple[int, int], Suspicion] = {}
        self._alive: set[int] = set()
        self._left: dict[int, dict[int, str]] = {}
        """Ranks that have left, each with the ranks that it had lost and the reasons."""
        self._lost: dict[int, str] = {}
        self._due_s: dict[int, float] = {}
        self._broken: set[tuple[int, int]] = set()
        self._broken_due_s: float | None = None
        self._has_told_broken = False
        self.has_just_woken = False
        """Whether this rank stood still a moment ago. If it is suspected, that was right, and no connection broke."""
        self._conclusions: list[Conclusion] = []

    # -- events ------------------------------------------------------------------------------------------------------

    def take_up(self, rank: int, number: int) -> None:
        """Forgets everything about a rank that was lost: a new process of it, with this number, is there."""
        self._numbers[rank] = number
        self._suspicions = {pair: told for pair, told in self._suspicions.items() if rank not in pair}
        self._broken = {pair for pair in self._broken if rank not in pair}
        self._alive.discard(rank)
        known: list[dict[int, Any]] = [self._left, self._lost, self._due_s, *self._left.values()]
        for each in known:
            each.pop(rank, None)
        self.present.add(rank)

    def suspect(self, suspicion: Suspicion, now_s: float, *, hears: Container[int] = ()) -> bool:
        """Notes that a rank, perhaps this one, does not hear another.

        Args:
            hears: the ranks to which this one has a connection that stands.

        Returns:
            Whether this is news that others should be told at once.
        """
        reporter, suspect, reason, is_certain = suspicion
        before = self._suspicions.get((reporter, suspect))
        is_known = before is not None and before.is_certain >= is_certain
        if is_known or not (suspect == self._rank or suspect in self.present):
            return False
        if self.has_head and reporter != self._rank:
            return False
        # Told on if it is the first suspicion of this rank, or the first certain one: others add nothing.
        known = [other for (_, who), other in self._suspicions.items() if who == suspect]
        is_news = not known or is_certain > any(other.is_certain for other in known)
        if len(self._suspicions) < _MAX_NEWS:
            self._suspicions[reporter, suspect] = suspicion._replace(reason=reason[:_MAX_REASON])
        # A certain suspicion has no answer: that event loop hangs although the rank's heartbeat goes on.
        if not self.has_head and not is_certain and (suspect == self._rank or suspect in self._alive):
            answers = suspect != self._rank or not self.has_just_woken
            return (answers and self.answer(suspect, now_s)) or is_news
        if suspect != self._rank:
            # A rank that still hears the suspect waits: its own connection would close too if the process were gone.
            at_once = is_certain and (reporter == self._rank or suspect not in hears)
            due_s = now_s if at_once else now_s + self._answer_s
            self._due_s[suspect] = min(due_s, self._due_s.get(suspect, due_s))
        return is_news

    def answer(self, rank: int, now_s: float) -> bool:
        """Notes that a suspected rank says it is alive. Returns whether that is news."""
        if self.has_head or (rank != self._rank and rank not in self.present):
            return False
        suspicions = [suspicion for (_, who), suspicion in self._suspicions.items() if who == rank]
        if not any(suspicion.is_certain for suspicion in suspicions):
            self._due_s.pop(rank, None)
        for suspicion in suspicions:
            if not suspicion.is_certain:
                self._break(suspicion.reporter, rank, now_s)
        is_news = rank not in self._alive
        self._alive.add(rank)
        return is_news

    def leave(self, rank: int, losses: Mapping[int, str], now_s: float) -> bool:
        """Notes the farewell of a rank, and the ranks that it had lost. Returns whether that is news."""
        if rank == self._rank or rank in self._left:
            return False
        self._left[rank] = dict(losses)
        # A rank that leaves for a loss names it; if the lost rank lives, the connection between the two broke.
        for other, reason in () if self.has_head else losses.items():
            if other == self._rank or other in self._alive:
                self._break(rank, other, now_s)
            elif other in self.present:
                self._lose(other, reason)
        if rank in self.present:
            if self._broken:
                self._tell_broken()
            self.present.discard(rank)
            self._due_s.pop(rank, None)
            self._conclusions.append(Left(rank))
        return True

    def conclusions(self, now_s: float) -> list[Conclusion]:
        for rank in [rank for rank, due_s in self._due_s.items() if due_s <= now_s]:
            reasons = [each for (_, who), each in self._suspicions.items() if who == rank]
            # The reason that this rank has seen itself is the one that its user can check.
            first = next((each for each in reasons if each.reporter == self._rank), reasons[0])
            self._lose(rank, first.reason)
        if self._broken_due_s is not None and self._broken_due_s <= now_s:
            self._tell_broken()
        told, self._conclusions = self._conclusions, []
        return told

    def next_due_s(self) -> float | None:
        """Returns when :meth:`conclusions` may have something new by the time alone."""
        times = [*self._due_s.values(), *([] if self._broken_due_s is None else [self._broken_due_s])]
        return min(times, default=None)

    # -- news --------------------------------------------------------------------------------------------------------

    def news(self, *, leaves: bool = False) -> dict[str, Any]:
        """Returns everything that others should know, as plain data; with ``leaves``, also that this rank ends now."""
        # A reason is told once, however many farewells name the same loss: a message has to hold all of them.
        left = self._left | ({self._rank: self._lost} if leaves else {})
        reasons: dict[int, str] = {}
        for losses in left.values():
            reasons |= losses
        reasons = dict(islice(reasons.items(), _MAX_NEWS))
        told = {
            "accusations": [list(suspicion) for suspicion in self._suspicions.values()],
            "alive": sorted(self._alive),
            "lost": [[rank, reason] for rank, reason in reasons.items()],
            "left": [[rank, [r for r in losses if r in reasons][:_MAX_NAMED]] for rank, losses in left.items()],
            "numbers": [[rank, number] for rank, number in self._numbers.items()],
        }
        return {name: value for name, value in told.items() if value}

    def learn(self, news: Any, now_s: float, *, hears: Container[int] = ()) -> bool:
        """Takes the news of another rank. Returns whether any of it is to be told on.

        Raises:
            MalformedMessage: where it is nothing that :meth:`news` returns.
        """
        if not news:
            return False
        if not isinstance(news, dict):
            raise MalformedMessage("its news is no dict")
        told = {name: field(news, name, list) for name in news}
        try:
            numbers = {self._known(rank): int(number) for rank, number in told.get("numbers", ())}
            # All is read before anything is taken, so that malformed news changes nothing.
            reasons = {self._known(rank): str(reason)[:_MAX_REASON] for rank, reason in told.get("lost", ())}
            suspicions = [
                Suspicion(self._known(a), self._known(b), str(c), bool(d)) for a, b, c, d in told.get("accusations", ())
            ]
            alive = [self._known(rank) for rank in told.get("alive", ())]
            left = [
                (self._known(rank), {other: reasons[other] for other in named}) for rank, named in told.get("left", ())
            ]
        except (TypeError, ValueError, LookupError) as error:
            raise MalformedMessage(f"its news is malformed: {error!r}") from error
        concerned = [r for r in numbers.keys() | self._numbers.keys() if numbers.get(r, 0) != self._numbers.get(r, 0)]
        if concerned:
            suspicions = [each for each in suspicions if not {each.reporter, each.suspect}.intersection(concerned)]
            alive = [rank for rank in alive if rank not in concerned]
            left = [
                (rank, {other: why for other, why in losses.items() if other not in concerned})
                for rank, losses in left
                if rank not in concerned
            ]
        # Answers come first: a suspicion in the same news may be the one that they answer.
        found = [self.answer(rank, now_s) for rank in alive if rank != self._rank]
        found += [self.suspect(suspicion, now_s, hears=hears) for suspicion in suspicions]
        found += [self.leave(rank, losses, now_s) for rank, losses in left]
        return any(found)

    def _known(self, rank: Any) -> int:
        if type(rank) is not int or not 0 <= rank < len(self.hosts):
            raise ValueError(f"{rank!r:.40} is no rank")
        return rank

    def _lose(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        self.present.discard(rank)
        self._due_s.pop(rank, None)
        self._conclusions.append(Lost(rank, reason))

    def _break(self, one: int, other: int, now_s: float) -> None:
        # Told a moment later, so that one sentence names all pairs that the same fault has cut off.
        self._broken.add((min(one, other), max(one, other)))
        if not self._has_told_broken and self._broken_due_s is None:
            self._broken_due_s = now_s + self._answer_s / 2

    def _tell_broken(self) -> None:
        self._broken_due_s = None
        if not self._has_told_broken:
            self._has_told_broken = True
            self._conclusions.append(Broken(lost_sight(self._broken, self.hosts)))


def lost_sight(pairs: Iterable[tuple[int, int]], hosts: Sequence[str]) -> str:
    """Returns the sentence on pairs of ranks that live, and between which the network broke.

    ``ranks 0-1 and ranks 2-3 lost sight of each other: the network between HOST0 and HOST1``
    """
    # Pairs are gathered by their hosts: one broken switch cuts off many ranks, and makes one sentence.
    sides: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
    for pair in sorted(pairs):
        one, other = sorted(pair, key=lambda rank: (hosts.index(hosts[rank]), rank))
        ones, others = sides.setdefault((hosts[one], hosts[other]), (set(), set()))
        ones.add(one)
        others.add(other)
    return "; ".join(
        f"{name_ranks(ones)} and {name_ranks(others)} lost sight of each other: "
        + (f"the network between {here} and {there}" if here != there else f"a connection within {here}")
        for (here, there), (ones, others) in sides.items()
    )
