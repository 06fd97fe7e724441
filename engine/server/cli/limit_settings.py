"""The bounds of the HTTP edge as settings: every field of `Limits`, from the environment, a TOML table, or its default.

    [gateway.limits]                          # of `atoll serve`: [serve.limits]
    max-in-flight-per-key = 8                 # ATOLL_LIMITS_MAX_IN_FLIGHT_PER_KEY=8 wins over the file

A field that is added to `Limits` is a setting by that alone. Its range follows from its type and its unit, unless
`RANGES` says otherwise.
"""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.server.cli.flag_parser import LIMITS as TABLE
from engine.server.cli.flag_parser import human_size, read_toml
from engine.server.http.limits import Limits

PREFIX = "ATOLL_LIMITS_"
FIELDS = {field.name: field for field in dataclasses.fields(Limits)}

# (smallest, largest) where type and unit do not say it.
RANGES: dict[str, tuple[float, float]] = {
    "max_body_bytes": (1 << 10, 1 << 30),
    "max_header_bytes": (1 << 10, 1 << 20),
    "max_name_characters": (1, 4096),
    "text_threads": (1, 256),
    "first_output_seconds": (0, 60),
}
_COUNT = (1, 10_000_000)
_BYTES = (1, 1 << 36)
_SECONDS = (0.1, 86_400)


def range_of(name: str) -> tuple[float, float] | None:
    """(smallest, largest) of a limit; None for a switch."""
    default = FIELDS[name].default
    if isinstance(default, bool):
        return None
    if name in RANGES:
        return RANGES[name]
    if name.endswith("_seconds"):
        return (1, _SECONDS[1]) if isinstance(default, int) else _SECONDS
    low, high = _BYTES if name.endswith("_bytes") else _COUNT
    return (0 if "_per_" in name else low), high


def load_limits(path: Path | None, parent: str) -> Limits:
    """The limits of [`parent`.limits] of the settings file, with those of the environment before them.

    Raises ConfigError naming the file, the line and the key.
    """
    table = _table(path, parent) if path is not None else {}
    environment = _environment()
    if not table and not environment:
        return Limits()  # pydantic takes a moment to import, and a start should not wait for it
    values, places = dict[str, Any](), dict[str, str]()
    for key, value in table.items():
        name, place = key.replace("-", "_"), _place(path, parent, key)
        if name not in FIELDS:
            raise _no_such_limit(place, name)
        if name in values:
            raise ConfigError(f"{place}: {key} is there twice, with a dash and with an underscore.", "--config")
        values[name], places[name] = value, place
    for variable in environment:
        name = variable[len(PREFIX):].lower()  # in any case, as pydantic-settings reads them
        if name not in FIELDS:
            raise _no_such_limit(variable, name)
        places[name] = variable
    limits = _validated(values, places)
    if limits.max_discarded_bytes < limits.max_body_bytes:
        place = places.get("max_body_bytes") or places["max_discarded_bytes"]
        raise ConfigError(f"{place}: max-discarded-bytes must be at least max-body-bytes.", "--config")
    return limits


def described(name: str) -> tuple[str, str, str]:
    """(key, default, range) as a file and `--help` write them."""
    default, bounds = FIELDS[name].default, range_of(name)
    return name.replace("_", "-"), str(default).lower() if bounds is None else f"{default:.12g}", _number(bounds)


def help_text(parent: str) -> str:
    """The part of `--help` about limits, as a table of the file."""
    rows = [f"  {key} = {default} # {bounds}" for key, default, bounds in map(described, FIELDS)]
    return "\n".join(["limits, with their defaults and ranges (ATOLL_LIMITS_… in the environment wins):",
                      f"  [{parent}.{TABLE}]", *rows, ""])


def _number(bounds: tuple[float, float] | None) -> str:
    return "true, false" if bounds is None else "{:.12g} to {:.12g}".format(*bounds)


def _validated(values: Mapping[str, Any], places: Mapping[str, str]) -> Limits:
    """Raises ConfigError."""
    from typing import Annotated

    from pydantic import BeforeValidator, Field, ValidationError, create_model
    from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

    class Settings(BaseSettings):
        model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource, **_: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return env_settings, init_settings  # the environment wins over the file

    def typed(name: str) -> Any:
        kind, bounds = type(FIELDS[name].default), range_of(name)
        if bounds is None:
            return bool
        within = Field(ge=bounds[0], le=bounds[1], allow_inf_nan=False) if kind is float else Field(
            ge=int(bounds[0]), le=int(bounds[1]))
        return Annotated[kind, BeforeValidator(_no_bool if kind is float else _whole), within]

    fields: dict[str, Any] = {name: (typed(name), field.default) for name, field in FIELDS.items()}
    try:
        found = create_model("LimitSettings", __base__=Settings, **fields)(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        place, key, bounds = places[name], name.replace("_", "-"), range_of(name)
        if bounds is None:
            raise ConfigError(f"{place}: {key} must be true or false.", "--config") from None
        low, high = (f"{bound:.12g}" for bound in bounds)
        if isinstance(FIELDS[name].default, int):
            raise ConfigError(f"{place}: {key} must be a whole number from {low} to {high}.", "--config") from None
        raise ConfigError(f"{place}: {key} must be a number from {low} to {high}.", "--config") from None
    return Limits(**found.model_dump())


def _no_bool(value: Any) -> Any:
    """Python takes true for 1."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def _whole(value: Any) -> Any:
    """With the units of the flags: 4K, 32M."""
    if isinstance(value, str):
        try:
            return human_size(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    return _no_bool(value)


def _table(path: Path, parent: str) -> dict[str, Any]:
    outer = read_toml(path).get(parent, {})
    table = outer.get(TABLE, {}) if isinstance(outer, dict) else {}
    if not isinstance(table, dict):
        name = f"{parent}.{TABLE}"
        raise ConfigError(f"{path}: {name} must be a table, [{name}].", "--config")
    return table


def _environment() -> list[str]:
    return sorted(name for name in os.environ if name.upper().startswith(PREFIX))


def _place(path: Path | None, parent: str, key: str) -> str:
    """File, line (where it is plain to see) and table of a key."""
    name, table = f"{parent}.{TABLE}", ""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = header[1]
        elif table == name and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line):
            return f"{path}:{number}, [{name}]"
    return f"{path}, [{name}]"


def _no_such_limit(place: str, name: str) -> ConfigError:
    near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6) if len(name) <= 64 else []
    hint = f"Did you mean {near[0].replace('_', '-')}?" if near else "atoll gateway --help lists the limits."
    return ConfigError(f"{place}: there is no limit {name[:80]!r}.", "--config", hint)
