"""What may leave the machine in a support bundle.

Allow-lists come first; patterns of secrets are only the second net, and a last check finds what slipped through both. A
log line is included only if it is one of ours, and only with the fields named here. Tracebacks keep files, lines and
the class of the error, never its text: that may contain what a client sent.
"""

import ipaddress
import json
import re
from collections.abc import Iterable
from typing import Any

from installer.base.i18n import t

GONE = "<redacted>"
NOT_SHOWN = "<not shown>"

# -- secrets, recognised by their form

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_TOKENS = re.compile(
    r"\bsk-[A-Za-z0-9_-]{8,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{12,}|\bxox[a-z]-[A-Za-z0-9-]{10,}|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
)
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)(?!realm\b)[^\s\"',;]+", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:[\w.-]*(?:passw(?:or)?d|passphrase|secret|credential|api[-_]?key|access[-_]?key|auth(?:orization)?(?![a-z])"
    r"|(?<![a-z])token)[\w.-]*)[\"']?\s*[:=]\s*)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;&\"'{}\[\]]+)",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@:\"']+:[^\s/@\"']+@", re.IGNORECASE)
_HARMLESS = re.compile(r"""["']?(?:\d+(?:\.\d+)?|true|false|null|none|never)["']?\Z""", re.IGNORECASE)


def secrets_out(text: str) -> str:
    """`text` without anything that looks like a key, a token or a password."""
    text = _PRIVATE_KEY.sub(GONE, text)
    text = _TOKENS.sub(GONE, text)
    text = _USERINFO.sub(rf"\1{GONE}@", text)
    text = _BEARER.sub(rf"\1{GONE}", text)
    return _NAMED.sub(_named, text)


def _named(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    inner = value.strip("\"'")
    if _HARMLESS.match(value) or inner in (GONE, NOT_SHOWN) or inner.startswith("/"):  # a path is not a secret
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}{GONE}{quote}"


def looks_secret(data: bytes, known: Iterable[bytes] = ()) -> str | None:
    """The kind of secret that `data` still holds, or None: the last check before it is written. `known`: this machine's
    secrets."""
    text = data.decode(errors="replace")
    if "PRIVATE KEY-----" in text:
        return t("a private key")
    if _TOKENS.search(text):
        return t("an access key")
    if any(secret in data for secret in known if len(secret) >= 16):
        return t("a part of one of this machine's private keys")
    return None


# -- addresses, on request


class Addresses:
    """Replaces addresses and this machine's names by numbered placeholders; equal ones get the same placeholder."""

    _V4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
    _V6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])", re.IGNORECASE)

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.seen: dict[str, str] = {}
        words = {name for name in names if len(name) > 2 and name != "localhost" and not _is_address(name)}
        joined = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        self._names = re.compile(rf"(?<![\w.-])(?:{joined})(?![\w-])", re.IGNORECASE) if words else None

    def out(self, text: str) -> str:
        text = self._V4.sub(self._address, text)
        text = self._V6.sub(self._address, text)
        return self._names.sub(lambda match: self._stand_in(match[0].lower(), "host"), text) if self._names else text

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return self._stand_in(str(address), "address")

    def _stand_in(self, value: str, kind: str) -> str:
        return self.seen.setdefault(value, f"<{kind}-{len(self.seen) + 1}>")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# -- log lines

LOG_FIELDS = (
    "time", "level", "logger", "message", "status", "ms", "client", "key", "incomplete", "url", "urls", "models",
    "seconds", "restarts", "restart", "device", "dtype", "pid", "max_model_len",
    "error_id",
)  # fmt: skip
_OURS = ("atoll", "engine", "installer", "appliance", "offline_bundle")
_ROUTES = re.compile(
    r"([A-Z]{3,7}) (/v1/chat/completions|/v1/completions|/v1/models|/tokenize|/detokenize|/health|/livez|/version"
    r"|/metrics|/openapi\.json)\Z"
)
_SYSTEMD = re.compile(
    r"(?:Start|Stopp|Reload|Finish|Clos|Listen|Reach)\w+ (?:on )?(?:atoll[\w@.-]*|Atoll[\w .-]*)(?: - [\w .-]*)?\.*\Z"
    r"|atoll[\w@.-]*: (?:Main process exited, code=\w+, status=[\w/]+|Control process exited, code=\w+, status=[\w/]+"
    r"|Failed with result '[\w-]+'\.|Scheduled restart job, restart counter is at \d+\.|Deactivated successfully\."
    r"|Start request repeated too quickly\.|Watchdog timeout \(limit [\w ]+\)!|Consumed [\w. ]+ CPU time[\w., ]*"
    r"|Killing process \d+ \([\w.-]+\) with signal \w+\.)\Z"
)
_SUPERVISOR = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d supervisor: exit status -?\d+\Z")
_FRAME = re.compile(r'\s+File "[^"\n]*", line \d+, in [\w<>.]+\s*\Z')
_ERROR_CLASS = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning))\b")
_STREAM = re.compile(r"(stream failed|stream ended early): ((?:\w+\.)*\w*(?:Error|Exception|Disconnect))?")


def log_line(text: str) -> str | None:
    """The part of a log line that may leave the machine; None: nothing."""
    if text.startswith("{"):
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return _entry(entry) if isinstance(entry, dict) else None
    if _SYSTEMD.match(text) or _SUPERVISOR.match(text):
        return text
    if text.startswith("Traceback (most recent call last)"):
        return "Traceback (most recent call last):"
    if _FRAME.match(text):
        return text
    if found := _ERROR_CLASS.match(text):
        return f"{found[1]}: {NOT_SHOWN}"
    return None


def _entry(entry: dict[str, Any]) -> str:
    logger = str(entry.get("logger", ""))
    kept = {name: entry[name] for name in LOG_FIELDS if _plain(entry.get(name))}
    kept["message"] = _message(logger, str(entry.get("message", "")))
    if isinstance(trace := entry.get("traceback"), str):
        kept["traceback"] = [line for part in trace.splitlines() if (line := log_line(part)) is not None]
    return json.dumps(kept, ensure_ascii=False)


def _plain(value: Any) -> bool:
    """A number, one of our own words, or a short list of these: no room for free text."""
    if isinstance(value, list):
        return len(value) <= 32 and all(_plain(item) and not isinstance(item, list) for item in value)
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 200)


def _message(logger: str, message: str) -> str:
    if logger == "atoll.access":
        found = _ROUTES.match(message)
        return found[0] if found else f"{message.split(' ')[0][:7]} <another path>"
    if logger == "atoll.server":  # about requests: keep what happened, drop whose and what
        if message.startswith("request ") and message.endswith(" failed"):
            return "request failed"
        found = _STREAM.match(message)
        return f"{found[1]}: {found[2] or ''} {NOT_SHOWN}" if found else NOT_SHOWN
    return message if logger.split(".")[0] in _OURS else NOT_SHOWN


# -- settings

SETTINGS = frozenset({
    "schema_version", "host", "port", "model", "served-model-name", "gpus", "device", "dtype", "quantization",
    "max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "kv-cache-memory-bytes",
    "kv-cache-dtype", "block-size", "enable-prefix-caching", "enable-chunked-prefill", "enforce-eager",
    "tensor-parallel-size", "seed", "load-format", "mamba-ssm-cache-dtype", "per-layer-embeddings", "shutdown-timeout",
    "max-restarts", "log-level", "log-format", "access-log", "disable-access-log", "generation-config", "api-key-file",
    "ssl-certfile", "ssl-keyfile", "allow-plain-http", "uds", "scheduling-policy", "stream-interval",
    "async-scheduling", "batch-invariant", "disable-cascade-attn",
})  # fmt: skip


def settings(table: Any, depth: int = 0) -> Any:
    """The tables of atoll.toml. A value is kept only under a name that is known to hold no secret."""
    if not isinstance(table, dict) or depth > 3:
        return NOT_SHOWN
    shown: dict[str, Any] = {}
    for name, value in table.items():
        if name == "limits" and isinstance(value, dict):  # limits of the endpoint: numbers and switches
            shown[name] = {_word(limit): bound if isinstance(bound, int | float) else NOT_SHOWN
                           for limit, bound in value.items()}
        elif isinstance(value, dict):
            shown[_word(name)] = settings(value, depth + 1)
        else:
            known = str(name).replace("_", "-") in SETTINGS or name in SETTINGS
            shown[_word(name)] = value if known and _plain(value) else NOT_SHOWN
    return shown


def _word(name: Any) -> str:
    """A key of a file that anybody may have written, if it looks like one."""
    text = str(name)
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else NOT_SHOWN


# -- unit files

_UNIT_VALUES = re.compile(
    r"(?:Private|Protect|Restrict|Limit|Memory|CPU|Tasks|IO|IP|Device|SystemCall|Timeout|Watchdog|Start|Kill|OOM|Type|User"
    r"|Group|UMask|NoNew|Capability|Ambient|Lock|Remove|Keyring|Read|Inaccessible|Runtime|Cache|State|Slice|Nice"
    r"|Requires|After|Before|Wants|PartOf|Conflicts|ListenStream|Accept|BindIPv6|OnCalendar|RandomizedDelay|Persistent"
    r"|Unit|Notify|Remain|SuccessExit|Proc|DynamicUser|SupplementaryGroups|AmbientCap|DefaultDependencies)\w*\Z"
)


def unit_file(text: str) -> str:
    """A unit file or drop-in: the names of all settings, but values only if they can be nothing but a rule of systemd's
    (not those of programs, environments, credentials)."""
    lines = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if re.fullmatch(r"\[[A-Za-z]+\]", name) and not equals:
            lines.append(name)
        elif not equals or not re.fullmatch(r"[A-Za-z0-9]+", name):
            lines.append(NOT_SHOWN)  # a continued line, or not systemd's syntax
        elif (_UNIT_VALUES.match(name) and len(value) <= 300) or (name == "Restart" and value.isalpha()):
            lines.append(f"{name}={value}")
        else:
            lines.append(f"{name}={NOT_SHOWN if value else ''}")
    return "\n".join(lines) + "\n"
