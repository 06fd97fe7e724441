"""bundle.json of a runtime: the code half of what goes on a medium, and what it requires of a server."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from offline_bundle.bundle.manifest import Bytes, File, Manifest, Strict
from offline_bundle.text import t

Role = Literal["wheel", "tool", "requirements", "setup", "unit", "doc", "license", "sbom", "kernels"]
ROLE_OF_FOLDER: dict[str, Role] = {
    "wheels": "wheel",  # every package
    "pip": "tool",  # the installer, itself a wheel, run from there
    "requirements": "requirements",  # one list of hashes for each Python
    "setup": "setup",  # what install.sh runs once everything is verified, and install.sh itself
    "units": "unit",  # for reading; the installed ones come with the package
    "docs": "doc",
    "licenses": "license",
    "sbom": "sbom",
    "kernels": "kernels",  # machine code for GPUs, a folder for each compute capability
}
_KERNELS = re.compile(r"kernels/[0-9]{1,2}\.[0-9]/(index\.json|kernels\.bin)")
Minor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\z")]
Short = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+-]{1,64}\z")]


class RuntimeRequires(Strict):
    """What the server needs. A null means no such requirement (a CPU build needs no driver)."""

    arch: Short
    python: Annotated[tuple[Minor, ...], Field(min_length=1, max_length=16)]
    glibc: Minor
    torch: Short | None
    cuda: Minor | None
    driver_min: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,2}\z")] | None
    disk_bytes: Bytes  # free space that an install takes at its peak
    unpacked_bytes: Bytes


class RuntimeFile(File):
    """One file of the runtime, and what it is for."""

    role: Role

    @model_validator(mode="after")
    def _in_its_folder(self) -> Self:
        folder, slash, _ = self.path.partition("/")
        is_odd = self.role == "kernels" and not _KERNELS.fullmatch(self.path)
        if not slash or ROLE_OF_FOLDER.get(folder) != self.role or is_odd:
            raise ValueError(t("{path}: a file with role {role} does not belong there", path=self.path, role=self.role))
        return self


class RuntimeManifest(Manifest[RuntimeFile]):
    """The content of a runtime's bundle.json."""

    kind: Literal["runtime"] = "runtime"
    name: Literal["atoll"] = "atoll"
    requires: RuntimeRequires

    @model_validator(mode="after")
    def _can_be_installed(self) -> Self:
        needed = {"setup/setup_release.py", "setup/install.sh"}
        tags = [f"requirements/cp{python.replace('.', '')}" for python in self.requires.python]
        needed |= {tag + suffix for tag in tags for suffix in (".txt", ".json")}
        if lacking := sorted(needed - {f.path for f in self.files}):
            raise ValueError(t("{lacking} is missing", lacking=lacking[0]))
        if sum(f.role == "tool" for f in self.files) != 1:
            raise ValueError(t("there must be exactly one pip"))
        return self
