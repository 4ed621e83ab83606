"""Which address a host listens on, and names that lead to loopback."""

import socket
from typing import Any

import pytest

from rrfp_jax.cluster.config import Address, LaunchSettings, Membership
from rrfp_jax.cluster.host import Unreachable, address_of, await_name, is_misleading, listens_on, own_address

_RESOLVE = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A table of host names, as in ``/etc/hosts``; others are unknown."""
    table: dict[str, str] = {}

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        return _RESOLVE(table.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table


def test_loopback_is_reached_from_loopback() -> None:
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    assert own_address("localhost", 9) in ("127.0.0.1", "::1")
    assert not is_misleading("127.0.1.1", 9)


def test_a_name_that_leads_to_loopback_is_refused_with_the_remedy(names: dict[str, str]) -> None:
    names["node1"] = "127.0.1.1"
    assert is_misleading("node1", 9)
    said = r"the name 'node1' leads to 127\.0\.1\.1 on this host, which no other host can reach: set RRFP_INTERFACE"
    with pytest.raises(Unreachable, match=said):
        own_address("node1", 9)
    head = Address.parse("node1:8476")
    first = LaunchSettings(command=("m",), num_processes=1, num_nodes=2, head=head)
    supervisor = LaunchSettings(command=(), num_processes=2, head=head)
    for settings in (first, supervisor):
        with pytest.raises(ValueError, match=said):
            listens_on(settings)
    named = LaunchSettings(command=("m",), num_processes=1, num_nodes=2, head=head, interface="ib0")
    assert listens_on(named) == "ib0"
    assert listens_on(LaunchSettings(command=("m",), num_processes=1, head=head)) == "127.0.1.1"  # nobody else comes


def test_a_rank_on_the_heads_host_meets_at_an_address_instead() -> None:
    told = Membership(rank=0, num_ranks=2, rendezvous="tcp://node1:8476", coordinator="node1:8477", interface="ib0")
    assert told.meeting_place() == ("node1", 8476)
    moved = told.meeting_at("fe80::1")
    assert (moved.rendezvous, moved.coordinator) == ("tcp://[fe80::1]:8476", "[fe80::1]:8477")
    assert moved.meeting_place() == ("fe80::1", 8476)


def test_a_name_may_become_known(names: dict[str, str]) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        names["late.invalid"] = "127.0.0.1"

    await_name("late.invalid", 60.0, say)
    assert said == ["waiting until the head's name 'late.invalid' is known"]
    with pytest.raises(Unreachable, match="still unknown after 0 s"):
        await_name("never.invalid", 0.0, say)


@pytest.mark.parametrize("host", ["a" * 64, "node..1"])
def test_what_can_be_no_name_is_unknown(host: str) -> None:
    for look in (lambda: address_of(host, 9), lambda: own_address(host, 9), lambda: await_name(host, 0.0, str)):
        with pytest.raises(Unreachable, match="this cannot be a name"):
            look()
