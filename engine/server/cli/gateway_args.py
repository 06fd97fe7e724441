"""The flags of `atoll gateway`: HTTP in front of engines that run as services of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.server.cli.args import add_log_flags, check_listening
from engine.server.cli.flag_parser import FlagParser, json_strings
from engine.server.cli.limit_settings import help_text, load_limits
from engine.server.cli.settings import gateway_argv_of
from engine.server.http.limits import Limits
from engine.server.process.logs import LogFormat

EXAMPLES = """\
examples:
  atoll gateway --config /etc/atoll/atoll.toml
  atoll gateway --config /etc/atoll/atoll.toml --check
  atoll gateway --config atoll.toml --engines run/engine --host 127.0.0.1 --port 8080

atoll.toml:
  [gateway]
  host = "0.0.0.0"
  port = 8443

  [gateway.limits]           # see below
  max-in-flight-per-key = 8

  [models.chat]              # its engine: atoll engine --model chat, on <engines>/chat/engine.sock
  model = "/var/lib/atoll/models/…/model"

On a server, systemd runs it and hands it the listening socket: systemctl status atoll-gateway
A socket that other machines can reach needs TLS and API keys. SIGHUP reads certificate and keys again.

""" + help_text("gateway")


@dataclass(slots=True)
class GatewayOptions:
    """What `atoll gateway` was asked for."""

    config: Path = Path("/etc/atoll/atoll.toml")
    engines: Path = Path("/run/atoll/engine")   # <instance>/engine.sock below it
    credentials: Path | None = None             # where a reload publishes newer secrets
    allow_group: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8443
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key_file: Path | None = None
    shutdown_timeout: float = 30.0
    log_format: LogFormat = "auto"
    log_level: str = "info"
    access_log: bool = True
    allowed_origins: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    check: bool = False                         # do not serve: load everything, and say whether that went well
    publish: Path | None = None                 # instead of serving: copy secrets from here …
    to: Path | None = None                      # … to here …
    user: str = ""                              # … for this user


def parse_gateway(argv: Sequence[str]) -> GatewayOptions:
    """Raises ConfigError; exits 0 after `--help`."""
    parser = FlagParser(prog="atoll gateway", usage="atoll gateway [--config TOML] [flags]", epilog=EXAMPLES,
                        description="Serve the OpenAI API in front of the engines of this machine.")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--config", type=Path, metavar="TOML",
                         help="names the models, and holds flags in [gateway] (/etc/atoll/atoll.toml)")
    engines.add_argument("--engines", type=Path, metavar="DIR",
                         help="holds a directory with engine.sock for each model (/run/atoll/engine)")
    engines.add_argument("--allow-group", action="append", metavar="GROUP",
                         help="engines of this group are trusted too, not only those of our own user")
    engines.add_argument("--check", action="store_const", const=True,
                         help="do not serve: check the settings, and load the models' tokenizers and templates")
    http = parser.add_argument_group("endpoint")
    http.add_argument("--host", help="address to listen on, unless systemd hands us a socket (127.0.0.1)")
    http.add_argument("--port", type=int, help="its TCP port (8443); 0 takes a free one")
    http.add_argument("--ssl-certfile", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    http.add_argument("--ssl-keyfile", type=Path, metavar="PEM", help="its private key")
    http.add_argument("--api-key-file", type=Path, metavar="FILE", help="clients must present a key of this file")
    http.add_argument("--credentials", type=Path, metavar="DIR", help="newer keys that a reload publishes here win")
    http.add_argument("--allowed-origins", type=json_strings, metavar="JSON",
                      help="web origins that browsers may call from, such as '[\"https://chat.example\"]' (none)")
    http.add_argument("--shutdown-timeout", type=float, metavar="SECONDS",
                      help="what running requests get after SIGTERM (30)")
    logs = parser.add_argument_group("logging")
    add_log_flags(logs)
    logs.add_argument("--disable-access-log", dest="access_log", action="store_const", const=False,
                      help="no log line for each HTTP request")
    publish = parser.add_argument_group("reload (run as root by the unit)")
    publish.add_argument("--publish", type=Path, metavar="DIR", help="do not serve: copy the secrets of this directory")
    publish.add_argument("--to", type=Path, metavar="DIR", help="to this one")
    publish.add_argument("--user", metavar="USER", help="readable by this user only")
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this text")
    parser.set_defaults(config=GatewayOptions().config)

    def from_file(given: dict[str, Any]) -> list[str]:
        return [] if "publish" in given else gateway_argv_of(given["config"])

    given, _ = parser.parse(argv, from_file)
    if "model" in given:
        raise ConfigError(f"Unexpected argument {given['model']!r}: models stand in the file of --config.")
    options = GatewayOptions(**given)
    if options.publish is None:
        options.limits = load_limits(options.config, "gateway")
    _check(options)
    return options


def _check(options: GatewayOptions) -> None:
    if options.publish is not None and (options.to is None or not options.user):
        raise ConfigError("--publish needs --to DIR and --user USER.", "--publish")
    check_listening(options.port, options.ssl_certfile, options.ssl_keyfile, options.shutdown_timeout)
