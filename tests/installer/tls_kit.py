"""Certificates as a customer's issuer makes them (or should not), and a real TLS server and client to try them on."""

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Issuer:
    """An authority (root, or below another one) that signs whatever it is asked to."""

    def __init__(self, name: str, parent: "Issuer | None" = None) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        signer = parent or self
        self.certificate = _certificate(self.name, self.key, signer.name, signer.key, ca=True)
        self.parents: list[Issuer] = [parent, *parent.parents] if parent else []

    def issue(
        self, names: Sequence[str], *, key: Any = None, begin: int = -1, end: int = 365, ca: bool = False,
        uses: Sequence[x509.ObjectIdentifier] | None = (ExtendedKeyUsageOID.SERVER_AUTH,),
        hashing: hashes.HashAlgorithm | None = None,
    ) -> tuple[Any, x509.Certificate]:
        """(private key, certificate); `begin` and `end` are days from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0] if names else "nobody")])
        made = _certificate(subject, key, self.name, self.key, names=names, begin=begin, end=end, ca=ca, uses=uses,
                            hashing=hashing)
        return key, made

    def chain(self) -> list[x509.Certificate]:
        """Its certificate and those above it, the root's left out."""
        return [issuer.certificate for issuer in [self, *self.parents][:-1]]

    @property
    def root(self) -> x509.Certificate:
        return (self.parents[-1] if self.parents else self).certificate


def _certificate(
    subject: x509.Name, key: Any, issuer: x509.Name, signer: Any, *, names: Sequence[str] = (), begin: int = -1,
    end: int = 3000, ca: bool = False, uses: Sequence[x509.ObjectIdentifier] | None = None,
    hashing: hashes.HashAlgorithm | None = None,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=begin)).not_valid_after(now + timedelta(days=end))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(signer, hashing or hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(*things: Any) -> bytes:
    """Certificates and private keys as one PEM text."""
    parts = []
    for thing in things:
        if isinstance(thing, x509.Certificate):
            parts.append(thing.public_bytes(serialization.Encoding.PEM))
        else:
            parts.append(thing.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return b"".join(parts)


@contextlib.contextmanager
def tls_server(certificate: Path, key: Path) -> Iterator[int]:
    """A TLS server on 127.0.0.1 that says hello to everyone; yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(5)
                with connection, context.wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join()
        listener.close()


def connect(port: int, name: str, trusted: Path | None = None, *, data: str | None = None) -> x509.Certificate:
    """Connect as a strict client that was told `name`; returns the served certificate. Raises ssl.SSLError."""
    context = ssl.create_default_context(cafile=trusted, cadata=data)
    plain = socket.create_connection(("127.0.0.1", port), timeout=30)
    with plain, context.wrap_socket(plain, server_hostname=name) as secured:
        assert secured.recv(5) == b"hello"
        served = secured.getpeercert(binary_form=True)
    assert served is not None
    return x509.load_der_x509_certificate(served)
