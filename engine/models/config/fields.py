"""Fields of config.json, checked as they are read. Every ModelError names the field and what was found."""

from typing import Any

from engine.errors import ModelError
from engine.message import msg


def get_field(raw: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A value of type `kind`; whole numbers pass as floats."""
    value = raw.get(name, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind):
        raise ModelError(msg("config.json: {name} must be a {name_2}, found {value}.", name=name,
                             name_2=kind.__name__, value=f"{value!r:.60}"))
    return value


def get_size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive number; null means `default`."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(msg("config.json: {name} must be a positive number, found {value}.", name=name,
                             value=f"{value!r:.60}"))
    return value


def get_scale(raw: dict[str, Any], name: str) -> float | None:
    """A positive factor; None where it is missing or null."""
    if raw.get(name) is None:
        return None
    value = get_field(raw, name, float)
    if value <= 0:
        raise ModelError(msg("config.json: {name} must be positive, found {value}.", name=name, value=value))
    return value
