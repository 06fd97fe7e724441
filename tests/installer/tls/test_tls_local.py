"""The local authority: a real client accepts its certificate for this host and for no other, and no cut leaves a half
pair."""

import os
import shutil
import ssl
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from tls_kit import Issuer, connect, pem, tls_server

from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout
from installer.tls import certificates as x
from installer.tls import endpoint as tls_endpoint

NAMES = ["localhost", "127.0.0.1", "::1", "llm.corp.local", "192.0.2.7"]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.at(tmp_path)


def test_a_strict_client_accepts_every_name_and_no_other(layout: Layout) -> None:
    made = tls_endpoint.ensure(layout, NAMES)
    assert (made.source, made.changed, made.new_ca, made.uncovered) == ("local", True, True, ())
    with tls_server(layout.server_key, layout.server_key) as port:
        for name in NAMES:
            assert x.fingerprint(connect(port, name, layout.ca_cert)) == x.fingerprint(
                tls_endpoint.read_public(layout.server_cert)[0])
        for name in ("other.corp.local", "192.0.2.8", "corp.local"):
            with pytest.raises(ssl.SSLCertVerificationError):
                connect(port, name, layout.ca_cert)
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(port, "localhost")  # not trusted without the authority


def test_what_is_written_is_closed_and_has_the_promised_shape(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    for path in (layout.ca_key, layout.server_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"PRIVATE KEY" in path.read_bytes()
    for path in (layout.ca_cert, layout.server_cert):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert b"PRIVATE" not in path.read_bytes()
    (leaf,), (ca,) = tls_endpoint.read_public(layout.server_cert), tls_endpoint.read_public(layout.ca_cert)
    assert isinstance(leaf.public_key(), ec.EllipticCurvePublicKey)
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days <= 825
    assert x.days_left(leaf) > 800
    assert sorted(x.names_of(leaf)) == sorted(NAMES)
    constraints = ca.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert len(constraints.value.permitted_subtrees or []) == len(NAMES)
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_stolen_authority_cannot_pose_as_another_host(layout: Layout, tmp_path: Path) -> None:
    """Openssl enforces the name constraints: what the key signs for others is refused."""
    tls_endpoint.ensure(layout, NAMES)
    stolen = x.parse_pair(layout.ca_key.read_bytes())
    assert stolen is not None
    forged = x.issue(stolen, ["bank.example.com", "203.0.113.9"])
    path = tmp_path / "forged.pem"
    path.write_bytes(forged.key_pem() + forged.chain_pem())
    with tls_server(path, path) as port:
        for name in ("bank.example.com", "203.0.113.9"):
            with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
                connect(port, name, layout.ca_cert)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
def test_openssl_verifies_it_for_the_purpose_of_a_server(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    for extra in (["-verify_hostname", "llm.corp.local"], ["-verify_ip", "192.0.2.7"]):
        command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(layout.ca_cert)]
        subprocess.run([*command, *extra, str(layout.server_cert)], check=True, capture_output=True)


def test_it_is_idempotent(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    before = {path: path.read_bytes() for path, _ in tls_endpoint.planned_files(layout)}
    again = tls_endpoint.ensure(layout, NAMES)
    assert not again.changed
    assert {path: path.read_bytes() for path in before} == before
    layout.ca_key.chmod(0o644)
    assert tls_endpoint.ensure(layout, NAMES).changed
    assert stat.S_IMODE(layout.ca_key.stat().st_mode) == 0o600


def test_a_permitted_name_gets_a_new_certificate_a_strange_one_a_new_authority_only_if_asked_for(
    layout: Layout,
) -> None:
    tls_endpoint.ensure(layout, NAMES)
    ca, server = layout.ca_cert.read_bytes(), layout.server_cert.read_bytes()
    found = tls_endpoint.ensure(layout, [*NAMES, "198.51.100.4"])  # an address that the machine got by itself
    assert (found.changed, found.uncovered) == (False, ("198.51.100.4",))
    below = tls_endpoint.ensure(layout, [*NAMES, "chat.llm.corp.local"])
    assert (below.changed, below.new_ca, below.uncovered) == (True, False, ())
    assert layout.ca_cert.read_bytes() == ca
    assert layout.server_cert.read_bytes() != server
    asked = tls_endpoint.ensure(layout, [*NAMES, "198.51.100.4"], required=["198.51.100.4"])
    assert (asked.changed, asked.new_ca, asked.uncovered) == (True, True, ())
    assert layout.ca_cert.read_bytes() != ca
    with tls_server(layout.server_key, layout.server_key) as port:
        connect(port, "198.51.100.4", layout.ca_cert)


def test_without_names_it_keeps_those_it_has(layout: Layout) -> None:
    assert tls_endpoint.ensure(layout, []).changed
    assert x.covers(tls_endpoint.read_public(layout.server_cert)[0], "localhost")
    assert not tls_endpoint.ensure(layout, []).changed
    layout.server_cert.unlink()
    assert tls_endpoint.ensure(layout, []).changed


def test_what_is_about_to_end_is_made_anew(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    ca = x.parse_pair(layout.ca_key.read_bytes())
    assert ca is not None
    old = x.issue(ca, NAMES, now=datetime.now(UTC) - timedelta(days=800))
    layout.server_key.write_bytes(old.key_pem() + old.chain_pem())
    made = tls_endpoint.ensure(layout, NAMES)
    assert (made.changed, made.new_ca) == (True, False)
    assert x.days_left(tls_endpoint.read_public(layout.server_cert)[0]) > 800
    ending = x.make_ca(NAMES, now=datetime.now(UTC) - timedelta(days=3640))
    short = x.issue(ending, NAMES)
    assert short.leaf.not_valid_after_utc == ending.leaf.not_valid_after_utc  # never outlives its authority
    layout.ca_key.write_bytes(ending.key_pem() + ending.chain_pem())
    assert tls_endpoint.ensure(layout, NAMES).new_ca


def test_renew_makes_a_new_key_under_the_same_authority(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    key, ca = layout.server_key.read_bytes(), layout.ca_cert.read_bytes()
    assert not tls_endpoint.renew(layout, NAMES).new_ca
    assert layout.server_key.read_bytes() != key
    assert layout.ca_cert.read_bytes() == ca
    with pytest.raises(InstallError, match=r"198\.51\.100\.4") as caught:
        tls_endpoint.renew(layout, NAMES, required=["198.51.100.4"])
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--new-ca" in caught.value.hint
    assert tls_endpoint.renew(layout, [*NAMES, "198.51.100.4"]).uncovered == ("198.51.100.4",)
    assert tls_endpoint.renew(layout, NAMES, required=["198.51.100.4"], new_ca=True).new_ca
    found = tls_endpoint.facts(layout)
    assert found is not None
    assert sorted(found["names"]) == sorted([*NAMES, "198.51.100.4"])
    assert found["ca"]["sha256"] == x.fingerprint(tls_endpoint.read_public(layout.ca_cert)[0])


@pytest.mark.parametrize("which", ["ca_key", "server_key"])
def test_a_damaged_key_is_told_and_never_overwritten(layout: Layout, which: str) -> None:
    tls_endpoint.ensure(layout, NAMES)
    path: Path = getattr(layout, which)
    damaged = path.read_bytes()[:200]
    path.write_bytes(damaged)
    with pytest.raises(InstallError, match="damaged") as caught:
        tls_endpoint.ensure(layout, NAMES)
    assert caught.value.exit_code == ExitCode.IO
    assert path.read_bytes() == damaged


def test_a_key_with_another_certificate_is_damaged_too(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    one = x.parse_pair(layout.server_key.read_bytes())
    assert one is not None
    tls_endpoint.renew(layout, NAMES)
    other = x.parse_pair(layout.server_key.read_bytes())
    assert other is not None
    layout.server_key.write_bytes(one.key_pem() + other.chain_pem())
    with pytest.raises(InstallError, match="damaged"):
        tls_endpoint.ensure(layout, NAMES)


def test_lost_or_changed_public_copies_are_made_again(layout: Layout) -> None:
    tls_endpoint.ensure(layout, NAMES)
    good = layout.server_cert.read_bytes()
    layout.ca_cert.unlink()
    layout.server_cert.write_text("nonsense")
    assert tls_endpoint.ensure(layout, NAMES).changed
    assert layout.server_cert.read_bytes() == good
    assert tls_endpoint.read_public(layout.ca_cert)


_LOOP = """
import sys
from installer.base.layout import Layout
from installer.tls import endpoint
layout = Layout.at(sys.argv[1])
names = {names!r}
print("ready", flush=True)
while True:
    endpoint.renew(layout, names, new_ca=True)
"""


def test_killed_at_any_moment_a_whole_pair_is_there(layout: Layout) -> None:
    """Endless renewals, each with a new authority, killed at random moments: there is always a pair that serves, and
    the next run puts everything right."""
    tls_endpoint.ensure(layout, NAMES)
    source = _LOOP.format(names=NAMES)
    for turn in range(8):
        command = [sys.executable, "-c", source, str(layout.prefix)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + 0.013 * turn)
        process.kill()
        process.wait()
        process.stdout.close()
        for path in (layout.server_key, layout.ca_key):
            assert x.parse_pair(path.read_bytes()) is not None, path
        tls_endpoint.ensure(layout, NAMES)
        with tls_server(layout.server_key, layout.server_key) as port:
            connect(port, "llm.corp.local", layout.ca_cert)


def test_an_import_is_left_alone_until_it_is_replaced(layout: Layout, tmp_path: Path) -> None:
    tls_endpoint.ensure(layout, NAMES)
    issuer = Issuer("Corp Issuing CA 3", Issuer("Corp Root"))
    key, leaf = issuer.issue(["llm.corp.local"])
    (tmp_path / "c.pem").write_bytes(pem(leaf, *issuer.chain()))
    (tmp_path / "k.pem").write_bytes(pem(key))
    (tmp_path / "k.pem").chmod(0o600)
    checked = tls_endpoint.check_import(tmp_path / "c.pem", tmp_path / "k.pem", ["llm.corp.local"])
    tls_endpoint.install_import(layout, checked)
    made = tls_endpoint.ensure(layout, NAMES, required=NAMES)
    assert (made.source, made.changed) == ("imported", False)
    assert "192.0.2.7" in made.uncovered
    assert tls_endpoint.ca_file(layout) == layout.server_cert
    with tls_server(layout.server_key, layout.server_key) as port:
        connect(port, "llm.corp.local", data=pem(issuer.root).decode())
    with pytest.raises(InstallError, match="not made here"):
        tls_endpoint.renew(layout, NAMES)
    assert tls_endpoint.renew(layout, NAMES, local=True).source == "local"
    assert tls_endpoint.ca_file(layout) == layout.ca_cert
    with tls_server(layout.server_key, layout.server_key) as port:
        connect(port, "llm.corp.local", layout.ca_cert)


def test_names_of_this_machine() -> None:
    names = tls_endpoint.wanted_names("0.0.0.0", ["LLM.corp.local"])
    assert names[:3] == ["localhost", "127.0.0.1", "::1"]
    assert "llm.corp.local" in names
    assert "0.0.0.0" not in names
    assert tls_endpoint.required_names("10.1.2.3", ["a.b"]) == ["10.1.2.3", "a.b"]
    for bad in ("http://x", "a b", "-a", "x" * 64, "*.corp.local", "a_b"):
        with pytest.raises(InstallError):
            tls_endpoint.wanted_names("0.0.0.0", [bad])


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_place_that_cannot_be_written_is_an_os_error(layout: Layout) -> None:
    layout.prefix.chmod(0o500)
    with pytest.raises(OSError):
        tls_endpoint.ensure(layout, NAMES)
