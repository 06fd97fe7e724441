"""Run the groups of a verification one after another. A group that fails or breaks does not hide the others.

A group's findings are on the disk before the next one begins. An interrupted run resumes behind it, if nothing that it
depends on has changed. After a finished run, the next one starts from the beginning.
"""

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from appliance.load.generator import run_in_loop
from appliance.load.http_client import HttpError
from appliance.service.findings import Finding, made
from appliance.service.verification import conformance, health, performance, quality, security, stability
from appliance.service.verification.context import Numbers, Told, Verifying
from appliance.service.verification.plan import Group, VerifyAnswers
from appliance.service.verification.subject import Subject
from installer.base import fs
from installer.base.errors import InstallError
from installer.base.i18n import plain, t
from installer.base.timestamps import timestamp

RUNNERS: Mapping[Group, Callable[[Verifying], Coroutine[Any, Any, list[Finding]]]] = {
    "health": health.run, "conformance": conformance.run, "quality": quality.run, "performance": performance.run,
    "stability": stability.run, "security": security.run,
}  # fmt: skip
TITLES: Mapping[Group, str] = {
    "health": t("Health"), "conformance": t("Conformance"), "quality": t("Quality"),
    "performance": t("Performance"), "stability": t("Stability"), "security": t("Security"),
}  # fmt: skip
_FRESH_SECONDS = 86_400    # an older half of a run says too little about today


class GroupResult(BaseModel):
    """One group. `findings` carry message ids; `data` are the numbers behind them."""

    group: Group
    at: str
    seconds: float
    findings: list[dict[str, Any]]
    data: dict[str, Any] = Field(default_factory=dict)
    resumed: bool = False

    def found(self) -> list[Finding]:
        return [Finding.of_json(facts) for facts in self.findings]

    @property
    def passed(self) -> bool:
        return not any(finding.blocks for finding in self.found())


class Verification(BaseModel):
    """All groups of a run, and what was verified."""

    schema_version: int = 1
    at: str
    base_url: str
    release: str | None
    models: list[str]
    plan: VerifyAnswers
    groups: list[GroupResult]

    @property
    def passed(self) -> bool:
        return all(group.passed for group in self.groups)

    def found(self) -> list[Finding]:
        return [finding for group in self.groups for finding in group.found()]


def verify(
    subject: Subject, plan: VerifyAnswers, *, told: Told | None = None, state: Path | None = None,
    begin: Callable[[Group], None] = lambda group: None, numbers: Numbers | None = None,
) -> Verification:  # fmt: skip
    """Run the groups of `plan`.

    `state`: a directory where finished groups are kept until `forget`. Raises OSError if it cannot be written, and
    KeyboardInterrupt.
    """
    begun = timestamp()
    inputs = _inputs(subject, plan)
    groups = []
    for group in dict.fromkeys(plan.groups):
        result = _kept(state, group, inputs)
        if result is None:
            begin(group)
            work = Verifying(subject, plan, told) if told else Verifying(subject, plan)
            if numbers is not None:
                work.numbers = numbers
                numbers("group", {"group": group, "status": "running"})
            result = _one(group, work)
            _keep(state, result, inputs)
        if numbers is not None:
            found = result.found()
            numbers("group", {"group": group, "status": "passed" if result.passed else "failed",
                              "seconds": result.seconds, "checks": len(found), "resumed": result.resumed,
                              "failed": sum(each.blocks for each in found)})  # fmt: skip
        groups.append(result)
    return Verification(at=begun, base_url=subject.target.base_url, release=subject.release, plan=plan, groups=groups,
                        models=[model.name for model in subject.models])  # fmt: skip


def forget(state: Path) -> None:
    """The run has ended and its report is written: the next one starts from the beginning."""
    if state.is_dir():
        fs.remove_tree(state.parent, state)


def _one(group: Group, work: Verifying) -> GroupResult:
    at, begun = timestamp(), time.monotonic()
    try:
        found = run_in_loop(RUNNERS[group](work))
    except (InstallError, HttpError, OSError, TimeoutError, ValueError) as error:
        found = [_broken(group, getattr(error, "message", None) or plain(error) or type(error).__name__, "")]
    except Exception as error:  # a bug of ours in one group must not lose the others
        found = [_broken(group, f"{type(error).__name__}: {error}", traceback.format_exc(limit=-4))]
    return GroupResult(group=group, at=at, seconds=round(time.monotonic() - begun, 2),
                       findings=[finding.to_json() for finding in found], data=work.data)  # fmt: skip


def _broken(group: Group, why: str, evidence: str) -> Finding:
    return made(
        f"{group}-finished", "strict", False, TITLES[group], observed=t("this group could not finish: {why}", why=why),
        required=t("every check of it runs"), why=t("what was not checked may not work"), evidence=evidence,
        fix=t("Check that the service runs, then verify again: {command}", command="atoll status"),
        command="atoll status",
    )  # fmt: skip


def _inputs(subject: Subject, plan: VerifyAnswers) -> str:
    facts = [subject.target.base_url, subject.release, [model.name for model in subject.models],
             plan.model_dump(mode="json", exclude={"groups"})]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _keep(state: Path | None, result: GroupResult, inputs: str) -> None:
    if state is None:
        return
    fs.make_dir(state, 0o700)
    fs.write_atomic(state / f"{result.group}.json", json.dumps({"inputs": inputs, **result.model_dump()}), 0o600)


def _kept(state: Path | None, group: Group, inputs: str) -> GroupResult | None:
    """The result of an interrupted run. A group that did not pass is run again."""
    if state is None:
        return None
    path = state / f"{group}.json"
    try:
        if time.time() - path.stat().st_mtime > _FRESH_SECONDS:
            return None
        values = json.loads(path.read_text("utf-8"))
        if values.pop("inputs", None) != inputs:
            return None
        result = GroupResult.model_validate(values)
    except (OSError, ValueError, ValidationError, AttributeError):
        return None
    return result.model_copy(update={"resumed": True}) if result.passed else None
