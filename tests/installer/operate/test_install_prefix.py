"""The whole path: a first install, a second one, upgrades, and rollbacks."""

import errno
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from installer_kit import SAMPLES, Site, Witness, tree

from installer.access import api_keys
from installer.audit import log
from installer.base import journal
from installer.base.errors import ExitCode, InstallError
from installer.operate.install import STEPS
from installer.operate.status import status
from installer.operate.uninstall import uninstall

Bundles = Callable[..., Path]


def test_first_install_serves_and_the_second_is_recognised(site: Site, bundle: Bundles) -> None:
    witness = Witness()
    first = site.install(bundle(), witness=witness)
    assert first.outcome == "installed"
    assert first.api_key is not None
    assert first.api_key.startswith("sk-")
    assert [name for name, state in witness.steps if state == "done"] == list(STEPS)
    assert first.smoke is not None
    assert (first.smoke["text"], first.smoke["tokens"], first.smoke["finish_reason"]) == ("Hello", 2, "stop")
    assert site.serving()["model"] == first.model_dir

    before = site.service.state()
    began = time.monotonic()
    second = site.install(bundle())
    assert time.monotonic() - began < 20
    assert second.outcome == "already-installed"
    assert second.api_key is None
    assert second.key_ids == first.key_ids
    assert site.service.state() == before  # the same process: nothing was restarted
    assert site.ask(first.api_key) == 200


def test_the_tree_is_as_designed_and_secrets_are_closed(site: Site, bundle: Bundles) -> None:
    result = site.install(bundle())
    layout = site.layout
    assert layout.current.readlink() == Path("releases") / result.release
    info = json.loads((layout.current / "release.json").read_text())
    assert info["bundle"]["name"] == "tiny"
    wrapper = (layout.current / "bin/atoll").read_text()
    assert "PYTHONNOUSERSITE=1" in wrapper
    assert "HF_HUB_OFFLINE=1" in wrapper
    assert stat.S_IMODE(layout.api_keys.stat().st_mode) == 0o600
    assert stat.S_IMODE(layout.credentials.stat().st_mode) == 0o700
    assert stat.S_IMODE(layout.state.stat().st_mode) == 0o700
    for path in Path(result.model_dir).rglob("*"):
        assert not path.stat().st_mode & 0o222, f"{path} is writable"
    # The key's text is nowhere on the disk, and the smoke test's key is gone.
    assert result.api_key is not None
    for path in site.prefix.rglob("*"):
        if path.is_file():
            assert result.api_key.encode() not in path.read_bytes(), path
    assert [key["name"] for key in api_keys.read(layout.api_keys)] == ["first key, made at install"]
    serve = tomlkit.parse(layout.config.read_text())["serve"].unwrap()
    assert serve == {
        "model": result.model_dir,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": site.port,
        "api-key-file": str(layout.api_keys),
    }


def test_dry_run_prints_all_and_writes_nothing(site: Site, bundle: Bundles) -> None:
    witness = Witness(accepts=False, confirms=False)
    result = site.install(bundle(), witness=witness, dry_run=True)
    assert result.outcome == "dry-run"
    assert not site.prefix.exists()
    planned = {item.what for item in witness.plans[0].items if item.deed == "create" and item.what.startswith("/")}
    site.install(bundle())
    made = {str(site.prefix)} | {str(site.prefix / path) for path in tree(site.prefix)}
    missing = {path for path in planned if path not in made}
    assert not missing
    model = str(site.layout.models)
    transient = {"lock", ".lock", ".api-keys.json.lock", "supervisor.lock", "atoll.pid", "service.json"}
    told = {path for path in made if path not in planned and Path(path).name not in transient}
    told -= {path for path in told if path.startswith(str(site.prefix / SAMPLES))}  # the running service makes them
    unplanned = {path for path in told if not path.startswith(model) and Path(path).parent.name != "bin"}
    assert {Path(path).name for path in unplanned} <= {result.release, "bin"}


def test_an_upgrade_keeps_the_one_before_and_removes_older(site: Site, bundle: Bundles) -> None:
    one, two = site.install(bundle(1)), site.install(bundle(2))
    assert site.serving()["model"] == two.model_dir != one.model_dir
    assert two.api_key is None  # the key of the first install still opens the door
    assert Path(one.model_dir).exists()
    three = site.install(bundle(3))
    assert site.serving()["model"] == three.model_dir
    assert {path.name for path in site.layout.releases.iterdir()} == {two.release, three.release}
    assert not Path(one.model_dir).exists()
    assert Path(two.model_dir).exists()
    assert site.history.committed["previous"] == two.release  # type: ignore[index]
    assert one.api_key is not None
    assert site.ask(one.api_key) == 200


@pytest.mark.parametrize("mode", ["mute", "truncated", "crash"])
def test_a_release_that_does_not_answer_is_rolled_back(site: Site, bundle: Bundles, mode: str) -> None:
    good = site.install(bundle(1))
    settings = site.layout.config.read_text()
    with pytest.raises(InstallError) as caught:
        site.install(bundle(2), mode)
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert good.release in caught.value.changed
    assert caught.value.log_tail
    if mode == "crash":
        assert any("shard 2 is missing" in line for line in caught.value.log_tail)
    assert site.serving() == {"model": good.model_dir, "mode": "good"}
    assert site.layout.config.read_text() == settings
    assert good.api_key is not None
    assert site.ask(good.api_key) == 200
    assert status(site.layout)["state"] == "serving"
    # The failure raised no barrier: the same bundle may be tried again, and so may the old one.
    assert site.install(bundle(2)).outcome == "installed"


def test_a_service_that_never_becomes_ready_is_rolled_back_in_time(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    with pytest.raises(InstallError, match="not ready after 2 s: HTTP 503") as caught:
        site.install(bundle(2), "sick", start_timeout=2.0)
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert site.serving()["mode"] == "good"


def test_an_upgrade_whose_commit_cannot_be_recorded_is_rolled_back(
    site: Site, bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = site.install(bundle(1))
    write = journal.Journal._write

    def full(self: journal.Journal, records: list[journal.Record]) -> None:
        if any(record["event"] == "commit" for record in records):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "_write", full)
        with pytest.raises(InstallError) as caught:
            site.install(bundle(2))
    assert caught.value.exit_code == ExitCode.IO
    assert good.release in caught.value.changed
    assert site.serving()["model"] == good.model_dir
    assert site.history.open_switch is None
    assert site.install(bundle(2)).outcome == "installed"


def test_a_first_install_that_fails_leaves_nothing_running(site: Site, bundle: Bundles) -> None:
    with pytest.raises(InstallError) as caught:
        site.install(bundle(), "mute")
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert "Nothing runs" in caught.value.changed
    assert not site.layout.current.is_symlink()
    assert not site.layout.config.exists()
    assert not site.layout.api_keys.exists()
    assert not site.service.state().up
    assert status(site.layout)["state"] == "not-installed"
    assert site.install(bundle()).api_key is not None


def test_a_rollback_that_fails_says_so_and_a_new_run_goes_on(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle(1))
    wrapper = site.layout.releases / one.release / "bin/atoll"
    wrapper.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(InstallError) as caught:
        site.install(bundle(2), "mute")
    assert caught.value.exit_code == ExitCode.ROLLBACK_FAILED
    assert site.history.open_switch is not None
    assert status(site.layout)["state"] == "interrupted"
    assert site.install(bundle(2)).outcome == "installed"
    assert site.serving()["mode"] == "good"


def test_the_operators_settings_survive_an_upgrade(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    text = site.layout.config.read_text()
    site.layout.config.write_text(text + '# ours: small box\nmax-num-seqs = 4  # four\n\n[notes]\nowner = "ops"\n')
    result = site.install(bundle(2))
    after = site.layout.config.read_text()
    assert "# ours: small box\nmax-num-seqs = 4  # four\n" in after
    assert 'owner = "ops"' in after
    assert tomlkit.parse(after)["serve"]["model"] == result.model_dir  # type: ignore[index]


def test_another_port_restarts_the_same_release(site: Site, bundle: Bundles, free_port: Callable[[], int]) -> None:
    one = site.install(bundle())
    site.port = free_port()
    two = site.install(bundle())
    assert (two.outcome, two.release) == ("installed", one.release)
    assert site.serving()["mode"] == "good"
    assert site.install(bundle(), port=None).outcome == "already-installed"  # the port in the settings stands


def test_off_loopback_it_speaks_tls(site: Site, bundle: Bundles) -> None:
    result = site.install(bundle(), host="0.0.0.0")
    assert result.url == f"https://127.0.0.1:{site.port}/v1"
    assert result.certificate == str(site.layout.server_cert)
    assert stat.S_IMODE(site.layout.server_key.stat().st_mode) == 0o600
    assert site.install(bundle(), host="0.0.0.0").outcome == "already-installed"
    with pytest.raises(OSError, match=r"reset|closed|EOF|Remote end|wrong version"):
        site.serving()  # plain HTTP
    assert status(site.layout)["state"] == "serving"


def test_waivers_are_recorded(site: Site, bundle: Bundles) -> None:
    site.prefix.mkdir()
    (site.prefix / "etc/atoll").mkdir(parents=True)
    (site.prefix / "etc/atoll/own.conf").write_text("mine")
    with pytest.raises(InstallError, match="without a journal"):
        site.install(bundle())
    site.install(bundle(), waivers={"conflicts": "left by the operator"})
    waived = [record for record in log.read(site.layout.audit)[0] if record["event"] == "check-waived"]
    assert [(record["check"], record["reason"]) for record in waived] == [("conflicts", "left by the operator")]


def test_a_key_that_was_never_shown_is_replaced_without_a_restart(site: Site, bundle: Bundles) -> None:
    lost = site.install(bundle(), shown=False)
    before = site.service.state()
    again = site.install(bundle())
    assert again.outcome == "already-installed"
    assert again.api_key is not None
    assert site.service.state() == before
    assert lost.api_key is not None
    assert (site.ask(again.api_key), site.ask(lost.api_key)) == (200, 401)


def test_a_key_revoked_or_added_by_the_operator_is_left_alone(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle(1))
    mine = api_keys.add(site.layout.api_keys, "team a")
    site.install(bundle(2))
    assert site.ask(mine.text) == 200
    assert {key["id"] for key in api_keys.read(site.layout.api_keys)} == {mine.id, *one.key_ids}


def test_decisions_are_in_the_audit_log(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    site.install(bundle(2), port=site.port)
    records, wrong = log.read(site.layout.audit)
    assert wrong is None
    events = [record["event"] for record in records]
    assert events == [
        "licence-accepted", "key-trusted", "api-key-created", "committed", "licence-accepted", "committed",
    ]
    assert records[0]["spdx"] == "LicenseRef-Test"
    assert records[0]["who"]["user"]
    assert len(records[0]["sha256"]) == 64


def test_a_stopped_release_is_started_again_by_install(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle())
    site.service.stop()
    assert site.install(bundle()).release == one.release
    assert site.serving()["mode"] == "good"


def test_a_damaged_store_is_repaired_from_the_medium(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle())
    weights = Path(one.model_dir) / "model.safetensors"
    good = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(good[:-1] + b"\x07")
    witness = Witness()
    assert site.install(bundle(), witness=witness).outcome == "installed"
    assert any("store is damaged" in note for note in witness.notes)
    assert weights.read_bytes() == good


def test_a_damaged_journal_is_refused_until_somebody_says_repair(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    lines = site.layout.journal.read_bytes().splitlines(keepends=True)
    lines[3] = b"garbage\n"
    site.layout.journal.write_bytes(b"".join(lines))
    assert any("line 4" in problem["what"] for problem in status(site.layout)["problems"])
    damaged = site.layout.journal.read_bytes()
    for work in (lambda: site.install(bundle(2)), lambda: uninstall(site.layout, purge=True, service=site.service)):
        with pytest.raises(InstallError, match="damaged at line 4") as caught:
            work()
        assert caught.value.exit_code == ExitCode.IO
        assert "atoll journal repair" in caught.value.hint
    assert site.layout.journal.read_bytes() == damaged
    assert site.serving()["mode"] == "good"
    told = journal.repair(site.layout.journal)
    assert told is not None
    assert "line 4" in told
    assert journal.repair(site.layout.journal) is None
    assert [path.read_bytes() for path in site.layout.state.glob("journal.damaged-*")] == [damaged]
    site.install(bundle(2))
    assert status(site.layout)["problems"] == []
    assert site.history.committed["previous"]  # type: ignore[index]
