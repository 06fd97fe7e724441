"""Health: the service says that it serves, and Atoll sees nothing wrong with it."""

from appliance.service.findings import Finding, Severity, made
from appliance.service.verification.api import Api
from appliance.service.verification.context import Verifying
from installer.base.i18n import t
from installer.operate.status import status


async def run(work: Verifying) -> list[Finding]:
    subject = work.subject
    found: list[Finding] = []
    async with Api(subject.target, "") as api:
        answer = await api.get("/health")
    found.append(made(
        "health", "strict", answer.status == 200, t("Health"), observed=f"HTTP {answer.status} {answer.said}".strip(),
        required="HTTP 200", why=t("it only answers 200 while tokens come from the device"),
        fix=t("Find out what it waits for: {command}", command="atoll status"), command="atoll logs",
    ))  # fmt: skip
    if subject.layout is not None:
        facts = status(subject.layout)
        for number, problem in enumerate(facts["problems"]):
            severity: Severity = "block" if problem["severity"] == "error" else "warn"
            found.append(made(
                f"status-{number + 1}", severity, False, t("Status"), observed=problem["what"],
                fix=problem.get("next") or "", why=t("`atoll status` reports it too"),
            ))  # fmt: skip
        if not facts["problems"]:
            found.append(made("status", "info", True, t("Status"), observed=t("`atoll status` finds nothing wrong")))
        restarts = facts["service"]["restarts"]
        found.append(made(
            "restarts", "warn", not restarts, t("Restarts"), observed=t("{count} since its start", count=restarts),
            why=t("a service that ended by itself may do so again"),
            fix=t("Read why: {command}", command="atoll logs"),
        ))  # fmt: skip
    return found
