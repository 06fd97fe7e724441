"""A customer's certificate: accepted if clients will accept it, else refused with a message that helps."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from tls_kit import Issuer, connect, pem, tls_server

from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout
from installer.tls import certificates as x
from installer.tls import endpoint as tls_endpoint

NAME = "llm.corp.local"


class Files:
    """The two files that an operator is sent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = Issuer("Corp Root")
        self.middle = Issuer("Corp Policy CA", self.root)
        self.issuer = Issuer("Corp Issuing CA 3", self.middle)

    def write(self, certificate: bytes, key: bytes, mode: int = 0o600) -> tuple[Path, Path]:
        cert, private = self.directory / "server.crt", self.directory / "server.key"
        cert.write_bytes(certificate)
        private.write_bytes(key)
        private.chmod(mode)
        return cert, private

    def good(self, **options: object) -> tuple[Path, Path]:
        key, leaf = self.issuer.issue([NAME], **options)  # type: ignore[arg-type]
        return self.write(pem(leaf, *self.issuer.chain()), pem(key))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def refused(files: tuple[Path, Path], words: str, *names: str) -> InstallError:
    with pytest.raises(InstallError, match=words) as caught:
        tls_endpoint.check_import(*files, names or [NAME])
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.hint
    assert "PRIVATE" not in str(vars(caught.value)).replace("BEGIN PRIVATE KEY", "")
    return caught.value


def test_a_chain_of_three_serves_clients_that_know_the_root_only(files: Files, tmp_path: Path) -> None:
    layout = Layout.at(tmp_path / "prefix")
    tls_endpoint.install_import(layout, tls_endpoint.check_import(*files.good(), [NAME]))
    assert stat.S_IMODE(layout.server_key.stat().st_mode) == 0o600
    assert b"PRIVATE" not in layout.server_cert.read_bytes()
    assert len(tls_endpoint.read_public(layout.server_cert)) == 3
    with tls_server(layout.server_key, layout.server_key) as port:
        connect(port, NAME, data=pem(files.root.certificate).decode())


@pytest.mark.parametrize("key", [
    ec.generate_private_key(ec.SECP384R1()),
    rsa.generate_private_key(65537, 2048),
    ed25519.Ed25519PrivateKey.generate(),
], ids=["p384", "rsa", "ed25519"])
def test_kinds_of_keys(files: Files, key: object) -> None:
    assert tls_endpoint.check_import(*files.good(key=key), [NAME]).key


def test_weak_keys_are_refused(files: Files) -> None:
    refused(files.good(key=rsa.generate_private_key(65537, 1024)), "type that is not accepted")


def test_the_root_may_be_in_the_file(files: Files) -> None:
    key, leaf = files.issuer.issue([NAME])
    pair = files.write(pem(leaf, *files.issuer.chain(), files.root.certificate), pem(key))
    assert len(tls_endpoint.check_import(*pair, [NAME]).chain) == 4


def test_a_certificate_and_key_that_do_not_belong_together(files: Files) -> None:
    cert, _ = files.good()
    other, _ = files.issuer.issue([NAME])
    files.directory.joinpath("server.key").write_bytes(pem(other))
    refused((cert, files.directory / "server.key"), "does not belong")


def test_the_chain_in_another_order_says_what_should_follow_what(files: Files) -> None:
    key, leaf = files.issuer.issue([NAME])
    first, second = files.issuer.chain()
    refused(files.write(pem(leaf, second, first), pem(key)), "did not issue it")
    error = refused(files.write(pem(first, leaf), pem(key)), "does not come first")
    assert "Corp Issuing CA 3" in error.why
    refused(files.write(pem(leaf, second), pem(key)), "did not issue it")  # one is missing between them


def test_dates(files: Files) -> None:
    refused(files.good(begin=-400, end=-1), "expired")
    refused(files.good(begin=2), "not valid before")


def test_an_expired_issuer(files: Files) -> None:
    key, middle = files.root.issue(["ignored"], begin=-400, end=-1, ca=True)
    issuer = Issuer("Old issuer", files.root)
    issuer.key, issuer.certificate, issuer.name = key, middle, middle.subject
    mine, leaf = issuer.issue([NAME])
    refused(files.write(pem(leaf, middle), pem(mine)), "expired")


def test_names(files: Files) -> None:
    error = refused(files.good(), "does not hold other", "other.corp.local")
    assert NAME in error.why
    tls_endpoint.check_import(*files.good(), [NAME, "127.0.0.1", "localhost"])  # no issuer vouches for loopback
    with pytest.raises(InstallError, match="any name or address of this machine") as caught:
        tls_endpoint.check_import(*files.good())
    assert "--tls-name" in caught.value.hint
    mine = [name for name in x.machine_names() if name not in ("localhost", "127.0.0.1", "::1")]
    key, leaf = files.issuer.issue(mine[:1])
    assert tls_endpoint.check_import(*files.write(pem(leaf, *files.issuer.chain()), pem(key)))
    key, leaf = files.issuer.issue(["*.corp.local"])
    wild = files.write(pem(leaf, *files.issuer.chain()), pem(key))
    assert tls_endpoint.check_import(*wild, ["a.corp.local"])
    refused(wild, "does not hold", "a.b.corp.local")
    refused(wild, "does not hold", "corp.local")
    key, leaf = files.issuer.issue([])
    refused(files.write(pem(leaf, *files.issuer.chain()), pem(key)), "names no host")


@pytest.mark.parametrize("mode, good", [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o602, False)])
def test_a_key_that_everybody_can_reach_is_refused(files: Files, mode: int, good: bool) -> None:
    key, leaf = files.issuer.issue([NAME])
    pair = files.write(pem(leaf, *files.issuer.chain()), pem(key), mode)
    if good:
        assert tls_endpoint.check_import(*pair, [NAME])
    else:
        assert "chmod 600" in refused(pair, "Every user").hint


def test_an_encrypted_key(files: Files) -> None:
    key, leaf = files.issuer.issue([NAME])
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    refused(files.write(pem(leaf), locked), "passphrase")


def test_what_is_not_a_servers_certificate(files: Files) -> None:
    refused(files.good(ca=True), "authority's certificate")
    refused(files.good(uses=[ExtendedKeyUsageOID.CLIENT_AUTH]), "not meant for servers")
    assert tls_endpoint.check_import(*files.good(uses=None), [NAME])
    key, leaf = files.issuer.issue([NAME])
    swapped = files.write(pem(key), pem(leaf))
    refused(swapped, "no private key")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="only openssl still signs with SHA-1")
def test_a_forgeable_signature(files: Files, tmp_path: Path) -> None:
    key, leaf = files.issuer.issue([NAME])
    pair = files.write(pem(leaf), pem(key))
    (tmp_path / "ca.key").write_bytes(pem(files.issuer.key))
    (tmp_path / "ca.crt").write_bytes(pem(files.issuer.certificate))
    commands = [
        ["req", "-new", "-key", pair[1], "-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{NAME}", "-out", "csr"],
        ["x509", "-req", "-in", "csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-sha1", "-out", pair[0],
         "-copy_extensions", "copy"],
    ]
    for command in commands:
        subprocess.run(["openssl", *command], cwd=tmp_path, check=True, capture_output=True)
    refused(pair, "SHA1")


@pytest.mark.parametrize("content", [
    b"", b"\x30\x82\x01\x0a\x02\x82", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"\xff" * 99,
])
def test_garbage(files: Files, content: bytes) -> None:
    key, leaf = files.issuer.issue([NAME])
    refused(files.write(content, pem(key)), "no certificate")
    refused(files.write(pem(leaf), content), "no private key")


def test_paths_that_are_no_files(files: Files, tmp_path: Path) -> None:
    cert, key = files.good()
    refused((tmp_path / "absent", key), "cannot be read")
    refused((cert, tmp_path), "not a regular file")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    refused((cert, fifo), "not a regular file")
    huge = tmp_path / "huge"
    huge.write_bytes(b"x" * (2 << 20))
    huge.chmod(0o600)
    refused((cert, huge), "too large")
