"""Which parts of the service a switch changes, so that no other part is restarted.

A part is an engine (by its instance), "gateway", "models" (the list that the gateway can read again) or "socket". Its
fingerprint covers everything that it reads at its start: code, settings, units, model, certificate.
"""

import hashlib
import json
from typing import Any

from installer.base.proc import boot_id
from installer.decide.context import Context
from installer.release import config
from installer.service import snapshots, units

GATEWAY, MODELS, SOCKET = "gateway", "models", "socket"
_SERVED = ("model", "served-model-name", "replica-of", "tool-call-parser", "reasoning-parser",
           "enable-auto-tool-choice", "pooling")  # of a model's settings, what the gateway reads
_CLAIMS = ("device", "gpus", "gpu-memory-utilization", "kv-cache-memory-bytes", "tensor-parallel-size")


def fingerprints(context: Context) -> dict[str, str]:
    """Part -> its fingerprint, for the service as this run will leave it."""
    layout, info = context.layout, context.target().info
    code = {name: info.get(name) for name in ("atoll", "command", "code", "runtime")}
    texts = {unit.path.name: unit.content for unit in context.units}
    tables = config.model_tables(context.config_text, layout.config)
    found = {
        name: _hash(code, texts.get(units.ENGINE_TEMPLATE), tables.get(name), _facts(context, name))
        for name in context.names
    }
    gateway = config.parse(context.config_text, layout.config, "gateway")
    served = {name: config.with_dashes(table) for name, table in tables.items()}
    certificate = config.read_text(layout.server_cert)
    found[GATEWAY] = _hash(code, texts.get(units.GATEWAY), gateway, certificate)
    found[MODELS] = _hash({name: [table.get(key) for key in _SERVED] for name, table in served.items()})
    found[SOCKET] = _hash(texts.get(units.SOCKET))
    return found


def is_resumed(context: Context) -> bool:
    """Whether a run that was killed opened the switch: then it is unknown what that run has started."""
    opened = context.history.open_switch
    return opened is not None and opened["run"] != context.journal.run


def changed(context: Context) -> set[str] | None:
    """The parts to restart, and the parts to stop for good; None for all.

    All: in the prefix form, which has only one part; after a killed run, which may have started anything; and if the
    address changes, because the port is opened before everything else.
    """
    committed = context.history.committed or {}
    before: dict[str, Any] = committed.get("parts") or {}
    if not context.layout.system or is_resumed(context) or not before or context.release is None:
        return None
    now = fingerprints(context)
    found = {name for name in {*before, *now} if before.get(name, {}).get("fingerprint") != now.get(name)}
    if MODELS in found and any(name in before and name in now for name in found - {MODELS}):
        found.add(GATEWAY)  # a model that changes must change in the gateway and in its engine at the same time
    return None if SOCKET in found else found


def trade_places(context: Context) -> bool:
    """Whether several engines change their claims on the GPUs. One may then need what another still holds, so all old
    engines must end before any new one starts."""
    committed = context.history.committed or {}
    saved = snapshots.load(context.layout, committed["snapshot"]).settings if committed.get("snapshot") else None
    now = _claims(context, context.config_text)
    for text in (saved, context.base_config):  # what runs was started with one of these
        before = _claims(context, text)
        if len(before) > 1 and any(before[name] != now[name] for name in before.keys() & now.keys()):
            return True
    return False


def _claims(context: Context, text: str | None) -> dict[str, list[Any]]:
    """Engine -> the settings that decide which memory it takes on which GPU."""
    tables = config.model_tables(text, context.layout.config)
    return {name: [table.get(key) for key in _CLAIMS] for name, table in tables.items()}


def parts(context: Context) -> dict[str, dict[str, str]]:
    """What the commit records of each part: its fingerprint, and the release and boot in which it was started."""
    committed = context.history.committed or {}
    before: dict[str, Any] = committed.get("parts") or {}
    here = {"release": context.target().name, "boot": boot_id()}
    found = {}
    for name, fingerprint in fingerprints(context).items():
        old = before.get(name, {})
        same = old.get("fingerprint") == fingerprint and old.get("boot") == here["boot"]
        goes_on = same and not is_resumed(context)
        found[name] = old if goes_on else {"fingerprint": fingerprint, **here}
    return found


def in_use(committed: dict[str, Any]) -> set[str]:
    """Releases whose files a running part was started from: they are kept while it runs."""
    return {part["release"] for part in (committed.get("parts") or {}).values() if part.get("boot") == boot_id()}


def _facts(context: Context, name: str) -> dict[str, Any]:
    of = context.replicas.get(name, name)
    return next(model.facts() for model in context.models if model.instance == of)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
