"""Whom install.sh trusts: the named key and no other, never a revoked one, nothing from the medium's disk."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_kit import build as build_model
from bundle_kit import make_model
from runtime_kit import PYTHON, bare_path, copy, install, replace, sign_again

from offline_bundle.medium.scripts import INSTALL_SH, SETUP_RELEASE, install_script
from offline_bundle.signing.hash_words import EVEN_WORDS, ODD_WORDS, from_words, in_words
from offline_bundle.signing.keys import KeyPair

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux")
ROOT = Path(__file__).resolve().parents[3]


def trusting(prefix: Path, *keys: KeyPair, revoked: str = "") -> Path:
    """A prefix whose installed keys are these."""
    folder = prefix / "etc/atoll/trust"
    folder.mkdir(parents=True)
    for key in keys:
        shutil.copyfile(key.public_path, folder / f"{key.fingerprint[:16]}.pub")
    if revoked:
        entry = {"fingerprint": revoked, "at": "2026-05-03T09:00:00Z", "by": "root", "reason": "stolen"}
        (folder / "revoked.json").write_text(json.dumps({"schema_version": 1, "revoked": [entry]}))
    return prefix


# -- which key --------------------------------------------------------------------------------------------------------


def test_naming_a_key_leaves_the_installed_ones_out(
    medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    check = ("--verify-only", "--prefix", trusting(tmp_path / "p", vendor))
    assert install(medium, bare, *check).returncode == 0
    for named in (("--fingerprint", stranger.fingerprint), ("--trust-key", stranger.public_path)):
        done = install(medium, bare, *check, *named)
        assert done.returncode == 10, named
        assert "not by the one you named" in done.stderr
    both = install(medium, bare, *check, "--trust-key", vendor.public_path, "--fingerprint", stranger.fingerprint)
    assert both.returncode == 2
    assert "does not have the fingerprint" in both.stderr
    both = install(medium, bare, *check, "--trust-key", vendor.public_path, "--fingerprint", vendor.fingerprint)
    assert both.returncode == 0


def test_the_key_named_by_its_fingerprint_is_the_only_one_for_the_models_too(
    full_medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    """Also in a second run, when the code is there and was unpacked for somebody who named no key."""
    full = copy(full_medium, tmp_path / "m")
    build_model(make_model(tmp_path / "source"), full, stranger)
    prefix = trusting(tmp_path / "p", vendor, stranger)
    at = ("--prefix", prefix, "--dry-run", "--accept-license", "x@12345678")
    unnamed = install(full, bare, "--prefix", prefix, "--port", "1")
    assert "not trusted here" not in unnamed.stderr
    for run in (at, ("--prefix", prefix)):
        done = install(full, bare, *run, "--fingerprint", vendor.fingerprint)
        assert done.returncode == 10, done.stderr
        assert stranger.fingerprint in done.stdout + done.stderr


def test_a_revoked_key_is_refused_however_it_comes(
    medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    check = ("--verify-only", "--prefix", trusting(tmp_path / "p", vendor, stranger, revoked=vendor.fingerprint))
    for named in ((), ("--fingerprint", vendor.fingerprint), ("--trust-key", vendor.public_path)):
        done = install(medium, bare, *check, *named)
        assert done.returncode == 10, named
        assert "revoked here at 2026-05-03T09:00:00Z: stolen" in done.stderr
    other = copy(medium, tmp_path / "m")
    sign_again(other, stranger)
    assert install(other, bare, *check).returncode == 0
    alone = ("--verify-only", "--prefix", trusting(tmp_path / "q", vendor, revoked=vendor.fingerprint))
    assert "none yet" in install(other, bare, *alone).stderr  # as on a new server: a key must be named


@pytest.mark.parametrize("how", ["cut", "a link", "a pipe", "writable", "folder writable", "folder is a link"])
def test_a_list_that_cannot_be_relied_on_stops_everything(
    how: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    prefix = trusting(tmp_path / "p", vendor, revoked="ab" * 32)
    folder = prefix / "etc/atoll/trust"
    path = folder / "revoked.json"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "a link":
        path.rename(tmp_path / "list")
        path.symlink_to(tmp_path / "list")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "writable":
        path.chmod(0o662)
    elif how == "folder writable":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "trust")
        folder.symlink_to(tmp_path / "trust")
    done = install(medium, bare, "--verify-only", "--prefix", prefix, "--trust-key", vendor.public_path)
    assert done.returncode == 30, done.stderr
    assert "cannot be relied on" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_installed_key_that_anybody_may_write_to(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    prefix = trusting(tmp_path / "p", vendor)
    (prefix / f"etc/atoll/trust/{vendor.fingerprint[:16]}.pub").chmod(0o666)
    done = install(medium, bare, "--verify-only", "--prefix", prefix)
    assert done.returncode == 30
    assert "chmod go-w" in done.stderr


# -- words ------------------------------------------------------------------------------------------------------------


def test_words_are_the_pgp_word_list() -> None:
    """The list's own published example, and what makes words safe to say: each is in one list, once."""
    digits = "e58294f2e9a227486e8b061b31cc528fd7fa3f19"
    words = (
        "topmost Istanbul Pluto vagabond treadmill Pacific brackish dictator goldfish Medusa afflict bravado chatter "
        "revolver Dupont midsummer stopwatch whimsical cowbell bottomless"
    )
    assert in_words(digits) == words.lower()
    assert from_words(words) == digits
    assert len({*EVEN_WORDS, *ODD_WORDS}) == 512
    assert (len(EVEN_WORDS), len(ODD_WORDS)) == (256, 256)
    every = bytes(range(256)).hex()
    assert from_words(in_words(every)) == every
    heard = words.split()
    for wrong in (heard[1:], heard[:1] + heard, [heard[1], heard[0], *heard[2:]]):  # left out, twice, swapped
        with pytest.raises(ValueError, match=r"^\d+$"):
            from_words(" ".join(wrong))


def test_a_fingerprint_may_be_given_in_words(medium: Path, bare: Path, vendor: KeyPair) -> None:
    words = in_words(vendor.fingerprint).split()
    good = (words, words[:16], [word.upper() + "," for word in words[:20]])
    for said in good:
        assert install(medium, bare, "--verify-only", "--fingerprint", " ".join(said)).returncode == 0, said
    for said, code in ((words[:15], 2), ([*words[:3], *words[4:]], 2), ([*words[2:], *words[:2]], 10)):
        assert install(medium, bare, "--verify-only", "--fingerprint", " ".join(said)).returncode == code, said


def test_the_words_and_the_hash_that_a_vendor_reads_out(medium: Path, vendor: KeyPair) -> None:
    digest = hashlib.sha256((medium / "install.sh").read_bytes()).hexdigest()
    assert subprocess.run(["sha256sum", medium / "install.sh"], capture_output=True, text=True).stdout[:64] == digest
    assert hashlib.sha256(install_script()).hexdigest() == digest  # nothing of a single medium is in it
    command = [sys.executable, "-m", "appliance.cli", "keys"]
    shown = subprocess.run([*command, "words", digest, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(shown.stdout) == {"ok": True, "hex": digest, "words": in_words(digest)}
    back = subprocess.run([*command, "words", in_words(digest), "--json"], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(back.stdout)["hex"] == digest
    assert subprocess.run([*command, "words", "no such words"], capture_output=True, cwd=ROOT).returncode == 2
    key = subprocess.run([*command, "fingerprint", vendor.public_path], capture_output=True, text=True, cwd=ROOT).stdout
    assert " ".join(key.split("\n", 1)[1].split()) == in_words(vendor.fingerprint)


def defined_in(part: str) -> list[str]:
    """The names that a module's own statements define."""
    names: list[str] = []
    for node in ast.parse((ROOT / "offline_bundle" / part).read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    return names


@pytest.mark.parametrize("parts", [INSTALL_SH, SETUP_RELEASE], ids=["install.sh", "setup_release.py"])
def test_no_two_parts_of_a_script_use_the_same_name(parts: tuple[str, ...]) -> None:
    """They are one file on the medium: the later one would silently replace the earlier one's."""
    seen: dict[str, str] = {}
    for part in parts:
        for name in defined_in(part):
            assert name not in seen, f"{name} in {part} and in {seen[name]}"
            seen[name] = part


@pytest.mark.parametrize("parts", [INSTALL_SH, SETUP_RELEASE], ids=["install.sh", "setup_release.py"])
def test_a_part_finds_what_it_imports_in_an_earlier_part(parts: tuple[str, ...]) -> None:
    """The imports of one another are left out where the parts are joined, and nothing else of ours is there."""
    defined: set[str] = set()
    for part in parts:
        for node in ast.walk(ast.parse((ROOT / "offline_bundle" / part).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offline_bundle"):
                assert {alias.name for alias in node.names} <= defined, (part, node.module)
                assert not any(alias.asname for alias in node.names), part
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names, part
        defined |= {*defined_in(part)}


# -- nothing from the medium's disk -----------------------------------------------------------------------------------

def canary_python(at: Path, canary: Path) -> Path:
    """A program that works as a Python and tells that it ran."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(f'#!/bin/sh\necho ran >{canary}\nexec {PYTHON} "$@"\n')
    at.chmod(0o755)
    return at


def with_tools(bare: Path) -> Path:
    """A PATH like a server's, as far as it matters here."""
    for tool in ("readlink", "find"):
        if not (bare / tool).exists():
            (bare / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    return bare


@pytest.mark.parametrize("how", ["--python DIR", "--python FILE", "linked", "linked directory", "hard link", "on PATH",
                                 "cwd on PATH", "linked on PATH"])  # fmt: skip
def test_no_python_below_the_medium_ever_runs(
    how: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    evil, canary, linked = copy(medium, tmp_path / "m"), tmp_path / "canary", tmp_path / "linked"
    program = canary_python(evil / "py/bin/python3", canary)
    linked.mkdir()
    path, named, code, cwd = f"{with_tools(bare)}", [], 10, tmp_path
    if how == "--python DIR":
        named = ["--python", evil / "py"]
    elif how == "--python FILE":
        named = [f"--python={program}"]
    elif how == "linked":
        (linked / "python3").symlink_to(program)
        named = ["--python", linked]
    elif how == "linked directory":
        (linked / "py").symlink_to(evil / "py")
        named = ["--python", linked / "py"]
    elif how == "hard link":
        os.link(program, linked / "python3")
        named = ["--python", linked]
    elif how == "on PATH":
        path, code = f"{program.parent}:{path}", 0  # the entry is passed over: the server's own is used
    elif how == "cwd on PATH":
        path, code, cwd = f".::{path}:", 0, program.parent
    else:
        (linked / "python3").symlink_to(program)
        path = f"{linked}:{path}"
    for script in (evil / "install.sh", shutil.copy(medium / "install.sh", tmp_path / "mine.sh")):
        command = ["sh", script, "--medium", evil, "--verify-only", "--trust-key", vendor.public_path, *named]
        done = subprocess.run([shutil.which("sh") or "sh", *command[1:]], capture_output=True, text=True, cwd=cwd,
                              env={"PATH": path, "HOME": "/", "LANG": "C.UTF-8"})  # fmt: skip
        assert done.returncode == code, done.stderr
        if code:
            assert f"lies on the medium {evil}" in done.stderr
        assert not canary.exists()


def on_own_disk(script: str, tmp_path: Path, *given: object) -> subprocess.CompletedProcess[str]:
    """Run `script` with a tmpfs of its own mounted on $1/disk ("a disk"), another on $1/ram, and $2… as given."""
    for name in ("a disk", "ram", "bound"):
        (tmp_path / name).mkdir()
    mount = 'set -eu; base=$1; shift; disk="$base/a disk"; mount -t tmpfs none "$disk"; '
    mount += 'mount -t tmpfs none "$base/ram"; '
    full = ["unshare", "-rnm", "sh", "-c", mount + script, "sh", str(tmp_path), *map(str, given)]
    return subprocess.run(full, capture_output=True, text=True, env={**os.environ, "HOME": "/", "LANG": "C.UTF-8"})


def test_nothing_on_the_disk_of_the_medium_vouches_for_it(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """The medium is a directory of a mounted disk; key and Python lie elsewhere on that disk. Copies are accepted."""
    canary = tmp_path / "canary"
    canary_python(tmp_path / "program", canary)
    done = on_own_disk(
        'mkdir "$disk/medium" "$disk/keys"; cp -r "$1/." "$disk/medium"; cp "$2" "$disk/keys/vendor.pub"; '
        'cp "$2" "$base/ram/vendor.pub"; cp "$3" "$disk/keys/python3"; cp "$1/install.sh" "$base/mine.sh"; '
        'mount --bind "$disk/keys" "$base/bound"; ln -s "$disk/keys/vendor.pub" "$base/linked.pub"; '
        'try() { code=0; sh "$base/mine.sh" --medium "$disk/medium" --verify-only "$@" 2>"$base/said" || code=$?; '
        'echo $code; if [ $code != 0 ]; then cat "$base/said" >&2; fi; }; '
        'for key in "$disk/keys" "$base/bound" "$base/ram"; do try --trust-key "$key/vendor.pub"; done; '
        'try --trust-key "$base/linked.pub"; '
        'for at in "$disk/keys" "$base/bound" "$base/bound/python3"; do try --trust-key "$2" --python "$at"; done; '
        'PATH="$disk/keys:$base/bound:$PATH"; try --trust-key "$2"',
        tmp_path, medium, vendor.public_path, tmp_path / "program",
    )  # fmt: skip
    assert done.stdout.split() == ["10", "10", "0", "10", "10", "10", "10", "0"], done.stderr
    assert done.stderr.count("lies on the medium") == 6
    assert not canary.exists()


def test_code_is_not_unpacked_onto_the_disk_of_the_medium(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    done = on_own_disk(
        'mkdir "$disk/medium" "$disk/tmp"; cp -r "$1/." "$disk/medium"; code=0; '
        'sh "$disk/medium/install.sh" --prefix "$disk/p" --trust-key "$2" || code=$?; echo $code; '
        'code=0; TMPDIR="$disk/tmp" sh "$disk/medium/install.sh" --dry-run --prefix "$base/p" --trust-key "$2" || '
        'code=$?; echo $code; ls "$disk"',
        tmp_path, medium, vendor.public_path,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "2", "medium", "tmp"], done.stderr
    assert done.stderr.count("could be changed after it was checked") == 2


PROBE = """
import json, sys
from offline_bundle.on_medium import lies_on
base, medium, *paths = sys.argv[1:]
print(json.dumps([lies_on(path, medium) for path in paths]))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="loop devices need root")
def test_an_image_on_the_disk_and_an_image_of_the_disk(tmp_path: Path) -> None:
    """A file system in a file on the medium's disk is the medium's; one in a file elsewhere is not."""
    script = (
        'set -eu; cd "$1"; shift; mkdir disk inner other; truncate -s 16M disk.img other.img; '
        'for i in disk other; do mkfs.ext4 -q $i.img; mount -o loop $i.img $i; done; mkdir disk/medium; '
        'truncate -s 4M disk/inner.img; mkfs.ext4 -q disk/inner.img; mount -o loop disk/inner.img inner; '
        'touch inner/key other/key disk/key own; ln own hard; '
        'code=0; "$1" -c "$2" "$PWD" "$PWD/disk/medium" inner/key other/key disk/key own hard || code=$?; '
        'umount inner disk other; exit $code'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, PROBE],
                          capture_output=True, text=True, env=environment)  # fmt: skip
    if "mount" in done.stderr:
        pytest.skip(f"no loop mount here: {done.stderr.splitlines()[0]}")
    assert json.loads(done.stdout) == [True, False, True, False, False], done.stderr


def test_a_key_linked_into_a_medium_on_the_same_disk(medium: Path, bare: Path, tmp_path: Path) -> None:
    evil = copy(medium, tmp_path / "m")
    os.link(evil / "vendor.pub", tmp_path / "mine.pub")
    done = install(evil, bare, "--verify-only", "--trust-key", tmp_path / "mine.pub")
    assert done.returncode == 10
    assert "lies on the medium" in done.stderr
    replace(evil / "vendor.pub", b"")
    assert install(evil, bare, "--verify-only", "--trust-key", tmp_path / "mine.pub").returncode == 0


def test_a_python_in_a_bare_server_needs_no_tool(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """Without readlink and find the check before the first run still sees everything but links."""
    path = bare_path(tmp_path / "path")
    (path / "readlink").unlink()
    (path / "python3").unlink()
    (path / "python3").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (path / "python3").chmod(0o755)
    assert install(medium, path, "--verify-only", "--trust-key", vendor.public_path).returncode == 0
