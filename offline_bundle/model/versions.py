"""Version ranges in a manifest, such as ">=0.1,<0.2": every clause must hold."""

import operator
import re
from collections.abc import Callable
from typing import Any

CLAUSE = r"(>=|<=|==|!=|>|<)(0|[1-9][0-9]{0,5})(\.(0|[1-9][0-9]{0,5})){0,2}"
RANGE = rf"^{CLAUSE}(,{CLAUSE}){{0,3}}\z"
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def admits(versions: str, version: str) -> bool:
    """Whether the range `versions` (of the form RANGE) holds `version`; a pre-release counts as its release."""
    return all(_holds(clause, _numbers(version)) for clause in versions.split(","))


def _holds(clause: str, version: tuple[int, ...]) -> bool:
    sign = clause[:2] if clause[:2] in _COMPARE else clause[:1]
    return _COMPARE[sign](version, _numbers(clause[len(sign) :]))


def _numbers(text: str) -> tuple[int, ...]:
    """The first three numbers; those that are not there are 0."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)
