"""The report as one self-contained HTML page, in both languages, switched without a script."""

from collections.abc import Iterator
from html import escape

from appliance.load.result import LoadResult
from appliance.service import report_page
from appliance.service.findings import Finding
from appliance.service.verification.report import charts, words
from appliance.service.verification.run import TITLES, GroupResult, Verification
from installer.base.i18n import LANGUAGES, t, told


def page(found: Verification, first: str = "en") -> str:
    bodies = {language: "".join(_body(found, language)) for language in LANGUAGES}
    return report_page.page(f"{words.TITLE} {found.at}", bodies, first)


def _body(found: Verification, language: str) -> Iterator[str]:
    def say(text: object) -> str:
        return escape(str(told(text, language)))

    kind, word = ("pass", words.PASSED) if found.passed else ("fail", words.FAILED)
    yield f'<h1>{say(words.TITLE)}: <span class="{kind}">{say(word)}</span></h1>'
    yield (f'<p class="soft">{escape(found.at)} · {escape(found.base_url)} · {escape(found.release or "–")} · '
           f"{escape(', '.join(found.models))}</p>")  # fmt: skip
    for group in found.groups:
        kind, word = ("pass", words.PASSED) if group.passed else ("fail", words.FAILED)
        yield f'<h2>{say(TITLES[group.group])}: <span class="{kind}">{say(word)}</span></h2>'
        head = "".join(f"<th>{say(column)}</th>" for column in words.COLUMNS)
        yield f"<table><tr>{head}</tr>{''.join(_row(each, language) for each in group.found())}</table>"
        yield from _charts(group, language)


def _row(finding: Finding, language: str) -> str:
    def say(text: object) -> str:
        return escape(str(told(text, language)))

    kind = words.kind_of(finding)
    more = ""
    if not finding.ok and finding.severity != "info":
        parts = [finding.why, finding.fix]
        if finding.waiver is not None:
            parts.append(t("waived by {by}: {reason}", by=finding.waiver.by, reason=finding.waiver.reason))
        more = f'<div class="soft">{" · ".join(say(part) for part in parts if part)}</div>'
        if finding.evidence:
            more += f"<details><summary>…</summary><pre>{escape(str(finding.evidence)[:4000])}</pre></details>"
    return (f'<tr><td>{say(finding.title)}</td><td class="r {kind}">{say(words.word_of(finding))}</td>'
            f"<td>{say(finding.observed)}{more}</td><td>{say(finding.required)}</td></tr>")  # fmt: skip


def _charts(group: GroupResult, language: str) -> Iterator[str]:
    def say(text: object) -> str:
        return escape(str(told(text, language)))

    for model, rows in words.predictions(group.data):
        yield f"<h3>{say(t('{model}, predicting texts', model=model))}</h3>"
        head = "".join(f"<th>{say(column)}</th>" for column in words.PREDICTION)
        body = "".join(f"<tr>{''.join(f'<td>{say(cell)}</td>' for cell in row)}</tr>" for row in rows)
        yield f"<table><tr>{head}</tr>{body}</table>"
    for model, loads in group.data.get("loads", {}).items():
        for kind, values in loads.items():
            result = LoadResult.of_json(values)
            title = t("{model}, {kind}: {requests} requests/s, {tokens} tokens out/s", model=model,
                      kind=words.LOADS[kind], requests=f"{result.request_throughput:.2f}",
                      tokens=f"{result.output_throughput:,.1f}")  # fmt: skip
            yield f"<h3>{say(title)}</h3>"
            yield charts.bars([
                (str(told(name, language)), [("p50", each.median), ("p95", each.percentiles.get("95", 0.0)),
                                             ("p99", each.percentiles.get("99", 0.0))])
                for metric, name in words.LATENCIES if (each := getattr(result, metric)).count or each.mean
            ], "ms")  # fmt: skip
            yield _tokens(result, language)
    if soak := group.data.get("soak"):
        series = soak["series"]
        yield f"<h3>{say(t('Memory'))}</h3>"
        yield charts.line(series["at"], [value / (1 << 20) for value in series["memory"]], "MiB")
        yield f"<h3>{say(t('KV cache in use'))}</h3>"
        yield charts.line(series["at"], [100 * value for value in series["pages"]], "%")
        yield f"<h3>{say(t('Tokens out a second'))}</h3>"
        yield _tokens(LoadResult.of_json(soak["result"]), language)


def _tokens(result: LoadResult, language: str) -> str:
    """Tokens per second over the run. A short run has slots of less than a second: they are combined."""
    rows = result.timeline
    if len(rows) < 3:
        return ""
    width = rows[1][0] - rows[0][0]
    step = max(1, round(1 / width))
    groups = [rows[i : i + step] for i in range(0, len(rows), step)]
    at = [group[0][0] for group in groups]
    rates = [sum(row[1] for row in group) / (len(group) * width) for group in groups]
    return charts.line(at, rates, str(told(t("tokens/s"), language)))
