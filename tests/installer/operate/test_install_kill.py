"""kill -9 anywhere. The installing process is forked and kills itself at its Nth fsync, which is each moment at which
something has just become durable; then the same install is run again and must end as if nothing had happened."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installer_kit import Site, tree
from kill_kit import fsyncs, killed_at, killed_at_step

from installer.access import api_keys
from installer.audit import log
from installer.base.errors import InstallError
from installer.base.journal import replay
from installer.operate.lifecycle import start
from installer.operate.status import status
from installer.operate.uninstall import uninstall

Bundles = Callable[..., Path]


def assert_converged(site: Site, bundle: Path) -> None:
    """The same command again: it serves, it is committed, nothing is left over, and the operator has a key."""
    result = site.install(bundle)
    assert result.outcome in ("installed", "already-installed")
    assert site.serving() == {"model": result.model_dir, "mode": "good"}
    assert status(site.layout)["state"] == "serving"
    assert status(site.layout)["problems"] == []
    history = site.history
    assert history.open_switch is None
    assert history.committed["release"] == result.release  # type: ignore[index]
    assert history.unshown_keys == set()
    assert replay(site.layout.journal).damaged_lines == []
    assert log.read(site.layout.audit)[1] is None
    entries = api_keys.read(site.layout.api_keys)
    assert [entry["name"] for entry in entries] == ["first key, made at install"]
    if result.api_key:
        assert site.ask(result.api_key) == 200
    assert not [path for path in tree(site.prefix) if path.endswith(".partial")]
    assert site.install(bundle).outcome == "already-installed"


STEPS_AND_EVENTS = [
    (step, event) for step in ("stage", "switch", "start", "smoke", "commit") for event in ("begin", "done")
] + [("switch", "switch"), ("start", "key-created"), ("commit", "commit"), ("plan", "creates")]


@pytest.mark.parametrize(("step", "event"), STEPS_AND_EVENTS)
def test_first_install_killed_at_every_step(site: Site, bundle: Bundles, step: str, event: str) -> None:
    assert killed_at_step(step, event, lambda: site.install(bundle()))
    assert_converged(site, bundle())
    uninstall(site.layout, purge=True, service=site.service)
    assert not site.prefix.exists()


@pytest.mark.parametrize(("step", "event"), STEPS_AND_EVENTS)
def test_upgrade_killed_at_every_step(site: Site, bundle: Bundles, step: str, event: str) -> None:
    if event == "key-created":
        pytest.skip("an upgrade makes no key")
    one = site.install(bundle(1))
    assert killed_at_step(step, event, lambda: site.install(bundle(2)))
    if step in ("plan", "stage", "switch"):  # nothing that runs was touched yet
        assert site.serving()["model"] == one.model_dir
    assert_converged(site, bundle(2))
    assert {path.name for path in site.layout.releases.iterdir()} >= {one.release}
    assert one.api_key is not None
    assert site.ask(one.api_key) == 200


def test_first_install_killed_between_any_two_durable_writes(site: Site, bundle: Bundles) -> None:
    """Every 13th of them, starting where the steps' own records do not already kill."""
    total = fsyncs(lambda: site.install(bundle()))
    assert total > 40
    uninstall(site.layout, purge=True, service=site.service)
    for nth in range(2, total, 13):
        assert killed_at(nth, lambda: site.install(bundle())), nth
        assert_converged(site, bundle())
        uninstall(site.layout, purge=True, service=site.service)
        assert not site.prefix.exists(), (nth, tree(site.prefix))


def test_start_goes_back_after_an_upgrade_that_was_killed(site: Site, bundle: Bundles) -> None:
    """The medium is gone and the machine was rebooted: the proven release serves again."""
    from installer_kit import Witness

    one = site.install(bundle(1))
    assert killed_at_step("start", "done", lambda: site.install(bundle(2), "mute"))
    assert status(site.layout)["state"] == "interrupted"
    site.service.stop()
    result = start(site.layout, Witness(), service=site.service, timeout=20)  # type: ignore[arg-type]
    assert result.changed
    assert site.serving() == {"model": one.model_dir, "mode": "good"}
    assert status(site.layout)["state"] == "serving"


def test_purge_killed_anywhere_ends_when_run_again(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    total = fsyncs(lambda: uninstall(site.layout, purge=True, service=site.service))
    for nth in range(1, total, 4):
        site.install(bundle())
        assert killed_at(nth, lambda: uninstall(site.layout, purge=True, service=site.service))
        if site.layout.journal.exists():
            uninstall(site.layout, purge=True, service=site.service)
            assert not site.prefix.exists(), (nth, tree(site.prefix))
        else:
            assert not [path for path in site.prefix.rglob("*") if path.is_file()]


ROLLBACK_EVENTS = [
    (step, event) for step in ("discover", "switch", "start", "smoke", "commit") for event in ("begin", "done")
] + [("switch", "switch"), ("commit", "commit")]


@pytest.mark.parametrize(("step", "event"), ROLLBACK_EVENTS)
def test_rollback_killed_at_every_step(site: Site, bundle: Bundles, step: str, event: str) -> None:
    one, two = site.install(bundle(1)), site.install(bundle(2))
    assert killed_at_step(step, event, site.rollback)
    if step == "discover":
        assert site.serving()["model"] == two.model_dir
    if (step, event) in (("commit", "done"), ("commit", "commit")):  # it was done: the next one leads forth again
        assert site.history.committed["release"] == one.release  # type: ignore[index]
        assert site.rollback().release == two.release
    assert site.rollback().release == one.release
    assert site.serving() == {"model": one.model_dir, "mode": "good"}
    history = site.history
    assert history.open_switch is None
    assert (history.committed["release"], history.committed["previous"]) == (one.release, two.release)  # type: ignore[index]
    assert status(site.layout)["state"] == "serving"
    assert site.rollback().release == two.release


def test_an_install_cut_off_is_undone_by_rollback(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle(1))
    assert killed_at_step("start", "done", lambda: site.install(bundle(2), "mute"))
    assert site.rollback().release == one.release
    assert site.serving() == {"model": one.model_dir, "mode": "good"}
    assert site.history.open_switch is None


def test_rollback_to_a_release_that_does_not_answer_is_itself_taken_back(site: Site, bundle: Bundles) -> None:
    one, two = site.install(bundle(1)), site.install(bundle(2))
    (site.layout.releases / one.release / "bin/atoll").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(InstallError) as caught:
        site.rollback()
    assert caught.value.exit_code == 40
    assert site.serving() == {"model": two.model_dir, "mode": "good"}


def test_uninstall_killed_anywhere_ends_when_run_again(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle())
    total = fsyncs(lambda: uninstall(site.layout, purge=False, service=site.service))
    for nth in range(1, total + 1, 2):
        site.install(bundle())
        assert killed_at(nth, lambda: uninstall(site.layout, purge=False, service=site.service))
        uninstall(site.layout, purge=False, service=site.service)
        assert not site.layout.opt.exists()
        assert Path(one.model_dir).is_dir()
        assert not site.service.state().up
    site.install(bundle())
    assert killed_at(total - 2, lambda: uninstall(site.layout, purge=False, service=site.service))
    with pytest.raises(InstallError, match="did not answer") as caught:
        site.install(bundle(2), "mute")  # there is nothing left to go back to, and it is not tried
    assert caught.value.exit_code == 40
    site.install(bundle())
    assert killed_at(4, lambda: uninstall(site.layout, purge=False, service=site.service))
    assert site.install(bundle()).key_ids == one.key_ids  # or one changes one's mind
    assert site.serving()["mode"] == "good"


def test_ctrl_c_while_it_starts_rolls_back(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle(1))
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            site.install(bundle(2), "sick")
        except InstallError as error:
            print(error.message, *error.log_tail, sep="\n", file=sys.stderr, flush=True)  # shown if the code is wrong
            os._exit(error.exit_code)
        os._exit(1)
    end = time.monotonic() + 60
    while site.service.state().release in (None, one.release):  # until the new release is being started
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 130
    assert site.serving() == {"model": one.model_dir, "mode": "good"}
    assert site.history.open_switch is None


def test_a_dropped_terminal_does_not_stop_it(site: Site, bundle: Bundles) -> None:
    """SIGHUP half-way, as from a lost SSH session: the install continues to its end."""
    from installer.steps import activate

    pid = os.fork()
    if pid == 0:
        real = activate.wait_ready

        def wait_ready(*arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            real(*arguments)

        activate.wait_ready = wait_ready
        site.install(bundle())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert site.serving()["mode"] == "good"


def test_two_installs_at_the_same_moment_do_not_mix(site: Site, bundle: Bundles) -> None:
    """On a fresh prefix there is no lock to take yet while both only look; one of them must give way."""
    bundle()
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                site.installer(bundle()).run()
            except InstallError as error:
                os._exit(error.exit_code)
            os._exit(0)
        pids.append(pid)
    codes = sorted(os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in pids)
    assert codes in ([0, 75], [0, 0]), codes
    assert_converged(site, bundle())
