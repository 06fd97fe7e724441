"""The limits of the HTTP endpoint as settings: every field of `Limits`, from the environment, a TOML table, or its
default.

    [gateway.limits]                          # of `atoll serve`: [serve.limits]
    max-in-flight-per-key = 8                 # ATOLL_LIMITS_MAX_IN_FLIGHT_PER_KEY=8 wins over the file
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.message import msg
from engine.server.http.limits import Limits
from engine.server.settings.sources import LIMITS as TABLE
from engine.server.settings.sources import read_toml
from engine.server.settings.values import number, truth, within
from engine.setting import settings_of

PREFIX = "ATOLL_LIMITS_"
FIELDS = settings_of(Limits)


def load_limits(path: Path | None, parent: str) -> Limits:
    """The limits of [`parent`.limits] of the settings file; those of the environment win over them.

    Raises ConfigError naming the file, the line and the key.
    """
    values, places = dict[str, Any](), dict[str, str]()
    for key, value in (_table(path, parent) if path is not None else {}).items():
        name, place = key.replace("-", "_"), _place(path, parent, key)
        if name not in FIELDS:
            raise _no_such_limit(place, name)
        if name in values:
            raise ConfigError(msg("{place}: {key} is given twice, with a dash and with an underscore.", place=place,
                                  key=key), "--config")
        values[name], places[name] = value, place
    for variable in _environment():
        name = variable[len(PREFIX):].lower()
        if name not in FIELDS:
            raise _no_such_limit(variable, name)
        values[name], places[name] = os.environ[variable], variable
    limits = Limits(**{name: _read(name, value, places[name]) for name, value in values.items()})
    if limits.max_discarded_bytes < limits.max_body_bytes:
        place = places.get("max_body_bytes") or places["max_discarded_bytes"]
        raise ConfigError(msg("{place}: max-discarded-bytes must be at least max-body-bytes.", place=place), "--config")
    return limits


def described(name: str) -> tuple[str, str, str]:
    """(key, default, range) in the spelling of files and of `--help`."""
    field, declared = FIELDS[name]
    key = name.replace("_", "-")
    if isinstance(field.default, bool):
        return key, str(field.default).lower(), "true, false"
    return key, f"{field.default:.12g}", f"{declared.at_least:.12g} to {declared.at_most:.12g}"


def help_text(parent: str) -> str:
    """The part of `--help` about limits, in the form of a TOML table."""
    rows = [f"  {key} = {default} # {bounds}" for key, default, bounds in map(described, FIELDS)]
    return "\n".join(["limits, with their defaults and ranges (ATOLL_LIMITS_… in the environment wins):",
                      f"  [{parent}.{TABLE}]", *rows, ""])


def _read(name: str, value: Any, place: str) -> Any:
    """Raises ConfigError."""
    field, declared = FIELDS[name]
    key, _, _ = described(name)
    kind = type(field.default)
    if kind is bool:
        try:
            return truth(value)
        except ValueError:
            raise ConfigError(msg("{place}: {key} must be true or false.", place=place, key=key), "--config") from None
    try:
        found = number(value, kind)
    except (ValueError, OverflowError):
        found = None
    if found is None or not within(found, declared):
        low, high = f"{declared.at_least:.12g}", f"{declared.at_most:.12g}"
        if kind is int:
            raise ConfigError(msg("{place}: {key} must be a whole number from {low} to {high}.", place=place,
                                  key=key, low=low, high=high), "--config")
        raise ConfigError(msg("{place}: {key} must be a number from {low} to {high}.", place=place, key=key, low=low,
                              high=high), "--config")
    return found


def _table(path: Path, parent: str) -> dict[str, Any]:
    outer = read_toml(path).get(parent, {})
    table = outer.get(TABLE, {}) if isinstance(outer, dict) else {}
    if not isinstance(table, dict):
        name = f"{parent}.{TABLE}"
        raise ConfigError(msg("{path}: {name} must be a table, [{name_2}].", path=path, name=name, name_2=name),
                          "--config")
    return table


def _environment() -> list[str]:
    return sorted(name for name in os.environ if name.upper().startswith(PREFIX))


def _place(path: Path | None, parent: str, key: str) -> str:
    """File, line (if it can be found) and table of a key."""
    name, table = f"{parent}.{TABLE}", ""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    for line_number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = header[1]
        elif table == name and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line):
            return f"{path}:{line_number}, [{name}]"
    return f"{path}, [{name}]"


def _no_such_limit(place: str, name: str) -> ConfigError:
    near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6) if len(name) <= 64 else []
    hint = msg("atoll gateway --help lists the limits.")
    if near:
        hint = msg("Did you mean {near}?", near=near[0].replace("_", "-"))
    return ConfigError(msg("{place}: there is no limit {name}.", place=place, name=f"{name[:80]!r}"), "--config", hint)
