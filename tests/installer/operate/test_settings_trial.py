"""Settings tried on the running release: kept, or undone, however the process that tries them ends."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from installer_kit import Site, Witness
from kill_kit import fsyncs, killed_at
from server_kit import Server

from installer.access import api_keys
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import intact
from installer.base.recovery_mark import mark_of
from installer.decide.frontend import Unattended
from installer.operate import boot_recovery
from installer.operate.lifecycle import start
from installer.operate.settings_trial import SettingsTrial, is_open, recover, with_values
from installer.operate.status import status
from installer.release import config

Bundles = Callable[..., Path]
OTHER = {"max-num-seqs": 32, "kv-cache-dtype": "float32"}
BROKEN = {"host": "nowhere.invalid"}


def trial(place: Site | Server) -> SettingsTrial:
    return SettingsTrial(place.layout, Witness(), service=place.service, start_timeout=20.0)


def tried(place: Site | Server) -> None:
    with trial(place) as mine:
        mine.start_with(OTHER)
        mine.keep(why="a test")


def text(place: Site | Server) -> str:
    return place.layout.config.read_text()


def events(place: Site | Server) -> list[str]:
    return [record["event"] for record in intact(place.layout.journal)]


def test_what_is_kept_is_committed_with_its_settings(site: Site, bundle: Bundles) -> None:
    first = site.install(bundle())
    tried(site)
    assert "max-num-seqs = 32" in text(site)
    committed = site.history.committed
    assert committed is not None
    assert committed["release"] == first.release
    assert site.serving()["mode"] == "good"
    assert site.install(bundle()).outcome == "already-installed"  # an install keeps them
    last = log.read(site.layout.audit)[0][-1]
    assert (last["event"], last["why"]) == ("tuned", "a test")
    assert not [key for key in api_keys.read(site.layout.api_keys) if "smoke" in key["name"]]
    with trial(site) as mine:
        mine.start_with(dict.fromkeys(OTHER))
        mine.keep()
    assert "max-num-seqs" not in text(site)


@pytest.mark.parametrize("ended", ["left", "error", "ctrl-c", "broken"])
def test_what_is_not_kept_is_taken_back(site: Site, bundle: Bundles, ended: str) -> None:
    site.install(bundle())
    before = text(site)
    with pytest.raises((InstallError, KeyboardInterrupt)) if ended != "left" else _Nothing():  # noqa: SIM117
        with trial(site) as mine:
            mine.start_with(OTHER)
            assert "max-num-seqs = 32" in text(site)
            if ended == "error":
                raise InstallError("no")
            if ended == "ctrl-c":
                raise KeyboardInterrupt
            if ended == "broken":
                mine.start_with(BROKEN)
    assert text(site) == before
    assert site.serving()["mode"] == "good"
    assert site.history.open_switch is None
    assert not [key for key in api_keys.read(site.layout.api_keys) if "smoke" in key["name"]]


def test_the_settings_as_they_stand_need_no_restart_at_the_end(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    with trial(site) as mine:
        mine.start_with({})
        running = site.service.state().since
    assert site.service.state().since == running
    assert events(site)[-1] == "rolled-back"


def test_a_key_that_is_still_to_be_shown_stays(site: Site, bundle: Bundles) -> None:
    """In a checklist the key of the install is shown at the very end, when the tuning is long over."""
    key = site.install(bundle(), shown=False).api_key
    with trial(site) as mine:
        mine.start_with(OTHER)
    assert key is not None
    assert site.ask(key) == 200


def test_a_start_that_fails_leaves_the_next_one_a_chance(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    with trial(site) as mine:
        with pytest.raises(InstallError) as caught:
            mine.start_with(BROKEN)
        assert caught.value.exit_code == ExitCode.UNHEALTHY
        mine.start_with(OTHER)
        assert site.serving()["mode"] == "good"


def test_killed_anywhere_the_proven_settings_come_back(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    before = text(site)
    last = fsyncs(lambda: tried(site))
    with trial(site) as mine:
        mine.start_with(dict.fromkeys(OTHER))
        mine.keep()
    assert text(site) == before
    for nth in range(1, last + 1):
        assert killed_at(nth, lambda: tried(site)), nth
        recover(site.layout, Unattended(), timeout=20)
        assert not is_open(site.layout)
        kept = "max-num-seqs" in text(site)
        assert site.serving()["mode"] == "good"
        assert kept or text(site) == before
        if kept:  # it was committed before the kill
            assert nth > last / 2
            with trial(site) as mine:
                mine.start_with(dict.fromkeys(OTHER))
                mine.keep()


def test_a_power_cut_on_a_server(server: Server, bundle: Bundles) -> None:
    from test_boot_recovery import cut_power, files

    server.install(bundle())
    before = files(server)

    def cut() -> None:
        with trial(server) as mine:
            mine.start_with(OTHER)
            signal.raise_signal(signal.SIGKILL)

    assert killed_at(10_000, cut)
    assert files(server) != before
    assert mark_of(server.layout).exists()
    facts = status(server.layout, service=server.service)
    assert facts["state"] == "interrupted"
    assert any("A tuning was interrupted" in problem["what"] for problem in facts["problems"])
    cut_power(server)
    assert "tuning was interrupted" in boot_recovery.settle(server.layout, service=server.service)
    assert files(server) == before
    assert not mark_of(server.layout).exists()
    assert start(server.layout, Unattended(), service=server.service, timeout=20).url
    facts = status(server.layout, service=server.service)
    assert facts["recovery"]["next"] == "atoll tune"


def test_on_a_server_the_gateway_goes_on(server: Server, bundle: Bundles) -> None:
    server.install(bundle())
    before = server.service.named_pids()
    tried(server)
    after = server.service.named_pids()
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"tiny"}, (before, after)
    assert 'max-num-seqs = 32' in text(server)
    assert config.parse(text(server), server.layout.config, "models")["tiny"]["max-num-seqs"] == 32


def test_refusals(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="no Atoll installation") as caught, trial(site):
        pass
    assert caught.value.exit_code == ExitCode.USAGE
    site.install(bundle())
    with pytest.raises(InstallError, match="No model called other") as caught, SettingsTrial(
            site.layout, Witness(), "other", service=site.service):  # fmt: skip
        pass
    with trial(site):
        with pytest.raises(InstallError, match="Another Atoll command") as caught, trial(site):
            pass
        assert caught.value.exit_code == ExitCode.BUSY
    site.service.stop()
    with pytest.raises(InstallError, match="does not answer") as caught, trial(site):
        pass
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert site.history.open_switch is None


def test_values_are_written_beside_what_is_there(site: Site) -> None:
    before = '# mine\n[serve]\nmax_num_seqs = 8 # few\nport = 1\n'
    after = with_values(before, ("serve",), {"max-num-seqs": 4, "kv-cache-dtype": "fp8"}, site.layout)
    assert after == '# mine\n[serve]\nmax_num_seqs = 4 # few\nport = 1\nkv-cache-dtype = "fp8"\n'
    assert with_values(after, ("serve",), {"max-num-seqs": None, "kv-cache-dtype": None}, site.layout) == (
        '# mine\n[serve]\nport = 1\n')  # fmt: skip


class _Nothing:
    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        return
