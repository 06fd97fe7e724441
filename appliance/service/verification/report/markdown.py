"""The report as Markdown, in one language."""

from collections.abc import Iterable, Iterator

from appliance.load.result import LoadResult
from appliance.service.findings import Finding
from appliance.service.verification.report import words
from appliance.service.verification.run import TITLES, GroupResult, Verification
from installer.base.i18n import t, told


def text_of(found: Verification, language: str) -> str:
    return "\n".join(_lines(found, language)) + "\n"


def _lines(found: Verification, language: str) -> Iterator[str]:
    def say(text: object) -> str:
        return safe(str(told(text, language)))

    yield f"# {say(words.TITLE)}: {say(words.PASSED if found.passed else words.FAILED)}"
    yield ""
    facts = [(t("time"), found.at), (t("endpoint"), found.base_url), (t("release"), found.release or "–"),
             (t("models"), ", ".join(found.models)), (t("profile"), found.plan.profile)]  # fmt: skip
    for name, value in facts:
        yield f"- {say(name)}: {safe(str(value))}"
    for group in found.groups:
        yield ""
        verdict = words.PASSED if group.passed else words.FAILED
        yield f"## {say(TITLES[group.group])}: {say(verdict)}"
        yield ""
        yield from table(map(say, words.COLUMNS), ([
            say(each.title), say(words.word_of(each)), say(each.observed), say(each.required),
        ] for each in group.found()))  # fmt: skip
        yield from _remarks(group.found(), language)
        yield from _numbers(group, language)


def _remarks(found: list[Finding], language: str) -> Iterator[str]:
    """For everything that did not pass: why it matters, and what to do."""
    wrong = [finding for finding in found if not finding.ok and finding.severity != "info"]
    if wrong:
        yield ""
    for finding in wrong:
        parts = [finding.why, finding.fix]
        if finding.waiver is not None:
            parts.append(t("waived by {by}: {reason}", by=finding.waiver.by, reason=finding.waiver.reason))
        said = " · ".join(safe(str(told(part, language))) for part in parts if part)
        yield f"- **{safe(str(told(finding.title, language)))}**: {said}"


def _numbers(group: GroupResult, language: str) -> Iterator[str]:
    for model, rows in words.predictions(group.data):
        yield ""
        yield safe(str(told(t("{model}, predicting texts", model=model), language)))
        yield ""
        said = [[safe(str(told(cell, language))) for cell in row] for row in rows]
        yield from table([str(told(column, language)) for column in words.PREDICTION], said)
    for model, loads in group.data.get("loads", {}).items():
        for kind, values in loads.items():
            result = LoadResult.of_json(values)
            yield ""
            title = told(t("{model}, {kind}: {requests} requests/s, {tokens} tokens out/s", model=model,
                           kind=words.LOADS[kind], requests=f"{result.request_throughput:.2f}",
                           tokens=f"{result.output_throughput:,.1f}"), language)  # fmt: skip
            yield safe(str(title))
            yield ""
            head = ["ms", str(told(t("median"), language)), "p95", "p99", str(told(t("longest"), language))]
            rows = []
            for metric, name in words.LATENCIES:
                each = getattr(result, metric)
                numbers = (each.median, each.percentiles.get("95", 0.0), each.percentiles.get("99", 0.0), each.max)
                rows.append([str(told(name, language)), *(f"{number:,.1f}" for number in numbers)])
            yield from table(head, rows)


def table(head: Iterable[str], rows: Iterable[list[str]]) -> Iterator[str]:
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def safe(text: str) -> str:
    """One line that breaks no table and no markup: models and clients write into it."""
    text = " ".join(text.split())[:600].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\|`*_[]":
        text = text.replace(mark, "\\" + mark)
    return text
