"""A tuning from request to result: run the trials, keep the best one, and never leave the service broken."""

import hashlib
import json
import secrets
import time
from typing import Any

from appliance.service.jobs.frontend import JobFrontend
from appliance.service.planning import model_and_gpu
from appliance.service.presets.catalogue import GpuModel, catalogue
from appliance.service.presets.resolve import find as find_preset
from appliance.service.tuning import advice, records
from appliance.service.tuning.knobs import Knobs, Pinned, Traffic, engine_config, preset_values
from appliance.service.tuning.measure import (
    LoadDriver,
    Measured,
    ProfileLoad,
    lack_of,
    measured_of,
    parse_target,
    profile_called,
)
from appliance.service.tuning.records import Records, Session, name_of
from appliance.service.tuning.request import MOST_TRIALS, TuneRequest
from appliance.service.tuning.score import beats
from appliance.service.tuning.search import Failure, Position, Space, Trial, best_of, propose
from engine.errors import KILLED, OUT_OF_MEMORY
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.messages import decode, encode
from installer.base.timestamps import new_run_id
from installer.operate.settings_trial import SettingsTrial
from installer.release.config import with_dashes


class Tuning:
    """One run of a session. `driver` None: use the load of the request's profile."""

    def __init__(
        self, layout: Layout, request: TuneRequest, frontend: JobFrontend, *, driver: LoadDriver | None = None
    ) -> None:
        self.layout, self.request, self.frontend = layout, request, frontend
        self.slo = parse_target(request.target)
        self.profile = profile_called(request.profile)
        self.driver = driver or ProfileLoad(self.profile, self.slo, request.seconds_of_load)
        arrival = self.profile.arrival
        self.clients = arrival.clients or arrival.max_concurrency
        self._measured: dict[Position, Measured] = {}
        self._why: dict[Position, str] = {}
        self._trials: list[Trial] = []
        self._running: Position | None = None
        self._began = time.monotonic()
        self._spent_before = 0.0
        self.trial: SettingsTrial
        self.records: Records
        self.session: Session
        self.space: Space
        self.pinned: list[Pinned] = []

    def run(self) -> dict[str, Any]:
        """Returns the result. Raises InstallError, OSError; the settings from before the tuning are in force then."""
        request = self.request
        trial = SettingsTrial(self.layout, self.frontend, request.model, start_timeout=request.start_timeout)
        with trial as self.trial:
            if request.fresh:
                records.mend(self.layout)
            with Records(self.layout, new_run_id()) as self.records:
                self._plan_search()
                stopped = self._search()
                return self._conclude(stopped)

    # -- the request

    def _plan_search(self) -> None:
        trial, request = self.trial, self.request
        model = trial.model
        config = engine_config(self.layout, model.instance)
        card = None if config.device == "cpu" else model_and_gpu.card(None)
        ours = records.ours(self.records.records, model.instance)
        for name, value in self._preset(card).items():
            ours.setdefault(name, []).append(value)
        knobs = Knobs(config, trial.settings(), Traffic(self.clients, self.profile.longest), card=card, ours=ours,
                      only=request.only)  # fmt: skip
        self.space, self.pinned = knobs.space()
        if knobs.is_unplanned:
            self.frontend.note(t("This GPU's memory cannot be planned: what does not fit is found by trying."))
        for pinned in self.pinned:
            if not request.only:
                self.frontend.note(t("{name} stays at {value}: {why}.", name=pinned.name,
                                     value=advice.shown(pinned.value), why=pinned.why))  # fmt: skip
        if not self.space.knobs:
            raise usage_error(
                t("There is nothing to tune: every setting is fixed."),
                t("Remove your own values from {path}, or name settings that may change: --only max-num-seqs",
                  path=self.layout.config),
            )
        self._open_session()

    def _preset(self, card: GpuModel | None) -> dict[str, Any]:
        """The values of the named preset, or of the one that this model has for this traffic."""
        name = self.request.preset
        if name is None:
            model = self.trial.model.manifest.name
            if model not in catalogue().models or card is None or self.profile.name not in catalogue().workloads:
                return {}
            name = f"{model}/{self.profile.name}"
            try:
                return preset_values(find_preset(name, card))
            except InstallError:  # it does not fit here, so no search has started from it
                return {}
        return preset_values(find_preset(name, card))

    def _open_session(self) -> None:
        question = self._question()
        found = None if self.request.fresh else records.resumable(self.records.records, question)
        if found is not None:
            self.session = found
            self._spent_before = found.seconds
            self._take_over(found)
            self.frontend.note(t("Continuing the interrupted tuning: {count} trials are already done.",
                                 count=len(found.ended)))  # fmt: skip
            return
        name = secrets.token_hex(4)
        facts = self.records.add(
            "session", session=name, question=question, model=self.trial.model.instance, by=self.request.by,
            target=self.request.target, profile=self.profile.name, budget=self.request.budget,
            knobs={knob.name: list(knob.values) for knob in self.space.knobs},
            start=self.space.setting(self.space.start),
        )  # fmt: skip
        self.session = Session(name, facts)

    def _question(self) -> str:
        """Hash of everything that the trials' results depend on."""
        knobs = [[knob.name, list(knob.values), knob.start] for knob in self.space.knobs]
        model = self.trial.model
        tuned = {knob.name for knob in self.space.knobs}
        rest = {name: value for name, value in self.trial.settings().items()
                if name.replace("_", "-") not in tuned}  # fmt: skip
        facts = [self.request.target, self.profile.model_dump(mode="json"), self.request.seconds_of_load, model.digest,
                 model.instance, self.trial.context.target().name, knobs, rest]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _take_over(self, session: Session) -> None:
        for record in session.ended:
            position = self.space.position(record["setting"])
            if position is None or record.get("confirms"):
                continue
            measured = measured_of(record["result"]) if record.get("result") else None
            if measured is not None or position != self.space.start:  # all else builds on the start
                self._take(position, measured, record.get("failure"), decode(record.get("why", "")))
        for name in session.begun:
            position = self._position_called(name)
            if session.cut_off(name) and position not in (None, self.space.start):
                self._take(position, None, "start", t("it was interrupted twice"))

    def _position_called(self, name: str) -> Position | None:
        for record in self.records.records:
            if record["event"] == "began" and record["trial"] == name and record["session"] == self.session.id:
                return self.space.position(record["setting"])
        return None

    # -- trials

    @property
    def _spent(self) -> float:
        return self._spent_before + time.monotonic() - self._began

    def _search(self) -> str:
        """Try until nothing is left, or the budget is used up. Returns the reason for ending, as a Text."""
        while True:
            best = best_of(self.space, self._trials)
            known = self._measured.get(best.position) if best else None
            position = propose(self.space, self._trials, lack_of(known, self.clients))
            if position is None:
                return t("no setting near the best one is left to try")
            if len(self._trials) >= MOST_TRIALS:
                return t("{count} trials were made", count=len(self._trials))
            if self._trials and self._spent + 2 * self._longest_trial() > self.request.budget:
                return t("the budget of {seconds} s is used up", seconds=int(self.request.budget))
            self._try(position)
            if position == self.space.start and position not in self._measured:
                raise self._start_failed()

    def _longest_trial(self) -> float:
        """Seconds that the next trial may take."""
        times = [float(record["seconds"]) for record in self.records.records
                 if record["event"] == "ended" and record["session"] == self.session.id]
        return max(times, default=self.request.seconds_of_load)

    def _try(self, position: Position, *, confirms: bool = False) -> Measured | None:
        """Start with this setting, put the load on it, record the result."""
        setting = self.space.setting(position)
        name = name_of(setting)
        number = len(self._trials) + 1
        label = t("after") if confirms else t("trial {number}", number=number)
        self.frontend.step(label, "begin")
        about = {"number": number, "confirms": confirms, "setting": setting,
                 "what": advice.changes(self.space, position), "budget": self.request.budget,
                 "target": self.request.target}  # fmt: skip
        self._tell({**about, "status": "running", "spent": round(self._spent, 1)})
        self.records.add("began", session=self.session.id, trial=name, setting=setting)
        began = time.monotonic()
        measured, failure, why = None, None, ""
        try:
            if self._running != position:
                self._running = None
                self.trial.start_with(setting)
                self._running = position
            measured = self._load()
            if measured.problem or not self.trial.alive():
                why = measured.problem or t("the engine ended under load")
                measured, failure, self._running = None, "load", None
        except InstallError as error:
            self._running = None
            failure, why = failure_of(error), error.message
        seconds = time.monotonic() - began
        result = measured.to_json() if measured else None
        self.records.add("ended", session=self.session.id, trial=name, setting=setting, failure=failure,
                         why=encode(why), seconds=round(seconds, 2), result=result, confirms=confirms)  # fmt: skip
        if not confirms:
            self._take(position, measured, failure, why)
        self._tell({**about, "status": "done" if measured else "failed", "why": why, "seconds": round(seconds, 1),
                    "result": result, "spent": round(self._spent, 1)})  # fmt: skip
        said = advice.line(self.space, position, measured, why)
        self.frontend.step(label, "done" if measured else "skipped", said)
        return measured

    def _tell(self, facts: dict[str, Any]) -> None:
        """Report one trial to those who watch."""
        if isinstance(self.frontend, JobFrontend):
            self.frontend.numbers("trial", facts)

    def _load(self) -> Measured:
        trial = self.trial

        def told(answers: int, seconds: int) -> None:
            self.frontend.progress(t("load: {count} answers", count=answers), seconds, 0)

        return self.driver(trial.context.endpoint, trial.model.instance, trial.key, told)

    def _take(self, position: Position, measured: Measured | None, failure: Failure | None, why: str) -> None:
        self._trials.append(Trial(position, measured.score if measured else None, failure))
        self._why[position] = why
        if measured is not None:
            self._measured[position] = measured

    def _start_failed(self) -> InstallError:
        """The current settings are tried first; without their result there is nothing to compare with."""
        return InstallError(
            t("The current settings cannot handle this load: {why}.", why=self._why[self.space.start]),
            exit_code=ExitCode.UNHEALTHY,
            changed=t("The settings were not changed."),
            hint=t("Check the service and the profile: atoll status, atoll logs"),
        )

    # -- the end

    def _conclude(self, stopped: str) -> dict[str, Any]:
        best = best_of(self.space, self._trials)
        assert best is not None
        before = self._measured[self.space.start]
        after, kept, confirmed = self._measured[best.position], best.position != self.space.start, True
        if kept:
            again = self._try(best.position, confirms=True)
            confirmed = again is not None and not beats(before.score, again.score)
            after = again or after
        if kept and confirmed:
            self._keep(best.position)
        result = self._result(best.position if kept and confirmed else self.space.start, before, after, stopped,
                              confirmed=confirmed)  # fmt: skip
        self.records.add("closed", session=self.session.id, result=result)
        return result

    def _keep(self, position: Position) -> None:
        setting = self.space.setting(position)
        own = with_dashes(self.trial.own_settings())
        before = {name: own.get(name) for name in setting}
        self.records.add("keeping", session=self.session.id, model=self.trial.model.instance, setting=setting,
                         before=before)  # fmt: skip
        self.trial.keep(setting=setting, target=self.request.target, by=self.request.by)

    def _result(
        self, position: Position, before: Measured, after: Measured, stopped: str, *, confirmed: bool
    ) -> dict[str, Any]:
        kept = position != self.space.start
        start, setting = self.space.setting(self.space.start), self.space.setting(position)
        shown = after if kept else before
        met = None if not self.slo else shown.score.met
        return encode({
            "model": self.trial.model.instance,
            "outcome": "changed" if kept else "unchanged",
            "target": self.request.target,
            "target_met": met,
            "profile": self.profile.name,
            "setting": setting,
            "changed": {name: [start[name], setting[name]] for name in setting if setting[name] != start[name]},
            "before": before.to_json(),
            "after": shown.to_json(),
            "reason": advice.reason(before, after, kept=kept, confirmed=confirmed),
            "helps": advice.helps(shown, self.clients) if met is False else [],
            "stopped": stopped,
            "pinned": [{"name": each.name, "value": each.value, "why": each.why} for each in self.pinned],
            "trials": [
                {"setting": self.space.setting(trial.position), "failure": trial.failure,
                 "why": self._why[trial.position],
                 "result": m.to_json() if (m := self._measured.get(trial.position)) else None}
                for trial in self._trials
            ],
            "seconds": round(self._spent, 1),
        })  # fmt: skip


def failure_of(error: InstallError) -> Failure:
    """"memory" if more memory would have helped: then no setting that needs even more is tried."""
    return "memory" if error.error_id in (OUT_OF_MEMORY, KILLED) else "start"
