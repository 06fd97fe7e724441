"""A prefix, a signed bundle and the real service below the screens."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE / "pictures", HERE.parent / "appliance/service"):
    sys.path.insert(0, str(folder))
_spec = importlib.util.spec_from_file_location("service_fixtures", HERE.parent / "appliance/service/conftest.py")
assert _spec is not None
assert _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)

bundle, signer, site = _fixtures.bundle, _fixtures.signer, _fixtures.site
desk, scripted, _jobs_of_this_test = _fixtures.desk, _fixtures.scripted, _fixtures._jobs_of_this_test


@pytest.fixture(autouse=True)
def _forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is forked, so that it keeps this test's directory of jobs and its scripted server."""
    from appliance.service.jobs import launch
    from appliance.service.jobs.kinds import work_of
    from installer.base.layout import Layout

    def fork(job) -> int:
        return launch._fork(job, work_of(job.spec, Layout.at(job.spec["prefix"])))

    monkeypatch.setattr(launch, "_spawn", fork)
    monkeypatch.setenv("ATOLL_LANG", "en")
