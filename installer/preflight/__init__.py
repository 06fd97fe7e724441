"""Preflight: what must be true of this machine before anything is written to it. One check, one function.

A check never waits for anything: it returns a `CheckRecord`. Add one by writing the function and naming it in CHECKS.
"""

from collections.abc import Mapping
from dataclasses import replace

from installer.errors import ExitCode, InstallError
from installer.preflight import conflicts, gpu, host, network, storage
from installer.preflight.record import Check, CheckRecord, PreflightContext

CHECKS: tuple[Check, ...] = (
    host.cpu,
    host.glibc,
    host.python,
    host.memory,
    gpu.gpu,
    storage.disk,
    storage.filesystem,
    network.address,
    network.port,
    network.exposure,
    network.egress,
    host.clock,
    conflicts.leftovers,
    conflicts.other_servers,
)


def run_checks(context: PreflightContext, waivers: Mapping[str, str] | None = None) -> list[CheckRecord]:
    """Run every check; `waivers` maps a check's id to the operator's reason for going on without it."""
    waivers = waivers or {}
    records = []
    for check in CHECKS:
        try:
            record = check(context)
        except Exception as error:  # a check that breaks must not hide the others
            name, observed = check.__name__.replace("_", "-"), f"could not be checked: {error}"
            record = CheckRecord(name, "warn", observed, "", "", evidence=type(error).__name__)
        if record.status == "fail" and not record.strict and record.id in waivers:
            record = replace(record, waived=waivers[record.id])
        records.append(record)
    return records


def judge(records: list[CheckRecord], *, strict: bool = False) -> None:
    """Raise InstallError when this machine will not do (3), or has warnings and `strict` is asked for (4)."""
    failed = [record for record in records if record.status == "fail" and record.waived is None]
    if failed:
        hard = [record.id for record in failed if record.strict]
        waivable = [record.id for record in failed if not record.strict]
        hint = failed[0].fix
        if waivable and not hard:
            hint += f" To go on anyway, say why: --waive {waivable[0]}='reason' (recorded in the audit log)."
        raise InstallError(
            "This machine is not ready: " + "; ".join(f"{record.id}: {record.observed}" for record in failed) + ".",
            exit_code=ExitCode.PREFLIGHT_FAIL,
            why=failed[0].why,
            changed="Nothing was changed.",
            hint=hint,
        )
    warned = [record for record in records if record.status == "warn"]
    if strict and warned:
        raise InstallError(
            "There are warnings, and --strict was asked for: " + "; ".join(f"{w.id}: {w.observed}" for w in warned),
            exit_code=ExitCode.PREFLIGHT_WARN,
            why=warned[0].why,
            changed="Nothing was changed.",
            hint=warned[0].fix or "Run without --strict to go on.",
        )


__all__ = ["CHECKS", "CheckRecord", "PreflightContext", "judge", "run_checks"]
