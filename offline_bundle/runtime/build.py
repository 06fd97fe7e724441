"""Build the runtime half of a medium: install.sh, and runtime/ with every package, signed as one.

    OUT/
      install.sh     the same text for every medium of one version, so that its SHA-256 can be told by letter
      vendor.pub     worth nothing by itself: install.sh takes it only if its fingerprint is the one the operator names
      README.txt
      runtime/       bundle.json model.sig wheels/ pip/ requirements/ setup/ units/ docs/ licenses/ sbom/

Model bundles lie beside runtime/. No C stub of Triton is among it: the engine's launcher.py compiles with the assembler
that Triton brings, and starts kernels through the CUDA driver's own functions, so nothing on the server needs one.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offline_bundle import limits, names, parallel
from offline_bundle.errors import BUSY, CONTENT, USAGE, BundleError
from offline_bundle.model.build import write_failed
from offline_bundle.model.manifest import MANIFEST, SIGNATURE
from offline_bundle.parallel import Tick
from offline_bundle.progress import Progress, silent
from offline_bundle.runtime import download, licenses, resolve
from offline_bundle.runtime import verify as runtime_verify
from offline_bundle.runtime import wheels as runtime_wheels
from offline_bundle.runtime.download import Downloads, Load
from offline_bundle.runtime.manifest import ROOMS, RuntimeFile, RuntimeManifest, RuntimeRequires
from offline_bundle.runtime.medium_scripts import install_script, medium_file, setup_script
from offline_bundle.runtime.resolve import Pick, Pip, Source, Torch
from offline_bundle.runtime.wheels import Wheel
from offline_bundle.signing import keys, oms
from offline_bundle.signing.strict_json import canonical
from offline_bundle.store import untrusted_dir
from offline_bundle.text import complaint, t

_DOWNLOADS = ".atoll-downloads"  # below OUT; what a stopped run fetched, until a run ends well


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
    planned: Callable[[Load], None] = lambda load: None,
    packages: Sequence[str] | None = None,
    own_wheel: Path | None = None,
    wheels: Path | None = None,
) -> BuiltRuntime:
    """Collect, describe and sign the runtime into `out`; returns what was made. `out/runtime` must not exist.

    `pythons` are interpreters (with pip) of the versions that the servers have; the one that runs this, if none is
    given. `wheels` is a directory to take packages from instead of an index. `packages` replaces the dependencies of
    our wheel, and `own_wheel` the wheel itself (a vendor's own build). `planned` is told what will be downloaded,
    before it is. Progress stages: ``resolve`` (in steps), ``download``, ``read`` and ``verify`` (in bytes).

    Raises BundleError with exit code 2 (an argument, or the target exists), 11 (a package that cannot be shipped), 13
    (pip could not get a package), 30 (space or I/O), 75 (another build into `out`). Nothing is left at the target
    unless it is complete; downloads of a run that was stopped lie hidden in `out` until the next one ends well.
    """
    key = keys.load_private(private_key, passphrase)
    target = out / "runtime"
    if os.path.lexists(target):
        raise BundleError(
            t("{target} exists already; a runtime is never overwritten.", target=target),
            t("Delete it yourself, or choose another disk."),
            USAGE,
        )
    if sequence < 1:
        raise BundleError(
            t("The sequence is a whole number from 1."), t("Raise it with every release: --sequence N"), USAGE
        )
    choice = _Choice(pythons or [runtime_wheels.default_python()], torch, packages, own_wheel, wheels)
    try:
        with _workshop(out) as (scratch, downloads):
            partial = scratch / "runtime"
            partial.mkdir()
            requires, version = _collect(partial, downloads, choice, planned, progress)
            manifest = _describe(partial, sequence, requires, version)
            text = manifest.to_bytes()
            resources = {f.path: f.sha256 for f in manifest.files} | {MANIFEST: hashlib.sha256(text).hexdigest()}
            _write(partial / MANIFEST, text)
            _write(partial / SIGNATURE, oms.sign(resources, f"atoll-{manifest.version}", key))
            public = keys.public_of(key)
            runtime_verify.verify_runtime(partial, {public.fingerprint: public}, progress=progress)
            install = install_script()
            _place(out, "install.sh", install, 0o755)
            _place(out, "vendor.pub", keys.public_pem(public), 0o644)
            _place(out, "README.txt", medium_file("README.txt"), 0o644)
            os.sync()
            os.rename(partial, target)
            download.remove(downloads)
            _sync(out)
    except OSError as e:
        raise write_failed(out, e) from e
    return BuiltRuntime(out, manifest, public.fingerprint, hashlib.sha256(install).hexdigest())


@contextmanager
def _workshop(out: Path) -> Iterator[tuple[Path, Path]]:
    """(a directory that is gone afterwards, one for downloads that stays if it holds any), for one build at a time."""
    out.mkdir(parents=True, exist_ok=True)
    with untrusted_dir.open_root(out) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(
                t("Another build into {out} is running.", out=out), t("Wait until it is done, then run again."), BUSY
            ) from None
        for left_over in out.glob(".runtime-*"):  # of a build that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        downloads = out / _DOWNLOADS
        try:
            with tempfile.TemporaryDirectory(prefix=".runtime-", dir=out) as scratch:
                yield Path(scratch), downloads
        finally:
            if downloads.is_dir() and not any(downloads.iterdir()):
                downloads.rmdir()


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the runtime is made of, as the caller of `build_runtime` said."""

    pythons: Sequence[Path]
    torch: Torch
    packages: Sequence[str] | None
    own_wheel: Path | None
    wheels: Path | None


class _House:
    """Every wheel of the runtime, on its way into the rooms below `partial`."""

    def __init__(self, partial: Path, downloads: Path, choice: _Choice, progress: Progress) -> None:
        self.partial, self.choice, self.progress = partial, choice, progress
        self.wheels: dict[str, Wheel] = {}  # by file name
        self.contents: dict[str, dict[str, Any]] = {}
        self.picks: dict[str, list[Pick]] = {}  # by version of Python
        self._downloads = downloads

    def build_ours(self) -> Wheel:
        """Our own wheel."""
        house = self.partial / "wheels"
        if self.choice.own_wheel is not None:
            shutil.copyfile(self.choice.own_wheel, house / self.choice.own_wheel.name)
        else:
            runtime_wheels.build_own_wheel(house, self.choice.pythons[0])
        (path,) = house.glob("atoll-*.whl")
        self._look_into(path, lambda _: None)
        return self.wheels[path.name]

    def collect(self, planned: Callable[[Load], None]) -> Path:
        """Choose and bring every package for every Python; returns the path of pip's own wheel."""
        choice, source = self.choice, Source(self.choice.wheels)
        wanted = runtime_wheels.requirements() if choice.packages is None else list(choice.packages)
        pythons: dict[str, Path] = {}
        for python in choice.pythons:
            if (version := Pip(python).version) in pythons:
                raise BundleError(
                    t("Python {version} was given twice.", version=version), t("Give each version once."), USAGE
                )
            pythons[version] = python
        steps = len(pythons) + 1
        self.progress("resolve", 0, steps)
        wheel = resolve.fetch_pip(choice.pythons[0], self.partial / "pip", source)
        for done, (version, python) in enumerate(pythons.items(), 1):
            self.progress("resolve", done, steps)
            self.picks[version], source = resolve.resolve(Pip(python, wheel), wanted, choice.torch, source)
        self.progress("resolve", steps, steps)
        downloads = Downloads(self._downloads, Pip(choice.pythons[0], wheel))
        every = {pick.file: pick for picks in self.picks.values() for pick in picks}
        load = downloads.plan(list(every.values()))
        planned(load)
        downloads.fetch(load, source, self.progress)
        for file, pick in every.items():
            download.link(downloads.path(pick), self.partial / "wheels" / file)
        paths = sorted(((self.partial / "wheels" / file) for file in every), key=lambda path: -path.stat().st_size)
        total = sum(path.stat().st_size for path in paths)
        parallel.run(paths, self._look_into, stage="read", total=total, progress=self.progress)
        return wheel

    def _look_into(self, path: Path, tick: Tick) -> None:
        wheel, contents = runtime_wheels.read_wheel(path), dict(runtime_wheels.contents(path))
        self.wheels[path.name], self.contents[path.name] = wheel, contents
        tick(path.stat().st_size)


def _collect(
    partial: Path, downloads: Path, choice: _Choice, planned: Callable[[Load], None], progress: Progress
) -> tuple[RuntimeRequires, str]:
    """Fill every room of the runtime; returns what it requires, and its version."""
    for room in ROOMS:
        (partial / room).mkdir()
    house = _House(partial, downloads, choice, progress)
    ours = house.build_ours()
    pip = house.collect(planned)
    sizes, installed = [], []
    for version, picks in house.picks.items():
        files = [ours.path.name, *(pick.file for pick in picks)]
        pins = sorted((house.wheels[file] for file in files), key=lambda w: w.name)
        lists = partial / "requirements" / f"cp{version.replace('.', '')}"
        _write(lists.with_suffix(".txt"), "".join(f"{wheel.pin}\n" for wheel in pins).encode())
        unpacked = {path: entry for file in files for path, entry in house.contents[file].items()}
        _write(lists.with_suffix(".json"), canonical({"files": unpacked}))
        sizes.append(sum(wheel.unpacked for wheel in pins))
        installed.append(runtime_wheels.installed_bytes(unpacked))
    every = sorted(house.wheels.values(), key=lambda w: w.name)
    _add_texts(partial, [*every, runtime_wheels.read_wheel(pip)])
    version, cuda, driver = runtime_wheels.torch_facts(every)
    if version and (cuda is not None) != (choice.torch == "cuda"):
        raise BundleError(
            t("pip chose torch {version}, which is not the {build} build.", version=version, build=choice.torch),
            t("Look at 'pip config list': extra indexes may offer only the other build."),
            CONTENT,
        )
    copied = sum(w.path.stat().st_size for w in every) + pip.stat().st_size
    requires = RuntimeRequires(
        arch=platform.machine(),
        python=tuple(sorted(house.picks, key=lambda v: tuple(int(n) for n in v.split(".")))),
        glibc=runtime_wheels.glibc_floor([w.path for w in every]),
        torch=version,
        cuda=cuda,
        driver_min=driver,
        disk_bytes=copied + max(installed) + 64 * limits.MIB,
        unpacked_bytes=max(sizes),
    )
    return requires, ours.version


def _add_texts(partial: Path, wheels: Sequence[Wheel]) -> None:
    """What is to be read, and what install.sh runs."""
    ours = next(w for w in wheels if w.name == "atoll")
    for name, text in runtime_wheels.texts(ours.path):
        _write(partial / name, text)
    for wheel in wheels:
        for name, text in licenses.license_texts(wheel):
            _write(partial / "licenses" / wheel.name / name, text)
    _write(partial / "licenses/packages.tsv", licenses.overview(wheels))
    _write(partial / "setup/setup_release.py", setup_script())
    _write(partial / "setup/install.sh", install_script())
    _write(partial / "sbom/bom.cdx.json", licenses.sbom(ours.version, _now(), wheels))


def _describe(partial: Path, sequence: int, requires: RuntimeRequires, version: str) -> RuntimeManifest:
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
            t("This cannot become a runtime: {why}.", why=complaint(e.errors()[0])),
            t("Correct it, build again."),
            CONTENT,
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
    with untrusted_dir.open_root(directory) as fd:
        os.fsync(fd)


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(epoch) if epoch.isdecimal() else int(time.time())
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
