"""What the running engines report: memory plan, context, device."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from installer.base.layout import Layout
from installer.service.log_file import tail

TIMEOUT = 2.0
_LOG_LINES = 4000   # lines of a prefix installation's log that are searched for the last plan
_ENGINE_USER = "atoll-engine"
# Beginnings of these log lines.
_LOGGED = {"memory_plan": "Memory plan", "planned": "Planned memory in numbers: ", "kernels": "Kernels: "}


def engine_facts(layout: Layout, models: list[str]) -> dict[str, dict[str, Any]]:
    """Instance → what its engine reports: memory_plan (a table), max_model_len, cache_tokens, max_num_seqs, device,
    dtype, kernels (how many came with the release, were in the cache, were compiled).

    Read from the engine's socket in the system form (root, or the group atoll-api); in the prefix form only the plan
    and the kernels, from the log. An engine that does not answer is left out.
    """
    if not layout.system:
        plan = _plan_in(tail(layout.log, _LOG_LINES, limit=4 << 20))
        return dict.fromkeys(models[:1], plan) if plan else {}
    sockets = {name: layout.run / "engine" / name / "engine.sock" for name in models}
    return asyncio.run(_ask_all({name: path for name, path in sockets.items() if _is_there(path)}))


async def _ask_all(sockets: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    answers = await asyncio.gather(*(_ask(path) for path in sockets.values()))
    return {name: answer for name, answer in zip(sockets, answers, strict=True) if answer}


async def _ask(path: Path) -> dict[str, Any] | None:
    from engine.server.ipc.client import EngineClient

    client = EngineClient(path, name="status", policy=_policy())
    await client.start()
    try:
        info = await client.wait_ready(TIMEOUT)
    except TimeoutError:
        return {"state": client.state, "progress": client.progress} if client.progress else None
    finally:
        await client.close()
    return {
        "state": "ready",
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "cache_tokens": max(0, info.num_pages - 1) * info.page_size,
        "memory_plan": info.memory_plan,
        "load_seconds": info.load_seconds,
        "kernels": info.kernels,
    }


def _policy() -> Any:
    from engine.errors import ConfigError
    from engine.server.ipc.framing import PeerPolicy

    with contextlib.suppress(ConfigError):
        return PeerPolicy.parse([_ENGINE_USER], [])
    return PeerPolicy()


def _plan_in(lines: list[str]) -> dict[str, Any]:
    """The last memory plan in the log, as a table and as numbers, and where the kernels came from."""
    found: dict[str, Any] = {}
    for line in reversed(lines):
        for name, beginning in _LOGGED.items():
            if name not in found and beginning in line:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    found[name] = str(json.loads(line)["message"])
        if found.keys() == _LOGGED.keys():
            break
    if "planned" in found:
        found["planned"] = json.loads(found["planned"].removeprefix(_LOGGED["planned"]))
    if "kernels" in found:
        numbers = [int(word) for word in found["kernels"].split() if word.isdecimal()]
        found["kernels"] = dict(zip(("release", "cached", "compiled"), numbers, strict=False))
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:
        return False
