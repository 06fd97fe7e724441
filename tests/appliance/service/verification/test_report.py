"""The report: all forms, both languages, hashes that hold, markup that a model's text cannot break, a full disk."""

import hashlib
import os
import re
import resource
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from appliance.load import LoadResult, Target
from appliance.service.findings import made
from appliance.service.verification import run as runner
from appliance.service.verification.plan import VerifyAnswers
from appliance.service.verification.report import write
from appliance.service.verification.run import GroupResult, Verification, forget, verify
from appliance.service.verification.subject import Served, Subject
from installer.audit import log
from installer.base.i18n import t
from installer.base.layout import Layout

EVIL = '</td><script>alert(1)</script> | a\nb | <img src="http://evil/x.png">'


def verification(*, ok: bool = True) -> Verification:
    load = LoadResult(completed=5, output_throughput=80.5, request_throughput=1.5,
                      timeline=[[i / 4, 10.0 + i, 1.0, 1.0, 0.0] for i in range(40)])  # fmt: skip
    findings = [
        made("stream", "strict", ok, t("Streams"), observed=EVIL, why=t("this is what clients use"), evidence=EVIL),
        made("golden", "info", False, t("Golden questions"), observed=t("not checked: {why}", why="x")),
    ]
    series = {"at": [0.0, 1.0, 2.0], "memory": [1e9, 1.1e9, 1.2e9], "files": [1.0] * 3, "pages": [0.0, 0.5, 0.0]}
    groups = [
        GroupResult(group="conformance", at="2026-01-01T00:00:00Z", seconds=1.0,
                    findings=[finding.to_json() for finding in findings]),
        GroupResult(group="quality", at="2026-01-01T00:00:00Z", seconds=1.0, findings=[], data={"prediction": {EVIL: {
            "en": {"tokens": 1040, "perplexity": 9.125, "reference_perplexity": 8.5, "top1_agreement": 0.942},
            "ko": {"tokens": 1100, "perplexity": 7.5}}}}),
        GroupResult(group="performance", at="2026-01-01T00:00:00Z", seconds=1.0, findings=[],
                    data={"loads": {"chat": {"closed": load.to_json()}}}),
        GroupResult(group="stability", at="2026-01-01T00:00:00Z", seconds=1.0, findings=[],
                    data={"soak": {"result": load.to_json(), "series": series, "seconds": 2}}),
    ]  # fmt: skip
    return Verification(at="2026-01-01T00:00:00Z", base_url="https://llm:8443", release="1.0-abc", models=["chat"],
                        plan=VerifyAnswers(), groups=groups)  # fmt: skip


def test_all_forms_are_written_and_their_hashes_are_in_the_audit_log(tmp_path: Path):
    layout = Layout.at(tmp_path / "prefix")
    layout.state.mkdir(parents=True)
    written = write(verification(), tmp_path / "reports", layout=layout)
    assert {Path(name).suffix for name in written.files} == {".json", ".md", ".html"}
    for name, expected in written.files.items():
        assert hashlib.sha256((written.directory / name).read_bytes()).hexdigest() == expected
        assert (written.directory / name).stat().st_mode & 0o777 == 0o600
    (record,) = log.read(layout.audit)[0]
    assert record["event"] == "verification"
    assert record["passed"]
    assert record["sha256"] == written.files


def test_what_a_quantisation_costs_stands_in_both_forms_and_languages(tmp_path: Path):
    written = write(verification(), tmp_path / "reports")
    for name in written.files:
        text = (written.directory / name).read_text("utf-8")
        if not name.endswith(".json"):
            assert all(number in text for number in ("1,040", "9.12", "8.50", "94.2%", "7.50")), name
    page = written.html.read_text("utf-8")
    assert "Same likeliest token" in page
    assert "가장 그럴듯한 토큰" in page


def test_the_page_needs_nothing_else_and_no_text_breaks_out_of_it(tmp_path: Path):
    written = write(verification(ok=False), tmp_path)
    page = written.html.read_text("utf-8")
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r"(?:src|href)=", page.replace(EVIL, "").replace("src=&quot;", ""))
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) == 2 * 5  # bars, tokens, memory, pages, tokens; in each language
    for chart in charts:
        ET.fromstring(chart)
    assert "불합격" in page
    assert "not passed" in page


def test_markdown_speaks_each_language_and_keeps_its_tables(tmp_path: Path):
    written = write(verification(ok=False), tmp_path)
    english = next(written.directory.glob("*.en.md")).read_text("utf-8")
    korean = next(written.directory.glob("*.ko.md")).read_text("utf-8")
    assert "# Verification report: not passed" in english
    assert "# 검증 보고서: 불합격" in korean
    for text in (english, korean):
        row = next(line for line in text.splitlines() if "script" in line and line.startswith("|"))
        assert len(re.findall(r"(?<!\\)\|", row)) == 5
        assert "<script" not in text


def test_a_full_disk_loses_the_report_and_not_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def found(work):
        asked.append("health")
        return [made("health", "info", True, t("Health"), observed="x" * 20_000)]

    monkeypatch.setattr(runner, "RUNNERS", {"health": found})
    subject = Subject(Target("http://127.0.0.1:9"), [Served("fake", "mystery")])
    plan, state, reports = VerifyAnswers(groups=["health"]), tmp_path / "state", tmp_path / "reports"
    first = verify(subject, plan, state=state)
    pid = os.fork()
    if pid == 0:  # the limit would hold for the rest of the tests
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write(first, reports)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the disk was not full"
    assert not [path for path in reports.glob("*") if path.suffix in (".json", ".md", ".html")]
    again = verify(subject, plan, state=state)
    assert asked == ["health"]  # nothing is asked twice
    assert write(again, reports).files
    forget(state)
    verify(subject, plan, state=state)
    assert asked == ["health", "health"]
