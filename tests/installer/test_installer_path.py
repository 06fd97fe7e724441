"""The whole path: a first install, a second one, an upgrade."""

from collections.abc import Callable
from pathlib import Path

from installer_kit import Site


def test_first_install_serves_and_second_is_recognised(site: Site, bundle: Callable[..., Path]) -> None:
    first = site.install(bundle())
    assert first.outcome == "installed"
    assert first.api_key.startswith("sk-")
    pid = site.service.state().pid
    again = site.install(bundle())
    assert again.outcome == "already-installed"
    assert site.service.state().pid == pid
