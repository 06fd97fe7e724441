"""The install: a journalled state machine whose every step may be killed, and run again.

    discover -> verify -> preflight -> licence -> plan | stage -> switch -> start -> smoke -> commit
    writes nothing, holds no lock                      | journalled, under the lock
                                                         (stage touches nothing that runs)
                                                                 | a failure rolls back

It never trusts the journal for what the disk can say itself: each step looks, and does what is missing. The journal
says what the disk cannot: which release had proved itself, and what a switch replaced.
"""

import contextlib
import os
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from installer import keys, release
from installer.context import Context, Step, as_install_error
from installer.errors import ExitCode, InstallError, io_error
from installer.frontend import Frontend
from installer.journal import History, Journal, replay
from installer.layout import Layout
from installer.lock import InstallLock, ignore_hangup
from installer.options import InstallOptions
from installer.release import THIS_CODE
from installer.service import PrefixService, ServiceManager
from installer.smoke import health
from installer.steps import activate, look, stage
from offline_bundle.errors import BundleError

Steps = tuple[tuple[str, Step], ...]
Outcome = Literal["installed", "already-installed", "dry-run"]

LOOK: Steps = (
    ("discover", look.discover),
    ("verify", look.verify),
)
ASK: Steps = (
    ("preflight", look.preflight),
    ("licence", look.accept_licence),
    ("plan", look.plan),
)
STAGE: Steps = (("stage", stage.stage),)
ACTIVATE: Steps = (
    ("switch", activate.switch),
    ("start", activate.start),
    ("smoke", activate.smoke),
    ("commit", activate.commit),
)
STEPS: tuple[str, ...] = tuple(name for name, _ in (*LOOK, *ASK, *STAGE, *ACTIVATE))


@dataclass(frozen=True, slots=True)
class InstallResult:
    """What came of it. `api_key` is there once, in the run that made it."""

    outcome: Outcome
    prefix: str
    release: str
    model: str
    model_dir: str
    url: str
    api_key: str | None
    key_ids: list[str]
    smoke: dict[str, Any] | None
    seconds: float
    plan: dict[str, Any] | None = None
    preflight: list[dict[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Installer:
    """One install. `service` and `release_command` are what a systemd form, or a test, does differently."""

    def __init__(
        self,
        options: InstallOptions,
        frontend: Frontend,
        *,
        service: ServiceManager | None = None,
        release_command: tuple[str, ...] = THIS_CODE,
    ) -> None:
        layout = Layout.at(options.prefix)
        self.options = replace(options, bundle=options.bundle.expanduser().absolute())
        self.frontend = frontend
        self.layout = layout
        self.service = service or PrefixService(layout)
        self.release_command = release_command
        self.began = time.monotonic()

    def run(self) -> InstallResult:
        """Install, or recognise what is installed. Raises InstallError; after it nothing is half-done that matters."""
        try:
            return self._run()
        except OSError as error:
            raise io_error("use the prefix", error) from error

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
            return self._write(context)

    def _context(self) -> Context:
        past = replay(self.layout.journal).records
        journal = Journal(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}", past)
        journal.add("run", bundle=str(self.options.bundle), pid=os.getpid())
        tools = (self.frontend, self.service, self.release_command, journal)
        return Context(self.options, self.layout, *tools, History(past), len(past))

    def _claim(self, context: Context, stack: contextlib.ExitStack, locked: bool) -> None:
        """Take the installation: state directory, lock, journal. What was planned on must still be so."""
        stage.make_state(context)
        if not locked:
            stack.enter_context(self._lock())
            if len(replay(self.layout.journal).records) != context.seen:  # somebody wrote since this run looked
                raise InstallError(
                    "Another install ran here at the same time.",
                    exit_code=ExitCode.BUSY,
                    changed="Nothing was changed by this one.",
                    hint="Run this again; it starts from what the other one left.",
                )
        note = context.journal.open(self.layout.journal)
        if note:
            self.frontend.note(note)
        ignore_hangup()
        stage.claim(context)

    def _write(self, context: Context) -> InstallResult:
        self._steps(context, STAGE, changed="What runs was not touched. Run this again to go on from here.")
        try:
            self._steps(context, ACTIVATE, changed="")
        except InstallError as error:
            raise activate.roll_back(context, error) from error
        except KeyboardInterrupt:
            interrupted = InstallError("Interrupted.", exit_code=ExitCode.INTERRUPTED, hint="Run this again.")
            raise activate.roll_back(context, interrupted) from None
        return self._result(context, "installed")

    def _steps(self, context: Context, steps: Steps, changed: str = "Nothing was changed.") -> None:
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
                if steps is ACTIVATE:
                    raise
                message = f"Interrupted during {name}."
                raise InstallError(
                    message, exit_code=ExitCode.INTERRUPTED, changed=changed, hint="Run this again to go on."
                ) from None
            context.journal.add("done", step=name, detail=detail)
            self.frontend.step(name, "done", detail)

    def _failed(self, context: Context, name: str, failure: InstallError) -> None:
        self.frontend.step(name, "failed", failure.message)
        with contextlib.suppress(OSError):  # the disk may be full; the error itself matters more
            context.journal.add("failed", step=name, error=failure.message, exit_code=failure.exit_code)

    def _lock(self) -> InstallLock:
        return InstallLock(self.layout.lock, "install")

    def _already_installed(self, context: Context) -> bool:
        """This release with these settings is committed, live, running and healthy."""
        history = context.history
        _, target = context.require()
        state = self.service.state()
        return (
            history.open_switch is None
            and history.committed is not None
            and history.committed["release"] == target.name == release.live(self.layout)
            and context.base_config == context.config_text
            and context.in_store
            and state.up
            and state.release == target.name
            and health(context.endpoint)[0]
        )

    def _recognised(self, context: Context) -> InstallResult:
        activate.prune(context)
        if context.history.unshown_keys or not keys.usable(self.layout.api_keys):
            # The run that made the key ended before it could show it. The server re-reads the file by itself.
            context.journal.open(self.layout.journal)
            activate.drop_private_keys(context)
            context.new_key = activate.make_key(context)
        self.frontend.step("commit", "skipped", "already installed and healthy; nothing was restarted")
        return self._result(context, "already-installed")

    def _result(self, context: Context, outcome: Outcome) -> InstallResult:
        manifest, target = context.require()
        committed = context.history.committed
        return InstallResult(
            outcome=outcome,
            prefix=str(self.layout.prefix),
            release=target.name,
            model=manifest.name,
            model_dir=str(context.model_dir),
            url=f"{context.endpoint.url}/v1",
            api_key=context.new_key.text if context.new_key else None,
            key_ids=[key["id"] for key in keys.usable(self.layout.api_keys)],
            smoke=context.smoke.to_json() if context.smoke else (committed or {}).get("smoke"),
            seconds=round(time.monotonic() - self.began, 2),
            plan=context.plan.to_json() if context.plan else None,
            preflight=[check.to_json() for check in context.checks] or None,
        )


def key_was_shown(layout: Layout, key_ids: list[str]) -> None:
    """Called by the front end once the new key is on the operator's screen; until then a re-run would replace it."""
    with InstallLock(layout.lock, "install"):
        journal = Journal("shown", replay(layout.journal).records)
        journal.open(layout.journal)
        try:
            for key in key_ids:
                journal.add("key-shown", key=key)
        finally:
            journal.close()


def _failure(name: str, error: InstallError | BundleError | OSError, changed: str) -> InstallError:
    if isinstance(error, BundleError):
        return as_install_error(error, changed)
    failure = io_error(f"finish the step '{name}'", error) if isinstance(error, OSError) else error
    failure.changed = failure.changed or changed
    return failure
