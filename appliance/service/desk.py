"""What any user interface of the checklist needs: it reads the state, takes decisions and starts runs."""

import contextlib
import getpass
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.service import answers as answers_of
from appliance.service import checklist, events, jobs
from appliance.service.facts import MachineFacts, machine_facts
from appliance.service.jobs import Job
from appliance.service.jobs.attach import JobReader, LetGo
from appliance.service.jobs.seat import Person, Seat
from appliance.service.run_request import RunRequest
from appliance.service.state import State
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.journal import History, intact
from installer.base.layout import Layout
from installer.operate.install import key_was_shown
from installer.release import config
from installer.service.log_file import readable, tail

if TYPE_CHECKING:
    from appliance.service.dashboard.control import Action
    from appliance.service.pilot.board import PilotBoard
    from appliance.service.pilot.edit import StageField
    from appliance.service.pilot.plan import PilotPlan
    from appliance.service.planning.offers import Offer
    from appliance.service.trouble import Trouble
    from appliance.service.tuning.board import Board

__all__ = ["Desk", "InstallError", "Job", "Layout", "LetGo", "MachineFacts", "Person"]


_LOG_LINES = 200
_HAND_OVER_SECONDS = 3.0


class Desk:
    """Answers given here stay in memory until a run takes them; the run saves them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.answers = checklist.last_answers(layout)
        self.by = getpass.getuser()
        self.seat: Seat | None = None
        self._waived: set[str] = set()     # by the operator of this desk
        self.troubles: list[Trouble] = []  # as of the last look
        self.key_is_unseen = False         # the endpoint's key was made while no terminal was there to show it

    def sit_down(self, asked: Callable[[Person | None], None], changed: Callable[[], None]) -> None:
        """Become the operator in control, or watch the one who is; see jobs/seat.py."""
        with contextlib.suppress(OSError, InstallError):  # without a place for a seat there is none for a job either
            self.seat = Seat(self.layout, asked, changed).open()

    def close(self) -> None:
        if self.seat is not None:
            self.seat.close()

    def somebody_else(self) -> Person | None:
        """Who works here, if that is not the operator of this desk."""
        return self.seat.holder() if self.seat is not None else None

    def _may_work(self) -> None:
        other = self.somebody_else()
        if other is not None:
            raise InstallError(
                t("{user} ({origin}) works here.", user=other.user, origin=other.origin),
                exit_code=ExitCode.BUSY, changed=t("Nothing was changed."), hint=t("Ask to take over: F11."),
            )  # fmt: skip

    def state(self) -> State:
        state = checklist.show(self.layout, self.answers)
        with contextlib.suppress(OSError, InstallError):  # a user who may not read the journal has made no key
            self.key_is_unseen = bool(History(intact(self.layout.journal)).unshown_keys)
        return state

    def machine(self) -> MachineFacts:
        return machine_facts(self.layout)

    def look_for_trouble(self) -> list["Trouble"]:
        """What is wrong now; about a second where there is a GPU. Kept in `troubles`."""
        from appliance.service.trouble import troubles

        try:
            self.troubles = troubles(self.layout, self.answers.medium)
        except (InstallError, OSError):  # the state cannot be read: `state` says why
            self.troubles = []
        return self.troubles

    def trouble_of(self, error: InstallError) -> "Trouble | None":
        """The cause behind an error that work ended with; None if the error says it all."""
        from appliance.service.trouble import Scene, of_error

        return of_error(error, Scene(self.layout.prefix_option, port=self.answers.port or self.standing_port()))

    def log_tail(self) -> list[str]:
        """The last lines of the service's log, for people."""
        from appliance.service.trouble import gather

        if not self.layout.system:
            return [readable(line) for line in tail(self.layout.log, _LOG_LINES)]
        return list(gather(self.layout).log_tail)

    def signature(self) -> tuple[object, ...]:
        """Changes when the state may have changed. Cheap enough to be called every second."""
        with contextlib.suppress(OSError):
            facts = os.stat(events.path_of(self.layout))
            return facts.st_mtime_ns, facts.st_size, self._job_name()
        return (self._job_name(),)

    def job(self) -> Job | None:
        """The job that runs now, started by anybody."""
        job = jobs.newest(self.layout)
        return job if job is not None and job.state() in ("starting", "running") else None

    def place(self, medium: str, key: str, by: str) -> None:
        """Set the paths of the medium and the vendor's key, and who decides. Raises InstallError (usage)."""
        self.answers = self.answers.model_copy(update={
            "medium": [_whole(medium)] if medium else [], "bundle": None,
            "trust_keys": [_whole(key)] if key else [],
        })  # fmt: skip
        self.by = f"{by} ({getpass.getuser()})" if by and by != getpass.getuser() else getpass.getuser()

    def standing_port(self) -> int | None:
        """Where the endpoint listens if the answers name no port; None if the settings cannot be read."""
        with contextlib.suppress(InstallError, OSError):
            return config.standing(self.layout).port
        return None

    def listen(self, port: int | None) -> None:
        """Set the endpoint's port; None keeps the one that is installed, or the default. A waiver of another port is
        dropped."""
        standing, before = self.standing_port(), self.answers.port
        self.answers = self.answers.model_copy(update={"port": port})
        if (port or standing) != (before or standing):
            self.answers = checklist.without_waivers(self.answers, [checklist.PORT_CHECK])
            self._waived.discard(checklist.PORT_CHECK)

    def load(self, path: str) -> None:
        """Raises InstallError (usage) that names what is wrong in the file."""
        self.answers = answers_of.read(_whole(path))
        self._waived.clear()

    def amend(self, **tables: dict[str, Any] | list[Any] | None) -> None:
        """Put values into tables of the answers; None takes one away. Raises InstallError (usage) for a wrong one."""
        values = answers_of.to_json(self.answers)
        for name, table in tables.items():
            if isinstance(table, dict):
                both = {**values.get(name, {}), **table}
                values[name] = {key: value for key, value in both.items() if value is not None}
            else:
                values[name] = table
        self.answers = answers_of.checked({name: value for name, value in values.items() if value is not None})

    def offers(self) -> list["Offer"]:
        """The models of the medium. Loads PyTorch; raises InstallError."""
        from appliance.service.planning.offers import offers

        return offers(self.layout, self.answers)

    def boards(self) -> list["Board"]:
        """The knobs of what is installed. Loads PyTorch; raises InstallError."""
        from appliance.service.tuning.board import boards

        return boards(self.layout, self.answers.preset)  # type: ignore[attr-defined]

    def pilot(self) -> "PilotBoard":
        """The started pilot with its current state, or else the planned one. Raises InstallError."""
        from appliance.service.pilot.board import board

        return board(self.layout, self._planned)

    def stage_fields(self, number: int) -> "list[tuple[StageField, str]]":
        """The fields of a planned stage, and what stands in each."""
        from appliance.service.pilot import edit

        stands = edit.typed(self._planned.stages[number])
        return [(field, stands[field.name]) for field in edit.FIELDS]

    def change_stage(self, number: int, values: dict[str, str]) -> None:
        """Raises InstallError (usage) that names the field."""
        from appliance.service.pilot import edit

        self.amend(pilot={"stages": edit.changed(self.layout, self._planned, number, values)})

    def add_stage(self) -> None:
        """One more stage, like the last one. Raises InstallError (usage)."""
        from appliance.service.pilot import edit

        self.amend(pilot={"stages": edit.added(self._planned)})

    def remove_stage(self, number: int) -> None:
        """Raises InstallError (usage) for the only stage."""
        from appliance.service.pilot import edit

        self.amend(pilot={"stages": edit.removed(self._planned, number)})

    @property
    def _planned(self) -> "PilotPlan":
        return self.answers.pilot  # type: ignore[attr-defined]

    def next_stage(self) -> str:
        """Let the pilot's next stage begin; what was done, in words. Raises InstallError."""
        from appliance.service.pilot.run import advance

        self._may_work()
        return advance(self.layout, self.by)

    def stop_pilot(self) -> str:
        from appliance.service.pilot.run import abort

        self._may_work()
        return abort(self.layout, self.by)

    def sign_pilot(self, by: str, *, go: bool, reason: str = "") -> Path:
        """Raises InstallError, OSError; the directory of the signed report."""
        from appliance.service.pilot.report import sign

        self._may_work()
        directory = self.layout.checklist / "reports"
        return sign(self.layout, directory, "go" if go else "no-go", by, reason).directory

    def control(self, action: "Action") -> str:
        """Start, stop or restart the service, or go back; what was done, in words. Raises InstallError."""
        from appliance.service.dashboard import control

        self._may_work()
        return control.do(self.layout, action)

    def waive(self, finding: str, reason: str) -> None:
        self.answers = self.answers.model_copy(update={"waivers": {**self.answers.waivers, finding: reason}})
        self._waived.add(finding)

    def run(self, step: str, reader: JobReader) -> tuple[dict, dict[str, str]]:
        """Run one step to its end as a job. Returns its result and what it handed over. Raises InstallError."""
        self._may_work()
        request = RunRequest(answers=answers_of.to_json(self.answers), steps=(step,), by=self.by, interactive=True,
                             waived=tuple(sorted(self._waived)))  # fmt: skip
        return self._learned(lambda: checklist.run(self.layout, request, reader, fresh=True))

    def attach(self, job: Job, reader: JobReader) -> tuple[dict, dict[str, str]]:
        """Answer the questions of a running job, or only watch it if another terminal does that. Raises
        InstallError."""
        end = time.monotonic() + _HAND_OVER_SECONDS
        while True:
            try:
                self._may_work()
                return self._learned(lambda: jobs.attach(job, reader))
            except InstallError as error:
                if error.exit_code != ExitCode.BUSY or job.state() == "ended":
                    raise
            if self.somebody_else() is not None or time.monotonic() > end:
                break
            time.sleep(0.05)  # the front before this one lets go of the job
        if (watching := getattr(reader, "watching", None)) is not None:
            watching()
        return jobs.watch(job, reader), {}

    def key_was_shown(self, result: dict) -> None:
        key_was_shown(self.layout, result["key_ids"])

    def export(self) -> Path:
        """Write the current answers into the working directory. Raises OSError."""
        path = Path.cwd() / "atoll-answers.toml"
        fs.write_atomic(path, answers_of.text_of(self.answers), 0o600)
        return path

    def report(self) -> list[Path]:
        """Write the report of all steps into the working directory. Raises OSError, InstallError."""
        from appliance.service import checklist_report

        return checklist_report.write(self.state(), Path.cwd())

    def _learned(self, work: Callable[[], tuple[dict, dict[str, str]]]) -> tuple[dict, dict[str, str]]:
        """Do the work, then take over the answers that the run was given or learned. A run that did not begin has saved
        none."""
        began = True
        try:
            return work()
        except InstallError as error:
            began = error.exit_code != ExitCode.BUSY
            raise
        finally:
            if began:
                with contextlib.suppress(InstallError):
                    self.answers = checklist.last_answers(self.layout)

    def _job_name(self) -> str | None:
        job = jobs.newest(self.layout)
        return f"{job.id} {job.locked()}" if job is not None else None


def _whole(path: str) -> Path:
    return Path(path).expanduser().absolute()
