"""Words that both forms of the report share."""

from appliance.service.findings import Finding
from installer.base.i18n import t

TITLE = t("Verification report")
PASSED, FAILED = t("passed"), t("not passed")
_WORDS = {"pass": t("passed"), "fail": t("not passed"), "warn": t("warning"), "info": t("not checked"),
          "waived": t("waived")}  # fmt: skip
COLUMNS = (t("Check"), t("Result"), t("Observed"), t("Required"))
LATENCIES = (("ttft", t("time to first token")), ("tpot", t("time per token")), ("itl", t("wait between tokens")),
             ("e2el", t("whole request")))  # fmt: skip
LOADS = {"closed": t("closed loop"), "open": t("open loop"), "users": t("users of the target")}


def kind_of(finding: Finding) -> str:
    """pass, fail, warn, info or waived."""
    if finding.ok:
        return "pass"
    if finding.waiver is not None:
        return "waived"
    return "fail" if finding.blocks else finding.severity


def word_of(finding: Finding) -> str:
    return _WORDS[kind_of(finding)]
