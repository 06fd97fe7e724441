"""Releases over unpacked code: what points where, what is pruned, and what an upgrade trusts."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_kit import PYTHON, bare_path, digest12, install

from installer.base.layout import Layout
from installer.release import code_tree
from installer.release.release import Release
from offline_bundle.signing.keys import KeyPair

FACTS = {"instance": "m", "name": "m", "version": "1.0.0", "sequence": 1}
FACTS |= {"digest": "0" * 64, "key_fingerprint": "1" * 64}

STAGE = """
import json, sys
from pathlib import Path
from installer.release import release
from installer.release.code_tree import upgrade_command
from installer.base.layout import Layout
layout = Layout.at(sys.argv[1])
made = release.Release.of([json.loads(sys.argv[2])])
changes = [made.stage(layout), made.stage(layout)]
layout.state.mkdir(parents=True, exist_ok=True)
release.raise_runtime_sequence(layout)
path, size = release.plan_code(layout)
upgrade = upgrade_command(Path("/media/usb"), layout)
facts = {"name": made.name, "changes": changes, "info": made.info, "path": str(path), "bytes": size, "upgrade": upgrade}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def prefix(installed: Path) -> Iterator[Path]:
    """The installed code; releases that these tests make of it are gone afterwards."""
    yield installed
    for made in ("opt/atoll/releases", "var/lib/atoll/state"):
        shutil.rmtree(installed / made, ignore_errors=True)
    for link in ("opt/atoll/current", "command"):
        (installed / link).unlink(missing_ok=True)


def staged(prefix: Path) -> dict:
    """Stage a release as the unpacked code itself does it."""
    (tree,) = (prefix / "opt/atoll/code").iterdir()
    command = [PYTHON, "-S", "-s", "-P", "-c", STAGE, prefix, json.dumps(FACTS)]
    done = subprocess.run(command, env={"PYTHONPATH": str(tree / "lib")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_release_points_into_the_code(prefix: Path, full_medium: Path) -> None:
    facts = staged(prefix)
    assert facts["changes"] == [True, False]
    release = prefix / "opt/atoll/releases" / facts["name"]
    info = json.loads((release / "release.json").read_bytes())
    assert info["code"].endswith(digest12(full_medium))
    assert info["runtime"]["sequence"] == 5
    assert facts["path"] == str(prefix / "opt/atoll/code" / info["code"])
    assert facts["bytes"] > 10_000_000
    current, command = prefix / "opt/atoll/current", prefix / "command"
    current.symlink_to(f"releases/{facts['name']}")
    command.symlink_to(current / "bin/atoll")
    for way in (release / "bin/atoll", current / "bin/atoll", command):  # as units, and as people in their PATH call it
        done = subprocess.run([way, "--version"], capture_output=True, text=True, cwd="/")
        assert done.stdout.strip() == info["atoll"], done.stderr
    assert (current / "lib/appliance").is_dir()


def test_the_sequence_is_remembered_and_the_next_medium_held_against_it(
    prefix: Path, full_medium: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    staged(prefix)
    state = prefix / "var/lib/atoll/state/sequence.json"
    assert json.loads(state.read_bytes())["sequences"] == {"runtime/atoll": 5}
    path = bare_path(tmp_path / "path")
    check = ("--prefix", prefix, "--trust-key", vendor.public_path, "--verify-only")
    assert install(full_medium, path, *check).returncode == 0
    state.write_text(json.dumps({"sequences": {"runtime/atoll": 9}}))
    assert install(full_medium, path, *check).returncode == 12
    state.unlink()


def test_an_upgrade_trusts_the_installed_install_sh(prefix: Path, full_medium: Path, vendor: KeyPair) -> None:
    command = staged(prefix)["upgrade"]
    assert command[0] == "/bin/sh"
    assert Path(command[1]).read_bytes() == (full_medium / "install.sh").read_bytes()
    assert Path(command[1]).is_relative_to(prefix)
    assert command[2:] == ["--medium", "/media/usb", "--prefix", str(prefix)]
    command[3] = str(full_medium)
    command += ["--verify-only", "--trust-key", str(vendor.public_path), "--python", str(PYTHON)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_checkout_has_no_code_tree(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    assert code_tree.code_tree() is None
    assert code_tree.upgrade_command(tmp_path, layout) is None
    made = Release.of([FACTS])
    assert made.info["code"] is None
    made.stage(layout)
    assert not (layout.releases / made.name / "lib").exists()


def test_pruning_keeps_what_releases_run(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    for name in ("1.0.0-aaa", "1.0.1-bbb", "1.0.2-ccc", ".incoming-1.0.3-ddd", ".partial-1.0.3-ddd"):
        (layout.code / name / "lib").mkdir(parents=True)
        (layout.code / name / "lib/x.py").write_text("x = 1\n")
        (layout.code / name / "lib/x.py").chmod(0o444)
    fd = os.open(layout.code, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert code_tree.prune(layout, {"1.0.2-ccc"}) == 0  # install.sh works there
    assert len(list(layout.code.iterdir())) == 5
    os.close(fd)
    assert code_tree.prune(layout, {"1.0.1-bbb", "1.0.2-ccc"}) == 18
    assert sorted(p.name for p in layout.code.iterdir()) == ["1.0.1-bbb", "1.0.2-ccc"]
    assert code_tree.prune(Layout.at(tmp_path / "none"), set()) == 0
