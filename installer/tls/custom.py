"""A customer's certificate and key, checked before anything is written. Each refusal says what to ask for."""

import itertools
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, reason, t
from installer.tls import certificates as x
from installer.tls.certificates import Pair

_LIMIT = 1 << 20
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_WEAK = ("md5", "sha1")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_import(cert: Path, key: Path, names: Sequence[str] = ()) -> Pair:
    """The pair, ready to be installed.

    `names`: what clients will use (tls.required_names). The certificate must hold each of them; if there are none, at
    least one name or address of this machine. Raises InstallError (usage). Writes nothing.
    """
    private = _read_key(key)
    chain = _read_chain(cert)
    _check_order(chain, private, cert, key)
    now = datetime.now(UTC)
    for certificate in chain:
        _check_dates(certificate, now)
        _check_signature(certificate)
    _check_leaf(chain[0])
    _check_names(chain[0], names)
    return Pair(private, chain)


def _read_key(path: Path) -> PrivateKeyTypes:
    data, mode = _read(path, t("private key"))
    if mode & 0o007:
        raise _refused(
            t("Every user of this machine can reach the private key {path} (mode {mode:04o}).", path=path,
              mode=stat.S_IMODE(mode)),
            t("Others may have copied it. If so, ask for a new certificate."),
            t("Restrict it: chmod 600 {path}", path=path),
        )
    try:
        key = serialization.load_pem_private_key(data, None)
    except TypeError:
        raise _refused(
            t("The private key {path} is protected by a passphrase.", path=path),
            t("The service starts by itself after a reboot, when nobody is there to type it."),
            t("Remove the passphrase: (umask 077; openssl pkey -in {path} -out server-plain.key)", path=path),
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise _refused(
            t("{path} holds no private key in PEM ('-----BEGIN PRIVATE KEY-----').", path=path),
            "",
            t("From a .pfx or .p12 file: (umask 077; openssl pkcs12 -in FILE -nodes -nocerts -out server.key)"),
        ) from None
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= 2048:
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, _CURVES):
        return key
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    raise _refused(
        t("The private key {path} is of a type that is not accepted.", path=path),
        "",
        t("Use ECDSA P-256, P-384 or P-521, Ed25519, or RSA with 2048 bits or more."),
    )


def _read_chain(path: Path) -> tuple[x509.Certificate, ...]:
    data, _ = _read(path, "certificate")
    chain = x.parse_certificates(data)
    if not chain:
        raise _refused(
            t("{path} holds no certificate in PEM ('-----BEGIN CERTIFICATE-----').", path=path),
            "",
            t("From DER: openssl x509 -inform der -in FILE -out server.crt. From a .pfx or .p12 file: openssl pkcs12 "
              "-in FILE -nokeys -out server.crt"),
        )
    return chain


def _check_order(chain: tuple[x509.Certificate, ...], key: PrivateKeyTypes, cert: Path, key_path: Path) -> None:
    if not x.same_key(key, chain[0]):
        if any(x.same_key(key, other) for other in chain[1:]):
            raise _refused(
                t("In {cert} the server's certificate does not come first.", cert=cert),
                t("The first is {title}.", title=x.title(chain[0].subject)),
                t("Order the file: server, then its issuer, then that one's issuer."),
            )
        raise _refused(
            t("The key {key_path} does not belong to the certificate {cert}.", key_path=key_path, cert=cert),
            t("The certificate is for {title}.", title=x.title(chain[0].subject)),
            t("Give the key with which the certificate was requested."),
        )
    for below, above in itertools.pairwise(chain):
        if not x.issued_by(below, above):
            raise _refused(
                t("The chain in {cert} is not in order: {title} is followed by {title2}, which did not issue it.",
                  cert=cert, title=x.title(below.subject), title2=x.title(above.subject)),
                t("Its issuer is {title}.", title=x.title(below.issuer)),
                t("Order the file: server, then its issuer, then that one's issuer. The root may be left out."),
            )


def _check_dates(certificate: x509.Certificate, now: datetime) -> None:
    who = x.title(certificate.subject)
    if certificate.not_valid_after_utc <= now:
        raise _refused(
            t("The certificate of {who} expired at {not_valid_after_utc:%Y-%m-%d %H:%M} UTC.", who=who,
              not_valid_after_utc=certificate.not_valid_after_utc),
            t("This machine's clock says {now:%Y-%m-%d %H:%M} UTC.", now=now),
            t("Ask its issuer for a new one, or set the clock if it is wrong."),
        )
    if certificate.not_valid_before_utc > now:
        raise _refused(
            t("The certificate of {who} is not valid before {not_valid_before_utc:%Y-%m-%d %H:%M} UTC.", who=who,
              not_valid_before_utc=certificate.not_valid_before_utc),
            t("This machine's clock says {now:%Y-%m-%d %H:%M} UTC.", now=now),
            t("Set the clock if it is wrong."),
        )


def _check_signature(certificate: x509.Certificate) -> None:
    try:
        hashing = certificate.signature_hash_algorithm
    except UnsupportedAlgorithm:
        hashing = None
    root = certificate.subject == certificate.issuer  # nobody relies on the signature of a root
    if not root and hashing is not None and hashing.name in _WEAK:
        raise _refused(
            t("The certificate of {title} is signed with {upper}.", title=x.title(certificate.subject),
              upper=hashing.name.upper()),
            t("Clients refuse it: such signatures can be forged."),
            t("Ask its issuer for one that is signed with SHA-256 or better."),
        )


def _check_leaf(leaf: x509.Certificate) -> None:
    who = x.title(leaf.subject)
    try:
        if leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise _refused(
                t("{who} is an authority's certificate, not a server's.", who=who), "", t("Give the server's own.")
            )
    except x509.ExtensionNotFound:
        pass
    except ValueError as error:
        raise _refused(
            t("The certificate of {who} cannot be read: {error}.", who=who, error=error), "", t("Ask its issuer.")
        ) from None
    try:
        uses = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if ExtendedKeyUsageOID.SERVER_AUTH not in uses and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in uses:
        raise _refused(
            t("The certificate of {who} is not meant for servers.", who=who),
            t("Its extended key usage lacks 'TLS Web Server Authentication'."),
            t("Ask its issuer for a server certificate."),
        )


def _check_names(leaf: x509.Certificate, names: Sequence[str]) -> None:
    held = x.names_of(leaf)
    if not held:
        raise _refused(
            t("The certificate names no host (it has no subject alternative names)."),
            t("Clients have ignored the common name for years."),
            t("Ask its issuer for a certificate with subject alternative names."),
        )
    asked = [name for name in names if name not in _LOOPBACK]  # no issuer signs for those
    missing = [name for name in asked if not x.covers(leaf, name)]
    reachable = [name for name in x.machine_names() if name not in _LOOPBACK]
    if missing or (not asked and not any(x.covers(leaf, name) for name in reachable)):
        what = joined(missing) if missing else t("any name or address of this machine")
        holds = t("It holds {names}.", names=_some(held))
        here = t("This machine is {names}.", names=_some(reachable))
        raise _refused(
            t("The certificate does not hold {what}.", what=what),
            holds if missing else joined([holds, here], " "),
            t("Ask its issuer for a certificate with the names that clients will use; or say which of its names they "
              "will use: --tls-name NAME"),
        )


def _some(names: Sequence[str]) -> str:
    listed = joined(names[:8])
    return listed if len(names) <= 8 else t("{names} and {count} more", names=listed, count=len(names) - 8)


def _read(path: Path, what: str) -> tuple[bytes, int]:
    try:
        data, info = fs.read_regular(path, _LIMIT)
    except OSError as error:
        raise _refused(
            t("The {what} {path} cannot be read: {why}.", what=what, path=path, why=reason(error)),
            "",
            t("Check the path."),
        ) from None
    if info.st_size > _LIMIT:
        raise _refused(
            t("{path} is too large to be a {what} file.", path=path, what=what), "", t("Give the path of a PEM file.")
        )
    return data, info.st_mode


def _refused(message: str, why: str, hint: str) -> InstallError:
    return InstallError(
        message, exit_code=ExitCode.USAGE, why=why, changed=t("Nothing was changed; no certificate was replaced."),
        hint=hint,
    )
