"""Security: no access without a key, no plain text on the network, no way out, no file that others may read or
write."""

import asyncio
import ipaddress
import os
import re
import ssl
import stat
import subprocess
from pathlib import Path

import psutil

from appliance.load.http_client import HttpError
from appliance.load.target import Target
from appliance.service.findings import Finding, made
from appliance.service.verification.api import Api
from appliance.service.verification.context import Verifying, not_checked
from appliance.service.verification.subject import Subject
from installer.base.exposure import is_loopback
from installer.base.i18n import joined, plain, t
from installer.base.layout import Layout
from installer.service import units

_MOST_EXPOSED = 3.0      # of systemd-analyze's scale to 10, on which "ok" ends at 4
_DEPTH = 3               # levels of directories that are inspected
_WATCH_SECONDS = 3.0     # so that sockets that are open only for a moment are seen
_EXPOSURE = re.compile(r"Overall exposure level for (\S+): (\d+(?:\.\d+)?)")


async def run(work: Verifying) -> list[Finding]:
    subject = work.subject
    found = [await _keys(subject), await _tls(subject)]
    if subject.layout is None:
        why = t("its files and processes are on another machine")
        return [*found, not_checked("egress-sockets", t("Outgoing connections"), why),
                not_checked("file-modes", t("Files"), why)]  # fmt: skip
    found.append(await _egress(subject))
    found.append(file_modes(subject.layout))
    if subject.layout.system:
        found.append(await _units([model.name for model in subject.models]))
    else:
        found.append(not_checked("unit-exposure", t("Units"), t("this installation has no systemd units")))
    return found


async def _keys(subject: Subject) -> Finding:
    """Without a key, and with a wrong one: 401 with an error, for the API and the metrics."""
    wrong: list[str] = []
    model = subject.models[0].name
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for key, who in ((None, t("without a key")), ("sk-wrong-" + "0" * 34, t("with a wrong key"))):
        target = Target(subject.target.base_url, key=key, ca=subject.target.ca, pinned=subject.target.pinned)
        async with Api(target, model) as api:
            for path in ("/v1/chat/completions", "/v1/models", "/metrics"):
                answer = await (api.post(path, body) if "chat" in path else api.get(path))
                if answer.status not in (401, 403):
                    wrong.append(t("{path} {who}: HTTP {status}", path=path, who=who, status=answer.status))
    ok = not wrong
    return made(
        "key-required", "info" if ok else "strict", ok, t("API keys"),
        observed=joined(wrong, "; ") if wrong else t("refused without a key, and with a wrong one"),
        why=t("anyone on the network could use the model and see its metrics"),
        fix="" if ok else t("Give the endpoint a file of keys: {command}", command="atoll apikey new"),
        command="" if ok else "atoll apikey new",
    )  # fmt: skip


async def _tls(subject: Subject) -> Finding:
    target, title = subject.target, t("Encryption")
    host = subject.endpoint.host if subject.endpoint is not None else target.host
    if not target.is_tls:
        ok = is_loopback(host)
        return made(
            "tls", "info" if ok else "strict", ok, title,
            observed=t("plain HTTP, only this machine can connect") if ok else t("plain HTTP on {host}", host=host),
            required=t("TLS on any other address than loopback"), why=t("keys and prompts could be read on the "
                                                                        "network"),
            fix="" if ok else t("Give it a certificate: {command}", command="atoll tls renew"),
        )  # fmt: skip
    old = await asyncio.to_thread(_accepts_old, target)
    try:
        async with Api(target, "") as api:
            status = (await api.get("/livez")).status
        seen, ok = t("TLS 1.2 or newer, the certificate is the installed one"), status == 200 and not old
    except (HttpError, OSError, TimeoutError) as error:
        seen, ok = plain(error) or type(error).__name__, False
    return made(
        "tls", "info" if ok else "strict", ok, title,
        observed=t("it accepts TLS 1.1") if old else seen, why=t("keys and prompts could be read on the network"),
        fix="" if ok else t("Check the certificate: {command}", command="atoll tls show"),
    )  # fmt: skip


def _accepts_old(target: Target) -> bool:
    import socket
    import warnings

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
            context.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection((target.host, target.port), 10) as raw, context.wrap_socket(raw):
            return True
    except (OSError, ssl.SSLError, ValueError):
        return False


async def _egress(subject: Subject) -> Finding:
    """Connections of our processes to other machines, except those that clients opened to the endpoint."""
    seen: set[str] = set()
    blind = 0
    ports = {subject.target.port}
    for _ in range(int(_WATCH_SECONDS / 0.25)):
        for pid in subject.pids():
            found = outgoing(pid, ports)
            blind += found is None
            seen.update(found or ())
        await asyncio.sleep(0.25)
    title = t("Outgoing connections")
    if blind and not seen:
        return not_checked("egress-sockets", title, t("this user may not see the processes' sockets"))
    return made(
        "egress-sockets", "info" if not seen else "strict", not seen, title,
        observed=joined(sorted(seen)) if seen else t("none of {count} processes has one", count=len(subject.pids())),
        why=t("nothing may leave this server"),
        fix="" if not seen else t("Stop the service and keep the report for support: {command}", command="atoll stop"),
        command="" if not seen else "atoll stop",
    )  # fmt: skip


def outgoing(pid: int, own_ports: set[int]) -> list[str] | None:
    """The connections of one process, "address:port" each; None if they cannot be seen."""
    try:
        connections = psutil.Process(pid).net_connections(kind="inet")
    except psutil.NoSuchProcess:
        return []
    except (psutil.Error, OSError):
        return None
    found = []
    for each in connections:
        if not each.raddr or (each.laddr and each.laddr.port in own_ports):
            continue
        if not ipaddress.ip_address(each.raddr.ip.split("%")[0]).is_loopback:
            found.append(f"{each.raddr.ip}:{each.raddr.port}")
    return found


def file_modes(layout: Layout) -> Finding:
    """Secrets are readable for their owner alone; nothing of ours is writable for others."""
    wrong: list[str] = []
    secret = [layout.credentials, layout.api_keys, layout.server_key, layout.ca_key, layout.state, layout.audit]
    for path in secret:
        mode = _mode(path)
        if mode is not None and mode & 0o077:
            wrong.append(t("{path} is open to others ({mode})", path=path, mode=f"{mode:04o}"))
    ours = [root for root in (layout.opt, layout.lib, layout.etc) if root.is_dir()]
    for root in ours:
        for path in (root, *_entries(root)):
            mode = _mode(path)
            if mode is not None and mode & 0o022:
                wrong.append(t("{path} may be changed by others ({mode})", path=path, mode=f"{mode:04o}"))
                if len(wrong) > 20:
                    break
    ok = not wrong
    return made(
        "file-modes", "info" if ok else "strict", ok, t("Files"),
        observed=joined(wrong[:3], "; ") if wrong else t("secrets are private, nothing may be changed by others"),
        why=t("whoever may change them controls the service; whoever may read them has its keys"),
        fix="" if ok else t("Remove these permissions, for example: {command}", command="chmod go-rwx FILE"),
        evidence="\n".join(map(str, wrong)),
    )  # fmt: skip


def _entries(root: Path) -> list[Path]:
    """What is below, three levels deep: a release's thousands of files have the modes of its installation."""
    found: list[Path] = []
    for directory, folders, files in os.walk(root):  # does not follow links
        found += [Path(directory, name) for name in (*folders, *files)]
        if len(Path(directory).relative_to(root).parts) >= _DEPTH - 1:
            folders.clear()
    return found


def _mode(path: Path) -> int | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return None if stat.S_ISLNK(info.st_mode) or stat.S_ISSOCK(info.st_mode) else stat.S_IMODE(info.st_mode)


async def _units(models: list[str]) -> Finding:
    wanted = [units.GATEWAY, *(units.engine_unit(model) for model in models)]
    levels = await asyncio.to_thread(exposure, wanted)
    title = t("Units")
    if not levels:
        return not_checked("unit-exposure", title, t("systemd-analyze does not answer"))
    wrong = {name: level for name, level in levels.items() if level > _MOST_EXPOSED}
    said = ", ".join(f"{name} {level:g}" for name, level in levels.items())
    return made(
        "unit-exposure", "info" if not wrong else "block", not wrong, title, observed=said,
        required=t("at most {level} of 10, by systemd-analyze security", level=f"{_MOST_EXPOSED:g}"),
        why=t("a unit's sandbox confines an attacker who has broken into it"),
        fix="" if not wrong else t("Remove drop-ins that loosen it: {command}",
                                   command=f"systemctl cat {next(iter(wrong))}"),
    )  # fmt: skip


def exposure(names: list[str]) -> dict[str, float]:
    """Unit → its exposure according to systemd-analyze; units that it does not know are left out."""
    found: dict[str, float] = {}
    for name in names:
        try:
            done = subprocess.run(["systemd-analyze", "security", "--no-pager", name], capture_output=True, text=True,
                                  timeout=30, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            continue
        if match := _EXPOSURE.search(done.stdout):
            found[name] = float(match[2])
    return found
