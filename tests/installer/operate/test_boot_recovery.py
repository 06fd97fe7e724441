"""A power cut between switch and commit: at the next boot, before anything starts, the proven release is put back."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_kit import fsyncs, killed_at, killed_at_step
from server_kit import Server

from installer.audit import log
from installer.base.errors import InstallError
from installer.base.journal import intact
from installer.base.lock import InstallLock
from installer.base.recovery_mark import mark_of
from installer.decide.frontend import Unattended
from installer.operate import boot_recovery
from installer.operate.install import InstallResult
from installer.operate.lifecycle import start
from installer.operate.status import status
from installer.release.release import live
from installer.service import units

Bundles = Callable[..., Path]
CUTS = [("units", "switch"), ("units", "done"), ("switch", "done"), ("start", "done"), ("smoke", "done"),
        ("commit", "begin")]  # fmt: skip


def cut_power(server: Server) -> None:
    """Everything that ran is gone, as after a boot."""
    for pid in server.service.named_pids().values():
        os.kill(pid, signal.SIGKILL)
    while server.service.named_pids():
        time.sleep(0.01)
    server.service.book.unlink(missing_ok=True)


def files(server: Server) -> dict[Path, str]:
    """What a switch replaces."""
    layout = server.layout
    return {path: path.read_text() for path in (layout.config, *units.owned_files(layout)) if path.is_file()}


def interrupted(server: Server, bundle: Bundles, cut: tuple[str, str]) -> tuple[InstallResult, dict[Path, str]]:
    """One release committed; the upgrade to another cut off there. (the first, its files)"""
    one = server.install(bundle(1))
    before = files(server)
    assert killed_at_step(*cut, lambda: server.install(bundle(2), port=server.port + 1 if cut[0] == "units" else None))
    cut_power(server)
    return one, before


@pytest.mark.parametrize("cut", CUTS)
def test_the_proven_release_is_put_back_and_serves(server: Server, bundle: Bundles, cut: tuple[str, str]) -> None:
    one, before = interrupted(server, bundle, cut)
    layout = server.layout
    new = server.history.open_switch["to"]  # type: ignore[index]
    assert mark_of(layout).exists(), "without it systemd would not look"
    said = boot_recovery.settle(layout, service=server.service)
    assert new in said
    assert one.release in said
    assert live(layout) == one.release
    assert files(server) == before
    assert server.history.open_switch is None
    assert not mark_of(layout).exists()
    records, broken = log.read(layout.audit)
    assert broken is None
    assert {name: records[-1][name] for name in ("event", "to", "cut_off")} == {
        "event": "rolled-back", "to": one.release, "cut_off": new}  # fmt: skip
    assert start(layout, Unattended(), service=server.service, timeout=20).url
    assert server.serving() == {"models": {"tiny": one.model_dir}, "mode": "good"}

    facts = status(layout, service=server.service)
    assert facts["recovery"]["cut_off"] == new
    assert facts["recovery"]["put_back"] == one.release
    (told,) = [problem for problem in facts["problems"] if new in problem["what"]]
    assert (told["severity"], "atoll upgrade" in told["next"]) == ("warning", True)
    assert facts["state"] == "serving"
    assert facts["healthy"]

    two = server.install(bundle(2))
    assert two.release == new or cut[0] == "units"
    assert server.serving()["models"] == {"tiny": two.model_dir}
    assert status(layout, service=server.service)["recovery"] is None
    assert server.rollback().release == one.release


def test_killed_anywhere_it_is_done_by_the_next_boot(server: Server, bundle: Bundles) -> None:
    one, before = interrupted(server, bundle, ("smoke", "done"))
    state = {path: path.read_bytes() for path in server.layout.state.rglob("*") if path.is_file()}
    # How many moments there are, from a run on a journal that is put back afterwards.
    total = fsyncs(lambda: boot_recovery.settle(server.layout, service=server.service))
    assert total > 3
    for nth in range(1, total + 1):
        cut_power(server)
        for path, content in state.items():
            path.write_bytes(content)
        killed = killed_at(nth, lambda: boot_recovery.settle(server.layout, service=server.service))
        cut_power(server)
        if killed and mark_of(server.layout).exists():
            boot_recovery.settle(server.layout, service=server.service)
        assert live(server.layout) == one.release
        assert files(server) == before
        assert server.history.open_switch is None
        assert not mark_of(server.layout).exists()


def test_a_first_install_has_nothing_to_go_back_to(server: Server, bundle: Bundles) -> None:
    assert killed_at_step("start", "done", lambda: server.install(bundle()))
    cut_power(server)
    here = live(server.layout)
    assert "Run the same install again" in boot_recovery.settle(server.layout, service=server.service)
    assert live(server.layout) == here
    assert server.history.open_switch is not None
    assert server.install(bundle()).outcome == "installed"


def test_nothing_is_done_beside_an_install_or_a_service_that_runs(server: Server, bundle: Bundles) -> None:
    server.install(bundle(1))
    assert boot_recovery.settle(server.layout, service=server.service) == "No install was interrupted."
    assert killed_at_step("start", "done", lambda: server.install(bundle(2)))
    pids, here = server.service.named_pids(), live(server.layout)
    assert "is already running" in boot_recovery.settle(server.layout, service=server.service)
    cut_power_later = server.service.named_pids()
    with InstallLock(server.layout.lock, "install"):
        assert "Another install is running" in boot_recovery.settle(server.layout, service=server.service)
    assert (cut_power_later, live(server.layout)) == (pids, here)
    assert server.history.open_switch is not None


def test_what_cannot_be_put_back_leaves_a_machine_that_starts(server: Server, bundle: Bundles) -> None:
    interrupted(server, bundle, ("smoke", "done"))
    (saved,) = server.layout.snapshots.iterdir()
    content = saved.read_bytes()
    saved.write_bytes(content[:100])
    with pytest.raises(InstallError, match="cannot be read"):
        boot_recovery.settle(server.layout, service=server.service)
    assert server.history.open_switch is not None, "the next boot tries again"
    assert mark_of(server.layout).exists()
    server.service.start()
    assert server.service.state().up
    assert status(server.layout, service=server.service)["state"] == "interrupted"
    saved.write_bytes(content)
    cut_power(server)
    boot_recovery.settle(server.layout, service=server.service)
    assert server.history.open_switch is None


def test_a_damaged_journal_is_left_alone(server: Server, bundle: Bundles) -> None:
    interrupted(server, bundle, ("smoke", "done"))
    here, lines = live(server.layout), server.layout.journal.read_bytes().splitlines(keepends=True)
    server.layout.journal.write_bytes(b"".join([*lines[:3], b"{\n", *lines[3:]]))
    with pytest.raises(InstallError, match="damaged"):
        boot_recovery.settle(server.layout, service=server.service)
    assert live(server.layout) == here


def test_a_commit_takes_the_mark_away(server: Server, bundle: Bundles) -> None:
    server.install(bundle(1))
    assert not mark_of(server.layout).exists()
    with pytest.raises(InstallError):
        server.install(bundle(2), mode="crash")
    assert not mark_of(server.layout).exists()
    assert intact(server.layout.journal)[-1]["event"] == "rolled-back"
    assert status(server.layout, service=server.service)["recovery"] is None, "that one was told when it happened"
