"""atoll.toml over the years: older formats are converted, newer ones refused, and nothing of the operator's is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from installer_kit import Site, Witness

from installer.base.errors import ExitCode, InstallError
from installer.release import config, migrate

Bundles = Callable[..., Path]
PATH = Path("/etc/atoll/atoll.toml")
OLD = """\
# Settings of the box in the cellar
# ask Kim before touching

[serve]   # the service
port = 1234          # agreed with the network people
max-num-seqs = 4

[notes]
owner = "ops"  # keep
"""


def test_an_old_file_gets_a_number_and_keeps_every_other_byte() -> None:
    text, had = migrate.migrate(OLD, PATH)
    assert had == 1
    assert tomlkit.parse(text)["schema_version"] == migrate.current() == 2
    assert text.replace("schema_version = 2\n", "", 1) == OLD
    assert migrate.migrate(text, PATH) == (text, 2)


@pytest.mark.parametrize("number", ["3", "99", "0", "-1", "true", "'2'"])
def test_a_number_that_is_not_ours_is_refused(number: str) -> None:
    with pytest.raises(InstallError, match="schema_version") as caught:
        migrate.migrate(f"schema_version = {number}\n", PATH)
    assert caught.value.exit_code == ExitCode.USAGE


def test_steps_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(document: Any) -> None:
        document["serve"]["max-requests"] = document["serve"].pop("max-num-seqs")

    monkeypatch.setitem(migrate.STEPS, 2, rename)
    text, had = migrate.migrate(OLD, PATH)
    assert had == 1
    found = tomlkit.parse(text).unwrap()
    assert found["schema_version"] == 3
    assert found["serve"] == {"port": 1234, "max-requests": 4}
    assert "# agreed with the network people" in text


def test_an_upgrade_brings_old_settings_up_and_keeps_them_beside(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    old = site.layout.config.read_text().replace("schema_version = 2\n", "# ours\n")
    site.layout.config.write_text(old)
    witness = Witness()
    site.install(bundle(2), witness=witness)
    assert "# ours" in site.layout.config.read_text()
    assert "schema_version = 2" in site.layout.config.read_text()
    assert site.layout.config.with_name("atoll.toml.v1").read_text() == old
    assert any("atoll.toml.v1" in note for note in witness.notes)


def test_a_rollback_of_an_upgrade_puts_the_old_form_back(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    old = site.layout.config.read_text().replace("schema_version = 2\n", "")
    site.layout.config.write_text(old)
    with pytest.raises(InstallError):
        site.install(bundle(2), "mute")
    assert site.layout.config.read_text() == old


def test_settings_of_a_newer_atoll_are_refused(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    newer = site.layout.config.read_text().replace("schema_version = 2", "schema_version = 3")
    site.layout.config.write_text(newer)
    with pytest.raises(InstallError, match="schema_version = 3") as caught:
        site.install(bundle(2))
    assert caught.value.exit_code == ExitCode.USAGE
    assert site.layout.config.read_text() == newer
    assert site.serving()["mode"] == "good"


def test_a_server_s_settings_keep_the_operator_s_words() -> None:
    first = config.render_server(None, {"host": "::", "port": 8443}, {"a": {"model": "/a"}, "b": {"model": "/b"}}, PATH)
    mine = first.replace("[models.a]\n", "# the big one\n[models.a]\nmax-model-len = 9  # tested\n")
    mine += "\n[engine]\ngpu-memory-utilization = 0.8\n"
    second = config.render_server(mine, {"host": "::", "port": 1}, {"a": {"model": "/c"}}, PATH)
    assert "# the big one\n[models.a]\nmax-model-len = 9  # tested\n" in second
    assert config.model_tables(second, PATH) == {
        "a": {"gpu-memory-utilization": 0.8, "max-model-len": 9, "model": "/c"}
    }
    assert config.render_server(second, {"host": "::", "port": 1}, {"a": {"model": "/c"}}, PATH) == second
