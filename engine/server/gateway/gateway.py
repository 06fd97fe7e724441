"""`atoll gateway`: one HTTP endpoint in front of the engines of a server, which start and fail independently.

A request goes to the engine that its `model` names. While an engine restarts, requests for its model get a 503 with
Retry-After, and other models are not affected; the gateway finds the new process on the same socket path. Exit status:
0 stopped, 2 a setting cannot be honoured, 11 no model's files can be read, 1 a defect.
"""

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, ModelError, complain
from engine.message import joined, msg
from engine.server.access import credentials
from engine.server.gateway.fleet import Fleet
from engine.server.http.listening import bind_tcp, check_tls, inherited_sockets, is_local, url_of
from engine.server.openai.serving import Gateway
from engine.server.process import logs
from engine.server.process.exit import exit_now
from engine.server.process.notify import Notifier
from engine.server.settings.commands import parse_gateway
from engine.server.settings.options import GatewayOptions

if TYPE_CHECKING:
    from engine.server.gateway.http_server import HttpServer
    from engine.server.gateway.main_loop import Serving

log = logging.getLogger("atoll.gateway")

EXIT_CONFIG = 2
EXIT_MODEL = 11
_STATES = {"connecting": "not running", "dead": "down", "stalled": "does not answer"}  # of a client, in plain words
STATUS_SECONDS = 1.0  # how often the engines' states are read and the watchdog is fed


def main(argv: list[str]) -> int:
    """Entry point of `atoll gateway`; returns the exit status."""
    try:
        options = parse_gateway(argv)
        if options.publish is not None and options.to is not None:
            credentials.publish(options.publish, options.to, options.user)
            return 0
        logs.setup(options.log_format, options.log_level)
        check_tls(*_tls(options))
        if options.check:
            return _check(options)
        keys = _keys(options)
        sockets = inherited_sockets() or [bind_tcp(options.host, options.port)]
        _refuse_exposure(options, sockets)
        fleet = Fleet(options)
    except ConfigError as error:
        complain("atoll gateway", error)
        return EXIT_CONFIG
    except ModelError as error:
        complain("atoll gateway", error)
        return EXIT_MODEL
    from engine.server.gateway.main_loop import run

    return exit_now(run(_serving(options, sockets, keys, fleet)))


def _check(options: GatewayOptions) -> int:
    """Load everything that serving needs, without a socket. Returns 0 if every model can be served."""
    from engine.server.gateway import app, main_loop  # noqa: F401

    return EXIT_MODEL if Fleet(options).broken else 0


def _keys(options: GatewayOptions) -> credentials.GatewayKeys | None:
    if options.api_key_file is None:
        return None
    published = options.credentials / credentials.KEYS if options.credentials else None
    return credentials.GatewayKeys(options.api_key_file, published)


def _tls(options: GatewayOptions) -> tuple[Path | None, Path | None]:
    """The paths (certificate, key) to read now; one file may hold both."""
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return None, None
    published = options.credentials / credentials.TLS_KEY if options.credentials else None
    key = credentials.newest(options.ssl_keyfile, published)
    return key if options.ssl_certfile == options.ssl_keyfile else options.ssl_certfile, key


def _refuse_exposure(options: GatewayOptions, sockets: list[socket.socket]) -> None:
    """Raises ConfigError if other machines could reach a socket without TLS or without keys."""
    missing = [flag for flag, given in ((msg("--ssl-certfile and --ssl-keyfile"), options.ssl_certfile),
                                        ("--api-key-file", options.api_key_file)) if given is None]
    for sock in sockets:
        if missing and not is_local(sock):
            raise ConfigError(
                msg("{sock} can be reached by other machines, which requires TLS and "
                    "API keys: {missing} missing.", sock=url_of(sock, tls=False).partition("://")[2],
                    missing=joined(missing)), "--host", msg("Listen on 127.0.0.1, or give both."))


def _serving(options: GatewayOptions, sockets: list[socket.socket], keys: credentials.GatewayKeys | None,
             fleet: Fleet) -> "Serving":
    from engine.server.gateway.app import create_app
    from engine.server.gateway.http_server import make_server
    from engine.server.gateway.main_loop import Serving

    certificate, key = _tls(options)
    app = create_app(fleet.models, auth=keys, limits=options.limits, allowed_origins=options.allowed_origins,
                     broken=fleet.broken, traces_endpoint=options.otlp_traces_endpoint)
    server = make_server(
        app, options.limits, access_log=options.access_log, shutdown_timeout=options.shutdown_timeout,
        ssl_certfile=certificate, ssl_keyfile=key)
    server.gateway = fleet.gateway = gateway = app.state.gateway
    return Serving(
        "atoll gateway", log, server, sockets, options.shutdown_timeout,
        lambda notifier: _report(server, notifier, options, sockets, gateway), fleet=fleet,
        reload=lambda: _reload(options, server.config.ssl, keys),
    )


def _reload(options: GatewayOptions, context: ssl.SSLContext | None, keys: credentials.GatewayKeys | None) -> None:
    """On SIGHUP: read certificate and keys again, for new connections. If one cannot be used, the current one stays."""
    try:
        certificate, key = _tls(options)
        check_tls(certificate, key)  # in a separate context: a mismatched pair must not get into the live one
        if context is not None and certificate is not None:
            context.load_cert_chain(certificate, key, password=lambda: "")
    except (ConfigError, OSError) as error:
        log.error("reload: the certificate in use stays: %s", error)
    if keys is not None:
        keys.check("")  # reads the file if it changed
    log.info("reloaded certificate and keys")


def _summary(gateway: Gateway) -> str:
    """One line for `systemctl status`: each engine once."""
    words = []
    for model in {id(model): model for model in gateway.models.values()}.values():
        for replica in model.replicas:
            client = replica.client
            state = client.state if client.state != "ready" or client.healthy() else "stalled"
            name = model.name if client is model.client else replica.name
            words.append(f"{name} {client.progress or _STATES.get(state, state)}")
    return "; ".join([*words, *(f"{name} not served" for name in gateway.broken)])


async def _report(server: "HttpServer", notifier: Notifier, options: GatewayOptions,
                  sockets: list[socket.socket], gateway: Gateway) -> None:
    """Report readiness to systemd as soon as the port answers, whatever the engines' states; then feed the watchdog,
    which shows that this event loop runs."""
    while not server.started:
        await asyncio.sleep(0.02)
    urls = [f"{url_of(sock, tls=options.ssl_certfile is not None)}/v1" for sock in sockets]
    said = _summary(gateway)
    notifier.ready(said)
    log.info("ready", extra={"fields": {"urls": urls, "models": list(gateway.models)}})
    while True:
        notifier.watchdog()
        await asyncio.sleep(STATUS_SECONDS)
        if (now := _summary(gateway)) != said:
            said = now
            notifier.status(said)
            log.info("engines: %s", said)
