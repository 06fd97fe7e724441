"""A pilot of the demonstration's model under a prefix: real requests, stages of seconds, killed, stopped, signed."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checklist_kit import Front, forked
from real_service import install, signed

from appliance.series import Series, SeriesError
from appliance.series.names import UP
from appliance.series.sampler import file_of
from appliance.service import answers as answers_of
from appliance.service import jobs
from appliance.service.pilot import records, report
from appliance.service.pilot.plan import PilotPlan
from appliance.service.pilot.run import PilotRequest, abort, advance, pilot_work
from appliance.service.steps.pilot import PilotStep
from installer.access import api_keys
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout
from installer.base.lock import holder
from installer.operate.lifecycle import start, stop
from installer.release import config


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Any, signer: Any) -> Iterator[Layout]:
    """A model of two layers: users ask all the time here, and what the answers say does not matter."""
    root = tmp_path_factory.mktemp("pilot")
    layout = install(signed(tiny_llama_dir(), root, signer, "tiny"), root / "prefix", signer, Front())
    yield layout
    stop(layout)


class Users:
    """Two keys, and requests that go on until the block ends."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.one = api_keys.add(layout.api_keys, "one")
        self.team = api_keys.add(layout.api_keys, "team", group="search")
        # One context of TLS, made here: jobs are forked beside our thread. What OpenSSL locks while a context is made
        # would stay locked in the job, which then hangs for ever.
        self._http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def status(self, key: api_keys.NewKey) -> int:
        url = config.standing(self.layout).url
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
        headers = {"Authorization": f"Bearer {key.text}"}
        return self._http.post(f"{url}/v1/completions", json=body, headers=headers).status_code

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(httpx.HTTPError):  # a test stops the service
                self.status(self.one)
            time.sleep(0.05)

    def __enter__(self) -> "Users":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()


@pytest.fixture
def users(installed: Layout) -> Iterator[Users]:
    with Users(installed) as found:
        yield found
    abort(installed, "test")
    api_keys.remove(installed.api_keys, {found.one.id, found.team.id})


def plan(users: Users, **more: Any) -> PilotPlan:
    first = {"name": "one-user", "users": [users.one.id], "duration": 2, "stop": {"window": 1, "requests": 1},
             "goal": {"ttft": 60_000, "requests": 1, "error_rate": 0.0}}  # fmt: skip
    second = {**first, "name": "team", "users": [users.one.id, "group:search"]}
    return PilotPlan.model_validate({"interval": 0.25, "stages": [{**first, **more.pop("first", {})},
                                     {**second, **more.pop("second", {})}], **more})  # fmt: skip


def pilot(layout: Layout, given: PilotPlan | None) -> dict[str, Any]:
    request = PilotRequest(plan=given, by="Kim")
    return jobs.run(layout, "pilot", pilot_work(request, layout), Front(), kind="pilot",  # type: ignore[arg-type]
                    given=request.model_dump(mode="json"), interactive=False)[0]  # fmt: skip


def test_stages_pass_only_their_users_are_let_in_and_the_report_is_signed(users: Users, tmp_path: Path):
    layout = users.layout
    seen: dict[str, int] = {}

    def look() -> None:
        while "team" not in seen:
            state = records.read(layout)
            if state.stages and state.stages[0].status == "running" and holder(records.lock_of(layout)):
                time.sleep(0.3)
                seen.setdefault("outside", users.status(users.team))
                seen["inside"] = users.status(users.one)
            if state.stages and state.stages[1].status == "running":
                time.sleep(0.3)
                seen["team"] = users.status(users.team)
            time.sleep(0.05)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    result = pilot(layout, plan(users))
    watcher.join(timeout=10)
    assert (result["outcome"], [each["status"] for each in result["stages"]]) == ("done", ["passed", "passed"])
    assert seen == {"outside": 403, "inside": 200, "team": 200}
    kpi = result["stages"][0]["kpi"]
    assert kpi["requests"] >= 1
    assert kpi["tokens_out"] > 0
    assert kpi["share_ttft"] == 1
    assert kpi["seconds"] >= 2
    assert kpi["cost_per_request"] == pytest.approx(kpi["cost"] / kpi["requests"])
    written = report.sign(layout, tmp_path, "go", "Kim Minsu", "")
    assert written.go
    entry = log.read(layout.audit)[0][-1]
    assert (entry["event"], entry["by"]) == ("pilot-signed", "Kim Minsu")
    assert entry["sha256"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}  # fmt: skip
    page = next(tmp_path.glob("*.html")).read_text()
    assert "Kim Minsu" in page
    assert "<svg" in page
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["signed"]["decision"] == "go"
    with pytest.raises(InstallError, match="signed already"):
        report.sign(layout, tmp_path, "go", "Kim Minsu", "")


def test_a_stop_condition_goes_back_to_the_users_before(users: Users):
    result = pilot(users.layout, plan(users, second={"stop": {"window": 1, "requests": 1, "ttft": 0.001}}))
    assert (result["outcome"], [each["status"] for each in result["stages"]]) == ("stopped", ["passed", "stopped"])
    assert users.status(users.team) == 403
    assert users.status(users.one) == 200
    with pytest.raises(InstallError, match="Not every stage has passed"):
        report.sign(users.layout, users.layout.checklist / "reports", "go", "Kim", "")
    abort(users.layout, "Kim")
    assert users.status(users.team) == 200


def test_a_service_that_is_down_stops_the_stage(users: Users):
    layout = users.layout

    def break_it() -> None:
        while len(stages := records.read(layout).stages) < 2 or stages[1].status != "running":
            time.sleep(0.05)
        stop(layout)

    breaker = threading.Thread(target=break_it, daemon=True)
    breaker.start()
    try:
        slow = {"duration": 30, "stop": {"window": 1, "requests": 1, "down": 1}}
        result = pilot(layout, plan(users, second=slow))
        breaker.join(timeout=30)
        stage = result["stages"][1]
        assert (result["outcome"], stage["status"]) == ("stopped", "stopped")
        assert any("has not answered" in str(why) for why in stage["why"])
    finally:
        start(layout, Front())  # type: ignore[arg-type]
    assert users.status(users.team) == 403
    assert users.status(users.one) == 200


def test_a_goal_that_cannot_be_reached_is_missed_and_nobody_stays(users: Users):
    result = pilot(users.layout, plan(users, first={"goal": {"throughput": 1e8}}))
    assert [each["status"] for each in result["stages"]] == ["missed", "open"]
    assert users.status(users.one) == 403


def test_a_killed_pilot_goes_on_and_unwatched_time_does_not_count(users: Users):
    layout, given = users.layout, plan(users, first={"duration": 4})

    def begin() -> None:
        pilot(layout, given)

    def kill() -> None:
        while not (state := records.read(layout)).open or state.stages[0].start is None:
            time.sleep(0.05)
        time.sleep(1)
        job = jobs.newest(layout)
        assert job is not None
        process = job.process()
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    forked(begin)
    killer.join()
    state = records.read(layout)
    assert state.open
    assert state.stages[0].status == "running"
    time.sleep(3.5)  # longer than the largest gap between two samples
    result = pilot(layout, None)
    assert result["outcome"] == "done"
    assert 4 <= result["stages"][0]["kpi"]["seconds"] < 6


def test_two_operators_and_a_person_who_decides(users: Users):
    layout, given = users.layout, plan(users, first={"advance": "manual"})
    found: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: found.append(pilot(layout, given)))
    worker.start()
    while not (state := records.read(layout)).open or state.stages[0].start is None:
        time.sleep(0.05)
    with pytest.raises(InstallError) as failure:
        pilot(layout, given)
    assert failure.value.exit_code == ExitCode.BUSY
    with pytest.raises(InstallError, match="s left"):
        advance(layout, "Lee")
    time.sleep(3.5)
    assert records.read(layout).stages[0].status == "running"  # it waits for a person
    advance(layout, "Lee")
    worker.join(timeout=60)
    assert found[0]["outcome"] == "done"


@pytest.mark.parametrize(("change", "said"), [
    ({"first": {"users": ["00000000"]}}, "no usable API key"),
    ({"first": {"max_in_flight_per_key": 3}}, "max_in_flight_per_key = 3"),
    ({"cost": {"power_prise": 1.0}}, "power_prise"),
])  # fmt: skip
def test_what_does_not_fit_this_machine_changes_nothing(users: Users, change: dict[str, Any], said: str):
    before = records.path_of(users.layout).read_bytes() if records.path_of(users.layout).exists() else b""
    with pytest.raises(InstallError) as failure:
        pilot(users.layout, plan(users, **change))
    assert said in f"{failure.value.message} {failure.value.hint}"
    assert failure.value.exit_code == ExitCode.USAGE
    assert (records.path_of(users.layout).read_bytes() if before else b"") == before
    assert users.status(users.team) == 200


def test_the_checklist_s_step_pilots_and_signs_with_the_name_in_the_answers(users: Users):
    given = {**plan(users).model_dump(mode="json"), "signed_by": "Kim Minsu"}
    answers = answers_of.from_json({"schema_version": 1, "pilot": given})
    job = SimpleNamespace(layout=users.layout, answers=answers, frontend=Front())
    result = PilotStep().run(job)  # type: ignore[arg-type]
    assert not result.blocking, [(each.id, each.observed) for each in result.blocking]
    assert result.summary["signed"]["by"] == "Kim Minsu"
    again = PilotStep().run(job)  # type: ignore[arg-type]
    assert again.summary == result.summary  # what is signed is not repeated
    assert {each.id for each in PilotStep().run(  # type: ignore[arg-type]
        SimpleNamespace(layout=users.layout, answers=answers_of.empty(), frontend=Front())).blocking} == {
            "pilot-planned"}  # fmt: skip


def when(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.1)


def rows(file: Path) -> list[Any]:
    with contextlib.suppress(SeriesError), Series(file) as series:
        return series.window(0, time.time() + 3600).rows
    return []


def samplers(layout: Layout) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"appliance.series.sampler" in words and str(layout.series).encode() in words:
                found.append(int(entry.name))
    return found


def test_an_installation_has_a_history_without_a_pilot(installed: Layout) -> None:
    layout = installed
    file, key = file_of(layout), api_keys.add(layout.api_keys, "user")
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"{config.standing(layout).url}/v1/completions", json=body, timeout=120,
                        headers={"Authorization": f"Bearer {key.text}"})  # fmt: skip
    assert answer.status_code == 200
    when(lambda: any(row.values.get(UP) == 1.0 and any("generation_tokens_total" in name for name in row.values)
                      for row in rows(file)), 60)  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in layout.series.iterdir()} == {0o600}
    (process,) = samplers(layout)
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    used = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    os.kill(process, signal.SIGKILL)  # the service does not depend on it
    assert httpx.get(f"{config.standing(layout).url}/livez", timeout=30).status_code == 200
    assert used < 10
    kept = len(rows(file))
    stop(layout)
    assert samplers(layout) == []
    assert len(rows(file)) >= kept
    start(layout, Front())  # type: ignore[arg-type]
    when(lambda: len(rows(file)) > kept, 60)
    stop(layout)
    assert samplers(layout) == []
