"""install.sh makes a release from a medium on a machine with nothing but a shell and python3, and no network."""

import fcntl
import hashlib
import importlib.util
import json
import marshal
import os
import pty
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runtime_kit import (
    FEW,
    PYTHON,
    ROOT,
    UNSHARE,
    bare_path,
    command,
    copy,
    digest12,
    flip,
    install,
    replace,
    sign_again,
    trees,
    wheelhouse,
)

from installer.base.errors import InstallError
from installer.release.code_tree import read_facts, rebuild_bytecode, verify_code
from offline_bundle.medium.code_tree.bytecode import bytecode
from offline_bundle.runtime.build import build_runtime
from offline_bundle.signing.keys import KeyPair

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux")


def tree_of(prefix: Path) -> Path:
    (name,) = trees(prefix)
    return prefix / "opt/atoll/code" / name


def test_the_namespace_has_no_network_and_the_path_no_tools(bare: Path) -> None:
    probe = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    done = subprocess.run(["unshare", "-rn", PYTHON, "-c", probe], capture_output=True, text=True)
    assert "unreachable" in done.stderr
    for tool in ("pip", "pip3", "cc", "gcc", "curl", "tar"):
        assert shutil.which(tool, path=str(bare)) is None
    for package in ("cryptography", "pip", "pydantic"):
        done = subprocess.run([bare / "python3", "-I", "-S", "-c", f"import {package}"], capture_output=True, text=True)
        assert "ModuleNotFoundError" in done.stderr


def test_the_release_runs_by_itself(installed: Path, bare: Path) -> None:
    tree = tree_of(installed)
    run = {"env": {"PATH": str(bare), "PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"}, "text": True}
    done = subprocess.run([UNSHARE, "-rn", tree / "bin/atoll", "--version"], capture_output=True, **run)
    assert (done.returncode, done.stdout.strip()) == (0, read_facts(tree)["version"]), done.stderr
    done = subprocess.run([tree / "bin/atoll", "install", "--help"], capture_output=True, **run)
    assert done.returncode == 0, done.stderr
    show = "import sys; print(sys.path, sys.flags.isolated, sys.flags.no_site)"
    shown = subprocess.run([PYTHON, "-I", "-S", "-c", show], capture_output=True, text=True).stdout
    assert "site-packages" not in shown


def test_the_tree_is_whole_and_says_what_it_is(installed: Path, full_medium: Path, vendor: KeyPair) -> None:
    tree = tree_of(installed)
    facts = read_facts(tree)
    signed = json.loads((full_medium / "runtime/bundle.json").read_bytes())
    assert tree.name == f"{signed['version']}-{digest12(full_medium)}"
    assert {n: facts[n] for n in ("sequence", "requires")} == {n: signed[n] for n in ("sequence", "requires")}
    assert facts["key_fingerprint"] == vendor.fingerprint
    assert verify_code(tree) == []
    assert (tree / "share/docs/en/bundle.md").read_bytes() == (full_medium / "runtime/docs/en/bundle.md").read_bytes()
    assert (tree / "share/bundle.json").read_bytes() == (full_medium / "runtime/bundle.json").read_bytes()
    assert (tree / f"trust/{vendor.fingerprint[:16]}.pub").read_bytes() == vendor.public_path.read_bytes()
    writable = [p for p in tree.rglob("*") if p.is_file() and p.stat().st_mode & 0o222]
    assert writable == []
    assert os.access(tree / "bin/atoll", os.X_OK)
    assert not (tree / "start.py").stat().st_mode & 0o111
    assert list(tree.rglob("lib/appliance/**/__pycache__/*.pyc"))


@contextmanager
def restored(place: Path, keep: Path) -> Iterator[Path]:
    """`place` to spoil; afterwards it is as before. Files are hard links: replace them, do not write into them."""
    shutil.copytree(place, keep, copy_function=os.link, symlinks=True)
    yield place
    shutil.rmtree(place)
    shutil.copytree(keep, place, copy_function=os.link, symlinks=True)


@pytest.fixture(scope="module")
def small_prefix(tmp_path_factory: pytest.TempPathFactory, medium: Path, vendor: KeyPair) -> Path:
    """A prefix with the small release."""
    base = tmp_path_factory.mktemp("small-prefix")
    done = install(medium, bare_path(base / "path"), "--prefix", base / "p", "--trust-key", vendor.public_path)
    assert "Code installed in" in done.stderr, done.stderr
    return base / "p"


@pytest.fixture
def tree(small_prefix: Path, tmp_path: Path) -> Iterator[Path]:
    """The small release's tree, to spoil."""
    with restored(tree_of(small_prefix), tmp_path / "whole") as place:
        yield place


def compiled(module: str) -> str:
    """Where the bytecode of a module of the tree lies: 'lib/a/b.py' -> 'lib/a/__pycache__/b.cpython-3x.pyc'."""
    folder, _, name = module.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"


def test_changes_of_a_tree_are_found(tree: Path) -> None:
    changed, gone, pipe = "lib/installer/operate/install.py", "lib/installer/base/lock.py", "lib/installer/gpu/nvml.py"
    flip(tree / changed)
    (tree / "lib/installer/extra.py").write_text("")
    (tree / gone).unlink()
    replace(tree / "start.py", b"")
    replace(tree / "bin/atoll", (tree / "bin/atoll").read_bytes().replace(b"-I -S -B", b"-B"))
    (tree / "bin/other").symlink_to("atoll")
    os.mkfifo(tree / "lib/pipe.py")
    (tree / pipe).unlink()
    os.mkfifo(tree / pipe)
    expected = ["bin/atoll", "bin/other", "start.py", "lib/pipe.py", "lib/installer/extra.py", changed, gone, pipe]
    expected += [compiled(module) for module in (changed, gone, pipe)]  # bytecode whose source does not hold
    assert verify_code(tree) == sorted(expected)


def test_a_changed_list_does_not_hide_a_changed_file(tree: Path) -> None:
    """Whoever changes code can change files.json with it; the vendor's own list still exposes it."""
    flip(tree / "lib/installer/operate/install.py")
    (tree / "lib/evil.py").write_text("")
    replace(tree / "share/docs/en/install.md", b"Use no key.")
    replace(tree / "start.py", (tree / "start.py").read_bytes() + b"import evil\n")
    listed = json.loads((tree / "files.json").read_bytes())
    for name in ("lib/installer/operate/install.py", "lib/evil.py", "share/docs/en/install.md", "start.py"):
        data = (tree / name).read_bytes()
        listed["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    replace(tree / "files.json", json.dumps(listed).encode())
    changed = ["lib/evil.py", compiled("lib/installer/operate/install.py"), "lib/installer/operate/install.py",
               "share/docs/en/install.md", "start.py"]
    assert verify_code(tree) == changed
    signed = next(tree.glob("share/requirements/cp*.json"))
    flip(signed)
    assert verify_code(tree) == [signed.relative_to(tree).as_posix()]


def planted(tree: Path, module: str, text: str) -> Path:
    """Bytecode of other code in place of a module's, in every form that the import system accepts; also listed."""
    source = tree / "lib" / module
    cached = Path(importlib.util.cache_from_source(str(source)))
    head = cached.read_bytes()[:16]  # the hash of the unchanged source stands in it
    replace(cached, head + marshal.dumps(compile(text, str(source), "exec")))
    listed = json.loads((tree / "files.json").read_bytes())
    data, name = cached.read_bytes(), cached.relative_to(tree).as_posix()
    listed["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    replace(tree / "files.json", json.dumps(listed).encode())
    return cached


def test_changed_bytecode_is_found_although_the_list_was_changed_too(tree: Path) -> None:
    cached = planted(tree, "installer/base/lock.py", "print('planted')")
    assert verify_code(tree) == [cached.relative_to(tree).as_posix()]


def test_added_bytecode_programs_and_paths_are_found(tree: Path) -> None:
    """Each of these would be imported or run; none is bytecode of a signed source."""
    lib, suffix = tree / "lib", sysconfig.get_config_var("EXT_SUFFIX")
    added = [lib / "sitecustomize.pyc", lib / f"installer/verify{suffix}", lib / "odd.pth",
             lib / f"installer/__pycache__/other.{sys.implementation.cache_tag}.pyc",
             lib / f"installer/__pycache__/lock.{sys.implementation.cache_tag}.opt-1.pyc"]  # fmt: skip
    listed = json.loads((tree / "files.json").read_bytes())
    for path in added:
        path.write_bytes(b"x")
        entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "size": 1}
        listed["files"][path.relative_to(tree).as_posix()] = entry
    replace(tree / "files.json", json.dumps(listed).encode())
    assert verify_code(tree) == sorted(path.relative_to(tree).as_posix() for path in added)


def test_the_check_does_not_run_the_bytecode_that_it_checks(installed: Path, bare: Path, tmp_path: Path) -> None:
    with restored(tree_of(installed), tmp_path / "whole") as tree:
        planted(tree, "installer/operate/deep_verify/run.py", "print('planted'); raise SystemExit(0)")
        command = [tree / "bin/atoll", "verify", "--prefix", installed]
        done = subprocess.run(command, env={"PATH": str(bare)}, capture_output=True, text=True)
    assert "planted" not in done.stdout
    assert done.returncode not in (0, 1), done.stderr


def test_bytecode_is_made_again_from_verified_sources(tree: Path) -> None:
    cached = planted(tree, "installer/base/lock.py", "print('planted')")
    Path(importlib.util.cache_from_source(str(tree / "lib/installer/decide/plan.py"))).unlink()
    (tree / "lib/sitecustomize.pyc").write_bytes(b"x")
    assert rebuild_bytecode(tree) == 2
    assert verify_code(tree) == []
    assert b"planted" not in cached.read_bytes()
    assert Path(importlib.util.cache_from_source(str(tree / "lib/installer/decide/plan.py"))).is_file()
    flip(tree / "lib/installer/operate/install.py")
    with pytest.raises(InstallError, match="operate/install") as caught:
        rebuild_bytecode(tree)
    assert caught.value.exit_code == 11


def test_bytecode_does_not_depend_on_the_process_that_makes_it(installed: Path) -> None:
    """Other hash seeds, other modules and strings in memory: the same bytes, and no difference in the whole tree."""
    show = (
        "import sys, hashlib, decimal, asyncio, email; from offline_bundle.medium.code_tree.bytecode import bytecode;"
        "[sys.intern(chr(c)) for c in range(256)];"
        "print(hashlib.sha256(b''.join(bytecode(open(p, 'rb').read(), p) for p in sys.argv[1:])).hexdigest())"
    )
    sources = [str(path) for path in sorted((tree_of(installed) / "lib/installer").rglob("*.py"))]
    said = set()
    for seed in ("0", "7"):
        run = [PYTHON, *(["-X", "importtime"] if seed == "7" else []), "-c", show, *sources]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        said.add(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)
    both = b"".join(bytecode(Path(path).read_bytes(), path) or b"" for path in sources)
    assert said == {hashlib.sha256(both).hexdigest() + "\n"}


def test_installing_again_replaces_a_tree_that_differs(
    tree: Path, medium: Path, bare: Path, vendor: KeyPair, small_prefix: Path
) -> None:
    """The medium's own code checks, so it does not matter what the changed tree claims about itself."""
    planted(tree, "installer/base/lock.py", "print('planted')")
    (tree / "lib/evil.py").write_text("")
    done = install(medium, bare, "--prefix", small_prefix, "--trust-key", vendor.public_path)
    assert done.returncode == 13, done.stderr  # there is no model on the medium
    assert "is not what was signed" in done.stderr
    assert "will be rebuilt" in done.stderr
    assert verify_code(tree) == []
    assert trees(small_prefix) == [tree.name]


def test_again_is_quick_and_changes_nothing(installed: Path, full_medium: Path, bare: Path, vendor: KeyPair) -> None:
    before = {p: p.stat().st_mtime_ns for p in tree_of(installed).rglob("*")}
    began = time.monotonic()
    done = install(full_medium, bare, "--prefix", installed, "--trust-key", vendor.public_path)
    assert done.returncode == 13
    assert "already in" in done.stderr
    assert time.monotonic() - began < 20
    assert {p: p.stat().st_mtime_ns for p in tree_of(installed).rglob("*")} == before


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_any_shell_will_do(shell: str, medium: Path, bare: Path, vendor: KeyPair) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    if shell == "busybox":
        run = ["busybox", "sh", str(medium / "install.sh"), "--verify-only", "--trust-key", str(vendor.public_path)]
        done = subprocess.run(run, capture_output=True, text=True)
    else:
        done = install(medium, bare, "--verify-only", "--trust-key", vendor.public_path, shell=shell)
    assert done.returncode == 0, done.stderr
    assert "each as it was signed" in done.stderr


def test_install_sh_may_come_from_elsewhere(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """The strongest form: the script comes through another channel than the disk."""
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copyfile(medium / "install.sh", mine / "install.sh")
    done = install(mine, bare, "--medium", medium, "--verify-only", "--trust-key", vendor.public_path)
    assert done.returncode == 0, done.stderr
    done = install(mine, bare, "--verify-only", "--trust-key", vendor.public_path)
    assert done.returncode == 13
    assert "--medium DIR" in done.stderr


@pytest.mark.parametrize("lines", [1, 10, 40, 60, 200, 500])
def test_a_cut_install_sh_does_nothing(lines: int, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    spoilt = copy(medium, tmp_path / "m")
    text = (medium / "install.sh").read_bytes().splitlines(keepends=True)
    assert lines < len(text)
    replace(spoilt / "install.sh", b"".join(text[:lines]))
    install(spoilt, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("flag,expected", [("--dry-run", {13}), ("--preflight", {0, 3, 13})])
def test_looking_leaves_nothing(
    flag: str, expected: set[int], full_medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    full = command(full_medium, flag, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    done = subprocess.run(full, env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True)
    assert done.returncode in expected, done.stderr  # `atoll` ran: there is no model to install
    assert "Ready for the dry run" in done.stderr
    assert not (tmp_path / "p").exists()
    assert list(temporary.iterdir()) == []


# -- interrupted ------------------------------------------------------------------------------------------------------


def start(medium: Path, bare: Path, prefix: Path, key: Path) -> subprocess.Popen[str]:
    full = command(medium, "--prefix", prefix, "--trust-key", key)
    return subprocess.Popen(full, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(prefix: Path, start_of_name: str) -> None:
    deadline = time.monotonic() + 60
    while not any(name.startswith(start_of_name) for name in trees(prefix)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_install_cleans_up(
    stop: signal.Signals, full_medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    process = start(full_medium, bare, tmp_path / "p", vendor.public_path)
    wait_for(tmp_path / "p", ".partial-")
    time.sleep(0.3)  # pip has begun
    os.killpg(process.pid, stop)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in words
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("moment", [".incoming-", ".partial-"])
def test_a_killed_install_is_finished_by_the_next(
    moment: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    process = start(medium, bare, tmp_path / "p", vendor.public_path)
    wait_for(tmp_path / "p", moment)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    left = trees(tmp_path / "p")
    assert left
    assert all(name.startswith(".") for name in left)
    done = install(medium, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert "Code installed in" in done.stderr
    assert len(trees(tmp_path / "p")) == 1
    assert verify_code(tree_of(tmp_path / "p")) == []


def test_what_a_killed_install_left_is_not_trusted(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """Half-copied and damaged files in the private copy are made again."""
    incoming = tmp_path / f"p/opt/atoll/code/.incoming-{read_version(medium)}-{digest12(medium)}"
    shutil.copytree(medium / "runtime", incoming)
    for path in incoming.glob("wheels/tomlkit-*.whl"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    (incoming / "setup/setup_release.py").write_text("raise SystemExit('ran')\n")
    done = install(medium, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert "Code installed in" in done.stderr, done.stderr
    assert verify_code(tree_of(tmp_path / "p")) == []


def read_version(medium: Path) -> str:
    return json.loads((medium / "runtime/bundle.json").read_bytes())["version"]


def test_one_at_a_time(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    code = tmp_path / "p/opt/atoll/code"
    code.mkdir(parents=True)
    fd = os.open(code, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    done = install(medium, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    os.close(fd)
    assert done.returncode == 75
    assert trees(tmp_path / "p") == []


# -- what the server lacks --------------------------------------------------------------------------------------------


def test_no_python_or_an_old_one_is_told(medium: Path, vendor: KeyPair, bare: Path, tmp_path: Path) -> None:
    (bare / "python3").unlink()
    done = install(medium, bare, "--verify-only", "--trust-key", vendor.public_path)
    assert done.returncode == 3
    assert "no python3 at all" in done.stderr
    (bare / "python3").write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2"; exit 1\n')
    (bare / "python3").chmod(0o755)
    done = install(medium, bare, "--verify-only", "--trust-key", vendor.public_path)
    assert done.returncode == 3
    assert "Python 3.9.2" in done.stderr
    assert "--python DIR" in done.stderr
    root = PYTHON.parent.parent
    for named in (root, root / "bin", PYTHON):
        done = install(medium, bare, "--verify-only", f"--python={named}", "--trust-key", vendor.public_path)
        assert done.returncode == 0, done.stderr
    done = install(medium, bare, "--verify-only", "--python", tmp_path)
    assert done.returncode == 3


@pytest.mark.parametrize(
    "field,value,words",
    [("python", ["3.99"], "for Python 3.99"), ("arch", "riscv64", "for riscv64"), ("glibc", "9.1", "needs glibc 9.1")],
)
def test_another_machine_is_refused_before_the_copy(
    field: str, value: object, words: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    other = copy(medium, tmp_path / "m")
    sign_again(other, vendor, lambda manifest: manifest["requires"].update({field: value}))
    done = install(other, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "p").exists()


def in_small_disk(medium: Path, key: Path, at: Path, mount: str) -> subprocess.CompletedProcess[str]:
    """install.sh onto a file system of its own, which is gone with the namespace."""
    at.mkdir()
    script = f'mount -t tmpfs -o {mount} none "$1" && sh "$2" --prefix "$1/p" --trust-key "$3"; code=$?; '
    script += 'find "$1" >&2; exit $code'
    full = ["unshare", "-rnm", "sh", "-c", script, "sh", str(at), str(medium / "install.sh"), str(key)]
    return subprocess.run(full, capture_output=True, text=True)


def test_a_small_disk_is_refused_before_the_copy(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    done = in_small_disk(medium, vendor.public_path, tmp_path / "disk", "size=16m")
    assert done.returncode == 30, done.stderr
    assert "MiB free" in done.stderr
    assert "opt/atoll" not in done.stderr.split("run again.")[1]


@pytest.mark.parametrize("unpacked", [-0.1, 0.5])
def test_a_disk_that_fills_up_on_the_way(unpacked: float, full_medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """In the copy, and in pip."""
    other = copy(full_medium, tmp_path / "m")
    manifest = json.loads((full_medium / "runtime/bundle.json").read_bytes())
    copied = sum(f["size"] for f in manifest["files"])
    size = int(copied + unpacked * manifest["requires"]["unpacked_bytes"])
    sign_again(other, vendor, lambda manifest: manifest["requires"].update(disk_bytes=0))
    done = in_small_disk(other, vendor.public_path, tmp_path / "disk", f"size={size}")
    assert done.returncode == 30, done.stderr[:2000]
    assert "No space left" in done.stderr
    assert ".partial-" not in done.stderr


def test_a_read_only_disk(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    done = in_small_disk(medium, vendor.public_path, tmp_path / "disk", "ro,size=900m")
    assert done.returncode == 30, done.stderr
    assert "Read-only" in done.stderr


# -- upgrades ---------------------------------------------------------------------------------------------------------


def test_upgrades_trust_the_installed_keys_and_never_go_back(
    medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    prefix = tmp_path / "p"
    (prefix / "etc/atoll/trust").mkdir(parents=True)
    shutil.copyfile(vendor.public_path, prefix / "etc/atoll/trust/vendor.pub")
    check = ("--prefix", prefix, "--verify-only")
    assert install(medium, bare, *check).returncode == 0
    foreign = copy(medium, tmp_path / "foreign")
    sign_again(foreign, stranger)
    done = install(foreign, bare, *check)
    assert done.returncode == 10
    assert "not trusted here" in done.stderr
    state = prefix / "var/lib/atoll/state"
    state.mkdir(parents=True)
    (state / "sequence.json").write_text(json.dumps({"sequences": {"runtime/atoll": 6}}))
    done = install(medium, bare, *check)
    assert done.returncode == 12
    assert "it is older" in done.stderr
    assert install(medium, bare, *check, "--allow-downgrade", "the new one is broken").returncode == 0
    newer = copy(medium, tmp_path / "newer")
    sign_again(newer, vendor, lambda manifest: manifest.update(sequence=6))
    assert install(newer, bare, *check).returncode == 0
    (state / "sequence.json").write_text("{")
    assert install(newer, bare, *check).returncode == 30


def test_a_second_runtime_stands_beside_the_first(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    newer, arguments = copy(medium, tmp_path / "newer"), ("--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    sign_again(newer, vendor, lambda manifest: manifest.update(sequence=6))
    for each in (medium, newer):
        assert "Code installed in" in install(each, bare, *arguments).stderr
    assert {name[-12:] for name in trees(tmp_path / "p")} == {digest12(medium), digest12(newer)}


# -- at a terminal ----------------------------------------------------------------------------------------------------


def at_terminal(medium: Path, answer: str) -> tuple[int, str]:
    """Run install.sh --verify-only on a terminal and type `answer` at its question."""
    pid, fd = pty.fork()
    if pid == 0:
        full = command(medium, "--verify-only", "--prefix", "/nonexistent/p")
        os.execvp(full[0], full)
    shown, typed = b"", False
    while True:
        try:
            block = os.read(fd, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block
        if not typed and b"or its words): " in shown:
            os.write(fd, answer.encode() + b"\n")
            typed = True
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def test_the_first_install_asks_for_the_fingerprint(medium: Path, vendor: KeyPair, stranger: KeyPair) -> None:
    code, shown = at_terminal(medium, vendor.fingerprint[:32])
    assert code == 0, shown
    asked = shown.split("or its words): ")[0]
    assert vendor.fingerprint[:16] not in asked  # what the disk claims is not there to be copied
    code, shown = at_terminal(medium, stranger.fingerprint)
    assert code == 10
    assert "not by the one you named" in shown
    assert at_terminal(medium, "")[0] == 10
    assert at_terminal(medium, "yes")[0] == 2


def test_a_program_that_a_package_brings_can_be_started(
    small_wheel: Path, vendor: KeyPair, bare: Path, tmp_path: Path
) -> None:
    """Triton's assembler is one. Nothing else becomes a program on the way."""
    house = tmp_path / "house"
    shutil.copytree(wheelhouse(FEW).parent, house, copy_function=os.link)
    with zipfile.ZipFile(house / "wheels/prog-1.0-py3-none-any.whl", "w") as wheel:
        for name, mode in (("prog/assembler", 0o755), ("prog/data", 0o644)):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100000 | mode) << 16
            wheel.writestr(entry, "#!/bin/sh\necho assembled\n")
        wheel.writestr("prog-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: prog\nVersion: 1.0\n")
        wheel.writestr("prog-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("prog-1.0.dist-info/RECORD", "")
    medium, key = tmp_path / "medium", vendor.private_path
    packages, wheels = [*FEW, "prog==1.0"], house / "wheels"
    build_runtime(medium, private_key=key, sequence=5, packages=packages, own_wheel=small_wheel, wheels=wheels)
    install(medium, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    brought = tree_of(tmp_path / "p") / "lib/prog"
    assert subprocess.run([brought / "assembler"], capture_output=True, text=True).stdout == "assembled\n"
    assert not (brought / "data").stat().st_mode & 0o111
    assert not (brought / "assembler").stat().st_mode & 0o222
