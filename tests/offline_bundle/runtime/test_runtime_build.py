"""What `atoll bundle build --runtime` puts on a medium, and what it refuses to."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bundle_kit import refused
from runtime_kit import FEW, ROOT, build, wheelhouse
from typer.testing import CliRunner

from appliance.cli.app import app
from offline_bundle.medium.scripts import install_script, setup_script
from offline_bundle.runtime import resolve, wheels
from offline_bundle.runtime.build import build_runtime
from offline_bundle.runtime.manifest import RuntimeManifest
from offline_bundle.runtime.verify import inspect_runtime
from offline_bundle.signing.keys import KeyPair


def facts(medium: Path) -> dict:
    return json.loads((medium / "runtime/bundle.json").read_bytes())


def test_our_wheel_carries_every_file_of_ours(own_wheel: Path) -> None:
    """Code, templates, catalogues, documents: what git knows of in the rooms is in the wheel, except the pictures: a
    server's terminal cannot show them."""
    rooms = [*wheels.ROOMS, "docs"]
    listed = subprocess.run(["git", "ls-files", "-z", *rooms], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    with zipfile.ZipFile(own_wheel) as wheel:
        names = {re.sub(r"^[^/]+\.data/data/share/doc/atoll/", "docs/", name) for name in wheel.namelist()}
    expected = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    pictures = {name for name in expected if name.startswith("docs/pictures/")}
    assert sorted(pictures & names) == []
    expected -= pictures
    author = {name for name in expected if name.startswith("engine/bench/author/")}
    assert sorted(expected - author - names) == []
    assert author, "what only work on the engine needs"
    assert sorted(author & names) == []
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", ".venv"))]


def test_a_wheel_is_put_together_again_from_an_installed_one(own_wheel: Path, tmp_path: Path) -> None:
    """A vendor who has Atoll from a wheel, not from a checkout, ships the same wheel."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, own_wheel]
    subprocess.run(pip, check=True)
    script = "import sys; sys.path.insert(0, sys.argv[1]); from offline_bundle.runtime import wheels as w; "
    script += "from pathlib import Path; assert w.checkout() is None; w._repack(Path(sys.argv[2]))"
    done = subprocess.run([sys.executable, "-P", "-c", script, site, tmp_path], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(own_wheel) as theirs, zipfile.ZipFile(tmp_path / own_wheel.name) as ours:
        for name in theirs.namelist():
            if not name.endswith(("/RECORD", "/")):
                assert ours.read(name) == theirs.read(name), name


def test_what_is_on_the_medium(full_medium: Path, vendor: KeyPair) -> None:
    assert sorted(p.name for p in full_medium.iterdir()) == ["README.txt", "install.sh", "runtime", "vendor.pub"]
    assert (full_medium / "vendor.pub").read_bytes() == vendor.public_path.read_bytes()
    runtime = full_medium / "runtime"
    assert (runtime / "setup/install.sh").read_bytes() == (full_medium / "install.sh").read_bytes() == install_script()
    assert (runtime / "setup/setup_release.py").read_bytes() == setup_script()
    manifest = inspect_runtime(runtime)
    requires = manifest.requires
    assert requires.python == (f"{sys.version_info.major}.{sys.version_info.minor}",)
    assert (requires.torch, requires.cuda, requires.driver_min) == (None, None, None)
    assert (2, 17) <= tuple(int(n) for n in requires.glibc.split(".")) <= (2, 39)
    roles = {f.role for f in manifest.files}
    assert roles == {"wheel", "tool", "requirements", "setup", "unit", "doc", "license", "sbom"}
    templates = {p.name for p in (ROOT / "systemd").iterdir() if p.is_file() and not p.name.startswith(("_", "."))}
    assert templates == {p.name for p in (runtime / "units").iterdir()}
    for language in ("en", "ko"):
        pages, carried = ROOT / "docs" / language, runtime / "docs" / language
        theirs = {p.relative_to(pages) for p in pages.rglob("*.md")}
        assert theirs == {p.relative_to(carried) for p in carried.rglob("*") if p.is_file()}


def test_the_requirements_pin_every_wheel_by_its_hash(full_medium: Path) -> None:
    runtime = full_medium / "runtime"
    (text,) = (p.read_text() for p in runtime.glob("requirements/*.txt"))
    lines = [re.fullmatch(r"([^ ]+)==[^ ]+ --hash=sha256:([0-9a-f]{64})", line) for line in text.splitlines()]
    pins = {line[1]: line[2] for line in lines if line}
    assert len(pins) == len(lines)
    hashes = {hashlib.sha256(p.read_bytes()).hexdigest() for p in runtime.glob("wheels/*")}
    assert set(pins.values()) == hashes
    assert {"atoll", "pydantic", "cryptography"} <= pins.keys()
    assert not {"pytest", "transformers", "openai"} & pins.keys()


def test_licences_and_bill_of_materials_name_every_package(full_medium: Path) -> None:
    runtime = full_medium / "runtime"
    sbom = json.loads((runtime / "sbom/bom.cdx.json").read_bytes())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    hashes = {c["hashes"][0]["content"] for c in sbom["components"]}
    files = [*runtime.glob("wheels/*"), *runtime.glob("pip/*")]
    assert hashes == {hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    for component in sbom["components"]:
        texts = list((runtime / "licenses" / component["name"]).iterdir())
        assert texts, component["name"]
        assert all(t.stat().st_size for t in texts), component["name"]
    assert "MIT" in (runtime / "licenses/pydantic/LICENSE").read_text()
    assert (runtime / "licenses/packages.tsv").read_text().count("\n") == len(files) + 1


def test_install_sh_is_the_same_on_every_medium(
    medium: Path, full_medium: Path, vendor: KeyPair, stranger: KeyPair, small_wheel: Path, tmp_path: Path
) -> None:
    other = build(tmp_path / "m", stranger, own_wheel=small_wheel, sequence=9, packages=FEW)
    for each in (other, full_medium):
        assert (each / "install.sh").read_bytes() == (medium / "install.sh").read_bytes()
    for text in (install_script().decode(), setup_script().decode()):
        assert "import offline_bundle" not in text  # there is nothing of ours to import yet
        assert "from offline_bundle" not in text
        for secret in (vendor.fingerprint, str(ROOT)):
            assert secret not in text


def test_the_same_input_makes_the_same_runtime(
    medium: Path, vendor: KeyPair, small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # as when `medium` was built
    again = build(tmp_path / "again", vendor, own_wheel=small_wheel, packages=FEW)
    assert (again / "runtime/bundle.json").read_bytes() == (medium / "runtime/bundle.json").read_bytes()


def test_refusals(medium: Path, vendor: KeyPair, small_wheel: Path, tmp_path: Path) -> None:
    def make(out: Path = tmp_path / "m", **changes: object) -> object:
        arguments = {"private_key": vendor.private_path, "sequence": 1, "torch": "cpu", "own_wheel": small_wheel}
        arguments |= {"packages": FEW, "wheels": wheelhouse(FEW)}
        return build_runtime(out, **(arguments | changes))

    refused(2, "exists already", lambda: make(medium))
    refused(2, "whole number", lambda: make(sequence=0))
    refused(13, "private key", lambda: make(private_key=tmp_path / "none.key"))
    refused(13, "pip", lambda: make(packages=["a-package-that-nobody-has-made==1"]))
    refused(2, "given twice", lambda: make(pythons=[Path(sys.executable)] * 2))
    refused(2, "does not run", lambda: make(pythons=[tmp_path / "python"]))
    refused(11, "valid wheel", lambda: make(own_wheel=broken_wheel(tmp_path / "atoll-1-py3-none-any.whl")))
    assert list(tmp_path.glob("m/*")) == []  # nothing half-made stays


def broken_wheel(path: Path) -> Path:
    path.write_bytes(b"PK\x05\x06" + bytes(18))
    return path


def torch_wheel(path: Path, version: str, cuda: str) -> Path:
    """The two files of a torch wheel that are read."""
    name = path / f"torch-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(name, "w") as wheel:
        headers = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        wheel.writestr(f"torch-{version}.dist-info/METADATA", headers)
        wheel.writestr("torch/version.py", f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    return name


@pytest.mark.parametrize(
    "version,cuda,expected",
    [
        ("2.13.0+cpu", "None", ("2.13.0+cpu", None, None)),
        ("2.13.0", "'13.0'", ("2.13.0", "13.0", "580")),
        ("2.13.0+cu126", '"12.6"', ("2.13.0+cu126", "12.6", "525")),
    ],
)
def test_what_torch_needs_is_read_from_its_wheel(
    version: str, cuda: str, expected: tuple[str, str | None, str | None], tmp_path: Path
) -> None:
    read = wheels.read_wheel(torch_wheel(tmp_path, version, cuda))
    assert wheels.torch_facts([read]) == expected


def test_a_cuda_of_the_future_is_not_guessed(tmp_path: Path) -> None:
    read = wheels.read_wheel(torch_wheel(tmp_path, "3.0.0", "'14.1'"))
    refused(11, "CUDA 14.1", lambda: wheels.torch_facts([read]))


def test_the_lowest_glibc() -> None:
    def floor(*tags: str) -> str:
        return wheels.glibc_floor([Path(f"x-1-cp311-cp311-{tag}.whl") for tag in tags])

    assert floor("any") == "2.17"
    assert floor("manylinux1_x86_64.manylinux_2_28_x86_64.manylinux_2_5_x86_64") == "2.17"
    assert floor("manylinux_2_28_x86_64", "manylinux2014_x86_64") == "2.28"
    assert floor("manylinux_2_28_x86_64", "manylinux_2_34_x86_64") == "2.34"


def test_wheels_for_other_processors_are_refused() -> None:
    names = ("x-1-cp311-cp311-manylinux_2_28_aarch64.whl", "x-1-cp311-cp311-win_amd64.whl")
    for name in names:
        refused(11, "not for Linux", lambda name=name: resolve.check_platform([name], "x86_64"))
    names = ("x-1-py3-none-any.whl", "x-1-cp311-abi3-manylinux_2_17_x86_64.whl")
    resolve.check_platform(names, "x86_64")


def test_manifests_are_canonical(medium: Path) -> None:
    text = (medium / "runtime/bundle.json").read_bytes()
    manifest = RuntimeManifest.parse(text)
    assert manifest.digest == hashlib.sha256(text).hexdigest()
    for spoilt in (text + b"\n", text.replace(b'"kind":"runtime"', b'"kind": "runtime"'), b"{}", b"["):
        refused(11, "not a valid manifest", lambda spoilt=spoilt: RuntimeManifest.parse(spoilt))


def test_the_command_line(full_medium: Path, vendor: KeyPair, stranger: KeyPair) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["bundle", *map(str, arguments)])
        return done.exit_code, done.output

    runtime = full_medium / "runtime"
    code, output = run("verify", runtime, "--key", vendor.public_path, "--json")
    assert code == 0
    found = json.loads(output)
    assert (found["kind"], found["verified"], found["key_fingerprint"]) == ("runtime", True, vendor.fingerprint)
    assert run("verify", runtime, "--key", stranger.public_path)[0] == 10
    assert run("verify", runtime, "--key", vendor.public_path, "--min-sequence", 6)[0] == 12
    code, output = run("inspect", runtime)
    assert (code, "NOT VERIFIED" in output) == (0, True)
    signing = ("--key", vendor.private_path, "--sequence", 1)
    assert run("build", "--runtime", full_medium, *signing)[0] == 2
    code, output = run("build", "model", "--runtime", full_medium, *signing)
    assert (code, "not both" in output) == (2, True)
    code, output = run("build", *signing)
    assert code == 2
    for name in ("MODEL", "--version", "--license", "--source-repo"):
        assert name in output
    assert "--runtime" in run("build", "--help")[1]
