"""The pilot's report: whether to go, the figures of every stage, the assumptions of the costs; and the signature."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from appliance.series import Series, SeriesError
from appliance.service import report_page
from appliance.service.findings import Finding
from appliance.service.pilot import records as events
from appliance.service.pilot.kpi import Kpi
from appliance.service.pilot.records import PilotState, Records
from appliance.service.planning import cost
from appliance.service.verification.report import charts
from appliance.service.verification.report.markdown import safe, table
from installer.audit import log
from installer.base import fs
from installer.base.errors import usage_error
from installer.base.i18n import LANGUAGES, t, told
from installer.base.layout import Layout
from installer.base.messages import decode
from installer.base.timestamps import timestamp

STATUS = {
    "open": t("not begun"), "running": t("running"), "passed": t("passed"), "missed": t("goal missed"),
    "stopped": t("stopped"),
}  # fmt: skip
FIGURES = (
    ("seconds", t("Seconds observed"), "{:,.0f}"), ("requests", t("Requests"), "{:,.0f}"),
    ("error_rate", t("Error rate"), "{:.2%}"), ("throughput", t("Tokens out a second"), "{:,.1f}"),
    ("ttft_p95", t("TTFT p95, ms"), "{:,.0f}"), ("itl_p95", t("ITL p95, ms"), "{:,.1f}"),
    ("share_ttft", t("Requests within the TTFT target"), "{:.1%}"),
    ("share_e2el", t("Requests within the latency target"), "{:.1%}"),
    ("kv_most", t("KV cache in use, most"), "{:.1%}"), ("temperature_most", t("GPU temperature, most"), "{:.0f} °C"),
    ("cost_per_request", t("Cost of a request"), "{:,.6g}"),
    ("cost_per_million_tokens", t("Cost of a million tokens"), "{:,.6g}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    directory: Path
    files: dict[str, str]   # name → SHA-256
    go: bool


def recommends(state: PilotState) -> bool:
    return state.outcome == "done" and all(stage.status == "passed" for stage in state.stages)


def write(layout: Layout, directory: Path, state: PilotState, signed: dict[str, Any] | None = None) -> Report:
    """JSON, Markdown in both languages, HTML; each whole or not at all. Raises InstallError (usage), OSError."""
    if state.plan is None:
        raise usage_error(t("There is no pilot to report on."),
                          t("Start one: {command}", command="atoll pilot start --plan FILE"))  # fmt: skip
    name = "pilot-" + state.planned_at.replace(":", "").replace("-", "")
    values = cost.assumed(state.plan.cost)
    facts = {"schema_version": 1, "go": recommends(state), "outcome": state.outcome, "planned_at": state.planned_at,
             "plan": state.plan.model_dump(mode="json"), "assumptions": values, "signed": signed,
             "stages": [{"name": each.name, "status": each.status, "began": each.at, "kpi": each.kpi,
                         "why": [str(decode(why)) for why in each.why]} for each in state.stages]}  # fmt: skip
    texts = {f"{name}.json": json.dumps(facts, ensure_ascii=False, indent=1) + "\n"}
    for language in LANGUAGES:
        texts[f"{name}.{language}.md"] = "\n".join(_markdown(state, values, signed, language)) + "\n"
    title = f"{_TITLE} {state.planned_at}"
    lines = _throughput(layout, state)
    texts[f"{name}.html"] = report_page.page(
        title, {language: "".join(_html(state, values, signed, lines, language)) for language in LANGUAGES}
    )
    if not directory.is_dir():
        fs.make_dir(directory, 0o700)
    hashes = {}
    for file, text in texts.items():
        fs.write_atomic(directory / file, text, 0o600)
        hashes[file] = hashlib.sha256(text.encode()).hexdigest()
    return Report(directory, hashes, recommends(state))


def sign(layout: Layout, directory: Path, decision: str, by: str, reason: str) -> Report:
    """Put a name under the pilot: the report with the decision, and its hashes in the audit log. `go` lets everybody
    in. Raises InstallError, OSError."""
    from appliance.service.pilot.run import admit

    if not by.strip() or not by.isprintable() or len(by) > 100:
        raise usage_error(t("A sign-off needs the name of a person, up to 100 characters."),
                          t("Say who decides: --by NAME"))  # fmt: skip
    with Records(layout, "pilot sign") as records:
        state = records.state
        if state.plan is None or state.open:
            raise usage_error(t("Only a pilot that is over can be signed."),
                              t("Look at it: {command}", command="atoll pilot status"))  # fmt: skip
        if state.signed is not None:
            by, at = state.signed["by"], state.signed["at"]
            raise usage_error(t("This pilot is signed already, by {by} at {at}.", by=by, at=at),
                              t("Start a new one: atoll pilot start --plan FILE"))  # fmt: skip
        if decision == "go" and not recommends(state) and len(reason) < 3:
            raise usage_error(t("Not every stage has passed; to continue anyway, say why."), t("Add: --reason 'why'"))
        at = timestamp()
        signed = {"decision": decision, "by": by, "reason": reason[:500], "at": at, **log.operator()}
        written = write(layout, directory, state, signed)
        records.add("signed", decision=decision, by=by, reason=reason[:500], sha256=written.files,
                    directory=str(directory), go=written.go)  # fmt: skip
        if decision == "go":
            admit(layout, None)
    return written


_TITLE = t("Pilot")
_COLUMNS = (t("Check"), t("Result"), t("Observed"), t("Required"))


def _verdict(state: PilotState) -> str:
    return t("go is recommended") if recommends(state) else t("go is NOT recommended")


def _figures(kpi: Kpi) -> Iterator[tuple[str, str]]:
    for name, title, form in FIGURES:
        value = getattr(kpi, name)
        if value is not None:
            yield title, form.format(value)


def _signature(signed: dict[str, Any]) -> str:
    word = t("GO") if signed["decision"] == "go" else t("NO-GO")
    return t("{decision}, signed by {by} at {at}. {reason}", decision=word, by=signed["by"], at=signed["at"],
             reason=signed["reason"])  # fmt: skip


def _markdown(
    state: PilotState, values: dict[str, float], signed: dict[str, Any] | None, language: str
) -> Iterator[str]:
    say = _speaker(language, safe)
    yield f"# {say(_TITLE)}: {say(_verdict(state))}"
    yield ""
    if signed:
        yield f"**{say(_signature(signed))}**"
        yield ""
    for stage in state.stages:
        yield f"## {say(stage.name)}: {say(STATUS[stage.status])}"
        yield ""
        for why in stage.why:
            yield f"- {say(decode(why))}"
        if stage.kpi:
            yield ""
            yield from table([say(t("Figure")), say(t("Value"))],
                             ([say(title), value] for title, value in _figures(Kpi(**stage.kpi))))  # fmt: skip
        yield ""
        if stage.findings:
            yield from table([say(each) for each in _COLUMNS], (_cells(each, say) for each in stage.findings))
            yield ""
    yield f"## {say(t('Assumptions of the costs'))}"
    yield ""
    yield from table([say(t("Name")), say(t("Value")), say(t("Unit")), say(t("Source"))], (
        [safe(each.name), f"{values[each.name]:g}", each.unit, say(_source(each, state))]
        for each in cost.ASSUMPTIONS))  # fmt: skip


def _html(
    state: PilotState, values: dict[str, float], signed: dict[str, Any] | None,
    lines: dict[str, list[tuple[float, float]]], language: str,
) -> Iterator[str]:  # fmt: skip
    say = _speaker(language, escape)
    kind = "pass" if recommends(state) else "fail"
    yield report_page.heading(1, say(_TITLE), say(_verdict(state)), kind)
    if signed:
        yield f"<p><strong>{say(_signature(signed))}</strong></p>"
    for stage in state.stages:
        kind = {"passed": "pass", "open": "soft", "running": "info"}.get(stage.status, "fail")
        yield report_page.heading(2, say(stage.name), say(STATUS[stage.status]), kind)
        yield "".join(f"<p>{say(decode(why))}</p>" for why in stage.why)
        if stage.kpi:
            rows = ((say(title), escape(value)) for title, value in _figures(Kpi(**stage.kpi)))
            yield _rows((), rows)
        if stage.findings:
            yield _rows([say(each) for each in _COLUMNS], (_cells(each, say) for each in stage.findings))
        points = lines.get(stage.name, [])
        if points:
            at = [each[0] - points[0][0] for each in points]
            yield charts.line(at, [each[1] for each in points], str(told(t("tokens/s"), language)))
    yield f"<h2>{say(t('Assumptions of the costs'))}</h2>"
    head = [say(each) for each in (t("Name"), t("Value"), t("Unit"), t("Source"))]
    yield _rows(head, ((escape(each.name), f"{values[each.name]:g}", escape(each.unit), say(_source(each, state)))
                       for each in cost.ASSUMPTIONS))  # fmt: skip


def _rows(head: Any, rows: Any) -> str:
    top = "".join(f"<th>{each}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>" if top else f"<table>{body}</table>"


def _cells(facts: dict[str, Any], say: Callable[[object], str]) -> list[str]:
    finding = Finding.of_json(facts)
    return [say(finding.title), say(t("passed") if finding.ok else t("missed")), say(finding.observed),
            say(finding.required)]  # fmt: skip


def _source(assumption: cost.Assumption, state: PilotState) -> str:
    return t("the pilot's plan") if state.plan and assumption.name in state.plan.cost else assumption.source


def _throughput(layout: Layout, state: PilotState) -> dict[str, list[tuple[float, float]]]:
    """Tokens a second of each stage, for its chart; none where the samples are gone."""
    found: dict[str, list[tuple[float, float]]] = {}
    try:
        with Series(events.series_of(layout)) as series:
            for stage in state.stages:
                if stage.start is not None and stage.end is not None:
                    found[stage.name] = series.window(stage.start, stage.end).rates("generation_tokens")[-2000:]
    except SeriesError:
        return found
    return found


def _speaker(language: str, made_safe: Callable[[str], str]) -> Callable[[object], str]:
    return lambda text: made_safe(str(told(text, language)))
