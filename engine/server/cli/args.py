"""The flags of `atoll serve` and of the engine process: vLLM's names and meanings, from the line or a TOML file.

Everything is checked here before anything starts. An error is a `ConfigError`: one sentence that names the flag.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.capabilities import check_capabilities, nvidia_driver_present, resolve_device
from engine.config import PAGE_SIZES, STATE_DTYPES, TABLE_PLACES, EngineConfig
from engine.errors import ConfigError
from engine.server.cli.flag_parser import (
    FlagParser,
    Note,
    OnlyOne,
    Refuse,
    human_size,
    human_size_or_auto,
    json_strings,
)
from engine.server.cli.limit_settings import help_text, load_limits
from engine.server.cli.settings import check_gpus, engine_argv_of
from engine.server.cli.vllm_flags import IGNORED_SWITCHES, IGNORED_VALUES, ONLY_ONE, REFUSED_SWITCHES, REFUSED_VALUES
from engine.server.http.limits import Limits
from engine.server.process.logs import LEVELS, LogFormat

DTYPES = {"auto": "auto", "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32",
          "float32": "float32"}
LOAD_FORMATS = {"auto": "auto", "safetensors": "safetensors", "dummy": "dummy",
                "runai_streamer": "safetensors", "fastsafetensors": "safetensors"}

EXAMPLES = """\
examples:
  atoll serve ./SmolLM2-135M-Instruct
  atoll serve /models/llama --served-model-name llama --max-model-len 8192 --port 8080
  atoll serve /models/llama --host 0.0.0.0 --api-key-file keys.json --ssl-certfile cert.pem --ssl-keyfile key.pem
  atoll serve --config serve.toml --max-num-seqs 32

serve.toml:
  [serve]
  model = "/models/llama"
  max-model-len = 8192
  enable-prefix-caching = false

  [serve.limits]             # see below
  max-in-flight = 64

Flags are those of `vllm serve`; dashes and underscores are the same. Sizes may be written 32k (32000), 32K (32768), 1M.

""" + help_text("serve")

ENGINE_EXAMPLES = """\
examples:
  atoll engine --model ./SmolLM2-135M-Instruct --uds /tmp/engine.sock
  atoll engine --model chat --config /etc/atoll/atoll.toml --uds /run/atoll/engine/chat/engine.sock
  atoll engine --model chat --config /etc/atoll/atoll.toml --check

On a server, systemd runs the second form, one for each model: systemctl status 'atoll-engine@*'
"""


@dataclass(slots=True)
class ServeOptions:
    """What `atoll serve` was asked for."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None             # serve HTTP on this Unix socket instead of host and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key_file: Path | None = None
    allow_plain_http: bool = False      # on an address that other machines reach
    shutdown_timeout: float = 30.0
    max_restarts: int = 5
    log_format: LogFormat = "auto"
    log_level: str = "info"
    access_log: bool = True
    allowed_origins: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    generation_config: str = "auto"     # "auto": sampling defaults of generation_config.json; "vllm": neutral ones
    notes: list[str] = field(default_factory=list)  # what was accepted but changes nothing


@dataclass(slots=True)
class EngineOptions:
    """What the engine process was asked for."""

    engine: EngineConfig
    uds: Path
    allow_user: list[str] = field(default_factory=list)
    allow_group: list[str] = field(default_factory=list)
    parent_pid: int = 0
    check: bool = False                 # do not serve: prepare, and say whether that went well
    take_over: int = 0                  # process to take over from; 0: none
    watchdog: float = 0.0               # seconds, where systemd does not tell (it tells no successor)
    gpus: str = ""                      # CUDA_VISIBLE_DEVICES; "": all
    log_format: LogFormat = "auto"
    log_level: str = "info"


def parse_serve(argv: Sequence[str]) -> ServeOptions:
    """Raises ConfigError; exits 0 after `--help`."""
    parser = FlagParser(prog="atoll serve", usage="atoll serve MODEL_DIR [flags]", epilog=EXAMPLES, description=(
        "Serve a model directory behind an OpenAI endpoint: a gateway and an engine process, on this machine."))
    _add_engine_flags(parser)
    _add_http_flags(parser)
    _add_compatibility_flags(parser)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this text")

    given, notes = parser.parse(argv)
    config = _engine_config(given)
    ours = {knob.name for knob in dataclasses.fields(ServeOptions)} - {"engine", "notes"}
    options = ServeOptions(engine=config, notes=notes, **{k: v for k, v in given.items() if k in ours})
    options.limits = load_limits(given.get("config"), "serve")
    _check_http(options)
    check_capabilities(config, resolve_device(config.device, nvidia_driver_present()))
    return options


def parse_engine(argv: Sequence[str]) -> EngineOptions:
    """Flags of `atoll engine`, and of the engine process of `atoll serve`. Raises ConfigError; exits after `--help`."""
    parser = FlagParser(prog="atoll engine", usage="atoll engine --model MODEL_DIR --uds SOCKET [flags]",
                        epilog=ENGINE_EXAMPLES,
                        description="Run one engine behind a Unix socket, without HTTP and without a network.")
    _add_engine_flags(parser)
    group = parser.add_argument_group("process")
    group.add_argument("--uds", type=Path, metavar="SOCKET", help="the Unix socket to listen on (required)")
    group.add_argument("--gpus", nargs="+", metavar="GPU", help="the GPUs to use, by index or UUID (all)")
    group.add_argument("--allow-user", action="append", metavar="USER", help="may connect, besides our own user")
    group.add_argument("--allow-group", action="append", metavar="GROUP", help="members may connect")
    group.add_argument("--config", type=Path, metavar="TOML",
                       help="take flags from [engine] and [models.NAME] of this file, where NAME is given by --model")
    group.add_argument("--check", action="store_const", const=True,
                       help="do not serve: check settings and model, and load the libraries")
    group.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    group.add_argument("--take-over", type=int, metavar="PID", help=argparse.SUPPRESS)  # for ExecReload
    group.add_argument("--watchdog", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    add_log_flags(group)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this text")

    def from_file(given: dict[str, Any]) -> list[str]:
        return engine_argv_of(given.pop("model", ""), given["config"])

    given, _ = parser.parse(argv, from_file)
    if "uds" not in given and not given.get("check"):
        raise ConfigError("--uds is required: the Unix socket to listen on.", "--uds")
    given.setdefault("uds", Path("/"))
    names = ("uds", "allow_user", "allow_group", "parent_pid", "log_format", "log_level", "check", "take_over",
             "watchdog")
    config = _engine_config(given)
    gpus = check_gpus(given.get("gpus", []))
    if gpus and config.device == "cpu":
        raise ConfigError("--gpus and --device cpu exclude each other.", "--gpus")
    if gpus:
        config.device = "cuda"  # who names a GPU does not want to fall back to the CPU
    return EngineOptions(engine=config, gpus=gpus, **{name: given[name] for name in names if name in given})


def model_config(name: str, path: Path) -> EngineConfig:
    """What the engine of [models.`name`] of a settings file runs, for its gateway. Raises ConfigError."""
    return parse_engine(["--model", name, "--config", str(path), "--uds", "/"]).engine


def engine_argv(config: EngineConfig) -> list[str]:
    """The flags that make `parse_engine` return this config: how the supervisor starts its child."""
    argv = ["--model", str(config.model)]
    for knob in dataclasses.fields(EngineConfig):
        value = getattr(config, knob.name)
        default = knob.default if knob.default is not dataclasses.MISSING else []
        if knob.name in ("model", "skip_tokenizer_init", "overlap") or value == default:
            continue
        flag = "--" + knob.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            argv += [flag, *value]
        else:
            argv.append(f"{flag}={value}")
    return argv


# -- the flags


def _add_engine_flags(parser: FlagParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="MODEL_DIR", help="the model directory, if not given as first argument")
    model.add_argument("--served-model-name", nargs="+", metavar="NAME",
                       help="name(s) that clients use; the first is shown in answers (default: the path as given)")
    model.add_argument("--dtype", choices=tuple(DTYPES), help="precision of weights and activations (auto)")
    model.add_argument("--quantization", "-q", metavar="METHOD", help="quantise weights, where the device can")
    model.add_argument("--load-format", choices=tuple(LOAD_FORMATS), metavar="FORMAT",
                       help="auto, safetensors, or dummy for random weights (auto)")
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to run (auto)")
    model.add_argument("--seed", type=int, help="base of the seeds of requests without one (random)")
    model.add_argument("--tokenizer", metavar="PATH", help=argparse.SUPPRESS)

    memory = parser.add_argument_group("memory")
    memory.add_argument("--max-model-len", type=human_size_or_auto, metavar="TOKENS",
                        help="context in tokens, prompt plus answer; auto or -1: the largest that fits")
    memory.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE",
                        help="share of the device's memory to use, above 0 and at most 1 (0.9)")
    memory.add_argument("--kv-cache-memory-bytes", type=human_size, metavar="BYTES",
                        help="bytes for the KV cache, instead of a share")
    memory.add_argument("--kv-cache-dtype", metavar="DTYPE", help="precision of the KV cache (auto)")
    memory.add_argument("--mamba-ssm-cache-dtype", choices=("auto", *STATE_DTYPES),
                        help="precision of recurrent layers' states; auto takes the model's own (auto)")
    memory.add_argument("--per-layer-embeddings", choices=("auto", *TABLE_PLACES),
                        help="where Gemma 4 E2B's and E4B's are: auto takes the host where it has room, else the GPU "
                             "(auto)")
    memory.add_argument("--block-size", type=int, metavar="TOKENS", choices=PAGE_SIZES,
                        help="tokens a page (8 on a CPU, 16 on a GPU)")

    schedule = parser.add_argument_group("scheduling")
    schedule.add_argument("--max-num-seqs", type=human_size, metavar="N", help="sequences that run at a time")
    schedule.add_argument("--max-num-batched-tokens", type=human_size, metavar="N", help="tokens of one step")
    schedule.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction,
                          help="split long prompts over steps (on)")
    schedule.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
                          help="reuse the pages of prompts that begin alike (on)")
    schedule.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help="order of waiting requests (fcfs)")
    schedule.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction,
                          help="the same bits for a request in any batch, at the price of speed (off)")
    schedule.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, help="no CUDA graphs (off)")
    schedule.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="N", help="GPUs to split over (1)")


def _add_http_flags(parser: FlagParser) -> None:
    http = parser.add_argument_group("endpoint")
    http.add_argument("--host", help="address to listen on (127.0.0.1: this machine only)")
    http.add_argument("--port", type=int, help="TCP port (8000); 0 takes a free one")
    http.add_argument("--uds", type=Path, metavar="SOCKET", help="serve HTTP on a Unix socket instead of host and port")
    http.add_argument("--api-key-file", type=Path, metavar="FILE",
                      help="clients must present a key of this file (made by atoll keys new)")
    http.add_argument("--ssl-certfile", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    http.add_argument("--ssl-keyfile", type=Path, metavar="PEM", help="its private key")
    http.add_argument("--allow-plain-http", action=argparse.BooleanOptionalAction,
                      help="no TLS although other machines reach the address: something in front of it speaks TLS")
    http.add_argument("--allowed-origins", type=json_strings, metavar="JSON",
                      help="web origins that browsers may call from, such as '[\"https://chat.example\"]' (none)")
    http.add_argument("--generation-config", choices=("auto", "vllm"),
                      help="sampling defaults: auto takes the model's generation_config.json, vllm neutral ones (auto)")
    http.add_argument("--shutdown-timeout", type=float, metavar="SECONDS",
                      help="what running requests get after Ctrl-C or SIGTERM (30)")
    http.add_argument("--max-restarts", type=int, metavar="N", help="restarts of a crashed engine in 10 minutes (5)")

    logs = parser.add_argument_group("logging and configuration")
    add_log_flags(logs)
    logs.add_argument("--uvicorn-log-level", dest="log_level", choices=LEVELS, help=argparse.SUPPRESS)
    logs.add_argument("--disable-uvicorn-access-log", "--disable-access-log", dest="access_log", action="store_const",
                      const=False, help="no log line for each HTTP request")
    logs.add_argument("--config", type=Path, metavar="TOML", help="take flags from the [serve] table of this file")


def add_log_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log-level", choices=LEVELS, metavar="LEVEL", help=f"{', '.join(LEVELS)} (info)")
    group.add_argument("--log-format", choices=("auto", "text", "json"),
                       help="text, json, or auto: text on a terminal, else JSON lines")


def _add_compatibility_flags(parser: FlagParser) -> None:
    """What scripts written for vLLM carry: accepted with a note, or refused with a reason. Not shown in --help."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "dest": "_compatibility"}
    for name, why in IGNORED_SWITCHES.items():
        parser.add_argument(f"--{name}", f"--no-{name}", action=Note, nargs=0, why=why, **hidden)
    for name, why in IGNORED_VALUES.items():
        parser.add_argument(f"--{name}", action=Note, nargs=1, why=why, **hidden)
    for name, why in REFUSED_SWITCHES.items():
        parser.add_argument(f"--{name}", f"--no-{name}", action=Refuse, nargs=0, why=why, **hidden)
    for name, why in REFUSED_VALUES.items():
        parser.add_argument(f"--{name}", action=Refuse, nargs="+", why=why, **hidden)
    for names, why in ONLY_ONE.items():
        parser.add_argument(*names, action=OnlyOne, type=int, nargs=1, why=why, **hidden)


# -- from flags to checked options


def _engine_config(given: dict[str, Any]) -> EngineConfig:
    model = given.get("model")
    if not model:
        raise ConfigError("No model directory was given, neither first nor with --model.", "--model",
                          "For example: atoll serve ./my-model")
    if (tokenizer := given.get("tokenizer")) and Path(tokenizer).resolve() != Path(model).resolve():
        raise ConfigError("--tokenizer is refused: the tokenizer comes from the model directory.", "--tokenizer")
    names = {knob.name for knob in dataclasses.fields(EngineConfig)}
    knobs = {name: value for name, value in given.items() if name in names}
    knobs.setdefault("served_model_name", [model])
    if "dtype" in knobs:
        knobs["dtype"] = DTYPES[knobs["dtype"]]
    if "load_format" in knobs:
        knobs["load_format"] = LOAD_FORMATS[knobs["load_format"]]
    if knobs.get("quantization") in ("none", "None", ""):
        knobs["quantization"] = None
    config = EngineConfig(**knobs)
    _check_ranges(config)
    return config


def _check_ranges(config: EngineConfig) -> None:
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, got "
                          f"{config.gpu_memory_utilization}.", "--gpu-memory-utilization")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes",
                 "tensor_parallel_size"):
        value = getattr(config, name)
        if isinstance(value, int) and value < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1, got {value}.", flag)
    for name in config.served_model_name:
        if not name.strip() or not name.isprintable() or len(name) > 256:
            raise ConfigError("--served-model-name must be 1 to 256 printable characters.", "--served-model-name")


def check_listening(port: int, ssl_certfile: Path | None, ssl_keyfile: Path | None, shutdown_timeout: float) -> None:
    """What `atoll serve` and `atoll gateway` ask of the same flags. Raises ConfigError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must lie between 0 and 65535, got {port}.", "--port")
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile belong together: one of them is missing.", "--ssl-certfile")
    if shutdown_timeout < 0:
        raise ConfigError("--shutdown-timeout must not be negative.", "--shutdown-timeout")


def _check_http(options: ServeOptions) -> None:
    check_listening(options.port, options.ssl_certfile, options.ssl_keyfile, options.shutdown_timeout)
    if options.max_restarts < 0:
        raise ConfigError("--max-restarts must not be negative.", "--max-restarts")
    for flag, path in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", options.ssl_keyfile),
                       ("--api-key-file", options.api_key_file)):
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"{flag} {path}: {error.strerror}.", flag) from None
