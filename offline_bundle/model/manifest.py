"""`bundle.json`: what the signature format lacks, in one canonical JSON file that the signature covers.

One instance has exactly one text (`to_bytes`), and `parse` accepts exactly that text: unknown or duplicate keys,
other spacing or another key order are refused, so the file's SHA-256 names the bundle (`digest`).
"""

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.model.versions import RANGE
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads
from offline_bundle.text import complaint, plain, t

MANIFEST = "bundle.json"
SIGNATURE = "model.sig"
SCHEMA_VERSION = 1

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z")]
Semver = Annotated[
    str,
    StringConstraints(
        max_length=64,
        pattern=r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?\z",
    ),
]
Spdx = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}\z")]
Timestamp = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\z")]
# Text that ends up on a terminal: no control characters, no escape sequences, no bidi tricks.
Line = Annotated[str, StringConstraints(max_length=256, pattern=r"^[\x20-\x7e]*\z")]
VersionRange = Annotated[str, StringConstraints(max_length=64, pattern=RANGE)]
Least = Annotated[str, StringConstraints(pattern=r"^(>=)?[0-9]{1,4}(\.[0-9]{1,4}){0,3}\z")]
Role = Literal["weights", "config", "tokenizer", "template", "doc", "license", "sbom"]
Acceptance = Literal["none", "click", "gated"]

# Where each role may live. A path outside its directory is refused even when signed.
_ROOMS: dict[str, tuple[str, ...]] = {
    "weights": ("model",),
    "config": ("model",),
    "tokenizer": ("model",),
    "template": ("model",),
    "doc": ("model", "docs"),
    "license": ("model", "licenses"),
    "sbom": ("sbom",),
}


def _path(value: str) -> str:
    if (why := names.problem(value)) is not None:
        raise ValueError(t("the path '{value}' {why}", value=names.show(value), why=why))
    return value


SafePath = Annotated[str, AfterValidator(_path)]


class Strict(BaseModel):
    """Unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Source(Strict):
    """Where the model came from: an upstream repository and its exact revision."""

    repo: Line
    revision: Line


class Requires(Strict):
    """What the target needs. A null is 'no requirement known'.

    The installer enforces every one of them (installer/preflight); what only a GPU can meet counts where one is used.
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

    none: nothing. click: a person's yes to the text. gated: that, and a reference to the agreement under which the
    model's maker gave access (a contract, an approval, an account), since the text alone gives no right to use it.
    """

    spdx: Spdx
    file: SafePath
    sha256: Sha256
    acceptance: Acceptance = "click"
    url: Line | None = None


class FileEntry(Strict):
    """One file: size in bytes, SHA-256 of the whole and of each `chunk_size` bytes of it."""

    path: SafePath
    size: Annotated[int, Field(ge=0, le=limits.MAX_FILE_SIZE)]
    sha256: Sha256
    role: Role
    chunk_size: Annotated[int, Field(ge=limits.MIN_CHUNK, le=limits.MAX_CHUNK)]
    chunks: tuple[Sha256, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.chunks) != -(-self.size // self.chunk_size):
            raise ValueError(t("{path}: {count} chunk hashes do not cover {size} bytes", path=self.path,
                               count=len(self.chunks), size=self.size))
        if len(self.chunks) == 1 and self.chunks[0] != self.sha256:
            raise ValueError(t("{path}: its only chunk and the whole file have different hashes", path=self.path))
        if not self.chunks and self.sha256 != hashlib.sha256().hexdigest():
            raise ValueError(t("{path}: an empty file with the hash of something else", path=self.path))
        if self.path.split("/")[0] not in _ROOMS[self.role] or "/" not in self.path:
            raise ValueError(t("{path}: a file with role {role} does not belong there", path=self.path, role=self.role))
        return self


class BundleManifest(Strict):
    """The content of bundle.json. `files` lists every file of the bundle except bundle.json and model.sig."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["model"] = "model"
    name: Name
    version: Semver
    sequence: Annotated[int, Field(ge=1, le=limits.MAX_SEQUENCE)]  # only ever grows for one name; replay guard
    created: Timestamp
    source: Source
    requires: Requires
    license: License
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1, max_length=limits.MAX_FILES)]
    chat_template_sha256: Sha256 | None
    weights_format: Literal["safetensors"] = "safetensors"
    remote_code: Literal[False] = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        paths = [f.path for f in self.files]
        if paths != sorted(set(paths)):
            raise ValueError(t("files are not in strict path order"))
        if pair := names.collision([*paths, MANIFEST, SIGNATURE]):
            raise ValueError(t("the paths '{one}' and '{other}' collide on some file systems", one=pair[0],
                               other=pair[1]))
        texts = {f.path: f for f in self.files}
        text = texts.get(self.license.file)
        if text is None or text.role != "license" or text.sha256 != self.license.sha256:
            raise ValueError(t("the licence text is not among the files, or has another hash"))
        if not any(f.role == "weights" for f in self.files):
            raise ValueError(t("there are no weights"))
        if "model/config.json" not in texts:
            raise ValueError(t("model/config.json is missing"))
        return self

    @property
    def total_bytes(self) -> int:
        """Bytes of all files listed."""
        return sum(f.size for f in self.files)

    def file(self, path: str) -> FileEntry | None:
        """The entry of `path`, or None."""
        return next((f for f in self.files if f.path == path), None)

    def to_bytes(self) -> bytes:
        """The canonical text: the exact bytes of bundle.json."""
        return canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical text: the bundle's identity, and its directory name in a store."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def parse(cls, data: bytes) -> "BundleManifest":
        """Read bundle.json. Raises BundleError (content) unless it is valid and in canonical form."""
        try:
            manifest = cls.model_validate(_tuples(loads(data)))
            if manifest.to_bytes() != data:
                raise StrictJSONError(t("it is not in canonical form"))
        except ValidationError as e:
            if (new := newer(e)) is not None:
                raise new from e
            first = e.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            said = complaint(first)
            raise _invalid(t("{where}: {said}", where=where, said=said) if where else said) from e
        except StrictJSONError as e:
            raise _invalid(plain(e)) from e
        return manifest


def _tuples(value: Any) -> Any:
    """JSON arrays as tuples, which strict validation of frozen models asks for."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return value


def newer(error: ValidationError) -> BundleError | None:
    """The refusal of a manifest that a later Atoll wrote: it asks for what this one cannot judge. Else None."""
    for found in error.errors(include_url=False):
        where = found["loc"]
        if where[:1] == ("requires",) and found["type"] == "extra_forbidden":
            what = t("a requirement called '{name}'", name=names.show(str(where[-1])))
        elif where == ("schema_version",) and isinstance(found["input"], int) and found["input"] > SCHEMA_VERSION:
            what = t("format {version}", version=found["input"])
        else:
            continue
        return BundleError(
            t("This bundle needs a newer Atoll: bundle.json has {what}, which this one does not know.", what=what),
            t("Install the newer Atoll first, or ask the bundle's maker for one for this version."),
            CONTENT,
        )
    return None


def _invalid(why: str) -> BundleError:
    return BundleError(
        t("bundle.json is not a valid manifest: {why}.", why=names.show(why)),
        t("The bundle was made by another or a broken tool; ask its maker for a new one."),
        CONTENT,
    )
