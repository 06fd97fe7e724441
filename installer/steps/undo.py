"""Undo a switch to a release that failed. Needs no medium, and may be run twice.

A process that served before the switch and still does (an engine whose successor could not be prepared, say) is left
alone: it has already read everything it needs, and its clients notice nothing.
"""

import contextlib
from typing import Any

from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.recovery_mark import unmark
from installer.decide import changes
from installer.decide.context import Context
from installer.release import config
from installer.service import snapshots, units
from installer.steps.activate import drop_private_keys
from installer.steps.wait_until_ready import wait_ready
from installer.tls import endpoint as tls_endpoint


def roll_back(context: Context, cause: InstallError) -> InstallError:
    """Put back what the open switch replaced, and start it again. Returns the error to show."""
    layout = context.layout
    opened = context.history.open_switch
    if opened is None:
        return cause
    context.frontend.step("rollback", "begin")
    previous, left = opened["previous"], set[str]()
    try:
        left = _still_serving(context, opened)
        context.service.stop(_to_stop(context, opened, left))
        put_back(context, opened)
        drop_private_keys(context)
        context.new_key = None
        if previous is not None and opened["was_running"]:
            context.service.start()
            if changes.GATEWAY in left:
                context.service.reload_keys()
                if not context.service.reload_models(0.0) and _models_changed(context):
                    context.service.stop({changes.GATEWAY})
                    context.service.start()
            wait_ready(context.service, context.endpoint, layout, context.frontend, context.options.start_timeout)
        context.journal.add("rolled-back", to=previous, reason=cause.message)
        log.append(layout.audit, "rolled-back", to=previous, reason=cause.message)
        unmark(layout)
    except (InstallError, OSError) as failure:
        reason = failure.message if isinstance(failure, InstallError) else str(failure)
        with contextlib.suppress(OSError):
            context.journal.add("rollback-failed", to=previous, reason=reason)
        context.frontend.step("rollback", "failed", reason)
        return InstallError(
            t("{message} Going back failed too: {reason}", message=cause.message, reason=reason),
            exit_code=ExitCode.ROLLBACK_FAILED,
            why=cause.why,
            changed=_after_failure(left),
            hint=t("Read {log_hint}, then run the same command again: it continues from here.",
                   log_hint=layout.log_hint),
            log_tail=cause.log_tail,
            error_id=cause.error_id,
        )
    if opened.get("kind") == "tune" and opened["was_running"]:
        done = t("The settings from before the tuning apply again, and the service serves.")
    elif previous is None:
        done = t("Nothing runs, as before. The verified model stays in the store, so another attempt copies nothing.")
    elif left and left == set(opened["serving"]):
        done = t("The previous release {previous} was put back. It served all the time; nothing was restarted.",
                 previous=previous)
    elif opened["was_running"]:
        done = t("The previous release {previous} was put back and serves again.", previous=previous)
    else:
        done = t("The previous release {previous} was put back; it was stopped before and still is.",
                 previous=previous)
    context.frontend.step("rollback", "done", done)
    cause.changed = done
    return cause


def _models_changed(context: Context) -> bool:
    changed = changes.changed(context)
    return changed is None or changes.MODELS in changed


def _after_failure(left: set[str]) -> str:
    if left:
        return t("Still serving as before: {names}. The model and the previous release are still on the disk.",
                 names=joined(sorted(left)))
    return t("The service is not running. The model and the previous release are still on the disk.")


def _still_serving(context: Context, opened: dict[str, Any]) -> set[str]:
    """Parts that no switch has reached: the process that serves in them is the one from before the switch."""
    before = opened.get("serving") or {}
    return {part for part, process in context.service.serving().items() if before.get(part) == process}


def _to_stop(context: Context, opened: dict[str, Any], left: set[str]) -> set[str] | None:
    """What runs, or may run, with the new release; None for everything. Other models are not interrupted."""
    changed = changes.changed(context)
    if changed is not None:
        return changed - left - {changes.MODELS}
    # These are switched all at once, so one that still serves counts only together with the others.
    return set() if left and left == set(opened["serving"]) else None


def put_back(context: Context, opened: dict[str, Any]) -> None:
    """Settings, certificate, `current` and units as they were. Nothing of the new release runs any more."""
    layout = context.layout
    before = config.read_text(layout.config_backup) if opened["had_config"] else None
    if opened["previous"] is not None:
        fs.symlink_atomic(layout.current, f"releases/{opened['previous']}")
    if before is not None:
        fs.write_atomic(layout.config, before, 0o644)
    else:
        fs.remove_file(layout.config)
    if opened.get("had_key") and layout.key_backup.is_file():
        fs.write_atomic(layout.server_key, layout.key_backup.read_bytes(), 0o600)
        tls_endpoint.ensure(layout, [])
        fs.remove_file(layout.key_backup)
    if layout.system:
        _put_back_units(context)
    if opened["previous"] is None:
        fs.remove_file(layout.current)
    context.endpoint = config.endpoint(before, layout.config, system=layout.system)


def _put_back_units(context: Context) -> None:
    layout, committed = context.layout, context.history.committed
    if committed is None:
        context.service.remove_units()
        units.remove(units.owned_files(layout))
        if layout.command.is_symlink():
            fs.remove_file(layout.command)
        context.service.reload()
        return
    saved = snapshots.load(layout, committed["snapshot"])
    units.write(saved.units)
    wanted = {unit.path for unit in saved.units}
    units.remove(path for path in units.owned_files(layout) if path not in wanted)
    context.service.apply_units(saved.instances)
