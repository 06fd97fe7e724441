"""The verbs of a server's service: with systemd's own tools on a tree that is not booted, and the words of failures.

What runs is in tests/boot/test_boot_units.py; here a scripted systemctl says what a real one says when things go wrong.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.service import units
from installer.service.systemctl import Done, parse_show, run
from installer.service.systemd import SystemdService


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A tree that was never booted, with the units in it."""
    layout = Layout.server(tmp_path)
    for directory in ("etc", "lib/systemd"):
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    shutil.copytree("/lib/systemd/system", tmp_path / "lib/systemd/system", symlinks=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    units.write(units.render(layout, ["chat", "code"], gpu=False))
    return layout


def test_a_tree_that_is_not_booted_gets_users_and_links_and_nothing_is_started(layout: Layout):
    service = SystemdService(layout)
    assert not service.booted
    service.apply_units(["chat", "code"])
    assert service.models() == ["chat", "code"]
    wants = layout.units / "atoll.target.wants"
    assert {link.name for link in wants.iterdir()} == {
        "atoll-gateway.socket", "atoll-gateway.service", "atoll-settle.service", "atoll-engine@chat.service",
        "atoll-engine@code.service"}
    assert (layout.units / "multi-user.target.wants/atoll.target").is_symlink()
    assert (layout.units / "timers.target.wants/atoll-verify.timer").is_symlink()
    assert "atoll-engine:" in (layout.prefix / "etc/passwd").read_text()
    service.start()
    assert (service.stop(), service.state().phase, service.pids(), service.log_tail(5)) == (False, "stopped", set(), [])

    service.apply_units(["code"])  # a model less
    assert service.models() == ["code"]
    service.remove_units()
    assert service.models() == []
    assert not list(layout.units.glob("*.wants/atoll*"))
    service.remove_users()
    assert "atoll" not in (layout.prefix / "etc/passwd").read_text() + (layout.prefix / "etc/group").read_text()


def test_a_unit_that_is_gone_is_told_with_the_command(layout: Layout):
    (layout.units / "atoll.target").unlink()
    with pytest.raises(InstallError, match="Could not enable the services") as failed:
        SystemdService(layout).apply_units(["chat"])
    assert "systemctl" in failed.value.why


class Scripted:
    """A systemctl that answers by the first words it knows, and remembers what it was asked."""

    def __init__(self, **answers: Done) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, words: Sequence[str], timeout: float) -> Done:
        self.asked.append(" ".join(words))
        for verb, done in self.answers.items():
            if verb in words or words[0] == verb:
                return done
        return Done(0)


def booted(layout: Layout, runner: Scripted) -> SystemdService:
    service = SystemdService(layout, runner)
    service.booted = True
    return service


def test_a_failure_carries_reason_command_and_journal(layout: Layout):
    runner = Scripted(start=Done(1, err="Job for atoll-gateway.socket failed.\nSee journalctl -xe.\n"),
                      journalctl=Done(0, "Failed to create listening socket: Address already in use\n"))  # fmt: skip
    with pytest.raises(InstallError) as failed:
        booted(layout, runner).start()
    error = failed.value
    assert error.message == "Could not open the port: Job for atoll-gateway.socket failed. See journalctl -xe."
    assert (error.exit_code, error.log_tail) == (40, ["Failed to create listening socket: Address already in use"])
    assert "journalctl -b -u atoll-gateway.socket" in error.hint


def test_a_command_that_never_ends_is_given_up(layout: Layout):
    with pytest.raises(InstallError, match="it had not ended after 30 s"):
        booted(layout, Scripted(start=Done(None))).start()
    assert run(["sleep", "5"], 0.1) == Done(None)
    assert run(["no-such-command-here"], 1.0).code == 127


def block(unit: str, active: str, sub: str = "", **more: str) -> str:
    facts = {"Id": unit, "LoadState": "loaded", "ActiveState": active, "SubState": sub, "MainPID": "0",
             "NRestarts": "0", "ExecMainCode": "0", "ExecMainStatus": "0", "Job": "",
             "StateChangeTimestamp": "@1700000000"}  # fmt: skip
    return "\n".join(f"{key}={value}" for key, value in {**facts, **more}.items())


GATEWAY, CHAT = "atoll-gateway.service", "atoll-engine@chat.service"


@pytest.mark.parametrize("gateway, chat, phase, restarts, last_exit", [
    (("active", "running"), ("active", "running"), "running", 0, None),
    (("active", "running"), ("activating", "start"), "running", 0, None),
    (("active", "running"), ("inactive", "dead", {"Job": "77"}), "running", 0, None),  # waits for gpu-ready
    (("active", "running"), ("activating", "auto-restart", {"NRestarts": "2", "ExecMainCode": "2",
                                                            "ExecMainStatus": "9"}), "restarting", 2, -9),
    (("active", "running"), ("failed", "failed", {"ExecMainCode": "1", "ExecMainStatus": "11"}), "failed", 0, 11),
    (("inactive", "dead"), ("inactive", "dead"), "stopped", 0, None),
])  # fmt: skip
def test_states(layout: Layout, gateway, chat, phase: str, restarts: int, last_exit: int | None):
    SystemdService(layout).apply_units(["chat"])

    def of(unit: str, active: str, sub: str, more: dict[str, str] | None = None) -> str:
        return block(unit, active, sub, **(more or {}))

    shown = f"{of(GATEWAY, *gateway)}\n\n{of(CHAT, *chat)}\n"
    service = booted(layout, Scripted(show=Done(0, shown)))
    state = service.state()
    assert (state.phase, state.restarts) == (phase, restarts)
    if last_exit is not None:
        assert state.last_exit == last_exit
    assert set(service.instance_states()) == {"gateway", "chat"}
    assert service.is_ready("chat") == (chat[0] == "active")


def test_keys_are_reloaded_only_where_a_gateway_runs(layout: Layout):
    runner = Scripted(show=Done(0, block(GATEWAY, "inactive")))
    booted(layout, runner).reload_keys()
    assert not any("reload" in words for words in runner.asked)
    runner = Scripted(show=Done(0, block(GATEWAY, "active")))
    booted(layout, runner).reload_keys()
    assert any(words.endswith(f"reload {GATEWAY}") for words in runner.asked)


def test_only_the_named_parts_are_stopped(layout: Layout):
    runner = Scripted(show=Done(0, f"{block(CHAT, 'active')}\n\n{block(GATEWAY, 'active')}"))
    assert booted(layout, runner).stop(["chat", "gateway"])
    stops = [words for words in runner.asked if " stop " in words]
    assert stops == [f"systemctl --no-ask-password stop {CHAT} {GATEWAY}"]


class Changing(Scripted):
    """A systemctl whose engine gets another main process after a few looks at it, or does not."""

    def __init__(self, *looks: str) -> None:
        super().__init__()
        self.looks = list(looks)

    def __call__(self, words: Sequence[str], timeout: float) -> Done:
        super().__call__(words, timeout)
        if "show" not in words or CHAT not in words:
            return Done(0, block(GATEWAY, "active") if "show" in words else "")
        return Done(0, self.looks.pop(0) if len(self.looks) > 1 else self.looks[0])


def running(pid: int, active: str = "active", **more: str) -> str:
    return block(CHAT, active, "running", **{"MainPID": str(pid), "CanReload": "yes", **more})


OLD, NEW = 4194301, 4194302  # of no process here


def test_an_engine_that_runs_hands_over_and_the_gateway_starts_anew_meanwhile(layout: Layout):
    SystemdService(layout).apply_units(["chat"])
    job = {"active": "reloading", "Job": "7"}
    runner = Changing(running(OLD), running(OLD), running(OLD, **job), running(OLD, **job), running(NEW, **job))
    began = time.monotonic()
    switched = booted(layout, runner).switch({"chat", "gateway"}, 10.0)
    assert began <= switched.starting_from <= switched.silent_from <= time.monotonic()
    deeds = [words.removeprefix("systemctl --no-ask-password ") for words in runner.asked if "show" not in words]
    assert deeds[0].endswith(f"bin/atoll gateway --config {layout.config} --check"), "what is cold is read first"
    assert deeds[1:] == [f"reload --no-block {CHAT}", f"stop {GATEWAY}", f"systemctl reset-failed {GATEWAY}",
                         f"start --no-block {GATEWAY}"]  # fmt: skip


def test_a_successor_that_cannot_be_prepared_is_an_error_and_nothing_is_stopped(layout: Layout):
    SystemdService(layout).apply_units(["chat"])
    runner = Changing(running(OLD), running(OLD), running(OLD, "reloading", Job="7"), running(OLD))
    with pytest.raises(InstallError, match="could not prepare") as failed:
        booted(layout, runner).switch({"chat", "gateway"}, 10.0)
    assert failed.value.exit_code == 40
    assert not any(" stop " in words for words in runner.asked)


def test_a_successor_that_takes_too_long_is_ended_before_the_way_back_begins(layout: Layout):
    """Else it would take over later, from an engine that was left to serve."""
    SystemdService(layout).apply_units(["chat"])

    class Patient(Changing):
        """The reload ends when its process is killed, and not before."""

        def __call__(self, words: Sequence[str], timeout: float) -> Done:
            if "kill" in words:
                self.looks = [running(OLD, "reloading"), running(OLD)]
            return super().__call__(words, timeout)

    runner = Patient(running(OLD), running(OLD), running(OLD, "reloading", Job="7"))
    service = booted(layout, runner)
    with pytest.raises(InstallError, match="could not prepare"):
        service.switch({"chat"}, 0.2)
    assert f"systemctl kill --kill-who=control --signal=KILL {CHAT}" in runner.asked
    assert runner.looks == [running(OLD)], "it waited until systemd had heard of it"


@pytest.mark.parametrize("chat, serving", [
    (running(OLD, InvocationID="abc"), {"chat": f"abc/{OLD}"}),
    (running(OLD, "reloading", InvocationID="abc"), {}),  # somebody may take over from it
    (running(OLD, InvocationID="abc", Job="7"), {}),
    (block(CHAT, "failed", "failed"), {}),
])  # fmt: skip
def test_what_serves_is_named_by_start_and_process(layout: Layout, chat: str, serving: dict[str, str]):
    SystemdService(layout).apply_units(["chat"])
    runner = Scripted(show=Done(0, f"{block(GATEWAY, 'inactive')}\n\n{chat}"))
    assert booted(layout, runner).serving() == serving


def test_engines_that_trade_places_all_end_before_one_begins(layout: Layout):
    SystemdService(layout).apply_units(["chat"])
    runner = Changing(running(OLD))
    booted(layout, runner).switch({"chat"}, 10.0, hand_over=False)
    deeds = " ".join(runner.asked)
    assert "reload " not in deeds
    assert deeds.index(f" stop {CHAT}") < deeds.index(" start --no-block")


@pytest.mark.parametrize("engine", [running(OLD, CanReload="no"), block(CHAT, "failed", "failed")])
def test_an_engine_that_cannot_hand_over_is_stopped_and_started(layout: Layout, engine: str):
    """It does not run, or an older release's unit does not know how."""
    SystemdService(layout).apply_units(["chat"])
    runner = Changing(engine)
    booted(layout, runner).switch({"chat"}, 10.0)
    assert not any("reload " in words for words in runner.asked)
    assert any(f" start --no-block {units.SOCKET} {units.TARGET}" in words for words in runner.asked)


def test_properties_of_several_units_are_told_apart():
    shown = parse_show("Id=a.service\nStatusText=x=y\n\nId=b.service\nMainPID=3\n")
    assert shown["a.service"] == {"Id": "a.service", "StatusText": "x=y"}
    assert shown["b.service"]["MainPID"] == "3"
