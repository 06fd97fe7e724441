"""Try other settings with the running release: write them, start, and either keep them or go back.

In the installer's journal a trial is a switch from the running release to itself. So however the process ends, the
committed settings are restored as after an interrupted upgrade: by `recover`, by the next `atoll start`, or at boot by
`atoll settle`. Settings that are kept pass the smoke test and are committed, as an install's settings are.
"""

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import tomlkit

from installer.access import api_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import joined, t
from installer.base.journal import History, intact
from installer.base.layout import Layout
from installer.base.lock import ignore_hangup
from installer.base.recovery_mark import unmark
from installer.base.timeouts import START_TIMEOUT
from installer.decide.context import Context, Model
from installer.decide.frontend import Frontend
from installer.decide.install_options import InstallOptions
from installer.operate.install import Journalled
from installer.operate.lifecycle import history_of, start
from installer.operate.rollback import target_release
from installer.release import config, migrate
from installer.service.choice import service_for
from installer.service.manager import ServiceManager
from installer.service.smoke_test import health
from installer.steps import activate
from installer.steps.undo import roll_back
from installer.steps.wait_until_ready import unhealthy, wait_ready

KIND = "tune"  # of the switch in the journal
Values = Mapping[str, Any]


class SettingsTrial(Journalled):
    """A context manager: on leaving, it restores the committed settings unless `keep` was called.

    Entering takes the lock. Raises InstallError: nothing installed (2), another install was interrupted (41), the
    service does not run (40), another command is running (75).
    """

    purpose = KIND

    def __init__(
        self, layout: Layout, frontend: Frontend, instance: str | None = None, *,
        service: ServiceManager | None = None, start_timeout: float = START_TIMEOUT, key_seconds: float = 86_400.0,
    ) -> None:  # fmt: skip
        options = InstallOptions(prefix=layout.prefix, start_timeout=start_timeout)
        super().__init__(options, frontend, layout, service or service_for(layout))
        self._asked_for = instance
        self._stack = contextlib.ExitStack()
        self._kept = False
        self._serving = ""              # text of the settings that serve now; "" unless a start with them succeeded
        self.context: Context
        self.model: Model
        self.proven = ""                # text of the settings from before the trial
        self._key_seconds = key_seconds
        self.key = ""                   # opens the endpoint during the trials; never shown to anybody

    def __enter__(self) -> "SettingsTrial":
        history_of(self.layout)
        try:
            self._stack.enter_context(self._lock())
            self.context = self._context()
            self._stack.callback(self.context.journal.close)
            self._find()
            self.context.journal.open(self.layout.journal)
            ignore_hangup()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises InstallError (41) if the proven settings could not be started again."""
        try:
            if not self._kept:
                self._go_back(error)
        finally:
            self._stack.close()

    def _find(self) -> None:
        context = self.context
        context.kind = KIND
        committed = context.before.committed
        if context.before.open_switch is not None:
            raise InstallError(
                t("An install or a tuning was interrupted; the proven state must be restored first."),
                exit_code=ExitCode.ROLLBACK_FAILED,
                changed=t("Nothing was changed."),
                hint=t("Restore it: {command}", command=f"atoll start{self.layout.prefix_option}"),
            )
        if committed is None:
            raise InstallError(
                t("No release is installed on {name}.", name=self.layout.name), exit_code=ExitCode.USAGE,
                changed=t("Nothing was changed."), hint=t("Install one: atoll install MEDIUM"),
            )
        target_release(context, committed["release"], committed.get("snapshot"))
        self.proven = context.config_text = context.base_config or ""
        context.endpoint = config.standing(self.layout)
        self.model = self._chosen()
        if not self.service.state().up or not health(context.endpoint)[0]:
            raise InstallError(
                t("The service does not answer, so there is nothing to measure against."),
                exit_code=ExitCode.UNHEALTHY,
                changed=t("Nothing was changed."),
                hint=t("Start it first: {command}", command=f"atoll start{self.layout.prefix_option}"),
            )

    def _chosen(self) -> Model:
        models = {model.instance: model for model in self.context.models}
        name = self._asked_for or (next(iter(models)) if len(models) == 1 else None)
        if name in models:
            return models[name]
        raise InstallError(
            t("No model called {name} runs here.", name=name) if name else t("Several models run here."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Name one with --model: {names}.", names=joined(models)),
        )

    # -- the settings in force, and those on trial

    def settings(self) -> dict[str, Any]:
        """The engine's settings in force, including those for all engines."""
        return settings_of(self.layout, self.proven, self.model.instance)

    def own_settings(self) -> dict[str, Any]:
        """The settings of this model's own table."""
        name = "serve" if not self.layout.system else "models"
        table = config.parse(self.proven, self.layout.config, name)
        return table if not self.layout.system else dict(table.get(self.model.instance, {}))

    def start_with(self, values: Values) -> float:
        """Write these settings (None removes one) and restart the engine. Returns the seconds until it was ready.

        Raises InstallError (40) if it does not become ready; the caller may try others.
        """
        context, layout = self.context, self.layout
        context.config_text = with_values(self.proven, self._table(), values, layout)
        activate.open_switch(context)
        self._serving = ""
        if config.read_text(layout.config) != context.config_text:
            fs.write_atomic(layout.config, context.config_text, 0o644)
        began = time.monotonic()
        if not self.key:
            self.key = api_keys.add_smoke(layout.api_keys, self._key_seconds).text
        self.service.switch(self._parts(), context.options.start_timeout, hand_over=False)
        self.service.reload_keys()
        self._await_engine(began)
        self._serving = context.config_text
        context.startup_s = round(time.monotonic() - began, 2)
        return context.startup_s

    def keep(self, **facts: Any) -> None:
        """Keep what runs now: smoke test, then commit. Raises InstallError; nothing is kept then."""
        context = self.context
        context.smoke_key = api_keys.add_smoke(self.layout.api_keys, context.options.smoke_timeout + 60)
        self.service.reload_keys()
        steps = (("smoke", activate.smoke), ("commit", activate.commit))
        self._steps(context, steps, changed="", passes_interrupt=True)
        self._kept = True
        log.append(self.layout.audit, "tuned", model=self.model.instance, **facts)

    def alive(self) -> bool:
        """Whether the service still runs, without a restart since it was started."""
        state = self.service.state()
        return state.up and not state.restarts

    def _await_engine(self, began: float) -> None:
        """Wait until the engine has produced a token.

        A gateway that keeps running may need a moment to notice that its engine has ended, so on a server the engine's
        own unit is asked first.
        """
        limit = self.options.start_timeout
        while self.layout.system and not self._engines() <= self.service.serving().keys():
            state = self.service.state()
            if state.phase in ("failed", "stopped") or state.restarts:
                raise unhealthy(self.service, self.layout, t("The service ended while it was starting{status}.",
                                                             status=""))
            if time.monotonic() - began > limit:
                raise unhealthy(self.service, self.layout, t("The service was not ready after {timeout:.0f} s: {said}.",
                                                             timeout=limit, said=self.model.instance))
            self.frontend.progress(t("starting: {line}", line=self.model.instance), int(time.monotonic() - began), 0)
            time.sleep(0.2)
        wait_ready(self.service, self.context.endpoint, self.layout, self.frontend, limit)

    def _table(self) -> tuple[str, ...]:
        return ("models", self.model.instance) if self.layout.system else ("serve",)

    def _parts(self) -> set[str] | None:
        return self._engines() if self.layout.system else None

    def _engines(self) -> set[str]:
        """The model's engine and its replicas, which take the same settings."""
        name = self.model.instance
        return {name, *(copy for copy, of in self.context.replicas.items() if of == name)}

    def _go_back(self, error: BaseException | None) -> None:
        context = self.context
        if context.history.open_switch is None:
            return
        cause = error if isinstance(error, InstallError) else _ended(error)
        if self._serving == self.proven and self.alive() and health(context.endpoint)[0]:
            self._stay(cause)
            return
        outcome = roll_back(context, cause)
        if outcome.exit_code == ExitCode.ROLLBACK_FAILED:
            raise outcome from error

    def _stay(self, cause: InstallError) -> None:
        """The proven settings are the ones that serve: nothing has to be restarted."""
        context = self.context
        activate.drop_private_keys(context)
        self.service.reload_keys()
        context.journal.add("rolled-back", to=context.target().name, reason=cause.message)
        log.append(self.layout.audit, "rolled-back", to=context.target().name, reason=cause.message)
        unmark(self.layout)


def _ended(error: BaseException | None) -> InstallError:
    if isinstance(error, OSError):
        return io_error(t("finish this command"), error)
    said = t("The tuning was interrupted.") if error is not None else t("The previous settings are kept.")
    return InstallError(said, exit_code=ExitCode.INTERRUPTED if error is not None else ExitCode.OK)


def with_values(text: str, table: tuple[str, ...], values: Values, layout: Layout) -> str:
    """The settings file with these values in one table; None removes a key. Comments and everything else stay."""
    document: Any = migrate.document(text, layout.config)
    place = document
    for name in table:
        if name not in place:
            place[name] = tomlkit.table()
        place = place[name]
    for key, value in values.items():
        here = key if key in place else key.replace("-", "_")  # a flag may be spelled either way
        if value is None:
            place.pop(here, None)
        elif place.get(here) != value:
            place[here if here in place else key] = value
    return tomlkit.dumps(document)


def settings_of(layout: Layout, text: str, instance: str) -> dict[str, Any]:
    """The settings that a model's engine reads: its own table over the one of all engines."""
    if not layout.system:
        return config.parse(text, layout.config, "serve")
    return config.model_tables(text, layout.config).get(instance, {})


def is_open(layout: Layout) -> bool:
    """Whether a trial was interrupted, so that its settings may still be in force."""
    opened = History(intact(layout.journal)).open_switch
    return opened is not None and opened.get("kind") == KIND


def recover(layout: Layout, frontend: Frontend, *, timeout: float = START_TIMEOUT) -> bool:
    """Undo a tuning that was killed. Returns whether there was anything to undo. Raises InstallError."""
    if not is_open(layout):
        return False
    start(layout, frontend, timeout=timeout)
    return True
