"""Run the checks side by side, each within its own time, and judge the results."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.preflight.record import Check, CheckRecord, PreflightContext, Seen

DEADLINE = 10.0  # seconds for all of them


def run_all(
    checks: Sequence[Check],
    context: PreflightContext,
    waivers: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
) -> list[CheckRecord]:
    """Records in the order of the checks. `waivers` maps a check's id or number to the reason for continuing.

    Raises InstallError (usage) for a waiver of a check that does not exist.
    """
    reasons = known_waivers(checks, waivers or {})
    began = time.monotonic()
    done: dict[str, CheckRecord] = {}
    # Daemon threads: one that hangs in the kernel (a dead network disk, a dead driver) must not delay the exit.
    threads = [threading.Thread(target=_run, args=(each, context, done), daemon=True) for each in checks]
    for thread in threads:
        thread.start()
    records = []
    for each, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, min(each.timeout, deadline) - (time.monotonic() - began)))
        record = done.get(each.id)
        if record is None:
            record = _unknown(each, t("no answer within {seconds} s", seconds=f"{each.timeout:g}"), "timeout", began)
        if record.status == "fail" and not record.strict and each.id in reasons:
            record = replace(record, waived=reasons[each.id])
        records.append(record)
    return records


def _run(each: Check, context: PreflightContext, done: dict[str, CheckRecord]) -> None:
    began = time.monotonic()
    try:
        done[each.id] = each.record(each.look(context), time.monotonic() - began)
    except Exception as error:  # a check that breaks must not hide the others
        done[each.id] = _unknown(each, str(error) or type(error).__name__, type(error).__name__, began)


def _unknown(each: Check, why: str, evidence: str, began: float) -> CheckRecord:
    """An unknown result is a failure if the check is strict, else a warning."""
    observed = t("could not be checked: {why}", why=why)
    fix = t("Run this again; if it happens again, report it with this line.")
    seen = Seen("fail" if each.strict else "warn", observed, fix, evidence=evidence)
    return each.record(seen, time.monotonic() - began)


def known_waivers(checks: Sequence[Check], waivers: Mapping[str, str]) -> dict[str, str]:
    """The waivers by id. Raises InstallError (usage) for names that no check has."""
    by_name = {each.id: each.id for each in checks} | {str(each.number): each.id for each in checks}
    unknown = [name for name in waivers if name not in by_name]
    if unknown:
        raise InstallError(
            t("There is no check called '{name}' to waive.", name=unknown[0]),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Checks are: {names}.", names=", ".join(each.id for each in checks)),
        )
    return {by_name[name]: reason for name, reason in waivers.items()}


def judge(records: Sequence[CheckRecord], *, strict: bool = False) -> None:
    """Raise InstallError if this machine is not suitable (3), or has warnings and `strict` is set (4)."""
    failed = [record for record in records if record.status == "fail" and record.waived is None]
    if failed:
        hard = [record for record in failed if record.strict]
        first = (hard or failed)[0]
        hint = _advice(first)
        if not hard:
            example = f"--waive {first.id}='reason'"
            hint = t("{hint} To continue anyway, say why: {example} (recorded in the audit log).",
                     hint=hint, example=example)  # fmt: skip
        raise InstallError(
            t("This machine is not ready: {found}.", found=_named(failed)),
            exit_code=ExitCode.PREFLIGHT_FAIL,
            why=first.why,
            changed=t("Nothing was changed."),
            hint=hint,
        )
    warned = [record for record in records if record.status == "warn"]
    if strict and warned:
        raise InstallError(
            t("There are warnings, and --strict was given: {found}.", found=_named(warned)),
            exit_code=ExitCode.PREFLIGHT_WARN,
            why=warned[0].why,
            changed=t("Nothing was changed."),
            hint=_advice(warned[0]) or t("Run without --strict to continue."),
        )


def _named(records: Sequence[CheckRecord]) -> str:
    return joined([t("{id}: {observed}", id=record.id, observed=record.observed) for record in records], "; ")


def _advice(record: CheckRecord) -> str:
    if not record.command:
        return record.fix
    return t("{fix} Command: {command}", fix=record.fix, command=record.command)
