"""A tuning of the real small model under a prefix: killed at every recorded point, cancelled, starved, contradicted.

Whatever happens, the service answers afterwards, with the settings that had proved themselves.
"""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import Front, die
from real_service import install, signed

from appliance.service import jobs
from appliance.service.tuning import records
from appliance.service.tuning.measure import LoadDriver, Measured, ProfileLoad, parse_target, profile_called
from appliance.service.tuning.records import Records
from appliance.service.tuning.request import TuneRequest
from appliance.service.tuning.run import failure_of
from appliance.service.tuning.score import Score
from appliance.service.tuning.work import last, run_reset, run_tuning, set_exactly
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import History, Journal, intact
from installer.base.layout import Layout
from installer.base.lock import holder
from installer.operate.lifecycle import start, stop
from installer.operate.settings_trial import SettingsTrial, is_open
from installer.release import config
from installer.service.choice import service_for
from installer.service.smoke_test import health

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROFILE = """\
endpoint = "completions"
input = [8, 12]
output = [2, 4]
requests = 4
warmup = 0
[arrival]
clients = 2
"""


@dataclasses.dataclass
class Place:
    """An installation of the demonstration's model."""

    layout: Layout
    profile: Path

    def request(self, **more: Any) -> TuneRequest:
        given = {"profile": str(self.profile), "budget": 900.0, "load_seconds": 1.0, "only": ("max-num-seqs",)}
        return TuneRequest(**{**given, **more})

    @property
    def settings(self) -> str:
        return self.layout.config.read_text()

    def serves(self) -> bool:
        return health(config.standing(self.layout))[0]

    def await_settled(self) -> None:
        """Wait until nobody works on it and nothing is open, as a guard ensures after a kill."""
        end = time.monotonic() + 60
        while holder(self.layout.lock) is not None or is_open(self.layout) or not self.serves():
            assert time.monotonic() < end, intact(self.layout.journal)[-3:]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, signer: Any) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("tuned")
    layout = install(signed(smollm2_dir, root, signer), root / "prefix", signer, Front())
    (root / "tiny.toml").write_text(PROFILE)
    yield Place(layout, root / "tiny.toml")
    stop(layout)


@pytest.fixture
def place(installed: Place) -> Iterator[Place]:
    """As installed: nothing tuned, serving."""
    before = installed.settings
    yield installed
    installed.await_settled()
    records.path_of(installed.layout).unlink(missing_ok=True)
    if installed.settings != before:
        installed.layout.config.write_text(before)
        stop(installed.layout)
    start(installed.layout, Front())  # type: ignore[arg-type]


def liking(place: Place, setting: str) -> LoadDriver:
    """The real load, but the best score belongs to `setting`: on a busy machine, measured scores are in no order."""
    request = place.request()
    real = ProfileLoad(profile_called(request.profile), parse_target(request.target), request.seconds_of_load)

    def drive(endpoint: Any, model: str, key: str, on_progress: Callable[[int, int], None]) -> Measured:
        measured = real(endpoint, model, key, on_progress)
        good = 4.0 if setting in place.settings else 1.0
        return dataclasses.replace(measured, score=Score(good, 0.0, good))

    return drive


def tune(place: Place, request: TuneRequest | None = None, driver: LoadDriver | None = None) -> dict[str, Any]:
    return run_tuning(place.layout, request or place.request(), Front(), driver=driver)  # type: ignore[arg-type]


def test_the_best_is_kept_shown_and_taken_back(place: Place) -> None:
    before = place.settings
    request = place.request()
    result = tune(place, request, liking(place, "max-num-seqs = 1"))
    assert (result["outcome"], result["changed"]) == ("changed", {"max-num-seqs": [None, 1]}), result
    assert "more requests per second" in result["reason"]
    assert result["after"]["goodput"] > result["before"]["goodput"]
    assert "max-num-seqs = 1" in place.settings
    assert place.serves()
    shown = last(place.layout)
    assert shown is not None
    assert shown["changed"] == {"max-num-seqs": [None, 1]}
    # A second tuning starts from there, and may change its own value, but not an operator's.
    again = tune(place, request, liking(place, "max-num-seqs = 1"))
    assert again["outcome"] == "unchanged"
    assert run_reset(place.layout, None, Front())["setting"] == {"max-num-seqs": None}  # type: ignore[arg-type]
    assert place.settings == before
    assert place.serves()
    with pytest.raises(InstallError, match="nothing to go back to"):
        run_reset(place.layout, None, Front())  # type: ignore[arg-type]
    place.await_settled()


def test_what_a_person_chose_is_kept_if_it_serves(place: Place) -> None:
    before = place.settings

    def by_hand(settings: dict[str, Any]) -> None:
        def work(frontend: Any) -> dict[str, Any]:
            set_exactly(place.layout, None, settings, frontend, timeout=60.0)
            return {}

        jobs.run(place.layout, "tune", work, Front(), kind="tune", given={}, interactive=False)  # type: ignore[arg-type]

    by_hand({"max-num-seqs": 3})
    assert "max-num-seqs = 3" in place.settings
    assert place.serves()
    with pytest.raises(InstallError):
        by_hand({"max-num-seqs": 5, "max-model-len": 100_000_000})  # more than any model knows
    place.await_settled()
    assert "max-num-seqs = 3" in place.settings
    assert place.serves()
    assert run_reset(place.layout, None, Front())["setting"] == {"max-num-seqs": None}  # type: ignore[arg-type]
    assert place.settings == before


def test_killed_at_every_recorded_point_it_goes_on_and_the_service_stays(place: Place, tmp_path: Path) -> None:
    """Each run dies after the first event that no run before it has reached, until one comes to the end."""
    before, request = place.settings, place.request()
    seen = tmp_path / "seen"
    seen.touch()

    def first_time(label: str) -> bool:
        if label in seen.read_text().splitlines():
            return False
        with seen.open("a") as file:
            file.write(label + "\n")
        return True

    real_journal, real_record = Journal.add, Records.add

    def journalled(self: Journal, event: str, **data: Any) -> dict:
        record = real_journal(self, event, **data)
        if self._fd >= 0 and self.run != "start" and "trial" not in data and event not in ("session", "closed") and (
                first_time(f"journal {event} {data.get('step', '')}")):  # fmt: skip
            die()
        return record

    def recorded(self: Records, event: str, **data: Any) -> dict:
        record = real_record(self, event, **data)
        if first_time(f"record {event} {data.get('trial', '')} {data.get('confirms', '')}"):
            die()
        return record

    committed = History(intact(place.layout.journal)).committed
    runs = 0
    result = None
    while result is None:
        runs += 1
        assert runs < 40
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "add", journalled)
            patch.setattr(Records, "add", recorded)
            try:
                result = tune(place, request, liking(place, "max-num-seqs = 1"))
            except InstallError as error:
                assert "was killed" in error.message, error.message  # noqa: PT017
        place.await_settled()
        kept = History(intact(place.layout.journal)).committed != committed
        assert ("max-num-seqs = 1" in place.settings) == kept
        assert kept or place.settings == before
    labels = seen.read_text().splitlines()
    assert {"record session  ", "record began max-num-seqs=auto ", "record ended max-num-seqs=auto False",
            "record ended max-num-seqs=1 False", "record ended max-num-seqs=1 True", "record keeping  ",
            "record closed  ", "journal switch ", "journal begin smoke", "journal begin commit", "journal commit ",
            } <= set(labels)  # fmt: skip
    assert runs >= len(labels)
    ended = [r for r in records.read(place.layout) if r["event"] == "ended" and not r["confirms"]]
    sessions = {record["session"] for record in ended}
    for session in sessions:  # no trial was made twice
        trials = [record["trial"] for record in ended if record["session"] == session]
        assert len(trials) == len(set(trials))


def test_cancelled_it_goes_back_and_the_next_run_goes_on(place: Place) -> None:
    before = place.settings

    class Cancelling(Front):
        def step(self, name: str, status: str, detail: str = "") -> None:
            super().step(name, status)
            if (name, status) == ("trial 2", "begin"):
                job = jobs.newest(place.layout)
                assert job is not None
                job.cancel()

    with pytest.raises(InstallError) as caught:
        run_tuning(place.layout, place.request(), Cancelling())  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert place.settings == before
    assert place.serves()
    place.await_settled()
    front = Front()
    result = run_tuning(place.layout, place.request(), front)  # type: ignore[arg-type]
    assert any("Continuing the interrupted tuning: 1 trials" in note for note in front.notes)
    assert ("trial 1", "begin") not in front.steps
    assert len(result["trials"]) == 2


def test_a_target_that_nothing_meets_keeps_the_best_and_says_what_would_help(place: Place) -> None:
    result = tune(place, place.request(target={"ttft": 0.01, "itl": 0.01}))
    assert result["target_met"] is False
    assert result["before"]["excess"] > 0
    assert any("fewer users" in text for text in result["helps"])
    assert place.serves()


def test_the_operators_own_value_is_not_touched(place: Place) -> None:
    place.layout.config.write_text(place.settings + "max_num_seqs = 7\n")
    front = Front()
    result = run_tuning(place.layout, place.request(only=(), budget=40.0), front)  # type: ignore[arg-type]
    assert "max_num_seqs = 7" in place.settings
    assert [each["name"] for each in result["pinned"]] == ["max-num-seqs"]
    assert any("the operator's own value" in note for note in front.notes)


def test_the_engine_dies_under_load(place: Place) -> None:
    """The engine dies in the second trial: that trial does not count, and the settings from before come back."""
    request, before = place.request(), place.settings
    real = ProfileLoad(profile_called(request.profile), parse_target({}), 3.0)

    def drive(endpoint: Any, model: str, key: str, on_progress: Callable[[int, int], None]) -> Measured:
        alive = "max-num-seqs" in place.settings

        def progress(done: int, seconds: int) -> None:
            nonlocal alive
            if alive and done:  # earlier, it would be an endpoint that never answered
                alive = False
                pids = service_for(place.layout).pids()
                for pid in pids - {min(pids)}:
                    os.kill(pid, signal.SIGKILL)
            on_progress(done, seconds)

        return real(endpoint, model, key, progress)

    result = tune(place, request, drive)
    assert result["outcome"] == "unchanged"
    failed = result["trials"][1]
    assert failed["failure"] == "load"
    assert failed["why"]
    assert place.settings == before
    assert place.serves()


def test_a_lack_of_memory_is_told_from_a_refused_setting(place: Place) -> None:
    with SettingsTrial(place.layout, Front()) as trial:  # type: ignore[arg-type]
        with pytest.raises(InstallError) as short:
            trial.start_with({"kv-cache-memory-bytes": "1k"})
        with pytest.raises(InstallError) as refused:
            trial.start_with({"max-model-len": 10_000_000})
    assert (short.value.error_id, failure_of(short.value)) == ("out-of-memory", "memory")
    assert (refused.value.error_id, failure_of(refused.value)) == ("settings", "start")
    assert place.serves()


def test_a_full_disk_while_a_trial_is_recorded(place: Place) -> None:
    before, real = place.settings, Records.add

    def add(self: Records, event: str, **data: Any) -> dict:
        if event != "ended":
            return real(self, event, **data)
        size = records.path_of(place.layout).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, resource.RLIM_INFINITY))
        try:
            return real(self, event, **data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InstallError, match="file-size limit") as caught:
        patch.setattr(Records, "add", add)
        tune(place)
    assert caught.value.exit_code == ExitCode.IO
    assert place.settings == before
    assert place.serves()
    place.await_settled()
    assert tune(place)["trials"]


def test_two_operators_at_once(place: Place) -> None:
    seen: list[int] = []

    class Second(Front):
        def step(self, name: str, status: str, detail: str = "") -> None:
            if (name, status) == ("trial 1", "begin"):
                with pytest.raises(InstallError, match="Another Atoll command") as caught:
                    run_tuning(place.layout, place.request(), Front())  # type: ignore[arg-type]
                seen.append(caught.value.exit_code)

    run_tuning(place.layout, place.request(), Second())  # type: ignore[arg-type]
    assert seen == [ExitCode.BUSY]


def test_a_damaged_record_is_told_and_mended(place: Place) -> None:
    tune(place)
    place.await_settled()
    path = records.path_of(place.layout)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + b"".join(lines[1:]))
    with pytest.raises(InstallError, match="damaged at line 2") as caught:
        tune(place)
    assert caught.value.exit_code == ExitCode.IO
    place.await_settled()
    assert tune(place, place.request(fresh=True))["trials"]


def test_the_command(place: Place, tmp_path: Path) -> None:
    """The command as it is typed: what is refused at once, what it prints, its exit codes."""
    environment = {**os.environ, "ATOLL_PREFIX": str(place.layout.prefix), "COLUMNS": "120", "ATOLL_LANG": "en",
                   "XDG_RUNTIME_DIR": str(tmp_path)}  # fmt: skip

    def atoll(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "appliance.cli", "tune", *words], capture_output=True, text=True,
                              timeout=200, env=environment, stdin=subprocess.DEVNULL)  # fmt: skip

    assert "Nothing has been tuned" in atoll("show").stdout
    common = ["--yes", "--profile", str(place.profile), "--load-seconds", "1", "--only", "max-num-seqs"]
    nonsense = tmp_path / "nonsense.toml"
    nonsense.write_text('input = "many"\n[arrival]\nclients = 0\n')
    for words, said in [
        ([], "This needs a yes"),
        (["--yes", "--target", "ttft=0ms"], "is not a target"),
        (["--yes", "--target", "speed=9"], "is not a target"),
        (["--yes", "--budget", "1s"], "--budget 1s cannot be used"),
        (["--yes", "--budget", "soon"], "Give a time from 30s to 24h"),
        (["--yes", "--profile", "nobody"], "nobody"),
        (["--yes", "--profile", str(nonsense)], "clients"),
        (["--yes", "--load-seconds", "0"], "--load-seconds 0"),
        ([*common, "--only", "max-model-len"], "cannot be tuned here"),
        ([*common, "--model", "other"], "No model called other"),
        ([*common, "--preset", "gemma4-31b/nothing"], "no preset"),
    ]:
        refused = atoll(*words)
        assert refused.returncode == ExitCode.USAGE, (words, refused.stderr)
        assert said in refused.stderr, (words, refused.stderr)
    done = atoll(*common, "--target", "ttft=0.01ms", "--json")
    assert done.returncode == ExitCode.PREFLIGHT_FAIL, done.stderr
    result = json.loads(done.stdout)
    assert result["target_met"] is False
    assert "trial 1" in done.stderr
    shown = atoll("show")
    assert "would help" in shown.stdout
    assert "not met" in shown.stdout
    assert json.loads(atoll("show", "--json").stdout)["tuned"] is True


def test_a_service_that_is_stopped_is_not_tuned(place: Place) -> None:
    stop(place.layout)
    with pytest.raises(InstallError, match="does not answer") as caught:
        tune(place)
    assert caught.value.exit_code == ExitCode.UNHEALTHY
    assert "atoll start" in caught.value.hint
    start(place.layout, Front())  # type: ignore[arg-type]
