"""What the groups of a verification share while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.service.findings import Finding, made
from appliance.service.verification.plan import VerifyAnswers
from appliance.service.verification.subject import Subject
from installer.base.i18n import t

Told = Callable[[str, int, int], None]
"""Progress: label, done, total."""
Numbers = Callable[[str, dict[str, Any]], None]
"""Live numbers: their topic, and what was measured."""


def _no_numbers(topic: str, facts: dict[str, Any]) -> None:
    return


def _quiet(label: str, done: int, total: int) -> None:
    return


@dataclass
class Verifying:
    """`data`: numbers of the group that is running, for the report."""

    subject: Subject
    plan: VerifyAnswers
    told: Told = _quiet
    data: dict[str, Any] = field(default_factory=dict)
    numbers: Numbers = _no_numbers


def not_checked(id: str, title: str, why: str) -> Finding:
    """A fact for the report: this was left out, and why."""
    return made(id, "info", False, title, observed=t("not checked: {why}", why=why))
