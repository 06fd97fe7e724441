"""The answers file of an unattended install: TOML with a strict schema, and clear messages for what is wrong in it.

An unknown key is an error and never ignored: a typing mistake must not turn into a default on a server.
"""

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, plain, reason, t
from offline_bundle.text import complaint

_LIMIT = 1 << 20

Text = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Reason = Annotated[str, StringConstraints(min_length=3, max_length=500)]
Instance = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z")]
Gpu = Annotated[int, Field(ge=0, le=63)] | Annotated[str, StringConstraints(pattern=r"^(GPU|MIG)-[0-9a-fA-F-]{4,64}\z")]
Device = Literal["auto", "cuda", "cpu"]


def _about(description: str, default: Any = None) -> Any:
    """An optional field."""
    return Field(default=default, description=description)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelAnswer(_Strict):
    """One model to run."""

    bundle: Text | None = _about("Directory of its bundle, or the bundle's name on the medium.")
    name: Instance | None = _about("Name in the API and of the unit; default: the bundle's name.")
    gpus: list[Gpu] | None = _about("GPUs by index or UUID; default: unchanged, or all.")
    device: Device | None = _about("Device that it runs on.")
    settings: dict[str, int | float | str | bool] = _about("Long flags of `atoll serve`, no dashes.", {})


class TlsAnswer(_Strict):
    """Without it, a local CA and a certificate are made here."""

    certificate: Path | None = _about("A certificate of your own, PEM, with its chain.")
    private_key: Path | None = _about("Its key, PEM; copied to a root-only file.")
    names: list[Text] = _about("Further names and addresses in the certificate made here.", [])
    wanted: bool = _about("TLS on loopback too.", False)


class Answers(_Strict):
    """Everything that an install may ask. It has no place for secrets. Flags on the command line win over it."""

    schema_version: Literal[1] = Field(description="1")
    medium: list[Path] = _about("Directories to look through for the runtime and for bundles.", [])
    bundle: Path | None = _about("One bundle; short for a single [[models]] table.")
    prefix: Path | None = _about("Install below this directory instead of on the server itself.")
    trust_keys: list[Path] = _about("The vendor's public keys. Obtain them through a separate channel, not from the "
                                    "bundle.", [])
    accept_licenses: list[str] = _about(
        '"SPDX-ID@SHA256-PREFIX" of each text that was read; of a gated model, ":REFERENCE" of the agreement too.', [])
    host: Text | None = _about("Address to listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] | None = _about("Port to listen on.")
    device: Device | None = _about("Device that the models run on.")
    strict: bool = _about("Stop on warnings of the preflight too.", False)
    confirm_plan: bool = _about("Yes to the plan; it accepts no licence and waives no check.", False)
    allow_downgrade: Reason | None = _about("Reason for installing an older bundle; audited.")
    start_timeout: Annotated[float, Field(ge=1, le=86400)] | None = _about("Seconds until ready.")
    waivers: dict[str, Reason] = _about("Check -> why it may fail. Strict checks cannot be waived.", {})
    tls: TlsAnswer | None = _about("The certificate; default: one is made here.")
    models: list[ModelAnswer] = _about("All the models to run; others are removed.", [])


def read_answers(path: Path, schema: type[Answers] = Answers) -> Answers:
    """Read and check an answers file (TOML; `.json` for JSON). Raises InstallError (usage) that names what is wrong.

    `schema` may add tables to those of an install.
    """
    found: list[str]
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError(t("it is larger than 1 MiB"))
        text = data.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return schema.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        found = problems(error, schema)
    except (OSError, ValueError) as error:  # includes TOML and JSON errors, which name line and column
        found = [reason(error) if isinstance(error, OSError) else plain(error)]
    raise InstallError(
        t("The answers file {path} cannot be used: {names}.", path=path, names=joined(found, "; ")),
        exit_code=ExitCode.USAGE,
        changed=t("Nothing was changed."),
        hint=t("Correct it, then check it: atoll answers validate {path}  (`atoll answers template` prints a good "
               "one)", path=path),
    )


def problems(error: ValidationError, schema: type[BaseModel]) -> list[str]:
    """What is wrong with a file of this schema, in plain words, one finding each."""
    return [_problem(entry, schema) for entry in error.errors(include_url=False)]


def _problem(entry: Any, schema: type[BaseModel]) -> str:
    """One finding in plain words: where, what, and for an unknown key the nearest known one."""
    where = _place(entry["loc"]) or t("the file")
    if entry["type"] == "extra_forbidden":
        known = _known(entry["loc"][:-1], schema)
        wrong = str(entry["loc"][-1])
        near = difflib.get_close_matches(wrong, known, 1, 0.5)
        if near:
            return t("{where} is not known; did you mean {near}?", where=where, near=near[0])
        return t("{where} is not known; known: {names}", where=where, names=joined(known))
    if entry["type"] == "missing":
        return t("{where} is missing", where=where)
    return t("{where}: {wanted}", where=where, wanted=complaint(entry))


def _place(location: tuple[int | str, ...]) -> str:
    """`models[0].gpus`, as the author of the file would write it."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _known(location: tuple[int | str, ...], schema: type[BaseModel]) -> list[str]:
    """The keys that are allowed at this place."""
    model: Any = schema
    for part in location:
        if isinstance(part, str) and part in getattr(model, "model_fields", {}):
            kind = model.model_fields[part].annotation
            models = [each for each in get_args(kind) if hasattr(each, "model_fields")]
            model = next(iter(models or get_args(kind)), kind)
    return list(getattr(model, "model_fields", ()))


def schema() -> dict[str, Any]:
    """The JSON Schema of the answers, for editors and other tools."""
    return Answers.model_json_schema()


TEMPLATE = """\
# Answers for `atoll install --answers FILE`. Check it anywhere, without a server: atoll answers validate FILE
schema_version = 1

# Directories to look through for the runtime and for bundles: the mounted disk.
medium = ["/media/atoll"]

# The vendor's public key, obtained through a separate channel, not from the disk.
# Compare its fingerprint: atoll keys fingerprint FILE
trust_keys = ["/root/vendor.pub"]

# Each licence by its id and the first digits of its text's SHA-256. `atoll install --dry-run` prints the exact text.
accept_licenses = ["Apache-2.0@cfc7749b96f6"]

host = "0.0.0.0"
port = 8443
confirm_plan = true     # no question about the plan

# The reason to install an older bundle. Without it, older bundles are refused.
# allow_downgrade = "1.3 answers wrongly, see ticket 4711"

# A certificate of your own. Without it a local CA is made here.
# [tls]
# certificate = "/root/server.crt"
# private_key = "/root/server.key"
# names = ["llm.bank.example"]

# Every model to run. Without this table: the only bundle on the medium.
[[models]]
bundle = "smollm2-135m-instruct"     # a name on the medium, or a directory
name = "chat"
# gpus = [0]                         # indices or UUIDs; default: all
# settings = { max-model-len = 8192 }

# Checks that may fail, and why. `atoll preflight` lists them.
# [waivers]
# egress = "the firewall closes it on Monday"
"""
