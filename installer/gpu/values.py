"""Values as nvidia-smi writes them. Anything unusable (`[N/A]`, nonsense, absurd numbers) becomes None."""

import math
import re

from installer.gpu.command import clean

_NUMBER = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,6})?")
_VERSION = re.compile(r"[0-9]{2,4}(?:\.[0-9]{1,4}){1,3}")
_PAIR = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{8,80}")
_UNITS = {"": 1 << 20, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}  # nounits output is in MiB


def word(text: str | None) -> str | None:
    """The text, unless it says that there is no value: [N/A], N/A, [Not Supported], [Unknown Error], ERR!, …"""
    if text is None:
        return None
    said = clean(text)
    bare = said.strip("[]").strip().lower()
    unknown = ("", "n/a", "none", "not supported", "unknown error", "err!", "error", "unknown", "not available",
               "insufficient permissions", "gpu is lost", "requested functionality has been deprecated")  # fmt: skip
    return None if bare in unknown else said


def number(text: str | None) -> float | None:
    """The number at the start, whatever its unit."""
    found = _NUMBER.match(word(text) or "")
    value = float(found[0]) if found else math.nan
    return value if math.isfinite(value) else None


def count(text: str | None, most: int = 1 << 62) -> int | None:
    """A number that cannot be negative."""
    value = number(text)
    return int(value) if value is not None and 0 <= value <= most else None


def size(text: str | None) -> int | None:
    """Bytes: `81559 MiB`, or `81559` without units."""
    said = word(text) or ""
    value = number(said)
    unit = said.rpartition(" ")[2].lower() if " " in said else ""
    if value is None or value < 0 or unit not in _UNITS:
        return None
    result = int(value * _UNITS[unit])
    return result if result < 1 << 50 else None


def switch(text: str | None) -> bool | None:
    """Enabled/Disabled, Yes/No, On/Off."""
    said = (word(text) or "").lower()
    return {"enabled": True, "yes": True, "on": True, "disabled": False, "no": False, "off": False}.get(said)


def pair(text: str | None) -> tuple[int, int] | None:
    """A version of two numbers: 9.0, 13.0."""
    found = _PAIR.fullmatch(word(text) or "")
    return (int(found[1]), int(found[2])) if found else None


def driver(text: str | None) -> str | None:
    found = _VERSION.fullmatch(word(text) or "")
    return found[0] if found else None


def pci(text: str | None) -> str | None:
    """A PCI address as sysfs writes it: four digits of domain, lower case."""
    found = _PCI.fullmatch(word(text) or "")
    if not found:
        return None
    domain = int(found[1] or "0", 16)
    return f"{domain:04x}:{found[2]}:{found[3]}.{found[4]}".lower()


def uuid(text: str | None) -> str | None:
    found = _UUID.fullmatch(word(text) or "")
    return found[0] if found else None


def compute_mode(text: str | None) -> str | None:
    """default, exclusive or prohibited; `Exclusive_Process` and the old `Exclusive_Thread` are the same to us."""
    said = (word(text) or "").lower()
    for mode in ("default", "exclusive", "prohibited"):
        if said.startswith(mode):
            return mode
    return None
