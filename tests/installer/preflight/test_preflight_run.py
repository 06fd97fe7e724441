"""All checks together: side by side, in time, judged, waived, told in two languages, and one JSON shape for all."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from preflight_kit import GIB, FakeMachine, FakeSmi, context, on_path, without_nvml

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.preflight import CHECKS, CheckRecord, PreflightContext, judge, run_checks
from installer.preflight.record import Check, Seen, check
from installer.preflight.report import report, verdict
from installer.preflight.runner import run_all

GOLDEN = Path(__file__).with_name("preflight_schema.json")
STRICT = {5, 6, 7, 9, 12, 15}


def record(status: str, *, strict: bool = False, waived: str | None = None) -> CheckRecord:
    return CheckRecord("disk", status, "seen", "needed", "why", "fix", strict=strict, waived=waived)  # type: ignore[arg-type]


def made(id: str, look: Any, *, strict: bool = False, timeout: float = 2.0) -> Check:
    return check(99, id, t("Port"), required=t("free"), why=t("none"), strict=strict, timeout=timeout)(look)


def test_the_list_is_the_one_that_is_documented() -> None:
    assert [each.number for each in CHECKS] == list(range(1, 28))
    assert len({each.id for each in CHECKS}) == 27
    assert {each.number for each in CHECKS if each.strict} == STRICT
    pages = [Path(__file__).parents[3] / f"docs/{language}/preflight.md" for language in ("en", "ko")]
    for page in pages:
        rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
        for each in CHECKS:
            assert any(row.startswith(f"| {each.number} | `{each.id}`") for row in rows), (page.name, each.id)


def test_this_machine_within_ten_seconds_and_without_a_trace(tmp_path: Path) -> None:
    plans = PreflightContext(context(tmp_path).layout, context(tmp_path).endpoint)
    began = time.monotonic()
    records = run_checks(plans)
    assert time.monotonic() - began < 10
    assert [found.number for found in records] == list(range(1, 28))
    for found in records:
        assert found.observed
        assert found.required
        assert found.why
        assert found.status == "pass" or found.fix, found
        assert not found.observed.startswith("could not be checked"), found
    assert not (tmp_path / "prefix").exists()


def test_everything_hangs_and_it_still_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path / "bin")
    smi.plan(fault="hang")
    monkeypatch.setenv("PATH", on_path(smi.directory))
    without_nvml(tmp_path, monkeypatch)
    began = time.monotonic()
    machine = FakeMachine(tmp_path / "root").with_gpu()
    records = {found.id: found for found in run_checks(context(tmp_path, machine=machine))}
    assert time.monotonic() - began < 10
    assert records["nvml"].status == "fail"
    assert "no answer" in records["nvml"].observed
    assert records["disk"].status == "pass"


# -- the runner


def test_checks_run_side_by_side_in_their_order(tmp_path: Path) -> None:
    def slow(plans: PreflightContext) -> Seen:
        time.sleep(1)
        return Seen("pass", "done")

    checks = [made(f"c{number}", slow) for number in range(10)]
    began = time.monotonic()
    records = run_all(checks, context(tmp_path))
    assert time.monotonic() - began < 8
    assert [found.id for found in records] == [f"c{number}" for number in range(10)]
    assert all(found.seconds >= 1 for found in records)


@pytest.mark.parametrize(("strict", "status"), [(False, "warn"), (True, "fail")])
def test_what_breaks_or_hangs_is_told_and_hides_no_other(tmp_path: Path, strict: bool, status: str) -> None:
    def broken(plans: PreflightContext) -> Seen:
        raise RuntimeError("no such sensor")

    def hung(plans: PreflightContext) -> Seen:
        time.sleep(30)
        return Seen("pass", "late")

    checks = [made("broken", broken, strict=strict), made("hung", hung, strict=strict, timeout=0.2),
              made("good", lambda plans: Seen("pass", "fine"))]  # fmt: skip
    began = time.monotonic()
    records = run_all(checks, context(tmp_path))
    assert time.monotonic() - began < 15
    assert [found.status for found in records] == [status, status, "pass"]
    assert "no such sensor" in records[0].observed
    assert "no answer within 0.2 s" in records[1].observed


# -- waivers and judgement


def test_waivers(tmp_path: Path) -> None:
    def fails(plans: PreflightContext) -> Seen:
        return Seen("fail", "bad")

    bad = [made("soft", fails), made("hard", fails, strict=True)]
    bad[1].number = 98
    records = run_all(bad, context(tmp_path), {"soft": "known", "hard": "I insist"})
    assert [found.waived for found in records] == ["known", None]
    assert run_all(bad, context(tmp_path), {"99": "by number"})[0].waived == "by number"
    with pytest.raises(InstallError) as caught:
        judge(records)
    assert "hard" in caught.value.message
    assert "--waive" not in caught.value.hint
    with pytest.raises(InstallError) as caught:
        run_all(bad, context(tmp_path), {"sotf": "a typing mistake"})
    assert caught.value.exit_code == ExitCode.USAGE
    assert "soft, hard" in caught.value.hint


def test_a_good_check_is_not_marked_as_waived(tmp_path: Path) -> None:
    good = [made("good", lambda plans: Seen("pass", "fine"))]
    assert run_all(good, context(tmp_path), {"good": "to be sure"})[0].waived is None


def test_judgement() -> None:
    judge([record("pass"), record("warn"), record("fail", waived="known")])
    for records, strict, code in [
        ([record("fail")], False, ExitCode.PREFLIGHT_FAIL),
        ([record("fail", strict=True)], False, ExitCode.PREFLIGHT_FAIL),
        ([record("warn")], True, ExitCode.PREFLIGHT_WARN),
        ([record("warn"), record("fail")], True, ExitCode.PREFLIGHT_FAIL),
    ]:
        with pytest.raises(InstallError) as caught:
            judge(records, strict=strict)
        assert caught.value.exit_code == code == verdict(records, strict=strict)
        assert caught.value.changed
        assert caught.value.hint
    assert verdict([record("warn")]) == verdict([record("fail", waived="known")]) == ExitCode.OK


# -- the report


def shape(value: Any) -> Any:
    """The keys and types of a JSON value; what may also be null or absent is told by the golden file's values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def test_the_json_shape_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To change it on purpose, raise SCHEMA_VERSION and write the new shape into preflight_schema.json."""
    smi = FakeSmi(tmp_path / "bin").process(4242, "train", 9000)
    monkeypatch.setenv("PATH", on_path(smi.directory))
    without_nvml(tmp_path, monkeypatch)
    plans = context(tmp_path, machine=FakeMachine(tmp_path / "root").with_gpu(), weight_bytes=GIB)
    records = run_checks(plans)
    found = json.loads(json.dumps(report(records, plans, language="en", seconds=1.5)))
    ids = [[each["number"], each["id"], each["strict"]] for each in found["checks"]]
    now = {"shape": shape(found), "checks": ids}
    assert now == json.loads(GOLDEN.read_text()), json.dumps(now, indent=1)
    assert found["device"] == "cuda"
    assert found["counts"]["warn"] >= 1
    assert {each["status"] for each in found["checks"]} <= {"pass", "warn", "fail"}


def test_the_report_speaks_korean(tmp_path: Path) -> None:
    plans = context(tmp_path, device="cpu", host="0.0.0.0")
    records = run_checks(plans)
    english, korean = (report(records, plans, language=language, seconds=1) for language in ("en", "ko"))
    assert [each["id"] for each in english["checks"]] == [each["id"] for each in korean["checks"]]
    assert english["exit_code"] == korean["exit_code"] == 3
    titles = [each["title"] for each in korean["checks"]]
    assert titles[14] == "디스크 공간"
    texts = {each["id"]: each for each in korean["checks"]}
    assert texts["exposure"]["observed"] == "0.0.0.0: TLS 없이 다른 장비에서 접속할 수 있음"
    assert texts["gpu"]["observed"] == "필요 없음: CPU를 골랐음"


_WATCHED = """
import sys
seen = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"):
        seen.append(event)
    if event == "open" and isinstance(arguments[0], str) and arguments[2] & 0o3 and arguments[0] != "/dev/null":
        seen.append(f"wrote {arguments[0]}")
sys.addaudithook(watch)
from installer.release.config import Endpoint
from installer.base.layout import Layout
from installer.preflight import PreflightContext, run_checks
for layout in (Layout.server(), Layout.at(sys.argv[1])):
    for host in ("0.0.0.0", "127.0.0.1", "some.name.example"):
        run_checks(PreflightContext(layout, Endpoint(host, 8443), device="cuda"))
print(seen)
"""


def test_nothing_is_sent_and_nothing_is_written(tmp_path: Path) -> None:
    """Watched from inside the interpreter: no connection, no look-up, no file opened for writing."""
    command = [sys.executable, "-B", "-c", _WATCHED, str(tmp_path / "prefix")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []
