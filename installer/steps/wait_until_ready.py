"""Wait for a service that is starting, with its last log line as progress."""

import contextlib
import signal
import time
from collections.abc import Collection

from installer.base.errors import PORT_IN_USE, ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.decide.frontend import Frontend
from installer.preflight.network import held_by_others
from installer.release.config import Endpoint, standing
from installer.service import drain_state
from installer.service.log_file import error_id, readable
from installer.service.manager import ServiceManager
from installer.service.smoke_test import health


def wait_ready(
    service: ServiceManager, endpoint: Endpoint, layout: Layout, frontend: Frontend, timeout: float
) -> None:
    """Wait until /health says 200, which means that the engine has produced a token. Raises InstallError (40).

    A draining gateway is told to accept requests again, because whoever starts a service wants it to serve.

    Gives up early if the service dies: a crash during the start is not worth waiting for.
    """
    began = time.monotonic()
    while True:
        good, said = health(endpoint)
        waited = time.monotonic() - began
        state = service.state()
        if state.phase in ("failed", "dead", "stopped") or state.restarts:
            status = "" if state.last_exit is None else t(" (exit status {last_exit})", last_exit=state.last_exit)
            raise unhealthy(service, layout, t("The service ended while it was starting{status}.", status=status))
        if good:
            return
        if drain_state.is_cause(said):
            drain_state.switch(layout, on=False)
        if waited > timeout:
            raise unhealthy(service, layout, t("The service was not ready after {timeout:.0f} s: {said}.",
                                               timeout=timeout, said=said))
        line = readable(next(iter(service.log_tail(1)), said)).partition("\n")[0]
        frontend.progress(t("starting: {line}", line=line[:80]), int(waited), 0)
        time.sleep(0.1 if waited < 5 else 0.5)


def wait_engines(
    service: ServiceManager, names: Collection[str], layout: Layout, frontend: Frontend, timeout: float
) -> None:
    """Wait until each of these engines has produced a token: a model answers as soon as one of its replicas does.

    Raises InstallError (40).
    """
    began = time.monotonic()
    while layout.system and (missing := sorted(set(names) & set(service.models()) - service.serving().keys())):
        waited, state = time.monotonic() - began, service.state()
        if state.phase in ("failed", "stopped") or state.restarts:
            raise unhealthy(service, layout, t("{name} ended while it was starting.", name=missing[0]))
        if waited > timeout:
            raise unhealthy(service, layout, t("{name} was not ready after {timeout:.0f} s.", name=missing[0],
                                               timeout=timeout))
        frontend.progress(t("starting: {line}", line=missing[0]), int(waited), 0)
        time.sleep(0.1 if waited < 5 else 0.5)


def unhealthy(service: ServiceManager, layout: Layout, message: str) -> InstallError:
    """The error for a service that does not serve, with the end of its log."""
    lines = service.log_tail(20)
    killed = "killed" if service.state().last_exit == -signal.SIGKILL else ""
    in_use = PORT_IN_USE if _port_is_taken(service, layout) else ""
    return InstallError(
        message,
        exit_code=ExitCode.UNHEALTHY,
        hint=t("The log says why: {log_hint}", log_hint=layout.log_hint),
        log_tail=[part for line in lines for part in readable(line).splitlines()],
        error_id=in_use or error_id(lines) or killed,
    )


def _port_is_taken(service: ServiceManager, layout: Layout) -> bool:
    """Whether another program listens where the service should: what answered then was not the service."""
    with contextlib.suppress(InstallError, OSError):
        return held_by_others(standing(layout).port, service.pids())
    return False
