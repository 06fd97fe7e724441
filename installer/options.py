"""What the operator decided: flags, or an answers file for an unattended install."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from installer.errors import ExitCode, InstallError


@dataclass(slots=True)
class InstallOptions:
    """The answers to every question an install may ask. None: decide from what is installed, or the default."""

    bundle: Path
    prefix: Path
    trust_keys: list[Path] = field(default_factory=list)
    accept_licenses: list[str] = field(default_factory=list)
    host: str | None = None
    port: int | None = None
    waivers: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    dry_run: bool = False
    confirmed: bool = False           # the plan needs no further question
    start_timeout: float = 900.0      # seconds until the service must be ready
    smoke_timeout: float = 300.0


class Answers(BaseModel):
    """The answers file (JSON). Secrets have no place in it. Flags on the command line win over it."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1]
    bundle: Path | None = None
    prefix: Path | None = None
    trust_keys: list[Path] = []
    accept_licenses: list[str] = []
    host: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    waivers: dict[str, Annotated[str, Field(min_length=3, max_length=500)]] = {}
    strict: bool = False
    confirm_plan: bool = False


def read_answers(path: Path) -> Answers:
    """Read and check an answers file. Raises InstallError (usage) that names the wrong field."""
    try:
        data = path.read_bytes()
        if len(data) > 1 << 20:
            raise ValueError("it is larger than 1 MiB")
        return Answers.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        problem = f"{where}: {first['msg']}"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise InstallError(
        f"The answers file {path} cannot be used: {problem}.",
        exit_code=ExitCode.USAGE,
        changed="Nothing was changed.",
        hint=f"Known fields: {', '.join(Answers.model_fields)}.",
    )
