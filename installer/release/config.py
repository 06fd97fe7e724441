"""`etc/atoll/atoll.toml`: the operator's file. We set the few keys that an install decides and leave the rest alone.

    schema_version = 2
    [serve]            prefix form: the flags of `atoll serve`
    [gateway]          system form: the flags of `atoll gateway`
    [gateway.limits]   … and the bounds of its endpoint ([serve.limits] in the prefix form)
    [engine]           … of every engine
    [models.NAME]      … of the engine atoll-engine@NAME; wins over [engine]
                       with replica-of = "OTHER" it answers under that model's name, with that model's settings
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.release import migrate

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000          # of a prefix
SERVER_HOST, SERVER_PORT = "0.0.0.0", 8443              # noqa: S104  # of a server: it has TLS and keys

REPLICA_OF = "replica-of"

_HEADER = """\
# Settings of `atoll serve`; every long flag may stand here without its dashes.
# An install changes only: model, served-model-name, host, port, api-key-file. Restart to apply: atoll stop; atoll start
"""
_SERVER_HEADER = """\
# Settings of this server. Every long flag may stand here without its dashes: of `atoll gateway` in [gateway], of every
# engine in [engine], of one engine in [models.NAME]. An install changes only what it decides. To apply: atoll restart
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service listens. `certificate`: the one that it must present; None: it speaks plain HTTP."""

    host: str
    port: int
    certificate: Path | None = None

    @property
    def connect_host(self) -> str:
        """An address by which this machine reaches it."""
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


def parse(text: str, path: Path, table: str = "serve") -> dict[str, Any]:
    """One table; empty if absent. Raises InstallError (usage) for a file that cannot be parsed."""
    try:
        settings = tomllib.loads(text)  # several times as fast as a document with its comments, and asked for often
    except tomllib.TOMLDecodeError:
        settings = migrate.document(text, path).unwrap()  # says what is wrong
    found = settings.get(table, {})
    return found if isinstance(found, dict) else {}


def with_dashes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with one spelling of each key: an operator may write a flag with dashes or underscores."""
    return {name.replace("_", "-"): value for name, value in settings.items()}


def endpoint(text: str | None, path: Path, *, system: bool = False) -> Endpoint:
    """The address in the settings, or the default of this form."""
    table = parse(text, path, "gateway" if system else "serve") if text else {}
    port = table.get("port", SERVER_PORT if system else DEFAULT_PORT)
    if type(port) is not int or not 1 <= port <= 65535:
        raise InstallError(
            t("The port {port!r} in {path} is not a number from 1 to 65535.", port=port, path=path),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Correct it, then run this again."),
        )
    certificate = path.parent / "tls/server.crt" if system or table.get("ssl-certfile") else None
    return Endpoint(str(table.get("host", SERVER_HOST if system else DEFAULT_HOST)), port, certificate)


def standing(layout: Layout) -> Endpoint:
    """Where the installed service listens."""
    return endpoint(read_text(layout.config), layout.config, system=layout.system)


def render(base: str | None, values: dict[str, Any], path: Path) -> str:
    """Prefix form: `base`, in the current format, with `values` set in [serve]. Comments, order and other keys stay.
    The same input gives the same bytes."""
    text, _ = migrate.migrate(base if base is not None else _HEADER, path)
    document = tomlkit.parse(text)
    _set(document, "serve", values)
    return tomlkit.dumps(document)


def render_server(
    base: str | None, gateway: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], path: Path
) -> str:
    """System form: like `render`, for [gateway] and one [models.NAME] for each of `models`; other models are
    removed, with their replicas. Replicas of `models` stay."""
    text, _ = migrate.migrate(base if base is not None else _SERVER_HEADER, path)
    document = tomlkit.parse(text)
    _set(document, "gateway", gateway)
    if "models" not in document:
        document["models"] = tomlkit.table(is_super_table=True)
    tables: Any = document["models"]
    copies = _replicas(tables)
    for name in [name for name in tables if name not in models and copies.get(name) not in models]:
        del tables[name]
    for name, values in models.items():
        _set(tables, name, values)
    return tomlkit.dumps(document)


def with_replicas(text: str, added: Mapping[str, Mapping[str, Any]], removed: Collection[str]) -> str:
    """These replicas' tables added or changed, and those of `removed` gone."""
    document = tomlkit.parse(text)
    tables: Any = document["models"]
    for name in [name for name in _replicas(tables) if name in removed]:
        del tables[name]
    for name, values in added.items():
        _set(tables, name, {key: value for key, value in values.items() if value})
    return tomlkit.dumps(document)


def model_tables(text: str | None, path: Path) -> dict[str, dict[str, Any]]:
    """[models.NAME] of every engine, over what [engine] sets for all of them, and a replica's over its model's."""
    if not text:
        return {}
    common = parse(text, path, "engine")
    found = {name: table for name, table in parse(text, path, "models").items() if isinstance(table, dict)}
    copies = _replicas(found)
    inherited = {name: {key: value for key, value in found.get(of, {}).items() if key != "gpus"}
                 for name, of in copies.items()}
    return {name: {**common, **inherited.get(name, {}), **table} for name, table in found.items()}


def replicas(text: str | None, path: Path) -> dict[str, str]:
    """Engine -> the model whose replica it is."""
    return _replicas(parse(text, path, "models")) if text else {}


def _replicas(tables: Mapping[str, Any]) -> dict[str, str]:
    named = {name: table.get(REPLICA_OF, table.get(REPLICA_OF.replace("-", "_")))
             for name, table in tables.items() if isinstance(table, Mapping)}
    return {name: str(of) for name, of in named.items() if of}


def _set(document: Any, name: str, values: Mapping[str, Any]) -> None:
    if name not in document:
        document[name] = tomlkit.table()
    table = document[name]
    for key, value in values.items():
        if table.get(key) != value:
            table[key] = value
