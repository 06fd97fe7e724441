"""From the arguments of `atoll serve`, `engine` and `gateway` to checked options, before anything starts.

An error is a `ConfigError`: one sentence that names the flag.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.capabilities import check_capabilities, nvidia_driver_present, resolve_device
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.message import msg, reason
from engine.server.settings.flag_parser import FlagParser
from engine.server.settings.limit_settings import help_text, load_limits
from engine.server.settings.options import EndpointOptions, EngineOptions, GatewayOptions, ServeOptions
from engine.server.settings.server_file import check_gpus, engine_argv_of, gateway_argv_of
from engine.server.settings.values import check_bounds, is_collector
from engine.setting import settings_of

SERVE_EXAMPLES = """\
examples:
  atoll serve ./SmolLM2-135M-Instruct
  atoll serve /models/llama --served-model-name llama --max-model-len 8192
  atoll serve /models/llama --host 0.0.0.0 --api-key-file keys.json \\
      --ssl-certfile cert.pem --ssl-keyfile key.pem
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
  atoll engine --model chat --config /etc/atoll/atoll.toml \\
      --uds /run/atoll/engine/chat/engine.sock
  atoll engine --model chat --config /etc/atoll/atoll.toml --check

On a server, systemd runs the second form, one for each model: systemctl status 'atoll-engine@*'
"""

GATEWAY_EXAMPLES = """\
examples:
  atoll gateway --config /etc/atoll/atoll.toml
  atoll gateway --config /etc/atoll/atoll.toml --check
  atoll gateway --config atoll.toml --engines run/engine --port 8080

atoll.toml:
  [gateway]
  host = "0.0.0.0"
  port = 8443

  [gateway.limits]           # see below
  max-in-flight-per-key = 8

  [models.chat]              # its engine: atoll engine --model chat
  model = "/var/lib/atoll/models/…/model"

On a server, systemd runs it and hands it the listening socket: systemctl status atoll-gateway
A socket that other machines can reach needs TLS and API keys. SIGHUP reads certificate and keys again.

""" + help_text("gateway")


def parse_serve(argv: Sequence[str]) -> ServeOptions:
    """Raises ConfigError; exits 0 after `--help`."""
    parser = FlagParser(EngineConfig, ServeOptions, prog="atoll serve", usage="atoll serve MODEL_DIR [flags]",
                        epilog=SERVE_EXAMPLES, description=(
        "Serve a model directory behind an OpenAI endpoint: a gateway and an engine process, on this machine."))
    parser.add_vllm_flags()
    given, notes = parser.parse(argv, environment="ATOLL_SERVE_")
    config = _engine_config(given)
    options = ServeOptions(config, notes=notes, **_fields_of(ServeOptions, given))
    options.limits = load_limits(options.config, "serve")
    _check_endpoint(options)
    for flag, path in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", options.ssl_keyfile),
                       ("--api-key-file", options.api_key_file)):
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(msg("{flag} {path}: {strerror}.", flag=flag, path=path, strerror=reason(error)),
                                  flag) from None
    check_capabilities(config, resolve_device(config.device, nvidia_driver_present()))
    return options


def parse_engine(argv: Sequence[str]) -> EngineOptions:
    """Flags of `atoll engine`, and of the engine process of `atoll serve`. Raises ConfigError; exits after `--help`.

    The environment is not read: an engine and its gateway are two units, and must read the same settings.
    """
    parser = FlagParser(EngineConfig, EngineOptions, prog="atoll engine", epilog=ENGINE_EXAMPLES,
                        usage="atoll engine --model MODEL_DIR --uds SOCKET [flags]",
                        description="Run one engine behind a Unix socket, without HTTP and without a network.")

    def from_file(given: dict[str, Any]) -> list[str]:
        return engine_argv_of(given.pop("model", ""), given["config"])

    given, _ = parser.parse(argv, from_file)
    if "uds" not in given and not given.get("check"):
        raise ConfigError(msg("--uds is required: the Unix socket to listen on."), "--uds")
    config = _engine_config(given)
    given["gpus"] = check_gpus(given.get("gpus", []))
    if given["gpus"] and config.device == "cpu":
        raise ConfigError(msg("--gpus and --device cpu exclude each other."), "--gpus")
    if given["gpus"]:
        config.device = "cuda"  # whoever names a GPU does not want to fall back to the CPU
    return EngineOptions(config, **_fields_of(EngineOptions, given))


def engine_of(name: str, path: Path) -> EngineOptions:
    """The engine of [models.`name`] of a settings file, for its gateway. Raises ConfigError."""
    return parse_engine(["--model", name, "--config", str(path), "--uds", "/"])


def model_config(name: str, path: Path) -> EngineConfig:
    """The configuration of that engine. Raises ConfigError."""
    return engine_of(name, path).engine


def parse_gateway(argv: Sequence[str]) -> GatewayOptions:
    """Raises ConfigError; exits 0 after `--help`."""
    parser = FlagParser(GatewayOptions, prog="atoll gateway", usage="atoll gateway [--config TOML] [flags]",
                        epilog=GATEWAY_EXAMPLES,
                        description="Serve the OpenAI API in front of the engines of this machine.")
    parser.set_defaults(config=settings_of(GatewayOptions)["config"][0].default)

    def from_file(given: dict[str, Any]) -> list[str]:
        return [] if "publish" in given else gateway_argv_of(given["config"])

    given, _ = parser.parse(argv, from_file, environment="ATOLL_GATEWAY_")
    if "model" in given:
        raise ConfigError(msg("Unexpected argument {model}: the file of --config names the models.",
                              model=f"{given['model']!r}"))
    options = GatewayOptions(**given)
    if options.publish is None:
        options.limits = load_limits(options.config, "gateway")
    elif options.to is None or not options.user:
        raise ConfigError(msg("--publish needs --to DIR and --user USER."), "--publish")
    _check_endpoint(options)
    return options


def _fields_of(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in settings_of(cls) if name in given}


def _engine_config(given: dict[str, Any]) -> EngineConfig:
    model = given.get("model")
    if not model:
        raise ConfigError(msg("No model directory was given, neither as first argument nor with --model."), "--model",
                          msg("For example: atoll serve ./my-model"))
    if (tokenizer := given.get("tokenizer")) and Path(tokenizer).resolve() != Path(model).resolve():
        raise ConfigError(msg("--tokenizer is refused: the tokenizer comes from the model directory."), "--tokenizer")
    config = EngineConfig(**{"served_model_name": [model], **_fields_of(EngineConfig, given)})
    if config.quantization in ("none", "None", ""):
        config.quantization = None
    check_bounds(config)
    for name in config.served_model_name:
        if not name.strip() or not name.isprintable() or len(name) > 256:
            raise ConfigError(msg("--served-model-name must be 1 to 256 printable characters."), "--served-model-name")
    return config


def _check_endpoint(options: EndpointOptions) -> None:
    """Raises ConfigError."""
    check_bounds(options)
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise ConfigError(msg("--ssl-certfile and --ssl-keyfile belong together: one of them is missing."),
                          "--ssl-certfile")
    if options.otlp_traces_endpoint and not is_collector(options.otlp_traces_endpoint):
        raise ConfigError(msg("--otlp-traces-endpoint must be the URL of a collector, without a user or a query."),
                          "--otlp-traces-endpoint", msg("For example: http://collector.lan:4318/v1/traces"))
