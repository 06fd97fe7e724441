"""One screen about an installation: what it is, whether it serves, who approved it, what is wrong and what to do next.

It only reads and holds no lock. Users other than the installation's owner get what they may see, and a list of what
they could not see.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from installer.audit import anchor, check
from installer.base import fs, lock
from installer.base.i18n import t
from installer.base.journal import History, Replay, replay
from installer.base.layout import Layout
from installer.base.messages import without_ids
from installer.base.recovery_mark import went_back
from installer.operate import trust_facts
from installer.operate.findings import Findings
from installer.operate.lifecycle import history_of
from installer.release import config, release
from installer.service import drain_state, unit_state
from installer.service.log_file import tail
from installer.service.manager import ServiceManager
from installer.service.prefix import PrefixService
from installer.service.smoke_test import health
from installer.service.unit_state import UnitState
from installer.service.units import GATEWAY

_FEW_BYTES = 2 << 30
_LOG_LINES = 200       # of the service's log, searched for its last message

Facts = dict[str, Any]


def status(layout: Layout, *, service: ServiceManager | None = None) -> Facts:
    """All facts, ready for JSON.

    `state` is serving, draining, starting, stopped, failed, interrupted, busy, not-installed or unknown (this user may
    not see it). `healthy`: it serves and nothing is wrong. Raises InstallError (usage) if there is no installation of
    ours.
    """
    found = Findings()
    log, history = _history(layout, found)
    committed = _committed(layout, history)
    bundles = release.bundles_of(committed)
    endpoint = found.try_read(t("the settings"), lambda: config.standing(layout), None)
    settings = found.try_read(t("the settings"), lambda: _settings(layout), {})
    engines = list(dict.fromkeys([*(str(b["instance"]) for b in bundles), *settings.get("replicas", {})]))
    running, units = _running(layout, service, engines, settings, found)
    answers, said = health(endpoint, timeout=3.0) if endpoint and running["up"] else (False, t("not running"))
    if said.startswith("HTTP 503") and not drain_state.is_cause(said):  # without a key, /health names no model
        name = str(bundles[0].get("name", "")) if bundles else ""
        said = (_own_words(units) if layout.system else _last_words(layout, name)) or said
    holder = lock.holder(layout.lock)
    state = _state(history, committed, running, answers, busy=holder is not None)
    if state == "starting" and drain_state.is_cause(said):
        state = "draining"
    _tell_state(layout, state, running, said, units, history, found)
    recovery = _recovery(log, state, found)
    verified = trust_facts.last_verify(layout, log, committed, found)
    trusted = found.try_read(t("the trusted keys"), lambda: trust_facts.trust(layout, committed, found), None)
    certificate = trust_facts.certificate(layout, endpoint, found)
    facts = {
        "state": state,
        "form": "system" if layout.system else "prefix",
        "prefix": str(layout.prefix),
        "busy": holder,
        "release": {
            "live": release.live(layout),
            "committed": committed.get("release"),
            "at": committed.get("at"),
            "previous": committed.get("previous"),
            "atoll": release.read_info(layout, str(committed.get("release"))).get("atoll"),
        },
        "recovery": recovery,
        "model": _model(bundles[0]) if bundles else _model({}),
        "models": [_model(bundle) for bundle in bundles],
        "replicas": settings.get("replicas", {}),
        "licences": found.try_read(t("the licences' approvals"), lambda: trust_facts.licences(layout, bundles), []),
        "endpoint": f"{endpoint.url}/v1" if endpoint and committed else None,
        "endpoints": _endpoints(endpoint, certificate) if endpoint and committed else [],
        "units": [unit.to_json() for unit in units],
        "service": {name: running[name] for name in ("phase", "pid", "uptime_s", "restarts", "last_exit")},
        "health": {"ok": answers, "said": said},
        "smoke": committed.get("smoke"),
        "gpu": _gpu(settings, found),
        "last_verify": verified,
        "trust": trusted,
        "certificate": certificate,
        "keys": found.try_read(t("the API keys"), lambda: trust_facts.keys(layout, found, serving=bool(committed)), []),
        "disk": found.try_read(t("the disk"), lambda: _disk(layout, found), None),
    }
    healthy = state == "serving" and found.healthy  # after everything was read
    return {**facts, "healthy": healthy, "problems": found.to_json(), "unseen": list(dict.fromkeys(found.unseen))}


def _history(layout: Layout, found: Findings) -> tuple[Replay, History]:
    log = found.try_read(t("the install journal"), lambda: replay(layout.journal), Replay())
    if not log.records and release.live(layout) is None and "the install journal" not in found.unseen:
        history_of(layout)  # raises that there is no installation
    if log.damaged_lines:
        line = log.damaged_lines[0]
        found.error(t("The install journal is damaged at line {line}.", line=line), "atoll journal repair")
    anchors = (anchor.sent(layout.audit) or []) if layout.system else []
    verdict = found.try_read(t("the audit log"), lambda: check.check(layout.audit, anchors), None)
    if verdict is not None and verdict.message:
        found.error(verdict.message, "atoll audit verify")
    return log, History(log.records)


def _committed(layout: Layout, history: History) -> Facts:
    """The release in force according to the journal; for users who cannot read that, according to `current`."""
    if history.committed is not None or history.last_run is not None:
        return history.committed or {}
    name = release.live(layout)
    return {**release.read_info(layout, name), "release": name} if name else {}


def _settings(layout: Layout) -> Facts:
    """The tables of atoll.toml that say how it runs: {"serve" or "gateway": …, "models": {name: …}}."""
    text = config.read_text(layout.config) or ""
    if not layout.system:
        return {"serve": config.parse(text, layout.config), "models": {}}
    return {"gateway": config.parse(text, layout.config, "gateway"),
            "models": config.model_tables(text, layout.config), "replicas": config.replicas(text, layout.config)}


def _running(
    layout: Layout, service: ServiceManager | None, models: list[str], settings: Facts, found: Findings
) -> tuple[Facts, list[UnitState]]:
    """How the service runs: phase (running, starting, restarting, stopped, failed, dead), and its units, if any."""
    if layout.system and service is None:
        gpu = any(table.get("device") != "cpu" for table in settings.get("models", {}).values()) or not settings
        units = found.try_read(t("the units"), lambda: unit_state.show(unit_state.names(models, gpu=gpu)), [])
        return _from_units(units), units
    if layout.run.exists() and not os.access(layout.run, os.X_OK):
        found.unseen.append(t("the service's process"))
        return {"phase": "unknown", "up": True, "pid": None, "uptime_s": None, "restarts": 0, "last_exit": None}, []
    state = (service or PrefixService(layout)).state()
    up_for = int(time.time() - state.since) if state.since and state.up else None
    return {
        "phase": state.phase, "up": state.up, "pid": state.pid, "uptime_s": up_for, "restarts": state.restarts,
        "last_exit": state.last_exit,
    }, []


def _own_words(units: list[UnitState]) -> str:
    """The gateway's status text, which names each model ("chat weights 12.10/60.30 GB; tiny ready"), or else the
    engines'."""
    gateway = next((unit.status for unit in units if unit.name == GATEWAY and unit.active == "active"), "")
    engines = [f"{unit.name.partition('@')[2].removesuffix('.service')} {unit.status}" for unit in units
               if unit.name.startswith("atoll-engine@") and unit.status]  # fmt: skip
    return gateway or "; ".join(engines)


def _last_words(layout: Layout, model: str) -> str:
    """The last line of the service's log, which its owner may read. Access-log lines are skipped: they say nothing
    about a start."""
    for line in reversed(tail(layout.log, _LOG_LINES)):
        try:
            entry = json.loads(line)
            if entry["logger"] != "atoll.access":
                return f"{model}: {entry['message']}"
        except (ValueError, KeyError, TypeError):
            continue  # a line of the supervisor
    return ""


def _from_units(units: list[UnitState]) -> Facts:
    """The services that must run for an answer, summed up as one."""
    ours = [u for u in units if u.name.startswith(("atoll-gateway.service", "atoll-engine@"))]
    gateway = next((u for u in ours if u.name.startswith("atoll-gateway")), None)
    phases = {unit.active for unit in ours}
    if "failed" in phases:
        phase = "failed"
    elif phases and phases <= {"active"}:
        phase = "running"
    elif phases & {"activating", "reloading", "active"}:
        phase = "restarting" if any(u.sub == "auto-restart" for u in ours) else "starting"
    else:
        phase = "stopped"
    began = gateway.since if gateway and gateway.active == "active" else None
    failed = next((u for u in ours if u.failed), None)
    return {
        "phase": phase,
        "up": bool(phases & {"active", "activating", "reloading"}),
        "pid": gateway.pid if gateway else None,
        "uptime_s": int(unit_state.seconds_since_boot() - began) if began else None,
        "restarts": sum(unit.restarts for unit in ours),
        "last_exit": failed.exit_status if failed else None,
    }


def _state(history: History, committed: Facts, running: Facts, healthy: bool, *, busy: bool) -> str:
    if history.open_switch is not None:
        return "busy" if busy else "interrupted"
    if not committed:
        return "busy" if busy else "not-installed"
    if healthy:
        return "serving"
    if running["phase"] in ("failed", "dead"):
        return "failed"
    if running["phase"] == "unknown":
        return "unknown"
    return "starting" if running["up"] else "stopped"


def _tell_state(
    layout: Layout, state: str, running: Facts, said: str, units: list[UnitState], history: History, found: Findings
) -> None:
    where = layout.prefix_option
    failed = [unit for unit in units if unit.failed]
    for unit in failed:
        short = unit.name.removeprefix("atoll-").removesuffix(".service")
        why = unit.result
        if unit.exit_status:
            why = t("{result}, exit status {code}", result=unit.result, code=unit.exit_status)
        found.error(t("{unit} has failed ({why}).", unit=unit.name, why=why), f"atoll logs --unit {short}")
    if state == "interrupted" and (history.open_switch or {}).get("kind") == "tune":
        found.error(t("A tuning was interrupted; its trial settings may still apply."),
                    t("Restore the proven settings: {command}", command=f"atoll start{where}"))
    elif state == "interrupted":
        back = t("Run the same install again, or go back: {command}", command=f"atoll start{where}")
        found.error(t("An install was interrupted."), back)
    elif state == "failed" and not failed:
        code = "?" if running["last_exit"] is None else running["last_exit"]
        message = t("The service has ended (exit status {code}).", code=code)
        found.error(message, f"atoll logs{where}; atoll start{where}")
    elif state == "starting" and running["phase"] == "running":
        found.error(t("The service runs but is not ready: {said}.", said=said), f"atoll logs{where}")
    elif state == "draining":
        found.warn(t("The service is draining: it only finishes running requests."),
                   f"atoll drain --off{where}")
    if history.last_failure is not None:
        failure = without_ids(history.last_failure)
        found.warn(
            t("The last install failed in step {step} at {at}: {error}", step=failure["step"], at=failure["at"],
              error=failure["error"]),
            t("Correct it and run the same install again."),
        )


def _recovery(log: Replay, state: str, found: Findings) -> Facts | None:
    """What the last boot put back after an upgrade that a power cut interrupted; shown until something is installed."""
    record = went_back(log.records)
    if record is None or state in ("interrupted", "busy"):
        return None
    if record.get("kind") == "tune":
        found.warn(t("A power cut or a crash interrupted a tuning. At boot, at {at}, the settings from before it were "
                     "put back.", at=record["at"]), "atoll tune")
        return {"at": record["at"], "cut_off": "tune", "put_back": record["to"], "next": "atoll tune"}
    if record.get("kind") == "rollback":
        again = "atoll rollback"
    else:
        again = t("Insert the medium and run the upgrade again: atoll upgrade MEDIUM")
    found.warn(
        t("A power cut or a crash interrupted the switch to {new} before that release was proven. At boot, at {at}, "
          "the previous release was put back: {old}.", new=record["cut_off"], at=record["at"], old=record["to"]),
        again,
    )  # fmt: skip
    return {"at": record["at"], "cut_off": record["cut_off"], "put_back": record["to"], "next": again}


def _gpu(settings: Facts, found: Findings) -> Facts | None:
    """What the driver says; None if every engine runs on the CPU, or if there is no driver."""
    tables = list(settings.get("models", {}).values()) or [settings.get("serve", {})]
    if all(table.get("device") == "cpu" for table in tables):
        return None
    from installer.gpu import collect

    facts = collect()
    if not facts.answered:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            message = t("The GPU does not answer: {why}.", why=facts.nvml_error)
            found.error(message, "nvidia-smi; atoll logs --unit gpu-ready")
        return None
    for gpu in facts.gpus:
        if gpu.ecc_uncorrected:
            found.error(
                t("{gpu} has {count} uncorrected memory errors.", gpu=gpu.label, count=gpu.ecc_uncorrected),
                t("Reboot, then atoll preflight"),
            )
        if gpu.remap_failed:
            found.error(t("{gpu} can no longer replace bad memory.", gpu=gpu.label), t("Have the GPU replaced."))
    return facts.to_json()


def _model(bundle: Facts) -> Facts:
    return {name: bundle.get(name) for name in ("instance", "name", "version", "sequence", "digest", "key_fingerprint")}


def _endpoints(endpoint: config.Endpoint, certificate: Facts | None) -> list[str]:
    """The URLs that clients on other machines use, if the endpoint is reachable for them."""
    if certificate is None or endpoint.host not in ("0.0.0.0", "::", ""):  # noqa: S104
        return []
    names = [name for name in certificate["names"] if name not in ("localhost", "127.0.0.1", "::1")]
    return [f"https://{f'[{name}]' if ':' in name else name}:{endpoint.port}/v1" for name in names]


def _disk(layout: Layout, found: Findings) -> Facts:
    space = os.statvfs(layout.lib if layout.lib.exists() else layout.prefix)
    free = space.f_bavail * space.f_frsize
    if free < _FEW_BYTES:
        message = t("Only {free} GiB of disk space are free below {path}.", free=f"{free / 2**30:.1f}", path=layout.lib)
        found.warn(message, f"df -h {layout.lib}")
    return {
        "models_bytes": fs.tree_size(layout.models),
        "logs_bytes": fs.tree_size(layout.log_dir),
        "cache_bytes": fs.tree_size(layout.cache),
        "free_bytes": free,
    }
