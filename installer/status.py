"""One screen about an installation: what it is, whether it serves, who allowed it. Reads only; holds no lock."""

import os
import time
from typing import Any

from installer import audit, config, fs, keys, licence, lock, release
from installer.errors import InstallError
from installer.journal import replay
from installer.layout import Layout
from installer.lifecycle import history_of
from installer.service import PrefixService, ServiceManager
from installer.smoke import health


def status(layout: Layout, *, service: ServiceManager | None = None) -> dict[str, Any]:
    """All facts, ready for JSON. `state` is serving, starting, stopped, failed, interrupted, busy or not-installed.

    Raises InstallError (usage) where nothing of ours is.
    """
    service = service or PrefixService(layout)
    history = history_of(layout)
    running = service.state()
    problems: list[str] = []
    try:
        endpoint = config.endpoint(config.read_text(layout.config), layout.config)
        healthy, said = health(endpoint, timeout=3.0) if running.up else (False, "not running")
    except InstallError as error:
        problems.append(error.message)
        endpoint, healthy, said = None, False, "unknown"
    committed = history.committed or {}
    bundle = committed.get("bundle", {})
    key_entries = _guarded(problems, lambda: keys.usable(layout.api_keys)) or []
    log = replay(layout.journal)
    if log.damaged_lines:
        problems.append(f"the journal is damaged at line {log.damaged_lines[0]}; the next install repairs it")
    if broken := audit.read(layout.audit)[1]:
        problems.append(broken)
    if history.last_failure is not None:
        failure = history.last_failure
        problems.append(f"the last install failed in step {failure['step']} at {failure['at']}: {failure['error']}")
    verified = next((r for r in reversed(log.records) if r["event"] == "done" and r.get("step") == "verify"), None)
    holder = lock.holder(layout.lock)
    return {
        "state": _state(history, running.phase, running.up, healthy, busy=holder is not None),
        "prefix": str(layout.prefix),
        "busy": holder,
        "release": {
            "live": release.live(layout),
            "committed": committed.get("release"),
            "at": committed.get("at"),
            "previous": committed.get("previous"),
        },
        "model": {name: bundle.get(name) for name in ("name", "version", "sequence", "digest", "key_fingerprint")},
        "licences": [
            {name: entry.get(name) for name in ("spdx", "sha256", "how", "who", "when")}
            for entry in licence.load_approvals(layout.approvals)
            if entry.get("bundle_digest") == bundle.get("digest")
        ],
        "endpoint": f"{endpoint.url}/v1" if endpoint and committed else None,
        "service": {
            "phase": running.phase,
            "pid": running.pid,
            "uptime_s": int(time.time() - running.since) if running.since and running.up else None,
            "restarts": running.restarts,
            "last_exit": running.last_exit,
        },
        "health": {"ok": healthy, "said": said},
        "smoke": committed.get("smoke"),
        "last_verify": {"at": verified["at"], "detail": verified["detail"]} if verified else None,
        "keys": [{name: key.get(name) for name in ("id", "name", "created", "expires")} for key in key_entries],
        "disk": _disk(layout),
        "problems": problems,
    }


def _state(history: Any, phase: str, up: bool, healthy: bool, *, busy: bool) -> str:
    if history.open_switch is not None:
        return "busy" if busy else "interrupted"
    if history.committed is None:
        return "busy" if busy else "not-installed"
    if healthy:
        return "serving"
    if up:
        return "starting"
    return "failed" if phase in ("failed", "dead") else "stopped"


def _disk(layout: Layout) -> dict[str, int]:
    space = os.statvfs(layout.prefix)
    return {
        "models_bytes": fs.tree_size(layout.models),
        "logs_bytes": fs.tree_size(layout.log_dir),
        "cache_bytes": fs.tree_size(layout.cache),
        "free_bytes": space.f_bavail * space.f_frsize,
    }


def _guarded(problems: list[str], read: Any) -> Any:
    try:
        return read()
    except InstallError as error:
        problems.append(error.message)
        return None
