"""Troubles from facts: each case says what happened, why, what was not changed, and a command that helps."""

import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import Desk

from appliance.service.trouble import Scene, derive, gather, of_error, troubles
from appliance.service.trouble.record import Holder
from installer.base.errors import PORT_IN_USE, ExitCode, InstallError
from installer.base.layout import Layout
from installer.gpu import Gpu, GpuFacts, GpuProcess
from installer.preflight.machine import Machine
from installer.service.prefix import PrefixService

SERVING: dict[str, Any] = {
    "state": "serving", "prefix": "/srv/atoll", "service": {"restarts": 0, "last_exit": None, "phase": "running"},
    "health": {"ok": True, "said": "HTTP 200"}, "certificate": None, "disk": {"free_bytes": 90 << 30},
}  # fmt: skip
FINE = Scene(where=" --prefix /srv/atoll", status=SERVING)


def only(scene: Scene) -> Any:
    found = derive(scene)
    assert len(found) == 1
    trouble = found[0]
    assert trouble.happened
    assert trouble.unchanged
    assert trouble.actions[0].text
    assert any(each.command for each in trouble.actions)
    json.dumps(trouble.to_json("ko"))
    return trouble


def with_status(**more: Any) -> Scene:
    return replace(FINE, status={**SERVING, **more})


def down(*log: str, **more: Any) -> Scene:
    service = {"restarts": 3, "last_exit": 1, "phase": "failed"}
    return replace(with_status(state="failed", service=service), log_tail=log, **more)


def test_a_service_that_serves_is_no_trouble() -> None:
    assert derive(FINE) == []


def test_nothing_installed_leads_to_the_checklist(tmp_path: Path) -> None:
    found = troubles(Layout.at(tmp_path / "none"))
    assert [each.id for each in found] == ["nothing-installed"]
    assert not found[0].stops
    assert found[0].actions[0].command == f"atoll setup --prefix {tmp_path / 'none'}"
    assert not (tmp_path / "none").exists()


def test_loading_shows_how_far_it_is() -> None:
    trouble = only(with_status(state="starting", health={"ok": False, "said": "chat weights 12.10/60.30 GB"}))
    assert trouble.id == "engine-loading"
    assert trouble.progress == pytest.approx(12.1 / 60.3)
    assert only(with_status(state="starting", health={"ok": False, "said": "not listening yet"})).progress is None


def test_who_holds_the_gpus_memory_is_named_with_the_way_to_stop_it() -> None:
    holder = Holder("GPU 0", "process 48121 (train.py)", 31_200_000_000, "kill 48121")
    trouble = only(down("error: The model does not fit: its weights take 27 GiB", holders=(holder,)))
    assert trouble.id == "engine-failed"
    assert "31.2 GB of GPU 0" in trouble.cause
    assert "3 times" in trouble.happened
    assert trouble.actions[0].command == "kill 48121"
    assert "does not fit" in trouble.evidence[0]


@pytest.mark.parametrize(
    ("line", "cause", "command"),
    [
        ("error: Cannot listen on 0.0.0.0:8443: Address already in use.", "listens on the port", "sport = :8443"),
        ("error: OSError: No space left on device", "disk is full", "df -h"),
        ("error: torch.OutOfMemoryError: CUDA out of memory.", "not enough", "atoll setup"),
        ("error: Driver/library version mismatch", "driver", "atoll preflight"),
        ("error: The tokenizer is broken.", "The tokenizer is broken.", "atoll start --prefix /srv/atoll"),
    ],
)
def test_the_last_words_of_a_service_name_the_cause(line: str, cause: str, command: str) -> None:
    trouble = only(down("info: starting", line, "info: bye"))
    assert cause in trouble.cause
    assert command in trouble.actions[0].command
    assert trouble.evidence == (line,)


def test_a_certificate_and_a_disk_are_told_before_they_stop_anything() -> None:
    ends = {"days_left": 13, "not_after": "2027-01-01T00:00:00Z", "source": "local"}
    trouble = only(with_status(certificate=ends))
    assert (trouble.id, trouble.stops) == ("certificate-expiring", False)
    assert trouble.actions[0].command == "atoll tls renew --prefix /srv/atoll"
    assert only(with_status(certificate={**ends, "days_left": -1})).stops
    assert derive(with_status(certificate={**ends, "days_left": 200})) == []
    trouble = only(with_status(disk={"free_bytes": 1 << 30}))
    assert (trouble.id, trouble.stops) == ("disk-full", False)
    assert "1.0 GiB" in trouble.happened


def test_the_gravest_comes_first() -> None:
    scene = down("error: x", media=(Path("/media/usb"),))
    assert [each.id for each in derive(scene)] == ["engine-failed", "medium-missing"]


class FakeMachine(Machine):
    """A machine with a GPU whose driver says what a test wants."""

    facts = GpuFacts()

    def gpus(self) -> GpuFacts:
        return self.facts

    def gpu_addresses(self) -> list[str]:
        return ["0000:06:00.0"]


def test_a_driver_that_was_updated_under_the_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from installer.preflight.torch_build import TorchBuild

    monkeypatch.setattr(TorchBuild, "installed", classmethod(lambda cls: TorchBuild("2.11.0+cu130", (13, 0))))
    machine = FakeMachine(tmp_path)
    machine.facts = GpuFacts(nvml_error="Driver/library version mismatch")
    scene = gather(Layout.at(tmp_path / "none"), machine=machine)
    mismatch = next(each for each in derive(scene) if each.id == "driver-mismatch")
    assert mismatch.stops
    assert "reboot" in mismatch.actions[0].command


def test_another_program_on_the_gpu_is_seen(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    mine = GpuProcess(os.getpid(), "python3", 31 << 30)
    machine.facts = GpuFacts((Gpu(index=0, processes=(mine, GpuProcess(9, "Xorg", 4 << 20))),), sources=("NVML",))
    holders = gather(Layout.at(tmp_path / "none"), machine=machine).holders
    assert [(each.gpu, each.used) for each in holders] == [("GPU 0", 31 << 30)]


def test_errors_of_work_get_a_screen_where_it_helps() -> None:
    assert of_error(InstallError("odd", exit_code=ExitCode.USAGE)) is None
    missing = of_error(InstallError("no medium", exit_code=ExitCode.MEDIA), Scene(" --prefix /srv/atoll"))
    assert missing is not None
    assert missing.id == "medium-missing"
    assert missing.actions[-1].command == "atoll setup --prefix /srv/atoll"
    ended = of_error(InstallError("it did not answer", exit_code=ExitCode.UNHEALTHY, changed="1.0 was put back.",
                                  log_tail=["error: Cannot listen on 127.0.0.1:80: in use"]))  # fmt: skip
    assert ended is not None
    assert (ended.id, ended.unchanged) == ("engine-failed", "1.0 was put back.")
    assert "port" in ended.cause


def test_another_program_that_answers_on_the_port_is_named(desk: Desk) -> None:
    """The service could not listen, and left no message: nothing has killed it."""
    desk.run("gpu", "model")
    with socket.create_server(("127.0.0.1", desk.site.port)), pytest.raises(InstallError) as caught:
        desk.run("install", waivers={"port": "it ends tonight"}, start_timeout=5.0)
    assert caught.value.error_id == PORT_IN_USE  # the install is a job
    told = of_error(caught.value, Scene("", port=desk.site.port))
    assert told is not None
    assert "Another program listens on the port" in told.cause
    assert told.actions[0].command == f"ss -ltnp 'sport = :{desk.site.port}'"


def test_a_real_service_that_was_killed_is_told(desk: Desk) -> None:
    desk.run("gpu", "model", "install")
    assert [each.id for each in troubles(desk.layout) if each.stops] == []
    service = PrefixService(desk.layout)
    leader = service._leader()
    assert leader is not None
    family = leader.family()
    for process in family:
        os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while any(process.alive() for process in family) and time.monotonic() < end:
        time.sleep(0.05)
    found = troubles(desk.layout)
    assert found[0].id == "engine-failed"
    assert found[0].stops
    assert f"atoll start --prefix {desk.layout.prefix}" in [each.command for each in found[0].actions]
