"""The install: a journalled state machine. It may be killed in any step and run again.

    discover -> verify -> preflight -> licence -> plan | stage -> units -> switch -> start -> smoke -> commit
    writes nothing, holds no lock                      | journalled, under the lock
                                                         (stage touches nothing that runs)
                                                                 | a failure rolls back

Whatever the disk can show, a step reads from the disk and not from the journal, and then does what is missing. The
journal holds what the disk cannot show: which release was committed, and what a switch replaced. Only the system form
has `units`.
"""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import History, Journal, intact
from installer.base.layout import Layout
from installer.base.lock import InstallLock, ignore_hangup
from installer.base.timestamps import new_run_id
from installer.decide.context import Context, Step, as_install_error
from installer.decide.frontend import Frontend
from installer.decide.install_options import InstallOptions
from installer.release import release
from installer.release.release import THIS_CODE
from installer.service.choice import service_for
from installer.service.manager import ServiceManager
from installer.service.smoke_test import health
from installer.steps import activate, approve, inspect, stage
from installer.steps.prune import prune
from installer.steps.undo import roll_back
from offline_bundle.errors import BundleError

Steps = tuple[tuple[str, Step], ...]
Outcome = Literal["installed", "already-installed", "dry-run", "rolled-back"]

LOOK: Steps = (
    ("discover", inspect.discover),
    ("verify", inspect.verify),
)
ASK: Steps = (
    ("preflight", approve.preflight),
    ("licence", approve.accept_licences),
    ("plan", approve.plan),
)
STAGE: Steps = (("stage", stage.stage),)
UNITS: Steps = (("units", activate.write_units),)
ACTIVATE: Steps = (
    ("switch", activate.switch),
    ("start", activate.start),
    ("smoke", activate.smoke),
    ("commit", activate.commit),
)
STEPS: tuple[str, ...] = tuple(name for name, _ in (*LOOK, *ASK, *STAGE, *ACTIVATE))
SYSTEM_STEPS: tuple[str, ...] = tuple(name for name, _ in (*LOOK, *ASK, *STAGE, *UNITS, *ACTIVATE))


@dataclass(frozen=True, slots=True)
class InstallResult:
    """The result of an install. `api_key` is set only in the run that made it. `model` is the first of `models`."""

    outcome: Outcome
    prefix: str
    release: str
    previous: str | None
    model: str
    model_dir: str
    models: list[dict[str, Any]]
    url: str
    certificate: str | None
    api_key: str | None
    key_ids: list[str]
    smoke: dict[str, Any] | None
    seconds: float
    startup_s: float | None = None
    downtime_s: float | None = None
    plan: dict[str, Any] | None = None
    preflight: list[dict[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Journalled:
    """What all commands that change an installation share: lock, journal, steps."""

    purpose = "install"

    def __init__(self, options: InstallOptions, frontend: Frontend, layout: Layout, service: ServiceManager) -> None:
        self.options = options
        self.frontend = frontend
        self.layout = layout
        self.service = service
        self.release_command = THIS_CODE
        self.began = time.monotonic()

    def _context(self) -> Context:
        past = intact(self.layout.journal)
        journal = Journal(new_run_id(), past)
        journal.add("run", command=self.purpose, pid=os.getpid())
        tools = (self.frontend, self.service, self.release_command, journal)
        return Context(self.options, self.layout, *tools, History(past), len(past))

    def _lock(self) -> InstallLock:
        return InstallLock(self.layout.lock, self.purpose)

    def _steps(
        self,
        context: Context,
        steps: Steps,
        changed: str = t("Nothing was changed."),
        *,
        passes_interrupt: bool = False,
    ) -> None:
        for name, step in steps:
            self.frontend.step(name, "begin")
            context.journal.add("begin", step=name)
            try:
                detail = step(context)
            except (InstallError, BundleError, OSError) as error:
                failure = _failure(name, error, changed)
                self._failed(context, name, failure)
                raise failure from error
            except KeyboardInterrupt:
                self.frontend.step(name, "failed", "interrupted")
                if passes_interrupt:
                    raise
                message = t("Interrupted during {name}.", name=name)
                raise InstallError(
                    message, exit_code=ExitCode.INTERRUPTED, changed=changed, hint=t("Run this again to continue.")
                ) from None
            context.journal.add("done", step=name, detail=detail)
            self.frontend.step(name, "done", detail)

    def _failed(self, context: Context, name: str, failure: InstallError) -> None:
        self.frontend.step(name, "failed", failure.message)
        with contextlib.suppress(OSError):  # the disk may be full; the error itself matters more than its record
            context.journal.add("failed", step=name, error=failure.message, exit_code=failure.exit_code)


class Run(Journalled, ABC):
    """What an install and a rollback share: the result, and undoing a failed switch."""

    def run(self) -> InstallResult:
        """Raises InstallError; nothing that matters is left half-done then."""
        try:
            return self._run()
        except OSError as error:
            raise io_error(t("use {name}", name=self.layout.name), error) from error

    @abstractmethod
    def _run(self) -> InstallResult: ...

    def _activate(self, context: Context) -> None:
        """The steps that touch what runs. Whatever stops them, the previous release is put back."""
        steps = (*(UNITS if self.layout.system else ()), *ACTIVATE)
        try:
            self._steps(context, steps, changed="", passes_interrupt=True)
        except InstallError as error:
            raise roll_back(context, error) from error
        except KeyboardInterrupt:
            interrupted = InstallError(t("Interrupted."), exit_code=ExitCode.INTERRUPTED, hint=t("Run this again."))
            raise roll_back(context, interrupted) from None

    def _result(self, context: Context, outcome: Outcome) -> InstallResult:
        committed = context.history.committed or {}
        first = context.models[0]
        return InstallResult(
            outcome=outcome,
            prefix=str(self.layout.prefix),
            release=context.target().name,
            previous=committed.get("previous"),
            model=first.instance,
            model_dir=str(context.model_dir(first)),
            models=[{**model.facts(), "path": str(context.model_dir(model))} for model in context.models],
            url=f"{context.endpoint.url}/v1",
            certificate=str(context.endpoint.certificate) if context.endpoint.certificate else None,
            api_key=context.new_key.text if context.new_key else None,
            key_ids=[key["id"] for key in api_keys.usable(self.layout.api_keys)],
            smoke=context.smoke.to_json() if context.smoke else committed.get("smoke"),
            seconds=round(time.monotonic() - self.began, 2),
            startup_s=context.startup_s,
            downtime_s=context.downtime_s,
            plan=context.plan.to_json() if context.plan else None,
            preflight=[check.to_json() for check in context.checks] or None,
        )


class Installer(Run):
    """One install or upgrade. Tests pass `layout`, `service` and `release_command` of their own."""

    def __init__(
        self,
        options: InstallOptions,
        frontend: Frontend,
        *,
        layout: Layout | None = None,
        service: ServiceManager | None = None,
        release_command: tuple[str, ...] = THIS_CODE,
    ) -> None:
        if layout is None:
            layout = Layout.server() if options.prefix is None else Layout.at(options.prefix)
        bundle = options.bundle.expanduser().absolute() if options.bundle else None
        media = [medium.expanduser().absolute() for medium in options.media]
        options = replace(options, bundle=bundle, media=media)
        super().__init__(options, frontend, layout, service or service_for(layout))
        self.release_command = release_command

    def look(self) -> Context:
        """What is here and which keys are trusted, without a look at the bundles. Raises InstallError, OSError."""
        context = self._context()
        inspect.discover(context)
        return context

    def survey(self) -> Context:
        """What this install would start from: the current installation, and the models according to their signed
        manifests.

        Hashes no model and writes nothing. Raises InstallError, OSError.
        """
        context = self._context()
        try:
            inspect.discover(context)
            inspect.survey(context)
        except BundleError as error:
            raise as_install_error(error, t("Nothing was changed.")) from error
        return context

    def _run(self) -> InstallResult:
        with contextlib.ExitStack() as stack:
            locked = False
            if self.layout.lock.exists() and not self.options.dry_run:
                stack.enter_context(self._lock())
                locked = True
            context = self._context()
            stack.callback(context.journal.close)
            self._steps(context, LOOK)
            if not self.options.dry_run and self._already_installed(context):
                return self._recognised(context)
            self._steps(context, ASK)
            if self.options.dry_run:
                return self._result(context, "dry-run")
            self._claim(context, stack, locked)
            self._steps(context, STAGE, changed=t("What runs was not touched. Run this again to continue from here."))
            self._activate(context)
            return self._result(context, "installed")

    def _claim(self, context: Context, stack: contextlib.ExitStack, locked: bool) -> None:
        """Take over the installation: state directory, lock, journal. What the plan was based on must still hold."""
        stage.make_state(context)
        if not locked:
            stack.enter_context(self._lock())
            if len(intact(self.layout.journal)) != context.seen:  # another process wrote since this run looked
                raise InstallError(
                    t("Another install ran here at the same time."),
                    exit_code=ExitCode.BUSY,
                    changed=t("Nothing was changed by this one."),
                    hint=t("Run this again; it starts from the state that the other one left."),
                )
        context.journal.open(self.layout.journal)
        ignore_hangup()
        stage.claim(context)

    def _already_installed(self, context: Context) -> bool:
        """Whether this release is committed with these settings, live, running and healthy."""
        history, target = context.history, context.target()
        state = self.service.state()
        return (
            history.open_switch is None
            and history.committed is not None
            and history.committed["release"] == target.name == release.live(self.layout)
            and context.base_config == context.config_text
            and context.tls_import is None
            and not any(unit.changed for unit in context.units)
            and (not self.layout.system or set(self.service.models()) == set(context.names))
            and all(model.in_store for model in context.models)
            and state.up
            and state.release in (target.name, None)
            and health(context.endpoint)[0]
        )

    def _recognised(self, context: Context) -> InstallResult:
        prune(context)
        if context.history.unshown_keys or not api_keys.usable(self.layout.api_keys):
            # The run that made the key ended before it could show it. The server reads the file again.
            context.journal.open(self.layout.journal)
            activate.drop_private_keys(context)
            context.new_key = activate.make_key(context)
            self.service.reload_keys()
        self.frontend.step("commit", "skipped", t("already installed and healthy; nothing was restarted"))
        return self._result(context, "already-installed")


def key_was_shown(layout: Layout, key_ids: list[str]) -> None:
    """Called by the front end once the operator has seen the new key; until then, another run would replace it."""
    with InstallLock(layout.lock, "install"):
        journal = Journal("shown", intact(layout.journal))
        journal.open(layout.journal)
        try:
            for key in key_ids:
                journal.add("key-shown", key=key)
        finally:
            journal.close()


def _failure(name: str, error: InstallError | BundleError | OSError, changed: str) -> InstallError:
    if isinstance(error, BundleError):
        return as_install_error(error, changed)
    failure = io_error(t("finish the step '{name}'", name=name), error) if isinstance(error, OSError) else error
    failure.changed = failure.changed or changed
    return failure
