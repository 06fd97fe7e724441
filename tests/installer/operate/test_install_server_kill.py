"""kill -9 at every step of the system form, then the same command again: it must end as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installer_kit import tree
from kill_kit import fsyncs, killed_at, killed_at_step
from server_kit import Server

from installer.access import api_keys
from installer.audit import log
from installer.base.journal import replay
from installer.decide.frontend import Unattended
from installer.decide.install_options import ReplicaChoice
from installer.operate.lifecycle import start
from installer.service import units

Bundles = Callable[..., Path]
THEIRS = {"processes.json", "log", "run/tiny", "run/gateway"}  # of the fake units


def assert_converged(server: Server, bundle: Path) -> None:
    result = server.install(bundle)
    layout = server.layout
    assert result.outcome in ("installed", "already-installed")
    assert server.serving() == {"models": {"tiny": result.model_dir}, "mode": "good"}
    history = server.history
    assert history.open_switch is None
    assert history.committed["release"] == result.release  # type: ignore[index]
    assert history.unshown_keys == set()
    assert replay(layout.journal).damaged_lines == []
    assert log.read(layout.audit)[1] is None
    assert [entry["name"] for entry in api_keys.read(layout.api_keys)] == ["first key, made at install"]
    assert layout.command.is_symlink()
    assert server.service.models() == ["tiny"]
    assert (layout.units / units.GATEWAY).read_text().count("[Service]") == 1
    assert not [path for path in tree(server.root) if path.endswith(".partial")]
    assert server.install(bundle).outcome == "already-installed"


STEPS = ("stage", "units", "switch", "start", "smoke", "commit")
EVENTS = [(step, event) for step in STEPS for event in ("begin", "done")] + [("units", "switch"), ("commit", "commit")]


@pytest.mark.parametrize(("step", "event"), EVENTS)
def test_first_install(server: Server, bundle: Bundles, step: str, event: str) -> None:
    before = tree(server.root)
    assert killed_at_step(step, event, lambda: server.install(bundle()))
    assert_converged(server, bundle())
    server.uninstall(purge=True)
    left = tree(server.root) - before - THEIRS
    assert {path for path in left if not path.startswith("etc/") or "atoll" in path} == set()


@pytest.mark.parametrize(("step", "event"), EVENTS)
def test_upgrade(server: Server, bundle: Bundles, step: str, event: str) -> None:
    one = server.install(bundle(1))
    assert killed_at_step(step, event, lambda: server.install(bundle(2)))
    if step in ("stage", "units", "switch"):
        assert server.serving()["models"] == {"tiny": one.model_dir}
    assert_converged(server, bundle(2))
    assert (server.layout.releases / one.release).is_dir()


@pytest.mark.parametrize(("step", "event"), [event for event in EVENTS if event[0] != "stage"])
def test_rollback(server: Server, bundle: Bundles, step: str, event: str) -> None:
    one, two = server.install(bundle(1)), server.install(bundle(2))
    assert killed_at_step(step, event, server.rollback)
    if event == "commit" or (step, event) == ("commit", "done"):
        assert server.rollback().release == two.release
    assert server.rollback().release == one.release
    assert server.serving()["models"] == {"tiny": one.model_dir}
    assert server.history.open_switch is None


@pytest.mark.parametrize("change", ["add", "remove"])
@pytest.mark.parametrize(("step", "event"), [
    ("units", "begin"), ("units", "switch"), ("units", "done"), ("switch", "done"), ("start", "done"),
    ("commit", "commit"),
])  # fmt: skip
def test_a_replica(server: Server, bundle: Bundles, step: str, event: str, change: str) -> None:
    """The same command again completes it; `atoll start`, as the boot does, puts back what was."""
    server.install(bundle())
    add: dict[str, Any] = {"models": [], "replicas": [ReplicaChoice("tiny-b", "tiny")]}
    remove: dict[str, Any] = {"models": [], "remove": ["tiny-b"]}
    with_it, without = ["tiny", "tiny-b"], ["tiny"]
    if change == "remove":
        server.install(**add)
    wanted, options = (with_it, add) if change == "add" else (without, remove)
    before = server.service.models()
    assert killed_at_step(step, event, lambda: server.install(**options))
    if event != "commit":
        start(server.layout, Unattended(), service=server.service, timeout=20)
        assert server.service.models() == before
        assert ("tiny-b" in server.layout.config.read_text()) == ("tiny-b" in before)
        assert killed_at_step(step, event, lambda: server.install(**options))
        server.install(**options)
    assert server.service.models() == wanted
    assert server.service.named_pids().keys() == {"gateway", *wanted}
    assert ("tiny-b" in server.layout.config.read_text()) == ("tiny-b" in wanted)
    assert server.history.open_switch is None


@pytest.mark.parametrize("again", ["rollback", "install", "start"])
def test_an_upgrade_cut_off_after_it_started_the_new_engine(server: Server, bundle: Bundles, again: str) -> None:
    """The new model then runs with settings that name it; going back has to start the old one again."""
    one = server.install(bundle(1))
    assert killed_at_step("start", "done", lambda: server.install(bundle(2)))
    before = server.service.named_pids()
    if again == "start":
        assert start(server.layout, Unattended(), service=server.service, timeout=20).changed
    else:
        result = server.rollback() if again == "rollback" else server.install(bundle(1))
        assert result.release == one.release
    assert not before.items() & server.service.named_pids().items()
    assert server.serving()["models"] == {"tiny": one.model_dir}
    assert server.history.open_switch is None


@pytest.mark.parametrize("again", ["rollback", "start"])
def test_an_upgrade_cut_off_before_it_started_anything_interrupts_nobody(
    server: Server, bundle: Bundles, again: str
) -> None:
    """`current` and the settings are already those of the new release, but the old one still serves."""
    one = server.install(bundle(1))
    before = server.service.named_pids()
    assert killed_at_step("switch", "done", lambda: server.install(bundle(2)))
    if again == "start":
        assert start(server.layout, Unattended(), service=server.service, timeout=20).changed
    else:
        assert server.rollback().release == one.release
    assert server.service.named_pids() == before
    assert server.history.open_switch is None
    assert server.layout.current.readlink().name == one.release
    assert server.install(bundle(1)).outcome == "already-installed"


@pytest.mark.parametrize("purge", [False, True])
def test_uninstall(server: Server, bundle: Bundles, purge: bool) -> None:
    before = tree(server.root)
    server.install(bundle())
    total = fsyncs(lambda: server.uninstall(purge=purge))
    for nth in range(1, total, 5):
        server.install(bundle())
        assert killed_at(nth, lambda: server.uninstall(purge=purge))
        if server.layout.journal.exists():
            server.uninstall(purge=purge)
        left = tree(server.root) - before - THEIRS
        units_left = {path for path in left if path.startswith(("etc/systemd", "usr/local", "opt/atoll/"))}
        assert units_left == set(), nth
        assert server.service.named_pids() == {}
        if purge:
            assert not [path for path in left if path.startswith(("etc/atoll", "var/lib/atoll")) and "." in path], nth
