"""Both ends of every edge come to the same choice, whatever fails or hangs on one of them."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rrfp_jax.runtime.transports.transfer import ServerProbe, describe_transfers, try_transfers, why_untried

Found = dict[tuple[int, int], str]
NEIGHBOURS = {0: {1}, 1: {0, 2}, 2: {1}}


class Gathering:
    """As the ranks' own: everybody's data, once all have brought theirs."""

    def __init__(self, num_ranks: int) -> None:
        self._brought: dict[str, dict[int, Any]] = {}
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self.names: list[str] = []

    def of(self, rank: int) -> Callable[[str, Any], Mapping[int, Any]]:
        def gather(name: str, data: Any) -> Mapping[int, Any]:
            self._brought.setdefault(name, {})[rank] = data
            self._barrier.wait()
            if not rank:
                self.names.append(name)
            return self._brought[name]

        return gather


class FakeProbe:
    """Offers a number that only its neighbour may fetch."""

    def __init__(self, rank: int, fails: Mapping[tuple[int, int], Callable[[], None]]) -> None:
        self.address, self._rank, self._fails = f"place of {rank}", rank, fails

    def offer(self, rank: int) -> int:
        return 100 * self._rank + rank

    def fetch(self, rank: int, address: str, number: int) -> None:
        assert (address, number) == (f"place of {rank}", 100 * rank + self._rank)
        self._fails.get((self._rank, rank), lambda: None)()


def play(
    makers: Mapping[int, Callable[[], ServerProbe] | str],
    fails: Mapping[tuple[int, int], Callable[[], None]] | None = None,
) -> tuple[Found, list[str]]:
    """What three ranks in a chain find, which must be the same, and what they gathered."""
    gathering = Gathering(3)

    def one(rank: int) -> Found:
        maker = makers.get(rank, lambda: FakeProbe(rank, fails or {}))
        return try_transfers(gathering.of(rank), rank, NEIGHBOURS[rank], maker, deadline_s=0.5)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one, range(3)))
    assert found[0] == found[1] == found[2]
    return found[0], gathering.names


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_what_works_everywhere_is_taken_everywhere() -> None:
    found, names = play({})
    assert found == {(0, 1): "", (1, 2): ""}
    assert names == ["transfer servers", "transfers"]
    assert describe_transfers(found) == (
        "arrays between processes go from device to device (transfer, not encrypted), tried between all neighbours"
    )


def test_where_nobody_tries_one_meeting_is_enough() -> None:
    found, names = play(dict.fromkeys(range(3), "they share memory"))
    assert found == {(0, 1): "they share memory", (1, 2): "they share memory"}
    assert names == ["transfer servers"]
    assert describe_transfers(found) == "arrays between processes go through sockets: they share memory"


@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (failing(ValueError("other bytes came than were offered\nmore")), "other bytes came than were offered"),
        (failing(ConnectionError()), "ConnectionError"),
        (lambda: time.sleep(1.5), "no answer within 0.5 s"),
    ],
    ids=["other bytes", "failure", "hangs"],
)
@pytest.mark.parametrize("edge", [(0, 1), (1, 0), (2, 1)])
def test_a_failure_at_one_end_counts_for_both_and_for_no_other_edge(
    edge: tuple[int, int], fail: Callable[[], None], why: str
) -> None:
    found, _ = play({}, {edge: fail})
    pair = (min(edge), max(edge))
    other = {(0, 1): (1, 2), (1, 2): (0, 1)}[pair]
    assert found == {pair: f"rank {edge[0]} could not fetch from rank {edge[1]}: {why}", other: ""}
    assert describe_transfers(found).startswith(
        "arrays between processes go from device to device (transfer, not encrypted), but through sock"
    )
    assert f"between ranks {pair[0]}-{pair[1]}: rank {edge[0]} could not" in describe_transfers(found)


@pytest.mark.parametrize(
    ("start", "why"),
    [(failing(ImportError("no such module")), "no such module"), (lambda: time.sleep(1.5), "no answer within 0.5 s")],
    ids=["fails", "hangs"],
)
def test_a_server_that_does_not_start_leaves_the_others_theirs(start: Callable[[], Any], why: str) -> None:
    found, _ = play({0: start})
    assert found == {(0, 1): f"rank 0: a transfer server could not be started: {why}", (1, 2): ""}


def test_ranks_without_arrays_between_them_try_nothing() -> None:
    assert try_transfers(lambda name, data: {0: data}, 0, (), "none") == {}
    assert describe_transfers({}) == "no arrays travel between processes"


@pytest.mark.parametrize(
    ("platform", "encrypts", "why"), [("cpu", False, "share"), ("gpu", True, "encrypted"), ("gpu", False, None)]
)
def test_transfer_servers_are_tried_where_arrays_need_not_be_encrypted(
    platform: str, encrypts: bool, why: str | None
) -> None:
    said = why_untried(platform, encrypts=encrypts)
    assert said is None if why is None else why in str(said)
