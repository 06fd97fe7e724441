"""Words that both forms of the report share."""

from collections.abc import Iterator, Mapping
from typing import Any

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
PREDICTION = (t("Text"), t("Tokens"), t("Perplexity"), t("Perplexity in 16 bits"), t("Same likeliest token"))
_LANGUAGES = {"en": t("English"), "ko": t("Korean")}


def predictions(data: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """Each model with its rows of `PREDICTION`, from the numbers of the group `quality`."""
    for model, texts in data.get("prediction", {}).items():
        rows = []
        for language, found in texts.items():
            compared = "top1_agreement" in found
            rows.append([
                _LANGUAGES.get(language, language), f"{found['tokens']:,}", f"{found['perplexity']:,.2f}",
                f"{found['reference_perplexity']:,.2f}" if compared else "–",
                f"{found['top1_agreement']:.1%}" if compared else "–",
            ])  # fmt: skip
        yield model, rows


def kind_of(finding: Finding) -> str:
    """pass, fail, warn, info or waived."""
    if finding.ok:
        return "pass"
    if finding.waiver is not None:
        return "waived"
    return "fail" if finding.blocks else finding.severity


def word_of(finding: Finding) -> str:
    return _WORDS[kind_of(finding)]
