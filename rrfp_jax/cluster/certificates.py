"""Certificates for JAX's coordination service, made from the run key: mutual TLS between the service and every rank.

The key of the authority comes from the run key, so every process makes it anew and nothing more must be copied between
hosts. Each process signs a certificate for a key of its own, which never leaves it. A process without the run key can
sign nothing that either side accepts. A launcher makes another run key for every attempt, and with it another
authority, so processes that are left of an earlier attempt are refused.

A certificate names the role of its holder by a URI, since the service's address may be an IP address of any interface.
The service accepts the certificates of ranks, and ranks that of the service, so a rank cannot stand in for the service.
Certificates are valid at all times (RFC 5280, 4.1.2.5): the attempt ends them, and clocks of hosts need not agree.

JAX reads files, again and again. Here they lie in memory of this process (``memfd_create``): nobody else needs to be
kept from them, and they end with the process, however that ends.
"""

import ipaddress
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rrfp_jax.cluster.keys import RunKey

SERVICE_SECURITY = "coordination service"
"""Name under which the head and all ranks compare how their JAX protects the service."""
SECURED, OPEN = "mutual TLS", "open, as in JAX before 0.11.2"
_SECURED_SINCE = (0, 11, 2)
_SERVICE_URI, _RANK_URI = "rrfp://service/", "rrfp://rank/"
_AUTHORITY = "run"
_EVER = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_CURVE = ec.SECP256R1()
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SCALAR_BYTES = 48
"""More bytes than the order has, so that the remainder is as good as uniform (FIPS 186-5, A.2.1)."""


def service_security() -> str:
    """Returns how the installed JAX protects its coordination service, ``SECURED`` or ``OPEN``; JAX is not loaded."""
    release = re.match(r"[0-9.]*[0-9]", version("jaxlib"))  # without "rc1" and the like
    assert release is not None
    return SECURED if tuple(map(int, release[0].split("."))) >= _SECURED_SINCE else OPEN


def service_warning(coordinator: str, own_host: str) -> str | None:
    """Returns the warning for the start if others than the run's ranks may reach the service; None: there is none.

    If this rank listens on loopback, so does the service.
    """
    if service_security() == SECURED or ipaddress.ip_address(own_host.partition("%")[0]).is_loopback:
        return None
    return (
        f"JAX's coordination service at {coordinator} asks for no key (JAX {version('jax')} cannot): whoever reaches "
        "this port can end the run. Let only the run's hosts reach it, or take Python 3.12 with JAX 0.11.2 or newer"
    )


def service_credentials(key: RunKey) -> dict[str, str | bool]:
    """Returns JAX's keyword arguments in the process that hosts the service; none where JAX leaves it open."""
    return _credentials(key, _SERVICE_URI, ExtendedKeyUsageOID.SERVER_AUTH, accepts=_RANK_URI)


def rank_credentials(key: RunKey, rank: int) -> dict[str, str | bool]:
    """Returns JAX's keyword arguments for the client of a rank; none where JAX leaves the service open."""
    return _credentials(key, f"{_RANK_URI}{rank}", ExtendedKeyUsageOID.CLIENT_AUTH, accepts=_SERVICE_URI)


def _credentials(key: RunKey, uri: str, usage: x509.ObjectIdentifier, *, accepts: str) -> dict[str, str | bool]:
    if service_security() == OPEN:
        return {}
    authority = _authority_key(key)
    trusted = _certify(_AUTHORITY, authority.public_key(), authority, is_authority=True)
    own = ec.generate_private_key(_CURVE)
    proof = _certify(
        "process",
        own.public_key(),
        authority,
        (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), x509.ExtendedKeyUsage([usage])),
    )
    secret = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "mtls_cert_file": _in_memory("certificate", proof.public_bytes(serialization.Encoding.PEM)),
        "mtls_key_file": _in_memory("key", secret),
        "mtls_ca_file": _in_memory("authority", trusted.public_bytes(serialization.Encoding.PEM)),
        "mtls_peer_uri_prefix": accepts,
        "verify_secure_credentials": True,
    }


def _authority_key(key: RunKey) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(key.expand("certificate authority", _SCALAR_BYTES), "big")
    return ec.derive_private_key(1 + number % (_CURVE_ORDER - 1), _CURVE)


def _certify(
    name: str,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    extensions: Iterable[x509.ExtensionType] = (),
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    first, last = _EVER
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(_AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rrfp {name}")])


def _in_memory(name: str, content: bytes) -> str:
    """Returns the path of a file that exists in this process alone, until it ends: JAX reads it now and then."""
    # The descriptor is never closed: the path must lead to the file as long as the process lives.
    descriptor = os.memfd_create(f"rrfp-{name}")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/self/fd/{descriptor}"
