"""argparse made into the parser of `vllm serve`-like commands: spellings, sizes, TOML, suggestions, refusals."""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from engine.errors import ConfigError

LIMITS = "limits"  # the one key of [serve] and [gateway] that is a table of its own: engine.server.cli.limit_settings
JSON_FLAGS = frozenset({"--allowed-origins"})  # vLLM's way to write a list on the line; a file has lists of its own


def human_size(text: str) -> int:
    """vLLM's sizes: 32k = 32 000, 32K = 32 768, 1.5M = 1 572 864; a plain number is itself.

    >>> human_size("25.6k")
    25600
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 32k or 1M")
    number, unit = match.groups()
    if not unit:
        if "." in number:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        return int(number)
    power = "kmgt".index(unit.lower()) + 1
    scaled = float(number) * (1000 if unit.islower() else 1024) ** power
    if scaled != int(scaled):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(scaled)


def human_size_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text in ("auto", "-1") else human_size(text)


def json_strings(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return value


class _Why(argparse.Action):
    def __init__(self, *args: Any, why: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why = why


class Note(_Why):
    """Accept a flag that has no effect here, and remember to say so."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        cast(FlagParser, parser).notes.append(f"{option_string} changes nothing here: {self.why}")


class Refuse(_Why):
    """Refuse a flag (but not its `--no-` form) with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if option_string and option_string.startswith("--no-"):
            return  # "not this" is what we do
        raise ConfigError(f"{option_string} is refused: {self.why}", option_string)  # never echoes the value


class OnlyOne(_Why):
    """Accept the count 1 and nothing else."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if values[0] != 1:
            raise ConfigError(f"{option_string} {values[0]} is refused: {self.why}", option_string, "Use 1.")


class FlagParser(argparse.ArgumentParser):
    """argparse, but: errors are ConfigErrors, `_` is `-` in flags, unknown flags get a suggestion, TOML comes first."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                         formatter_class=_HelpFormatter, **kwargs)
        self.notes: list[str] = []

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument (?:-\w+/)?(--[\w-]+)", message)
        raise ConfigError(message.removeprefix("argument ").rstrip(".") + ".", flag and flag.group(1))

    def parse(
        self, argv: Sequence[str], from_file: "Callable[[dict[str, Any]], list[str]] | None" = None
    ) -> tuple[dict[str, Any], list[str]]:
        """(flags that were given, notes). The one positional argument is the model.

        With `--config`, `from_file` turns the given flags into those of the file (by default its [serve] table); what
        the line says wins. It may take away from the dictionary what only names a part of the file.
        """
        line = [_dashes(arg) for arg in argv]
        given = vars(self._parse(line))
        if "config" in given:
            more = (from_file or _serve_table)(given)
            given = vars(self._parse(more)) | given
        given.pop("_compatibility", None)
        return given, list(dict.fromkeys(self.notes))

    def _parse(self, argv: list[str]) -> argparse.Namespace:
        namespace, rest = self.parse_known_args(argv)
        for arg in rest:
            if arg.startswith("-") and arg != "--":
                self._unknown(arg)
        positional = [arg for arg in rest if arg != "--"]
        if len(positional) > 1:
            raise ConfigError(f"Unexpected argument {positional[1]!r}: the model was already given as "
                              f"{positional[0]!r}.")
        if positional:
            namespace.model = positional[0]
        return namespace

    def _unknown(self, arg: str) -> NoReturn:
        name = arg.partition("=")[0]
        known = [option for option, action in self._option_string_actions.items()
                 if action.help is not argparse.SUPPRESS]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else f"{self.prog} --help lists the flags."
        raise ConfigError(f"Unknown flag {name}.", name, hint)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _serve_table(given: dict[str, Any]) -> list[str]:
    path = given["config"]
    table = read_toml(path).get("serve")
    if not isinstance(table, dict):
        raise ConfigError(f"--config {path} has no [serve] table.", "--config")
    return table_argv({key: value for key, value in table.items() if key != LIMITS}, f"--config {path}")


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.", "--config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.", "--config") from None


def table_argv(table: dict[str, Any], where: str) -> list[str]:
    """A table as flags, so that one set of rules reads both. Raises ConfigError, which begins with `where`."""
    argv: list[str] = []
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        if flag == "--config":
            raise ConfigError(f"{where}: a configuration file cannot name another one.", "--config")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif flag in JSON_FLAGS and isinstance(value, list):
            argv.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list) and value and all(isinstance(item, str | int) for item in value):
            argv += [flag, *map(str, value)]
        elif isinstance(value, str | int | float):
            argv.append(f"{flag}={value}")
        else:
            raise ConfigError(f"{where}: {key} must be a string, a number, a boolean or a list of strings.", "--config")
    return argv
