"""The rules of the rendezvous, without sockets or clocks: who has come, who is refused, and what the verdict is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.runtime.network.configuration import configuration_digest, differences, name_ranks
from rrfp_jax.runtime.network.plain import MalformedMessage
from rrfp_jax.runtime.network.plain import field as field_of


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank says of itself, for all others."""

    rank: int
    host: str
    pid: int
    address: Mapping[str, str]
    """Where its sockets listen (``PeerAddress.as_dict()``)."""
    offers: Mapping[str, Any] = field(default_factory=dict)
    """Further plain data for all ranks, for example a coordinator's address."""

    def as_dict(self) -> dict[str, Any]:
        """The member as plain data."""
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "address": dict(self.address),
            "offers": dict(self.offers),
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Member":
        """Read what :meth:`as_dict` made.

        Raises:
            MalformedMessage: for anything else.
        """
        return cls(
            rank=field_of(data, "rank", int),
            host=field_of(data, "host", str),
            pid=field_of(data, "pid", int),
            address=field_of(data, "address", dict),
            offers=field_of(data, "offers", dict),
        )


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a rank brings to the rendezvous; the configuration is plain data, and must be the same on all ranks."""

    member: Member
    num_ranks: int
    configuration: Mapping[str, Any]
    digest: str

    @classmethod
    def of(cls, member: Member, num_ranks: int, configuration: Mapping[str, Any]) -> "Hello":
        """With the digest of ``configuration``."""
        return cls(
            member=member,
            num_ranks=num_ranks,
            configuration=configuration,
            digest=configuration_digest(configuration),
        )

    def as_dict(self) -> dict[str, Any]:
        """The hello as plain data."""
        return {
            "member": self.member.as_dict(),
            "num_ranks": self.num_ranks,
            "configuration": dict(self.configuration),
            "digest": self.digest,
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Hello":
        """Read what :meth:`as_dict` made.

        Raises:
            MalformedMessage: for anything else.
        """
        return cls(
            member=Member.from_dict(field_of(data, "member", dict)),
            num_ranks=field_of(data, "num_ranks", int),
            configuration=field_of(data, "configuration", dict),
            digest=field_of(data, "digest", str),
        )


class RollCall:
    """Collects the hellos of one run until a verdict: ``members`` (all is well) or ``failure`` (why not)."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.exits: dict[int, int] = {}
        """The exit codes of ranks that have ended, as their supervisors reported them."""
        self.members: tuple[Member, ...] | None = None
        self.failure: str | None = None
        self._hellos: dict[int, Hello] = {}
        self._awaited: list[int] = []
        """Whom a failure came before."""

    @property
    def is_decided(self) -> bool:
        return self.members is not None or self.failure is not None

    def admit(self, hello: Hello) -> str | None:
        """Note a rank's hello; a sentence where it is refused. Saying hello again changes nothing."""
        new = hello.member
        if not 0 <= new.rank < self.num_ranks:
            return (
                f"rank {new.rank} (host {new.host}, pid {new.pid}) is out of range: this run has {self.num_ranks} "
                f"ranks, 0 to {self.num_ranks - 1}; start as many processes as the rendezvous was told"
            )
        known = self._hellos.get(new.rank)
        if known is not None and (known.member.host, known.member.pid) != (new.host, new.pid):
            old = known.member
            return (
                f"rank {new.rank} was started twice: it is here as pid {old.pid} on host {old.host}, "
                f"this is pid {new.pid} on host {new.host}; start every rank once"
            )
        if new.rank in self._awaited:
            return self.failure
        if known is None and self.is_decided:
            outcome = "had failed" if self.failure else "was complete"
            refusal = f"rank {new.rank} came late: the rendezvous {outcome} before; start all ranks together again"
            return "\n  ".join(filter(None, [refusal, self.failure]))
        if known is None:
            self._hellos[new.rank] = hello
            if len(self._hellos) == self.num_ranks:
                self._judge(f"all {self.num_ranks} ranks have come")
        return None

    def exited(self, rank: int, code: int) -> None:
        """A rank's process has ended; before the rendezvous is complete, this ends it."""
        self.exits[rank] = code
        if not self.is_decided:
            self._judge(f"rank {rank} ended with code {code} before all ranks had come")

    def expire(self, deadline_s: float) -> None:
        """The deadline is over."""
        if not self.is_decided:
            self._judge(f"the rendezvous was not complete after {deadline_s:g} s", is_time_over=True)

    def give_up(self, why: str) -> None:
        """No further rank is waited for."""
        if not self.is_decided:
            self.failure = f"the rendezvous failed: {why}"

    def missing(self) -> list[int]:
        """The ranks that have not said hello."""
        return [rank for rank in range(self.num_ranks) if rank not in self._hellos]

    def _judge(self, occasion: str, *, is_time_over: bool = False) -> None:
        """The verdict names everything that is known to be wrong, not just the first thing."""
        reasons, missing = [], self.missing()
        if not is_time_over:
            self._awaited = [rank for rank in missing if rank not in self.exits]
            missing = [rank for rank in missing if rank in self.exits]
        if missing:
            reasons.append(f"missing: {name_ranks(missing)}")
        if self._awaited:
            reasons.append(f"not here yet: {name_ranks(self._awaited)}")
        reasons += self._differences()
        if ended := sorted(self.exits):
            reasons.append("; ".join(f"rank {rank} ended with code {self.exits[rank]}" for rank in ended))
        if reasons:
            self.failure = "\n  ".join([f"the rendezvous failed: {occasion}", *reasons])
        else:
            self.members = tuple(self._hellos[rank].member for rank in sorted(self._hellos))

    def _differences(self) -> list[str]:
        lines = [
            f"{self.num_ranks} ranks are expected, rank {rank} was told of {hello.num_ranks}"
            for rank, hello in sorted(self._hellos.items())
            if hello.num_ranks != self.num_ranks
        ]
        if len({hello.digest for hello in self._hellos.values()}) > 1:
            found = differences({rank: hello.configuration for rank, hello in self._hellos.items()})
            lines += found or differences({rank: {"digest": hello.digest} for rank, hello in self._hellos.items()})
        return lines


def parse_exit(data: Any, num_ranks: int) -> tuple[int, int]:
    """The rank and the exit code of a supervisor's report.

    Raises:
        MalformedMessage: for anything else.
    """
    rank, code = field_of(data, "rank", int), field_of(data, "code", int)
    if not 0 <= rank < num_ranks:
        raise MalformedMessage(f"an exit of rank {rank} of {num_ranks}")
    return rank, code
