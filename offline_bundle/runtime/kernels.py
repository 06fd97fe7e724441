"""The GPU kernels of a runtime, compiled when the medium is built: kernels/<compute capability>/.

They belong to the code and not to the models: a kernel fits one version of Atoll's sources and of Triton, and a
model's bundle outlives both. So they are compiled by the very packages of the medium, unpacked for that purpose, and
signed with them. No GPU is needed. Only data: machine code for GPUs, and an index of it.

Triton's cache of the user who builds keeps what was compiled: an interrupted build continues, and the next medium
compiles only what has changed.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offline_bundle.errors import CONTENT, SPACE_IO, USAGE, BundleError
from offline_bundle.limits import MIB
from offline_bundle.progress import Progress
from offline_bundle.runtime.resolve import Pip
from offline_bundle.text import reason, t

# Nothing else reaches the compiler: a variable that changes its code would make kernels that no server can use.
_INHERITED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")
_SLACK = 512 * MIB


@dataclass(frozen=True, slots=True)
class Wish:
    """Kernels for a model with these flags of `atoll engine`, on this GPU. `model`: a directory with a config.json."""

    model: Path
    gpu: str
    flags: tuple[str, ...]


@dataclass(slots=True)
class Kernels:
    """What was compiled: compute capability -> (kernels, bytes), and what could not be, which servers will try."""

    made: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def compile_kernels(
    partial: Path, pip: Pip, requirements: Path, unpacked: int, wishes: Sequence[Wish], progress: Progress
) -> Kernels:
    """Fill `partial`/kernels, with the packages in `partial`/wheels that `requirements` names for the Python of `pip`.

    `unpacked`: their bytes. Progress stages: ``unpack`` (in steps), ``list`` (models), ``compile`` (kernels).
    Raises BundleError.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-kernels-") as scratch:
        _check_space(Path(scratch), unpacked)
        packages = Path(scratch) / "packages"
        progress("unpack", 0, 1)
        pip.run(
            "install", "--quiet", "--no-index", "--require-hashes", "--no-deps", "--only-binary", ":all:",
            "--find-links", str(partial / "wheels"), "--requirement", str(requirements), "--target", str(packages),
            "--no-compile", "--no-cache-dir", deed=t("unpack the packages"),
        )  # fmt: skip
        progress("unpack", 1, 1)
        listed = Path(scratch) / "wishes.json"
        raw = [{"model": str(wish.model.resolve()), "gpu": wish.gpu, "flags": wish.flags} for wish in wishes]
        listed.write_text(json.dumps(raw), "utf-8")
        return _run(pip.python, packages, listed, partial / "kernels", progress)


def _check_space(scratch: Path, unpacked: int) -> None:
    info = os.statvfs(scratch)
    free = info.f_bavail * info.f_frsize
    if free < unpacked + _SLACK:
        raise BundleError(
            t("{directory} has {free:,} bytes free; unpacking the packages to compile kernels takes {need:,}.",
              directory=scratch.parent, free=free, need=unpacked + _SLACK),
            t("Name another directory with $TMPDIR, or build without kernels: --gpu none"),
            SPACE_IO,
        )  # fmt: skip


def _run(python: Path, packages: Path, listed: Path, out: Path, progress: Progress) -> Kernels:
    """`python -m engine.prebuild` of these packages."""
    command = [str(python), "-s", "-P", "-m", "engine.prebuild", "--wishes", str(listed), "--out", str(out), "--json"]
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {"PYTHONPATH": str(packages), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    found = Kernels()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        except OSError as e:
            raise BundleError(
                t("Could not {deed}: {python}: {why}.", deed=t("compile kernels"), python=python, why=reason(e)),
                t("Give another --python."), USAGE,
            ) from e  # fmt: skip
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    _note(json.loads(line), found, progress)
            except BaseException:
                process.kill()
                raise
        if process.returncode not in (0, 1):
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()][-2:]
            raise _failed(" / ".join(said)[-600:] or f"{process.returncode}")
    if process.returncode == 1 and not found.problems:
        raise _failed("1")
    return found


def _note(facts: dict, found: Kernels, progress: Callable[[str, int, int], None]) -> None:
    if "stage" in facts:
        progress(facts["stage"], facts["done"], facts["total"])
    elif "problem" in facts:
        found.problems.append(facts["problem"])
    else:
        found.made[facts["capability"]] = facts["kernels"], facts["bytes"]


def _failed(why: str) -> BundleError:
    return BundleError(
        t("The kernels could not be compiled: {why}", why=why),
        t("Correct it and build again, or build without kernels: --gpu none. Servers then compile them at their first "
          "start."),
        CONTENT,
    )  # fmt: skip
