"""Signing keys: ECDSA P-256 in PEM. People compare a key's fingerprint by phone or on paper.

A private key is written once, mode 0600, and is only ever read to sign; nothing here prints or logs it.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from offline_bundle import limits
from offline_bundle.errors import MISSING, SPACE_IO, UNTRUSTED, USAGE, BundleError
from offline_bundle.on_medium import lies_on
from offline_bundle.text import reason, t

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True)
class KeyPair:
    """Where a new key pair was written, and its fingerprint."""

    private_path: Path
    public_path: Path
    fingerprint: str


@dataclass(frozen=True)
class PublicKey:
    """A loaded P-256 public key; `fingerprint` is the hint that signatures made by its private key carry."""

    key: ec.EllipticCurvePublicKey
    fingerprint: str
    path: Path | None = None


@dataclass(frozen=True, eq=False)
class Keyring(Sequence[Path]):
    """Trusted key files, and the keys that were revoked: fingerprint → when and why.

    Can be passed wherever a sequence of key files is expected.
    """

    files: tuple[Path, ...]
    revoked: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return self.files[index]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.files)


class TrustedKeys(dict[str, PublicKey]):
    """Loaded keys by fingerprint; `revoked` as in `Keyring`. No key is in both."""

    def __init__(self, keys: Mapping[str, PublicKey], revoked: Mapping[str, str]) -> None:
        super().__init__(keys)
        self.revoked = revoked


def new_keypair(directory: Path, name: str, *, passphrase: bytes | None = None) -> KeyPair:
    """Create `directory/name.key` (0600; PKCS#8, encrypted when `passphrase` is given) and `directory/name.pub`.

    The directory is created 0700 if absent. Raises BundleError: usage (bad name, or either file exists:
    a key is never overwritten), space/IO.
    """
    if not _NAME.match(name):
        raise BundleError(
            t("A key's name may use letters, digits, '.', '_' and '-', at most 64."), t("Choose another --name."), USAGE
        )
    private_path, public_path = directory / f"{name}.key", directory / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    private_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    public_pem = _spki_pem(key.public_key())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (private_path, public_path):
            if os.path.lexists(path):
                raise FileExistsError(path)
        _write_new(private_path, private_pem, 0o600)
        _write_new(public_path, public_pem, 0o644)
    except FileExistsError as e:
        raise BundleError(
            t("A key named '{name}' is already in {directory}; keys are never overwritten.", name=name,
              directory=directory),
            t("Choose another --name, or move the old pair away."),
            USAGE,
        ) from e
    except OSError as e:
        raise BundleError(
            t("The key could not be written to {directory}: {why}.", directory=directory, why=reason(e)),
            t("Choose a directory that you can write to."),
            SPACE_IO,
        ) from e
    return KeyPair(private_path, public_path, hashlib.sha256(public_pem).hexdigest())


def fingerprint(pem: bytes | str) -> str:
    """SHA-256 (hex) of the public key's SubjectPublicKeyInfo PEM text: the `hint` of an OMS signature.

    The PEM is re-encoded first, so comments or line endings around it do not change the result.
    """
    return _parse_public(pem.encode() if isinstance(pem, str) else pem, t("the given text")).fingerprint


def load_public(path: Path) -> PublicKey:
    """Read a P-256 public key in PEM. Raises BundleError: missing, or untrusted (not a P-256 public key)."""
    return _parse_public(_read_key_file(path, t("public key")), str(path), path)


def load_trusted(paths: Sequence[Path], bundle: Path) -> TrustedKeys:
    """Load the pinned keys by fingerprint, except revoked ones; refuse a key inside the bundle that it is to verify.

    Raises BundleError: usage (no key), untrusted, missing.
    """
    revoked = paths.revoked if isinstance(paths, Keyring) else {}
    if not paths and not revoked:
        raise BundleError(
            t("No trusted key was given, so nothing can be verified."),
            t("Give the vendor's public key, obtained through a separate channel, not from the bundle."),
            USAGE,
        )
    root = bundle.resolve()
    trusted: dict[str, PublicKey] = {}
    for path in paths:
        if path.resolve().is_relative_to(root):
            raise BundleError(
                t("The key {path} lies inside the bundle; whoever changed the bundle could have changed it too.",
                  path=path),
                t("Use the vendor's key that you obtained separately, and compare its fingerprint."),
                UNTRUSTED,
            )
        key = load_public(path)
        if key.fingerprint not in revoked:
            trusted[key.fingerprint] = key
    return TrustedKeys(trusted, revoked)


def refuse_from_medium(paths: Sequence[Path], medium: Path) -> None:
    """Raise BundleError (untrusted) for a key that comes from the medium that it is to verify, or from its disk.

    For keys that a person names. Installed keys may well share a disk with a store of models.
    """
    for path in paths:
        if lies_on(path.expanduser().absolute(), medium):
            raise BundleError(
                t("The key {path} lies on the medium; whoever changed the medium could have changed it too.",
                  path=path),
                t("Use the vendor's key that you obtained separately, and compare its fingerprint."),
                UNTRUSTED,
            )


def load_private(path: Path, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Read a P-256 private key in PEM. Raises BundleError: missing, usage (wrong kind, permissions, passphrase)."""
    pem = _read_key_file(path, t("private key"), private=True)
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except TypeError as e:
        if passphrase is None:
            raise BundleError(
                t("The private key {path} is encrypted.", path=path), t("Give its passphrase."), USAGE
            ) from e
        raise BundleError(
            t("The private key {path} is not encrypted.", path=path), t("Leave the passphrase out."), USAGE
        ) from e
    except (ValueError, UnsupportedAlgorithm) as e:
        raise BundleError(
            t("{path} could not be read as a private key: it is not PEM, or the passphrase is wrong.", path=path),
            t("Check the file and the passphrase; make a new pair with: atoll keys new"),
            USAGE,
        ) from e
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BundleError(t("{path} is not an ECDSA P-256 key.", path=path), t("Make one with: atoll keys new"), USAGE)
    return key


def is_encrypted(path: Path) -> bool:
    """Whether the private key file needs a passphrase (so that a front end knows to ask)."""
    return b"ENCRYPTED" in _read_key_file(path, "private key", private=True)


def public_of(key: ec.EllipticCurvePrivateKey) -> PublicKey:
    """The public half, with its fingerprint."""
    return _wrap(key.public_key(), None)


def public_pem(key: PublicKey) -> bytes:
    """The key's PEM text, whose SHA-256 is its fingerprint."""
    return _spki_pem(key.key)


def _wrap(key: ec.EllipticCurvePublicKey, path: Path | None) -> PublicKey:
    return PublicKey(key, hashlib.sha256(_spki_pem(key)).hexdigest(), path)


def _spki_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _parse_public(pem: bytes, where: str, path: Path | None = None) -> PublicKey:
    hint = t("Expected an ECDSA P-256 public key in PEM ('-----BEGIN PUBLIC KEY-----'), as 'atoll keys new' writes "
             "it.")
    if b"PRIVATE KEY" in pem:
        raise BundleError(t("{where} is a private key where a public key is expected.", where=where), hint, UNTRUSTED)
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as e:
        raise BundleError(t("{where} is not a public key.", where=where), hint, UNTRUSTED) from e
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BundleError(t("{where} is a public key, but not an ECDSA P-256 key.", where=where), hint, UNTRUSTED)
    return _wrap(key, path)


def _read_key_file(path: Path, what: str, *, private: bool = False) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise BundleError(
            t("The {what} {path} cannot be opened: {why}.", what=what, path=path, why=reason(e)),
            t("Check the path and its permissions."),
            MISSING,
        ) from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limits.MAX_KEY_FILE:
            raise BundleError(t("{path} is not a key file.", path=path), t("Give the path of a PEM file."), USAGE)
        if private and info.st_mode & 0o077:
            raise BundleError(
                t("The private key {path} can be read by other users (mode {mode:04o}).", path=path,
                  mode=stat.S_IMODE(info.st_mode)),
                t("Run: chmod 600 {path}", path=path),
                USAGE,
            )
        return os.read(fd, limits.MAX_KEY_FILE)
    finally:
        os.close(fd)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Create `path` with exactly `mode` whatever the umask; fails if it exists; durable on return."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
        f.flush()
        os.fchmod(fd, mode)
        os.fsync(fd)
