"""Build the runtime half of a medium: install.sh, and runtime/ with every package, signed as one.

    OUT/
      install.sh     the same text for every medium of one version, so that its SHA-256 can be told by letter
      vendor.pub     worth nothing by itself: install.sh takes it only if its fingerprint is the one the operator names
      README.txt
      runtime/       bundle.json model.sig wheels/ pip/ requirements/ setup/ units/ docs/ licenses/ sbom/

Model bundles lie beside runtime/. No C stub of Triton is among it: engine/kernels/launch.py compiles with the assembler
that Triton brings, and starts kernels through the CUDA driver's own functions, so nothing on the server needs one.
"""

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from . import keys, limits, media, names, oms, runtime_licenses, runtime_verify, runtime_wheels
from .build import write_failed
from .errors import CONTENT, USAGE, BundleError
from .manifest import MANIFEST, SIGNATURE
from .progress import Progress, silent
from .runtime_manifest import ROOMS, RuntimeFile, RuntimeManifest, RuntimeRequires
from .runtime_wheels import Wheel
from .strictjson import canonical

Torch = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class BuiltRuntime:
    """What was made, and the two numbers that the vendor tells the operator apart from the disk."""

    medium: Path
    manifest: RuntimeManifest
    fingerprint: str
    install_sha256: str


def build_runtime(
    out: Path,
    *,
    private_key: Path,
    sequence: int,
    torch: Torch = "cpu",
    pythons: Sequence[Path] = (),
    passphrase: bytes | None = None,
    progress: Progress = silent,
    packages: Sequence[str] | None = None,
    own_wheel: Path | None = None,
    wheels: Path | None = None,
) -> BuiltRuntime:
    """Collect, describe and sign the runtime into `out`; returns what was made. `out/runtime` must not exist.

    `pythons` are interpreters (with pip) of the versions that the servers have; the one that runs this, if none is
    given. `wheels` is a directory to take packages from instead of an index. `packages` replaces the dependencies of
    our wheel, and `own_wheel` the wheel itself (a vendor's own build).
    Progress stages: ``wheels`` (in steps), ``verify`` (in bytes).

    Raises BundleError with exit code 2 (an argument, or the target exists), 11 (a package that cannot be shipped), 13
    (pip could not get a package), 30 (space or I/O). Nothing is left at the target unless it is complete.
    """
    key = keys.load_private(private_key, passphrase)
    target = out / "runtime"
    if os.path.lexists(target):
        raise BundleError(
            f"{target} exists already; a runtime is never overwritten.",
            "Delete it yourself, or choose another disk.",
            USAGE,
        )
    if sequence < 1:
        raise BundleError("The sequence is a whole number from 1.", "Raise it with every release: --sequence N", USAGE)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".runtime-", dir=out) as scratch:
            partial = Path(scratch) / "runtime"
            partial.mkdir()
            facts = _collect(
                partial, pythons or [runtime_wheels.default_python()], torch, packages, own_wheel, wheels, progress
            )
            manifest = _describe(partial, sequence, *facts)
            text = manifest.to_bytes()
            resources = {f.path: f.sha256 for f in manifest.files} | {MANIFEST: hashlib.sha256(text).hexdigest()}
            _write(partial / MANIFEST, text)
            _write(partial / SIGNATURE, oms.sign(resources, f"atoll-{manifest.version}", key))
            public = keys.public_of(key)
            runtime_verify.verify_runtime(partial, {public.fingerprint: public}, progress=progress)
            install = install_script()
            _place(out, "install.sh", install, 0o755)
            _place(out, "vendor.pub", keys.public_pem(public), 0o644)
            _place(out, "README.txt", _data("README.txt"), 0o644)
            os.sync()
            os.rename(partial, target)
            _sync(out)
    except OSError as e:
        raise write_failed(out, e) from e
    return BuiltRuntime(out, manifest, public.fingerprint, hashlib.sha256(install).hexdigest())


def install_script() -> bytes:
    """install.sh: the shell part around the Python parts, which are put one after another in one file."""
    parts = []
    for name in ("p256.py", "check.py", "arguments.py", "trust.py", "begin.py"):
        text = _data(name).decode()
        while "from offline_bundle.medium." in text:  # they are one file now
            start = text.index("from offline_bundle.medium.")
            line_end = text.index("\n", start)
            end = text.index(")\n", start) + 2 if text[start:line_end].endswith("(") else line_end + 1
            text = text[:start] + text[end:]
        parts.append(text)
    whole = _data("install.sh.in").decode().replace("@PYTHON@\n", "\n\n".join(parts))
    compile("\n\n".join(parts), "install.sh", "exec")
    return whole.encode()


def _data(name: str) -> bytes:
    return (files("offline_bundle.medium") / name).read_bytes()


def _collect(
    partial: Path,
    pythons: Sequence[Path],
    torch: Torch,
    packages: Sequence[str] | None,
    own_wheel: Path | None,
    wheels: Path | None,
    progress: Progress,
) -> tuple[RuntimeRequires, str, list[Wheel]]:
    """Fill every room of the runtime; returns what it requires, its version, and its wheels."""
    for room in ROOMS:
        (partial / room).mkdir()
    house = partial / "wheels"
    steps = len(pythons) + 2
    progress("wheels", 0, steps)
    if own_wheel is not None:
        shutil.copyfile(own_wheel, house / own_wheel.name)
    else:
        runtime_wheels.build_own_wheel(house, pythons[0])
    ours = runtime_wheels.read_wheel(next(house.glob("atoll-*.whl")))
    wanted = runtime_wheels.requirements() if packages is None else list(packages)
    versions, house_wheels = [], {ours.path.name: ours}
    for done, python in enumerate(pythons, 1):
        version = runtime_wheels.python_version(python)
        if version in versions:
            raise BundleError(f"Python {version} was given twice.", "Give each version once.", USAGE)
        versions.append(version)
        progress("wheels", done, steps)
        with tempfile.TemporaryDirectory(dir=partial.parent) as scratch:
            runtime_wheels.download(python, wanted, Path(scratch), torch=torch, wheels=wheels)
            pins = [ours]
            for path in sorted(Path(scratch).iterdir()):
                if path.suffix != ".whl":
                    raise BundleError(f"{path.name} is not a wheel.", "The server cannot compile packages.", CONTENT)
                path = path.rename(house / path.name)
                pins.append(house_wheels.setdefault(path.name, runtime_wheels.read_wheel(path)))
        text = "".join(f"{wheel.pin}\n" for wheel in sorted(pins, key=lambda w: w.name))
        lists = partial / "requirements" / f"cp{version.replace('.', '')}"
        _write(lists.with_suffix(".txt"), text.encode())
        unpacked = dict(entry for wheel in pins for entry in runtime_wheels.contents(wheel.path))
        _write(lists.with_suffix(".json"), canonical({"files": unpacked}))
    pip = runtime_wheels.download_pip(pythons[0], partial / "pip", wheels)
    progress("wheels", steps, steps)
    every = sorted(house_wheels.values(), key=lambda w: w.name)
    _add_texts(partial, [*every, runtime_wheels.read_wheel(pip)])
    paths = [w.path for w in every]
    runtime_wheels.check_arch(paths, platform.machine())
    version, cuda, driver = runtime_wheels.torch_facts(every)
    if version and (cuda is not None) != (torch == "cuda"):
        raise BundleError(
            f"pip chose torch {version}, which is not the {torch} build.",
            "Look at 'pip config list': extra indexes may offer only the other build.",
            CONTENT,
        )
    copied = sum(w.path.stat().st_size for w in every) + pip.stat().st_size
    size = sum(w.unpacked for w in every)
    requires = RuntimeRequires(
        arch=platform.machine(),
        python=tuple(sorted(versions, key=lambda v: tuple(int(n) for n in v.split(".")))),
        glibc=runtime_wheels.glibc_floor(paths),
        torch=version,
        cuda=cuda,
        driver_min=driver,
        disk_bytes=copied + size * 4 // 3 + 64 * limits.MIB,  # a third for bytecode and small files' blocks
        unpacked_bytes=size,
    )
    return requires, ours.version, every


def _add_texts(partial: Path, wheels: Sequence[Wheel]) -> None:
    """What is to be read, and what install.sh runs."""
    ours = next(w for w in wheels if w.name == "atoll")
    for name, text in runtime_wheels.texts(ours.path):
        _write(partial / name, text)
    for wheel in wheels:
        for name, text in runtime_licenses.license_texts(wheel):
            _write(partial / "licenses" / wheel.name / name, text)
    _write(partial / "licenses/packages.tsv", runtime_licenses.overview(wheels))
    _write(partial / "setup/setup_release.py", _data("setup_release.py"))
    _write(partial / "setup/install.sh", install_script())
    _write(partial / "sbom/bom.cdx.json", runtime_licenses.sbom(ours.version, _now(), wheels))


def _describe(
    partial: Path, sequence: int, requires: RuntimeRequires, version: str, _: Sequence[Wheel]
) -> RuntimeManifest:
    """Every file with its size and hash."""
    entries = []
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        relative = path.relative_to(partial).as_posix()
        names.check(relative)
        path.chmod(0o644)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        role = ROOMS[relative.split("/", 1)[0]]
        entries.append(RuntimeFile(path=relative, role=role, sha256=digest, size=path.stat().st_size))
    for room in ROOMS:
        if not any((partial / room).iterdir()):
            (partial / room).rmdir()
    try:
        return RuntimeManifest(
            version=version,
            sequence=sequence,
            created=_now(),
            requires=requires,
            files=tuple(sorted(entries, key=lambda e: e.path)),
        )
    except ValidationError as e:
        raise BundleError(
            f"This cannot become a runtime: {e.errors()[0]['msg']}.", "Correct it, build again.", CONTENT
        ) from e


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        out.write(data)


def _place(out: Path, name: str, data: bytes, mode: int) -> None:
    """Write a file of the medium's root in one step; one that is there already is replaced."""
    temporary = out / f".{name}.partial"
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(out / name)


def _sync(directory: Path) -> None:
    with media.open_root(directory) as fd:
        os.fsync(fd)


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(epoch) if epoch.isdecimal() else int(time.time())
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
