"""The options of `atoll serve`, `engine` and `gateway`. Each field is a setting: see engine.setting."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config import EngineConfig
from engine.server.http.limits import Limits
from engine.setting import flag_of, setting, settings_of

LogFormat = Literal["auto", "text", "json"]
LEVELS = ("critical", "error", "warning", "info", "debug", "trace")  # uvicorn's words

_ENDPOINT = "endpoint"
_LOGGING = "logging and configuration"
_PROCESS = "process"
_ENGINES = "engines"
_RELOAD = "reload (run as root by the unit)"


@dataclass(slots=True, kw_only=True)
class LogOptions:
    log_level: str = setting(
        "info", f"{', '.join(LEVELS)} ({{default}})", group=_LOGGING, metavar="LEVEL",
        choices={level: level for level in LEVELS})
    log_format: LogFormat = setting(
        "auto", "text, json, or auto: text on a terminal, else JSON lines", group=_LOGGING)


@dataclass(slots=True, kw_only=True)
class EndpointOptions(LogOptions):
    """An HTTP endpoint: where it listens, who may use it, how it stops."""

    host: str = setting("127.0.0.1", "address to listen on ({default}: this machine only)", group=_ENDPOINT)
    port: int = setting(8000, "TCP port ({default}); 0 takes a free one", group=_ENDPOINT, at_least=0, at_most=65535)
    ssl_certfile: Path | None = setting(None, "serve HTTPS with this certificate", group=_ENDPOINT, metavar="PEM")
    ssl_keyfile: Path | None = setting(None, "its private key", group=_ENDPOINT, metavar="PEM")
    api_key_file: Path | None = setting(
        None, "clients must present a key of this file", group=_ENDPOINT, metavar="FILE")
    allowed_origins: list[str] = setting(
        None, "web origins that browsers may call from, such as '[\"https://chat.example\"]' (none)",
        factory=list, group=_ENDPOINT, metavar="JSON", json_list=True)
    shutdown_timeout: float = setting(
        30.0, "what running requests get after Ctrl-C or SIGTERM ({default})", group=_ENDPOINT, metavar="SECONDS",
        at_least=0)
    access_log: bool = setting(
        True, "no log line for each HTTP request", group=_LOGGING, flags=("--disable-access-log",), const=False)
    otlp_traces_endpoint: str = setting(
        "", "an OpenTelemetry collector that gets spans of requests, by OTLP/HTTP: http://host:4318/v1/traces or "
        "unix:///run/collector.sock (none)", group=_LOGGING, metavar="URL")
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class ServeOptions(EndpointOptions):
    engine: EngineConfig
    config: Path | None = setting(
        None, "take flags from the [serve] table of this file", group=_LOGGING, metavar="TOML", line_only=True)
    uds: Path | None = setting(
        None, "serve HTTP on a Unix socket instead of host and port", group=_ENDPOINT, metavar="SOCKET")
    allow_plain_http: bool = setting(
        False, "no TLS although other machines reach the address: something in front of it speaks TLS",
        group=_ENDPOINT)
    generation_config: Literal["auto", "vllm"] = setting(
        "auto", "sampling defaults: auto takes the model's generation_config.json, vllm neutral ones ({default})",
        group=_ENDPOINT)
    max_restarts: int = setting(
        5, "restarts of a crashed engine in 10 minutes ({default})", group=_ENDPOINT, metavar="N", at_least=0)
    notes: list[str] = field(default_factory=list)  # about flags that were accepted but have no effect


@dataclass(slots=True)
class GatewayOptions(EndpointOptions):
    config: Path = setting(
        Path("/etc/atoll/atoll.toml"), "names the models, and holds flags in [gateway] ({default})", group=_ENGINES,
        metavar="TOML", line_only=True)
    host: str = setting(
        "127.0.0.1", "address to listen on, unless systemd hands us a socket ({default})", group=_ENDPOINT)
    port: int = setting(
        8443, "its TCP port ({default}); 0 takes a free one", group=_ENDPOINT, at_least=0, at_most=65535)
    engines: Path = setting(
        Path("/run/atoll/engine"), "holds a directory with engine.sock for each model ({default})", group=_ENGINES,
        metavar="DIR")
    credentials: Path | None = setting(
        None, "newer keys that a reload publishes here win", group=_ENDPOINT, metavar="DIR")
    allow_group: list[str] = setting(
        None, "engines of this group are trusted too, not only those of our own user", factory=list, group=_ENGINES,
        metavar="GROUP", many="append")
    check: bool = setting(
        False, "do not serve: check the settings, and load the models' tokenizers and templates", group=_ENGINES,
        const=True, line_only=True)
    publish: Path | None = setting(
        None, "do not serve: copy the secrets of this directory", group=_RELOAD, metavar="DIR", line_only=True)
    to: Path | None = setting(None, "to this one", group=_RELOAD, metavar="DIR", line_only=True)
    user: str = setting("", "readable by this user only", group=_RELOAD, metavar="USER", line_only=True)


@dataclass(slots=True)
class EngineOptions(LogOptions):
    """The options of the engine process. The last three are for the process that starts it."""

    engine: EngineConfig
    uds: Path = setting(
        Path("/"), "the Unix socket to listen on (required)", group=_PROCESS, metavar="SOCKET", line_only=True)
    gpus: str = setting(  # becomes CUDA_VISIBLE_DEVICES; "": all
        "", "the GPUs to use, by index or UUID (all)", group=_PROCESS, metavar="GPU", many=True)
    replica_of: str = setting(  # the gateway's business
        "", "answer under the name of that model's engine, with its settings, on GPUs of its own", group=_PROCESS,
        metavar="NAME")
    allow_user: list[str] = setting(
        None, "may connect, besides our own user", factory=list, group=_PROCESS, metavar="USER", many="append")
    allow_group: list[str] = setting(
        None, "members may connect", factory=list, group=_PROCESS, metavar="GROUP", many="append")
    config: Path | None = setting(
        None, "take flags from [engine] and [models.NAME] of this file, where NAME is given by --model",
        group=_LOGGING, metavar="TOML", line_only=True)
    check: bool = setting(
        False, "do not serve: check settings and model, and load the libraries", group=_PROCESS, const=True,
        line_only=True)
    parent_pid: int = setting(0, "", group=_PROCESS, hidden=True)
    take_over: int = setting(0, "", group=_PROCESS, hidden=True)     # the process that this one takes over from
    watchdog: float = setting(0.0, "", group=_PROCESS, hidden=True)  # seconds; a successor does not get it from systemd


def engine_argv(config: EngineConfig) -> list[str]:
    """The flags from which `parse_engine` makes this config; the supervisor starts its child with them."""
    argv: list[str] = ["--model", str(config.model)]
    for name, (knob, declared) in settings_of(EngineConfig).items():
        value: Any = getattr(config, name)
        default = knob.default if knob.default is not dataclasses.MISSING else []
        if name == "model" or value == default:
            continue
        flag = flag_of(name, declared)
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            argv += [flag, *value]
        else:
            argv.append(f"{flag}={value}")
    return argv
