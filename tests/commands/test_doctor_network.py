"""What is wrong with names, interfaces and ports is found, with real sockets and names."""

import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from rrfp_jax.cluster.config import Address
from rrfp_jax.commands import doctor
from rrfp_jax.commands.doctor import Status, check_head, check_ports, own_addresses
from tests.commands.test_doctor import assert_found

UNKNOWN = "nowhere.invalid"
OWN = next((each for all_of in own_addresses().values() for each in all_of if not ip_address(each).is_loopback), None)


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["4", "6"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port that somebody listens on."""
    family, address = request.param
    if not any(address in addresses for addresses in own_addresses().values()):
        pytest.skip(f"this host has no {address}")
    with socket.create_server((address, 0), family=family) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("before", [0, 1])
def test_a_port_in_use_is_found(taken: int, before: int) -> None:
    found = check_ports(None, taken - before, is_requested=True)
    assert_found(found, Status.PROBLEM, f"{taken}: in use", "--head HOST:PORT")
    assert taken in found.figures["taken"]
    assert check_ports(None, taken - before, is_requested=False).status is Status.WARNING, "one host takes free ones"
    head = Address(host="127.0.0.1", port=taken - before)
    assert_found(check_ports(head, head.port, is_requested=True), Status.PROBLEM, f"{taken}: in use", "end the run")


def test_free_ports_are_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert check_ports(None, port, is_requested=True).figures["ports"] == [port, port + 1]
    assert check_ports(Address(host=UNKNOWN, port=port), port, is_requested=True).status is Status.OK


def test_a_head_whose_name_is_unknown_is_found() -> None:
    head = Address(host=UNKNOWN, port=8476)
    assert_found(check_head(head, None), Status.PROBLEM, f"{UNKNOWN} does not resolve", "/etc/hosts")


def test_a_head_whose_name_leads_back_to_each_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes a host's own name into /etc/hosts."""
    assert_found(check_head(Address(host="localhost", port=1), None), Status.WARNING, "for this host alone", "address")
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **more: look_up(_written(name), *rest, **more))
    head = Address(host="node0", port=8476)
    found = check_head(head, None)
    assert_found(found, Status.PROBLEM, "node0 is 127.0.0.1 here, which leads to no other host", "/etc/hosts")
    assert found.figures["is_here"]
    assert check_head(head, "lo").status is Status.OK, "it is node 0, and knows where to listen"


def _written(name: Any) -> Any:
    """As /etc/hosts would say."""
    return "127.0.0.1" if name == "node0" else name


@pytest.mark.skipif(OWN is None, reason="this host has no address but loopback")
def test_the_interface_of_the_head_is_told() -> None:
    assert OWN is not None
    head = Address(host=OWN, port=8476)
    name = next(name for name, addresses in own_addresses().items() if OWN in addresses)
    found = check_head(head, None)
    assert found.status is Status.OK
    assert found.figures["is_here"]
    assert f"this host, {OWN} ({name})" in found.text


@pytest.mark.skipif(OWN is None, reason="this host has no way to others")
def test_a_head_that_does_not_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_here", lambda head: False)
    monkeypatch.setattr(doctor, "addresses_of", lambda name: ["192.0.2.77"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = Address(host="127.0.0.1", port=server.getsockname()[1])
        assert "something listens" in check_head(head, None).text
    assert "nothing listens yet" in check_head(head, None).text

    def silent(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert_found(check_head(Address(host="127.0.0.1", port=8476), None), Status.WARNING, "does not answer", "firewalls")


def test_an_unknown_interface_is_found() -> None:
    head = Address(host="localhost", port=8476)
    assert_found(check_head(head, "nosuch0"), Status.PROBLEM, "nosuch0 is no interface of this host", "--interface")
    assert check_head(head, "127.0.0.1").status is Status.OK
