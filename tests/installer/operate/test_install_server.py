"""The system form: units, users, certificate, several models, upgrades, rollback, and removal without a trace."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from installer_kit import Witness, tree
from server_kit import Server

from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.decide.install_options import ModelChoice
from installer.operate.install import SYSTEM_STEPS
from installer.release import release
from installer.service import units
from installer.service.systemd import SystemdService

Bundles = Callable[..., Path]
THEIRS = {"processes.json", "log", "run/tiny", "run/gateway", "run/reloaded"}  # of the fake units


def test_a_first_install_makes_units_users_and_tls(server: Server, bundle: Bundles) -> None:
    witness = Witness()
    result = server.install(bundle(), witness=witness)
    layout = server.layout
    assert [name for name, state in witness.steps if state == "done"] == list(SYSTEM_STEPS)
    assert result.url == f"https://127.0.0.1:{server.port}/v1"
    assert result.downtime_s is None
    assert result.startup_s is not None
    assert server.serving() == {"models": {"tiny": result.model_dir}, "mode": "good"}
    for unit in (units.TARGET, units.SOCKET, units.GATEWAY, units.ENGINE_TEMPLATE):
        assert (layout.units / unit).is_file()
    assert (layout.units / "atoll.target.wants/atoll-engine@tiny.service").is_symlink()
    passwd = (server.root / "etc/passwd").read_text()
    assert "atoll-engine:" in passwd
    assert "atoll-gateway:" in passwd
    assert layout.command.readlink() == Path("/opt/atoll/current/bin/atoll")
    assert stat.S_IMODE(layout.credentials.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in layout.credentials.iterdir()} == {0o600}
    settings = tomlkit.parse(layout.config.read_text()).unwrap()
    assert settings["schema_version"] == 2
    assert settings["models"]["tiny"]["model"] == result.model_dir
    assert "api" not in layout.config.read_text()


def test_the_plan_names_everything(server: Server, bundle: Bundles) -> None:
    before = tree(server.root)
    witness = Witness(accepts=False, confirms=False)
    server.install(bundle(), witness=witness, dry_run=True)
    assert tree(server.root) == before
    planned = {item.what for item in witness.plans[0].items}
    kinds = {item.kind for item in witness.plans[0].items}
    assert {"unit", "user", "group", "port", "model", "file", "directory", "symlink"} <= kinds
    named = {"atoll-engine", "atoll-gateway", "atoll-api", "atoll-engine@tiny.service", f"127.0.0.1:{server.port}"}
    assert named <= planned
    server.install(bundle())
    new = {str(server.root / path) for path in tree(server.root) - before}
    store = str(server.layout.models)
    theirs = {"passwd", "group", "shadow", "gshadow", "passwd-", "group-", "shadow-", "gshadow-", ".pwd.lock"}
    extra = {"processes.json", "log", "tiny", "gateway", "lock", ".lock", ".api-keys.json.lock"}
    untold = {
        path for path in new - planned
        if not path.startswith(store) and Path(path).name not in theirs | extra and ".wants" not in path
        and not path.startswith(str(server.layout.releases))
    }  # fmt: skip
    assert untold == set()


def test_run_again_it_restarts_nothing(server: Server, bundle: Bundles) -> None:
    server.install(bundle())
    before = server.service.named_pids()
    assert server.install(bundle()).outcome == "already-installed"
    assert server.service.named_pids() == before


def test_a_half_written_unit_is_mended(server: Server, bundle: Bundles) -> None:
    server.install(bundle())
    unit = server.layout.units / units.GATEWAY
    whole = unit.read_text()
    unit.write_text(whole[: len(whole) // 2])
    assert server.install(bundle()).outcome == "installed"
    assert unit.read_text() == whole
    drop_in = server.layout.units / "atoll-gateway.service.d/own.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nNice=5\n")
    assert server.install(bundle()).outcome == "already-installed"
    assert drop_in.read_text() == "[Service]\nNice=5\n"


def test_a_second_model_leaves_the_first_alone(server: Server, bundle: Bundles) -> None:
    one = server.install(bundle())
    before = server.service.named_pids()
    two = server.install(models=[ModelChoice(bundle(2), "second", gpus=None)])
    assert [model["instance"] for model in two.models] == ["second", "tiny"]
    after = server.service.named_pids()
    assert after["tiny"] == before["tiny"], "its engine was not touched"
    assert after["gateway"] == before["gateway"], "it read its models again"
    assert server.serving()["models"].keys() == {"second", "tiny"}
    three = server.install(models=[ModelChoice(bundle(3), "second")])
    assert server.service.named_pids()["tiny"] == before["tiny"]
    assert three.downtime_s is not None
    assert (server.layout.releases / one.release).is_dir(), "an engine still runs from it"
    gone = server.install(models=[], remove=["second"])
    assert [model["instance"] for model in gone.models] == ["tiny"]
    assert server.service.models() == ["tiny"]
    assert server.service.named_pids().keys() == {"tiny", "gateway"}
    assert server.service.named_pids()["tiny"] == before["tiny"]


def test_answers_say_all_that_runs(server: Server, bundle: Bundles) -> None:
    server.install(models=[ModelChoice(bundle(1), "one"), ModelChoice(bundle(2), "two")])
    result = server.install(models=[ModelChoice(name="two")], only_these=True)
    assert [model["instance"] for model in result.models] == ["two"]
    with pytest.raises(InstallError, match="Two models would have the name"):
        server.install(models=[ModelChoice(bundle(1), "a"), ModelChoice(bundle(2), "a")])
    with pytest.raises(InstallError, match="No model called one is installed"):
        server.install(models=[ModelChoice(name="one")])
    with pytest.raises(InstallError, match="No model would be left"):
        server.install(models=[], remove=["two"])


def medium_of(tmp_path: Path, *bundles: Path) -> Path:
    """A disk with these bundles on it, and other things too."""
    medium = tmp_path / f"disk{len(list(tmp_path.iterdir()))}"
    (medium / "photos").mkdir(parents=True)
    for bundle in bundles:
        shutil.copytree(bundle, medium / bundle.name)
    return medium


def test_the_one_bundle_of_a_medium_is_meant(server: Server, bundle: Bundles, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="no bundle") as caught:
        server.install(media=[medium_of(tmp_path)])
    assert caught.value.exit_code == ExitCode.MEDIA
    server.install(media=[medium_of(tmp_path, bundle(1))], models=[ModelChoice(name="chat")])
    assert server.serving()["models"].keys() == {"chat"}
    # A later medium is for what runs, under the name that it has here.
    result = server.install(media=[medium_of(tmp_path, bundle(2))])
    assert [(model["instance"], model["sequence"]) for model in result.models] == [("chat", 2)]
    result = server.install(media=[medium_of(tmp_path, bundle(3))], models=[ModelChoice("tiny", "chat")])
    assert [(model["instance"], model["sequence"]) for model in result.models] == [("chat", 3)]
    assert server.install().outcome == "already-installed"  # no medium: what runs is looked at


def test_several_bundles_on_a_medium_need_a_choice(server: Server, bundle: Bundles, tmp_path: Path) -> None:
    disk = medium_of(tmp_path, bundle(1), bundle(2))
    with pytest.raises(InstallError, match="holds 2 models") as caught:
        server.install(media=[disk])
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--bundle" in caught.value.hint
    with pytest.raises(InstallError, match="no bundle called other") as caught:
        server.install(media=[disk], models=[ModelChoice("other")])
    assert "tiny" in caught.value.hint
    server.install(media=[disk], models=[ModelChoice("tiny-1.2.0", "b"), ModelChoice("tiny-1.1.0", "a")])
    assert server.serving()["models"].keys() == {"a", "b"}


def test_gpus_of_a_model_are_kept_over_an_upgrade(server: Server, bundle: Bundles) -> None:
    server.install(models=[ModelChoice(bundle(1), "tiny", gpus=())])
    text = server.layout.config.read_text().replace("gpus = []", "gpus = [] # ours\nmax-num-seqs = 3")
    server.layout.config.write_text(text)
    server.install(bundle(2))
    assert "gpus = [] # ours\nmax-num-seqs = 3" in server.layout.config.read_text()


@pytest.mark.parametrize("mode", ["mute", "crash"])
def test_a_bad_release_is_rolled_back(server: Server, bundle: Bundles, mode: str) -> None:
    one = server.install(bundle(1))
    files = {path: path.read_text() for path in (server.layout.config, *server.layout.units.glob("atoll*.*"))
             if path.is_file()}  # fmt: skip
    with pytest.raises(InstallError) as caught:
        server.install(bundle(2), mode=mode)
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert server.serving() == {"models": {"tiny": one.model_dir}, "mode": "good"}
    assert {path: path.read_text() for path in files} == files
    assert server.install(bundle(1)).outcome == "already-installed"


def test_a_bad_second_model_does_not_interrupt_the_first(server: Server, bundle: Bundles) -> None:
    """It crashes because its directory is not a model of the fake engine: the gateway never gets healthy engines."""
    server.install(bundle(1))
    engine = server.service.named_pids()["tiny"]
    with pytest.raises(InstallError) as caught:
        server.install(models=[ModelChoice(bundle(2), "second", settings={"device": "cpu", "model": "/nowhere"})])
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert server.service.named_pids()["tiny"] == engine
    assert server.service.models() == ["tiny"]
    assert server.serving()["models"].keys() == {"tiny"}


@pytest.mark.parametrize("reached", [set(), {"gateway"}])
def test_what_a_failed_switch_did_not_reach_serves_on(
    server: Server, bundle: Bundles, monkeypatch: pytest.MonkeyPatch, reached: set[str]
) -> None:
    """An engine whose successor could not be prepared has never stopped; going back must not stop it either."""
    one = server.install(bundle(1))
    before, text = server.service.named_pids(), server.layout.config.read_text()
    reloads = []

    def switch(self: SystemdService, names: set[str], *_: Any, **__: Any) -> None:
        assert names == {"tiny", "gateway"}
        assert release.live(self.layout) != one.release
        self.stop(reached)
        raise InstallError("The new engine could not prepare.", exit_code=ExitCode.UNHEALTHY)

    monkeypatch.setattr(SystemdService, "switch", switch)
    monkeypatch.setattr(SystemdService, "reload_keys", lambda self: reloads.append(server.service.named_pids()))
    with pytest.raises(InstallError, match="could not prepare") as caught:
        server.install(bundle(2))
    after = server.service.named_pids()
    assert {name for name in before if before[name] != after[name]} == reached
    assert ("nothing was restarted" in caught.value.changed) == (not reached), caught.value.changed
    assert bool(reloads) == (not reached), "a gateway that goes on hears of the keys that are gone"
    assert release.live(server.layout) == one.release
    assert server.layout.config.read_text() == text
    assert server.history.open_switch is None
    assert server.serving() == {"models": {"tiny": one.model_dir}, "mode": "good"}


def test_a_way_back_that_fails_does_not_call_dead_what_serves(
    server: Server, bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.install(bundle(1))
    before = server.service.named_pids()

    def fail(*_: Any, **__: Any) -> None:
        raise InstallError("It cannot be done.", exit_code=ExitCode.UNHEALTHY)

    with monkeypatch.context() as patched:
        patched.setattr(SystemdService, "switch", fail)
        patched.setattr("installer.steps.undo.wait_ready", fail)
        with pytest.raises(InstallError, match="Going back failed too") as caught:
            server.install(bundle(2))
    assert caught.value.exit_code == ExitCode.ROLLBACK_FAILED
    assert caught.value.changed.startswith("Still serving as before: gateway, tiny.")
    assert server.service.named_pids() == before


def test_a_first_install_that_fails_leaves_no_unit(server: Server, bundle: Bundles) -> None:
    with pytest.raises(InstallError) as caught:
        server.install(bundle(), mode="mute")
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert not list(server.layout.units.glob("atoll*"))
    assert not server.layout.command.is_symlink()
    assert server.service.named_pids() == {}
    assert server.install(bundle()).outcome == "installed"


def test_rollback_goes_back_and_forth_without_a_medium(server: Server, bundle: Bundles) -> None:
    one = server.install(bundle(1))
    two = server.install(models=[ModelChoice(bundle(2), "tiny"), ModelChoice(bundle(3), "more")])
    config = server.layout.config
    config.write_text(config.read_text().replace("[models.tiny]", "[models.tiny]\nmax-num-seqs = 7  # ours"))
    back = server.rollback()
    assert (back.outcome, back.release, back.previous) == ("rolled-back", one.release, two.release)
    assert server.serving()["models"] == {"tiny": one.model_dir}
    assert server.service.models() == ["tiny"]
    assert "max-num-seqs = 7  # ours" in config.read_text()
    assert log.read(server.layout.audit)[0][-1]["event"] == "gone-back"
    forth = server.rollback()
    assert forth.release == two.release
    assert server.serving()["models"].keys() == {"tiny", "more"}
    # What was gone back to is no step down, what was never here is.
    server.rollback()
    assert server.install(bundle(1)).outcome == "already-installed"


def test_rollback_with_nothing_to_go_back_to(server: Server, bundle: Bundles) -> None:
    with pytest.raises(InstallError, match="no Atoll installation"):
        server.rollback()
    server.install(bundle(1))
    with pytest.raises(InstallError, match="no release to go back to") as caught:
        server.rollback()
    assert caught.value.exit_code == ExitCode.USAGE
    assert server.serving()["mode"] == "good"


def test_a_downgrade_needs_a_reason_and_records_it(server: Server, bundle: Bundles) -> None:
    server.install(bundle(2))
    with pytest.raises(InstallError) as caught:
        server.install(bundle(1))
    assert caught.value.exit_code == ExitCode.DOWNGRADE
    assert "--allow-downgrade" in caught.value.hint
    server.install(bundle(1), allow_downgrade="ticket 4711")
    found = [record for record in log.read(server.layout.audit)[0] if record["event"] == "downgrade-allowed"]
    assert [(record["reason"], record["sequence"], record["was"]) for record in found] == [("ticket 4711", 1, 2)]
    with pytest.raises(InstallError):
        server.install(bundle(1, "none"))  # the barrier itself was not lowered


def test_uninstall_keeps_what_cannot_be_made_again(server: Server, bundle: Bundles) -> None:
    one = server.install(bundle(1))
    server.uninstall(purge=False)
    layout = server.layout
    assert not list(layout.units.rglob("atoll*"))
    assert not layout.opt.exists()
    assert not layout.command.is_symlink()
    assert Path(one.model_dir).is_dir()
    assert layout.config.is_file()
    again = server.install(bundle(1))
    assert again.api_key is None, "the key of before still opens the door"
    assert again.key_ids == one.key_ids


def test_purge_leaves_nothing(server: Server, bundle: Bundles) -> None:
    before = tree(server.root)
    passwd = (server.root / "etc/passwd").read_text()
    server.install(bundle(1))
    server.install(bundle(2))
    (server.layout.units / "atoll-engine@.service.d").mkdir()
    (server.layout.units / "atoll-engine@.service.d/own.conf").write_text("[Service]\n")
    server.uninstall(purge=True)
    left = tree(server.root) - before - THEIRS
    assert {path for path in left if not path.startswith("etc/") or "atoll" in path} == set()
    assert (server.root / "etc/passwd").read_text() == passwd
    assert "atoll" not in (server.root / "etc/group").read_text()


def test_a_stranger_s_command_is_left_alone(server: Server, bundle: Bundles) -> None:
    server.layout.command.write_text("#!/bin/sh\n")
    witness = Witness()
    server.install(bundle(), witness=witness)
    assert any("left alone" in note for note in witness.notes)
    server.uninstall(purge=True)
    assert server.layout.command.read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("settings, apart", [
    ({"max-num-seqs": 3}, False), ({"gpu-memory-utilization": 0.3}, True), ({"kv-cache-memory-bytes": "64M"}, True),
])  # fmt: skip
def test_engines_that_trade_memory_end_before_the_others_begin(
    server: Server, bundle: Bundles, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], apart: bool
) -> None:
    """A single model may change its claims freely; of several, one may need memory that another still holds."""
    asked = []
    real = SystemdService.switch

    def switch(self: SystemdService, *given: Any, hand_over: bool = True) -> Any:
        asked.append(hand_over)
        return real(self, *given, hand_over=hand_over)

    monkeypatch.setattr(SystemdService, "switch", switch)
    server.install(models=[ModelChoice(bundle(1), "tiny")])
    server.install(models=[ModelChoice(bundle(1), "tiny", settings=settings)])
    assert asked == [True]
    server.install(models=[ModelChoice(bundle(2), "second")])
    server.install(models=[ModelChoice(bundle(2), "second", settings=settings)])
    assert asked == [True, True, not apart]
