"""`atoll preflight` as an operator types it, on a terminal and in a script, before anything is installed."""

import hashlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from preflight_kit import FakeSmi, on_path

from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.preflight.model_needs import of_manifests, read_needs
from installer.preflight.torch_build import TorchBuild
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private
from offline_bundle.signing.strict_json import canonical

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def preflight(tmp_path: Path, free_port: Callable[[], int]) -> Run:
    """``preflight("--json", LANG="ko_KR.UTF-8")`` under a prefix that is not there."""
    base = [sys.executable, "-m", "appliance.cli", "preflight", "--prefix", str(tmp_path / "prefix"),
            "--port", str(free_port())]  # fmt: skip

    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
        return subprocess.run([*base, *map(str, arguments)], capture_output=True, text=True, timeout=60,
                              env={**clean, "LC_ALL": "C.UTF-8", "COLUMNS": "120", **environment})  # fmt: skip

    return run


def test_plain_lines_without_a_terminal(preflight: Run, tmp_path: Path) -> None:
    result = preflight("--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line[:4] in ("PASS", "WARN")]
    assert len([line for line in lines if line[4:8].strip() or line[4] == " "]) >= 27
    assert "\x1b" not in result.stdout
    assert "27" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_korean_by_flag_and_by_environment(preflight: Run) -> None:
    for result in (preflight("--lang", "ko"), preflight(LC_ALL="ko_KR.UTF-8")):
        assert "이 장비" in result.stdout
    assert "This machine" in preflight("--lang", "en", LC_ALL="ko_KR.UTF-8").stdout


def test_a_table_on_a_terminal(tmp_path: Path) -> None:
    pid, fd = pty.fork()
    if not pid:
        os.environ.update(TERM="xterm-256color", COLUMNS="140", LC_ALL="ko_KR.UTF-8")
        os.execv(sys.executable, [sys.executable, "-m", "appliance.cli", "preflight", "--prefix", str(tmp_path / "p"),
                                  "--device", "cpu"])  # fmt: skip
    output = b""
    try:
        while chunk := os.read(fd, 65536):
            output += chunk
    except OSError:  # the terminal closed
        pass
    os.waitpid(pid, 0)
    text = output.decode()
    assert "\x1b[" in text
    assert "점검" in text
    assert "파일 시스템" in text
    assert "5–13" in text  # what is not needed for one reason is one row


def test_json_and_the_report_file(preflight: Run, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = preflight("--json", "--report", out)
    facts = json.loads(result.stdout)
    assert facts["ok"] is (result.returncode == 0)
    assert facts["exit_code"] == result.returncode
    assert len(facts["checks"]) == 27
    assert json.loads(out.read_text()) == facts
    assert preflight("--json", "--report", out).returncode == 0  # its own report may be replaced
    other = tmp_path / "precious.txt"
    other.write_text("mine")
    refused = preflight("--report", other)
    assert refused.returncode == 2
    assert other.read_text() == "mine"


def test_exit_codes_and_waivers(preflight: Run) -> None:
    failing = ("--host", "0.0.0.0", "--device", "cpu")
    result = preflight(*failing)
    assert result.returncode == 3
    assert "error: exposure" in result.stderr
    assert preflight(*failing, "--waive", "exposure=a lab network").returncode == 0
    waived = json.loads(preflight(*failing, "--waive", "27=a lab network", "--json").stdout)
    assert waived["counts"]["waived"] == 1
    assert waived["checks"][26]["waived"] == "a lab network"
    assert preflight(*failing, "--waive", "exposure").returncode == 2
    assert preflight(*failing, "--waive", "exposrue=a lab network").returncode == 2


def test_strict_checks_cannot_be_waived(preflight: Run, tmp_path: Path) -> None:
    smi = FakeSmi(tmp_path / "bin")
    smi.plan(fault="mismatch")
    result = preflight("--device", "cuda", "--waive", "nvml=trust me", "--json", PATH=on_path(smi.directory))
    checks = {each["id"]: each for each in json.loads(result.stdout)["checks"]}
    assert result.returncode == 3
    assert (checks["nvml"]["status"], checks["nvml"]["waived"]) == ("fail", None)


def test_warnings_with_strict(preflight: Run, tmp_path: Path) -> None:
    (tmp_path / "ollama").symlink_to("/bin/sleep")
    child = subprocess.Popen([tmp_path / "ollama", "60"])
    try:
        assert preflight("--device", "cpu").returncode == 0
        result = preflight("--device", "cpu", "--strict")
        assert result.returncode == 4
        assert "conflicts" in result.stderr
    finally:
        child.kill()
        child.wait()


def test_against_a_bundle(preflight: Run, bundle: Callable[..., Path], signer: KeyPair, tmp_path: Path) -> None:
    medium = bundle(megabytes=4)
    result = preflight("--bundle", medium, "--trust-key", signer.public_path, "--device", "cpu", "--json")
    assert result.returncode == 0, result.stdout
    assert "trusted" not in result.stderr
    unsigned = preflight("--bundle", medium.parent, "--device", "cpu")
    assert unsigned.returncode == 0
    assert "--trust-key" in unsigned.stderr
    nothing = preflight("--bundle", tmp_path / "usb")
    assert nothing.returncode == 13


def test_answers_are_checked_beforehand(preflight: Run, tmp_path: Path) -> None:
    answers = tmp_path / "answers.toml"
    answers.write_text('schema_version = 1\nhost = "0.0.0.0"\n[waivers]\nexposure = "a lab network"\n')
    assert preflight("--answers", answers, "--device", "cpu").returncode == 0


# -- what a medium asks for


def test_needs_of_a_signed_bundle(bundle: Callable[..., Path], signer: KeyPair, tmp_path: Path) -> None:
    medium = bundle(megabytes=4)
    layout = Layout.at(tmp_path / "prefix")
    needs = read_needs(medium, [signer.public_path], layout)
    assert needs.verified
    assert needs.values["weight_bytes"] > 4 << 20
    assert needs.values["copy_bytes"] == needs.values["model_bytes"]
    assert needs.values["models"][0].name == "tiny"
    manifest = BundleManifest.parse((medium / "bundle.json").read_bytes())
    (layout.models / manifest.digest).mkdir(parents=True)
    assert read_needs(medium, [signer.public_path], layout).values["copy_bytes"] == 0
    by_length = read_needs(medium, [], layout)
    assert not by_length.verified
    assert by_length.values["weight_bytes"] == needs.values["weight_bytes"]
    twice = of_manifests({"a": manifest, "b": manifest}, gpus={"b": [1]})
    assert twice["copy_bytes"] == manifest.total_bytes  # one copy serves both
    assert [need.gpus for need in twice["models"]] == [(), (1,)]


def _runtime(directory: Path, signer: KeyPair, **requires: object) -> Path:
    """A signed runtime whose files nobody reads here."""
    rooms = {"pip": "tool", "requirements": "requirements", "setup": "setup"}
    names = ("pip/pip.whl", "requirements/cp311.json", "requirements/cp311.txt", "setup/install.sh",
             "setup/setup_release.py")  # fmt: skip
    paths = {name: rooms[name.partition("/")[0]] for name in names}
    empty = hashlib.sha256().hexdigest()
    for path in paths:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).touch()
    asked = {"arch": "x86_64", "python": ["3.11"], "glibc": "2.28", "torch": "2.13.0", "cuda": "13.0",
             "driver_min": "580.65", "disk_bytes": 9 * 10**9, "unpacked_bytes": 8 * 10**9, **requires}  # fmt: skip
    files = [{"path": path, "role": role, "sha256": empty, "size": 0} for path, role in sorted(paths.items())]
    text = canonical({"schema_version": 1, "kind": "runtime", "name": "atoll", "version": "1.0.0", "sequence": 3,
                      "created": "2026-01-01T00:00:00Z", "requires": asked, "files": files})  # fmt: skip
    (directory / "bundle.json").write_bytes(text)
    resources = {**dict.fromkeys(paths, empty), "bundle.json": hashlib.sha256(text).hexdigest()}
    (directory / "model.sig").write_bytes(model_signing.sign(resources, "atoll", load_private(signer.private_path)))
    return directory


def test_needs_of_a_signed_runtime(tmp_path: Path, signer: KeyPair) -> None:
    _runtime(tmp_path / "medium/runtime", signer)
    layout = Layout.at(tmp_path / "prefix")
    values = read_needs(tmp_path / "medium", [signer.public_path], layout).values
    assert (values["code_bytes"], values["driver_min"], values["pythons"]) == (9_000_000_000, "580.65", ("3.11",))
    assert values["torch"] == TorchBuild("2.13.0", (13, 0), True)
    _runtime(tmp_path / "cpu/runtime", signer, torch="2.13.0+cpu", cuda=None, driver_min=None)
    values = read_needs(tmp_path / "cpu", [signer.public_path], layout).values
    assert values["torch"].cpu_only
    (tmp_path / "cpu/runtime/bundle.json").write_text("{}")
    with pytest.raises(InstallError) as caught:
        read_needs(tmp_path / "cpu", [signer.public_path], layout)
    assert caught.value.exit_code == 11


def test_a_bundle_of_somebody_else(bundle: Callable[..., Path], tmp_path: Path) -> None:
    from offline_bundle.signing.keys import new_keypair

    stranger = new_keypair(tmp_path, "stranger")
    with pytest.raises(InstallError) as caught:
        read_needs(bundle(), [stranger.public_path], Layout.at(tmp_path / "prefix"))
    assert caught.value.exit_code == 10


def test_an_unsigned_medium_is_not_parsed(tmp_path: Path) -> None:
    """Without a key a lying bundle.json has no say."""
    model = tmp_path / "evil/model"
    model.mkdir(parents=True)
    (tmp_path / "evil/bundle.json").write_text("{" * 100_000)
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    values = read_needs(tmp_path, [], Layout.at(tmp_path / "prefix")).values
    assert values["weight_bytes"] == 1000
