"""Build the runtime half of a medium: install.sh, and runtime/ with every package, signed as one.

    OUT/
      install.sh     identical on every medium of one version, so that the vendor can announce its SHA-256 by letter
      vendor.pub     not trusted by itself: install.sh only accepts it if its fingerprint is the one the operator gives
      README.txt
      runtime/       bundle.json model.sig wheels/ pip/ requirements/ setup/ units/ docs/ licenses/ sbom/ kernels/

Model bundles go beside runtime/. There is no C stub of Triton: the engine's launcher compiles with the assembler that
Triton brings and starts kernels through the CUDA driver's API, so the server needs no compiler.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offline_bundle import limits, names, parallel, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.bundle.output import now, sync_directory, write_failed
from offline_bundle.errors import BUSY, CONTENT, USAGE, BundleError
from offline_bundle.medium.scripts import install_script, medium_file, setup_script
from offline_bundle.parallel import Tick
from offline_bundle.progress import Progress, silent
from offline_bundle.runtime import download, licenses, resolve
from offline_bundle.runtime import verify as runtime_verify
from offline_bundle.runtime import wheels as runtime_wheels
from offline_bundle.runtime.download import Downloader, DownloadPlan
from offline_bundle.runtime.kernels import Kernels, Wish, compile_kernels
from offline_bundle.runtime.manifest import ROLE_OF_FOLDER, RuntimeFile, RuntimeManifest, RuntimeRequires
from offline_bundle.runtime.resolve import Pick, Pip, Source, Torch
from offline_bundle.runtime.wheels import Wheel
from offline_bundle.signing import keys, model_signing
from offline_bundle.signing.strict_json import canonical
from offline_bundle.text import complaint, t

_DOWNLOADS = ".atoll-downloads"  # below OUT; kept until a build completes, so that an interrupted one can be resumed


@dataclass(frozen=True, slots=True)
class BuiltRuntime:
    """The result, with the two hashes that the vendor gives the operator separately from the disk."""

    medium: Path
    manifest: RuntimeManifest
    fingerprint: str
    install_sha256: str
    kernels: Kernels


def build_runtime(
    out: Path,
    *,
    private_key: Path,
    sequence: int,
    torch: Torch = "cpu",
    pythons: Sequence[Path] = (),
    passphrase: bytes | None = None,
    progress: Progress = silent,
    planned: Callable[[DownloadPlan], None] = lambda plan: None,
    packages: Sequence[str] | None = None,
    own_wheel: Path | None = None,
    wheels: Path | None = None,
    kernels: Sequence[Wish] = (),
) -> BuiltRuntime:
    """Collect, describe and sign the runtime into `out`. `out/runtime` must not exist.

    `pythons` are interpreters (with pip) of the versions that the servers have; by default the one that runs this.
    `wheels` is a directory to take packages from instead of an index. `packages` replaces the dependencies of our
    wheel, and `own_wheel` the wheel itself (a vendor's own build). `kernels`: what GPU kernels are compiled for; they
    need the CUDA build, whose packages bring Triton. `planned` is called with the downloads before they start. Progress
    stages: ``resolve`` (in steps), ``download``, ``read``, ``verify`` (in bytes), and those of `compile_kernels`.

    Raises BundleError with exit code 2 (an argument, or the target exists), 11 (a package that cannot be shipped), 13
    (pip could not get a package), 30 (space or I/O), 75 (another build into `out`). The target appears only when it is
    complete. Downloads of an interrupted build stay in a hidden directory of `out` until a later build completes.
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
    ingredients = _Ingredients(
        pythons or [runtime_wheels.default_python()], torch, packages, own_wheel, wheels, kernels
    )
    try:
        with _directories(out) as (scratch, downloads):
            partial = scratch / "runtime"
            partial.mkdir()
            requires, version, compiled = _collect(partial, downloads, ingredients, planned, progress)
            manifest = _describe(partial, sequence, requires, version)
            text = manifest.to_bytes()
            resources = {f.path: f.sha256 for f in manifest.files} | {MANIFEST: hashlib.sha256(text).hexdigest()}
            _write(partial / MANIFEST, text)
            _write(partial / SIGNATURE, model_signing.sign(resources, f"atoll-{manifest.version}", key))
            public = keys.public_of(key)
            runtime_verify.verify_runtime(partial, {public.fingerprint: public}, progress=progress)
            install = install_script()
            _place(out, "install.sh", install, 0o755)
            _place(out, "vendor.pub", keys.public_pem(public), 0o644)
            _place(out, "README.txt", medium_file("README.txt"), 0o644)
            os.sync()
            os.rename(partial, target)
            download.remove(downloads)
            sync_directory(out)
    except OSError as e:
        raise write_failed(out, e) from e
    return BuiltRuntime(out, manifest, public.fingerprint, hashlib.sha256(install).hexdigest(), compiled)


@contextmanager
def _directories(out: Path) -> Iterator[tuple[Path, Path]]:
    """(a scratch directory, removed afterwards; a directory for downloads, kept unless it is empty), under a lock."""
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
class _Ingredients:
    """What to make the runtime of: arguments of `build_runtime`."""

    pythons: Sequence[Path]
    torch: Torch
    packages: Sequence[str] | None
    own_wheel: Path | None
    wheels: Path | None
    kernels: Sequence[Wish]


class _WheelCollection:
    """Collects every wheel of the runtime below `partial`."""

    def __init__(self, partial: Path, downloads: Path, ingredients: _Ingredients, progress: Progress) -> None:
        self.partial, self.ingredients, self.progress = partial, ingredients, progress
        self.wheels: dict[str, Wheel] = {}  # by file name
        self.contents: dict[str, dict[str, Any]] = {}
        self.picks: dict[str, list[Pick]] = {}  # by version of Python
        self._downloads = downloads

    def build_own(self) -> Wheel:
        """Build or copy our own wheel."""
        wheels = self.partial / "wheels"
        if self.ingredients.own_wheel is not None:
            shutil.copyfile(self.ingredients.own_wheel, wheels / self.ingredients.own_wheel.name)
        else:
            runtime_wheels.build_own_wheel(wheels, self.ingredients.pythons[0])
        (path,) = wheels.glob("atoll-*.whl")
        self._read(path, lambda _: None)
        return self.wheels[path.name]

    def collect(self, planned: Callable[[DownloadPlan], None]) -> Path:
        """Choose and download every package for every Python; returns the path of pip's own wheel."""
        ingredients, source = self.ingredients, Source(self.ingredients.wheels)
        wanted = runtime_wheels.requirements() if ingredients.packages is None else list(ingredients.packages)
        pythons: dict[str, Path] = {}
        for python in ingredients.pythons:
            if (version := Pip(python).version) in pythons:
                raise BundleError(
                    t("Python {version} was given twice.", version=version), t("Give each version once."), USAGE
                )
            pythons[version] = python
        steps = len(pythons) + 1
        self.progress("resolve", 0, steps)
        wheel = resolve.fetch_pip(ingredients.pythons[0], self.partial / "pip", source)
        for done, (version, python) in enumerate(pythons.items(), 1):
            self.progress("resolve", done, steps)
            self.picks[version], source = resolve.resolve(Pip(python, wheel), wanted, ingredients.torch, source)
        self.progress("resolve", steps, steps)
        downloads = Downloader(self._downloads, Pip(ingredients.pythons[0], wheel))
        every = {pick.file: pick for picks in self.picks.values() for pick in picks}
        plan = downloads.plan(list(every.values()))
        planned(plan)
        downloads.fetch(plan, source, self.progress)
        for file, pick in every.items():
            download.link(downloads.path(pick), self.partial / "wheels" / file)
        paths = sorted(((self.partial / "wheels" / file) for file in every), key=lambda path: -path.stat().st_size)
        total = sum(path.stat().st_size for path in paths)
        parallel.run(paths, self._read, stage="read", total=total, progress=self.progress)
        return wheel

    def _read(self, path: Path, tick: Tick) -> None:
        wheel, contents = runtime_wheels.read_wheel(path), dict(runtime_wheels.contents(path))
        self.wheels[path.name], self.contents[path.name] = wheel, contents
        tick(path.stat().st_size)


def _collect(
    partial: Path,
    downloads: Path,
    ingredients: _Ingredients,
    planned: Callable[[DownloadPlan], None],
    progress: Progress,
) -> tuple[RuntimeRequires, str, Kernels]:
    """Fill every folder of the runtime; returns what it requires, its version, and which kernels it has."""
    for folder in ROLE_OF_FOLDER:
        (partial / folder).mkdir()
    collection = _WheelCollection(partial, downloads, ingredients, progress)
    ours = collection.build_own()
    pip = collection.collect(planned)
    sizes, installed = [], []
    for version, picks in collection.picks.items():
        files = [ours.path.name, *(pick.file for pick in picks)]
        pins = sorted((collection.wheels[file] for file in files), key=lambda w: w.name)
        lists = partial / "requirements" / f"cp{version.replace('.', '')}"
        _write(lists.with_suffix(".txt"), "".join(f"{wheel.pin}\n" for wheel in pins).encode())
        unpacked = {path: entry for file in files for path, entry in collection.contents[file].items()}
        _write(lists.with_suffix(".json"), canonical({"files": unpacked}))
        sizes.append(sum(wheel.unpacked for wheel in pins))
        installed.append(runtime_wheels.installed_bytes(unpacked))
    every = sorted(collection.wheels.values(), key=lambda w: w.name)
    _add_texts(partial, [*every, runtime_wheels.read_wheel(pip)])
    version, cuda, driver = runtime_wheels.torch_facts(every)
    if version and (cuda is not None) != (ingredients.torch == "cuda"):
        raise BundleError(
            t("pip chose torch {version}, which is not the {build} build.", version=version, build=ingredients.torch),
            t("Look at 'pip config list': extra indexes may offer only the other build."),
            CONTENT,
        )
    compiled = Kernels()
    if ingredients.kernels:
        python = ingredients.pythons[0]
        name = f"cp{Pip(python).version.replace('.', '')}.txt"
        compiled = compile_kernels(
            partial, Pip(python, pip), partial / "requirements" / name, max(installed), ingredients.kernels, progress
        )
    copied = sum(w.path.stat().st_size for w in every) + pip.stat().st_size
    copied += sum(size for _, size in compiled.made.values())
    requires = RuntimeRequires(
        arch=platform.machine(),
        python=tuple(sorted(collection.picks, key=lambda v: tuple(int(n) for n in v.split(".")))),
        glibc=runtime_wheels.glibc_floor([w.path for w in every]),
        torch=version,
        cuda=cuda,
        driver_min=driver,
        disk_bytes=copied + max(installed) + 64 * limits.MIB,
        unpacked_bytes=max(sizes),
    )
    return requires, ours.version, compiled


def _add_texts(partial: Path, wheels: Sequence[Wheel]) -> None:
    """Add documents, licences and the bill of materials, and the programs that install.sh runs."""
    ours = next(w for w in wheels if w.name == "atoll")
    for name, text in runtime_wheels.texts(ours.path):
        _write(partial / name, text)
    for wheel in wheels:
        for name, text in licenses.license_texts(wheel):
            _write(partial / "licenses" / wheel.name / name, text)
    _write(partial / "licenses/packages.tsv", licenses.overview(wheels))
    _write(partial / "setup/setup_release.py", setup_script())
    _write(partial / "setup/install.sh", install_script())
    _write(partial / "sbom/bom.cdx.json", licenses.sbom(ours.version, now(), wheels))


def _describe(partial: Path, sequence: int, requires: RuntimeRequires, version: str) -> RuntimeManifest:
    """The manifest: every file with its size and hash."""
    entries = []
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        relative = path.relative_to(partial).as_posix()
        names.check_path(relative)
        path.chmod(0o644)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        role = ROLE_OF_FOLDER[relative.split("/", 1)[0]]
        entries.append(RuntimeFile(path=relative, role=role, sha256=digest, size=path.stat().st_size))
    for folder in ROLE_OF_FOLDER:
        if not any((partial / folder).iterdir()):
            (partial / folder).rmdir()
    try:
        return RuntimeManifest(
            version=version,
            sequence=sequence,
            created=now(),
            requires=requires,
            files=tuple(sorted(entries, key=lambda e: e.path)),
        )
    except ValidationError as e:
        raise BundleError(
            t("These packages cannot form a runtime: {why}.", why=complaint(e.errors()[0])),
            t("Correct it and build again."),
            CONTENT,
        ) from e


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        out.write(data)


def _place(out: Path, name: str, data: bytes, mode: int) -> None:
    """Write a file at the root of the medium in one step, replacing an existing one."""
    temporary = out / f".{name}.partial"
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(out / name)
