"""Whose bundles an installation accepts: only a named key's, and never again a revoked one's."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installer_kit import Site, Witness
from server_kit import Server

from appliance.cli.secure.trust import _writable
from installer.access import vendor_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import Journal
from installer.base.layout import Layout
from installer.operate.deep_verify.run import verify
from installer.operate.lifecycle import restart
from installer.operate.status import status
from installer.operate.uninstall import uninstall
from offline_bundle import BundleError
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private, new_keypair
from offline_bundle.signing.strict_json import canonical
from offline_bundle.store.ingest import ingest

Bundles = Callable[..., Path]


@pytest.fixture(scope="session")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    """The vendor's new key."""
    return new_keypair(tmp_path_factory.mktemp("keys"), "renewed")


def signed(source: Path, target: Path, keys: KeyPair, **changes: Any) -> Path:
    """The bundle `source`, signed by `keys`, with other values in its manifest."""
    shutil.copytree(source, target)
    manifest = json.loads((target / "bundle.json").read_bytes()) | changes
    text = canonical(manifest)
    (target / "bundle.json").write_bytes(text)
    resources = {f["path"]: f["sha256"] for f in manifest["files"]} | {"bundle.json": hashlib.sha256(text).hexdigest()}
    (target / "model.sig").write_bytes(model_signing.sign(resources, "tiny", load_private(keys.private_path)))
    return target


def refused(code: int, call: Callable[[], object]) -> InstallError:
    with pytest.raises(InstallError) as caught:
        call()
    assert caught.value.exit_code == code, caught.value
    return caught.value


def events(layout: Layout) -> list[str]:
    records, broken = log.read(layout.audit)
    assert broken is None
    return [record["event"] for record in records]


# -- naming a key narrows ---------------------------------------------------------------------------------------------


def test_naming_a_key_leaves_the_installed_ones_out(site: Site, bundle: Bundles, renewed: KeyPair) -> None:
    site.install(bundle(1))
    error = refused(10, lambda: site.install(bundle(2), trust_keys=[renewed.public_path]))
    assert "not trusted here" in error.message
    assert "Nothing was changed" in error.changed
    assert not (site.layout.trust / f"{renewed.fingerprint[:16]}.pub").exists()
    site.install(bundle(2), trust_keys=[])  # unnamed, the installed key counts


def test_what_is_installed_keeps_its_own_key(
    server: Server, bundle: Bundles, signer: KeyPair, renewed: KeyPair, tmp_path: Path
) -> None:
    """A second vendor's model is brought by his key; the first one's stays, by the key that it came with."""
    server.install(bundle(1))
    other = signed(bundle(1), tmp_path / "other", renewed, name="other")
    server.install(other, trust_keys=[renewed.public_path])
    assert {model["key_fingerprint"] for model in status(server.layout, service=server.service)["models"]} == {
        signer.fingerprint, renewed.fingerprint
    }  # fmt: skip
    assert verify(server.layout).outcome == "good"


# -- revoking ---------------------------------------------------------------------------------------------------------


def test_a_revoked_key_verifies_nothing_again(
    site: Site, bundle: Bundles, signer: KeyPair, renewed: KeyPair, tmp_path: Path
) -> None:
    layout = site.layout
    site.install(bundle(1))
    site.install(bundle(2))
    process = site.service.state()
    assert vendor_keys.revoke(layout, signer.fingerprint, "stolen, letter of 3 May")
    assert site.service.state() == process  # what runs goes on
    assert not list(layout.trust.glob("*.pub"))
    assert events(layout)[-1] == "key-revoked"
    assert vendor_keys.revoke(layout, signer.fingerprint, "again") is False
    assert events(layout).count("key-revoked") == 1

    shutil.copy(signer.public_path, layout.trust / "back.pub")  # as an older release or a hand would bring it back
    report = verify(layout)
    assert (report.outcome, report.exit_code) == ("bad", 10)
    assert all("revoked here" in target.error for target in report.targets if target.kind == "model")
    assert "letter of 3 May" in report.targets[-1].error
    seen = status(layout)
    assert not seen["healthy"]
    assert any("was revoked here" in problem["what"] for problem in seen["problems"])
    assert seen["trust"] == {"trusted": [], "revoked": [signer.fingerprint]}
    with pytest.raises(BundleError, match="revoked here") as no:
        ingest(bundle(2), vendor_keys.keyring(layout), tmp_path / "store")
    assert no.value.exit_code == 10
    refused(10, lambda: site.install(bundle(2), trust_keys=[site.key]))
    refused(2, lambda: site.install(bundle(2), trust_keys=[]))
    refused(10, lambda: vendor_keys.trust(layout, site.key))
    refused(10, site.rollback)
    assert site.service.state() == process

    witness = Witness()
    restart(layout, witness, service=site.service)  # a start is the operator's decision, and he is told
    assert any("revoked here" in note for note in witness.notes)

    newer = signed(bundle(2), tmp_path / "newer", renewed, sequence=3)
    site.install(newer, trust_keys=[renewed.public_path])  # the way out, although the old key file is still there
    assert verify(layout).outcome == "good"  # nothing of the old key is left, since no way leads back to it
    assert status(layout)["healthy"]


def test_the_same_bundle_signed_by_a_new_key_replaces_the_stored_one(
    site: Site, bundle: Bundles, signer: KeyPair, renewed: KeyPair, tmp_path: Path
) -> None:
    site.install(bundle(1))
    vendor_keys.revoke(site.layout, signer.fingerprint, "stolen")
    again = signed(bundle(1), tmp_path / "again", renewed)
    assert (again / "bundle.json").read_bytes() == (bundle(1) / "bundle.json").read_bytes()
    site.install(again, trust_keys=[renewed.public_path])
    assert verify(site.layout).outcome == "good"


def test_a_kept_model_of_a_revoked_key_must_be_replaced_too(
    server: Server, bundle: Bundles, signer: KeyPair, renewed: KeyPair, tmp_path: Path
) -> None:
    server.install(bundle(1))
    vendor_keys.revoke(server.layout, signer.fingerprint, "stolen")
    other = signed(bundle(1), tmp_path / "other", renewed, name="other")
    error = refused(10, lambda: server.install(other, trust_keys=[renewed.public_path]))
    assert "revoked here" in error.message
    server.install(other, trust_keys=[renewed.public_path], remove=["tiny"])
    assert [target for target in verify(server.layout).targets if target.exit_code] == []


def test_a_key_revoked_while_an_install_copies(site: Site, bundle: Bundles, signer: KeyPair) -> None:
    site.install(bundle(1))

    class Revoking(Witness):
        def step(self, name: str, status: str, detail: str = "") -> None:
            super().step(name, status, detail)
            if (name, status) == ("stage", "begin"):
                vendor_keys.revoke(site.layout, signer.fingerprint, "stolen while it was installed")

    for named in ([], [site.key]):
        error = refused(10, lambda keys=named: site.install(bundle(2), witness=Revoking(), trust_keys=keys))
        shutil.copy(signer.public_path, site.layout.trust / "vendor.pub")
        site.layout.revoked.unlink()
        assert "What runs was not touched" in error.changed
    assert site.history.committed is not None
    assert site.history.committed["bundle"]["sequence"] == 1


def test_neither_upgrade_nor_rollback_nor_uninstall_brings_a_key_back(
    site: Site, bundle: Bundles, renewed: KeyPair
) -> None:
    layout = site.layout
    site.install(bundle(1))
    vendor_keys.trust(layout, renewed.public_path)
    site.install(bundle(2))
    vendor_keys.revoke(layout, renewed.fingerprint, "lost")
    before = layout.revoked.read_bytes()
    site.rollback()  # its snapshot is from when the key was trusted
    site.install(bundle(2))
    uninstall(layout, purge=False, service=site.service)
    assert layout.revoked.read_bytes() == before
    assert not (layout.trust / f"{renewed.fingerprint[:16]}.pub").exists()
    site.install(bundle(2))
    assert renewed.fingerprint in vendor_keys.revoked(layout)
    uninstall(layout, purge=True, service=site.service)
    assert not layout.etc.exists()


# -- changing the keys ------------------------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout.at(tmp_path / "prefix")
    for directory, mode in made.directories():
        fs.make_dir(directory, mode)
    return made


def _revoke(prefix: Path, fingerprint: str) -> None:
    vendor_keys.revoke(Layout.at(prefix), fingerprint, "two at once")


def _add(prefix: Path, key: Path) -> None:
    with contextlib.suppress(InstallError):  # it was revoked before
        vendor_keys.trust(Layout.at(prefix), key)


def test_two_operators(layout: Layout, renewed: KeyPair) -> None:
    """No revocation is lost, and a key that one operator adds while another revokes it ends up revoked."""
    start = multiprocessing.get_context("fork").Process
    prints = [hashlib.sha256(bytes([n])).hexdigest() for n in range(6)] + [renewed.fingerprint]
    work = [start(target=_revoke, args=(layout.prefix, name)) for name in prints]
    work += [start(target=_add, args=(layout.prefix, renewed.public_path)) for _ in range(4)]
    for process in work:
        process.start()
    for process in work:
        process.join(60)
    assert [process.exitcode for process in work] == [0] * len(work)
    assert set(vendor_keys.revoked(layout)) == set(prints)
    assert vendor_keys.installed_keys(layout) == []
    assert not list(layout.trust.glob("*.pub"))
    assert events(layout).count("key-revoked") == len(prints)
    assert [path.name for path in layout.trust.iterdir()] == ["revoked.json"]
    assert layout.revoked.stat().st_mode & 0o777 == 0o644


def damage_list(how: str, layout: Layout, outside: Path) -> None:
    path = layout.revoked
    good = path.read_bytes()
    if how == "cut":
        path.write_bytes(good[:-20])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "not a list":
        path.write_text('{"schema_version": 1, "revoked": {}}')
    elif how == "odd fingerprint":
        path.write_text('{"schema_version": 1, "revoked": [{"fingerprint": "x"}]}')
    elif how == "of the future":
        path.write_bytes(good.replace(b'"schema_version": 1', b'"schema_version": 2'))
    elif how == "huge":
        path.write_bytes(good + b" " * (2 << 20))
    elif how == "nested":
        path.write_bytes(b"[" * 100_000)
    elif how == "a link":
        path.rename(outside)
        path.symlink_to(outside)
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "writable":
        path.chmod(0o666)
    elif how == "directory writable":
        layout.trust.chmod(0o777)
    elif how == "of another user":
        os.chown(path, 65534, 65534)
    elif how == "directory is a link":
        layout.trust.rename(outside)
        layout.trust.symlink_to(outside)


DAMAGES = ("cut", "empty", "not a list", "odd fingerprint", "of the future", "huge", "nested", "a link", "a pipe",
           "writable", "directory writable", "of another user", "directory is a link")  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_list_that_cannot_be_relied_on_is_not_taken_for_an_empty_one(
    how: str, layout: Layout, signer: KeyPair, tmp_path: Path
) -> None:
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("chown needs root")
    vendor_keys.trust(layout, signer.public_path)
    vendor_keys.revoke(layout, "ab" * 32, "an old one")
    damage_list(how, layout, tmp_path / "outside")
    error = refused(ExitCode.IO, lambda: vendor_keys.keyring(layout))
    assert "cannot be relied on" in error.message
    assert str(layout.trust) in error.message
    with pytest.raises((InstallError, OSError)):
        vendor_keys.revoke(layout, "cd" * 32, "not over a damaged list")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 200, b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"]
)
def test_a_key_file_that_is_none_is_named_and_can_be_removed(content: bytes, layout: Layout, signer: KeyPair) -> None:
    vendor_keys.trust(layout, signer.public_path)
    (layout.trust / "odd.pub").write_bytes(content)
    error = refused(ExitCode.UNTRUSTED, lambda: vendor_keys.keyring(layout))
    assert "odd.pub" in error.message
    assert "atoll trust remove odd.pub" in error.hint
    vendor_keys.remove(layout, "odd.pub")
    assert len(vendor_keys.keyring(layout)) == 1


def test_a_key_that_anybody_may_write_to_and_one_that_is_a_link(
    layout: Layout, signer: KeyPair, tmp_path: Path
) -> None:
    shutil.copy(signer.public_path, tmp_path / "elsewhere.pub")
    (layout.trust / "link.pub").symlink_to(tmp_path / "elsewhere.pub")
    assert vendor_keys.installed_keys(layout) == []
    shutil.copy(signer.public_path, layout.trust / "vendor.pub")
    assert vendor_keys.installed_keys(layout) == [layout.trust / "vendor.pub"]
    (layout.trust / "vendor.pub").chmod(0o646)
    assert "chmod go-w" in refused(ExitCode.UNTRUSTED, lambda: vendor_keys.installed_keys(layout)).message


def test_which_key_is_meant(layout: Layout, signer: KeyPair) -> None:
    vendor_keys.trust(layout, signer.public_path)
    one, two = "12345678" + "a" * 56, "12345678" + "b" * 56
    vendor_keys.revoke(layout, one, "first")
    vendor_keys.revoke(layout, two, "second")
    assert "2 keys" in refused(2, lambda: vendor_keys.find(layout, "12345678")).message
    assert vendor_keys.find(layout, "1234 5678 aa") == one
    assert vendor_keys.find(layout, signer.fingerprint[:8].upper()) == signer.fingerprint
    assert vendor_keys.find(layout, "ff" * 32) == "ff" * 32  # never here, and all of it given
    for unknown in (signer.fingerprint[:7], "ffffffff", "", "../vendor", "ff" * 33):
        refused(2, lambda named=unknown: vendor_keys.find(layout, named))
    refused(2, lambda: vendor_keys.remove(layout, "ff" * 32))


# -- the command ------------------------------------------------------------------------------------------------------


def atoll(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **more)


def test_the_command(site: Site, bundle: Bundles, signer: KeyPair, renewed: KeyPair) -> None:
    site.install(bundle(1))
    at = ("--prefix", site.prefix)
    listed = json.loads(atoll("trust", "list", *at, "--json").stdout)["keys"]
    assert [(key["fingerprint"], key["state"], key["signed"]) for key in listed] == [
        (signer.fingerprint, "trusted", ["tiny 1.1.0"])
    ]
    words = listed[0]["words"]
    assert len(words.split()) == 32
    assert atoll("trust", "list", *at).stdout.split()[1] == signer.fingerprint[:4]

    wrong = atoll("trust", "add", renewed.public_path, "--fingerprint", signer.fingerprint, *at)
    assert wrong.returncode == 10
    assert atoll("trust", "add", renewed.public_path, "--fingerprint", "abcd", *at).returncode == 2
    assert atoll("trust", "add", renewed.private_path, *at).returncode == 10
    assert atoll("trust", "add", site.prefix / "none.pub", *at).returncode == 13
    made = atoll("trust", "add", renewed.public_path, "--fingerprint", renewed.fingerprint[:32], *at, "--json")
    assert json.loads(made.stdout) == {"fingerprint": renewed.fingerprint, "changed": True}

    away = atoll("trust", "remove", renewed.fingerprint[:8], *at, "--json")
    assert json.loads(away.stdout)["trusted_keys_left"] == 1
    assert atoll("trust", "remove", renewed.fingerprint[:8], *at).returncode == 2

    half = " ".join(words.split()[:5])
    assert atoll("trust", "revoke", half, "--reason", "", "--yes", *at).returncode == 2
    asked = atoll("trust", "revoke", half, "--reason", "stolen", *at)
    assert asked.returncode == 2  # nobody there to confirm
    assert signer.fingerprint not in vendor_keys.revoked(site.layout)
    done = atoll("trust", "revoke", half, "--reason", "stolen", "--yes", *at)
    assert done.returncode == 0, done.stderr
    assert "atoll verify" in done.stdout
    assert "No trusted key is left" in done.stdout
    assert atoll("trust", "add", signer.public_path, *at).returncode == 10
    assert atoll("verify", *at).returncode == 10
    assert "stolen" in atoll("trust", "list", *at).stdout
    here = {**os.environ, "ATOLL_PREFIX": str(site.prefix)}
    revoked = atoll("bundle", "verify", bundle(1), "--key", signer.public_path, env=here)
    assert revoked.returncode == 10
    assert "revoked here" in revoked.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_may_look_and_not_touch(signer: KeyPair) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        layout = Layout.at(Path(place) / "p")
        for directory, mode in layout.directories():
            fs.make_dir(directory, mode)
        vendor_keys.trust(layout, signer.public_path)
        _journalled(layout)
        with pytest.raises(InstallError, match=r"trusted keys of .* belong to another user"):
            _as_nobody(lambda: _writable(layout.prefix))
        assert _as_nobody(lambda: len(vendor_keys.keyring(layout))) == 1
        assert _writable(layout.prefix) == layout


def _journalled(layout: Layout) -> None:
    journal = Journal("test")
    journal.open(layout.journal)
    journal.add("run")
    journal.close()
    for path in (layout.state, layout.journal):
        path.chmod(0o755)  # so that nothing but the keys stands in the way


def _as_nobody(call: Callable[[], Any]) -> Any:
    os.seteuid(65534)
    try:
        return call()
    finally:
        os.seteuid(0)
