"""The CUDA version that a PyTorch was built for, from names and a text file; nothing is imported or unpacked."""

import importlib.util
import itertools
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_TORCH_WHEEL = re.compile(r"torch-(\d+\.\d+\.\d+[^-+%]*)(?:(?:\+|%2B)([A-Za-z0-9.]+))?-cp", re.IGNORECASE)
_CUDA_WHEEL = re.compile(r"nvidia_cuda_runtime(?:_cu\d+)?-(\d+)\.(\d+)\.", re.IGNORECASE)
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'(\d+)\.(\d+)|None)", re.MULTILINE)
MAX_FILES = 20_000


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda` is None for a CPU build, and if it is unknown (`known` False)."""

    version: str = ""
    cuda: tuple[int, int] | None = None
    known: bool = False

    @property
    def cpu_only(self) -> bool:
        return self.known and self.cuda is None

    @property
    def label(self) -> str:
        if not self.known:
            return "PyTorch" + (f" {self.version}" if self.version else "")
        how = f"CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else "CPU"
        return f"PyTorch {self.version} ({how})"

    @classmethod
    def of_version(cls, version: str) -> "TorchBuild":
        """From `2.13.0+cu130` or `2.13.0+cpu`; without a suffix it is unknown."""
        plain, _, local = version.partition("+")
        return cls(plain, *_of_suffix(local))

    @classmethod
    def of_runtime(cls, runtime: Path | None) -> "TorchBuild | None":
        """From the names of the wheels below a runtime's directory; None if there is no PyTorch."""
        if runtime is None:
            return None
        names = [path.name for path in itertools.islice(runtime.rglob("*.whl"), MAX_FILES)]
        found = next((m for name in names if (m := _TORCH_WHEEL.match(name))), None)
        if found is None:
            return None
        cuda, known = _of_suffix(found[2] or "")
        if not known:  # wheels from PyPI carry no suffix; the CUDA libraries beside them tell
            libraries = next((m for name in names if (m := _CUDA_WHEEL.match(name))), None)
            if libraries:
                cuda, known = (int(libraries[1]), int(libraries[2])), True
        return cls(found[1], cuda, known)

    @classmethod
    def installed(cls) -> "TorchBuild":
        """The PyTorch that this interpreter would import."""
        try:
            build = cls.of_version(metadata.version("torch"))
            spec = importlib.util.find_spec("torch")
        except (metadata.PackageNotFoundError, ImportError, ValueError):
            return cls()
        if build.known or spec is None or not spec.origin:
            return build
        try:
            line = _CUDA_LINE.search(Path(spec.origin).with_name("version.py").read_text())
        except (OSError, ValueError):
            line = None
        if line is None:
            return build
        return cls(build.version, (int(line[1]), int(line[2])) if line[1] else None, True)


def _of_suffix(local: str) -> tuple[tuple[int, int] | None, bool]:
    """(CUDA, whether the suffix is known): cu130 → 13.0, cu128 → 12.8, cpu → none."""
    if local.startswith("cpu"):
        return None, True
    if found := re.fullmatch(r"cu(\d{2,3})(\d)", local):
        return (int(found[1]), int(found[2])), True
    return None, False
