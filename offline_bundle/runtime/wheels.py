"""The wheels of a runtime: build our own; read each one's name, licence, content and requirements."""

import base64
import hashlib
import os
import re
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.runtime.resolve import Pip
from offline_bundle.text import t

ROOMS = ("appliance", "engine", "installer", "offline_bundle", "systemd", "tui")
# Lowest driver branch for a CUDA major version: https://docs.nvidia.com/deploy/cuda-compatibility/
DRIVER_MIN = {"12": "525", "13": "580"}
_BLOCK = 4096  # of most file systems
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")
_OLD_TAGS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, described by its own metadata."""

    path: Path
    name: str  # normalised, as in an index
    version: str
    sha256: str
    unpacked: int  # bytes
    licence: str  # as stated in its metadata
    homepage: str

    @property
    def pin(self) -> str:
        """Its line in the requirements file."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def code_root() -> Path:
    """The directory that our packages lie in: a checkout, or site-packages."""
    return Path(__file__).resolve().parents[2]


def checkout() -> Path | None:
    """The checkout that this code runs from, or None when it was installed from a wheel."""
    root = code_root()
    return root if (root / "pyproject.toml").is_file() and (root / "appliance").is_dir() else None


def requirements() -> list[str]:
    """What our wheel depends on to run, without extras."""
    if (root := checkout()) is not None:
        return tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    return [r for r in metadata.requires("atoll") or [] if "extra ==" not in r]


def build_own_wheel(out: Path, python: Path) -> Path:
    """Our own wheel, built from the checkout or reassembled from the installed files."""
    root = checkout()
    if root is None:
        return _repack(out)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        source = Path(scratch) / "atoll"  # a copy, because building leaves directories behind
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copyfile(root / name, source / name)
        for name in (*ROOMS, "docs"):
            if (root / name).is_dir():
                shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
        command = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
        try:
            Pip(python).run(*command, deed=t("build Atoll's own wheel"))
        except BundleError as e:
            try:  # no index offers setuptools; the installed one may do
                Pip(python).run(*command, "--no-build-isolation", deed=t("build Atoll's own wheel"))
            except BundleError:
                raise e from None
    return next(out.glob("atoll-*.whl"))


def _repack(out: Path) -> Path:
    """Reassemble the wheel of the installed distribution: the files of its RECORD, without those that pip added."""
    own = metadata.distribution("atoll")
    info = f"atoll-{own.version}.dist-info"
    made = out / f"atoll-{own.version}-py3-none-any.whl"
    record: list[str] = []
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(own.files or [], key=str):
            name = str(file)
            if name.startswith("../") and "/share/" not in name:
                continue  # the console script
            if name.endswith(".pyc") or name in {
                f"{info}/{n}" for n in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
            }:
                continue
            path = Path(str(own.locate_file(file)))
            if "share/doc/" in name:
                below = "share/doc/" + name.split("share/doc/", 1)[1]
                name = f"atoll-{own.version}.data/data/{below}"
                if not path.exists():  # `pip install --target` moves it, but records the old place
                    path = Path(str(own.locate_file(below)))
            data = path.read_bytes()
            wheel.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
            digest = hashlib.sha256(data).digest()
            record.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}")
        record.append(f"{info}/RECORD,,")
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join(record) + "\n", zipfile.ZIP_DEFLATED)
    return made


def read_wheel(path: Path) -> Wheel:
    """Name, version, licence and sizes of a wheel. Raises BundleError (content) if it is not a valid one."""
    try:
        with zipfile.ZipFile(path) as wheel:
            info = next(n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            headers = HeaderParser().parsestr(wheel.read(info).decode("utf-8", "replace"))
            unpacked = sum(item.file_size for item in wheel.infolist())
    except (OSError, zipfile.BadZipFile, StopIteration, KeyError) as e:
        raise BundleError(
            t("{name} is not a valid wheel.", name=path.name), t("Delete it from pip's cache and build again."), CONTENT
        ) from e
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = re.sub(r"[-_.]+", "-", headers["Name"] or "").lower()
    classifiers = [
        c.rsplit("::", 1)[-1].strip() for c in headers.get_all("Classifier", []) if c.startswith("License ::")
    ]
    told = headers["License-Expression"] or (headers["License"] or "").strip().splitlines()[:1] or classifiers[:1]
    licence = told if isinstance(told, str) else (told[0] if told else "")
    links = [u.split(",", 1)[1].strip() for u in headers.get_all("Project-URL", []) if "," in u]
    homepage = headers["Home-page"] or (links[0] if links else "")
    return Wheel(path, name, headers["Version"] or "", digest, unpacked, licence[:120], homepage)


def contents(path: Path) -> Iterator[tuple[str, dict[str, str | int]]]:
    """(path below lib, its SHA-256 and size) of every file that installing the wheel unpacks there."""
    with zipfile.ZipFile(path) as wheel:
        for item in wheel.infolist():
            name, data = item.filename, re.fullmatch(r"[^/]+\.data/([a-z]+)/(.+)", item.filename)
            if data and data[1] in ("scripts", "headers"):
                continue
            if item.is_dir() or name.endswith(".dist-info/RECORD"):  # pip writes a longer one
                continue
            with wheel.open(item) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            yield data[2] if data else name, {"sha256": digest, "size": item.file_size}


def texts(own: Path) -> Iterator[tuple[str, bytes]]:
    """(path in the runtime, content) of the documents and unit templates that our own wheel carries."""
    with zipfile.ZipFile(own) as wheel:
        for name in sorted(wheel.namelist()):
            document = re.fullmatch(r"[^/]+\.data/data/share/doc/atoll/(.+\.md)", name)
            if document or re.fullmatch(r"systemd/[^.].*", name):
                yield f"docs/{document[1]}" if document else "units/" + name.removeprefix("systemd/"), wheel.read(name)


def glibc_floor(paths: Sequence[Path]) -> str:
    """The oldest glibc that all these wheels run on, from the lowest platform tag of each."""
    floor = (2, 17)
    for path in paths:
        tags = path.name.removesuffix(".whl").split("-")[-1].split(".")
        found = [tuple(int(n) for n in m.groups()) for t in tags if (m := _MANYLINUX.match(t))]
        found += [old for t in tags for name, old in _OLD_TAGS.items() if t.startswith(name + "_")]
        if found:
            floor = max(floor, min(found))
    return f"{floor[0]}.{floor[1]}"


def torch_facts(wheels: Sequence[Wheel]) -> tuple[str | None, str | None, str | None]:
    """(version of torch, the CUDA it was built with, oldest driver), from torch/version.py in the wheel."""
    torch = next((w for w in wheels if w.name == "torch"), None)
    if torch is None:
        return None, None, None
    with zipfile.ZipFile(torch.path) as wheel:
        text = wheel.read("torch/version.py").decode()
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([0-9]+\.[0-9]+)", text, re.MULTILINE)
    cuda = match[1] if match else None
    if cuda and cuda.split(".")[0] not in DRIVER_MIN:
        raise BundleError(
            t("{name} is built for CUDA {cuda}, and Atoll does not know the oldest driver for it.",
              name=torch.path.name, cuda=cuda),
            t("Add it to DRIVER_MIN in offline_bundle/runtime/wheels.py."),
            CONTENT,
        )
    return torch.version, cuda, DRIVER_MIN[cuda.split(".")[0]] if cuda else None


def installed_bytes(files: Mapping[str, Mapping[str, Any]]) -> int:
    """Disk space of these files once installed: whole blocks, and bytecode beside each module."""
    blocks = sum(-(-int(entry["size"]) // _BLOCK) * _BLOCK for entry in files.values())
    return blocks + sum(int(entry["size"]) + _BLOCK for name, entry in files.items() if name.endswith(".py"))


def default_python() -> Path:
    """The interpreter that runs this: servers are expected to have the same version."""
    return Path(os.path.abspath(sys.executable))
