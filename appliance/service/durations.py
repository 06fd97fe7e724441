"""Durations as people write them: 90s, 10m, 1.5h, 5d, 2w."""

import re

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "min": 60.0, "sec": 1.0}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*(w|d|h|min|m|sec|s)?")
_SHOWN = ("w", "d", "h", "m")


def seconds_in(text: str) -> float | None:
    """A number without a unit is in seconds. None: not a duration."""
    found = _WRITTEN.fullmatch(text.strip().lower())
    return float(found[1]) * _UNITS[found[2] or "s"] if found else None


def short_time(seconds: float) -> str:
    """5400.0 -> "90m": a whole number of the largest unit that divides it."""
    for unit in _SHOWN:
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds:g}s"
