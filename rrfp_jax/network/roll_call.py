"""The rules of the rendezvous, without sockets or clocks: who has come, who is refused, and what the verdict is.

Every rank says :class:`Hello`. The verdict is a success once all have come with the same configuration, and a failure
where one ends before that or the deadline passes. A rank that comes after a failure is refused with a text that is
made anew, so that it never names as missing who has come meanwhile. Launchers learn all this from a :class:`Bulletin`.
"""

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.record_files import parse_json

_MAX_KEYS_SHOWN = 10
_ABSENT = "nothing"
_TOKEN = secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank says of itself, for all others."""

    rank: int
    host: str
    pid: int
    address: dict[str, str]
    """Where its sockets listen (``PeerAddress.as_dict()``)."""
    boot: str = ""
    """Identifier of the boot of the member's host; empty if the system has none."""
    token: str = _TOKEN
    """Random, of this process alone: containers may share a host name, and call each of their first processes 1."""

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


def name_hosts(members: Sequence[Member]) -> tuple[str, ...]:
    """Returns the name of each member's host; hosts that share a name get their addresses and boots added.

    Containers and images often share a name, so two ranks share a host if name, boot and address are all equal.
    """
    places = [
        (m.host, m.address.get("messages", "").rpartition(":")[0].removeprefix("tcp://"), m.boot) for m in members
    ]
    known = Counter(name for name, _, _ in set(places))
    return tuple(
        name if known[name] == 1 else f"{name} (at {address}, boot {boot[:8] or 'unknown'})"
        for name, address, boot in places
    )


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a rank brings to the rendezvous."""

    member: Member
    num_ranks: int
    configuration: str
    """What must be the same on all ranks, as canonical JSON."""

    def __post_init__(self) -> None:
        if not isinstance(parse_json(self.configuration), dict):
            raise ValueError(f"the configuration is {self.configuration:.60}: give an object")

    @classmethod
    def of(cls, member: Member, num_ranks: int, configuration: Mapping[str, Any]) -> "Hello":
        """With a configuration of plain data; raises TypeError for other data."""
        text = json.dumps(configuration, sort_keys=True, separators=(",", ":"))
        return cls(member=member, num_ranks=num_ranks, configuration=text)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the process of a rank ended."""

    code: int
    """128 + n where signal n killed it."""
    at_s: float
    """Seconds since the head's start."""
    by_launcher: str = ""
    """Why its launcher ended it; empty where it ended by itself."""


@dataclass(frozen=True, kw_only=True)
class Bulletin:
    """What the head knows of a run, for all launchers."""

    endings: dict[int, Ending] = field(default_factory=dict)
    """Of the ranks that have ended."""
    failure: str | None = None
    """Why the ranks did not come together."""
    doomed: tuple[int, ...] = ()
    """Ranks that have not come since that failure: they would be refused, so their launchers end them at once."""
    service: Ending | None = None
    """Of the coordination service, where it ended too early: JAX aborts all ranks."""
    is_last: bool = False
    """The head ends, and says nothing more."""


@dataclass(frozen=True, kw_only=True)
class LauncherReport:
    """What the launcher of another node tells the head, again and again."""

    ranks: tuple[int, ...]
    """Those that it starts."""
    endings: dict[int, Ending]
    """Of these ranks; ``at_s`` counts backwards from now."""
    version: int
    """Of the latest bulletin that it has."""
    is_leaving: bool = False
    """It ends, and needs no further bulletin."""


class RollCall:
    """Collects the hellos of one run until a verdict: ``members`` (all is well) or ``failure`` (why not).

    ``expected`` holds for the head: a rank's configuration must say the same, or nothing of it.
    """

    def __init__(self, num_ranks: int, expected: Mapping[str, Any] | None = None) -> None:
        self.num_ranks = num_ranks
        self._expected = expected or {}
        self.endings: dict[int, Ending] = {}
        """Of the ranks that have ended, as their launchers reported them."""
        self.members: tuple[Member, ...] | None = None
        self._hellos: dict[int, Hello] = {}
        self._occasion: str | None = None
        self._verdict: str | None = None
        """The failure as it was at first."""
        self._lines: list[str] = []
        self._doomed: list[int] = []
        self._awaited: list[int] = []
        """Whom a failure came before."""

    @property
    def is_decided(self) -> bool:
        return self.members is not None or self._occasion is not None

    @property
    def failure(self) -> str | None:
        """As of now."""
        if self._occasion is None:
            return None
        awaited = [f"not here yet: {name_ranks(self._awaited)}"] if self._awaited else []
        return "\n  ".join([f"the rendezvous failed: {self._occasion}", *awaited, *self._lines])

    def bulletin(self) -> Bulletin:
        """For the launchers."""
        doomed = tuple(rank for rank in self._doomed if rank not in self.endings and rank not in self._hellos)
        return Bulletin(endings=dict(self.endings), failure=self._verdict, doomed=doomed)

    def admit(self, hello: Hello) -> str | None:
        """Note a rank's hello; a text where it is refused. Saying hello again changes nothing."""
        new = hello.member
        if not 0 <= new.rank < self.num_ranks:
            return (
                f"rank {new.rank} (host {new.host}, pid {new.pid}) is out of range: this run has {self.num_ranks} "
                f"ranks, 0 to {self.num_ranks - 1}; start as many processes as the rendezvous was told"
            )
        known = self._hellos.get(new.rank)
        if known is not None and known.member.token != new.token:
            return (
                f"rank {new.rank} was started twice: it is here as {known.member}, this is another process, {new}; "
                "start every rank once"
            )
        if known is not None:
            return None
        self._hellos[new.rank] = hello
        if self._occasion is not None:
            return self._refuse_late(new.rank)
        if len(self._hellos) == self.num_ranks:
            self._judge(f"all {self.num_ranks} ranks have come")
        return None

    def _refuse_late(self, rank: int) -> str:
        if rank in self._awaited:
            self._awaited.remove(rank)
            return str(self.failure)
        self._doomed = self._doomed or self.missing()
        late = f"rank {rank} came late: the rendezvous had failed before; start all ranks together again"
        return f"{late}\n  {self.failure}"

    def ended(self, rank: int, ending: Ending) -> None:
        """A rank's process has ended; before the rendezvous is complete, this ends it."""
        self.endings.setdefault(rank, ending)
        if not self.is_decided:
            self._awaited = [other for other in self.missing() if other != rank]
            self._judge(f"rank {rank} ended with code {ending.code} before all ranks had come", must_fail=True)
            if ending.code:  # else each may have done what it was asked, such as printing its help
                self._doomed = self._awaited.copy()

    def expire(self, deadline_s: float) -> None:
        """The deadline is over."""
        if not self.is_decided:
            missing = self.missing()
            lines = [f"missing: {name_ranks(missing)}"]
            self._judge(f"the rendezvous was not complete after {deadline_s:g} s", lines, must_fail=True)
            if self._hellos:  # else this may be a program that goes to no rendezvous
                self._doomed = missing

    def give_up(self, why: str) -> None:
        """No further rank is waited for."""
        if not self.is_decided:
            self._occasion = why

    def missing(self) -> list[int]:
        """The ranks that have not said hello."""
        return [rank for rank in range(self.num_ranks) if rank not in self._hellos]

    def _judge(self, occasion: str, lines: Iterable[str] = (), *, must_fail: bool = False) -> None:
        """The verdict names everything that is known to be wrong, not just the first thing."""
        self._lines = [*lines, *self._differences()]
        if must_fail or self._lines:
            self._occasion = occasion
            self._verdict = self.failure
        else:
            self.members = tuple(self._hellos[rank].member for rank in sorted(self._hellos))

    def _differences(self) -> list[str]:
        return [
            f"{self.num_ranks} ranks are expected, rank {rank} was told of {hello.num_ranks}"
            for rank, hello in sorted(self._hellos.items())
            if hello.num_ranks != self.num_ranks
        ] + [
            *self._differences_from_head(),
            *differences({rank: hello.configuration for rank, hello in self._hellos.items()}),
        ]

    def _differences_from_head(self) -> Iterator[str]:
        brought = {rank: json.loads(hello.configuration) for rank, hello in self._hellos.items()}
        for key, value in self._expected.items():
            others = [rank for rank, configuration in brought.items() if configuration.get(key, value) != value]
            if others:
                values = sorted({json.dumps(brought[rank][key]) for rank in others})
                yield f"{key} is {json.dumps(value)} on the head, but {' or '.join(values):.80} on {name_ranks(others)}"


def differences(configurations: Mapping[int, str]) -> list[str]:
    """One line per key (``optimizer.lr``) whose values differ between ranks, with every value and the ranks it has."""
    if len(set(configurations.values())) < 2:
        return []
    flat = {rank: dict(_flatten(json.loads(text), "")) for rank, text in configurations.items()}
    keys = sorted({key for values in flat.values() for key in values})
    lines = []
    for key in keys:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(flat):
            ranks_of.setdefault(flat[rank].get(key, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            lines.append(f"{key} is " + ", ".join(f"{v:.80} on {name_ranks(r)}" for v, r in ranks_of.items()))
    if len(lines) > _MAX_KEYS_SHOWN:
        lines[_MAX_KEYS_SHOWN:] = [f"and {len(lines) - _MAX_KEYS_SHOWN} more keys"]
    return lines


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, sort_keys=True)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
