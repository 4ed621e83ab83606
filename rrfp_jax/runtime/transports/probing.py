"""A trial of transfer servers between neighbours: an exchange between each two of them before the first step.

Every rank tells the address of its server and offers a small array to each neighbour; then each fetches the arrays of
the others within a deadline and compares the bytes. All ranks gather the results, so that both ends of an edge come to
the same choice: arrays go by transfer between two ranks that have both fetched from each other, and through sockets
between others. A call that hangs is left behind on a thread of its own.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from rrfp_jax.cluster.rendezvous import name_ranks

DEADLINE_S = 20.0
"""Time for a server to start, and for its neighbours to fetch from it."""

_T = TypeVar("_T")
_ADDRESS, _OFFERS, _WHY = "address", "offers", "why"

Gather = Callable[[str, Any], Mapping[int, Any]]
"""Returns the plain data of all ranks, by rank, once all have brought theirs."""


class Probe(Protocol):
    """One end of the exchange; the library's is that of a transfer server, tests have one that needs no device."""

    address: str
    """The address from which the others fetch."""

    def offer(self, rank: int) -> int:
        """Lets a rank fetch this rank's pattern, once, under the number that is returned."""

    def fetch(self, rank: int, address: str, number: int) -> None:
        """Fetches the pattern of another rank. Raises an error if that fails or other bytes come."""


def why_untried(platform: str, *, encrypts: bool) -> str | None:
    """Returns why transfer servers are not even tried between devices of a platform; None if they are."""
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
    """Returns, by pair of neighbours, the lower one first, why transfer servers do not work between them; "" if they
    do.

    All ranks call this together. Waits for others as ``gather`` does, and for the trial no longer than the deadline.

    Args:
        make_probe: starts this rank's end; or the reason why there is none.
    """
    ranks = sorted(neighbours)
    probe, said = _begin(make_probe, ranks, deadline_s)
    everybody = gather("transfer servers", said)
    tried: dict[int, str] = {}
    if probe is not None:
        offers = {rank: everybody[rank] for rank in ranks if own in everybody[rank].get(_OFFERS, ())}
        outcomes = _within(deadline_s, [_fetching(probe, own, rank, said) for rank, said in offers.items()])
        for rank, outcome in zip(offers, outcomes, strict=True):
            tried[rank] = _first_line(outcome) if isinstance(outcome, Exception) else ""
    # if no rank has a server, every rank knows it from the first exchange, and the second is left out by all
    found = gather("transfers", [*tried.items()]) if any(_ADDRESS in each for each in everybody.values()) else {}
    whys = {(rank, other): why for rank, pairs in found.items() for other, why in pairs}
    pairs = {(min(a, b), max(a, b)) for a, each in everybody.items() for b in each["neighbours"]}
    return {pair: _why_not(pair, everybody, whys) for pair in sorted(pairs)}


def describe_transfers(found: Mapping[tuple[int, int], str]) -> str:
    """Returns in one line which way arrays take between which ranks, and why."""
    if not found:
        return "no arrays travel between processes"
    reasons: dict[str, list[tuple[int, int]]] = {}
    for pair, why in found.items():
        if why:
            reasons.setdefault(why, []).append(pair)
    if not reasons:
        return (
            "arrays between processes go from device to device (transfer, not encrypted), tried between all neighbours"
        )
    if all(found.values()):
        return f"arrays between processes go through sockets: {'; '.join(reasons)}"
    listed = "; ".join(f"between {_name(pairs)}: {why}" for why, pairs in reasons.items())
    return f"arrays between processes go from device to device (transfer, not encrypted), but through sockets {listed}"


def _name(pairs: list[tuple[int, int]]) -> str:
    named = ", ".join(name_ranks(pair) for pair in pairs[:4])
    return named if len(pairs) <= 4 else f"{named} and {len(pairs) - 4} more pairs"


def _begin(
    make_probe: Callable[[], Probe] | str, ranks: list[int], deadline_s: float
) -> tuple[Probe | None, dict[str, Any]]:
    """Starts this rank's end; returns it and the data for the other ranks."""
    said: dict[str, Any] = {"neighbours": ranks}
    if isinstance(make_probe, str):
        return None, said | {_WHY: make_probe}
    made = make_probe

    def start() -> tuple[Probe, dict[int, int]]:
        probe = made()
        return probe, {rank: probe.offer(rank) for rank in ranks}

    outcome = _within(deadline_s, [start])[0]
    if isinstance(outcome, Exception):
        return None, said | {_WHY: f"a transfer server could not be started: {_first_line(outcome)}"}
    probe, offers = outcome
    return probe, said | {_ADDRESS: probe.address, _OFFERS: offers}


def _fetching(probe: Probe, own: int, rank: int, said: Mapping[str, Any]) -> Callable[[], None]:
    return lambda: probe.fetch(rank, said[_ADDRESS], said[_OFFERS][own])


def _why_not(pair: tuple[int, int], everybody: Mapping[int, Any], whys: Mapping[tuple[int, int], str]) -> str:
    for rank in pair:
        if why := everybody[rank].get(_WHY):
            return str(why) if all(_WHY in everybody[each] for each in pair) else f"rank {rank}: {why}"
    for rank, other in (pair, pair[::-1]):
        if why := whys.get((rank, other), "it did not try"):
            return f"rank {rank} could not fetch from rank {other}: {why}"
    return ""


def _within(deadline_s: float, calls: list[Callable[[], _T]]) -> list[_T | Exception]:
    """Returns the result or error of each call, made on a thread of its own; TimeoutError for those that take
    longer."""
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
