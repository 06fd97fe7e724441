"""How a dataclass field declares itself as a setting.

The field is the only source: its flag, its key in TOML, its environment variable, its line in `--help`, its bounds and
its row in the documentation are all derived from it (engine.server.settings). Standard library only, because the engine
process imports this first.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

KEY = "setting"  # in a field's metadata


@dataclass(frozen=True, slots=True)
class Setting:
    """`help` may contain `{default}`. A bound that is None means no limit."""

    help: str
    group: str = ""
    metavar: str | None = None
    flags: tuple[str, ...] = ()     # in place of --field-name; further ones are aliases
    aliases: tuple[str, ...] = ()   # in addition to --field-name
    size: bool = False              # may be written 32k, 32K, 1M
    many: bool | Literal["append"] = False
    choices: Mapping[str, str] | tuple[int, ...] | None = None  # spelling -> value, where Literal does not say it
    as_text: bool = False           # keep what was typed, whatever the field's type
    const: bool | None = None       # what the flag sets, if it takes no value and has no --no- form
    json_list: bool = False         # a list in a file, a JSON list on the command line
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    line_only: bool = False         # has no environment variable
    hidden: bool = False            # not in --help


def setting(default: Any, help: str, *, factory: Any = None, **declared: Any) -> Any:
    """A dataclass field that is a setting. `default` MISSING: the field is required."""
    metadata = {KEY: Setting(help, **declared)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """The fields of a dataclass that are settings, in order."""
    return {f.name: (f, f.metadata[KEY]) for f in dataclasses.fields(cls) if KEY in f.metadata}


def flag_of(name: str, declared: Setting) -> str:
    """The flag that messages name."""
    return declared.flags[0] if declared.flags else "--" + name.replace("_", "-")


def value_type(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """(plain type, words of a Literal) of an annotation; None in a union is left out.

    >>> value_type(int | Literal["auto"] | None)
    (<class 'int'>, ('auto',))
    """
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is list or not parts:
        return get_origin(annotation) or annotation, ()
    plain, words = str, ()
    for part in parts:
        kind, of_part = value_type(part)
        words += of_part
        if not of_part:
            plain = kind
    return plain, words
