"""Whether transfer servers work between neighbours, found out by an exchange between each two of them.

Every rank says where its server is and offers a small array to each neighbour; then each fetches what the others offer
within a deadline and compares the bytes. What was found is told to all, so that both ends of an edge judge alike:
arrays go by transfer between two ranks that have both fetched from each other, and through sockets between others.
What hangs is left behind on a thread of its own.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from rrfp_jax.cluster.rendezvous import name_ranks

DEADLINE_S = 20.0
"""For a server to start, and for its neighbours to fetch from it."""

_T = TypeVar("_T")
_ADDRESS, _OFFERS, _WHY = "address", "offers", "why"

Gather = Callable[[str, Any], Mapping[int, Any]]
"""Everybody's plain data, by rank, once all have brought theirs."""


class Probe(Protocol):
    """One end of the exchange."""

    address: str
    """Where the others fetch from."""

    def offer(self, rank: int) -> int:
        """Let a rank fetch this rank's pattern, once, under the number that is returned."""

    def fetch(self, rank: int, address: str, number: int) -> None:
        """Fetch the pattern of another rank. Raises an error where that fails or other bytes come."""


def why_untried(platform: str, *, encrypts: bool) -> str | None:
    """Why transfer servers are not even tried between devices of a platform; None where they are."""
    if platform == "cpu":
        return "devices share the host's memory, where they are the fastest"
    if encrypts:
        return "arrays are to be encrypted; cluster.encrypt_arrays false lets them go from device to device"
    return None


def try_transfers(
    gather: Gather,
    own: int,
    neighbours: Iterable[int],
    make_probe: Callable[[], Probe] | str,
    deadline_s: float = DEADLINE_S,
) -> dict[tuple[int, int], str]:
    """By pair of neighbours, the lower one first, why transfer servers do not work between them; "" where they do.

    All ranks call this together. Waits for others as ``gather`` does, for what is tried no longer than the deadline.

    Args:
        make_probe: starts this rank's end; or why there is none.
    """
    ranks = sorted(neighbours)
    probe, said = _begin(make_probe, ranks, deadline_s)
    everybody = gather("transfer servers", said)
    tried = {} if probe is None else _try(probe, own, {rank: everybody[rank] for rank in ranks}, deadline_s)
    # where nobody has anything to try, everybody knows it
    found = gather("transfers", [*tried.items()]) if any(_ADDRESS in each for each in everybody.values()) else {}
    whys = {(rank, other): why for rank, pairs in found.items() for other, why in pairs}
    pairs = {(min(a, b), max(a, b)) for a, each in everybody.items() for b in each["neighbours"]}
    return {pair: _judge(pair, everybody, whys) for pair in sorted(pairs)}


def described(found: Mapping[tuple[int, int], str]) -> str:
    """What was taken between which ranks and why, as one line."""
    if not found:
        return "no arrays travel between processes"
    refused = {pair: why for pair, why in found.items() if why}
    if not refused:
        return (
            "arrays between processes go from device to device (transfer, not encrypted), tried between all neighbours"
        )
    reasons: dict[str, list[tuple[int, int]]] = {}
    for pair, why in refused.items():
        reasons.setdefault(why, []).append(pair)
    if len(refused) == len(found):
        told = "; ".join(reasons)
        return f"arrays between processes go through sockets: {told}"
    told = "; ".join(f"between {_name(pairs)}: {why}" for why, pairs in reasons.items())
    return f"arrays between processes go from device to device (transfer, not encrypted), but through sockets {told}"


def _name(pairs: list[tuple[int, int]]) -> str:
    named = ", ".join(name_ranks(pair) for pair in pairs[:4])
    return named if len(pairs) <= 4 else f"{named} and {len(pairs) - 4} more pairs"


def _begin(
    make_probe: Callable[[], Probe] | str, ranks: list[int], deadline_s: float
) -> tuple[Probe | None, dict[str, Any]]:
    said: dict[str, Any] = {"neighbours": ranks}
    if isinstance(make_probe, str):
        return None, said | {_WHY: make_probe}
    made = make_probe

    def start() -> tuple[Probe, dict[int, int]]:
        probe = made()
        return probe, {rank: probe.offer(rank) for rank in ranks}

    outcome = _within(deadline_s, [start])[0]
    if isinstance(outcome, Exception):
        return None, said | {_WHY: f"a transfer server could not be started: {_text(outcome)}"}
    probe, offers = outcome
    return probe, said | {_ADDRESS: probe.address, _OFFERS: offers}


def _try(probe: Probe, own: int, others: Mapping[int, Any], deadline_s: float) -> dict[int, str]:
    """By rank, why its pattern could not be fetched, or ""."""
    ready = {rank: said for rank, said in others.items() if _ADDRESS in said and own in said[_OFFERS]}

    def fetch(rank: int) -> Callable[[], None]:
        return lambda: probe.fetch(rank, ready[rank][_ADDRESS], ready[rank][_OFFERS][own])

    outcomes = _within(deadline_s, [fetch(rank) for rank in ready])
    return {
        rank: _text(outcome) if isinstance(outcome, Exception) else ""
        for rank, outcome in zip(ready, outcomes, strict=True)
    }


def _judge(pair: tuple[int, int], everybody: Mapping[int, Any], whys: Mapping[tuple[int, int], str]) -> str:
    for rank in pair:
        if why := everybody[rank].get(_WHY):
            return str(why) if _WHY in everybody[pair[0]] and _WHY in everybody[pair[1]] else f"rank {rank}: {why}"
    for rank, other in (pair, pair[::-1]):
        why = whys.get((rank, other), "it did not try")
        if why:
            return f"rank {rank} could not fetch from rank {other}: {why}"
    return ""


def _within(deadline_s: float, calls: list[Callable[[], _T]]) -> list[_T | Exception]:
    """What calls return or raise, each on a thread of its own; TimeoutError for those that take longer."""
    outcomes: dict[int, _T | Exception] = {}
    left = threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error
        left.release()

    for index in range(len(calls)):
        threading.Thread(target=run, args=(index,), name=f"rrfp-probe-{index}", daemon=True).start()
    until_s = time.monotonic() + deadline_s
    for _ in calls:
        if not left.acquire(timeout=max(0.0, until_s - time.monotonic())):
            break
    late = TimeoutError(f"no answer within {deadline_s:g} s")
    return [outcomes.get(index, late) for index in range(len(calls))]


def _text(error: Exception) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
