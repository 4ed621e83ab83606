"""Who has the run key is believed, as what it is, and nobody else; by handshakes of Python's own TLS."""

import os
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from rrfp_jax.cluster import coordination_service
from rrfp_jax.cluster.coordination_service import (
    OPEN,
    SECURED,
    service_security,
    service_warning,
    tls_credentials,
)
from rrfp_jax.cluster.keys import RunKey

KEY, OTHER = RunKey(bytes(32)), RunKey(bytes(31) + b"\1")


@pytest.fixture(autouse=True)
def jax_secures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination_service, "version", lambda _: "0.11.2")


def side(purpose: int, files: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files["mtls_ca_file"])
    context.load_cert_chain(files["mtls_cert_file"], files["mtls_key_file"])
    return context


def shake_hands(client: dict[str, Any], server: dict[str, Any]) -> None:
    """Both sides of a handshake, and a word from the client, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = side(ssl.PROTOCOL_TLS_CLIENT, client).wrap_bio(back, there)
    serving = side(ssl.PROTOCOL_TLS_SERVER, server).wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for end in (asking, serving):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    asking.write(b"hello")
    assert serving.read() == b"hello"


def test_two_processes_that_have_the_key_believe_each_other():
    shake_hands(tls_credentials(KEY, 3), tls_credentials(KEY))


@pytest.mark.parametrize(
    ("client", "server"),
    [
        pytest.param(tls_credentials, lambda key: tls_credentials(OTHER), id="a service of another run"),
        pytest.param(lambda key, rank: tls_credentials(OTHER, rank), tls_credentials, id="a rank of another run"),
        pytest.param(tls_credentials, lambda key: tls_credentials(key, 0), id="a rank in place of the service"),
        pytest.param(lambda key, rank: tls_credentials(key), tls_credentials, id="a service in place of a rank"),
    ],
)
def test_nobody_else_is_believed(client, server):
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(client(KEY, 1), server(KEY))


def certificate(path: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_each_side_asks_for_the_name_of_the_other():
    service, rank = tls_credentials(KEY), tls_credentials(KEY, 12)
    for own, other in ((service, rank), (rank, service)):
        extension = certificate(own["mtls_cert_file"]).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        (name,) = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        assert name.startswith(other["mtls_peer_uri_prefix"])
        assert not name.startswith(own["mtls_peer_uri_prefix"])
        assert other["mtls_peer_uri_prefix"].endswith("/"), "as JAX demands"
        assert own["verify_secure_credentials"] is True


def test_they_are_valid_whatever_the_clock_says():
    files = tls_credentials(KEY, 0)
    for path in (files["mtls_cert_file"], files["mtls_ca_file"]):
        made = certificate(path)
        assert made.not_valid_before_utc <= datetime(1970, 1, 1, tzinfo=UTC)
        assert made.not_valid_after_utc.year == 9999


def test_every_host_makes_the_same_authority_and_a_key_of_its_own():
    one, two, other = tls_credentials(KEY, 0), tls_credentials(KEY, 0), tls_credentials(OTHER, 0)

    def public(files: dict[str, Any], name: str) -> object:
        return certificate(files[name]).public_key()

    assert public(one, "mtls_ca_file") == public(two, "mtls_ca_file") != public(other, "mtls_ca_file")
    assert public(one, "mtls_cert_file") != public(two, "mtls_cert_file")


def test_nothing_lies_on_a_disk_and_no_child_inherits_it():
    for name in ("mtls_cert_file", "mtls_key_file", "mtls_ca_file"):
        path = Path(str(tls_credentials(KEY)[name]))
        assert os.readlink(path).startswith("/memfd:rrfp-")
        assert not os.get_inheritable(int(path.name))


@pytest.mark.parametrize(
    ("version", "security"),
    [
        ("0.10.2", OPEN),
        ("0.11.1", OPEN),
        ("0.11.1rc2", OPEN),
        ("0.11.2", SECURED),
        ("0.11.2rc1", SECURED),
        ("0.12rc1", SECURED),
        ("0.12.0.1", SECURED),
        ("0.12.1.dev2", SECURED),
    ],
)
def test_what_an_older_jax_cannot_do_is_left_out(monkeypatch, version: str, security: str):
    monkeypatch.setattr(coordination_service, "version", lambda _: version)
    assert service_security() == security
    assert bool(tls_credentials(KEY, 0)) == bool(tls_credentials(KEY)) == (security == SECURED)


def test_an_open_service_is_told_of_where_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_warning("10.0.0.1:8001", "10.0.0.1") is None
    monkeypatch.setattr(coordination_service, "version", lambda _: "0.10.2")
    assert service_warning("127.0.0.1:8001", "127.0.0.1") is None
    assert service_warning("[::1]:8001", "::1") is None
    for own in ("10.0.0.1", "fe80::1%eth0"):
        said = service_warning("10.0.0.1:8001", own)
        assert said is not None
        assert "at 10.0.0.1:8001 asks for no key (JAX 0.10.2 cannot): whoever reaches this port can end the run" in said
