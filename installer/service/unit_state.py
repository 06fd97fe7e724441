"""What systemd says about our units, read with `systemctl show`: any user may ask."""

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from installer.base.i18n import t
from installer.service import units

_TIMEOUT = 10.0
_FIELDS = (
    "Id", "LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "StatusText", "ExecMainStatus",
    "ActiveEnterTimestampMonotonic", "MemoryCurrent", "UnitFileState",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UnitState:
    """One unit. `active` and `sub` are systemd's words; `since` is in seconds after boot, `memory` in bytes."""

    name: str
    active: str
    sub: str = ""
    result: str = ""
    pid: int | None = None
    restarts: int = 0
    status: str = ""             # its own text (STATUS= of sd_notify)
    exit_status: int | None = None
    since: float | None = None
    memory: int | None = None
    enabled: str = ""

    @property
    def failed(self) -> bool:
        return self.active == "failed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def names(models: Sequence[str], *, gpu: bool = True) -> list[str]:
    """The units of a server with these models, in the order in which a person looks at them."""
    engines = [units.engine_unit(model) for model in models]
    ready = [units.GPU_READY] if gpu else []
    return [units.TARGET, units.SOCKET, units.GATEWAY, *engines, *ready, units.TIMER, units.VERIFY]


def show(wanted: Sequence[str]) -> list[UnitState]:
    """The state of each unit. Raises OSError if systemd does not answer."""
    command = ["systemctl", "show", "--no-pager", f"--property={','.join(_FIELDS)}", "--", *wanted]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(t("systemctl did not answer")) from None
    if found.returncode:
        raise OSError(t("systemctl: {strip}", strip=found.stderr.strip()[:200]))
    return parse(found.stdout)


def parse(text: str) -> list[UnitState]:
    """The output of `systemctl show`: blocks of NAME=VALUE, an empty line between units."""
    states = []
    for block in text.split("\n\n"):
        facts: dict[str, str] = {}
        for line in block.splitlines():
            name, _, value = line.partition("=")
            facts[name] = value
        if not facts.get("Id"):
            continue
        loaded = facts.get("LoadState", "loaded")
        since = _number(facts.get("ActiveEnterTimestampMonotonic"))
        states.append(UnitState(
            name=facts["Id"],
            active=facts.get("ActiveState", "unknown") if loaded == "loaded" else loaded,
            sub=facts.get("SubState", ""),
            result=facts.get("Result", ""),
            pid=_number(facts.get("MainPID")) or None,
            restarts=_number(facts.get("NRestarts")) or 0,
            status=facts.get("StatusText", ""),
            exit_status=_number(facts.get("ExecMainStatus")),
            since=since / 1e6 if since else None,
            memory=_number(facts.get("MemoryCurrent")),
            enabled=facts.get("UnitFileState", ""),
        ))
    return states


def seconds_since_boot() -> float:
    with contextlib.suppress(OSError, ValueError), open("/proc/uptime") as file:
        return float(file.read().split()[0])
    return 0.0


def _number(text: str | None) -> int | None:
    """None for "[not set]" and for the largest number, which means the same."""
    return int(text) if text and text.isdigit() and int(text) < (1 << 64) - 1 else None
