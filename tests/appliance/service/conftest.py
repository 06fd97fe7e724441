"""The installer's tiny signed bundle and its site, for a checklist that installs it."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

INSTALLER_TESTS = Path(__file__).resolve().parents[2] / "installer"
sys.path.insert(0, str(INSTALLER_TESTS))
_spec = importlib.util.spec_from_file_location("installer_fixtures", INSTALLER_TESTS / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)

bundle, signer, site = _fixtures.bundle, _fixtures.signer, _fixtures.site


@pytest.fixture(autouse=True)
def _jobs_of_this_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of tests stay apart from those of this machine."""
    from appliance.service.jobs import spool

    base = tmp_path_factory.mktemp("run") / "atoll-jobs"
    monkeypatch.setattr(spool, "_base", lambda: base)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``scripted("good")``: installs run the scripted server in this mode."""
    from installer_kit import FAKE_SERVE

    from appliance.service import facts
    from appliance.service.steps import install
    from installer.operate.install import Installer

    def use(mode: str) -> None:
        command = (sys.executable, "-S", "-E", str(FAKE_SERVE), mode)
        for module in (facts, install):
            monkeypatch.setattr(module, "Installer", functools.partial(Installer, release_command=command))

    use("good")
    return use


@pytest.fixture
def desk(site, bundle, signer, scripted) -> object:
    from checklist_kit import Desk

    return Desk(site, bundle(), signer, scripted)
