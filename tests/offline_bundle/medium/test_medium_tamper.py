"""Any change to a medium is found before anything from it runs, and with the same exit code by both verifiers."""

import base64
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_kit import oms_accepts
from runtime_kit import copy, flip, install, replace, sign_again, trees

from offline_bundle import BundleError
from offline_bundle.runtime.verify import verify_runtime
from offline_bundle.signing.keys import KeyPair, load_trusted

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux")


def wheel(runtime: Path) -> Path:
    return next(runtime.glob("wheels/tomlkit-*.whl"))


def pip(runtime: Path) -> Path:
    return next(runtime.glob("pip/pip-*.whl"))


def edit_manifest(runtime: Path) -> None:
    text = (runtime / "bundle.json").read_bytes()
    replace(runtime / "bundle.json", text.replace(b'"sequence":5', b'"sequence":6'))


def edit_payload(runtime: Path) -> None:
    """A resource more in what is said to be signed."""
    signature = json.loads((runtime / "model.sig").read_bytes())
    statement = json.loads(base64.b64decode(signature["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    signature["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    replace(runtime / "model.sig", json.dumps(signature).encode())


def link(runtime: Path) -> None:
    """The same bytes, by a link out of the medium."""
    path = wheel(runtime)
    elsewhere = runtime.parent / "elsewhere.whl"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_directory(runtime: Path) -> None:
    (runtime / "wheels").rename(runtime.parent / "elsewhere")
    (runtime / "wheels").symlink_to(runtime.parent / "elsewhere")


def pipe(runtime: Path) -> None:
    wheel(runtime).unlink()
    os.mkfifo(wheel_path(runtime))


def wheel_path(runtime: Path) -> Path:
    files = json.loads((runtime / "bundle.json").read_bytes())["files"]
    return runtime / next(f["path"] for f in files if "/tomlkit-" in f["path"])


def huge_signature(runtime: Path) -> None:
    replace(runtime / "model.sig", b" " * (4 << 20) + (runtime / "model.sig").read_bytes())


CANARY = b"import pathlib, sys\npathlib.Path('@').write_text('ran')\n"

TAMPERED: dict[str, tuple[int, Callable[[Path], object]]] = {
    "a wheel": (11, lambda r: flip(wheel(r))),
    "pip": (11, lambda r: flip(pip(r))),
    "the list of hashes": (11, lambda r: flip(next(r.glob("requirements/*.txt")))),
    "the script that runs first": (11, lambda r: flip(r / "setup/setup_release.py")),
    "the script, longer": (11, lambda r: replace(r / "setup/setup_release.py", CANARY)),
    "the copy of install.sh": (11, lambda r: flip(r / "setup/install.sh")),
    "a document": (11, lambda r: flip(r / "docs/en/bundle.md")),
    "a licence": (11, lambda r: flip(r / "licenses/packages.tsv")),
    "cut": (11, lambda r: replace(wheel(r), wheel(r).read_bytes()[:-1])),
    "longer": (11, lambda r: replace(wheel(r), wheel(r).read_bytes() + b"\0")),
    "empty": (11, lambda r: replace(wheel(r), b"")),
    "gone": (13, lambda r: wheel(r).unlink()),
    "one file more": (11, lambda r: (r / "wheels/evil-1.0-py3-none-any.whl").write_bytes(b"")),
    "one hidden file more": (11, lambda r: (r / "setup/.pth").write_bytes(b"")),
    "a module beside the script": (11, lambda r: (r / "setup/hashlib.py").write_bytes(CANARY)),
    "an empty directory": (11, lambda r: (r / "wheels/more").mkdir()),
    "git data": (11, lambda r: (r / ".git").mkdir()),
    "a link": (11, link),
    "a linked directory": (11, link_directory),
    "a pipe": (11, pipe),
    "bundle.json": (11, edit_manifest),
    "bundle.json gone": (13, lambda r: (r / "bundle.json").unlink()),
    "signature gone": (10, lambda r: (r / "model.sig").unlink()),
    "signature empty": (10, lambda r: replace(r / "model.sig", b"")),
    "signature not JSON": (10, lambda r: replace(r / "model.sig", b"\xff{")),
    "signature nested": (10, lambda r: replace(r / "model.sig", b"[" * 100_000)),
    "signature of something else": (10, edit_payload),
    "signature huge": (10, huge_signature),
    "signature is a link": (10, lambda r: ((r / "model.sig").rename(r / "x"), (r / "model.sig").symlink_to("x"))),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_found_before_anything_runs(
    name: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    code, spoil = TAMPERED[name]
    spoilt = copy(medium, tmp_path / "m")
    spoil(spoilt / "runtime")
    done = install(spoilt, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert done.returncode == code, done.stderr
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p").exists()
    with pytest.raises(BundleError) as refused:
        verify_runtime(spoilt / "runtime", load_trusted([vendor.public_path], spoilt / "runtime"))
    assert refused.value.exit_code == code
    if code == 11 and not name.startswith(("an empty", "git")):  # the format itself does not see those two
        assert not oms_accepts(spoilt / "runtime", vendor.public_path)


def test_the_good_one_is_accepted_by_all_three(medium: Path, bare: Path, vendor: KeyPair) -> None:
    assert install(medium, bare, "--verify-only", "--trust-key", vendor.public_path).returncode == 0
    verify_runtime(medium / "runtime", load_trusted([vendor.public_path], medium / "runtime"))
    assert oms_accepts(medium / "runtime", vendor.public_path)


def test_a_changed_script_does_not_run(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """Even one of the right size, and even when pip's wheel and a site module were changed along with it."""
    spoilt = copy(medium, tmp_path / "m")
    canary = CANARY.replace(b"@", os.fsencode(tmp_path / "canary"))
    script = spoilt / "runtime/setup/setup_release.py"
    replace(script, canary.ljust(script.stat().st_size, b"#"))
    (spoilt / "sitecustomize.py").write_bytes(canary)
    (spoilt / "hashlib.py").write_bytes(canary)
    done = install(
        spoilt, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path, cwd=spoilt
    )  # the current directory is the medium: nothing may be imported from it
    assert done.returncode == 11
    assert not (tmp_path / "canary").exists()


def test_a_disk_that_shows_other_bytes_now_and_then(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    """What runs is the copy that was hashed: either the good script, or none."""
    evil = copy(medium, tmp_path / "m")
    script = evil / "runtime/setup/setup_release.py"
    good, canary = script.read_bytes(), CANARY.replace(b"@", os.fsencode(tmp_path / "canary"))
    stop = threading.Event()

    def flicker() -> None:
        for text in itertools.cycle((canary.ljust(len(good), b"#"), good)):
            (evil / "next").write_bytes(text)
            (evil / "next").rename(script)
            if stop.wait(0.003):
                return

    thread = threading.Thread(target=flicker)
    thread.start()
    codes = set()
    for number in range(6):
        done = install(evil, bare, "--prefix", tmp_path / f"p{number}", "--trust-key", vendor.public_path)
        codes.add(done.returncode)
        if done.returncode == 13 and "Code installed" in done.stderr:
            break
    stop.set()
    thread.join()
    assert codes <= {11, 13}
    assert not (tmp_path / "canary").exists()


def test_koreans_are_told_in_korean(medium: Path, bare: Path) -> None:
    done = install(medium, bare, "--verify-only", language="ko_KR.UTF-8")
    assert done.returncode == 10
    assert "이 서버는 아직 어떤 키도 신뢰하지 않으며" in done.stderr
    assert install(medium, bare, "--verify-only").stderr.isascii()


# -- whom to trust ----------------------------------------------------------------------------------------------------


def test_nobody_is_trusted_unasked(medium: Path, bare: Path, tmp_path: Path) -> None:
    done = install(medium, bare, "--prefix", tmp_path / "p")
    assert done.returncode == 10
    assert "--fingerprint HEX or --trust-key FILE" in done.stderr
    assert not (tmp_path / "p").exists()


def test_strangers_are_not_trusted(
    medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    assert install(medium, bare, "--verify-only", "--trust-key", stranger.public_path).returncode == 10
    foreign = copy(medium, tmp_path / "m")
    sign_again(foreign, stranger)
    replace(foreign / "vendor.pub", stranger.public_path.read_bytes())
    for named in (("--trust-key", vendor.public_path), ("--fingerprint", vendor.fingerprint)):
        assert install(foreign, bare, "--verify-only", *named).returncode == 10
    assert install(foreign, bare, "--verify-only", "--fingerprint", stranger.fingerprint).returncode == 0


def test_a_key_on_the_medium_vouches_for_nothing(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    done = install(medium, bare, "--verify-only", "--trust-key", medium / "vendor.pub")
    assert done.returncode == 10
    assert "lies on the medium" in done.stderr
    (tmp_path / "my.pub").symlink_to(medium / "vendor.pub")
    assert install(medium, bare, "--verify-only", "--trust-key", tmp_path / "my.pub").returncode == 10
    assert install(medium, bare, "--verify-only", "--trust-key", tmp_path / "none.pub").returncode == 13
    assert install(medium, bare, "--verify-only", "--trust-key", vendor.private_path).returncode == 10


def test_fingerprints(medium: Path, bare: Path, vendor: KeyPair, stranger: KeyPair, tmp_path: Path) -> None:
    full = vendor.fingerprint
    grouped = " ".join(full[i : i + 4] for i in range(0, 64, 4)).upper()
    colons = ":".join(full[i : i + 2] for i in range(0, 64, 2))
    for text in (full, full[:32], grouped, full[:40].replace("a", "A"), colons):
        assert install(medium, bare, "--verify-only", "--fingerprint", text).returncode == 0, text
    for text, code in ((full[:31], 2), (full + "0", 2), ("", 2), ("g" * 64, 2), (full[1:] + "0", 10), ("0" * 32, 10)):
        assert install(medium, bare, "--verify-only", f"--fingerprint={text}").returncode == code, text
    wrong = copy(medium, tmp_path / "m")
    replace(wrong / "vendor.pub", stranger.public_path.read_bytes())
    assert install(wrong, bare, "--verify-only", "--fingerprint", full).returncode == 10
    (wrong / "vendor.pub").unlink()
    assert install(wrong, bare, "--verify-only", "--fingerprint", full).returncode == 13
    (wrong / "vendor.pub").write_bytes(b"\x00" * 100)
    assert install(wrong, bare, "--verify-only", "--fingerprint", full).returncode == 10


def test_answers_may_name_the_key(medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path) -> None:
    answers = tmp_path / "answers.toml"
    answers.write_text(f'schema_version = 1\ntrust_keys = ["{vendor.public_path}"]\nprefix = "{tmp_path}/p"\n')
    assert install(medium, bare, "--verify-only", "--answers", answers).returncode == 0
    for text in ("trust_keys = 3", "prefix = [", "\xff"):
        answers.write_text(text, encoding="latin-1")
        assert install(medium, bare, "--verify-only", "--answers", answers).returncode == 2
    assert install(medium, bare, "--verify-only", "--answers").returncode == 2


# -- signed by the right key, and still refused -----------------------------------------------------------------------


def entry(manifest: dict, number: int = 0) -> dict:
    return manifest["files"][number]


SIGNED_ODDLY: dict[str, Callable[[dict], object]] = {
    "a model's": lambda m: m.update(kind="model"),
    "another schema": lambda m: m.update(schema_version=2),
    "out of the directory": lambda m: entry(m).update(path="../../etc/passwd"),
    "absolute": lambda m: entry(m).update(path="/etc/passwd"),
    "control characters": lambda m: entry(m).update(path="docs/\x1b[2J"),
    "too deep": lambda m: entry(m).update(path="docs/a/b/c/d"),
    "a negative size": lambda m: entry(m).update(size=-1),
    "a size of True": lambda m: entry(m).update(size=True),
    "twice": lambda m: m["files"].append(entry(m)),
    "a sequence of words": lambda m: m.update(sequence="5"),
    "a version that is a path": lambda m: m.update(version="../../../tmp/x"),
    "no files": lambda m: m.update(files=[]),
    "paths that collide": lambda m: entry(m, 1).update(path=entry(m)["path"].upper()),
    "a reserved name": lambda m: entry(m).update(path="docs/aux.md"),
}


@pytest.mark.parametrize("name", SIGNED_ODDLY)
def test_odd_descriptions_are_refused_although_signed(
    name: str, medium: Path, bare: Path, vendor: KeyPair, tmp_path: Path
) -> None:
    odd = copy(medium, tmp_path / "m")
    sign_again(odd, vendor, SIGNED_ODDLY[name])
    done = install(odd, bare, "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    assert done.returncode in (11, 13), done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert trees(tmp_path / "p") == []
    with pytest.raises(BundleError) as refused:
        verify_runtime(odd / "runtime", load_trusted([vendor.public_path], odd / "runtime"))
    assert refused.value.exit_code in (11, 13)
