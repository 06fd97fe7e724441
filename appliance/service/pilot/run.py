"""A running pilot: one stage after another is sampled and judged, and ends when a stop condition holds.

It continues where its events end. Time in which nobody watched (a killed process, a restarted machine) counts for no
stage. If a watcher ends without a result, only the users that `way_back` names stay admitted.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from appliance.series import Recorder, Series, SeriesError, Store, Window
from appliance.service.dashboard.key import KEY as WATCHER_KEY
from appliance.service.jobs.frontend import JobFrontend
from appliance.service.jobs.process import Work
from appliance.service.pilot import records as events
from appliance.service.pilot.check import check
from appliance.service.pilot.kpi import judged, measure, tripped
from appliance.service.pilot.plan import PilotPlan, Stage
from appliance.service.pilot.records import PilotState, Records
from appliance.service.planning import cost
from appliance.service.verification.subject import KEY_NAME as VERIFICATION_KEY
from appliance.service.verification.subject import Subject, of_installation
from installer.access import api_keys
from installer.audit import log
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.messages import encode
from installer.service.reload import reload_gateway

KEY_NAME = "atoll pilot"      # of the key that the watcher makes and removes
_SPARE = (KEY_NAME, VERIFICATION_KEY, WATCHER_KEY)


class PilotRequest(BaseModel):
    """`plan`: starts a new pilot; None continues the open one."""

    model_config = ConfigDict(frozen=True)

    plan: PilotPlan | None = None
    by: str = ""


def pilot_work(request: PilotRequest, layout: Layout) -> Work:
    def work(frontend: JobFrontend) -> dict[str, Any]:
        return run(layout, request, frontend)

    return work


def run(layout: Layout, request: PilotRequest, frontend: JobFrontend) -> dict[str, Any]:
    """Run the pilot to its end. Raises InstallError; what was recorded stays, and the next run continues."""
    if not layout.state.is_dir():
        raise nothing_installed()
    with Records(layout, "pilot") as records:
        by = request.by or str(log.operator()["user"])
        plan = _begin(records, request)
        check(layout, plan)
        with (
            of_installation(layout, key_name=KEY_NAME, scopes=("metrics",)) as subject,
            _store(layout, plan, frontend) as store,
        ):
            watch = _Watch(layout, plan, records, Recorder(subject.target, store), subject, frontend, by)
            try:
                watch.stages()
            except BaseException:
                watch.withdraw_users()
                raise
        return summary(records.state)


def summary(state: PilotState) -> dict[str, Any]:
    return {"outcome": state.outcome, "stages": [
        {"name": each.name, "status": each.status, "kpi": each.kpi, "why": each.why} for each in state.stages]}


def admit(layout: Layout, chosen: list[str] | None) -> None:
    """Let in only these users; None: everybody. A change reaches the gateway at once."""
    wanted = None if chosen is None or "*" in chosen else chosen
    if api_keys.admit(layout.api_keys, wanted, spare=_SPARE):
        reload_gateway(layout)


def abort(layout: Layout, by: str) -> str:
    """End the open pilot and let everybody in again; what was done, in words. A running one is asked to end."""
    try:
        with Records(layout, "pilot stop") as records:
            state = records.state
            if state.open:
                number = state.current
                if number is not None and state.stages[number].status == "running":
                    records.add("ended", stage=number, status="stopped", end=None, kpi={}, findings=[],
                                why=[encode(t("stopped by {by}", by=by))], by=by)  # fmt: skip
                records.add("closed", outcome="aborted", by=by)
            admit(layout, None)
            return t("No pilot is running; every API key may use the service again.")
    except InstallError as error:
        if error.exit_code != ExitCode.BUSY:
            raise
    events.ask(layout, "stop", by)
    return t("The running pilot was asked to stop.")


def advance(layout: Layout, by: str) -> str:
    """Begin the next stage of the running pilot. Raises InstallError (usage) where that cannot be."""
    from installer.base.lock import holder

    state = events.read(layout)
    if not state.open or state.plan is None or state.current is None:
        raise usage_error(t("No pilot is running."), t("Start one: {command}", command="atoll pilot start --plan FILE"))
    if holder(events.lock_of(layout)) is None:
        raise usage_error(t("Nobody watches the pilot right now."),
                          t("Continue it: {command}", command="atoll pilot start"))  # fmt: skip
    stage, now = state.plan.stages[state.current], state.stages[state.current]
    left = stage.duration
    if now.start is not None:
        with contextlib.suppress(SeriesError), Series(events.series_of(layout)) as series:
            left = stage.duration - series.window(now.start, series.last_at or now.start).seconds
    if left > 0:
        raise usage_error(t("Stage {name} has {left:.0f} s left.", name=stage.name, left=left),
                          t("Wait, or end the pilot: {command}", command="atoll pilot stop"))  # fmt: skip
    events.ask(layout, "advance", by)
    return t("The next stage begins.")


def _begin(records: Records, request: PilotRequest) -> PilotPlan:
    state = records.state
    if state.open and state.plan is not None:
        if request.plan is not None and request.plan != state.plan:
            raise InstallError(
                t("A pilot with another plan is running."), exit_code=ExitCode.BUSY,
                changed=t("Nothing was changed."),
                hint=t("Continue it: atoll pilot start. Or end it first: atoll pilot stop"),
            )  # fmt: skip
        return state.plan
    if request.plan is None or not request.plan.stages:
        raise usage_error(t("There is no pilot to continue."),
                          t("Start one: {command}", command="atoll pilot start --plan FILE"))  # fmt: skip
    return request.plan


@contextlib.contextmanager
def _store(layout: Layout, plan: PilotPlan, frontend: JobFrontend) -> Any:
    try:
        store = Store(events.series_of(layout), most_gap=max(3 * plan.interval, 3.0))
        with store:
            if store.opened.set_aside is not None:
                frontend.note(t("The time series was damaged; a new one was started, the old one is {path}.",
                                path=store.opened.set_aside))  # fmt: skip
            yield store
    except SeriesError as error:
        raise InstallError(
            t("The time series {path} cannot be written: {why}.", path=events.series_of(layout), why=error),
            exit_code=ExitCode.IO,
            changed=t("Nothing was changed."),
            hint=t("Make room on the disk, then run this again."),
        ) from error


class _Watch:
    def __init__(
        self, layout: Layout, plan: PilotPlan, records: Records, recorder: Recorder, subject: Subject,
        frontend: JobFrontend, by: str, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.layout, self.plan, self.records, self.recorder = layout, plan, records, recorder
        self.subject, self.frontend, self.by, self._sleep = subject, frontend, by, sleep
        values = cost.assumed(plan.cost)
        gpus = values["gpus_per_engine"] * len(subject.models)
        self._per_hour = sum(cost.per_hour(values, gpus).values()) + cost.staff_per_hour(values)
        self._seen = self._kept = time.monotonic()
        self._at: float | None = None
        self._advance = False

    def stages(self) -> None:
        events.asked(self.layout)  # of an earlier run
        at = self.recorder.sample()
        if at is None or not self.recorder.up:
            why = self.recorder.why or t("/metrics does not answer")
            raise InstallError(
                t("The service cannot be watched: {why}.", why=why), exit_code=ExitCode.UNHEALTHY,
                changed=t("Nothing was changed."), hint=t("Look at it: {command}", command="atoll status"),
            )  # fmt: skip
        self._at = at
        if not self.records.state.open:
            self.records.add("planned", plan=self.plan.model_dump(mode="json"), by=self.by)
        while (number := self.records.state.current) is not None:
            if not self._stage(number):
                return
        self.records.add("closed", outcome="done", by=self.by)

    def withdraw_users(self) -> None:
        """Shut out the stage's users when the watcher ends before the stage: nobody may use what nobody watches."""
        state = self.records.state
        number = state.current
        if state.open and number is not None and state.stages[number].status == "running":
            with contextlib.suppress(InstallError, OSError):
                admit(self.layout, self._back(number))

    def _stage(self, number: int) -> bool:
        """Whether the next one may begin."""
        stage, state = self.plan.stages[number], self.records.state.stages[number]
        start = state.start
        if start is None:
            start = self._at or 0.0
            self.records.add("began", stage=number, name=stage.name, users=stage.users, start=start, by=self.by)
        self._advance, self._seen, self._kept = False, time.monotonic(), time.monotonic()
        self.frontend.step(stage.name, "begin")
        while True:
            admit(self.layout, stage.users)
            self._sleep(self.plan.interval)
            why = self._sample(stage, start)
            asked = events.asked(self.layout)
            if asked is not None and asked[0] == "stop":
                self._end(number, start, "stopped", [t("stopped by {by}", by=asked[1])])
                self.records.add("closed", outcome="aborted", by=asked[1])
                admit(self.layout, None)
                return False
            if why:
                return self._way_back(number, start, "stopped", why)
            seconds = self._window(start).seconds
            self._advance |= asked is not None and asked[0] == "advance" and seconds >= stage.duration
            last = number + 1 == len(self.plan.stages)
            self.frontend.progress(stage.name, int(min(seconds, stage.duration)), int(stage.duration))
            if seconds >= stage.duration and (last or stage.advance == "auto" or self._advance):
                missed = self._missed(stage, start)
                if missed:
                    return self._way_back(number, start, "missed", missed)
                self._end(number, start, "passed", [])
                self.frontend.step(stage.name, "done")
                return True

    def _sample(self, stage: Stage, start: float) -> list[str]:
        """Take one sample; which stop conditions hold now."""
        at, now, patience = self.recorder.sample(), time.monotonic(), stage.stop.down or float("inf")
        if self.recorder.up:
            self._seen = now
        if at is None:
            if now - self._kept > (stage.stop.down or 60.0):
                return [t("no sample can be kept: {why}", why=self.recorder.why)]
            return []
        self._at, self._kept = at, now
        if now - self._seen > patience:
            return [t("/metrics has not answered for {seconds:.0f} s", seconds=now - self._seen)]
        return tripped(self._window(max(start, at - stage.stop.window)), stage.stop)

    def _window(self, start: float) -> Window:
        with Series(events.series_of(self.layout)) as series:
            return series.window(start, self._at or start)

    def _missed(self, stage: Stage, start: float) -> list[str]:
        kpi = measure(self._window(start), stage.goal)
        return [t("{title}: {seen}, needed {limit}", title=each.title, seen=each.observed, limit=each.required)
                for each in judged(kpi, stage.goal) if not each.ok]  # fmt: skip

    def _way_back(self, number: int, start: float, status: str, why: list[str]) -> bool:
        admit(self.layout, self._back(number))  # first of all: protect the users from what tripped
        self._end(number, start, status, why)
        self.frontend.step(self.plan.stages[number].name, "failed", joined(why, "; "))
        self.records.add("closed", outcome="stopped", by=self.by)
        return False

    def _back(self, number: int) -> list[str]:
        stage = self.plan.stages[number]
        return self.plan.stages[number - 1].users if stage.way_back == "previous" and number else []

    def _end(self, number: int, start: float, status: str, why: list[str]) -> None:
        goal = self.plan.stages[number].goal
        kpi = measure(self._window(start), goal, per_hour=self._per_hour)
        found = [each.to_json() for each in judged(kpi, goal)]
        self.records.add("ended", stage=number, name=self.plan.stages[number].name, status=status, end=self._at,
                         kpi=kpi.model_dump(), why=[encode(each) for each in why], findings=found, by=self.by)


def nothing_installed() -> InstallError:
    return usage_error(t("Nothing is installed that a pilot could use."), t("Install first: atoll checklist run"))
