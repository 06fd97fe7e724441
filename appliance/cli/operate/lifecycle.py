"""`atoll start|stop|restart|drain|rollback|uninstall|journal`: commands for an existing installation."""

import socket
import sys
from typing import Annotated

import typer

from appliance.cli.common import Json, Prefix, confirm, examples, layout_for, print_json, say, say_rows, spoken, told
from appliance.cli.language.commands import Commands
from appliance.cli.view.install_view import Terminal, print_result
from appliance.service import events
from appliance.service.dashboard import control
from appliance.service.jobs import spool
from appliance.service.words import human_bytes
from installer.audit import log
from installer.base import journal
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import joined, t
from installer.base.lock import InstallLock
from installer.base.timeouts import START_TIMEOUT
from installer.decide.install_options import InstallOptions
from installer.operate.drain import drain as start_drain
from installer.operate.drain import undrain
from installer.operate.lifecycle import history_of
from installer.operate.lifecycle import restart as restart_service
from installer.operate.lifecycle import start as start_service
from installer.operate.lifecycle import stop as stop_service
from installer.operate.rollback import Rollback
from installer.operate.uninstall import UninstallPlan, plan_uninstall
from installer.operate.uninstall import uninstall as remove

Timeout = Annotated[float, typer.Option(min=1, help="Seconds until it must be ready.")]

_DRAIN = """Refuse new requests and let running ones finish: before maintenance, or to move users to another server.

New requests get 503 with Retry-After, and /health answers 503 too, so that a load balancer sends them elsewhere.
Nothing is stopped. `--off` accepts requests again; so do start, restart, install, upgrade, rollback and tune, and a
gateway that restarts.
"""
_ROLLBACK = """Go back to the previous release, which is still on the disk: no medium is needed.

The previous release is started and must answer a question, as after an install; if it does not answer, the current
release is restored. Settings that you changed are kept. Run it again to return to the newer release.
"""
_UNINSTALL = """Stop the service and remove releases, units, caches and run-time files.

Models, settings, keys, logs and the journal stay, unless --purge is given; that asks for this machine's name.
"""


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the `atoll` command tree."""
    app.command(help="Start the installed service and wait until it answers.", epilog=examples("atoll start"))(start)
    app.command(help="Stop the service. Everything stays installed.", epilog=examples("atoll stop"))(stop)
    app.command(
        help=_DRAIN, epilog=examples("atoll drain", "atoll drain --wait 300 && atoll stop", "atoll drain --off")
    )(drain)
    app.command(
        help="Restart the service to apply changed settings.", epilog=examples("atoll restart")
    )(restart)
    app.command(help=_ROLLBACK, epilog=examples("atoll rollback", "atoll rollback --dry-run --json"))(rollback)
    purge = f"atoll uninstall --purge --yes-purge {socket.gethostname()}"
    app.command(help=_UNINSTALL, epilog=examples("atoll uninstall", purge))(uninstall)
    group = Commands(help="The installer's journal: check that it is intact, or repair it.")
    group.command(name="check", epilog=examples("atoll journal check"))(check)
    group.command(name="repair", epilog=examples("atoll journal repair"))(repair)
    app.add_typer(group, name="journal")


def start(prefix: Prefix = None, timeout: Timeout = START_TIMEOUT, as_json: Json = False) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = start_service(layout, terminal, timeout=timeout)
    _say(result.to_json(), joined([result.detail, result.url or ""], ": "), as_json)


def stop(prefix: Prefix = None, as_json: Json = False) -> None:
    with told(as_json):
        result = stop_service(layout_for(prefix))
    said = t("Stopped.") if result.changed else t("The service was not running.")
    _say(result.to_json(), said, as_json)


def drain(
    prefix: Prefix = None,
    off: Annotated[bool, typer.Option("--off", help="Accept requests again.")] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0, metavar="SECONDS",
                     help="Seconds to wait for running requests; exit code 40 if some still run then."),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        state = undrain(layout) if off else start_drain(layout, wait=wait)
    _say(state.to_json(), control.drained(state), as_json)
    if wait and not off and state.in_flight:
        raise typer.Exit(ExitCode.UNHEALTHY)


def restart(prefix: Prefix = None, timeout: Timeout = START_TIMEOUT, as_json: Json = False) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = restart_service(layout, terminal, timeout=timeout)
    _say(result.to_json(), joined([result.detail, result.url or ""], ": "), as_json)


def rollback(
    prefix: Prefix = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which release it would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="No question.")] = False,
    timeout: Timeout = START_TIMEOUT,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        if sys.stdin.isatty():
            confirm(t("Go back to the previous release?"), yes=yes or dry_run)
        options = InstallOptions(prefix=layout.prefix, start_timeout=timeout, dry_run=dry_run)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = Rollback(options, terminal, layout=layout).run()
        print_result(result, layout, as_json)


def uninstall(
    prefix: Prefix = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove models, settings, keys and logs too.")] = False,
    yes_purge: Annotated[
        str | None,
        typer.Option("--yes-purge", "--confirm", metavar="HOSTNAME", help="This machine's name, instead of the "
                                                                          "question."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask (unless --purge is given).")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        plan = plan_uninstall(layout, purge=purge)
        if not as_json:
            _show(plan)
        _confirm(purge, yes_purge, yes)
        made_for_the_checklist = events.remove(layout) if purge else []
        plan = remove(layout, purge=purge)
        events.remove_empty(made_for_the_checklist)
        if purge:
            spool.remove(layout)
    kept = t("Nothing is left of it.") if purge else t("Models, settings, keys, logs and the journal are still there.")
    _say(plan.to_json(), joined([t("Uninstalled."), kept], " "), as_json)


def _show(plan: UninstallPlan) -> None:
    lines: list[tuple[str, str]] = [(t("stop"), unit) for unit in plan.units]
    for word, entries in ((t("remove"), plan.remove), (t("keep"), plan.keep)):
        lines += [(word, f"{path}  {human_bytes(size)}") for path, size in entries]
    say_rows([*lines, *((t("remove"), t("user {user}", user=user)) for user in plan.users)], indent=2, width=7, gap=1)


def _confirm(purge: bool, named: str | None, yes: bool) -> None:
    host = socket.gethostname()
    if not purge:
        confirm(t("Uninstall?"), yes=yes or named == host)
        return
    if named is None and sys.stdin.isatty():
        question = t("This deletes the models, settings and keys. Type the machine's name ({host})", host=host)
        named = typer.prompt(spoken(question))
    if named != host:
        raise usage_error(t("Not confirmed: deleting the models, settings and keys takes this machine's name."),
                          t("Give the machine's name: --purge --yes-purge {host}", host=host))  # fmt: skip


def check(prefix: Prefix = None, as_json: Json = False) -> None:
    """Check whether the journal is intact. Changes nothing; exit code 30 if it is damaged."""
    with told(as_json):
        layout = layout_for(prefix)
        history_of(layout)
        records = journal.intact(layout.journal)
    _say({"records": len(records), "damaged": False}, t("{count} records, all intact.", count=len(records)), as_json)


def repair(prefix: Prefix = None, as_json: Json = False) -> None:
    """Keep the intact records of a damaged journal; the damaged file stays beside it."""
    with told(as_json):
        layout = layout_for(prefix)
        history_of(layout)
        with InstallLock(layout.lock, "journal repair"):
            done = journal.repair(layout.journal)
            if done:
                log.append(layout.audit, "journal-repaired", what=done)
    text = t("The journal is intact; nothing was changed.")
    if done:
        text = joined([done, t("Next: run what you were about to run.")], " ")
    _say({"repaired": done is not None, "detail": done}, text, as_json)


def _say(facts: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        say(text)
