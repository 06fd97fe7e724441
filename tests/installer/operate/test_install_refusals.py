"""What is refused, with which exit code, and that a refusal leaves no trace."""

import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from installer_kit import SAMPLES, Site, Witness, tree
from typer.testing import CliRunner

from appliance.cli.app import app
from appliance.cli.install import install as install_command
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.lock import InstallLock
from installer.decide.answers import read_answers
from installer.preflight.model_needs import read_needs
from offline_bundle.signing.keys import new_keypair

Bundles = Callable[..., Path]


def _files(prefix: Path) -> set[str]:
    """Without the samples that a running service takes."""
    return {path for path in tree(prefix) if not path.startswith(SAMPLES)}


def refused(site: Site, bundle: Path, exit_code: int, **options: object) -> InstallError:
    """The install must fail with this code and change nothing at all."""
    before = _files(site.prefix)
    journal = site.layout.journal.read_bytes() if site.layout.journal.exists() else b""
    with pytest.raises(InstallError) as caught:
        site.install(bundle, **options)
    assert caught.value.exit_code == exit_code, caught.value
    assert caught.value.message
    assert caught.value.hint
    assert _files(site.prefix) == before
    assert (site.layout.journal.read_bytes() if site.layout.journal.exists() else b"") == journal
    return caught.value


def copy_of(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "medium" / bundle.name))


def test_tampered_weights(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    medium = copy_of(bundle(), tmp_path)
    weights = medium / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    refused(site, medium, ExitCode.CONTENT_MISMATCH)


def test_tampered_medium_after_an_install_leaves_the_store_alone(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    site.install(bundle(1))
    medium = copy_of(bundle(2), tmp_path)
    (medium / "model/extra.safetensors").write_bytes(b"x")
    refused(site, medium, ExitCode.CONTENT_MISMATCH)
    assert site.serving()["mode"] == "good"


def test_changed_manifest(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    medium = copy_of(bundle(), tmp_path)
    manifest = medium / "bundle.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes().replace(b'"sequence":1', b'"sequence":9'))
    refused(site, medium, ExitCode.CONTENT_MISMATCH)


def test_unsigned(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    medium = copy_of(bundle(), tmp_path)
    (medium / "model.sig").unlink()
    refused(site, medium, ExitCode.UNTRUSTED)


def test_signed_by_a_stranger(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    stranger = new_keypair(tmp_path, "stranger")
    refused(site, bundle(), ExitCode.UNTRUSTED, trust_keys=[stranger.public_path])


def test_no_trusted_key(site: Site, bundle: Bundles) -> None:
    error = refused(site, bundle(), ExitCode.USAGE, trust_keys=[])
    assert "--trust-key" in error.hint


def test_a_key_from_the_medium_does_not_count(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    medium = copy_of(bundle(), tmp_path)
    shutil.copy(site.key, medium / "vendor.pub")
    refused(site, medium, ExitCode.UNTRUSTED, trust_keys=[medium / "vendor.pub"])


def test_missing_medium(site: Site, tmp_path: Path) -> None:
    error = refused(site, tmp_path / "usb", ExitCode.MEDIA)
    assert "mount" in error.hint.lower()


def test_older_bundle(site: Site, bundle: Bundles) -> None:
    site.install(bundle(2))
    error = refused(site, bundle(1), ExitCode.DOWNGRADE)
    assert "sequence 1" in error.message
    assert "sequence 2" in error.message


def test_older_bundle_after_an_uninstall_too(site: Site, bundle: Bundles) -> None:
    from installer.operate.uninstall import uninstall

    site.install(bundle(2))
    uninstall(site.layout, purge=False, service=site.service)
    refused(site, bundle(1), ExitCode.DOWNGRADE)


def test_licence_refused_by_a_person(site: Site, bundle: Bundles) -> None:
    witness = Witness(accepts=False)
    error = refused(site, bundle(), ExitCode.LICENCE, witness=witness)
    assert "You may use this model for tests." in witness.asked[0].text
    assert witness.asked[0].answer in error.hint


@pytest.mark.parametrize("answer", ["LicenseRef-Test@00000000", "MIT@{sha}", "licenseref-test@{sha}"])
def test_licence_answers_that_name_another_text(site: Site, bundle: Bundles, answer: str) -> None:
    sha = read_sha(bundle())
    refused(site, bundle(), ExitCode.LICENCE, witness=Witness(accepts=False), accept_licenses=[answer.format(sha=sha)])


@pytest.mark.parametrize(
    "answer", ["yes", "*", "LicenseRef-Test", "LicenseRef-Test@", "LicenseRef-Test@1234567", "@{sha}"]
)
def test_licence_answers_that_are_no_answers(site: Site, bundle: Bundles, answer: str) -> None:
    given = [answer.format(sha=read_sha(bundle()))]
    refused(site, bundle(), ExitCode.USAGE, witness=Witness(accepts=False), accept_licenses=given)


def test_licence_answer_that_names_the_text(site: Site, bundle: Bundles) -> None:
    witness = Witness(accepts=False)
    site.install(bundle(), witness=witness, accept_licenses=[f"LicenseRef-Test@{read_sha(bundle())[:8]}"])
    assert witness.asked == []
    witness = Witness(accepts=False)
    site.service.stop()
    site.install(bundle(), witness=witness)  # the same bundle was accepted once
    assert witness.asked == []
    refused(site, bundle(2), ExitCode.LICENCE, witness=witness)  # another bundle was not


def test_a_gated_model_takes_the_reference_of_an_agreement(site: Site, bundle: Bundles) -> None:
    """The text alone gives no right to use it: who installs it names what does, and the audit log keeps it."""
    gated, said = bundle(acceptance="gated"), f"LicenseRef-Test@{read_sha(bundle())[:12]}"
    error = refused(site, gated, ExitCode.LICENCE, witness=Witness(), accept_licenses=[said])
    assert "gated" in error.message
    assert f"{said}:REFERENCE" in error.hint
    for reference in ("", "x", "a" * 121, "tab\there"):
        refused(site, gated, ExitCode.LICENCE, witness=Witness(reference=reference))  # the yes alone will not do
        refused(site, gated, ExitCode.LICENCE, witness=Witness(accepts=False), accept_licenses=[f"{said}:{reference}"])
    site.install(gated, witness=Witness(accepts=False), accept_licenses=[f"{said}:CONTRACT-4711 of 2026"])
    approvals = json.loads(site.layout.approvals.read_text())["approvals"]
    assert [entry["reference"] for entry in approvals] == ["CONTRACT-4711 of 2026"]
    (accepted,) = [r for r in log.read(site.layout.audit)[0] if r["event"] == "licence-accepted"]
    assert accepted["reference"] == "CONTRACT-4711 of 2026"


def test_a_person_names_the_agreement_of_a_gated_model(site: Site, bundle: Bundles) -> None:
    site.install(bundle(acceptance="gated"), witness=Witness(reference="ticket 17"))
    (accepted,) = [r for r in log.read(site.layout.audit)[0] if r["event"] == "licence-accepted"]
    assert (accepted["how"], accepted["reference"]) == ("interactive", "ticket 17")


@pytest.mark.parametrize(
    "wanted, fits", [(">=0.0.1", True), (">=99", False), ("<0.0.9", False), (">=0.0.1,<=0.0.99", False)]
)
def test_a_model_for_another_version_of_atoll(site: Site, bundle: Bundles, wanted: str, fits: bool) -> None:
    asking = bundle(runtime=wanted)
    if fits:
        site.install(asking)
        return
    error = refused(site, asking, ExitCode.PREFLIGHT_FAIL)
    assert wanted in error.message
    with pytest.raises(InstallError, match="needs Atoll") as caught:  # `atoll preflight --bundle` says so too
        read_needs(asking, [site.key], site.layout)
    assert caught.value.exit_code == ExitCode.PREFLIGHT_FAIL


def test_a_huge_description_of_code_on_a_medium_is_not_read(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 GiB that take no room on the disk, in the place of runtime/bundle.json. install.sh refuses it as well."""
    tree, medium = tmp_path / "tree", tmp_path / "medium"
    tree.mkdir()
    (tree / "runtime.json").write_text(json.dumps({"sequence": 1, "digest": "0" * 64}))
    (medium / "runtime").mkdir(parents=True)
    (medium / "runtime/bundle.json").touch()
    os.truncate(medium / "runtime/bundle.json", 64 << 30)
    monkeypatch.setattr(install_command, "code_tree", lambda: tree)
    monkeypatch.setattr(os, "execv", lambda *given: pytest.fail("what is on the medium was taken for code"))
    install_command._hand_over([medium], site.layout)


def test_code_that_takes_over_knows_that_it_is_an_upgrade(
    site: Site, bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`atoll upgrade` becomes the medium's install.sh, which calls the new code's `atoll install`."""
    site.install(bundle())
    tree, medium = tmp_path / "tree", tmp_path / "medium"
    tree.mkdir()
    (tree / "runtime.json").write_text(json.dumps({"sequence": 1, "digest": "0" * 64}))
    (medium / "runtime").mkdir(parents=True)
    (medium / "runtime/bundle.json").write_text("{}")
    monkeypatch.setattr(install_command, "code_tree", lambda: tree)
    monkeypatch.setattr(install_command, "upgrade_command", lambda medium, layout: ["/bin/sh"])
    jobs: list[str] = []
    monkeypatch.setattr(install_command, "run_options", lambda *given, purpose, **more: jobs.append(purpose))
    monkeypatch.delenv("ATOLL_PURPOSE", raising=False)

    def taken_over(*given: Any) -> None:  # what install.sh does in the end
        monkeypatch.setattr(install_command, "code_tree", lambda: None)
        CliRunner().invoke(app, ["install", str(medium), "--prefix", str(site.prefix)], catch_exceptions=False)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", taken_over)
    CliRunner().invoke(app, ["upgrade", str(medium), "--prefix", str(site.prefix)], catch_exceptions=False)
    assert jobs == ["upgrade"]
    assert "ATOLL_PURPOSE" not in os.environ, "a later install must not be called an upgrade"
    CliRunner().invoke(app, ["install", str(medium), "--prefix", str(site.prefix)], catch_exceptions=False)
    assert jobs == ["upgrade", "install"]


def test_licence_that_needs_no_acceptance(site: Site, bundle: Bundles) -> None:
    witness = Witness(accepts=False)
    site.install(bundle(acceptance="none"), witness=witness)
    assert witness.asked == []
    approvals = json.loads(site.layout.approvals.read_text())["approvals"]
    assert [entry["how"] for entry in approvals] == ["not required"]


def test_plan_not_confirmed(site: Site, bundle: Bundles) -> None:
    refused(site, bundle(), ExitCode.USAGE, witness=Witness(confirms=False))
    site.install(bundle(), witness=Witness(confirms=False), confirmed=True)


def test_port_taken_names_the_process(site: Site, bundle: Bundles) -> None:
    with socket.create_server(("127.0.0.1", site.port)):  # also where an ended connection still holds the port
        error = refused(site, bundle(), ExitCode.PREFLIGHT_FAIL)
        assert f"process {os.getpid()}" in error.message


def test_foreign_address(site: Site, bundle: Bundles) -> None:
    error = refused(site, bundle(), ExitCode.PREFLIGHT_FAIL, host="192.0.2.7")
    assert "192.0.2.7" in error.message


def test_busy_lock_names_its_holder(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    ready, done = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        with InstallLock(site.layout.lock, "uninstall"):
            ready.set()
            done.wait(30)

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    try:
        assert ready.wait(10)
        error = refused(site, bundle(2), ExitCode.BUSY)
        assert f"process {holder.pid}" in error.message
        assert "atoll uninstall" in error.message
        with pytest.raises(InstallError, match="lock is held"):  # a dry run says so too, and takes none
            site.install(bundle(2), dry_run=True)
    finally:
        done.set()
        holder.join()


def test_directories_of_a_stranger_are_not_taken_over(site: Site, bundle: Bundles) -> None:
    (site.prefix / "etc/atoll").mkdir(parents=True)
    (site.prefix / "etc/atoll/precious.conf").write_text("mine")
    error = refused(site, bundle(), ExitCode.PREFLIGHT_FAIL)
    assert "without a journal" in error.message


def test_symlink_inside_the_tree(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    site.prefix.mkdir()
    (site.prefix / "var").symlink_to(tmp_path / "elsewhere")
    error = refused(site, bundle(), ExitCode.PREFLIGHT_FAIL)
    assert "symlink" in error.message
    assert not list((tmp_path / "elsewhere").iterdir())


def test_prefix_is_a_file(site: Site, bundle: Bundles) -> None:
    site.prefix.write_text("a file")
    refused(site, bundle(), ExitCode.USAGE)


def test_settings_that_cannot_be_read(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    site.layout.config.write_text("[serve\nport = 1\n")
    error = refused(site, bundle(2), ExitCode.USAGE)
    assert str(site.layout.config) in error.message


def test_damaged_key_file_is_not_overwritten(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    site.layout.api_keys.write_text('{"keys": [')
    refused(site, bundle(2), ExitCode.IO)
    assert site.layout.api_keys.read_text() == '{"keys": ['


def test_damaged_sequences_are_not_taken_for_none(site: Site, bundle: Bundles) -> None:
    site.install(bundle(2))
    site.layout.sequence.write_text("{}")
    refused(site, bundle(1), ExitCode.IO)


# -- disks


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``mounted(options)`` → a tmpfs of its own; skips where this user may not mount."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        where = tmp_path / f"disk{len(made)}"
        where.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        made.append(where)
        return where

    yield mount
    for where in made:
        subprocess.run(["umount", "-l", where], check=True)


def test_full_disk_is_seen_before_anything_is_written(
    site: Site, bundle: Bundles, mounted: Callable[[str], Path]
) -> None:
    site.prefix = mounted("size=64m") / "atoll"
    error = refused(site, bundle(megabytes=4), ExitCode.PREFLIGHT_FAIL, waivers={"disk": "it will be fine"})
    assert "free" in error.message


@pytest.mark.parametrize(("options", "word"), [("ro,size=512m", "read-only"), ("noexec,size=512m", "noexec")])
def test_unfit_file_systems(
    site: Site, bundle: Bundles, mounted: Callable[[str], Path], options: str, word: str
) -> None:
    site.prefix = mounted(options) / "atoll"
    assert word in refused(site, bundle(), ExitCode.PREFLIGHT_FAIL).message


def test_disk_that_fills_up_during_the_copy(site: Site, bundle: Bundles) -> None:
    """The preflight cannot foresee it: a file-size limit stands for the disk that another program fills."""
    medium = bundle(megabytes=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with pytest.raises(InstallError) as caught:
            site.install(medium)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == ExitCode.IO
    assert "not touched" in caught.value.changed
    assert site.install(medium).outcome == "installed"


class Meddler(Witness):
    """Does something at the first sign of progress in a step."""

    def __init__(self, step: str, deed: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.deed, self.done = step, deed, False

    def progress(self, label: str, done: int, total: int) -> None:
        if not self.done and self.steps[-1] == (self.at, "begin"):
            self.done = True
            self.deed()


def test_medium_pulled_out_while_it_is_copied(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    good = site.install(bundle(1))
    medium = copy_of(bundle(2), tmp_path)
    away = tmp_path / "pocket"

    def pull() -> None:
        shutil.copytree(medium, away)
        shutil.rmtree(medium)

    witness = Meddler("stage", pull)
    with pytest.raises(InstallError) as caught:
        site.install(medium, witness=witness)
    assert witness.done
    assert caught.value.exit_code in (ExitCode.MEDIA, ExitCode.IO)
    assert "not touched" in caught.value.changed
    assert caught.value.hint
    assert site.serving() == {"model": good.model_dir, "mode": "good"}
    refusal = refused(site, medium, ExitCode.MEDIA)
    assert "mount" in refusal.hint.lower()
    shutil.copytree(away, medium)
    assert site.install(medium).outcome == "installed"


def test_disk_that_is_really_full_during_the_copy(
    site: Site, bundle: Bundles, mounted: Callable[[str], Path]
) -> None:
    """Another program takes the rest of the disk between the preflight and the copy."""
    disk = mounted("size=700m")
    site.prefix = disk / "atoll"
    filler = disk / "filler"

    def fill() -> None:
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    class Filler(Witness):
        def plan(self, plan: Any) -> None:
            super().plan(plan)
            fill()

    with pytest.raises(InstallError) as caught:
        site.install(bundle(megabytes=4), witness=Filler())
    assert caught.value.exit_code == ExitCode.IO
    assert "full" in f"{caught.value.message} {caught.value.hint}".lower() or "space" in caught.value.message.lower()
    filler.unlink()
    assert site.install(bundle(megabytes=4)).outcome == "installed"
    site.service.stop()


def test_a_clock_in_the_past(site: Site, bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    from installer.preflight import host

    class Past:
        """The clock of a server whose battery is empty."""

        strftime, gmtime = time.strftime, time.gmtime
        time = staticmethod(lambda: 1_500_000_000.0)

    monkeypatch.setattr(host, "time", Past)
    error = refused(site, bundle(), ExitCode.PREFLIGHT_FAIL)
    assert "2017" in error.message
    assert "clock" in error.message


def test_a_prefix_that_this_user_may_not_write_to(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    """As nobody, in a process of its own: the tests may run as root, whom nothing stops."""
    site.prefix.mkdir(mode=0o755)
    medium = copy_of(bundle(), tmp_path)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    key = Path(shutil.copy(site.key, tmp_path / "vendor.pub"))
    key.chmod(0o644)
    if os.geteuid() != 0:
        site.prefix.chmod(0o555)
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            site.key = key
            site.installer(medium).run()
        except InstallError as error:
            os._exit(error.exit_code if str(site.prefix) in f"{error.message} {error.why}" else 99)
        finally:
            os._exit(98)
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == ExitCode.PREFLIGHT_FAIL
    assert tree(site.prefix) == set()


# -- answers


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"schema_version": 1, "accept_all": true}', "accept_all"),
        ('{"schema_version": 2}', "schema_version"),
        ('{"port": 80}', "schema_version"),
        ('{"schema_version": 1, "port": 99999}', "port"),
        ('{"schema_version": 1, "accept_licenses": "yes"}', "accept_licenses"),
        ("not json", "line 1"),
    ],
)
def test_answers_files_that_are_refused(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "answers.json"
    path.write_text(content)
    with pytest.raises(InstallError) as caught:
        read_answers(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert named in caught.value.message


def read_sha(bundle: Path) -> str:
    return json.loads((bundle / "bundle.json").read_text())["license"]["sha256"]
