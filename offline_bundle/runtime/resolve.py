"""Choose the wheels of a runtime: pip resolves them with the vendor's own pip settings, and downloads nothing yet.

The report of pip's dry run names each wheel with its address and hash. A wrong one (the other build of torch, another
processor, a source distribution) is refused before gigabytes are downloaded, and their size is known in advance. A
recent pip is used, run from its own wheel: those of distributions download every wheel only to read its metadata.
"""

import json
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from offline_bundle.errors import CONTENT, MISSING, USAGE, BundleError
from offline_bundle.text import reason, t

Torch = Literal["cpu", "cuda"]
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LOCK = Path(__file__).parents[1] / "lock.txt"
_NVIDIA = re.compile(r"(nvidia-|cuda-|triton\b)")  # only CUDA builds of torch depend on these


@dataclass(frozen=True, slots=True)
class Pick:
    """A wheel that pip chose."""

    name: str  # normalised, as in an index
    version: str
    url: str
    sha256: str | None  # None: the index names no hash
    requires: tuple[str, ...]

    @property
    def file(self) -> str:
        """Its file name."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Source:
    """Where pip looks: its own settings, or a directory of wheels (such as that of an earlier runtime).

    From an index, pip takes the versions of the lock, which development and tests use as well: two media of one version
    of Atoll carry the same packages, whenever they are built. From a directory, it takes what is there.
    """

    wheels: Path | None = None
    more: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        if self.wheels is None:
            return ["--constraint", str(LOCK), *self.more]
        return ["--no-index", "--find-links", str(self.wheels), "--find-links", str(self.wheels / "../pip")]


@dataclass(frozen=True, slots=True)
class Pip:
    """An interpreter with its own pip, or with one that runs from a wheel."""

    python: Path
    wheel: Path | None = None

    def run(self, *arguments: str, deed: str) -> str:
        """Run pip and return what it printed. Raises BundleError (13) with pip's own words."""
        tool = ["-m", "pip"] if self.wheel is None else [str(self.wheel / "pip")]
        command = [str(self.python), *tool, "--disable-pip-version-check", "--no-input", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as e:
            raise BundleError(
                t("Could not {deed}: {python}: {why}.", deed=deed, python=self.python, why=reason(e)),
                t("Give another --python."),
                MISSING,
            ) from e
        if done.returncode:
            errors = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line or "error" in line]
            words = " / ".join((errors or done.stderr.strip().splitlines())[-3:])[-600:]
            raise BundleError(
                t("Could not {deed} with pip: {words}", deed=deed, words=words),
                t("Check that this machine reaches a package index (pip config list), that --python has pip, and the "
                  "disk."),
                MISSING,
            )
        return done.stdout

    @property
    def version(self) -> str:
        """'3.11' of the interpreter."""
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run(
                [self.python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError) as e:
            raise BundleError(
                t("{python} does not run as a Python interpreter.", python=self.python),
                t("Give the path of one: --python"),
                USAGE,
            ) from e
        return done.stdout.strip()


def fetch_pip(python: Path, into: Path, source: Source) -> Path:
    """Download pip as a wheel with the pip of `python`. It does the rest here, and the install on the server."""
    Pip(python).run(
        "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(into), *source.arguments, "pip>=25",
        deed=t("get pip"),
    )  # fmt: skip
    return next(into.glob("pip-*.whl"))


def resolve(pip: Pip, wanted: Sequence[str], torch: Torch, source: Source) -> tuple[list[Pick], Source]:
    """The wheels that the requirements `wanted` need under pip's Python, and where pip found them.

    Raises BundleError: 13 if pip finds no set that fits, 11 if a wheel is not for Linux on this processor.
    """
    pins = [torch_pin(requirement, torch) for requirement in wanted]
    try:
        picks = _dry_run(pip, pins, source)
    except BundleError as e:
        if source.wheels is not None or torch == "cuda" or not any(pin.startswith("torch") for pin in pins):
            raise _other_build(e, pins, torch, pip) from e
        # PyPI has the CUDA build only; the CPU build is on PyTorch's own index.
        source = Source(more=("--extra-index-url", PYTORCH_INDEX))
        try:
            picks = _dry_run(pip, pins, source)
        except BundleError as again:
            raise _other_build(again, pins, torch, pip) from again
    check_platform([pick.file for pick in picks], platform.machine())
    _check_build(picks, torch)
    return picks, source


def torch_pin(requirement: str, torch: Torch) -> str:
    """The requirement; one that pins torch is narrowed to the CPU or the CUDA build."""
    match = re.fullmatch(r"torch==([0-9.]+)", requirement.replace(" ", ""))
    if match is None:
        return requirement
    # A local version sorts above the plain one, so for CUDA the CPU build must be excluded by name.
    return f"torch=={match[1]}+cpu" if torch == "cpu" else f"torch=={match[1]},!={match[1]}+cpu"


def check_platform(files: Iterable[str], arch: str) -> None:
    """Every file is a wheel for Linux on this processor, or for any. Raises BundleError (11)."""
    for name in files:
        if not name.endswith(".whl"):
            raise BundleError(
                t("{name} is not a wheel.", name=name), t("The server cannot compile packages."), CONTENT
            )
        tags = name.removesuffix(".whl").split("-")[-1]
        if tags != "any" and not all(tag.endswith(arch) and "linux" in tag for tag in tags.split(".")):
            raise BundleError(
                t("{name} is not for Linux on {arch}.", name=name, arch=arch),
                t("Build on a machine with the server's processor."),
                CONTENT,
            )


def _check_build(picks: Sequence[Pick], torch: Torch) -> None:
    """Check that the index offered the requested build of torch."""
    found = next((pick for pick in picks if pick.name == "torch"), None)
    if found is None:
        return
    needs = [r for r in found.requires if _NVIDIA.match(r) and "extra ==" not in r]
    if torch == "cuda" and (found.version.endswith("+cpu") or not needs):
        raise BundleError(
            t("The package index offers torch {version} as a CPU build only ({file}).",
              version=found.version, file=found.file),
            t("Look at 'pip config list': use an index with the CUDA build (PyPI has it), or build with --torch cpu."),
            CONTENT,
        )
    if torch == "cpu" and needs:
        raise BundleError(
            t("The package index offers torch {version} as a CUDA build only ({file}).",
              version=found.version, file=found.file),
            t("Look at 'pip config list': use an index with the CPU build, or build with --torch cuda."),
            CONTENT,
        )


def _other_build(error: BundleError, pins: Sequence[str], torch: Torch, pip: Pip) -> BundleError:
    """A clearer error, if only the right build of torch is missing; else `error`."""
    pin = next((pin for pin in pins if re.match(r"torch[=!]=", pin)), None)
    refused = re.search(r"satisfies the requirement torch[^ ]* \(from versions: ([^)]*)\)", error.message)
    if pin is None or refused is None:
        return error
    version = re.split(r"[+,]", pin.removeprefix("torch=="))[0]
    near = [v for v in refused[1].split(", ") if v.split("+")[0] == version] or ["-"]
    words = {"version": version, "python": pip.version, "found": ", ".join(near)}
    if torch == "cuda":
        return BundleError(
            t("None of pip's package indexes has the CUDA build of torch {version} for Python {python}. Builds of "
              "that version that they have: {found}.", **words),
            t("Look at 'pip config list': PyPI has the CUDA build. For servers without a GPU: --torch cpu"),
            MISSING,
        )
    return BundleError(
        t("None of pip's package indexes has the CPU build of torch {version} for Python {python}. Builds of that "
          "version that they have: {found}.", **words),
        t("PyTorch's own index has it: {index}. For servers with a GPU: --torch cuda", index=PYTORCH_INDEX),
        MISSING,
    )


def _dry_run(pip: Pip, wanted: Sequence[str], source: Source) -> list[Pick]:
    with tempfile.TemporaryDirectory(prefix="atoll-resolve-") as scratch:
        report = Path(scratch) / "report.json"
        pip.run(
            "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:",
            "--report", str(report), *source.arguments, *wanted, deed=t("choose the packages"),
        )  # fmt: skip
        found = json.loads(report.read_bytes())
    return sorted((_pick(item) for item in found["install"]), key=lambda pick: pick.name)


def _pick(item: dict[str, Any]) -> Pick:
    metadata, info = item["metadata"], item["download_info"]
    hashes = info.get("archive_info", {}).get("hashes", {})
    name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
    return Pick(name, metadata["version"], info["url"], hashes.get("sha256"), tuple(metadata.get("requires_dist", ())))
