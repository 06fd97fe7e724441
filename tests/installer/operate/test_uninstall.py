"""Uninstall: what stays by default, what a purge removes, and what neither ever touches."""

from collections.abc import Callable
from pathlib import Path

import pytest
from installer_kit import Site, tree

from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.operate.status import status
from installer.operate.uninstall import plan_uninstall, uninstall

Bundles = Callable[..., Path]


def test_by_default_what_cannot_be_made_again_stays(site: Site, bundle: Bundles) -> None:
    one = site.install(bundle())
    assert one.api_key is not None
    plan = plan_uninstall(site.layout, purge=False)
    uninstall(site.layout, purge=False, service=site.service)
    assert not site.service.pids()
    for path, _ in plan.remove:
        assert not path.exists()
    for path, _ in plan.keep:
        assert path.exists()
    assert Path(one.model_dir).exists()
    assert [key["id"] for key in api_keys.read(site.layout.api_keys)] == one.key_ids
    assert status(site.layout)["state"] == "not-installed"

    again = site.install(bundle())
    assert again.outcome == "installed"
    assert again.api_key is None
    assert site.ask(one.api_key) == 200


def test_purge_leaves_nothing(site: Site, bundle: Bundles) -> None:
    site.install(bundle(1))
    site.install(bundle(2))
    uninstall(site.layout, purge=True, service=site.service)
    assert not site.prefix.exists()


def test_a_prefix_that_was_there_before_stays_with_what_else_is_in_it(site: Site, bundle: Bundles) -> None:
    (site.prefix / "var/lib/other").mkdir(parents=True)
    (site.prefix / "var/lib/other/data").write_text("mine")
    (site.prefix / "etc").mkdir()
    site.install(bundle())
    uninstall(site.layout, purge=True, service=site.service)
    assert tree(site.prefix) == {"var", "var/lib", "var/lib/other", "var/lib/other/data", "etc"}


def test_a_symlink_planted_inside_is_removed_not_followed(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    site.install(bundle())
    (site.layout.cache / "link").symlink_to(outside)
    (site.layout.releases / "link").symlink_to(outside)
    uninstall(site.layout, purge=True, service=site.service)
    assert (outside / "precious").read_text() == "keep me"
    assert not site.prefix.exists()


def test_a_symlink_in_place_of_our_directory_is_refused(site: Site, bundle: Bundles, tmp_path: Path) -> None:
    site.install(bundle())
    site.service.stop()
    outside = tmp_path / "outside"
    site.layout.cache.rename(outside)
    (outside / "precious").write_text("keep me")
    site.layout.cache.symlink_to(outside)
    before = tree(site.prefix)
    with pytest.raises(InstallError, match="symlink") as caught:
        uninstall(site.layout, purge=True, service=site.service)
    assert caught.value.exit_code == ExitCode.USAGE
    assert tree(site.prefix) == before
    assert (outside / "precious").exists()


def test_a_directory_that_is_not_ours_is_refused(site: Site) -> None:
    (site.prefix / "opt/atoll").mkdir(parents=True)
    (site.prefix / "opt/atoll/file").write_text("not ours")
    with pytest.raises(InstallError) as caught:
        uninstall(site.layout, purge=True, service=site.service)
    assert caught.value.exit_code == ExitCode.USAGE
    assert (site.prefix / "opt/atoll/file").exists()
