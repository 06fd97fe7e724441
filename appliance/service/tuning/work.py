"""Tuning as a job: started, watched and cancelled like an install; and the reset to the settings from before."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.service import jobs
from appliance.service.jobs.attach import JobReader
from appliance.service.jobs.frontend import JobFrontend
from appliance.service.jobs.guard import start_guard
from appliance.service.jobs.process import Work
from appliance.service.tuning import records
from appliance.service.tuning.measure import LoadDriver, parse_target, profile_called
from appliance.service.tuning.records import Records
from appliance.service.tuning.request import TuneRequest
from appliance.service.tuning.run import Tuning
from installer.base.errors import usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.lock import refuse_if_busy
from installer.base.messages import decode
from installer.base.timeouts import START_TIMEOUT
from installer.base.timestamps import new_run_id
from installer.operate.settings_trial import SettingsTrial, recover
from installer.release.config import with_dashes


def run_tuning(
    layout: Layout, request: TuneRequest, reader: JobReader, *, driver: LoadDriver | None = None
) -> dict[str, Any]:
    """Tune as a job and follow it. Returns its result, with texts. Raises the InstallError with which it ended."""
    request = checked(request)
    refuse_if_busy(layout.lock)
    work = tune_work(request, layout, driver)
    result, _ = jobs.run(layout, "tune", work, reader, kind="tune", given=request.to_json(), interactive=False)
    return decode(result)


def checked(request: TuneRequest) -> TuneRequest:
    """With an absolute path to a profile's file, because a job has its own working directory. Raises InstallError."""
    parse_target(request.target)
    profile_called(request.profile)
    path = Path(request.profile).expanduser()
    return request.model_copy(update={"profile": str(path.absolute())}) if path.is_file() else request


def tune_work(request: TuneRequest, layout: Layout, driver: LoadDriver | None = None) -> Work:
    def work(frontend: JobFrontend) -> dict[str, Any]:
        return tune(request, layout, frontend, driver)

    return work


def tune(
    request: TuneRequest, layout: Layout, frontend: JobFrontend, driver: LoadDriver | None = None
) -> dict[str, Any]:
    """Tune in this process, which is a job's. If it is killed, its guard restores the proven settings."""
    start_guard(frontend.job)
    recover(layout, frontend, timeout=request.start_timeout)
    return Tuning(layout, request, frontend, driver=driver).run()


def run_reset(layout: Layout, model: str | None, reader: JobReader, *, by: str | None = None) -> dict[str, Any]:
    """Go back to the settings from before the first tuning, as a job. Raises InstallError."""
    given = {"model": model, "by": by}
    result, _ = jobs.run(
        layout, "tune reset", reset_work(given, layout), reader, kind="tune-reset", given=given, interactive=False
    )
    return decode(result)


def reset_work(given: dict[str, Any], layout: Layout) -> Work:
    def work(frontend: JobFrontend) -> dict[str, Any]:
        start_guard(frontend.job)
        recover(layout, frontend)
        with (
            SettingsTrial(layout, frontend, given["model"]) as trial,
            Records(layout, new_run_id("reset")) as events,
        ):
            instance = trial.model.instance
            before = records.original(events.records, instance)
            if not before:
                raise usage_error(
                    t("No setting of {model} was tuned, so there is nothing to go back to.", model=instance),
                    "atoll tune show",
                )
            frontend.step(t("settings"), "begin")
            seconds = trial.start_with(before)
            frontend.step(t("settings"), "done", t("ready in {seconds:.1f} s", seconds=seconds))
            trial.keep(setting=before, reset=True, by=given["by"])
            events.add("reset", model=instance, setting=before)
        return {"model": instance, "setting": before}

    return work


def set_exactly(
    layout: Layout, model: str | None, settings: Mapping[str, Any], frontend: JobFrontend, *,
    timeout: float = START_TIMEOUT,
) -> None:  # fmt: skip
    """Start the engine with these settings, in this process, which is a job's, and keep them. Raises InstallError; the
    settings from before are in force then."""
    start_guard(frontend.job)
    recover(layout, frontend, timeout=timeout)
    with (
        SettingsTrial(layout, frontend, model, start_timeout=timeout) as trial,
        Records(layout, new_run_id("set")) as events,
    ):
        frontend.step(t("settings"), "begin")
        seconds = trial.start_with(settings)
        frontend.step(t("settings"), "done", t("ready in {seconds:.1f} s", seconds=seconds))
        own = with_dashes(trial.own_settings())
        before = {name: own.get(name) for name in settings}
        events.add("keeping", session="", model=trial.model.instance, setting=dict(settings), before=before)
        trial.keep(setting=dict(settings), by_hand=True)


def last(layout: Layout, model: str | None = None) -> dict[str, Any] | None:
    """The result of the last tuning, with texts; None if none has ended. Raises InstallError, OSError."""
    record = records.last_result(records.read(layout), model)
    return decode({**record["result"], "at": record["at"]}) if record else None


def work_of_spec(kind: str, given: dict[str, Any], layout: Layout) -> Work:
    """The work of a job's process, from its stored request."""
    return reset_work(given, layout) if kind == "tune-reset" else tune_work(TuneRequest.model_validate(given), layout)
