"""Converts what a person wrote, on the command line, in a file or in the environment, to a value, and checks bounds."""

import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from engine.errors import ConfigError
from engine.message import msg
from engine.setting import Setting, flag_of, settings_of, value_type

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def human_size(text: str) -> int:
    """vLLM's sizes: 32k = 32 000, 32K = 32 768, 1.5M = 1 572 864; a plain number is itself.

    >>> human_size("25.6k")
    25600
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(msg("{text} is not a size such as 4096, 32k or 1M", text=f"{text!r}"))
    number, unit = match.groups()
    if not unit:
        if "." in number:
            raise argparse.ArgumentTypeError(msg("{text} is not a whole number", text=f"{text!r}"))
        return int(number)
    power = "kmgt".index(unit.lower()) + 1
    scaled = float(number) * (1000 if unit.islower() else 1024) ** power
    if scaled != int(scaled):
        raise argparse.ArgumentTypeError(msg("{text} is not a whole number", text=f"{text!r}"))
    return int(scaled)


def human_size_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text in ("auto", "-1") else human_size(text)


def json_strings(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(msg("{text} is not a JSON list of strings", text=f"{text!r}"))
    return value


def truth(value: Any) -> bool:
    """A boolean from its usual spellings. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    if (word := str(value).lower()) not in _TRUTH:
        raise ValueError
    return _TRUTH[word]


def number(value: Any, kind: type) -> int | float:
    """A number from TOML, or from its text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")  # in Python, True is a number
    if kind is int:
        if isinstance(value, str):
            try:
                return human_size(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(str(error)) from None
        if value != int(value):
            raise ValueError("not a whole number")
        return int(value)
    if not math.isfinite(found := float(value)):
        raise ValueError("not finite")
    return found


def reader_of(annotation: Any, declared: Setting) -> Callable[[str], Any]:
    """The function that turns one word of the command line into the setting's value."""
    kind, words = value_type(annotation)
    if declared.json_list:
        return json_strings
    if declared.size:
        return human_size_or_auto if words else human_size
    return str if declared.as_text or declared.many else kind


def check_bounds(options: Any) -> None:
    """Raises ConfigError, which names the flag, if a value is outside the bounds that its field declares."""
    for name, (_, declared) in settings_of(type(options)).items():
        value, flag = getattr(options, name), flag_of(name, declared)
        if not isinstance(value, int | float) or isinstance(value, bool) or within(value, declared):
            continue
        low, high = declared.at_least, declared.at_most
        if declared.above is not None:
            raise ConfigError(msg("{flag} must be above {above} and at most {high}, got {value}.", flag=flag,
                                  above=declared.above, high=high, value=value), flag)
        if high is not None:
            raise ConfigError(msg("{flag} must lie between {low} and {high}, got {value}.", flag=flag, low=low,
                                  high=high, value=value), flag)
        raise ConfigError(msg("{flag} must be at least {low}, got {value}.", flag=flag, low=low, value=value), flag)


def within(value: float, declared: Setting) -> bool:
    """Whether the value is within the setting's bounds. NaN is not, if there is any bound."""
    return ((declared.above is None or value > declared.above)
            and (declared.at_least is None or value >= declared.at_least)
            and (declared.at_most is None or value <= declared.at_most))


def is_collector(endpoint: str) -> bool:
    """Whether spans can be sent there: http(s)://host[:port][/path] or unix:///path, and no user, query or fragment."""
    try:
        url = urlsplit(endpoint)
        _ = url.port
    except ValueError:
        return False
    if url.query or url.fragment or "@" in url.netloc or not endpoint.isprintable() or " " in endpoint:
        return False
    if url.scheme == "unix":
        return not url.netloc and len(url.path) > 1
    return url.scheme in ("http", "https") and bool(url.hostname)
