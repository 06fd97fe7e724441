"""Keys: written once, 0600, only P-256, never shown."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_kit import Made, build, make_model, oms_accepts, refused
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from offline_bundle import verify_bundle
from offline_bundle.signing import keys
from offline_bundle.signing.keys import KeyPair

PEM = serialization.Encoding.PEM
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo
PKCS8 = serialization.PrivateFormat.PKCS8
PLAIN = serialization.NoEncryption()

OTHER_KINDS: dict[str, Callable[[], ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey]] = {
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


def test_a_new_pair(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        pair = keys.new_keypair(tmp_path / "a" / "keys", "vendor")
    finally:
        os.umask(old)
    assert stat.S_IMODE(pair.private_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(pair.private_path.parent.stat().st_mode) == 0o700
    assert pair.fingerprint == hashlib.sha256(pair.public_path.read_bytes()).hexdigest()
    assert pair.fingerprint == keys.load_public(pair.public_path).fingerprint
    assert pair.fingerprint == keys.public_of(keys.load_private(pair.private_path)).fingerprint


def test_the_fingerprint_ignores_how_the_pem_is_dressed(vendor: KeyPair) -> None:
    text = vendor.public_path.read_text()
    assert keys.fingerprint(text) == vendor.fingerprint
    assert keys.fingerprint("a comment\n" + text.replace("\n", "\r\n") + "\n\n") == vendor.fingerprint


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    pair = keys.new_keypair(tmp_path, "vendor")
    before = pair.private_path.read_bytes()
    refused(2, "never overwritten", lambda: keys.new_keypair(tmp_path, "vendor"))
    assert pair.private_path.read_bytes() == before
    (tmp_path / "half.pub").symlink_to("/nonexistent")
    refused(2, "never overwritten", lambda: keys.new_keypair(tmp_path, "half"))
    assert not (tmp_path / "half.key").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a\n", "é", "x" * 65])
def test_odd_names(name: str, tmp_path: Path) -> None:
    refused(2, "name", lambda: keys.new_keypair(tmp_path, name))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_keys_are_refused(kind: str, tmp_path: Path) -> None:
    key = OTHER_KINDS[kind]()
    private, public = tmp_path / "x.key", tmp_path / "x.pub"
    private.write_bytes(key.private_bytes(PEM, PKCS8, PLAIN))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(PEM, SPKI))
    refused(10, "not an ECDSA P-256", lambda: keys.load_public(public))
    refused(2, "P-256", lambda: keys.load_private(private))


def test_a_private_key_where_a_public_one_belongs_is_not_echoed(vendor: KeyPair) -> None:
    error = refused(10, "private key", lambda: keys.load_public(vendor.private_path))
    assert vendor.private_path.read_text().splitlines()[1] not in str(error)


def test_a_private_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    pair = keys.new_keypair(tmp_path, "vendor")
    pair.private_path.chmod(0o640)
    error = refused(2, "other users", lambda: keys.load_private(pair.private_path))
    assert "chmod 600" in error.hint


def test_unreadable_things_are_no_keys(tmp_path: Path) -> None:
    refused(13, "cannot be opened", lambda: keys.load_public(tmp_path / "absent"))
    refused(2, "not a key file", lambda: keys.load_public(tmp_path))
    refused(2, "not a key file", lambda: keys.load_public(Path("/dev/zero")))
    os.mkfifo(tmp_path / "fifo")
    refused(2, "not a key file", lambda: keys.load_public(tmp_path / "fifo"))
    (tmp_path / "junk").write_bytes(b"\0" * 1000)
    refused(10, "not a public key", lambda: keys.load_public(tmp_path / "junk"))


def test_an_encrypted_key_signs_with_its_passphrase_only(tmp_path: Path) -> None:
    pair = keys.new_keypair(tmp_path / "keys", "vendor", passphrase=b"correct horse")
    assert keys.is_encrypted(pair.private_path)
    model = make_model(tmp_path / "src", kib=1)
    refused(2, "encrypted", lambda: build(model, tmp_path / "out", pair))
    refused(2, "passphrase is wrong", lambda: build(model, tmp_path / "out", pair, passphrase=b"wrong"))
    made = Made(build(model, tmp_path / "out", pair, passphrase=b"correct horse"), pair, model)
    verify_bundle(made.path, made.trusted)
    assert oms_accepts(made.path, pair.public_path)
