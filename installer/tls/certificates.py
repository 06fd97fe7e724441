"""X.509 as this appliance needs it: a certificate authority for one host, its server certificate, and a customer's own.

Nothing here reads or writes the installation; endpoint.py does. The local authority is name-constrained: whoever steals
its key can impersonate this host only.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from installer.base.i18n import t

SERVER_DAYS = 825          # the longest that Apple's and others' clients accept
CA_DAYS = 3650
_EARLY = timedelta(days=1)  # the clocks of isolated machines differ
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)\Z")

Certificates = Sequence[x509.Certificate]


@dataclass(frozen=True, slots=True)
class Pair:
    """A private key and its certificate, followed by the issuers' certificates that are sent with it."""

    key: PrivateKeyTypes
    chain: tuple[x509.Certificate, ...]

    @property
    def leaf(self) -> x509.Certificate:
        return self.chain[0]

    def key_pem(self) -> bytes:
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return self.key.private_bytes(encoding, form, serialization.NoEncryption())

    def chain_pem(self) -> bytes:
        return b"".join(to_pem(certificate) for certificate in self.chain)


def is_name(text: str) -> bool:
    """Whether `text` is an IP address or a DNS name that a certificate may carry."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= 253 and all(_LABEL.match(label) for label in text.lower().split("."))
    return True


def machine_names() -> list[str]:
    """The names of this machine, and its addresses that others can reach; loopback first."""
    import psutil

    names = ["localhost", "127.0.0.1", "::1"]
    host = socket.gethostname().lower()
    names += [name for name in (*_hosts_file(host), host) if is_name(name)]
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(address.address.partition("%")[0])
                if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast):
                    names.append(str(ip))
    return list(dict.fromkeys(names))


def _hosts_file(host: str) -> list[str]:
    """Other names of `host` in /etc/hosts. No resolver is asked: an isolated machine would wait long for it."""
    try:
        lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
    except OSError:
        return []
    rows = [line.partition("#")[0].lower().split()[1:] for line in lines]
    return [name for row in rows if host in row for name in row]


def make_ca(names: Sequence[str], now: datetime | None = None) -> Pair:
    """A new authority that may sign for `names` only (for a DNS name, its subdomains too)."""
    key = ec.generate_private_key(ec.SECP256R1())
    host = next((n for n in names if not _ip(n) and n != "localhost"), socket.gethostname())
    name = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Atoll"),
        x509.NameAttribute(NameOID.COMMON_NAME, f"Atoll local CA of {host}"[:64]),
    ])
    builder = _builder(name, name, key.public_key(), CA_DAYS, now)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    constraints = x509.NameConstraints(permitted_subtrees=_permitted(names), excluded_subtrees=None)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(constraints, critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(key, (certificate,))


def issue(ca: Pair, names: Sequence[str], now: datetime | None = None) -> Pair:
    """A server certificate for `names` with a new key, signed by `ca`. It expires no later than the authority
    itself."""
    assert isinstance(ca.key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    common = next((n for n in names if not _ip(n) and n != "localhost"), names[0])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = _builder(subject, ca.leaf.subject, key.public_key(), SERVER_DAYS, now, ca.leaf.not_valid_after_utc)
    certificate = (
        builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Pair(key, (certificate,))


def parse_pair(data: bytes) -> Pair | None:
    """A private key and at least one certificate that belongs to it, from one PEM text; None if that is not what it
    holds."""
    try:
        key = serialization.load_pem_private_key(data, None)
        chain = tuple(x509.load_pem_x509_certificates(data))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return Pair(key, chain) if chain and same_key(key, chain[0]) else None


def parse_certificates(data: bytes) -> tuple[x509.Certificate, ...]:
    """Every certificate of a PEM text; empty if there is none."""
    try:
        return tuple(x509.load_pem_x509_certificates(data))
    except ValueError:
        return ()


def same_key(key: PrivateKeyTypes, certificate: x509.Certificate) -> bool:
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm, AttributeError):
        return False


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether `issuer` signed it: checks names and signature, not dates."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def names_of(certificate: x509.Certificate) -> list[str]:
    """Its DNS names (lower case) and addresses. The subject's common name is ignored."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    names = [name.lower() for name in found.get_values_for_type(x509.DNSName)]
    return names + [str(address) for address in found.get_values_for_type(x509.IPAddress)]


def covers(certificate: x509.Certificate, name: str) -> bool:
    """Whether a client that connects to `name` accepts it; the `*` of `*.example.org` stands for one label."""
    held, wanted = names_of(certificate), _normal(name)
    if _ip(wanted):
        return wanted in held
    _, _, rest = wanted.partition(".")
    return wanted in held or (bool(rest) and f"*.{rest}" in held)


def may_issue(ca: x509.Certificate, name: str) -> bool:
    """Whether the authority's name constraints permit `name`."""
    try:
        permitted = ca.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or ()
    except (x509.ExtensionNotFound, ValueError):
        return True
    wanted = _normal(name)
    if (address := _ip(wanted)) is not None:
        networks = [entry.value for entry in permitted if isinstance(entry, x509.IPAddress)]
        return any(address in ipaddress.ip_network(network) for network in networks)
    domains = [entry.value.lower() for entry in permitted if isinstance(entry, x509.DNSName)]
    return any(wanted == domain or wanted.endswith(f".{domain}") for domain in domains)


def days_left(certificate: x509.Certificate, now: datetime | None = None) -> int:
    """Whole days until it expires; negative if it has expired."""
    return (certificate.not_valid_after_utc - (now or datetime.now(UTC))).days


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the whole certificate, as browsers and openssl show it: pairs of hex digits with colons."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def title(name: x509.Name) -> str:
    """A subject or issuer for people, without characters that could disturb a terminal."""
    text = name.rfc4514_string()
    return "".join(c if c.isprintable() else "?" for c in text)[:200] or t("(no name)")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime | None,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    begin = (now or datetime.now(UTC)).replace(microsecond=0) - _EARLY
    end = begin + timedelta(days=days)
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin).not_valid_after(min(end, latest) if latest else end)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )


def _permitted(names: Iterable[str]) -> list[x509.GeneralName]:
    return [
        x509.IPAddress(ipaddress.ip_network(name)) if _ip(name) else x509.DNSName(_normal(name)) for name in names
    ]


def _general(name: str) -> x509.GeneralName:
    address = _ip(name)
    return x509.IPAddress(address) if address else x509.DNSName(_normal(name))


def _normal(name: str) -> str:
    address = _ip(name)
    return str(address) if address else name.lower().rstrip(".")


def _ip(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
