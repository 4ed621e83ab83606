"""Who is lost, who has left, and where only a connection broke: what every rank concludes from what all tell.

A rank that no longer hears another accuses it, and tells all. The accusation may be wrong: perhaps only the connection
between the two broke, or one direction of it. So:

* **Who is accused and lives answers**, by telling all that it is alive. Then nobody takes it for lost: it is the
  connection between accuser and accused that broke, and both are named, and the hosts on which they are.
* **Who does not answer within ``answer_s`` is lost.** A certain accusation is believed at once: the process is gone,
  for its host refuses connections to its port, or it says itself that its event loop hangs. Only who still has a
  connection to the accused waits for it to close too.
* **Who leaves says so, and names whom it has lost**, since it may leave for just that. The loss comes first then, so
  nobody takes a consequence for the cause.

News is told on once by each rank, so it reaches all over any connected graph; nothing here depends on the order in
which it comes, nor on who tells it first. Time enters as data.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rrfp_jax.network.plain import MalformedMessage, field
from rrfp_jax.network.roll_call import name_ranks

_MAX_NEWS = 1000
"""How many accusations and losses are told on: enough for any one cause, and never more than a message takes."""
_MAX_NAMED = 32
"""How many losses a farewell names."""
_MAX_REASON = 200


class Accusation(NamedTuple):
    """What one rank says of another that it does not hear."""

    accuser: int
    accused: int
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


Verdict = Lost | Left | Broken


class Judgement:
    """What one rank knows of all others.

    Args:
        rank: this one.
        hosts: where every rank is.
        answer_s: how long one who is accused has to answer.
    """

    def __init__(self, rank: int, hosts: Sequence[str], answer_s: float) -> None:
        self._rank, self._hosts, self._answer_s = rank, hosts, answer_s
        self.present = set(range(len(hosts))) - {rank}
        """Who is neither lost nor has left."""
        self._accusations: dict[tuple[int, int], Accusation] = {}
        self._alive: set[int] = set()
        self._left: dict[int, dict[int, str]] = {}
        self._lost: dict[int, str] = {}
        self._due_s: dict[int, float] = {}
        self._broken: set[tuple[int, int]] = set()
        self._broken_due_s: float | None = None
        self._has_told_broken = False
        self._verdicts: list[Verdict] = []

    # -- what happens ------------------------------------------------------------------------------------------------

    def accuse(self, accusation: Accusation, now_s: float, *, hears: Container[int] = ()) -> bool:
        """Somebody, perhaps this rank, does not hear another.

        Args:
            hears: the ranks to which this one has a connection that stands.

        Returns:
            Whether this is news that others should be told at once.
        """
        accuser, accused, reason, is_certain = accusation
        before = self._accusations.get((accuser, accused))
        is_known = before is not None and before.is_certain >= is_certain
        if is_known or not (accused == self._rank or accused in self.present):
            return False
        known = [other for (_, who), other in self._accusations.items() if who == accused]
        is_news = not known or is_certain > any(other.is_certain for other in known)
        if len(self._accusations) < _MAX_NEWS:
            self._accusations[accuser, accused] = accusation._replace(reason=reason[:_MAX_REASON])
        if not is_certain and (accused == self._rank or accused in self._alive):
            return self.answer(accused, now_s) or is_news
        if accused != self._rank:
            at_once = is_certain and (accuser == self._rank or accused not in hears)
            due_s = now_s if at_once else now_s + self._answer_s
            self._due_s[accused] = min(due_s, self._due_s.get(accused, due_s))
        return is_news

    def answer(self, rank: int, now_s: float) -> bool:
        """A rank that is accused says that it is alive. Returns whether that is news."""
        if rank != self._rank and rank not in self.present:
            return False
        accusations = [accusation for (_, who), accusation in self._accusations.items() if who == rank]
        if not any(accusation.is_certain for accusation in accusations):
            self._due_s.pop(rank, None)
        for accusation in accusations:
            if not accusation.is_certain:
                self._break(accusation.accuser, rank, now_s)
        is_news = rank not in self._alive
        self._alive.add(rank)
        return is_news

    def leave(self, rank: int, losses: Mapping[int, str], now_s: float) -> bool:
        """A rank says farewell, and whom it has lost. Returns whether that is news."""
        if rank == self._rank or rank in self._left:
            return False
        self._left[rank] = dict(losses)
        for other, reason in losses.items():
            if other == self._rank or other in self._alive:
                self._break(rank, other, now_s)
            elif other in self.present:
                self._lose(other, reason)
        if rank in self.present:
            if self._broken:
                self._tell_broken()
            self._forget(rank)
            self._verdicts.append(Left(rank))
        return True

    def verdicts(self, now_s: float) -> list[Verdict]:
        """What is known since the last call."""
        for rank in [rank for rank, due_s in self._due_s.items() if due_s <= now_s]:
            reasons = [a for (_, who), a in self._accusations.items() if who == rank]
            first = next((a for a in reasons if a.accuser == self._rank), reasons[0])
            self._lose(rank, first.reason)
        if self._broken_due_s is not None and self._broken_due_s <= now_s:
            self._tell_broken()
        told, self._verdicts = self._verdicts, []
        return told

    def next_due_s(self) -> float | None:
        """When :meth:`verdicts` may have something new by the time alone."""
        times = [*self._due_s.values(), *([] if self._broken_due_s is None else [self._broken_due_s])]
        return min(times, default=None)

    # -- what is told ------------------------------------------------------------------------------------------------

    def news(self, *, leaves: bool = False) -> dict[str, Any]:
        """All that others should know, as plain data; with ``leaves``, also that this rank ends now."""
        left = self._left | ({self._rank: self._lost} if leaves else {})
        reasons: dict[int, str] = {}
        for losses in left.values():
            reasons |= losses
        reasons = dict(islice(reasons.items(), _MAX_NEWS))
        told = {
            "accusations": [list(accusation) for accusation in self._accusations.values()],
            "alive": sorted(self._alive),
            "lost": [[rank, reason] for rank, reason in reasons.items()],
            "left": [[rank, [r for r in losses if r in reasons][:_MAX_NAMED]] for rank, losses in left.items()],
        }
        return {name: value for name, value in told.items() if value}

    def learn(self, news: Any, now_s: float, *, hears: Container[int] = ()) -> bool:
        """Take up what another rank tells. Returns whether something is to be told on.

        Raises:
            MalformedMessage: where it is nothing that :meth:`news` gives.
        """
        if not news:
            return False
        accusations, alive, left = self._parsed(news)
        found = [self.answer(rank, now_s) for rank in alive if rank != self._rank]
        found += [self.accuse(accusation, now_s, hears=hears) for accusation in accusations]
        found += [self.leave(rank, losses, now_s) for rank, losses in left]
        return any(found)

    def _parsed(self, news: Any) -> tuple[list[Accusation], list[int], list[tuple[int, dict[int, str]]]]:
        if not isinstance(news, dict):
            raise MalformedMessage("its news is no dict")
        told = {name: field(news, name, list) for name in news}
        accusations, alive, left = (told.get(name, ()) for name in ("accusations", "alive", "left"))
        try:
            lost = {self._known(rank): str(reason)[:_MAX_REASON] for rank, reason in told.get("lost", ())}
            return (
                [Accusation(self._known(a), self._known(b), str(c), bool(d)) for a, b, c, d in accusations],
                [self._known(rank) for rank in alive],
                [(self._known(rank), {other: lost[other] for other in named}) for rank, named in left],
            )
        except (TypeError, ValueError, LookupError) as error:
            raise MalformedMessage(f"its news is malformed: {error!r}") from error

    def _known(self, rank: Any) -> int:
        if type(rank) is not int or not 0 <= rank < len(self._hosts):
            raise ValueError(f"{rank!r:.40} is no rank")
        return rank

    # -- how it is concluded -----------------------------------------------------------------------------------------

    def _lose(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        self._forget(rank)
        self._verdicts.append(Lost(rank, reason))

    def _forget(self, rank: int) -> None:
        self.present.discard(rank)
        self._due_s.pop(rank, None)

    def _break(self, one: int, other: int, now_s: float) -> None:
        self._broken.add((min(one, other), max(one, other)))
        if not self._has_told_broken and self._broken_due_s is None:
            self._broken_due_s = now_s + self._answer_s / 2

    def _tell_broken(self) -> None:
        self._broken_due_s = None
        if not self._has_told_broken:
            self._has_told_broken = True
            self._verdicts.append(Broken(lost_sight(self._broken, self._hosts)))


def lost_sight(pairs: Iterable[tuple[int, int]], hosts: Sequence[str]) -> str:
    """The sentence on pairs of ranks that live, and between which the network broke.

    ``ranks 0-1 and ranks 2-3 lost sight of each other: the network between HOST0 and HOST1``
    """
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
