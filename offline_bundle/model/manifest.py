"""bundle.json of a model: name, origin, licence, requirements, and the hash of each chunk of each file."""

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from offline_bundle import limits
from offline_bundle.bundle.manifest import File, Manifest, SafePath, Sha256, Strict
from offline_bundle.model.versions import RANGE
from offline_bundle.text import t

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z")]
Spdx = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}\z")]
# Text that ends up on a terminal: no control characters, no escape sequences, no bidi tricks.
Line = Annotated[str, StringConstraints(max_length=256, pattern=r"^[\x20-\x7e]*\z")]
VersionRange = Annotated[str, StringConstraints(max_length=64, pattern=RANGE)]
Least = Annotated[str, StringConstraints(pattern=r"^(>=)?[0-9]{1,4}(\.[0-9]{1,4}){0,3}\z")]
Role = Literal["weights", "config", "tokenizer", "template", "doc", "license", "sbom"]
Acceptance = Literal["none", "click", "gated"]

# Where each role may live. A path outside its directory is refused even when signed.
_FOLDERS_OF_ROLE: dict[str, tuple[str, ...]] = {
    "weights": ("model",),
    "config": ("model",),
    "tokenizer": ("model",),
    "template": ("model",),
    "doc": ("model", "docs"),
    "license": ("model", "licenses"),
    "sbom": ("sbom",),
}


class Source(Strict):
    """Where the model came from: an upstream repository and its exact revision."""

    repo: Line
    revision: Line


class Requires(Strict):
    """What the server needs. A null means that no requirement is known.

    The installer enforces each of them (installer/preflight); those that only a GPU can meet, where one is used.
    """

    disk_bytes: Annotated[int, Field(ge=0, le=limits.MAX_FILE_SIZE)]
    runtime: VersionRange | None = None  # of atoll, e.g. ">=0.1,<0.2"
    driver_min: Least | None = None
    cuda: Least | None = None
    compute_cap: Least | None = None
    vram_gib: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    host_ram_bytes: Annotated[int, Field(ge=0, le=limits.MAX_FILE_SIZE)] | None = None


class License(Strict):
    """The licence whose text is `file`; `acceptance` says what an installer must obtain before it goes on.

    none: nothing. click: a person's consent to the text. gated: that, and a reference to the agreement under which the
    model's maker gave access (a contract, an approval, an account), because the text alone gives no right to use it.
    """

    spdx: Spdx
    file: SafePath
    sha256: Sha256
    acceptance: Acceptance = "click"
    url: Line | None = None


class FileEntry(File):
    """One file, and the SHA-256 of each `chunk_size` bytes of it: a copy is checked and resumed chunk by chunk."""

    role: Role
    chunk_size: Annotated[int, Field(ge=limits.MIN_CHUNK, le=limits.MAX_CHUNK)]
    chunks: tuple[Sha256, ...]

    @property
    def read_size(self) -> int:
        return self.chunk_size

    def span(self, index: int) -> tuple[int, int]:
        """(offset, length) of a chunk in the file."""
        offset = index * self.chunk_size
        return offset, min(self.chunk_size, self.size - offset)

    def pieces(self) -> list[tuple[int, int, str]]:
        return [(*self.span(index), sha256) for index, sha256 in enumerate(self.chunks)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.chunks) != -(-self.size // self.chunk_size):
            raise ValueError(t("{path}: {count} chunk hashes do not cover {size} bytes", path=self.path,
                               count=len(self.chunks), size=self.size))
        if len(self.chunks) == 1 and self.chunks[0] != self.sha256:
            raise ValueError(t("{path}: its only chunk and the whole file have different hashes", path=self.path))
        if not self.chunks and self.sha256 != hashlib.sha256().hexdigest():
            raise ValueError(t("{path}: an empty file with the hash of something else", path=self.path))
        if self.path.split("/")[0] not in _FOLDERS_OF_ROLE[self.role] or "/" not in self.path:
            raise ValueError(t("{path}: a file with role {role} does not belong there", path=self.path, role=self.role))
        return self


class BundleManifest(Manifest[FileEntry]):
    """The content of a model's bundle.json."""

    kind: Literal["model"] = "model"
    name: Name
    source: Source
    requires: Requires
    license: License
    chat_template_sha256: Sha256 | None
    weights_format: Literal["safetensors"] = "safetensors"
    remote_code: Literal[False] = False

    @model_validator(mode="after")
    def _holds_a_model(self) -> Self:
        by_path = {f.path: f for f in self.files}
        text = by_path.get(self.license.file)
        if text is None or text.role != "license" or text.sha256 != self.license.sha256:
            raise ValueError(t("the licence text is not among the files, or has another hash"))
        if not any(f.role == "weights" for f in self.files):
            raise ValueError(t("there are no weights"))
        if "model/config.json" not in by_path:
            raise ValueError(t("model/config.json is missing"))
        return self

    def file(self, path: str) -> FileEntry | None:
        """The entry of `path`, or None."""
        return next((f for f in self.files if f.path == path), None)
