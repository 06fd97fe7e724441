"""The logs of the service: journald's in the system form, a file in the prefix form; the same lines in both."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import reason, t
from installer.base.layout import Layout
from installer.service import units
from installer.service.log_file import follow as follow_file
from installer.service.log_file import tail

_SHORT = {"gateway": units.GATEWAY, "gpu-ready": units.GPU_READY, "verify": units.VERIFY, "target": units.TARGET}
ALL_UNITS = (units.GATEWAY, "atoll-engine@*.service", units.GPU_READY, units.VERIFY)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `text` is as the service wrote it (usually one JSON object); `unit` is empty in the prefix form."""

    text: str
    unit: str = ""
    at: str = ""       # as journald stamped it, in local time

    def readable(self) -> str:
        """Time, unit, level and message for people, followed by the fields of the JSON line."""
        entry: Any = None
        if self.text.startswith("{"):
            try:
                entry = json.loads(self.text)
            except ValueError:
                pass
        if not isinstance(entry, dict) or "message" not in entry:
            return " ".join(part for part in (self.at, self.unit, printable(self.text)) if part)
        at = self.at or str(entry.pop("time", ""))[:23].replace("T", " ")
        level, message = str(entry.pop("level", "")), str(entry.pop("message"))
        known = ("time", "logger", "traceback")
        fields = "".join(f" {key}={value}" for key, value in entry.items() if key not in known)
        said = f"{message}{fields}" if level in ("info", "") else f"{level.upper()}: {message}{fields}"
        trace = f"\n{entry['traceback']}" if entry.get("traceback") else ""
        return " ".join(part for part in (at, self.unit, printable(said + trace)) if part)


def unit_name(word: str) -> str:
    """`gateway`, `engine@chat`, `verify` … or a full unit name. Raises InstallError (usage) for a unit that is not
    ours."""
    word = word.removesuffix(".service")
    if word in _SHORT:
        return _SHORT[word]
    if word == "engine":
        return ALL_UNITS[1]
    name = word if word.startswith("atoll") else f"atoll-{word}"
    if name.startswith("atoll-engine@"):
        return units.engine_unit(units.check_name(name.removeprefix("atoll-engine@")))
    if f"{name}.service" in _SHORT.values():
        return f"{name}.service"
    raise InstallError(
        t("Atoll has no unit '{word}'.", word=printable(word)[:60]),
        exit_code=ExitCode.USAGE,
        hint=t("Use --unit gateway, engine, engine@NAME, gpu-ready or verify."),
    )


def read(layout: Layout, *, lines: int, wanted: Sequence[str] = (), since: str | None = None) -> list[LogLine]:
    """The last lines, oldest first. Raises InstallError if there is no log."""
    if layout.system:
        return list(_journal(_command(wanted, lines, since)))
    _check_prefix(layout, wanted, since)
    return [LogLine(text) for text in tail(layout.log, lines)]


def follow(layout: Layout, *, lines: int, wanted: Sequence[str] = (), since: str | None = None) -> Iterator[LogLine]:
    """The last lines, then each new one as it is written. Ends only with its reader."""
    if layout.system:
        yield from _journal([*_command(wanted, lines, since), "--follow"])
        return
    _check_prefix(layout, wanted, since)
    yield from (LogLine(text) for text in tail(layout.log, lines))
    yield from (LogLine(text) for text in follow_file(layout.log))


def may_read_all() -> bool:
    """Whether journald shows this user the lines of the services."""
    import grp

    mine = {os.getegid(), *os.getgroups()}
    named = {group.gr_gid for group in grp.getgrall() if group.gr_name in ("systemd-journal", "adm", "wheel")}
    return os.geteuid() == 0 or bool(mine & named)


def printable(text: str) -> str:
    """`text` without characters that could disturb a terminal; newlines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _check_prefix(layout: Layout, wanted: Sequence[str], since: str | None) -> None:
    if wanted or since:
        raise InstallError(
            t("The installation at {name} is one process with one log file.", name=layout.name),
            exit_code=ExitCode.USAGE,
            hint=t("Leave out --unit and --since, or read {log} itself.", log=layout.log),
        )
    if not layout.log.exists():
        raise InstallError(
            t("There is no log at {log}.", log=layout.log),
            exit_code=ExitCode.USAGE,
            hint=t("Is this the right --prefix?"),
        )


def _command(wanted: Sequence[str], lines: int, since: str | None) -> list[str]:
    names = [unit_name(word) for word in wanted] or list(ALL_UNITS)
    chosen = [part for name in names for part in ("--unit", name)]
    return [
        "journalctl", "--no-pager", "--quiet", "--all", "--output=json", "--output-fields=MESSAGE,_SYSTEMD_UNIT,UNIT",
        f"--lines={lines}", *chosen, *([f"--since={since}"] if since else []),
    ]


def _journal(command: list[str]) -> Iterator[LogLine]:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise InstallError(
            t("journalctl cannot be run: {why}.", why=reason(error)),
            exit_code=ExitCode.IO,
            hint=t("Is systemd's journal installed?"),
        ) from None
    assert process.stdout is not None
    assert process.stderr is not None
    ended = False
    try:
        for raw in process.stdout:
            if (line := _entry(raw)) is not None:
                yield line
        ended = True
    finally:
        if not ended:
            process.terminate()
        said = process.stderr.read(2000).decode(errors="replace").strip()
        process.stdout.close()
        process.stderr.close()
        process.wait()
    if process.returncode:
        raise InstallError(
            t("The journal could not be read: {said}.", said=printable(said)[:300] or t("journalctl failed")),
            exit_code=ExitCode.USAGE if "timestamp" in said else ExitCode.IO,
            hint=t("Write a time as '2026-01-31 14:00', 'yesterday' or '1 hour ago'."),
        )


def _entry(raw: bytes) -> LogLine | None:
    try:
        entry = json.loads(raw)
        message = entry.get("MESSAGE")
        at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if isinstance(message, list):  # bytes that are not text
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(errors="replace")
    unit = str(entry.get("_SYSTEMD_UNIT") or "")
    if not unit.startswith("atoll"):  # systemd's own messages about a unit
        unit = str(entry.get("UNIT") or unit)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
    return LogLine(str(message or ""), unit.removeprefix("atoll-").removesuffix(".service"), stamp)
