"""The deep check: every byte of a real store against a real signature; damage of each kind has its exit code."""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from installer.access import vendor_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import Journal
from installer.base.layout import Layout
from installer.operate.deep_verify.report import last
from installer.operate.deep_verify.run import verify
from installer.release.release import Release, live
from installer.release.replay_guard import raise_sequence
from offline_bundle.medium.code_tree import bytecode, tools
from offline_bundle.medium.code_tree.contents import LAUNCHER, START
from offline_bundle.medium.scripts import setup_script
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private, new_keypair
from offline_bundle.store.ingest import ingest

Bundles = Callable[..., Path]


def put(layout: Layout, bundle: Path, signer: KeyPair, *, commit: bool = True) -> dict[str, Any]:
    """What an install leaves on the disk, without a service: the store, the release, the journal's records."""
    for directory, mode in layout.directories():
        fs.make_dir(directory, mode)
    vendor_keys.trust(layout, signer.public_path)
    model = ingest(bundle, [signer.public_path], layout.models)
    manifest = model.manifest
    facts = {
        "instance": "tiny", "name": manifest.name, "version": manifest.version, "sequence": manifest.sequence,
        "digest": model.digest, "key_fingerprint": signer.fingerprint, "spdx": manifest.license.spdx,
    }
    if commit:
        made, previous = Release.of([facts]), live(layout)
        made.stage(layout)
        fs.symlink_atomic(layout.current, f"releases/{made.name}")
        raise_sequence(layout, manifest.name, manifest.sequence)
        journal = Journal("test")
        journal.open(layout.journal)
        journal.add("commit", release=made.name, previous=previous, bundle=facts, bundles=[facts])
        journal.close()
    return facts


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.at(tmp_path / "prefix")


def weights(layout: Layout, facts: dict[str, Any]) -> Path:
    return layout.models / facts["digest"] / "model/model.safetensors"


def change(path: Path, at: int = 1000) -> None:
    """One bit, as a decaying disk does it: size, times and mode stay."""
    info = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    path.chmod(stat.S_IMODE(info.st_mode))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_what_was_installed_is_good_and_recorded(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    facts = put(layout, bundle(megabytes=3), signer)
    seen: list[tuple[int, int]] = []
    report = verify(layout, progress=lambda stage, done, total: seen.append((done, total)))
    assert (report.outcome, report.exit_code, report.recorded) == ("good", 0, True)
    assert report.targets[0].kind == "release"
    model = report.targets[-1]
    assert (model.kind, model.digest, model.name) == ("model", facts["digest"], "tiny")
    assert model.bytes > 3 << 20
    assert seen[-1] == (model.bytes, model.bytes)
    assert last(layout) == report.to_json()
    assert stat.S_IMODE(layout.verify_state.stat().st_mode) == 0o644  # status shows it to everybody; it holds no secret


def test_one_flipped_bit_is_found_and_named(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    facts = put(layout, bundle(megabytes=3), signer)
    change(weights(layout, facts), at=2_000_000)
    report = verify(layout)
    assert (report.outcome, report.exit_code) == ("bad", ExitCode.CONTENT_MISMATCH)
    bad = [target for target in report.targets if target.exit_code]
    assert len(bad) == 1
    assert "model.safetensors" in bad[0].error
    recorded = last(layout)
    assert recorded is not None
    assert recorded["exit_code"] == 11


def test_each_kind_of_damage_has_its_exit_code(
    layout: Layout, bundle: Bundles, signer: KeyPair, tmp_path: Path
) -> None:
    facts = put(layout, bundle(), signer)
    entry = layout.models / facts["digest"]

    def code(damage: Callable[[], None]) -> int:
        saved = tmp_path / "saved"
        shutil.copytree(layout.prefix, saved, symlinks=True)
        damage()
        found = verify(layout).exit_code
        for path in layout.prefix.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(layout.prefix)
        saved.rename(layout.prefix)
        return found

    def writable(path: Path) -> Path:
        path.chmod(0o755)
        return path

    def forge() -> None:
        signature = writable(entry) / "model.sig"
        text = json.loads(signature.read_text())
        sig = text["dsseEnvelope"]["signatures"][0]["sig"]
        text["dsseEnvelope"]["signatures"][0]["sig"] = ("B" if sig[20] == "A" else "A").join([sig[:20], sig[21:]])
        signature.chmod(0o644)
        signature.write_text(json.dumps(text))

    def stranger() -> None:
        for key in layout.trust.glob("*.pub"):
            key.unlink()
        shutil.copy(new_keypair(tmp_path / "other", "other").public_path, layout.trust / "other.pub")

    def extra() -> None:
        (writable(entry / "model") / "run.py").write_text("print()")

    assert code(forge) == ExitCode.UNTRUSTED
    assert code(stranger) == ExitCode.UNTRUSTED
    assert code(extra) == ExitCode.CONTENT_MISMATCH
    assert code(lambda: (writable(entry / "model") / "config.json").unlink()) == ExitCode.MEDIA
    assert code(lambda: writable(entry / "model").chmod(0o777)) == ExitCode.CONTENT_MISMATCH
    assert code(lambda: layout.models.rename(layout.lib / "gone")) == ExitCode.MEDIA
    assert code(lambda: layout.current.unlink()) == ExitCode.MEDIA
    assert code(lambda: (layout.current / "release.json").write_text("{")) == ExitCode.CONTENT_MISMATCH
    assert code(lambda: None) == 0


def test_several_failures_are_all_listed_and_the_gravest_counts(
    layout: Layout, bundle: Bundles, signer: KeyPair
) -> None:
    one = put(layout, bundle(1), signer)
    two = put(layout, bundle(2), signer)
    change(weights(layout, two))
    (layout.models / one["digest"] / "model").chmod(0o755)
    weights(layout, one).unlink()
    report = verify(layout)
    assert sorted(target.exit_code for target in report.targets) == [0, 11, 13]
    assert report.exit_code == ExitCode.CONTENT_MISMATCH


def test_an_old_model_that_no_install_put_there(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    put(layout, bundle(2), signer)
    put(layout, bundle(1), signer, commit=False)
    report = verify(layout)
    assert report.exit_code == ExitCode.DOWNGRADE
    assert "sequence 1" in next(target.error for target in report.targets if target.exit_code)


def test_going_back_on_purpose_is_no_downgrade(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    put(layout, bundle(2), signer)
    put(layout, bundle(1), signer)  # its commit stands in the journal
    assert verify(layout).outcome == "good"


def test_current_pointing_elsewhere_than_the_journal_says(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    put(layout, bundle(2), signer)
    other = Release.of([{**put(layout, bundle(1), signer, commit=False), "instance": "other"}])
    other.stage(layout)
    fs.symlink_atomic(layout.current, f"releases/{other.name}")
    report = verify(layout)
    assert report.targets[0].exit_code == ExitCode.CONTENT_MISMATCH
    assert "by hand" in report.targets[0].error or other.name in report.targets[0].error


def test_it_goes_on_where_it_was_cut_off(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    put(layout, bundle(1), signer)
    put(layout, bundle(2), signer)
    finished: list[str] = []

    def pull_the_plug(target: Any) -> None:
        finished.append(target.kind)
        if finished.count("model") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(layout, said=pull_the_plug)
    cut = last(layout)
    assert cut is not None
    assert cut["outcome"] == "interrupted"
    again = verify(layout)
    assert sorted(target.kept for target in again.targets if target.kind == "model") == [False, True]
    assert again.outcome == "good"
    assert not any(target.kept for target in verify(layout).targets)  # a finished check begins anew


def test_what_was_touched_since_the_cut_is_read_again(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    facts = put(layout, bundle(1), signer)

    def pull_the_plug(target: Any) -> None:
        if target.kind == "model":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(layout, said=pull_the_plug)
    change(weights(layout, facts))  # the change time tells, whatever the other times say
    assert verify(layout).exit_code == ExitCode.CONTENT_MISMATCH


def test_only_one_at_a_time_and_nothing_installed(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    with pytest.raises(InstallError, match="no Atoll installation") as caught:
        verify(layout)
    assert caught.value.exit_code == ExitCode.USAGE
    assert not layout.prefix.exists()
    put(layout, bundle(), signer)

    def second(target: Any) -> None:
        with pytest.raises(InstallError, match="Another verification is running") as busy:
            verify(layout)
        assert busy.value.exit_code == ExitCode.BUSY

    assert verify(layout, said=second).outcome == "good"


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"targets": 3}', '{"outcome": "interrupted", "targets": [{"x": 1}]}',
])
def test_a_damaged_record_of_the_last_check_is_none(
    layout: Layout, bundle: Bundles, signer: KeyPair, content: str
) -> None:
    put(layout, bundle(), signer)
    layout.verify_state.write_text(content)
    assert verify(layout).outcome == "good"


def test_the_command(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    facts = put(layout, bundle(megabytes=2), signer)

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "appliance.cli", "verify", "--prefix", str(layout.prefix), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    good = run("--gentle")
    assert good.returncode == 0, good.stderr
    assert "All is as it was signed" in good.stdout
    assert facts["digest"][:12] in good.stdout
    change(weights(layout, facts))
    bad = run("--json")
    assert bad.returncode == 11
    found = json.loads(bad.stdout)
    assert found["outcome"] == "bad"
    assert run("--quiet").stdout.splitlines()[-1].startswith("NOT as it was signed")


def test_it_is_as_fast_as_hashing(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    """256 MiB in seconds: chunks of one file are hashed side by side."""
    put(layout, bundle(megabytes=256), signer)
    began = time.monotonic()
    report = verify(layout)
    assert report.outcome == "good"
    assert report.bytes / (time.monotonic() - began) > 50 << 20


def code_tree(layout: Layout, signer: KeyPair) -> Path:
    """Code as install.sh leaves it: every file listed with its hash, the description as the vendor signed it."""
    tree = layout.code / "0.1.0-abcdef012345"
    setup, code, abi = setup_script(), b"print()\n", tools.tag()

    def entry(data: bytes) -> dict[str, Any]:
        return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    packages = json.dumps({"files": {"appliance/x.py": entry(code)}}).encode()
    signed = [{"path": f"requirements/{abi}.json", **entry(packages)},
              {"path": "setup/setup_release.py", **entry(setup)}]  # fmt: skip
    start, python = tree / "start.py", os.path.realpath(sys.executable)
    launcher = LAUNCHER.format(python=tools.quoted(python), start=tools.quoted(str(start)))
    files = {
        "bin/atoll": launcher.encode(), "start.py": START.encode(), "lib/appliance/x.py": code,
        f"share/requirements/{abi}.json": packages, "share/setup/setup_release.py": setup,
        "share/bundle.json": json.dumps({"files": signed}).encode(), "files.json": b'{"files": {}}',
    }  # fmt: skip
    digest = hashlib.sha256(files["share/bundle.json"]).hexdigest()
    files["share/model.sig"] = model_signing.sign({"bundle.json": digest}, "atoll", load_private(signer.private_path))
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    compiled_by = platform.python_version()
    facts = {"sequence": 1, "digest": digest, "abi": abi, "place": str(tree), "python": python}
    (tree / "runtime.json").write_text(json.dumps({**facts, "compiled_by": compiled_by}))
    bytecode.make_bytecode(str(tree), str(tree), ["lib/appliance/x.py"])
    return tree


def test_bytecode_that_another_python_made_is_named_and_made_again(
    layout: Layout, bundle: Bundles, signer: KeyPair
) -> None:
    put(layout, bundle(), signer)
    tree = code_tree(layout, signer)
    cached = Path(importlib.util.cache_from_source(str(tree / "lib/appliance/x.py")))
    assert cached.is_file()
    change(cached, at=20)
    facts = json.loads((tree / "runtime.json").read_bytes())
    (tree / "runtime.json").write_text(json.dumps({**facts, "compiled_by": "3.11.0"}))
    (bad,) = [target for target in verify(layout).targets if target.exit_code]
    assert (bad.kind, bad.exit_code) == ("code", ExitCode.CONTENT_MISMATCH)
    assert "x.cpython" in bad.error
    assert "made by Python 3.11.0" in bad.error
    assert "--rebuild-bytecode" in bad.hint
    command = [sys.executable, "-m", "appliance.cli", "verify", "--prefix", str(layout.prefix), "--rebuild-bytecode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert log.read(layout.audit)[0][-1]["event"] == "bytecode-rebuilt"
    (tree / "lib/appliance/x.py").write_bytes(b"print(1)\n")
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 11


def test_a_release_whose_launcher_was_changed(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    """Every command and unit starts through it."""
    put(layout, bundle(), signer)
    wrapper = layout.current / "bin/atoll"
    wrapper.write_text(wrapper.read_text() + "# planted\n")
    report = verify(layout)
    assert report.targets[0].exit_code == ExitCode.CONTENT_MISMATCH
    assert "was changed after it was made" in report.targets[0].error


def test_the_code_is_held_against_its_list_and_its_signature(layout: Layout, bundle: Bundles, signer: KeyPair) -> None:
    put(layout, bundle(), signer)
    tree = code_tree(layout, signer)

    def code() -> int:
        return next(target.exit_code for target in verify(layout).targets if target.kind == "code")

    assert code() == 0
    (tree / "lib/appliance/x.py").write_bytes(b"print(1)\n")
    assert code() == ExitCode.CONTENT_MISMATCH
    (tree / "lib/appliance/x.py").write_bytes(b"print()\n")
    (tree / "lib/extra.py").write_text("")
    assert code() == ExitCode.CONTENT_MISMATCH
    (tree / "lib/extra.py").unlink()
    assert code() == 0
    described = (tree / "share/bundle.json").read_bytes()
    (tree / "share/bundle.json").write_bytes(described + b" ")
    assert code() == ExitCode.CONTENT_MISMATCH
    (tree / "share/bundle.json").write_bytes(described)
    other = model_signing.sign({"bundle.json": "0" * 64}, "atoll", load_private(signer.private_path))
    (tree / "share/model.sig").write_bytes(other)
    assert code() == ExitCode.CONTENT_MISMATCH
    stranger = new_keypair(layout.prefix / "stranger", "other")
    digest = hashlib.sha256(described).hexdigest()
    forged = model_signing.sign({"bundle.json": digest}, "atoll", load_private(stranger.private_path))
    (tree / "share/model.sig").write_bytes(forged)
    assert code() == ExitCode.UNTRUSTED
    (tree / "share/model.sig").unlink()
    assert code() == ExitCode.MEDIA
