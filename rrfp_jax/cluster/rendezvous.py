"""The rules of the rendezvous, without sockets or clocks: who has come, who is refused, and how it ends.

Every rank sends a :class:`JoinRequest`. The rendezvous succeeds once all have come with the same configuration. It
fails where a rank ends before that or the deadline passes. A rank that comes after a failure is refused with a text
that is made anew, so that it never names as missing a rank that has come meanwhile. Launchers learn all this from a
:class:`RunStatus`.
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
_STEADY_S = 15.0
"""Seconds for which nodes that have come back must stay before the run counts on them."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank as it introduces itself to all others."""

    rank: int
    host: str
    pid: int
    address: dict[str, str]
    """Addresses on which its sockets listen (the fields of its :class:`PeerAddress`)."""
    boot: str = ""
    """Identifier of the boot of the member's host; empty if the system has none."""
    number: int = 0
    """Number of processes that the rank had before this one in the same attempt."""
    token: str = _TOKEN
    """Random text of this process alone: containers may share a host name, and call each of their first processes 1."""

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
class JoinRequest:
    """The data that a rank brings to the rendezvous."""

    member: Member
    num_ranks: int
    configuration: str
    """Settings that must be the same on all ranks, as canonical JSON."""
    needs_service: bool = False
    """Whether the rank will connect to JAX's coordination service."""

    def __post_init__(self) -> None:
        if not isinstance(parse_json(self.configuration), dict):
            raise ValueError(f"the configuration is {self.configuration:.60}: give an object")

    @classmethod
    def of(
        cls, member: Member, num_ranks: int, configuration: Mapping[str, Any], *, needs_service: bool = False
    ) -> "JoinRequest":
        """Makes a request with a configuration of plain data. Raises TypeError for other data."""
        text = json.dumps(configuration, sort_keys=True, separators=(",", ":"))
        return cls(member=member, num_ranks=num_ranks, configuration=text, needs_service=needs_service)


@dataclass(frozen=True, kw_only=True)
class ProcessEnding:
    """The end of the process of a rank, or of the coordination service."""

    code: int
    """Exit code, 128 + n where signal n killed the process."""
    at_s: float
    """Seconds since the head's start."""
    by_launcher: str = ""
    """Reason for which its launcher ended it; empty where it ended by itself."""
    number: int = 0
    """See :class:`Member`."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The head's knowledge of a run, for all launchers."""

    nodes: tuple[int, ...] = ()
    """Numbers of the nodes that take part, ascending; empty while others are waited for."""
    may_grow: bool = False
    """Whether so many nodes have come since that another attempt would have more of them."""
    endings: dict[int, ProcessEnding] = field(default_factory=dict)
    """Ends of ranks, by rank."""
    failure: str | None = None
    """Why the ranks did not come together."""
    doomed: tuple[int, ...] = ()
    """Ranks that have not come since that failure: they would be refused, so their launchers end them at once."""
    needs_service: bool = False
    """Whether a rank that has come will connect to the coordination service."""
    service: ProcessEnding | None = None
    """End of the coordination service, if it came too early: JAX aborts all ranks."""
    lost: dict[int, str] = field(default_factory=dict)
    """Reasons for which ranks were declared lost, by rank. A process that still runs must be ended, if it has the
    rank's number below, or a lower one."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Numbers of the processes that have taken part last, by rank, where they are not 0."""
    takes_back: bool = False
    """Whether the others take in new processes of lost ranks."""
    is_last: bool = False
    """Whether the head ends, and says nothing more."""


@dataclass(frozen=True, kw_only=True)
class LauncherReport:
    """A report that the launcher of another node sends to the head, again and again."""

    node: int
    """Number of its node."""
    ranks: tuple[int, ...]
    """Ranks that it starts; none until it knows which nodes take part."""
    endings: dict[int, ProcessEnding]
    """Ends of these ranks; ``at_s`` counts backwards from now."""
    version: int
    """Version of the latest status that it has."""
    is_leaving: bool = False
    """Whether it ends, and needs no further status."""


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A report that a rank sends to the head, again and again, once all have come together."""

    rank: int
    num_stages: int
    data: int
    """The number of replicas of the pipeline."""
    unit_size: int
    """The number of devices of each replica of a stage."""
    by_replica: bool = False
    order: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    """This, ``order`` and ``by_replica``: see :class:`~rrfp_jax.layout.Layout`."""
    epoch: int = 0
    """The latest epoch of which the rank knows."""
    accusations: tuple[tuple[int, str], ...] = ()
    """Living ranks that it suspects, with reasons."""
    has_left: bool = False
    """Whether it has come to the end of the run."""
    holds: int | None = None
    """The step for which it holds in this epoch."""
    takes_back: bool = False
    """Whether it will hold for new processes of lost ranks."""


@dataclass(frozen=True, kw_only=True)
class NewcomerReport:
    """A report that a new process of a lost rank sends to the head, again and again, once it is prepared."""

    rank: int
    number: int
    """See :class:`Member`."""
    step: int | None = None
    """The step before which it has the state of the run; None: it has none yet."""


class RollCall:
    """Decides how many nodes, and which, take part in an attempt; node 0 is always there.

    Args:
        counts: all numbers of nodes that the run may have, descending: the largest that is there takes part.
        wait_s: seconds for which all are waited for, where those that are there would do.
    """

    def __init__(self, counts: Sequence[int], wait_s: float) -> None:
        self.counts, self._wait_s = counts, wait_s
        self.nodes = tuple(range(counts[0])) if len(counts) == 1 else ()
        """See :class:`RunStatus`."""
        self.may_grow = False
        """See :class:`RunStatus`."""
        self._more_since_s: float | None = None
        self._here = [0]

    def missing(self) -> str:
        """Returns the names of the nodes that are waited for; empty once it is decided which take part."""
        return "" if self.nodes else " and ".join(f"node {n}" for n in range(self.counts[0]) if n not in self._here)

    def call(self, others: Iterable[int], now_s: float) -> bool:
        """Notes the other nodes that are there ``now_s`` seconds after the start. Returns whether that decides."""
        here = self._here = sorted({0, *others})
        count = next((count for count in self.counts if count <= len(here)), 0)
        if self.nodes:
            # A node that comes and goes is no reason to start again.
            has_more = count > len(self.nodes)
            self._more_since_s = (now_s if self._more_since_s is None else self._more_since_s) if has_more else None
            self.may_grow = self._more_since_s is not None and now_s >= self._more_since_s + _STEADY_S
        elif count == self.counts[0] or (count and now_s >= self._wait_s):
            self.nodes = tuple(here[:count])
            return True
        return False


class Rendezvous:
    """Collects the join requests of one run until it is decided: ``members`` (all is well) or ``failure`` (why not).

    Args:
        expected: settings of the head; a rank's configuration must have the same, or none of the same name.
    """

    def __init__(self, num_ranks: int, expected: Mapping[str, Any] | None = None) -> None:
        self.num_ranks = num_ranks
        self._expected = expected or {}
        self.endings: dict[int, ProcessEnding] = {}
        """Ends of ranks, as their launchers reported them."""
        self.members: tuple[Member, ...] | None = None
        self.brought: dict[int, bytes] = {}
        """Data that ranks have brought to gatherings before the first step, packed, for those that come back."""
        self._requests: dict[int, JoinRequest] = {}
        self._needs_service = False
        self._occasion: str | None = None
        self._first_failure: str | None = None
        """The failure as its text was at first."""
        self._lines: list[str] = []
        self._doomed: list[int] = []
        self._awaited: list[int] = []
        """Ranks that had not joined when the rendezvous failed, and have not since."""

    @property
    def is_decided(self) -> bool:
        """Whether the rendezvous has succeeded or failed."""
        return self.members is not None or self._occasion is not None

    @property
    def failure(self) -> str | None:
        """Why the ranks did not come together, as far as it is known now."""
        if self._occasion is None:
            return None
        awaited = [f"not here yet: {name_ranks(self._awaited)}"] if self._awaited else []
        return "\n  ".join([f"the rendezvous failed: {self._occasion}", *awaited, *self._lines])

    def status(self) -> RunStatus:
        doomed = tuple(rank for rank in self._doomed if rank not in self.endings and rank not in self._requests)
        return RunStatus(
            endings=dict(self.endings), failure=self._first_failure, doomed=doomed, needs_service=self._needs_service
        )

    def admit(self, request: JoinRequest) -> str | None:
        """Notes a rank's request. Returns a text where it is refused. To ask again changes nothing."""
        new = request.member
        if not 0 <= new.rank < self.num_ranks:
            return (
                f"rank {new.rank} (host {new.host}, pid {new.pid}) is out of range: this run has {self.num_ranks} "
                f"ranks, 0 to {self.num_ranks - 1}; start as many processes as the rendezvous was told"
            )
        known = self._requests.get(new.rank)
        if known is not None and known.member.token != new.token:
            return (
                f"rank {new.rank} was started twice: it is here as {known.member}, this is another process, {new}; "
                "start every rank once"
            )
        if known is not None:
            return None
        self._requests[new.rank] = request
        self._needs_service |= request.needs_service
        if self._occasion is not None:
            # The ranks that were on their way when it failed get the failure; any later one is told that it is late.
            if new.rank in self._awaited:
                self._awaited.remove(new.rank)
                return str(self.failure)
            self._doomed = self._doomed or self.missing()
            late = f"rank {new.rank} came late: the rendezvous had failed before; start all ranks together again"
            return f"{late}\n  {self.failure}"
        # Compared only when all are here, so that one failure names every difference.
        if len(self._requests) == self.num_ranks:
            self._decide(f"all {self.num_ranks} ranks have come")
        return None

    def ended(self, rank: int, ending: ProcessEnding) -> None:
        """Notes that a rank's process has ended, by which the rendezvous fails unless it is decided."""
        if rank not in self.endings or self.endings[rank].number < ending.number:
            self.endings[rank] = ending
        if not self.is_decided:
            # The others may still be on their way: they are refused as they come, or ended by their launchers.
            self._awaited = [other for other in self.missing() if other != rank]
            self._decide(f"rank {rank} ended with code {ending.code} before all ranks had come", must_fail=True)
            if ending.code:  # else each may have done its work, such as printing its help
                self._doomed = self._awaited.copy()

    def expire(self, deadline_s: float) -> None:
        if not self.is_decided:
            missing = self.missing()
            lines = [f"missing: {name_ranks(missing)}"]
            self._decide(f"the rendezvous was not complete after {deadline_s:g} s", lines, must_fail=True)
            if self._requests:  # else this may be a program that goes to no rendezvous
                self._doomed = missing

    def refuse_newcomer(self, request: JoinRequest) -> str | None:
        """Returns why a new process of a rank cannot take the place of the first one, or None."""
        rank = request.member.rank
        if self.members is None or rank not in self._requests:
            return f"rank {rank} comes back to a run that has not begun"
        other = min(each for each in self._requests if each != rank or len(self._requests) == 1)
        known = {other: self._requests[other].configuration, rank: request.configuration}
        lines = configuration_differences(known)
        return f"rank {rank} comes back, and differs: {'; '.join(lines)}" if lines else None

    def take_back(self, member: Member) -> None:
        """Puts a new process of a rank in the place of the one before."""
        assert self.members is not None
        self.members = tuple(member if each.rank == member.rank else each for each in self.members)

    def give_up(self, why: str) -> None:
        if not self.is_decided:
            self._occasion = why

    def missing(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self._requests]

    def _decide(self, occasion: str, lines: Iterable[str] = (), *, must_fail: bool = False) -> None:
        # A failure names everything that is known to be wrong, not just the first thing.
        self._lines = [*lines, *self._differences()]
        if must_fail or self._lines:
            self._occasion = occasion
            self._first_failure = self.failure
        else:
            self.members = tuple(self._requests[rank].member for rank in sorted(self._requests))

    def _differences(self) -> Iterator[str]:
        for rank, request in sorted(self._requests.items()):
            if request.num_ranks != self.num_ranks:
                yield f"{self.num_ranks} ranks are expected, rank {rank} was told of {request.num_ranks}"
        brought = {rank: json.loads(request.configuration) for rank, request in self._requests.items()}
        for key, value in self._expected.items():
            others = [rank for rank, configuration in brought.items() if configuration.get(key, value) != value]
            if others:
                values = sorted({json.dumps(brought[rank][key]) for rank in others})
                yield f"{key} is {json.dumps(value)} on the head, but {' or '.join(values):.80} on {name_ranks(others)}"
        yield from configuration_differences({rank: request.configuration for rank, request in self._requests.items()})


def configuration_differences(configurations: Mapping[int, str]) -> list[str]:
    """Returns a line for each key (``optimizer.lr``) that differs between ranks, with all values and their ranks."""
    if len(set(configurations.values())) < 2:  # the usual case, without reading thousands of configurations
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
    """Returns ``rank 3``, or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
