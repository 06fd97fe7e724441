"""The checklist with a real install under a prefix: killed, cancelled and watched at every step, it continues."""

import dataclasses
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import REVIEW, Desk, Front, die, forked, good_answers, statuses

from appliance.service import answers as answers_of
from appliance.service import checklist, events, jobs
from appliance.service.run_request import RunRequest
from appliance.service.steps import STEPS
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import History, replay

NAMES = [step.id for step in STEPS]
ALL_GREEN = dict.fromkeys(NAMES, "green")


def test_an_unattended_run_goes_from_nothing_to_a_service(desk: Desk) -> None:
    assert desk.statuses() == dict.fromkeys(NAMES, "open")
    assert not desk.site.prefix.exists()  # looking writes nothing
    front = Front()
    result, secrets = desk.run(front=front)
    assert result["done"]
    assert result["next_step"] is None
    assert front.begun == [(name, status) for name in NAMES for status in ("begin", "green")]
    assert desk.statuses() == ALL_GREEN
    assert desk.site.ask(secrets["api_key"]) == 200
    assert ("smoke", "done") in front.steps
    assert {"engine-licence", "model-licence", "review-lineage"} <= {finding["id"] for finding in front.found}
    install = desk.show().step("install").summary
    assert install["release"] == History(replay(desk.layout.journal).records).committed["release"]  # type: ignore[index]
    again, _ = desk.run(front=(silent := Front()))
    assert again["done"]
    assert silent.begun == []


def test_the_key_is_on_no_disk(desk: Desk) -> None:
    _, secrets = desk.run()
    key = secrets["api_key"].encode()
    job = jobs.newest(desk.layout)
    assert job is not None
    for root in (desk.site.prefix, job.path):
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert key not in path.read_bytes(), path


def test_decisions_are_in_the_audit_log_once(desk: Desk) -> None:
    desk.run()
    records, broken = log.read(desk.layout.audit)
    assert broken is None
    mine = [record for record in records if record["event"] == "checklist-accepted"]
    assert {record["kind"] for record in mine} == {"engine", "model"}
    assert all(len(record["sha256"]) == 64 for record in mine)
    desk.run("gpu")
    assert [r for r in log.read(desk.layout.audit)[0] if r["event"] == "checklist-accepted"] == mine


@pytest.mark.parametrize("left_out", [0, 1])
def test_each_licence_is_accepted_for_itself(desk: Desk, left_out: int) -> None:
    accepted = desk.answers()["accept_licenses"]
    with pytest.raises(InstallError, match="was not accepted") as caught:
        desk.run(accept_licenses=[accepted[1 - left_out]])
    assert caught.value.exit_code == ExitCode.LICENCE
    assert accepted[left_out].partition("@")[0] in caught.value.hint
    assert "in the screens" in caught.value.hint
    assert desk.statuses() == statuses(gpu="green", model="failed")
    assert not desk.layout.journal.exists()
    desk.run()
    assert desk.statuses() == ALL_GREEN


def test_another_text_is_not_accepted(desk: Desk) -> None:
    spdx = desk.answers()["accept_licenses"][1].partition("@")[0]
    with pytest.raises(InstallError, match="was not accepted"):
        desk.run(accept_licenses=[desk.answers()["accept_licenses"][0], f"{spdx}@{'0' * 64}"])


def test_an_open_point_of_the_review_blocks_until_it_is_waived_by_name(desk: Desk) -> None:
    review = {"tiny": {name: said for name, said in REVIEW.items() if name != "export"}}
    with pytest.raises(InstallError, match="review-export") as caught:
        desk.run(review=review)
    assert caught.value.exit_code == ExitCode.LICENCE
    assert "Are there export or regional limits?" in caught.value.hint
    assert "--waive review-export=" in caught.value.hint
    desk.run(review=review, waivers={"review-export": "legal answers in ticket 4711"})
    (finding,) = [each for each in desk.show().step("model").findings if each.waiver]
    assert (finding.id, finding.waiver.reason) == ("review-export", "legal answers in ticket 4711")  # type: ignore[union-attr]
    assert finding.waiver.by  # type: ignore[union-attr]
    waived = [record for record in log.read(desk.layout.audit)[0] if record["event"] == "checklist-waived"]
    assert [record["reason"] for record in waived] == ["legal answers in ticket 4711"]


def test_an_answer_that_cannot_be_used_is_asked_for_again(desk: Desk) -> None:
    """It does not cost the answers before it."""
    said = iter(["none", "2031", "31.1.2031", "2999-01-01"])
    front = Front()
    front.ask = lambda question: (front.questions.append(question), next(said))[1]  # type: ignore[method-assign]
    review = {"tiny": {name: said for name, said in REVIEW.items() if name not in ("export", "expires")}}
    desk.run("gpu", front=Front(), review=review)
    desk.run("model", front=front, interactive=True, review=review)
    asked = [str(each) for each in front.questions]
    assert asked[0] == "tiny, question 1 of 2: Are there export or regional limits?"
    assert asked[1].startswith("tiny, question 2 of 2: ")
    assert asked[2].startswith("'2031' cannot be used. Days are written YYYY-MM-DD")
    assert len(asked) == 4
    assert desk.statuses()["model"] == "green"


def test_a_review_that_has_expired_blocks(desk: Desk) -> None:
    with pytest.raises(InstallError, match="review-expired"):
        desk.run(review={"tiny": {**REVIEW, "expires": "2020-01-01"}})


def test_a_waiver_holds_for_one_of_several_models(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix runs one model, a server several: the step sees the one of this prefix twice."""
    from appliance.service import facts

    survey = facts._survey

    def with_two(*given: Any) -> Any:
        context = survey(*given)
        context.models = [dataclasses.replace(context.models[0], instance=name) for name in ("one", "two")]
        return context

    monkeypatch.setattr(facts, "_survey", with_two)
    review = {"tiny": {name: said for name, said in REVIEW.items() if name != "export"}}

    def run(**waivers: str) -> str:
        with pytest.raises(InstallError) as caught:
            desk.run("model", review=review, waivers=waivers)
        return caught.value.message

    desk.run("gpu")
    both = run(**{"review-export": "for no model in particular"})
    assert "review-export@one" in both
    assert "review-export@two" in both
    other = run(**{"review-export@one": "legal answers in ticket 4711"})
    assert "review-export@one" not in other
    assert "review-export@two" in other
    ids = [finding.id for finding in desk.show().step("model").findings]
    assert len(ids) == len(set(ids))
    with pytest.raises(InstallError, match="no check called 'nothing@one'"):
        desk.run("model", review=review, waivers={"nothing@one": "never mind"})


def test_a_strict_finding_cannot_be_waived(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.service.steps import model

    monkeypatch.setattr(model, "engine_licence", lambda: None)
    with pytest.raises(InstallError, match="engine-licence") as caught:
        desk.run()
    assert "--waive" not in caught.value.hint
    with pytest.raises(InstallError, match="no check called 'engine-licence'") as caught:
        desk.run(waivers={"engine-licence": "never mind"})
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_front_that_is_there_is_asked(desk: Desk) -> None:
    front = Front(says="as said in a test")
    answers = {"accept_licenses": [], "review": {}, "confirm_plan": False}
    with pytest.raises(InstallError, match="review-expires: not answered") as caught:
        desk.run(front=front, interactive=True, **answers)
    assert caught.value.exit_code == ExitCode.LICENCE
    assert sum("cannot be used" in question for question in front.questions) == 4, "the day is asked for again"
    assert [request.model.split()[0] for request in front.asked] == ["atoll", "tiny"]
    assert len(front.questions) > 8
    front = Front(says="2999-12-31")
    desk.run(front=front, interactive=True, **answers)
    assert front.asked == []  # accepted in the run before
    assert desk.statuses() == ALL_GREEN
    exported = answers_of.text_of(checklist.last_answers(desk.layout))
    assert "accept_licenses" in exported
    assert "2999-12-31" in exported


def test_the_answers_file_is_written_back_and_repeats_the_run(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "answers.toml"
    values = desk.answers()
    file.write_text("# of our server room\n" + answers_of.text_of(good_answers({**values, "confirm_plan": False})))
    front = Front()
    request = RunRequest(answers=answers_of.to_json(answers_of.read(file)), answers_file=str(file), interactive=True)
    checklist.run(desk.layout, request, front)
    assert file.read_text().startswith("# of our server room\n")
    written = answers_of.read(file)
    assert written.confirm_plan
    repeated = answers_of.to_json(written)
    assert repeated["review"]["tiny"]["reviewer"] == "Kim"
    checklist.reset(desk.layout)
    assert desk.statuses() == dict.fromkeys(NAMES, "open")
    checklist.run(desk.layout, RunRequest(answers=repeated), Front())
    assert desk.statuses() == ALL_GREEN


def test_a_changed_input_makes_the_later_steps_stale(desk: Desk) -> None:
    desk.run()
    with pytest.raises(InstallError, match="review-expired"):
        desk.run("model", review={"tiny": {**REVIEW, "expires": "2020-01-01"}})
    assert desk.statuses() == statuses("stale", gpu="green", model="failed")
    front = Front()
    desk.run(front=front, review={"tiny": {**REVIEW, "reviewer": "Lee"}})
    assert [name for name, status in front.begun if status == "begin"] == NAMES[1:]
    assert desk.statuses() == ALL_GREEN


def test_another_port_is_checked_again(desk: Desk, free_port: Callable[[], int]) -> None:
    desk.run("gpu", "model")
    assert desk.statuses() == statuses(gpu="green", model="green")
    other = good_answers(desk.answers(port=free_port()))
    stale = checklist.show(desk.layout, other)
    assert [step.status for step in stale.steps[:2]] == ["stale", "stale"]
    assert "'GPU and machine'" in stale.step("model").why


def test_a_waived_port_is_not_another_port(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        first, second = (each.getsockname()[1] for each in (one, two))
        with pytest.raises(InstallError, match=f"{first} is in use") as caught:
            desk.run("gpu", port=first)
        assert "F9" in caught.value.hint
        assert "the field Port" in caught.value.hint
        assert "'GPU and machine' is blocked" in caught.value.message
        waived = {"waivers": {"port": "it ends tonight"}}
        desk.run("gpu", port=first, **waived)
        assert desk.show().waivers["port"].about == str(first)
        moved = checklist.show(desk.layout, good_answers(desk.answers(port=second, **waived)))
        assert moved.step("gpu").status == "stale"
        assert "port" not in moved.waivers
        front = Front()
        with pytest.raises(InstallError, match=f"{second} is in use"):
            desk.run("gpu", front=front, port=second, **waived)
        assert any(str(first) in note and str(second) in note for note in front.notes)
        assert "port" not in checklist.last_answers(desk.layout).waivers
        again = desk.request("gpu", port=second, **waived).model_copy(update={"waived": ("port",)})
        checklist.run(desk.layout, again, Front())  # somebody has said it of this port
        assert desk.show().waivers["port"].about == str(second)


def test_a_check_that_failed_about_another_port_is_stale(desk: Desk, free_port: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, pytest.raises(InstallError, match="is in use"):
        desk.run("gpu", port=one.getsockname()[1])
    assert desk.statuses()["gpu"] == "failed"
    gpu = checklist.show(desk.layout, good_answers(desk.answers(port=free_port()))).step("gpu")
    assert (gpu.status, gpu.findings) == ("stale", [])


def test_what_was_uninstalled_is_no_longer_green(desk: Desk) -> None:
    from installer.operate.uninstall import uninstall

    desk.run()
    uninstall(desk.layout, purge=False, service=desk.site.service)
    state = desk.show()
    assert state.first is not None
    assert state.first.id == "install"
    assert "nothing is installed any more" in state.first.why


def test_without_its_medium_the_checklist_stays_as_it_is(desk: Desk, tmp_path: Path) -> None:
    medium = tmp_path / "usb"
    medium.symlink_to(desk.bundle)
    desk.run(bundle=str(medium))
    medium.unlink()
    assert desk.statuses() == ALL_GREEN
    front = Front()
    desk.run("gpu", front=front, bundle=str(medium))
    assert front.begun == [("gpu", "begin"), ("gpu", "green")]


def test_a_step_waits_for_those_before_it(desk: Desk) -> None:
    with pytest.raises(InstallError, match="'Install' needs the step 'GPU and machine'") as caught:
        desk.run("install")
    assert caught.value.exit_code == ExitCode.PREFLIGHT_FAIL
    assert "key 1" in caught.value.hint
    with pytest.raises(InstallError, match="no step called tuning") as caught:
        desk.run("tuning")
    assert caught.value.exit_code == ExitCode.USAGE


# -- killed, cancelled, watched


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("event", ["began", "ended"])
def test_a_killed_job_is_noticed_and_gone_on_with(desk: Desk, name: str, event: str) -> None:
    real = events.Events.add

    def add(self: events.Events, what: str, /, **data: object) -> object:
        record = real(self, what, **data)
        if what == event and data.get("step") == name:
            die()
        return record

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InstallError, match="was killed") as caught:
        patch.setattr(events.Events, "add", add)
        desk.run()
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    job = jobs.newest(desk.layout)
    assert job is not None
    assert job.state() == "killed"
    at = NAMES.index(name)
    expected = {**dict.fromkeys(NAMES[:at], "green"), **dict.fromkeys(NAMES[at + 1 :], "open")}
    assert desk.statuses() == {**expected, name: "interrupted" if event == "began" else "green"}
    front = Front()
    desk.run(front=front)
    begun = [step for step, status in front.begun if status == "begin"]
    assert begun == NAMES[at if event == "began" else at + 1 :]
    assert desk.statuses() == ALL_GREEN
    assert desk.site.serving()["mode"] == "good"


@pytest.mark.parametrize("name", NAMES)
def test_the_job_outlives_its_front(desk: Desk, name: str) -> None:
    def front_dies_at(step: str, status: str) -> None:
        if (step, status) == (name, "begin"):
            die()

    status = forked(lambda: desk.run(front=Front(at=front_dies_at)))
    assert os.WTERMSIG(status) == signal.SIGKILL
    job = desk.wait()
    assert job.state() == "ended"
    assert job.end is not None
    assert job.end["exit_code"] == 0
    assert desk.statuses() == ALL_GREEN
    assert desk.site.history.unshown_keys  # nobody saw the key: the next install makes another


def test_a_cancel_takes_back_what_must_not_stay(desk: Desk) -> None:
    def cancel(step: str, status: str) -> None:
        if (step, status) == ("install", "begin"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InstallError, match="Interrupted") as caught:
        desk.run(front=Front(at=cancel))
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert desk.show().step("install").status in ("failed", "interrupted")
    assert desk.wait().state() == "ended"
    desk.run()
    assert desk.statuses() == ALL_GREEN


def test_a_question_without_anybody_to_answer_ends_the_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.service.jobs import frontend

    monkeypatch.setattr(frontend, "ATTACH_SECONDS", 0.5)

    class Gone(Front):
        def accept_licence(self, request: object) -> bool:
            die()
            return True

    assert os.WTERMSIG(forked(lambda: desk.run(front=Gone(), interactive=True, accept_licenses=[]))) == signal.SIGKILL
    job = desk.wait()
    assert job.end is not None
    assert job.end["exit_code"] == ExitCode.INTERRUPTED
    assert desk.statuses()["model"] == "failed"


def test_two_operators_at_once(desk: Desk) -> None:
    """One writes; the other is told who that is, and may watch until the same end."""
    seen: list[object] = []

    def second(step: str, status: str) -> None:
        if (step, status) != ("model", "begin"):
            return
        with pytest.raises(InstallError, match="Another Atoll command") as caught:
            desk.run()
        seen.append(caught.value.exit_code)
        with pytest.raises(InstallError) as caught:
            checklist.reset(desk.layout)
        seen.append(caught.value.exit_code)
        seen.append(desk.statuses()["gpu"])
        job = next(job for job in jobs.jobs(desk.layout) if job.locked())
        with pytest.raises(InstallError, match="attached") as caught:
            jobs.attach(job, Front())
        seen.append(caught.value.exit_code)
        watching.append(threading.Thread(target=lambda: results.append(jobs.watch(job, watcher))))
        watching[0].start()

    watching: list[threading.Thread] = []
    results: list[dict] = []
    watcher = Front()
    result, _ = desk.run(front=Front(at=second))
    assert seen == [75, 75, "green", 75]
    watching[0].join(30)
    assert results[0]["steps"] == result["steps"] == ALL_GREEN
    assert watcher.begun == [(name, status) for name in NAMES for status in ("begin", "green")]


# -- damage and full disks


def test_a_torn_event_is_dropped_and_damage_is_told(desk: Desk) -> None:
    desk.run("gpu")
    path = events.path_of(desk.layout)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "ended", "st')
    assert desk.statuses()["gpu"] == "green"
    desk.run("gpu")
    assert replay(path).torn_bytes == 0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + b"".join(lines[1:]))
    with pytest.raises(InstallError, match="damaged at line 2") as caught:
        desk.show()
    assert caught.value.exit_code == ExitCode.IO
    assert checklist.reset(desk.layout) == NAMES
    assert desk.statuses() == dict.fromkeys(NAMES, "open")
    assert list(desk.layout.checklist.glob("journal.damaged-*"))


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_full_disk_while_state_is_written_loses_nothing(desk: Desk, nth: int) -> None:
    """The nth event meets a real limit of the kernel on the file's size."""
    real, count = events.Events.add, 0

    def add(self: events.Events, what: str, /, **data: object) -> object:
        nonlocal count
        count += 1
        if count != nth:
            return real(self, what, **data)
        size = events.path_of(desk.layout).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, resource.RLIM_INFINITY))
        try:
            return real(self, what, **data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InstallError, match="file-size limit") as caught:
        patch.setattr(events.Events, "add", add)
        desk.run()
    assert caught.value.exit_code == ExitCode.IO
    found = replay(events.path_of(desk.layout))
    assert (found.torn_bytes, found.damaged_lines) == (0, [])
    assert nth - 1 <= len(found.records) <= nth  # the failure itself may be recorded
    desk.run()
    assert desk.statuses() == ALL_GREEN


def test_a_service_that_does_not_answer_fails_the_step_and_nothing_is_left(desk: Desk) -> None:
    desk.scripted("mute")
    with pytest.raises(InstallError) as caught:
        desk.run()
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert desk.statuses() == statuses(gpu="green", model="green", install="failed")
    desk.scripted("good")
    front = Front()
    desk.run(front=front)
    assert front.begun[0] == ("install", "begin")
    assert desk.statuses() == ALL_GREEN


def test_what_is_recorded_carries_message_ids(desk: Desk) -> None:
    desk.run()
    ended = next(e for e in desk.events() if e["event"] == "ended" and e["step"] == "model")
    finding = next(f for f in ended["findings"] if f["id"] == "model-licence")
    assert finding["observed"]["id"] == "{spdx} of {name}, SHA-256 {hash}: {how}"
    job = jobs.newest(desk.layout)
    assert job is not None
    said, _ = job.events()
    done = next(e for e in said if e["event"] == "step" and (e["name"], e["status"]) == ("stage", "done"))
    assert done["detail"]["id"].startswith("release {name}")
    plan = next(e["plan"] for e in said if e["event"] == "plan")
    assert {"id": "settings", "params": {}} in [item["note"] for item in plan["items"]]
    records = next(e["records"] for e in said if e["event"] == "preflight")
    assert all(isinstance(record["title"], dict) for record in records)
    assert json.loads(json.dumps(desk.show().to_json()))["done"]


def test_a_bug_in_a_step_ends_the_job_with_its_trace(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.service.steps.gpu import GpuStep

    def broken(self: GpuStep, job: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GpuStep, "run", broken)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        desk.run()
    assert desk.statuses()["gpu"] == "interrupted"


def test_time_to_notice_a_dead_job_is_short(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.service.steps.gpu import GpuStep

    monkeypatch.setattr(GpuStep, "run", die)
    began = time.monotonic()
    with pytest.raises(InstallError, match="was killed"):
        desk.run()
    assert time.monotonic() - began < 20
