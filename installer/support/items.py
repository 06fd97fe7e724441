"""What a support bundle may contain: a list of items, each with the reason for it. Nothing else is included."""

import json
import os
import platform
import re
import stat
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer.access import api_keys
from installer.audit import log
from installer.base import fs
from installer.base.i18n import t
from installer.base.journal import replay
from installer.base.layout import Layout
from installer.base.timestamps import timestamp
from installer.operate.status import status
from installer.preflight import PreflightContext, run_checks
from installer.preflight.report import report
from installer.release import config, release
from installer.service import unit_state, units
from installer.service.choice import service_for
from installer.service.log_file import tail
from installer.support import logs, redact
from installer.tls import endpoint as tls_endpoint

LOG_LINES = 20_000
_JOURNAL_FIELDS = ("n", "at", "run", "event", "step", "release", "previous", "to", "exit_code", "purge", "was_running",
                   "downtime_s", "startup_s", "tokens", "ttft_s", "tokens_per_s")  # fmt: skip
_XID = re.compile(r"NVRM: (?:Xid|GPU|API mismatch|loading)[^\n]{0,300}")


@dataclass(frozen=True, slots=True)
class Item:
    """One member of the archive. `take` returns its text; if it raises, the error is recorded instead."""

    name: str
    why: str
    take: Callable[[], str]


def items(layout: Layout, since: str) -> list[Item]:
    """Everything that may be taken from this installation. `since`: how far back logs go, in journalctl's words."""
    found = [
        Item("about.json", t("which Atoll on which system"), lambda: _json(_about(layout))),
        Item("status.json", t("what `atoll status` shows"), lambda: _json(_status(layout))),
        Item("machine.txt", t("processor, memory and disks of the service"), lambda: _machine(layout)),
        Item("gpu.json", t("the GPUs and their driver"), lambda: _json(_gpu())),
        Item("gpu-errors.txt", t("what the kernel said about the GPU"), _kernel),
        Item("settings.json", t("atoll.toml: known settings with values, others by name"), lambda: _settings(layout)),
        Item("files.txt", t("names, owners, modes and sizes of the installation"), lambda: _files(layout)),
        Item("install-journal.jsonl", t("what installs did, step by step"), lambda: _lines(_journal(layout))),
        Item("audit.jsonl", t("when something was accepted or changed (not by whom)"), lambda: _lines(_audit(layout))),
        Item("verify.json", t("what the last verification found"), lambda: fs.read_regular(
            layout.verify_state, 1 << 20)[0].decode()),
        Item("certificate.json", t("the served certificate (public)"), lambda: _json(tls_endpoint.facts(layout))),
        Item("apikeys.json", t("ids, scopes and expiry of API keys (no key, no hash, no name)"),
             lambda: _json(_keys(layout))),
        Item("preflight.json", t("the preflight checks of this machine, as of now"), lambda: _json(_preflight(layout))),
        Item("log.txt", t("the service's log, lines and fields that hold no request"), lambda: _log(layout, since)),
    ]
    if layout.system:
        found.append(Item("units.txt", t("states of the units"), lambda: _json(_units(layout))))
        for path in _unit_files(layout):
            name = f"units/{path.parent.name}-{path.name}" if path.parent != layout.units else f"units/{path.name}"
            found.append(Item(name, t("a unit as installed; programs and environments not shown"),
                              lambda path=path: redact.unit_file(_text(path))))
        score = ["systemd-analyze", "--no-pager", "security", units.GATEWAY, "atoll-engine@*.service"]
        found.append(Item("exposure.txt", t("how the services are confined"), lambda: _run(score)))
    return found


def private_parts(layout: Layout) -> list[bytes]:
    """Lines of this machine's private keys, which must not appear anywhere in a bundle."""
    parts: list[bytes] = []
    for path in (layout.ca_key, layout.server_key):
        try:
            text = fs.read_regular(path, 1 << 20)[0]
        except OSError:
            continue
        for block in re.findall(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?)-----END", text, re.DOTALL):
            parts += [line.strip() for line in block.splitlines() if len(line.strip()) >= 16]
    return parts


def _about(layout: Layout) -> dict[str, Any]:
    name = release.live(layout)
    return {
        "taken_at": timestamp(),
        "by_uid": os.getuid(),
        "atoll": release.code_version(),
        "form": "system" if layout.system else "prefix",
        "release": {k: v for k, v in release.read_info(layout, name or "").items() if k != "command"},
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "uptime_s": int(unit_state.seconds_since_boot()),
    }


def _status(layout: Layout) -> dict[str, Any]:
    facts = status(layout)
    for entry in facts["licences"]:
        entry.pop("who", None)
    for entry in facts["keys"]:
        entry.pop("name", None)
    facts["busy"] = bool(facts["busy"])
    if facts["smoke"]:
        facts["smoke"] = {k: v for k, v in facts["smoke"].items() if k != "text"}
    for unit in facts["units"]:
        unit.pop("status", None)
    facts["problems"] = [{**p, "what": _no_names(p["what"])} for p in facts["problems"]]
    return facts


def _no_names(text: str) -> str:
    """Names of API keys are personal data."""
    return re.sub(r"(The API key \w+) \([^)]*\)", r"\1", text)


def _machine(layout: Layout) -> str:
    parts = [f"load {os.getloadavg()}", f"processors {os.cpu_count()}, usable {len(os.sched_getaffinity(0))}"]
    model = re.search(r"^model name\s*:\s*(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sha_ni")
    parts.append(f"processor {model[1] if model else '?'}")
    parts.append("features " + " ".join(flag for flag in wanted if flags and flag in flags[1].split()))
    memory = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Hugepagesize", "HugePages_Total", "Shmem")
    parts += [line for line in _text(Path("/proc/meminfo")).splitlines() if line.split(":")[0] in memory]
    for path in (layout.opt, layout.models, layout.state, layout.cache, layout.run):
        parts.append(f"{path}: {_file_system(path)}")
    return "\n".join(parts) + "\n"


def _file_system(path: Path) -> str:
    try:
        space = os.statvfs(path)
    except OSError as error:
        return str(error.strerror)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    kind, options = "?", ""
    best = ""
    for line in _text(Path("/proc/mounts")).splitlines():
        _, where, what, given, *_ = line.split(" ")
        if (str(path) == where or str(path).startswith(where.rstrip("/") + "/")) and len(where) > len(best):
            best, kind = where, what
            options = ",".join(o for o in given.split(",") if re.fullmatch(r"ro|rw|noexec|nosuid|nodev|relatime", o))
    return (f"{kind} ({options}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
            f"{space.f_favail} of {space.f_files} inodes free")


def _gpu() -> Any:
    from installer.gpu import collect

    facts = collect().to_json()
    for gpu in facts["gpus"]:
        gpu["processes"] = [{"pid": p["pid"], "used": p["used"]} for p in gpu["processes"]]
    return facts


def _preflight(layout: Layout) -> dict[str, Any]:
    began = time.monotonic()
    standing = config.standing(layout)
    own = service_for(layout).pids() if layout.journal.exists() else frozenset()
    context = PreflightContext(layout, standing, own_pids=own, tls=standing.certificate is not None)
    found = report(run_checks(context), context, language="en", seconds=time.monotonic() - began)
    found.pop("gpu", None)  # in gpu.json, without names of processes
    return found


def _kernel() -> str:
    """The NVIDIA driver's own lines, in the form in which it writes them."""
    text = _run(["journalctl", "--no-pager", "--quiet", "--dmesg", "--output=short-iso", "--grep=NVRM", "--lines=200"])
    found = [(line.split(" ")[0], match[0]) for line in text.splitlines() if (match := _XID.search(line))]
    return "".join(f"{at} {said}\n" for at, said in found) or "nothing\n"


def _settings(layout: Layout) -> str:
    try:
        return _json(redact.settings(tomllib.loads(_text(layout.config))))
    except tomllib.TOMLDecodeError:
        return "atoll.toml cannot be read as TOML\n"


def _files(layout: Layout) -> str:
    """Files below our own directories. A file that is not ours is listed, not read."""
    return "".join(f"{line}\n" for root in layout.roots for line in _tree(root, layout.prefix, 0))


def _tree(path: Path, prefix: Path, depth: int) -> Iterator[str]:
    try:
        info = path.lstat()
    except OSError as error:
        yield f"{path.relative_to(prefix)}  {error.strerror}"
        return
    changed = timestamp(info.st_mtime)
    line = f"{stat.filemode(info.st_mode)} {info.st_uid}:{info.st_gid} {info.st_size:>13} {changed} "
    yield line + str(path.relative_to(prefix))
    if not stat.S_ISDIR(info.st_mode):
        return
    if path.name == "lib" and (path.parent / "runtime.json").exists():
        yield "  … (its files are in atoll verify)"
        return
    try:
        entries = sorted(path.iterdir()) if depth < 8 else []
    except OSError as error:
        yield f"  {error.strerror}"
        return
    for entry in entries[:500]:
        yield from _tree(entry, prefix, depth + 1)
    if len(entries) > 500:
        yield f"  … and {len(entries) - 500} more"


def _journal(layout: Layout) -> Iterator[dict[str, Any]]:
    os.stat(layout.journal)
    found = replay(layout.journal)
    for record in found.records[-2000:]:
        yield {name: record[name] for name in _JOURNAL_FIELDS if name in record}
    yield {"damaged_lines": found.damaged_lines, "torn_bytes": found.torn_bytes}


def _audit(layout: Layout) -> Iterator[dict[str, Any]]:
    os.stat(layout.audit)
    records, broken = log.read(layout.audit)
    for record in records[-2000:]:
        yield {name: record.get(name) for name in ("at", "event", "hash")}
    head = log.head(layout.audit)
    yield {"chain": "intact" if broken is None else "broken", "entries": head.count, "head": head.hash}


def _keys(layout: Layout) -> list[dict[str, Any]]:
    return [
        {"id": entry["id"], "state": api_keys.state(entry), "scopes": api_keys.scopes_of(entry),
         "created": entry.get("created"), "expires": entry.get("expires")}
        for entry in api_keys.people(layout.api_keys)
    ]


def _log(layout: Layout, since: str) -> str:
    if layout.system:
        lines = [(f"{line.at} {line.unit} ", line.text) for line in logs.read(layout, lines=LOG_LINES, since=since)]
    else:
        files = (layout.log.with_name(f"{layout.log.name}.1"), layout.log)
        lines = [("", text) for path in files for text in tail(path, LOG_LINES, limit=8 << 20)]
    kept, left_out = [], 0
    for prefix, text in lines:
        for part in text.split("\n") if not text.startswith("{") else [text]:
            if (line := redact.log_line(part)) is None:
                left_out += 1
            else:
                kept.append(prefix + line)
    return "\n".join([*kept, f"({left_out} lines are not of a kind that is taken)"]) + "\n"


def _units(layout: Layout) -> list[dict[str, Any]]:
    models = [str(b["instance"]) for b in release.bundles_of(release.read_info(layout, release.live(layout) or ""))]
    found = [unit.to_json() for unit in unit_state.show(unit_state.names(models))]
    for unit in found:
        unit.pop("status")
    return found


def _unit_files(layout: Layout) -> list[Path]:
    """Our units, and what an operator added to them."""
    ours = [path for path in units.owned_files(layout) if path.is_file()]
    added = sorted(path for path in layout.units.glob("atoll*.d/*.conf") if path.is_file())
    return [*ours, *added]


def _run(command: list[str]) -> str:
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer") from None
    return found.stdout


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4 << 20).decode(errors="replace")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


def _lines(records: Iterator[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
