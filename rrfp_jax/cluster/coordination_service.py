"""JAX's coordination service in a process of its own, and the certificates by which it and the ranks know each other.

``python -m rrfp_jax.cluster.coordination_service HOST PORT NUM_RANKS`` serves until standard input closes. The launcher
starts it when the first rank comes that will connect to it, and keeps its port until then (:func:`reserve_port`). The
run key is in its environment, as in a rank's.
The death of the process that hosts the service aborts all ranks within a tenth of a second, so no rank must host it.
JAX offers the service under no public name; jaxlib alone holds it, and loads without JAX itself.

**Mutual TLS** between the service and every rank is made from the run key. The key of the authority comes from the run
key, so every process makes it anew and nothing more must be copied between hosts. Each process signs a certificate for
a key of its own, which never leaves it. A process without the run key can sign nothing that either side accepts. A
launcher makes another run key for every attempt, and with it another authority, so processes that are left of an
earlier attempt are refused.

A certificate names the role of its holder by a URI, since the service's address may be an IP address of any interface.
The service accepts the certificates of ranks, and ranks that of the service, so a rank cannot stand in for the service.
Certificates are valid at all times (RFC 5280, 4.1.2.5): the attempt ends them, and clocks of hosts need not agree.

JAX reads files, again and again. Here they lie in memory of this process (``memfd_create``): nobody else needs to be
kept from them, and they end with the process, however that ends.
"""

import ipaddress
import os
import re
import socket
import sys
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rrfp_jax.cluster.config import HEARTBEAT_TIMEOUT_S, Address
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.exit_codes import DONE, START_FAILED

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
_REMEDY = "end the run or program that has it, or give another port"
_SHUTDOWN_TIMEOUT_S = 5
"""Seconds for all ranks to disconnect at the end. It is short, since some may have died."""


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


def tls_credentials(key: RunKey, rank: int | None = None) -> dict[str, str | bool]:
    """Returns JAX's keyword arguments for the client of a rank, or without one in the process that hosts the service.

    There are none where JAX leaves the service open.
    """
    if service_security() == OPEN:
        return {}
    # The same authority in every process of the run, and a fresh key for this one.
    number = int.from_bytes(key.expand("certificate authority", _SCALAR_BYTES), "big")
    authority, own = ec.derive_private_key(1 + number % (_CURVE_ORDER - 1), _CURVE), ec.generate_private_key(_CURVE)
    uri, usage, accepts = _SERVICE_URI, ExtendedKeyUsageOID.SERVER_AUTH, _RANK_URI
    if rank is not None:
        uri, usage, accepts = f"{_RANK_URI}{rank}", ExtendedKeyUsageOID.CLIENT_AUTH, _SERVICE_URI
    name_of_role = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    proof = _certify("process", own.public_key(), authority, name_of_role, x509.ExtendedKeyUsage([usage]))
    trusted = _certify(_AUTHORITY, authority.public_key(), authority)
    pem = serialization.Encoding.PEM
    files = {
        "certificate": proof.public_bytes(pem),
        "key": own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        "authority": trusted.public_bytes(pem),
    }
    paths = {}
    for name, content in files.items():
        # The descriptor is never closed: the path must lead to the file as long as the process lives.
        descriptor = os.memfd_create(f"rrfp-{name}")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        paths[name] = f"/proc/self/fd/{descriptor}"
    return {
        "mtls_cert_file": paths["certificate"],
        "mtls_key_file": paths["key"],
        "mtls_ca_file": paths["authority"],
        "mtls_peer_uri_prefix": accepts,
        "verify_secure_credentials": True,
    }


def _certify(
    name: str,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rrfp {each}")]) for each in (name, _AUTHORITY)
    )
    first, last = _EVER
    is_authority = name == _AUTHORITY
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, SHA256())


def serve(argv: list[str]) -> int:
    host, port, num_ranks = argv[0], int(argv[1]), int(argv[2])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the service tells of each connection otherwise
    from rrfp_jax.private.jaxlib_names import get_distributed_runtime_service

    try:
        proofs = tls_credentials(RunKey.from_environment())
    except ValueError as error:
        print(error, file=sys.stderr)
        return START_FAILED
    service = get_distributed_runtime_service(
        str(Address(host=host, port=port)),
        num_ranks,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        **proofs,
    )
    sys.stdin.read()
    service.shutdown()
    return DONE


def reserve_port(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen: it keeps the port (0: any that is free) for the service, and
    does not disturb it. Close it when the service has ended.

    gRPC shares ports (SO_REUSEPORT), so by itself it would silently share one that another service listens on. Raises
    ValueError where somebody has the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with closing(socket.socket(family)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            if port:
                probe.listen(0)  # fails where somebody listens already
        reserved = socket.socket(family)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except OSError as error:
        where = f"{host}, port {port}: {error.strerror}; {_REMEDY}"
        raise ValueError(f"the coordination service cannot listen on {where}") from error
    return reserved


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
