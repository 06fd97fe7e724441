"""A small but real runtime for the tests: our own wheel and what `atoll install` needs, and ways to run install.sh."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_bundle.progress import silent
from offline_bundle.runtime import wheels as runtime_wheels
from offline_bundle.runtime.build import build_runtime
from offline_bundle.runtime.download import Downloader
from offline_bundle.runtime.resolve import Pip, Source, Torch, fetch_pip, resolve
from offline_bundle.runtime.verify import inspect_runtime
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private
from offline_bundle.signing.strict_json import canonical

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.path.realpath(sys.executable))  # outside of any virtual environment: -I -S sees no packages there
UNSHARE = shutil.which("unshare") or "unshare"
# What `atoll install` itself needs; the packages of the engine and the gateway take minutes to install.
_LARGE = ("torch", "numpy", "safetensors", "tokenizers", "fastapi", "uvicorn", "httptools", "uvloop")
FEW = ["tomlkit>=0.13"]  # one package without dependencies
SMALL = [r for r in runtime_wheels.requirements() if not r.startswith(_LARGE)]


def wheelhouse(packages: Sequence[str], torch: Torch = "cpu") -> Path:
    """The wheels of `packages`, collected once and kept in .cache, so that only the first run asks an index."""
    made_of = [*packages, *([torch] if torch != "cpu" else []), sys.version[:6], "pip>=25"]
    house = ROOT / ".cache" / f"wheelhouse-{hashlib.sha256(chr(10).join(made_of).encode()).hexdigest()[:12]}"
    if not house.is_dir():
        partial = house.with_name(f".{house.name}.{os.getpid()}.partial")
        try:
            _collect(partial, packages, torch)
            partial.rename(house)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return house / "wheels"


def _collect(house: Path, packages: Sequence[str], torch: Torch) -> None:
    for room in ("wheels", "pip"):
        (house / room).mkdir(parents=True)
    python, source = Path(sys.executable), Source()
    pip = Pip(python, fetch_pip(python, house / "pip", source))
    picks, source = resolve(pip, packages, torch, source)
    downloads = Downloader(house / "wheels", pip)
    downloads.fetch(downloads.plan(picks), source, silent)


def build(
    out: Path,
    keys: KeyPair,
    *,
    own_wheel: Path,
    sequence: int = 5,
    packages: Sequence[str] = SMALL,
    torch: Torch = "cpu",
) -> Path:
    """A medium in `out` with a runtime of `packages`."""
    wheels, private = wheelhouse(packages, torch), keys.private_path
    build_runtime(
        out, private_key=private, sequence=sequence, torch=torch, packages=packages, own_wheel=own_wheel, wheels=wheels
    )
    return out


@dataclass(frozen=True)
class Installed:
    """What install.sh left in a prefix, and what it printed on the way, in Korean."""

    prefix: Path
    said: str


_SMALL_PROGRAM = """\
import sys
import zipfile

def main():
    if "--version" in sys.argv:
        print("{version}")
        return
    sys.stderr.write("error: there is no model on the medium\\n")
    sys.exit(13)
"""


_SOME_OF_OURS = (
    "installer/__init__.py", "installer/base/", "installer/decide/plan.py", "installer/gpu/nvml.py",
    "installer/operate/install.py", "systemd/",
)  # fmt: skip


def small_release(own_wheel: Path, directory: Path) -> Path:
    """A wheel with the name, version, documents, units and a few modules of ours, but with a program of ten lines.

    For tests of install.sh and setup_release.py themselves, which unpack, check and start any program: installing it
    takes a second instead of ten.
    """
    made = directory / own_wheel.name
    with zipfile.ZipFile(own_wheel) as ours, zipfile.ZipFile(made, "w") as wheel:
        for name in ours.namelist():
            if name.endswith("/METADATA"):
                lines = ours.read(name).decode().partition("\n\n")[0].splitlines()
                lines = [line for line in lines if line.startswith(("Metadata-Version:", "Name:", "Version:"))]
                version = next(line.partition(": ")[2] for line in lines if line.startswith("Version:"))
                wheel.writestr(name, "\n".join([*lines, "", ""]))
                wheel.writestr("appliance/__init__.py", "")
                wheel.writestr("appliance/cli/__init__.py", _SMALL_PROGRAM.format(version=version))
            elif name.endswith(("/WHEEL", "/RECORD")) or name.startswith(_SOME_OF_OURS) or "/share/doc/" in name:
                wheel.writestr(name, b"" if name.endswith("/RECORD") else ours.read(name))
    return made


def copy(medium: Path, target: Path) -> Path:
    """A medium to spoil. Files are hard links: replace them, do not write into them."""
    shutil.copytree(medium, target, copy_function=os.link, symlinks=True)
    return target


def replace(path: Path, data: bytes) -> None:
    """New content under the same name, without touching the medium that this one was copied from."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path) -> None:
    """Change one bit in the middle; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    replace(path, bytes(data))


def sign_again(medium: Path, keys: KeyPair, edit: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Sign, with the trusted key, what no honest builder would: bundle.json after `edit`, with real hashes."""
    runtime = medium / "runtime"
    manifest = json.loads((runtime / "bundle.json").read_bytes())
    for entry in manifest["files"]:
        data = (runtime / entry["path"]).read_bytes()
        entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    edit(manifest)
    text = canonical(manifest)
    resources = {f["path"]: f["sha256"] for f in manifest["files"]} | {"bundle.json": hashlib.sha256(text).hexdigest()}
    replace(runtime / "bundle.json", text)
    replace(runtime / "model.sig", model_signing.sign(resources, "odd", load_private(keys.private_path)))


def bare_path(directory: Path) -> Path:
    """A PATH with a Python and what every system has, but no pip, no compiler, no network tool."""
    directory.mkdir(parents=True)
    (directory / "python3").symlink_to(PYTHON)
    for name in ("sh", "readlink"):
        (directory / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    return directory


def command(medium: Path, *arguments: object, shell: str = "sh") -> list[str]:
    """install.sh in a network namespace of its own, with nothing but `lo`, which is down."""
    return [UNSHARE, "-rn", shell, str(medium / "install.sh"), *map(str, arguments)]


def install(
    medium: Path, path: Path, *arguments: object, shell: str = "sh", language: str = "C.UTF-8", **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run install.sh to its end, with `path` as the only PATH and no terminal."""
    environment = {"PATH": f"{path}", "HOME": str(path), "LANG": language}
    full = command(medium, *arguments, shell=shell)
    full[2] = shutil.which(shell) or shell
    return subprocess.run(
        full, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        start_new_session=True, **more,
    )  # fmt: skip


def digest12(medium: Path) -> str:
    """The end of the code tree's name."""
    return inspect_runtime(medium / "runtime").digest[:12]


def trees(prefix: Path) -> list[str]:
    """Every entry of the directory of code, hidden ones too."""
    code = prefix / "opt/atoll/code"
    return sorted(os.listdir(code)) if code.is_dir() else []
