"""`etc/atoll/atoll.toml`: the operator's file. We set the few keys that an install decides and leave the rest alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from installer.errors import ExitCode, InstallError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_HEADER = """\
# Settings of `atoll serve`; every long flag may stand here without its dashes.
# An install changes only: model, served-model-name, host, port, api-key-file. Restart to apply: atoll stop; atoll start
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service listens. `certificate`: the one that it must show; None: it speaks plain HTTP."""

    host: str
    port: int
    certificate: Path | None = None

    @property
    def connect_host(self) -> str:
        """An address that reaches it from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104

    @property
    def url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.connect_host else self.connect_host
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"


def read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def parse(text: str, path: Path) -> dict[str, Any]:
    """The [serve] table. Raises InstallError (usage) for a file that cannot be parsed."""
    try:
        table = tomlkit.parse(text).unwrap().get("serve", {})
    except TOMLKitError as error:
        raise InstallError(
            f"The settings in {path} cannot be read: {error}.",
            exit_code=ExitCode.USAGE,
            changed="Nothing was changed.",
            hint="Correct that line, then run this again.",
        ) from None
    return table if isinstance(table, dict) else {}


def endpoint(text: str | None, path: Path) -> Endpoint:
    """The address in the settings, or the defaults."""
    table = parse(text, path) if text else {}
    port = table.get("port", DEFAULT_PORT)
    if type(port) is not int or not 1 <= port <= 65535:
        raise InstallError(
            f"The port {port!r} in {path} is not a number from 1 to 65535.",
            exit_code=ExitCode.USAGE,
            changed="Nothing was changed.",
            hint="Correct it, then run this again.",
        )
    return Endpoint(str(table.get("host", DEFAULT_HOST)), port)


def render(base: str | None, values: dict[str, Any], path: Path) -> str:
    """`base` with `values` set in [serve]; comments, order and other keys stay. The same input gives the same bytes."""
    text = base if base is not None else _HEADER
    parse(text, path)
    document = tomlkit.parse(text)
    if "serve" not in document:
        document["serve"] = tomlkit.table()
    table: Any = document["serve"]
    for key, value in values.items():
        if table.get(key) != value:
            table[key] = value
    return tomlkit.dumps(document)
