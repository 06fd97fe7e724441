"""`bundle.json`: what the manifests of models and runtimes have in common, and the one reader for both.

One manifest has exactly one text (`to_bytes`), and `parse` accepts exactly that text: unknown or duplicate keys, other
spacing or another key order are refused, so the file's SHA-256 (`digest`) identifies the bundle. The only other reader
is offline_bundle/medium/install_sh/signature.py, for servers that have nothing but the standard library yet.
"""

import hashlib
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads
from offline_bundle.text import complaint, plain, t

MANIFEST = "bundle.json"
SIGNATURE = "model.sig"
SCHEMA_VERSION = 1

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Semver = Annotated[
    str,
    StringConstraints(
        max_length=64,
        pattern=r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?\z",
    ),
]
Timestamp = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\z")]
Bytes = Annotated[int, Field(ge=0, le=limits.MAX_FILE_SIZE)]


def _path(value: str) -> str:
    if (why := names.path_problem(value)) is not None:
        raise ValueError(t("the path '{value}' {why}", value=names.show(value), why=why))
    return value


SafePath = Annotated[str, AfterValidator(_path)]


class Strict(BaseModel):
    """Unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(Strict):
    """One file: its path below the bundle, its size in bytes, its SHA-256. A kind of bundle adds fields and rules."""

    path: SafePath
    size: Bytes
    sha256: Sha256

    @property
    def read_size(self) -> int:
        """Bytes that one read may take."""
        return limits.DEFAULT_CHUNK

    def pieces(self) -> list[tuple[int, int, str]]:
        """(offset, length, SHA-256) of each part with a hash of its own; together they are the whole file."""
        return [(0, self.size, self.sha256)]


AnyFile = TypeVar("AnyFile", bound=File)


class Manifest(Strict, Generic[AnyFile]):
    """The content of bundle.json. `files` lists every file of the bundle except bundle.json and model.sig."""

    schema_version: Literal[1] = SCHEMA_VERSION
    version: Semver
    sequence: Annotated[int, Field(ge=1, le=limits.MAX_SEQUENCE)]  # only ever grows for one name (replay guard)
    created: Timestamp
    files: Annotated[tuple[AnyFile, ...], Field(min_length=1, max_length=limits.MAX_FILES)]

    @model_validator(mode="after")
    def _paths_are_apart(self) -> Self:
        paths = [f.path for f in self.files]
        if paths != sorted(set(paths)):
            raise ValueError(t("files are not in strict path order"))
        if pair := names.collision([*paths, MANIFEST, SIGNATURE]):
            raise ValueError(t("the paths '{one}' and '{other}' collide on some file systems", one=pair[0],
                               other=pair[1]))
        return self

    @property
    def title(self) -> str:
        """Name and version, for messages."""
        return f"{getattr(self, 'name', '')} {self.version}".strip()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files listed."""
        return sum(f.size for f in self.files)

    def to_bytes(self) -> bytes:
        """The canonical text: the exact bytes of bundle.json."""
        return canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical text: the bundle's identity, and its directory name in a store."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read bundle.json. Raises BundleError (content) unless it is valid and in canonical form."""
        try:
            loads(data)  # refuses what pydantic's parser would accept: duplicate keys, NaN
            manifest = cls.model_validate_json(data)
            if manifest.to_bytes() != data:
                raise StrictJSONError(t("it is not in canonical form"))
        except ValidationError as e:
            if (newer := _written_by_newer(e)) is not None:
                raise newer from e
            first: Any = e.errors(include_url=False)[0]
            where, said = ".".join(str(step) for step in first["loc"]), complaint(first)
            raise _invalid(t("{where}: {said}", where=where, said=said) if where else said) from e
        except StrictJSONError as e:
            raise _invalid(plain(e)) from e
        return manifest


def _written_by_newer(error: ValidationError) -> BundleError | None:
    """The error for a manifest of a later Atoll that contains something this one cannot judge; None otherwise."""
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
