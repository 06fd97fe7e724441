"""Start and stop what is installed."""

from dataclasses import dataclass

from installer.access import vendor_keys
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import History, Journal, intact, replay
from installer.base.layout import Layout
from installer.base.lock import InstallLock
from installer.base.timeouts import START_TIMEOUT
from installer.decide.context import Context
from installer.decide.frontend import Frontend
from installer.decide.install_options import InstallOptions
from installer.preflight import PreflightContext, judge
from installer.preflight.network import address, port
from installer.release import config, release
from installer.service.choice import service_for
from installer.service.manager import ServiceManager
from installer.service.smoke_test import health
from installer.steps.undo import roll_back
from installer.steps.wait_until_ready import wait_ready


@dataclass(frozen=True, slots=True)
class LifecycleResult:
    """`changed`: whether anything was started or stopped."""

    changed: bool
    detail: str
    url: str | None = None

    def to_json(self) -> dict[str, object]:
        return {"changed": self.changed, "detail": self.detail, "url": self.url}


def history_of(layout: Layout) -> History:
    """What the journal of an installation says, as far as it can be read: for status and stop.

    Commands that change an installation use `journal.intact` instead. Raises InstallError (usage) if there is no
    installation of ours.
    """
    try:
        records = replay(layout.journal).records
    except OSError as error:
        raise io_error(t("read the installation's journal"), error) from error
    if not records:
        raise InstallError(
            t("There is no Atoll installation on {name}.", name=layout.name)
            if layout.system
            else t("There is no Atoll installation at {name}.", name=layout.name),
            exit_code=ExitCode.USAGE,
            why=t("Its journal, var/lib/atoll/state/journal.jsonl, is not there."),
            changed=t("Nothing was changed."),
            hint=t("Give the right directory with --prefix or ATOLL_PREFIX, or install: atoll install MEDIUM"),
        )
    return History(records)


def start(
    layout: Layout, frontend: Frontend, *, service: ServiceManager | None = None, timeout: float = START_TIMEOUT
) -> LifecycleResult:
    """Start the committed release and wait until it is ready.

    If an install was interrupted after its switch, the proven release is put back first. Raises InstallError: nothing
    installed (2), port taken (3), not healthy (40), another command is running (75).
    """
    service = service or service_for(layout)
    history_of(layout)
    with InstallLock(layout.lock, "start"):
        history = History(intact(layout.journal))
        went_back = history.open_switch is not None
        if went_back:
            _go_back(layout, frontend, service, history, timeout)
        if history.committed is None:
            raise InstallError(
                t("No release is installed on {name}.", name=layout.name)
                if layout.system
                else t("No release is installed at {name}.", name=layout.name),
                exit_code=ExitCode.USAGE,
                changed=t("Nothing was changed."),
                hint=t("Install one: atoll install MEDIUM"),
            )
        _warn_of_revoked(layout, history.committed["release"], frontend)
        endpoint = config.standing(layout)
        if service.state().up:
            if health(endpoint)[0]:
                return LifecycleResult(went_back, t("already running"), f"{endpoint.url}/v1")
        else:
            service.stop()  # left behind by a supervisor that was killed
            context = PreflightContext(layout, endpoint)
            judge([address(context), port(context)])
            service.start()
        wait_ready(service, endpoint, layout, frontend, timeout)
    return LifecycleResult(
        True, t("release {release} serves", release=history.committed["release"]), f"{endpoint.url}/v1"
    )


def stop(layout: Layout, *, service: ServiceManager | None = None) -> LifecycleResult:
    """Stop the service and everything it started. Running requests get the grace period of `atoll serve`."""
    service = service or service_for(layout)
    history_of(layout)
    with InstallLock(layout.lock, "stop"):
        stopped = service.stop()
    return LifecycleResult(stopped, t("stopped") if stopped else t("was not running"))


def restart(
    layout: Layout, frontend: Frontend, *, service: ServiceManager | None = None, timeout: float = START_TIMEOUT
) -> LifecycleResult:
    """Stop, start, and wait until it is ready: changed settings take effect. Raises as `start` does."""
    service = service or service_for(layout)
    stop(layout, service=service)
    return start(layout, frontend, service=service, timeout=timeout)


def _warn_of_revoked(layout: Layout, name: str, frontend: Frontend) -> None:
    """Warn of a revoked key. It stops no service, which is the operator's decision, but nobody should start one
    unknowingly."""
    try:
        gone = vendor_keys.revoked(layout)
    except InstallError as error:
        frontend.note(error.message)
        return
    for what, fingerprint in vendor_keys.signed_by(release.read_info(layout, name)).items():
        if fingerprint in gone:
            frontend.note(t("{what} is signed by a key that was revoked here. It is started nevertheless; replace it: "
                            "atoll install MEDIUM --trust-key NEW.pub", what=what))


def _go_back(layout: Layout, frontend: Frontend, service: ServiceManager, history: History, timeout: float) -> None:
    opened = history.open_switch or {}
    if opened.get("kind") == "tune":
        frontend.note(t("A tuning was interrupted; restoring the settings from before it."))
    else:
        frontend.note(t("An install was interrupted before its release was proven; going back to the previous one."))
    journal = Journal("start", intact(layout.journal))
    journal.open(layout.journal)
    try:
        options = InstallOptions(prefix=layout.prefix, start_timeout=timeout)
        context = Context(options, layout, frontend, service, (), journal, history)
        tuning = (history.open_switch or {}).get("kind") == "tune"
        cause = t("A tuning was interrupted.") if tuning else t("An install was interrupted.")
        outcome = roll_back(context, InstallError(cause))
        if outcome.exit_code == ExitCode.ROLLBACK_FAILED:
            raise outcome
    finally:
        journal.close()
