"""bundle.json of a runtime: the code half of what goes on a disk. Same canonical form as a model's, other fields.

The reader on a bare server is offline_bundle/medium/check.py, which knows nothing but the standard library.
"""

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.model.manifest import MANIFEST, SIGNATURE, SafePath, Semver, Sha256, Strict, Timestamp, newer
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads
from offline_bundle.text import complaint, plain, t

Role = Literal["wheel", "tool", "requirements", "setup", "unit", "doc", "license", "sbom"]
ROOMS: dict[str, Role] = {
    "wheels": "wheel",  # every package
    "pip": "tool",  # the installer, itself a wheel, run from there
    "requirements": "requirements",  # one list of hashes for each Python
    "setup": "setup",  # what install.sh runs once all is verified, and install.sh itself
    "units": "unit",  # to be read; the ones in force come with the package
    "docs": "doc",
    "licenses": "license",
    "sbom": "sbom",
}
Minor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\z")]
Short = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+-]{1,64}\z")]
Bytes = Annotated[int, Field(ge=0, le=limits.MAX_FILE_SIZE)]


class RuntimeRequires(Strict):
    """What the server must have. Null: no such requirement (a CPU build needs no driver)."""

    arch: Short
    python: Annotated[tuple[Minor, ...], Field(min_length=1, max_length=16)]
    glibc: Minor
    torch: Short | None
    cuda: Minor | None
    driver_min: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,2}\z")] | None
    disk_bytes: Bytes  # free space that an install takes at its peak
    unpacked_bytes: Bytes


class RuntimeFile(Strict):
    """One file of the runtime: size in bytes, SHA-256, and what it is for."""

    path: SafePath
    role: Role
    sha256: Sha256
    size: Bytes

    @model_validator(mode="after")
    def _in_its_room(self) -> Self:
        room, slash, _ = self.path.partition("/")
        if not slash or ROOMS.get(room) != self.role:
            raise ValueError(t("{path}: a file with role {role} does not belong there", path=self.path, role=self.role))
        return self


class RuntimeManifest(Strict):
    """The content of bundle.json. `files` lists every file except bundle.json and model.sig."""

    schema_version: Literal[1] = 1
    kind: Literal["runtime"] = "runtime"
    name: Literal["atoll"] = "atoll"
    version: Semver
    sequence: Annotated[int, Field(ge=1, le=limits.MAX_SEQUENCE)]
    created: Timestamp
    requires: RuntimeRequires
    files: Annotated[tuple[RuntimeFile, ...], Field(min_length=1, max_length=limits.MAX_FILES)]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        paths = [f.path for f in self.files]
        if paths != sorted(set(paths)):
            raise ValueError(t("files are not in strict path order"))
        if pair := names.collision([*paths, MANIFEST, SIGNATURE]):
            raise ValueError(t("the paths '{one}' and '{other}' collide on some file systems", one=pair[0],
                               other=pair[1]))
        needed = {"setup/setup_release.py", "setup/install.sh"}
        tags = [f"requirements/cp{python.replace('.', '')}" for python in self.requires.python]
        needed |= {tag + suffix for tag in tags for suffix in (".txt", ".json")}
        if lacking := sorted(needed - set(paths)):
            raise ValueError(t("{lacking} is missing", lacking=lacking[0]))
        if sum(f.role == "tool" for f in self.files) != 1:
            raise ValueError(t("there must be exactly one pip"))
        return self

    @property
    def total_bytes(self) -> int:
        """Bytes of all files listed."""
        return sum(f.size for f in self.files)

    def to_bytes(self) -> bytes:
        """The canonical text: the exact bytes of bundle.json."""
        return canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical text: the runtime's identity."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def parse(cls, data: bytes) -> "RuntimeManifest":
        """Read bundle.json. Raises BundleError (content) unless it is valid and in canonical form."""
        try:
            manifest = cls.model_validate_json(data)
            if canonical(loads(data)) != data or manifest.to_bytes() != data:
                raise StrictJSONError(t("it is not in canonical form"))
        except (ValidationError, StrictJSONError) as e:
            if isinstance(e, ValidationError) and (new := newer(e)) is not None:
                raise new from e
            why = plain(e)
            if isinstance(e, ValidationError):
                first: Any = e.errors(include_url=False)[0]
                why = t("{where}: {said}", where=".".join(str(step) for step in first["loc"]), said=complaint(first))
            raise BundleError(
                t("bundle.json is not a valid description of a runtime: {why}.", why=names.show(why)),
                t("The medium was made by another or a broken tool; ask its maker for a new one."),
                CONTENT,
            ) from e
        return manifest
