"""The preflight as one JSON object: for `--json`, for the report file, and for the support bundle."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from installer.base.errors import ExitCode
from installer.gpu import GpuFacts
from installer.preflight.record import CheckRecord, PreflightContext

SCHEMA_VERSION = 1


def verdict(records: Sequence[CheckRecord], *, strict: bool = False) -> ExitCode:
    """0, 3 (a check fails and is not waived) or 4 (warnings, with `strict`)."""
    if any(record.status == "fail" and record.waived is None for record in records):
        return ExitCode.PREFLIGHT_FAIL
    if strict and any(record.status == "warn" for record in records):
        return ExitCode.PREFLIGHT_WARN
    return ExitCode.OK


def report(
    records: Sequence[CheckRecord], context: PreflightContext, *, language: str, seconds: float, strict: bool = False
) -> dict[str, Any]:
    """Keys and ids are stable within one schema version; texts are in `language`."""
    on_cpu = context.no_gpu_needed() is not None
    counts = Counter("waived" if record.waived is not None else record.status for record in records)
    code = verdict(records, strict=strict)
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": code == ExitCode.OK,
        "exit_code": int(code),
        "lang": language,
        "form": "server" if context.system else "prefix",
        "device": "cpu" if on_cpu else "cuda",
        "seconds": round(seconds, 2),
        "counts": {name: counts[name] for name in ("pass", "warn", "fail", "waived")},
        "checks": [record.to_json(language) for record in records],
        "gpu": (GpuFacts() if on_cpu else context.machine.gpus()).to_json(),
    }
