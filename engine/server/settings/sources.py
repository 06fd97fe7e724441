"""Settings from outside the command line: TOML tables and the environment, both converted to flags, so that one set of
rules reads all three.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.message import msg, reason
from engine.server.settings.values import truth
from engine.setting import flag_of, value_type

LIMITS = "limits"  # a key of [serve] and [gateway] whose value is a table: engine.server.settings.limit_settings
_JSON_FLAGS = frozenset({"--allowed-origins"})  # lists that vLLM writes as JSON on the line; a file has real lists


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(msg("--config {path}: {strerror}.", path=path, strerror=reason(error)), "--config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(msg("--config {path} is not TOML: {error}.", path=path, error=reason(error)),
                          "--config") from None


def serve_argv_of(given: dict[str, Any]) -> list[str]:
    """The flags of the [serve] table of the file that `--config` names. Raises ConfigError."""
    path = given["config"]
    table = read_toml(path).get("serve")
    if not isinstance(table, dict):
        raise ConfigError(msg("--config {path} has no [serve] table.", path=path), "--config")
    return table_argv({key: value for key, value in table.items() if key != LIMITS}, f"--config {path}")


def table_argv(table: dict[str, Any], where: str) -> list[str]:
    """A table as flags. Raises ConfigError, whose message begins with `where`."""
    argv: list[str] = []
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        if flag == "--config":
            raise ConfigError(msg("{where}: a configuration file cannot name another one.", where=where), "--config")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif flag in _JSON_FLAGS and isinstance(value, list):
            argv.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list) and value and all(isinstance(item, str | int) for item in value):
            argv += [flag, *map(str, value)]
        elif isinstance(value, str | int | float):
            argv.append(f"{flag}={value}")
        else:
            raise ConfigError(msg("{where}: {key} must be a string, a number, a boolean or a list of strings.",
                                  where=where, key=key), "--config")
    return argv


def environment_flags(prefix: str, fields: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(variable, its flags) for the variables that begin with `prefix`: ATOLL_SERVE_MAX_NUM_SEQS=8 is --max-num-seqs=8.

    Words of a list are separated by spaces. Raises ConfigError, which names the variable.
    """
    flags = {flag_of(name, declared): (field, declared) for name, (field, declared) in fields.items()
             if not declared.line_only and not declared.hidden}
    for variable in sorted(os.environ):
        if not variable.startswith(prefix):
            continue
        flag, value = "--" + variable[len(prefix):].lower().replace("_", "-"), os.environ[variable]
        if flag not in flags:
            raise ConfigError(msg("{variable}: there is no setting {flag}.", variable=variable,
                                  flag=f"{flag[2:][:80]!r}"), flag)
        field, declared = flags[flag]
        if value_type(field.type)[0] is bool:
            try:
                wanted = truth(value)
            except ValueError:
                raise ConfigError(msg("{variable} must be true or false.", variable=variable), flag) from None
            yield variable, [flag] if wanted else [f"--no-{flag[2:]}"] if declared.const is None else []
        elif declared.many == "append":
            yield variable, [f"{flag}={word}" for word in value.split()]
        elif declared.many:
            yield variable, [flag, *value.split()]
        else:
            yield variable, [f"{flag}={value}"]
